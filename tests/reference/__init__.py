"""The update rules in float64 NumPy, written from the papers; nothing here imports the package or MindSpore."""

from .adamw import AdamW
from .lamb import Lamb

__all__ = ["AdamW", "Lamb"]
