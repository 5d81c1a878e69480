"""Checkpoints: a file or one for each worker, written atomically, with checksums."""

from .callbacks import CheckpointSaver
from .header import SpoiledError
from .save_and_load import Loaded, load, save

__all__ = ["CheckpointSaver", "Loaded", "SpoiledError", "load", "save"]
