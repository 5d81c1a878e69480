"""Measures the cost of a reading of OptimizerMonitor relative to the optimizer's step; a training step takes longer.

python benchmarks/monitor.py
"""

import argparse
import contextlib
import io
import pathlib
import tempfile
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from rich.console import Console
from rich.table import Table
from step_cpu import TENSORS

import ms_optim

EVERY = 100
OPTIMIZERS = {
    "AdamW": ms_optim.AdamW,
    "Lamb": ms_optim.Lamb,
    "DGCMomentum": lambda *rates: ms_optim.DGCMomentum(*rates, momentum=0.9, rampup_begin_step=0),
}


def seconds(function, times):
    """Return the shortest time that a function took."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure(optimizer, given, folder, tensorboard, times):
    """Return the seconds of a step, and of a reading."""

    def step():
        optimizer(given)
        optimizer.global_step.asnumpy()

    monitor = ms_optim.OptimizerMonitor(
        every=1, csv=folder / "run.csv", tensorboard=folder / "board" if tensorboard else None
    )
    step()

    def read():
        # The same step again is no row of the file.
        monitor._read_at = -1
        monitor.step(optimizer)

    with monitor, contextlib.redirect_stdout(io.StringIO()):
        read()
        return seconds(step, times), seconds(read, times)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", choices=list(TENSORS), default="gpt2-small")
    parser.add_argument("--mode", choices=["graph", "pynative"], default="pynative")
    parser.add_argument("--times", type=int, default=20, help="number of timings of each; the shortest is used")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if arguments.mode == "graph" else ms.PYNATIVE_MODE)
    shapes, _ = TENSORS[arguments.tensors]
    rng = np.random.default_rng(0)
    given = tuple(Tensor(rng.standard_normal(s, np.float32)) for s in shapes)
    table = Table("Optimizer", "Written", "Step", "Reading", f"Part of a step, with every={EVERY}")
    for name, make in OPTIMIZERS.items():
        for written, tensorboard in (("line, CSV", False), ("line, CSV, TensorBoard", True)):
            params = [Parameter(Tensor(rng.standard_normal(s, np.float32)), name=f"w{i}") for i, s in enumerate(shapes)]
            optimizer = make(params, nn.CosineDecayLR(0.0, 1e-3, 10_000))
            with tempfile.TemporaryDirectory() as folder:
                step, reading = measure(optimizer, given, pathlib.Path(folder), tensorboard, arguments.times)
            part = reading / EVERY / step
            table.add_row(name, written, f"{1e3 * step:.1f} ms", f"{1e3 * reading:.1f} ms", f"{part:.2%}")
    console = Console()
    console.print(f"{len(shapes)} tensors, {sum(int(np.prod(s)) for s in shapes) / 1e6:.1f}M elements")
    console.print(table)


if __name__ == "__main__":
    main()
