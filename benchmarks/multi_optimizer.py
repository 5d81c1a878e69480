"""Times a step of a MultiOptimizer of three optimizers, compared with one optimizer over the same tensors.

Both update the same weights by the same gradients, a step each in turns, in one process: neither a machine whose speed
varies nor the place of tensors in memory favours one. Half of the pairs are made in the other order, as states have a
place, too. The ratio is the median over all turns. Three AdamWs do the work of one. Three different rules are compared
with the sum of what each takes alone.

    python benchmarks/multi_optimizer.py                  GPT-2 small
    python benchmarks/multi_optimizer.py --tensors small  400 tensors of 1,000 elements
"""

import argparse
import gc
import statistics
import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from step_cpu import TENSORS

from ms_optim import AdamW, Lamb, Lion, MultiOptimizer


def tensors(shapes):
    """Return parameters and gradients of numbered shapes."""
    rng = np.random.default_rng(0)
    params = [Parameter(Tensor(rng.standard_normal(shape, np.float32)), name=f"w{i}") for i, shape in shapes]
    return params, tuple(Tensor(rng.standard_normal(shape, np.float32)) for _, shape in shapes)


def thirds(shapes):
    """Return the shapes, numbered, in three parts of about the same number of elements."""
    numbered, sizes = list(enumerate(shapes)), np.cumsum([np.prod(shape) for shape in shapes])
    place = np.minimum(2, 3 * (sizes - 1) // sizes[-1]).astype(int)
    return [[one for one, k in zip(numbered, place) if k == part] for part in range(3)]


def seconds(pairs):
    """Return the seconds of a step of some optimizers, one after the other."""
    start = time.perf_counter()
    for optimizer, gradients in pairs:
        optimizer(gradients)
    return time.perf_counter() - start


def compare(name, make_one, make_several, turns):
    """Print how long several take, compared with one, in turns."""
    times = []
    for order in ((0, 1), (1, 0)):
        made = {k: (make_one, make_several)[k]() for k in order}
        for pairs in made.values():
            seconds(pairs)
        times += [(seconds(made[0]), seconds(made[1])) for _ in range(turns)]
        del made
        gc.collect()
    ratio = statistics.median(several / one for one, several in times)
    one, several = (statistics.median(column) * 1e3 for column in zip(*times))
    print(f"{name}: {several:.1f} ms, alone {one:.1f} ms, ratio {ratio:.3f}", flush=True)


def main():
    """Compare with and without clipping, and three rules, in PyNative mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", choices=TENSORS, default="gpt2-small", help="tensors to update")
    parser.add_argument("--turns", type=int, default=25, help="number of turns of a pair")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    made = [tensors(part) for part in thirds(TENSORS[arguments.tensors][0])]
    params, gradients = ([x for part in parts for x in part] for parts in zip(*made))
    settings: dict[str, Any] = {"learning_rate": 1e-4, "weight_decay": 0.01}

    def several(rules, clip=None):
        optimizers = [rule(own, **settings) for rule, (own, _) in zip(rules, made)]
        return [(MultiOptimizer(optimizers, clip), tuple(gradients))]

    for clip in (None, 1.0):
        compare(
            "three AdamWs" + (" with grad_clip_norm" if clip else ""),
            lambda clip=clip: [(AdamW(params, grad_clip_norm=clip, **settings), tuple(gradients))],
            lambda clip=clip: several([AdamW] * 3, clip),
            arguments.turns,
        )
    rules = (AdamW, Lion, Lamb)
    alone = [(rule, own, grads) for rule, (own, grads) in zip(rules, made)]
    compare(
        "AdamW, Lion and Lamb",
        lambda: [(rule(own, **settings), grads) for rule, own, grads in alone],
        lambda: several(rules),
        arguments.turns,
    )


if __name__ == "__main__":
    main()
