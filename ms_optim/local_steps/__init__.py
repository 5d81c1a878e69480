"""Local steps between exchanges: what is kept, what workers send and when, and the outer step."""

from .compression import Quantized, SparseTopK
from .optimizer import LocalSteps

__all__ = ["LocalSteps", "Quantized", "SparseTopK"]
