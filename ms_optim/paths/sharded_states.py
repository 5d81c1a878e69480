"""The step with states sharded over workers: each updates its share, then all gather the weights.

Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
<https://arxiv.org/abs/1910.02054>`_ (2020), stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .. import _abi, _kernels
from .._kernels import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from .fused import LaunchCell, launch_constants, launch_layout, no_sums, shared_flags
from .slices import packed, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._held import Held
    from .._layout import Layout, Settings
    from .._shares import Shares

# What a worker sends at once. It bounds the memory that a step needs besides: as much for each worker.
WINDOW_BYTES = 16 << 20


def pieces(
    ranges: NDArray[np.int64], bytes_each: Sequence[int], begin: int, end: int
) -> list[tuple[int, int, int, int]]:
    """Return the pieces of weights in a window of a worker's wire, which is its ranges laid end to end.

    Args:
        ranges: The worker's ranges, of shape (tensors, 2).
        bytes_each: Bytes of an element of each tensor.
        begin: Where the window begins in the wire, in bytes.
        end: Where it ends.

    Returns:
        For each piece its tensor, the first byte in that, the number of bytes and the place in the window.
    """
    found, place = [], 0
    for i, ((first, last), size) in enumerate(zip(ranges.tolist(), bytes_each)):
        low, high = max(begin, place), min(end, place + (last - first) * size)
        if low < high:
            found.append((i, first * size + low - place, high - low, low - begin))
        place += (last - first) * size
    return found


class Window(nn.Cell):
    """Sends a window of this worker's weights, and writes those of the others where they belong."""

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
        # Packing only reads the weights, but no earlier than they are written: as if it wrote them.
        self.pack = _kernels.operator("pack", "CPU", (False,) + (True,) * n, [((words,), ms.int32)])
        self.unpack = _kernels.operator("unpack", "CPU", (False,) * 2 + (True,) * n, [((1,), ms.int32)])
        self.all_gather = these.all_gather()

    def construct(self, weights):
        """Gather the weights of the window."""
        return self.unpack(self.received, self.all_gather(self.pack(self.sent, *weights)), *weights)


def windows(shares: Shares, bytes_each: Sequence[int]) -> nn.CellList:
    """Return the windows, as few as may be, in which the weights travel."""
    longest = int(((shares.ranges[:, :, 1] - shares.ranges[:, :, 0]) * np.array(bytes_each)).sum(axis=1).max())
    begins = range(0, longest, WINDOW_BYTES)
    return nn.CellList([Window(shares, bytes_each, k, min(longest, k + WINDOW_BYTES)) for k in begins])


class ShardedStatesPath(nn.Cell):
    """The step with states sharded over workers, in launches of a fused kernel.

    1. Norms of whole gradients, which every worker has, if anything depends on them.
    2. New states of this worker's share; where each element is for itself, its new weights too.
    3. What was summed up is added up over the workers, in their order.
    4. New weights of this worker's share, unless made in 2; statistics of all tensors; the step is counted.
    5. The new weights are gathered.

    Args:
        layout: What is known of the parameters.
        held: What the optimizer holds: states of this worker's share.
        rule: The optimizer's rule.
        options: Its shared arguments.
        settings: What all paths are told.
        normalizes: Whether each gradient is divided by its norm.
        shares: Which part of the states each worker keeps.
    """

    addresses = None

    def __init__(self, layout: Layout, held: Held, rule, options, settings: Settings, normalizes: bool, shares: Shares):
        super().__init__(auto_prefix=False)
        n, columns = layout.count, Tensor(launch_layout(layout))
        self.worker_count, self.gather = shares.workers.count, shares.workers.all_gather()
        self.constants, self.no_sums = launch_constants(rule, settings), no_sums()
        self.looks_first = normalizes or options.grad_clip_norm is not None or options.skip_nonfinite
        flags = shared_flags(layout, held, rule, options)

        def launch(stages, ranges, weights, states):
            """Make a launch that takes all gradients; ranges, weights and states make it one of this worker's share."""
            counts = (len(held.counters), len(weights), n, len(states))
            written = _abi.written(*counts, ranges=len(ranges) > 0)
            kernel = _kernels.operator(rule.name, settings.device, written, [((n, len(_kernels.SUMS)), ms.float64)])
            asked = _kernels.flags(stages, flags + _kernels.SHARES * len(ranges), rule.flags)
            return LaunchCell(kernel, asked, columns, (*ranges, *held.counters), weights, states)

        ranges, weights, states = Tensor(shares.own), held.parameters, held.of_tensors
        self.look = launch(GRADIENT_STAGE, (), (), ())
        # In one launch with the moments, the gradient stage does nothing more; without, sums would be asked for.
        moments = MOMENTS_STAGE + (0 if self.looks_first else GRADIENT_STAGE)
        moments += 0 if rule.is_layerwise else APPLY_STAGE
        self.move = launch(moments, (ranges,), weights, states)
        # Where the weights have moved already, it reports and counts.
        ranges, states = (ranges, states) if rule.is_layerwise else (Tensor(shares.own * 0), ())
        self.finish = launch(APPLY_STAGE + COMMIT_STAGE, (ranges,), weights, states)
        self.windows = windows(shares, [p.itemsize for p in held.parameters])
        # The optimizer holds these already, and Cell would list them twice.
        object.__setattr__(self, "weights", held.parameters)

    def construct(self, rates, gradients):
        """Take a step; return what the last window returns, once it is taken."""
        sums = self.no_sums
        if self.looks_first:
            sums = self.look(self.constants, rates, sums, gradients)
        # All gradients, in this order on all workers: in a graph, what reduced them would else not be.
        parts = self.move(self.constants, rates, sums, gradients)
        total = self.added_up(parts)
        if self.looks_first:
            # All workers have these sums already, to the bit as without shares.
            total = ops.concat((sums[:, :1], total[:, 1:]), 1)
        done = self.finish(self.constants, rates, total, gradients)
        for window in self.windows:
            done = window(self.weights)
        return done

    def added_up(self, parts):
        """Add up a table of sums over the workers, in their order."""
        pairs = self.gather(packed(parts))
        total = unpacked(pairs[0], pairs[1], parts.dtype)
        for k in range(1, self.worker_count):
            total = total + unpacked(pairs[2 * k], pairs[2 * k + 1], parts.dtype)
        return total
