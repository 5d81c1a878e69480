"""Times a step of Sinkhorn over a vocabulary's matrix, compared with AdamW, and with loops that only pass over memory.

    python benchmarks/sinkhorn_passes.py                       50,257 by 768, on all threads
    OMP_NUM_THREADS=1 python benchmarks/sinkhorn_passes.py     on one thread

Sinkhorn reads and writes 48 bytes of an element in six passes: the first reads the gradient and updates the momentum,
four read, and the last reads the gradient and updates the momentum and the weight. AdamW's 28 are one pass, which reads
the gradient and updates two moments and the weight. With ``skip_nonfinite``, as Sinkhorn has it by default, both read
the gradients once before; so they do if gradients are clipped. Each is measured without and with it.

The loops (streams.cc, compiled with ``c++``) make the same passes, there and back as the kernels do, over the same
tensors, and compute next to nothing.

All are measured in each turn, one behind the other, as the memory of a shared machine is faster at one time than at
another; the ratios are medians of the turns' ratios.
"""

import argparse
import statistics

import numpy as np
from mindspore import Parameter, Tensor
from streams import passing_over, timed

from ms_optim import AdamW, Sinkhorn


def sinkhorn(gradient, weight, momentum):
    """Return the passes of Sinkhorn over its tensors."""
    first = passing_over([gradient, momentum], 1, 1, False)
    middle = passing_over([momentum], 1, 0, False)
    return [first, *4 * [middle], passing_over([gradient, weight, momentum], 1, 2, False)]


def adamw(gradient, weight, *moments):
    """Return the pass of AdamW over its tensors."""
    return [passing_over([gradient, weight, *moments], 1, 3, False)]


def there_and_back(passes):
    """Make passes in alternate directions."""
    for k, run in enumerate(passes):
        run(backwards=k % 2 == 1)


def steps_of(optimizer_class, passes_over, shape, skips):
    """Return a function that makes a step, and one that passes over the same tensors."""
    rng = np.random.default_rng(0)
    weight = Parameter(Tensor(rng.standard_normal(shape, np.float32)), name="embedding")
    gradient = Tensor(rng.random(shape, np.float32))  # not negative: a loop that updates a second moment keeps its sign
    optimizer = optimizer_class([weight], skip_nonfinite=skips)
    optimizer((gradient,))  # before the first step, states have no memory
    states = [state for state in optimizer.get_parameters() if state.shape == shape and state is not weight]
    passes = [passing_over([gradient], 1, 0, False)] * skips + passes_over(gradient, weight, *states)
    return lambda: optimizer((gradient,)), lambda: there_and_back(passes)


def measure(shape, skips, turns):
    """Measure, and print a line for each."""
    work = {}
    for name, optimizer_class, passes in [("AdamW", AdamW, adamw), ("Sinkhorn", Sinkhorn, sinkhorn)]:
        work[name], work[f"{name}'s passes alone"] = steps_of(optimizer_class, passes, shape, skips)
    times = {name: [] for name in work}
    for turn in range(turns + 2):
        for name, run in work.items():
            measured = timed(run)
            if turn >= 2:  # the first ones touch memory for the first time
                times[name].append(measured)
    for of in ("", "'s passes alone"):
        for name in (f"AdamW{of}", f"Sinkhorn{of}"):
            pairs = zip(times[name], times[f"AdamW{of}"], strict=True)
            ratio = statistics.median(own / adamw for own, adamw in pairs)
            print(f"  {name:24} {1e3 * statistics.median(times[name]):7.1f} ms   {ratio:.2f}")


def main():
    """Measure steps that check gradients, and those that do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50257)
    parser.add_argument("--columns", type=int, default=768)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    shape = (arguments.rows, arguments.columns)
    for skips in (False, True):
        print(f"skip_nonfinite={skips}")
        measure(shape, skips, arguments.turns)


if __name__ == "__main__":
    main()
