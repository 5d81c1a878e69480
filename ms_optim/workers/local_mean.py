"""The mean of gradients over the processes of one host, in one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..paths.operators.selection import in_parts
from ..rules.arithmetic import normal
from ..unregistered import unregistered

if TYPE_CHECKING:
    from .transport import Workers


def ranges_of(sizes):
    """Return the begin and end of each tensor in their concatenation, in parts, for :func:`cut_up`."""
    ends = tuple(np.cumsum(sizes).tolist())
    return in_parts(tuple(zip((0, *ends), ends)))


def cut_up(flat, ranges_in_parts):
    """Return the flat tensors from their concatenation."""
    tensors = ()
    for ranges in ranges_in_parts:
        tensors += _cut_part(flat, ranges)
    return tensors


def _cut_part(flat, ranges):
    tensors = ()
    for begin, end in ranges:
        tensors += (flat[begin:end],)
    return tensors


def like(tensor, other):
    """Return a tensor in the shape of another."""
    return tensor.reshape(F.shape(other))


def _flattened(gradient):
    return normal(F.cast(gradient, mstype.float32)).reshape(-1)


class LocalMean(nn.Cell):
    """Averages gradients over the processes of this host, if it has several.

    Args:
        workers: The workers.
        sizes: The tensors' elements.
        parameters: The parameters.
    """

    def __init__(self, workers: Workers, sizes, parameters):
        super().__init__(auto_prefix=False)
        self.per_host, self.each = workers.local, C.Map()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, workers.local_group) if self.per_host > 1 else None
        self.ranges = ranges_of(sizes)
        unregistered(self, parameters=parameters)

    def construct(self, gradients):
        """Return the mean gradients."""
        if self.all_reduce is None:
            return gradients
        flat = ops.concat(self.each(_flattened, gradients))
        means = cut_up(self.all_reduce(flat) / self.per_host, self.ranges)
        return self.each(like, means, self.parameters)
