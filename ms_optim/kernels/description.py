"""Read what a kernel library describes: its rules, and the constants of its C interface."""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple


class _Constant(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


class _Rule(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("states", "constants", "exchanges", "weighs_steps", "has_matrices")),
    ]


class DescribedRule(NamedTuple):
    """Properties of a rule, as a kernel library reports them.

    Attributes:
        states: Number of states.
        constants: Number of the rule's constants.
        exchanges: Whether it sends and receives parts of gradients.
        weighs_steps: Whether it keeps two numbers per tensor to weight the steps.
        has_matrices: Whether it works on whole matrices.
    """

    states: int
    constants: int
    exchanges: bool
    weighs_steps: bool
    has_matrices: bool


def _rows(library: ctypes.CDLL, function: str, kind: type[ctypes.Structure]) -> list[Any]:
    """Read an array of a library up to the null name. An AttributeError means that the library has another version."""
    ask = getattr(library, function)
    ask.restype = ctypes.POINTER(kind)
    array, rows = ask(), []
    while array[len(rows)].name is not None:
        rows.append(array[len(rows)])
    return rows


def rules(library: ctypes.CDLL) -> dict[str, DescribedRule]:
    """Return the rules of a library of this package, by name."""
    rows = _rows(library, "ms_optim_rules", _Rule)
    return {
        row.name.decode(): DescribedRule(
            row.states, row.constants, bool(row.exchanges), bool(row.weighs_steps), bool(row.has_matrices)
        )
        for row in rows
    }


def exported(library: ctypes.CDLL) -> dict[str, int]:
    """Return the constants of a library by the names that ``interface.stated`` uses."""
    return {_renamed(row.name.decode()): row.value for row in _rows(library, "ms_optim_constants", _Constant)}


def _renamed(name: str) -> str:
    """Convert "Group<...>::kSomeName" to "Group.SOME_NAME"."""
    *group, last = re.sub("<.*>", "", name).split("::")
    return ".".join([*group, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last.removeprefix("k")).upper()])
