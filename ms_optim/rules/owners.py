"""Matrices of which each process holds a slice: each gets one owner, which computes with it and returns the slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.operations.comm_ops import AlltoAllV
from mindspore.ops.primitive import constexpr

from .arithmetic import rounded
from .sliced_matrices import Slicing, gathering


def dealt(count: int, processes: int, first: int) -> list[list[int]]:
    """Return for each process which of some matrices it owns: they are dealt in turn, from the process `first` on."""
    return [[i for i in range(count) if (first + i) % processes == process] for process in range(processes)]


def elements_sent(owned: Sequence[int], lengths: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Return for each process the numbers of elements that it sends to each, to assemble matrices at their owners.

    Args:
        owned: How many matrices each process owns.
        lengths: The length of each process's slices.
        size: The elements of a slice of length 1.
    """
    return tuple(tuple(length * size * count for count in owned) for length in lengths)


def dealers(counts: Sequence[int], work: Sequence[float], processes: int) -> tuple[int, ...]:
    """Return for each kind of matrix the process that gets the first one, so that all get about equal work.

    Only what is left after equal shares makes a difference; the heaviest kinds choose first.

    Args:
        counts: The number of matrices of each kind.
        work: The work of a matrix of each kind.
        processes: The number of processes.
    """
    loads, firsts = np.zeros(processes), [0] * len(counts)
    for kind in sorted(range(len(counts)), key=lambda k: (-work[k], k)):
        left = counts[kind] % processes
        taken = [[(first + i) % processes for i in range(left)] for first in range(processes)]
        firsts[kind] = min(range(processes), key=lambda first: (max(loads[taken[first]], default=0.0), first))
        loads[taken[firsts[kind]]] += work[kind]
    return tuple(firsts)


class Exchange(nn.Cell):
    """Sends blocks of a vector to all processes of a group, and receives theirs.

    On Ascend, each block goes to its receiver alone. On GPU and CPU, where MindSpore 2.9 and 2.10 have no such
    collective, every process receives all vectors: by AllGather, which CPU has for the group of all processes, or else
    by AllReduce.

    Args:
        slicing: The group, and this process's place in it.
        device: The device.
    """

    def __init__(self, slicing: Slicing, device: str):
        super().__init__(auto_prefix=False)
        self.own, self.processes = slicing.own, len(slicing.lengths)
        self.is_direct, group = device == "Ascend", slicing.group
        self.collective: Any
        if self.is_direct:
            self.collective = AlltoAllV(group)
        else:
            self.collective = gathering(group, self.own, self.processes, device)

    def construct(self, vector, counts):
        """Return what this process receives from each, in the order of the ranks; unspecified if it is nothing.

        Args:
            vector: What it sends to each, in the order of the ranks; anything if it is nothing.
            counts: For each process a tuple with the number of elements that it sends to each.
        """
        if self.is_direct:
            return self.collective(vector, counts[self.own], _received(counts, self.own))
        most, own = _most(counts), F.shape(vector)[0]
        if own < most:
            vector = ops.concat((vector, ops.zeros((most - own,), F.dtype(vector))))
        rows, parts = self.collective(vector.reshape((1, -1))), ()
        for process in range(self.processes):
            begin, end = _block(counts, process, self.own)
            if end > begin:
                parts += (rows[process, begin:end],)
        return ops.concat(parts) if len(parts) > 0 else rows[0]


@constexpr
def _received(counts, own):
    return tuple(row[own] for row in counts)


@constexpr
def _most(counts):
    return max(1, *(sum(row) for row in counts))


@constexpr
def _block(counts, sender, receiver):
    """Return where the block for a receiver begins and ends in what a process sends."""
    begin = sum(counts[sender][:receiver])
    return begin, begin + counts[sender][receiver]


