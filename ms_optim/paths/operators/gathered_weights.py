"""Sums and weights of sharded states, which workers exchange in MindSpore's operators.

Each worker has updated its share of the weights, and puts zeros in place of all others: their sum over the workers is
the new weights, since adding zeros rounds nothing. This needs no operator but AllReduce, for any share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import write
from ...unregistered import unregistered
from .selection import MOST_TURNS, chosen, picked
from .slices import WholeNorms, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...states.shares import Peers, Shares
    from ..parts import Parts

# Bytes that are exchanged at once: the additional memory of a step is a few times this, or the largest tensor.
GROUP_BYTES = 16 << 20


class SumOverWorkers(nn.Cell):
    """Sums a table of sums over the workers, in their order."""

    def __init__(self, workers: Peers):
        super().__init__(auto_prefix=False)
        self.worker_count, self.gather = workers.count, workers.all_gather()

    def construct(self, parts):
        """Return the sums of all workers from this worker's part of them."""
        pairs = self.gather(packed(parts).expand_dims(0))
        total = unpacked(pairs[0, 0], pairs[0, 1], parts.dtype)
        for k in range(1, self.worker_count):
            total = total + unpacked(pairs[k, 0], pairs[k, 1], parts.dtype)
        return total


def norms_of_parts(parts: Parts, dtype) -> WholeNorms | None:
    """Return what computes norms of whole tensors from those of the parts that processes update; None if these are all.

    Args:
        parts: The parts that every path is built from.
        dtype: The dtype in which squares are summed.
    """
    sums = [] if parts.shares is None else [SumOverWorkers(parts.shares.workers)]
    sums += [] if parts.slices is None else [parts.slices]
    return WholeNorms(nn.SequentialCell(*sums), dtype) if sums else None


def told_ratios(parts: Parts) -> Tensor | None:
    """Return 1 for each tensor whose trust ratio this process tells, else 0; None if every process knows all."""
    shares = parts.shares
    if shares is None:
        return None
    tells = (shares.own[:, 0] == 0) & (shares.own[:, 1] > 0)
    return Tensor(tells if parts.slices is None else tells & parts.slices.is_first, mstype.float32)


def groups_of(dtypes: Sequence[object], sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of the tensors that are exchanged together: of one dtype, in order, and of limited bytes."""
    most = max(GROUP_BYTES, math.ceil(4 * sum(sizes) / (MOST_TURNS - 4)))
    groups: dict[object, list[list[int]]] = {}
    for i, (dtype, size) in enumerate(zip(dtypes, sizes)):
        of_dtype = groups.setdefault(dtype, [[]])
        if of_dtype[-1] and 4 * (size + sum(sizes[k] for k in of_dtype[-1])) > most:
            of_dtype.append([])
        of_dtype[-1].append(i)
    return [group for of_dtype in groups.values() for group in of_dtype]


class WeightsByAllReduce(nn.Cell):
    """Gathers the weights of all shares on every worker.

    Args:
        weights: The weights.
        shares: Which part of them each worker has.
        device: The device of the weights.
    """

    def __init__(self, weights: ParameterTuple, shares: Shares, device: str):
        super().__init__(auto_prefix=False)
        groups = groups_of([p.dtype for p in weights], shares.sizes)
        self.places = tuple(chosen(group) for group in groups)
        self.sizes = tuple(shares.sizes)
        self.sizes_of_groups = tuple(tuple(shares.sizes[i] for i in group) for group in groups)
        self.ranges = tuple((int(begin), int(end)) for begin, end in shares.own)
        # On CPU, collectives know no numbers of 16 bits.
        self.dtypes = tuple(mstype.float32 if device == "CPU" else p.dtype for p in weights)
        self.group_count, self.each = len(groups), C.Map()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, shares.workers.group)
        of_groups = tuple(ParameterTuple([weights[i] for i in group]) for group in groups)
        unregistered(self, weights=weights, of_groups=of_groups)

    def construct(self):
        """Gather the weights; return the results of the writes."""
        return self.exchange(self.each(_own_part, self.weights, self.ranges, self.dtypes), ())

    def exchange(self, parts, after):
        """Gather tensors and write them to the weights.

        Args:
            parts: Of each tensor, the elements that this worker updates; anything where it updates none.
            after: The results of earlier exchanges, which all workers make in one order.
        """
        own = self.each(_placed, parts, self.ranges, self.sizes, self.dtypes)
        done = after
        for k in range(self.group_count):
            sent = ops.concat(picked(own, self.places[k]))
            whole = self.all_reduce(F.depend(sent, done))
            done = self.each(_receive_flat, self.of_groups[k], ops.split(whole, self.sizes_of_groups[k]))
        return done


def _own_part(tensor, own, dtype):
    """Return the elements of a tensor that this worker updates, in a dtype that operators take parts of."""
    return F.cast(tensor, dtype).reshape(-1)[own[0] : own[1]] if own[0] < own[1] else tensor


def _placed(part, own, size, dtype):
    """Return a flat tensor of some size with a part of it in its place, and zeros elsewhere."""
    begin, end = own
    if begin == end:
        return ops.zeros((size,), dtype)
    parts = (F.cast(part, dtype).reshape(-1),)
    if begin > 0:
        parts = (ops.zeros((begin,), dtype), *parts)
    if end < size:
        parts = (*parts, ops.zeros((size - end,), dtype))
    return parts[0] if len(parts) == 1 else ops.concat(parts)


def _receive_flat(parameter, flat):
    return write(parameter, flat.reshape(F.shape(parameter)))
