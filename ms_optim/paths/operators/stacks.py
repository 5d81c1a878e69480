"""Stacks of tensors: MindSpore compiles a rule once for each shape of a stack instead of once for each tensor.

Small tensors of different shapes share a stack: each is a row, with zeros behind its elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.primitive import constexpr

from ...rules.arithmetic import expanded, selected
from .selection import MOST_TURNS, chosen, in_parts, picked

_each, _map = C.Map(), C.HyperMap()

# Stacks are copies: a step holds a few copies of a stack of up to this many elements, or of the largest tensor.
MOST_ELEMENTS = 1 << 22
MOST_TENSORS = 256
# The elements of a row that has zeros behind a tensor's elements. Few widths are few shapes to compile, and rows of up
# to 64 KB take little memory.
WIDTHS = (1 << 10, 1 << 12, 1 << 14)
# The most tensors of one shape that share a stack with others. Each takes operators of its own to become a row: a step
# takes as long with four of each shape as with a stack for each, and longer with eight.
MOST_MIXED = 4


def stacked_places(
    kinds: Sequence[Hashable], sizes: Sequence[tuple[int, int]], most_elements: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the tensors in each stack; a stack holds a limited number of tensors of one kind.

    Args:
        kinds: The kind of each tensor.
        sizes: For each tensor its elements, and the number of tensors of which a stack, if it is not the last one of
            its kind, holds a multiple.
        most_elements: The most elements of a stack of more tensors than that; 0 means :data:`MOST_ELEMENTS`.
    """
    places_of: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places_of.setdefault(kind, []).append(place)
    stacks = []
    for places in places_of.values():
        size, share = sizes[places[0]]
        most = max(1, min(MOST_TENSORS, (most_elements or MOST_ELEMENTS) // max(1, size)) // share) * share
        ordered = [i for run in progressions(places) for i in run]
        stacks += [tuple(ordered[k : k + most]) for k in range(0, len(ordered), most)]
    return tuple(stacks)


def progressions(places: Sequence[int]) -> list[range]:
    """Split ascending indices into arithmetic progressions, preferring long ones.

    Repeated layers have tensors of one shape at equal distances, and a graph selects tensors at equal distances in one
    slice.
    """
    left, found = list(places), []
    while left:
        known, best = set(left), range(left[0], left[0] + 1)
        for second in left[1:MOST_TURNS]:
            step = second - left[0]
            run = range(left[0], next(i for i in itertools.count(left[0], step) if i not in known), step)
            best = max(best, run, key=len)
        found.append(best)
        left = [i for i in left if i not in best]
    return found


@constexpr
def _are_float32(dtypes):
    return all(dtype == mstype.float32 for dtype in dtypes)


def width_of(size: int) -> int:
    """Return the elements of a row for a tensor that shares a stack with tensors of other shapes."""
    return next((width for width in WIDTHS if size <= width), size)


@constexpr
def _width(shapes):
    """Return the elements of a row of a stack; 0 if the tensors have one shape, and a row has it too."""
    return 0 if len(set(shapes)) == 1 else width_of(max(math.prod(shape) for shape in shapes))


@constexpr
def _elements_of(shapes):
    """Return where the rows of a stack hold elements of tensors and not zeros; None if they do everywhere."""
    width, sizes = width_of(max(math.prod(shape) for shape in shapes)), [math.prod(shape) for shape in shapes]
    if len(set(shapes)) == 1 or min(sizes) == width:
        return None
    return Tensor(np.arange(width) < np.array(sizes)[:, None])


def in_float32(tensor):
    """Return a tensor in float32."""
    return F.cast(tensor, mstype.float32)


def first_of(stack):
    """Return the first tensor of a stack, which is the whole stack if it has only one tensor."""
    return stack[0]


def column(numbers, like):
    """Return one number for each tensor of a stack, ready for an operator with the stack."""
    return expanded(numbers.reshape(F.shape(numbers) + (1,) * (len(F.shape(like)) - 1)), like)


def _as_wide_row(tensor, width):
    flat = tensor.reshape((-1,))
    lacking = width - F.shape(flat)[0]
    return ops.concat((flat, ops.zeros((lacking,), F.dtype(flat)))) if lacking > 0 else flat


def _of_row(row, tensor):
    """Return the elements in a row of a stack in the shape of a tensor."""
    return row[: F.shape(tensor.reshape((-1,)))[0]].reshape(F.shape(tensor))


def stacked(tensors):
    """Return a stack of tensors of one dtype."""
    width = _width(_map(F.shape, tensors))
    return ops.stack(_each(_as_wide_row, tensors, (width,) * len(tensors)) if width > 0 else tensors)


def unstacked(stack, tensors):
    """Return the tensors of a stack in the shapes of those that it was made of."""
    rows = ops.unstack(stack, 0)
    return _each(_of_row, rows, tensors) if _width(_map(F.shape, tensors)) > 0 else rows


def without_others(stacks, tensors):
    """Return stacks, in a tuple, with zeros where no tensor has an element: a rule may make anything of zeros."""
    elements = _elements_of(_map(F.shape, tensors))
    if elements is None:
        return stacks
    found = ()
    for stack in stacks:
        found += (selected(elements, stack, ops.zeros_like(stack)),)
    return found


class Stacks(nn.Cell):
    """Stacks of tensors, each a tensor whose first dimension counts those of one shape, or those in rows of one width.

    Args:
        places: For each stack, the indices of its tensors among all.
    """

    places: tuple[tuple[int, ...], ...]

    def __init__(self, places: Sequence[Sequence[int]]):
        super().__init__(auto_prefix=False)
        self.places = tuple(tuple(stack) for stack in places)
        self.all_alone = self.places == tuple((i,) for i in range(len(self.places)))
        self.slices = tuple(chosen(stack) for stack in self.places)
        self.each, self.map_ = C.Map(), C.HyperMap()
        table = np.zeros((len(places), max(len(stack) for stack in places)), np.int32)
        for row, stack in zip(table, places):
            row[: len(stack)] = stack
        self.table = Tensor(table)
        order = np.argsort([i for stack in places for i in stack])
        self.stacks_in_parts, self.order_slices = in_parts(range(len(self.places))), chosen(order.tolist())
        self.order = Tensor(order.astype(np.int32))

    def by_stack(self, tensors: Sequence[Parameter]) -> tuple[ParameterTuple, ...]:
        """Return the parameters of each stack, when an optimizer is built."""
        return tuple(ParameterTuple([tensors[i] for i in stack]) for stack in self.places)

    def construct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors in float32, in stacks."""
        if not _are_float32(self.map_(F.dtype, tensors)):
            tensors = self.each(in_float32, tensors)
        if self.all_alone:
            return self.each(alone, tensors)
        return self.each(_stack_at, (tensors,) * len(self.slices), self.slices)

    def held(self, parameters: ParameterTuple) -> Tensor:
        """Return the values of a stack's parameters, which are of one dtype, in float32.

        It is a copy even for a single parameter: an operator that reads a view might run after the parameter is
        written.
        """
        is_float32 = F.dtype(parameters[0]) == mstype.float32
        return stacked(parameters if is_float32 else self.each(in_float32, parameters))

    def spread(self, rows: Tensor, stacks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return, for each stack, the rows of its tensors from a table with a row for each tensor."""
        return self.each(_cut, ops.unstack(ops.gather(rows, self.table, 0), 0), stacks)

    def in_order(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Return rows for the tensors of each stack in the order of all tensors."""
        return ops.gather(ops.concat(parts), self.order, 0)

    def tensors_in_order(self, parts: tuple[tuple[Tensor, ...], ...]) -> tuple[Tensor, ...]:
        """Return the tensors of all stacks, each stack in a tuple, in the order of all tensors."""
        found = ()
        for some in self.stacks_in_parts:
            found += _joined(parts, some)
        return picked(found, self.order_slices)


def _joined(parts, places):
    found = ()
    for k in places:
        found += tuple(parts[k])
    return found


def _cut(rows, stack):
    """Return as many of the first rows as a stack has tensors; the rows of smaller stacks are padded."""
    return rows[: F.shape(stack)[0]]


def own_rows(table, rows):
    """Return the rows of a rule's parameters, (first, end), in a table of the parameters of all rules of a step."""
    return table if F.shape(table)[0] == rows[1] - rows[0] else table[rows[0] : rows[1]]


def with_own_rows(table, own, rows):
    """Return a table of the parameters of all rules with other rows in place of those that :func:`own_rows` returns."""
    if F.shape(table)[0] == rows[1] - rows[0]:
        return own
    return ops.concat((table[: rows[0]], own, table[rows[1] :]))


def alone(tensor):
    """Return a tensor as a stack of one."""
    return tensor.expand_dims(0)


def _stack_at(tensors, slices):
    return stacked(picked(tensors, slices))
