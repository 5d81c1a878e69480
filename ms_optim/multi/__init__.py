"""Several optimizers as one: what they are put together from, and who has which parameters."""

from .optimizer import MultiOptimizer

__all__ = ["MultiOptimizer"]