class Owners(nn.Cell):
    """Assembles each matrix at its owner, and returns slices of what the owner makes of it.

    Args:
        slicing: How matrices are sliced.
        first: The process that owns the first matrix of a stack.
        bfloat16: Whether elements are rounded to bfloat16 on the way.
        device: The device; on "GPU" and "CPU", whose collectives have no bfloat16, rounded numbers travel as float32.
    """

    def __init__(self, slicing: Slicing, first: int, bfloat16: bool, device: str):
        super().__init__(auto_prefix=False)
        self.own, self.processes, self.lengths = slicing.own, len(slicing.lengths), slicing.lengths
        self.first, self.bfloat16, self.has_bfloat16 = first, bfloat16, device == "Ascend"
        # The dimension in a stack of matrices along which they are sliced.
        self.axis = slicing.axis if slicing.batch > 1 else slicing.axis + 1
        self.exchange = Exchange(slicing, device)
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, slicing.group)

    def construct(self, slices):
        """Assemble matrices at their owners.

        All processes must exchange in the same order, which a graph does not keep by itself: what is exchanged next
        takes the second result as `after`.

        Args:
            slices: A stack of slices of all matrices.

        Returns:
            This process's matrices, or an empty tuple if it owns none; and what was received.
        """
        shape, count = F.shape(slices), F.shape(slices)[0]
        table = self.table(count)
        order, mine = table[0], table[1][self.own]
        sent = self.sent(ops.gather(slices, order, 0).reshape(-1))
        received = F.cast(self.exchange(sent, self.counts(count, shape)), mstype.float32)
        if mine == 0:
            return (), received
        parts, begin = (), 0
        for process in range(self.processes):
            part = self.with_length(shape, mine, self.lengths[process])
            end = begin + _size(part)
            parts += (received[begin:end].reshape(part),)
            begin = end
        return ops.concat(parts, self.axis), received

    def back(self, matrices, shape, after):
        """Return a stack of slices of all matrices, of a shape, from this process's matrices, or an empty tuple."""
        parts, begin, table = (), 0, self.table(shape[0])
        for process in range(self.processes if len(matrices) > 0 else 0):
            part = ops.narrow(matrices, self.axis, begin, self.lengths[process])
            parts += (part.reshape(-1),)
            begin += self.lengths[process]
        sent = self.sent(ops.concat(parts) if len(parts) > 0 else ops.zeros((1,), mstype.float32))
        received = self.exchange(F.depend(sent, after), _transposed(self.counts(shape[0], shape)))
        return ops.gather(F.cast(received, mstype.float32).reshape(shape), table[2], 0)

    def sent(self, vector):
        """Return numbers as they travel."""
        if not self.bfloat16:
            return vector
        return F.cast(vector, mstype.bfloat16) if self.has_bfloat16 else rounded(vector, mstype.bfloat16)

    def mine(self, rows):
        """Return the rows of this process's matrices from those of all, if it owns one."""
        table = self.table(F.shape(rows)[0])
        return ops.gather(rows, table[3], 0)

    def of_all(self, own, shape, after):
        """Return a few numbers of each matrix, of a shape, from those of this process's matrices, or an empty tuple."""
        if len(own) == 0:
            found = ops.zeros(shape, mstype.float32)
        else:
            padded = ops.concat((F.cast(own, mstype.float32), ops.zeros((1, *shape[1:]), mstype.float32)))
            found = ops.gather(padded, self.table(shape[0])[4], 0)
        return self.all_reduce(F.depend(found, after))

    def table(self, count):
        """Return the constants of a stack of so many matrices; see :func:`_dealt`."""
        return _dealt(count, self.processes, self.first, self.own)

    def counts(self, count, shape):
        """Return the number of elements that each process sends to each, to assemble the matrices."""
        return _counts(self.table(count)[1], self.lengths, _size(self.with_length(shape, 1, 1)))

    def with_length(self, shape, count, length):
        """Return the shape of so many slices of a length."""
        return (count, *shape[1 : self.axis], length, *shape[self.axis + 1 :])


@constexpr
def _dealt(count, processes, first, own):
    """Return how a stack of matrices is dealt.

    Returns:
        The matrices in the order of their owners; the number of matrices of each process; the places of all matrices in
        this order; this process's matrices; and the place of each matrix among them, or their number.
    """
    items = dealt(count, processes, first)
    order = [i for own_items in items for i in own_items]
    mine = items[own]
    places = [mine.index(i) if i in mine else len(mine) for i in range(count)]
    order, back, mine, places = (Tensor(np.array(x, np.int32)) for x in (order, np.argsort(order), mine or [0], places))
    return order, tuple(len(own_items) for own_items in items), back, mine, places


@constexpr
def _counts(owned, lengths, size):
    return elements_sent(owned, lengths, size)


@constexpr
def _transposed(counts):
    return tuple(zip(*counts))


@constexpr
def _size(shape):
    return int(np.prod(shape))
