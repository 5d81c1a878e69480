"""The step with states sharded over workers: each worker updates its share, then all gather the weights.

Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
<https://arxiv.org/abs/1910.02054>`_ (2020), stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn

from ...kernels import table as kernels
from ...unregistered import unregistered
from ..operators.gathered_weights import SumOverWorkers
from .step import FusedPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...states.shares import Shares
    from ..parts import Parts

# Bytes that a worker sends at once. They bound the additional memory of a step, which is this number per worker.
WINDOW_BYTES = 16 << 20


def pieces(
    ranges: NDArray[np.int64], bytes_each: Sequence[int], begin: int, end: int
) -> list[tuple[int, int, int, int]]:
    """Return the pieces of weights in a window of a worker's send buffer, which is its ranges concatenated.

    Args:
        ranges: The worker's ranges, of shape (tensors, 2).
        bytes_each: Bytes of an element of each tensor.
        begin: The begin of the window in the buffer, in bytes.
        end: The end of the window.

    Returns:
        For each piece: its tensor, its first byte in the tensor, its number of bytes and its position in the window.
    """
    found, place = [], 0
    for i, ((first, last), size) in enumerate(zip(ranges.tolist(), bytes_each)):
        low, high = max(begin, place), min(end, place + (last - first) * size)
        if low < high:
            found.append((i, first * size + low - place, high - low, low - begin))
        place += (last - first) * size
    return found


class Window(nn.Cell):
    """Sends a window of this worker's weights, and writes the received weights of the other workers."""

    def __init__(self, shares: Shares, bytes_each, begin, end):
        super().__init__(auto_prefix=False)
        n, these, words = len(bytes_each), shares.workers, -(-(end - begin) // 4)
        sent = pieces(shares.own, bytes_each, begin, end)
        received = [
            (i, first, size, 4 * words * rank + place)
            for rank in range(these.count)
            if rank != these.rank
            for i, first, size, place in pieces(shares.ranges[rank], bytes_each, begin, end)
        ]
        self.sent, self.received = (
            Tensor(np.array(x, np.int64).reshape(-1, 4)) for x in (sent or [(0,) * 4], received)
        )
        # Packing only reads the weights; it is declared as a write so that it does not run before they are written.
        self.pack = kernels.operator("pack", "CPU", (False,) + (True,) * n, [((words,), ms.int32)])
        self.unpack = kernels.operator("unpack", "CPU", (False,) * 2 + (True,) * n, [((1,), ms.int32)])
        self.all_gather = these.all_gather()

    def construct(self, weights):
        """Gather the weights of the window."""
        return self.unpack(self.received, self.all_gather(self.pack(self.sent, *weights)), *weights)


def windows(shares: Shares, bytes_each: Sequence[int]) -> nn.CellList:
    """Return the smallest number of windows in which the weights can be sent."""
    longest = int(((shares.ranges[:, :, 1] - shares.ranges[:, :, 0]) * np.array(bytes_each)).sum(axis=1).max())
    begins = range(0, longest, WINDOW_BYTES)
    return nn.CellList([Window(shares, bytes_each, k, min(longest, k + WINDOW_BYTES)) for k in begins])


class GatheredWeights(nn.Cell):
    """Gathers the weights of all shares on every worker.

    Args:
        weights: The weights.
        shares: Which part of them each worker has.
    """

    def __init__(self, weights: ParameterTuple, shares: Shares):
        super().__init__(auto_prefix=False)
        self.windows = windows(shares, [p.itemsize for p in weights])
        unregistered(self, weights=weights)

    def construct(self):
        """Gather the weights, window by window; return the result of the last window."""
        done = None
        for window in self.windows:
            done = window(self.weights)
        return done


class ShardedStatesPath(nn.Cell):
    """The step with states sharded over workers: a path on this worker's share, then the new weights are gathered.

    Every worker has whole gradients. Values that depend only on gradients, such as norms for clipping, are bitwise
    equal to those without sharding.

    Args:
        parts: The parts that every path is built from; the states are those of this worker's share.
    """

    addresses = None

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        shares = parts.shares
        assert shares is not None
        self.path = FusedPath(parts, SumOverWorkers(shares.workers), shares.own)
        self.gathered = GatheredWeights(parts.held.parameters, shares)

    def construct(self, rates, gradients):
        """Take a step; return the result of the last window, once the step is done."""
        self.path(rates, gradients)
        return self.gathered()
