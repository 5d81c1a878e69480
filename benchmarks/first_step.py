"""Measures the compile time of an optimizer's first step in Graph mode, with many parameters.

    python benchmarks/first_step.py --parameters 500 2000 5000
    python benchmarks/first_step.py --parameters 500 --backend composite --rows AdamW nn.AdamWeightDecay
    python benchmarks/first_step.py --parameters 12 --shapes 12 --backend composite

Parameters have 2 elements, 2 by 2, 4, 5, ... in turn, so that the step itself takes almost no time. Each row runs
in a separate process. Times are CPU time in seconds.
"""

import argparse
import resource
import subprocess
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import ms_optim

ROWS = {
    "nn.AdamWeightDecay": lambda params, backend: nn.AdamWeightDecay(params, weight_decay=0.1),
    "AdamW": lambda params, backend: ms_optim.AdamW(params, weight_decay=0.1, backend=backend),
    "Lamb": lambda params, backend: ms_optim.Lamb(params, 1e-3, weight_decay=0.1, backend=backend),
    "LANS": lambda params, backend: ms_optim.LANS(params, weight_decay=0.1, backend=backend),
    "AdamOffload": lambda params, backend: ms_optim.AdamOffload(params, weight_decay=0.1, backend=backend),
    "DGCMomentum": lambda params, backend: ms_optim.DGCMomentum(params, 0.1, 0.9, 0, weight_decay=0.1, backend=backend),
}


class Step(nn.Cell):
    """Calls the optimizer from inside a graph, as a training step does."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        """Take one step."""
        return self.optimizer(gradients)


def processor_seconds():
    """Return the CPU time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(row, count, shapes, backend):
    """Print the time of the first step, and of the second one."""
    ms.set_context(mode=ms.GRAPH_MODE)
    shape_of = [(2,), (2, 2), *((2 + k,) for k in range(2, shapes))][:shapes]
    params = [Parameter(Tensor(np.full(shape_of[k % shapes], k + 1.0, np.float32)), name=f"w{k}") for k in range(count)]
    gradients = [Tensor(np.ones(p.shape, np.float32)) for p in params]
    step = Step(ROWS[row](params, backend))
    begin = processor_seconds()
    step(*gradients)
    params[0].asnumpy()
    first, begin = processor_seconds() - begin, time.perf_counter()
    step(*gradients)
    params[0].asnumpy()
    print(f"| {row} | {count} | {first:.1f} | {1e3 * (time.perf_counter() - begin):.0f} |", flush=True)


def main():
    """Measure each row in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[500])
    parser.add_argument("--shapes", type=int, default=2, help="how many shapes they have")
    parser.add_argument("--backend", choices=["auto", "aot", "composite"], default="auto")
    parser.add_argument("--rows", choices=list(ROWS), nargs="+", default=list(ROWS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.rows[0], given.parameters[0], given.shapes, given.backend)
        return
    print(f"| backend {given.backend} | parameters | first step, s of processor | second step, ms |\n|---|---|---|---|")
    for count in given.parameters:
        for row in given.rows:
            command = [sys.executable, __file__, "--here", "--rows", row, "--parameters", str(count)]
            command += ["--shapes", str(given.shapes), "--backend", given.backend]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
