"""A run: steps with a schedule, and the loss at the end of each of several lengths."""

import time
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

WARM_UP, FALL = 0.05, 0.2  # parts of the length: the rate rises linearly at first, and falls linearly to 0 at the end


def train(task: Any, optimizer: Any, rate: float, seed: int, lengths: Sequence[int], warm_up: int) -> dict[str, Any]:
    """Train once; return the loss at the end of each length, and the milliseconds of the processor that a step takes.

    The rate rises, stays, and falls. Runs of all lengths have the same first steps, so they are run once: where the
    rate of a length begins to fall, weights and states are kept, and restored when its end is measured. An optimizer
    that averages its iterates has no fall: its loss is that of the average.

    Args:
        task: The task, whose weights are reset.
        optimizer: An optimizer of its parameters.
        rate: The largest learning rate.
        seed: Of the first weights and of the batches.
        lengths: Numbers of steps, ascending.
        warm_up: Steps until the rate is the largest.
    """
    order = [index_of(task.params, p) for p in optimizer.parameters]
    seconds: tuple[list[float], list[float]] = ([], [])
    averages = optimizer.averages_iterates

    def advance(step: int, factor: float) -> None:
        rising = 1.0 if averages else min(1.0, (step + 1) / warm_up)
        for group in optimizer.param_groups:
            group["lr"] = rate * rising * factor
        begin = time.process_time()
        gradients = task.gradients(seed, step)
        middle = time.process_time()
        optimizer(tuple(gradients[i] for i in order))
        seconds[0].append(middle - begin)
        seconds[1].append(time.process_time() - middle)

    losses, done = [], 0
    for length in lengths:
        fall = 0 if averages else max(1, round(FALL * length))
        for step in range(done, length - fall):
            advance(step, 1.0)
        done = max(done, length - fall)
        kept = None if length == lengths[-1] or not fall else (values_of(task.params), optimizer.state_dict())
        for i in range(fall):
            advance(length - fall + i, (fall - i) / (fall + 1))
        losses.append(loss_of(task, optimizer))
        if kept:
            assign(task.params, kept[0])
            optimizer.load_state_dict(kept[1])
    # The first steps compile.
    gradient, step = (1e3 * float(np.median(part[2:] or part)) for part in seconds)
    return {"losses": losses, "gradient_ms": round(gradient, 3), "step_ms": round(step, 4)}


def loss_of(task, optimizer):
    """Return the loss, of the average of the iterates if the optimizer makes one; infinity if it is not finite."""
    if optimizer.averages_iterates:
        with optimizer.averaged():
            loss = task.loss()
    else:
        loss = task.loss()
    return loss if np.isfinite(loss) else float("inf")


def index_of(params, wanted):
    """Return the place of a parameter."""
    return next(i for i, p in enumerate(params) if p is wanted)


def values_of(params):
    """Return copies of the values of parameters."""
    return [p.asnumpy().copy() for p in params]


def assign(params, values):
    """Write values into parameters: after p.set_data compiled gradients would continue to use the old weights."""
    for p, value in zip(params, values):
        ops.assign(p, ms.Tensor(value, p.dtype))
