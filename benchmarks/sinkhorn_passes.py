"""Times a step of Sinkhorn over a vocabulary's matrix, compared with AdamW, and with loops that only pass over memory.

    python benchmarks/sinkhorn_passes.py                       50,257 by 768, on all threads
    OMP_NUM_THREADS=1 python benchmarks/sinkhorn_passes.py     on one thread

Sinkhorn reads and writes 48 bytes of an element in six passes: the first reads the gradient and updates the momentum,
four read, and the last reads the gradient and updates the momentum and the weight. AdamW's 28 are one pass, which reads
the gradient and updates two moments and the weight. The loops (streams.cc, compiled with ``c++``) make the same passes
over arrays of NumPy, which are on huge pages where the system has them.

All are measured in each turn, one behind the other, as the memory of a shared machine is faster at one time than at
another; the ratios are medians of the turns' ratios.
"""

import argparse
import statistics

import numpy as np
from mindspore import Parameter, Tensor
from streams import passing, timed

from ms_optim import AdamW, Sinkhorn


def step_of(optimizer_class, shape):
    """Return a function that makes a step."""
    rng = np.random.default_rng(0)
    weight = Parameter(Tensor(rng.standard_normal(shape, np.float32)), name="embedding")
    gradients = (Tensor(rng.standard_normal(shape, np.float32)),)
    optimizer = optimizer_class([weight])
    return lambda: optimizer(gradients)


def main():
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50257)
    parser.add_argument("--columns", type=int, default=768)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    shape = (arguments.rows, arguments.columns)
    first, read, last, whole = (
        passing(read, updated, False, shape[0] * shape[1]) for read, updated in [(1, 1), (1, 0), (1, 2), (1, 3)]
    )

    def all_passes():
        first()
        for _ in range(4):
            read()
        last()

    work = {
        "AdamW": step_of(AdamW, shape),
        "Sinkhorn": step_of(Sinkhorn, shape),
        "Sinkhorn's passes alone": all_passes,
        "AdamW's pass alone": whole,
    }
    times = {name: [] for name in work}
    for turn in range(arguments.turns + 2):
        for name, run in work.items():
            measured = timed(run)
            if turn >= 2:  # the first ones touch memory for the first time
                times[name].append(measured)
    for name, measured in times.items():
        ratio = statistics.median(own / adamw for own, adamw in zip(measured, times["AdamW"], strict=True))
        print(f"{name:24} {1e3 * statistics.median(measured):7.1f} ms   {ratio:.2f} of AdamW")


if __name__ == "__main__":
    main()
