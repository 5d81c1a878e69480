"""Optimizers for training large models on MindSpore, each one fused kernel launch a step."""

from .adamw import AdamW
from .lamb import Lamb

__all__ = ["AdamW", "Lamb"]
