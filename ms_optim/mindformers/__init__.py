"""MindFormers: importing this package registers the optimizers; see registered.py."""

from typing import Any

from .registered import CLASSES as CLASSES
from .registered import MsOptimLocalSteps, register

globals().update(CLASSES)
__all__ = ["MsOptimLocalSteps", "register", *CLASSES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> type[Any]:
    """Declare the type of the classes for type checkers; Python finds the classes without it."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
