"""MindFormers: importing this package registers the optimizers; see registered.py."""

from .registered import CLASSES, MsOptimLocalSteps, register

globals().update(CLASSES)
__all__ = ["CLASSES", "MsOptimLocalSteps", "register", *CLASSES]  # pyright: ignore[reportUnsupportedDunderAll]
