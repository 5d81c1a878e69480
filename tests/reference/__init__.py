"""The update rules in float64 NumPy, written from the papers; nothing here imports the package or MindSpore."""

from .adam_offload import AdamOffload
from .adamw import AdamW
from .dgc_momentum import DGCMomentum
from .lamb import Lamb
from .lans import LANS
from .lion import Lion

__all__ = ["LANS", "AdamOffload", "AdamW", "DGCMomentum", "Lamb", "Lion"]
