"""Converts masters between float32 and remainders, the format of split masters: see ops/include/weights.h.

A remainder is the difference between the bits of a master and those of its bfloat16 weight: all 16 lower bits, in
int16, or the upper 8 of these, in int8. A step rounds to 8 bits stochastically; a checkpoint rounds to nearest, and
keeps denormal numbers, which a step takes for 0.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from mindspore import ops

from . import bits

# Name prefixes of masters, and of float32 masters in MindFormers' PyNative trainer.
PREFIXES = MASTER, MAIN_PARAM = "master.", "main_param."
SHIFT = {np.dtype(np.int16): 0, np.dtype(np.int8): 8}


def entry_of(entries: Container[str], weight: str) -> str | None:
    """Return the name of a weight's master among entries; None if there is none."""
    return next((prefix + weight for prefix in PREFIXES if prefix + weight in entries), None)


def restored_bits(weights, remainders, is_8_bit):
    """Return the float32 masters of a step, in MindSpore's operators.

    A remainder that would lead across 0, or from infinity to NaN, belongs to a weight that was set since, and is left
    out.

    Args:
        weights: float32, each a bfloat16 number.
        remainders: int32, of the same shape.
        is_8_bit: Whether remainders have 8 bits; else 16.
    """
    upper = bits.bits_of(weights)
    magnitude = ops.bitwise_and(upper, 2**31 - 1)
    below = ops.bitwise_left_shift(remainders, 8) if is_8_bit else remainders
    is_lost = ops.where(below < 0, magnitude == 0, magnitude >= bits.INFINITY)
    return bits.from_bits(bits.added(upper, ops.masked_fill(below, is_lost, 0)))


def split_bits(masters, noise, is_8_bit):
    """Return float32 masters split in a step, in MindSpore's operators: weights, remainders, and restored masters.

    The weights are rounded with ties away from 0, so that the remainder is 32767 at most.

    Args:
        masters: float32.
        noise: Random bits, the lowest 8 of which are used, if remainders have 8 bits.
        is_8_bit: Whether remainders have 8 bits; else 16.
    """
    whole, kept = bits.bits_of(masters), masters
    if is_8_bit:
        whole = bits.truncated(bits.added(whole, ops.bitwise_and(noise, 0xFF)), 8)
        kept = bits.from_bits(whole)
    # The bit 0x8000 carries into the upper 16 bits where the remainder rounds up, and makes it negative.
    upper = bits.truncated(bits.added(whole, ops.bitwise_and(whole, 0x8000)), 16)
    below = bits.signed_16(whole)
    return bits.from_bits(upper), ops.bitwise_right_shift(below, 8) if is_8_bit else below, kept


def restored(weights: np.ndarray, remainders: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that split masters are.

    Args:
        weights: float32, each a bfloat16 number, of the remainders' shape.
        remainders: int16 or int8.
    """
    bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    magnitudes, below = bits & 0x7FFFFFFF, remainders.astype(np.int32) << SHIFT[remainders.dtype]
    fits = np.where(below < 0, magnitudes != 0, magnitudes < 0x7F800000)
    return (bits + np.where(fits, below, 0).astype(np.uint32)).view(np.float32)


def remainders(masters: np.ndarray, dtype) -> np.ndarray:
    """Return the remainders of float32 masters, for weights that are the masters rounded to nearest.

    Halfway between two bfloat16 numbers, rounding ties to even gives a remainder of 32768, but the largest is 32767.
    The restored master is then the next float32 number towards 0.

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
    """Return 16-bit remainders in another dtype, rounded to nearest."""
    shift = SHIFT[np.dtype(dtype)]
    half = (1 << shift) >> 1
    return np.minimum((below.astype(np.int32) + half) >> shift, np.iinfo(dtype).max).astype(dtype)


def converted(masters: np.ndarray, dtype, weights: np.ndarray) -> np.ndarray:
    """Return masters in another format.

    Args:
        masters: Masters, in float32, or remainders.
        dtype: The dtype of the result: float32, int16 or int8.
        weights: float32, the weights that remainders belong to.
    """
    if np.dtype(dtype) == np.float32:
        return _rounding_to(weights, restored(weights, masters))
    if masters.dtype == np.float32:
        return remainders(masters, dtype)
    return rounded(masters.astype(np.int32) << SHIFT[masters.dtype], dtype)


def _rounding_to(weights: np.ndarray, masters: np.ndarray) -> np.ndarray:
    """Return float32 masters that round to their weights; otherwise a step would take the weight instead.

    A split master halfway between two bfloat16 numbers may belong to the odd one, but a tie is rounded to the even one.
    It is moved to the next float32 number towards its weight.
    """
    weight_bits = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    bits = masters.view(np.uint32)
    is_odd_tie = (weight_bits - bits == 0x8000) & ((weight_bits >> 16) & 1 == 1)
    return (bits + is_odd_tie.astype(np.uint32)).view(np.float32)
