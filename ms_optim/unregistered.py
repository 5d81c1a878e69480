"""Attributes of a Cell that it does not register."""

from typing import Any

from mindspore import nn


def unregistered(cell: nn.Cell, **values: Any) -> None:
    """Set attributes of a Cell without registering them.

    A Cell lists the Parameters and Cells among its attributes as its own, and renames them. Those that the optimizer
    holds already would be listed twice, and the optimizer itself, as the statement of a path, would hold itself.
    """
    for name, value in values.items():
        object.__setattr__(cell, name, value)
