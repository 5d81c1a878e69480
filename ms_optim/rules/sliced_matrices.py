"""Matrices of which each process holds a slice: an optimizer that needs whole matrices gathers them in turn."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import communication as comm
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Slicing(NamedTuple):
    """How the processes of a communication group slice a tensor.

    Attributes:
        group: The communication group.
        axis: The dimension along which they slice it.
        lengths: The length of each process's slice along that dimension, in the order of the ranks.
        own: The index of this process among them.
        cuts_matrices: Whether slices cut matrices; each process may hold some whole ones, of a batch or by heads.
        cuts_rows: Whether each process holds some of the rows of every matrix.
        batch: The number of matrices of the whole tensor that are sliced alike, one after the other.
    """

    group: str
    axis: int
    lengths: tuple[int, ...]
    own: int
    cuts_matrices: bool
    cuts_rows: bool
    batch: int = 1

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor from the shape of a slice."""
        return (*shape[: self.axis], sum(self.lengths), *shape[self.axis + 1 :])

    @property
    def begin(self) -> int:
        """The index at which the slice of this process begins."""
        return sum(self.lengths[: self.own])


def slicings(
    optimizer: str,
    shapes: Mapping[str, tuple[int, ...]],
    shard_groups: Mapping[str, str],
    axes: Mapping[str, int],
) -> dict[str, Slicing]:
    """Return how tensors that hold matrices are sliced, by name.

    The processes of each communication group exchange the lengths of their slices.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        shapes: The shapes of this process's slices of tensors that hold matrices, by name.
        shard_groups: The communication group of each sliced tensor, by name.
        axes: The dimension along which a tensor is sliced, by name; the first dimension for tensors not listed.

    Raises:
        ValueError: If a tensor does not have the dimension, or the processes' slices do not fit each other.
    """
    sliced: dict[str, list[tuple[str, tuple[int, ...], int]]] = {}
    for name, shape in shapes.items():
        axis = axes.get(name, 0)
        if axis >= len(shape):
            raise ValueError(
                f"For '{optimizer}', 'shard_axis' of the parameter '{name}' must be less than its number of "
                f"dimensions, {len(shape)}, but is {axis}."
            )
        if name in shard_groups:
            sliced.setdefault(shard_groups[name], []).append((name, shape, axis))
    found = {}
    for group, tensors in sliced.items():
        for (name, shape, axis), lengths in zip(tensors, _lengths(optimizer, group, tensors)):
            of_rows = 1 if len(shape) == 3 else 0  # the dimension that counts the rows of a matrix
            batch = shape[0] if axis >= of_rows > 0 else 1
            cuts = (axis >= of_rows, axis == of_rows)
            found[name] = Slicing(group, axis, tuple(lengths), comm.get_rank(group), *cuts, batch)
    return found


def _lengths(optimizer, group, tensors):
    """Return, for each tensor, the lengths of the slices of all processes of a group."""
    rows = []
    for name, shape, axis in tensors:
        alike = zlib.crc32(repr((name, axis, *shape[:axis], *shape[axis + 1 :])).encode())
        rows.append((shape[axis], alike))
    table = of_all(group, np.array(rows))
    for (name, shape, axis), marks in zip(tensors, table[..., 1].T):
        if (marks != marks[0]).any():
            raise ValueError(
                f"For '{optimizer}', the slices of the parameter '{name}' must differ only in the dimension "
                f"'shard_axis', but another process of '{group}' has other dimensions, or another 'shard_axis', than "
                f"{shape} and {axis}."
            )
    return table[..., 0].T.tolist()


def of_all(group: str, own: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an array of each process of a group, by rank: all have the same shape, and no number is negative."""
    # On CPU, collectives take float32 numbers, which represent integers exactly up to 2**24.
    table = np.zeros((comm.get_group_size(group), 2, *own.shape), np.float32)
    table[comm.get_rank(group)] = own >> 20, own & (1 << 20) - 1
    high, low = ops.AllReduce(ops.ReduceOp.SUM, group)(Tensor(table)).asnumpy().astype(np.int64).swapaxes(0, 1)
    return (high << 20) + low


class Whole(nn.Cell):
    """Assembles stacked tensors from the slices of all processes, and extracts this process's slices again.

    Each process pads its slice with zeros, and AllReduce sums them. This rounds nothing, and every process gets the
    same bits. AllGather would need slices of equal size, and on CPU the group of all processes.

    Args:
        slicing: How tensors are sliced; None if they are not sliced.
        stacked: The number of dimensions that stacks have besides those of their tensors.
    """

    def __init__(self, slicing: Slicing | None, stacked: int = 1):
        super().__init__(auto_prefix=False)
        self.is_sliced, self.cuts_matrices = slicing is not None, False
        if slicing is not None:
            self.cuts_matrices = slicing.cuts_matrices
            self.axis, self.begin, self.length = slicing.axis + stacked, slicing.begin, slicing.lengths[slicing.own]
            self.after = sum(slicing.lengths) - self.begin - self.length
            self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, slicing.group)

    def construct(self, stack):
        """Return a stack of tensors whose matrices are whole."""
        if not self.cuts_matrices:
            return stack
        shape, parts = F.shape(stack), ()
        if self.begin > 0:
            parts += (self.zeros(shape, self.begin, stack),)
        parts += (stack,)
        if self.after > 0:
            parts += (self.zeros(shape, self.after, stack),)
        return self.all_reduce(ops.concat(parts, self.axis))

    def zeros(self, shape, length, like):
        """Return zeros in place of the slices of other processes."""
        return ops.zeros((*shape[: self.axis], length, *shape[self.axis + 1 :]), F.dtype(like))

    def own(self, stack):
        """Return this process's slices of a stack of tensors whose matrices are whole."""
        return ops.narrow(stack, self.axis, self.begin, self.length) if self.cuts_matrices else stack

    def mean(self, sums, count):
        """Return means of `count` numbers of whole tensors, from sums over the matrices of this process."""
        if not self.is_sliced or self.cuts_matrices:
            return sums / count
        whole = self.all_reduce(F.cast(sums, mstype.float32))
        return F.cast(whole, F.dtype(sums)) / count


def gathering(group: str, own: int, count: int, device: str) -> ops.AllGather | Whole:
    """Return what gives every process of a group the rows of all: of each an array of shape (1, ...).

    On CPU, AllGather supports only the group of all processes.

    Args:
        group: The communication group.
        own: This process's place in it.
        count: The number of its processes.
        device: The device.
    """
    if device != "CPU" or group == comm.GlobalComm.WORLD_COMM_GROUP:
        return ops.AllGather(group)
    return Whole(Slicing(group, 0, (1,) * count, own, True, True), 0)
