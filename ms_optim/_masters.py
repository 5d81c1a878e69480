"""Converts masters between float32 and remainders, which split masters are held as: see ops/include/weights.h.

A remainder says by how much the bits of a master differ from those of its bfloat16 weight: all 16 lower bits, in int16,
or the upper 8 of these, in int8. A step rounds to 8 bits at random; a checkpoint rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

# What the names of masters begin with, and those of float32 ones in MindFormers' PyNative trainer.
PREFIXES = MASTER, MAIN_PARAM = "master.", "main_param."
SHIFT = {np.dtype(np.int16): 0, np.dtype(np.int8): 8}


def entry_of(entries: Container[str], weight: str) -> str | None:
    """Return the name that a weight's master has among entries; None if it has none there."""
    return next((prefix + weight for prefix in PREFIXES if prefix + weight in entries), None)


def restored(weights: np.ndarray, remainders: np.ndarray) -> np.ndarray:
    """Return float32 masters.

    Args:
        weights: float32, each a bfloat16 number, of the remainders' shape.
        remainders: int16 or int8.
    """
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    magnitudes, below = bits & 0x7FFFFFFF, remainders.astype(np.int32) << SHIFT[remainders.dtype]
    fits = np.where(below < 0, magnitudes != 0, magnitudes < 0x7F800000)
    return (bits + np.where(fits, below, 0).astype(np.uint32)).view(np.float32)


def remainders(masters: np.ndarray, dtype) -> np.ndarray:
    """Return the remainders of float32 masters, behind weights that are the masters rounded to nearest.

    Halfway between two numbers, ties to even leave 32768 where there is room for 32767: the master that is restored is
    then the next float32 number to 0.

    Args:
        masters: float32, of any shape.
        dtype: int16 or int8.
    """
    bits = np.ascontiguousarray(masters, np.float32).view(np.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    below = (bits - (upper << 16)).view(np.int32)
    below = np.where((bits & 0x7FFFFFFF) >= 0x7F800000, 0, below)
    return rounded(np.minimum(below, 0x7FFF), dtype)


def rounded(below: np.ndarray, dtype) -> np.ndarray:
    """Return remainders of 16 bits in a dtype, rounded to nearest."""
    shift = SHIFT[np.dtype(dtype)]
    half = (1 << shift) >> 1
    return np.minimum((below.astype(np.int32) + half) >> shift, np.iinfo(dtype).max).astype(dtype)


def converted(masters: np.ndarray, dtype, weights: np.ndarray) -> np.ndarray:
    """Return masters as they are held elsewhere.

    Args:
        masters: Masters, in float32, or remainders.
        dtype: What they shall be held in: float32, int16 or int8.
        weights: float32, the weights of remainders.
    """
    if np.dtype(dtype) == np.float32:
        return restored(weights, masters)
    if masters.dtype == np.float32:
        return remainders(masters, dtype)
    return rounded(masters.astype(np.int32) << SHIFT[masters.dtype], dtype)
