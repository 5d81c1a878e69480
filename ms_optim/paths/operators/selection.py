"""Selection of tensors by index, in loops that graphs compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A graph unrolls loops by recursion, which MindSpore limits. No loop of a step has many more iterations than this.
MOST_TURNS = 64


def in_parts(items: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return items in parts; nested loops over parts and items replace one loop with too many iterations."""
    size = max(MOST_TURNS, -(-len(items) // MOST_TURNS))
    return tuple(tuple(items[k : k + size]) for k in range(0, len(items), size))


def slices_of(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return slices (begin, end, step) that select the items at these indices, in order."""
    slices: list[tuple[int, int, int]] = []
    for i in places:
        begin, end, step = slices[-1] if slices else (i, i, 0)
        if step == 0 and i > begin and slices:
            slices[-1] = (begin, i + 1, i - begin)
        elif step > 0 and i == end - 1 + step:
            slices[-1] = (begin, i + 1, step)
        else:
            slices.append((i, i + 1, 0))
    return [(begin, end, step or 1) for begin, end, step in slices]


def chosen(places: Sequence[int]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the slices of indices, in parts, for :func:`picked`."""
    return in_parts(slices_of(places))


def picked(tensors, slices_in_parts):
    """Return the tensors at the indices that :func:`chosen` returned slices for; usable in graphs."""
    found = ()
    for slices in slices_in_parts:
        found += _picked_part(tensors, slices)
    return found


def _picked_part(tensors, slices):
    found = ()
    for begin, end, step in slices:
        found += tensors[begin:end:step]
    return found
