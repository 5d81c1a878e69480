"""Attributes of a Cell that it does not register."""

from types import FunctionType
from typing import Any

from mindspore import nn

PACKAGE = __name__.partition(".")[0]


def unregistered(cell: nn.Cell, **values: Any) -> None:
    """Set attributes of a Cell without registering them.

    A Cell lists the Parameters and Cells among its attributes as its own, and renames them. Those that the optimizer
    holds already would be listed twice, and the optimizer itself, as the statement of a path, would hold itself.
    """
    for name, value in values.items():
        object.__setattr__(cell, name, value)


def bind_once(cell: nn.Cell) -> nn.Cell:
    """Bind the methods of a Cell, and of this package's Cells that it holds, once and for all; return the Cell.

    MindSpore parses a method again at every call in a graph, unless it is the same object: it knows what it has parsed
    by identity, and Python binds a method anew at each look-up. A rule is called for each stack of tensors.
    """
    waiting, known = [cell], set()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        owners = [owner for owner in type(each).__mro__ if not owner.__module__.startswith("mindspore.")]
        if not any(owner.__module__.partition(".")[0] == PACKAGE for owner in owners):
            continue
        for owner in owners:
            for name, member in vars(owner).items():
                if isinstance(member, FunctionType) and not name.startswith("__") and name != "construct":
                    each.__dict__.setdefault(name, getattr(each, name))
        waiting += [held for held in (*each._cells.values(), *each.__dict__.values()) if isinstance(held, nn.Cell)]
    return cell
