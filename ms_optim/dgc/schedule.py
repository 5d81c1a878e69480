"""The schedule of a compressed optimizer: how many elements of each tensor workers send in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..kernels.interface import MOST_ELEMENTS
from .wire import Compression, ramp, sent, settings_number

if TYPE_CHECKING:
    from ..states.layout import Layout
    from ..workers.transport import Workers


class Schedule:
    """How many elements of each tensor a worker sends in each period of training.

    Args:
        layout: The properties of the parameters.
        rule: The optimizer's rule.
        options: Its shared arguments.
        workers: The workers.
        compression: The settings of the compression.

    Attributes:
        workers: The workers.
        wire_dtype: The dtype in which values of compressed tensors are sent.
        counts: The number of elements of each tensor that are sent, 0 for all: int32 of shape (periods, tensors).
        ends: The first step of each period except the first.
        settings: A number that only workers of the same settings share.
        own_worker: Which worker this is: int32 of shape (workers,), 1 at its index.

    Raises:
        ValueError: If a parameter has too many elements.
    """

    def __init__(self, layout: Layout, rule, options: Any, workers: Workers, compression: Compression):
        sizes = layout.sizes
        for name, size in zip(layout.names, sizes):
            if size > MOST_ELEMENTS:
                raise ValueError(
                    f"For '{layout.optimizer}', the parameter '{name}' must have at most {MOST_ELEMENTS} elements, "
                    f"but has {size}."
                )
        begin, length, sparsity, least, self.wire_dtype = compression
        periods = ramp(begin, length, sparsity)
        self.workers = workers
        self.counts = np.array([[sent(part, size, least) for size in sizes] for _, part in periods], np.int32)
        self.ends = tuple(begin for begin, _ in periods[1:])
        known = (rule.name, rule.constants, rule.flags, options.grad_clip_norm, sizes, self.counts.tolist())
        self.settings = settings_number(*known, self.ends)
        self.own_worker = np.eye(workers.count, dtype=np.int32)[workers.rank]

    def place(self, step: Parameter) -> int:
        """Return the period of training that a step is in."""
        at = int(step.asnumpy()[0])
        return sum(at >= end for end in self.ends)


def place_of(step, begins, has_periods):
    """Return the period of training that a step is in, in a graph: a 0-dimensional int32 tensor."""
    if not has_periods:
        return F.cast(step, mstype.int32).reshape(()) * 0
    return F.cast(step >= begins, mstype.int32).sum()


def begins(schedule: Schedule) -> Tensor:
    """Return the first steps of periods, in the form that :func:`place_of` takes."""
    return Tensor(np.array(schedule.ends or (0,), np.int32))
