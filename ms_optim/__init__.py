"""Optimizers for training large models on MindSpore, each one fused kernel launch a step."""

from importlib.metadata import version

from .adamw import AdamW
from .lamb import Lamb

__all__ = ["AdamW", "Lamb"]
__version__ = version("ms_optim")
