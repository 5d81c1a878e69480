"""Times a step of a MultiOptimizer of three optimizers, compared with one optimizer over the same tensors.

Both take a few steps each in turns, in one process, so that a machine whose speed varies favours neither; the ratio is
the median over the turns. Three AdamWs do the work of one. Three different rules are compared with the sum of what each
takes alone.

    python benchmarks/multi_optimizer.py                  GPT-2 small
    python benchmarks/multi_optimizer.py --tensors small  400 tensors of 1,000 elements
"""

import argparse
import statistics
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from step_cpu import TENSORS

from ms_optim import AdamW, Lamb, Lion, MultiOptimizer


def tensors(shapes, kind):
    """Return parameters and gradients of these shapes."""
    rng = np.random.default_rng(0)
    params = [Parameter(Tensor(rng.standard_normal(shape, np.float32)), name=f"{kind}{i}") for i, shape in shapes]
    return params, tuple(Tensor(rng.standard_normal(shape, np.float32)) for _, shape in shapes)


def thirds(shapes):
    """Return the shapes, numbered, in three parts of about the same number of elements."""
    numbered, sizes = list(enumerate(shapes)), np.cumsum([np.prod(shape) for shape in shapes])
    place = np.minimum(2, 3 * (sizes - 1) // sizes[-1]).astype(int)
    return [[one for one, k in zip(numbered, place) if k == part] for part in range(3)]


def joint(rules, parts, clip):
    """Return a MultiOptimizer over the parts, and its gradients."""
    made = [tensors(part, "joint.") for part in parts]
    optimizers = [rule(params, 1e-4, weight_decay=0.01) for rule, (params, _) in zip(rules, made)]
    return MultiOptimizer(optimizers, clip), sum((gradients for _, gradients in made), ())


def seconds(pairs, steps):
    """Return the seconds of a step of some optimizers, one after the other."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        for optimizer, gradients in pairs:
            optimizer(gradients)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def compare(name, one, several, turns, steps):
    """Print how long several take, compared with one, in turns."""
    for pairs in (one, several):
        seconds(pairs, 2)
    times = [(seconds(one, steps), seconds(several, steps)) for _ in range(turns)]
    ratio = statistics.median(b / a for a, b in times)
    first, second = (statistics.median(column) * 1e3 for column in zip(*times))
    print(f"{name}: {second:.1f} ms, alone {first:.1f} ms, ratio {ratio:.3f}", flush=True)


def main():
    """Compare with and without clipping, in PyNative mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", choices=TENSORS, default="gpt2-small", help="tensors to update")
    parser.add_argument("--turns", type=int, default=15, help="number of turns")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    parts = thirds(TENSORS[arguments.tensors][0])
    counts = arguments.turns, arguments.steps
    for clip in (None, 1.0):
        words = "" if clip is None else " with grad_clip_norm"
        params, gradients = tensors([one for part in parts for one in part], "one.")
        one = [(AdamW(params, 1e-4, weight_decay=0.01, grad_clip_norm=clip), gradients)]
        compare(f"three AdamWs{words}", one, [joint([AdamW] * 3, parts, clip)], *counts)
    made = [tensors(part, f"{k}.") for k, part in enumerate(parts)]
    rules = (AdamW, Lion, Lamb)
    alone = [(rule(params, 1e-4, weight_decay=0.01), gradients) for rule, (params, gradients) in zip(rules, made)]
    compare("AdamW, Lion and Lamb", alone, [joint(rules, parts, None)], *counts)


if __name__ == "__main__":
    main()
