"""Converts states between codes and float32 for checkpoints, as ops/include/codes.h does within a step.

A step rounds stochastically. A checkpoint rounds to the nearest code, because it has no step to draw random numbers
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kernels.interface import CODE_BLOCK


class Format(NamedTuple):
    """The format of the codes of a dtype.

    Attributes:
        bits: The bits of a code.
        mantissa: The mantissa bits among these.
        octaves: Number of octaves above the range in which codes are evenly spaced.
        is_signed: Whether a code has a sign.
    """

    bits: int
    mantissa: int
    octaves: int
    is_signed: bool

    @property
    def shift(self) -> int:
        """Number of the 23 bits of a float32 mantissa that a code does not have."""
        return 23 - self.mantissa

    @property
    def delta(self) -> np.ndarray:
        """The offset that is added to a number before its upper bits are taken as the code."""
        return np.array(2.0**-self.octaves, np.float32)


FORMATS = {
    np.dtype(np.int8): Format(8, 3, 15, True),
    np.dtype(np.uint8): Format(8, 3, 31, False),
    np.dtype(np.int16): Format(4, 1, 3, True),
    np.dtype(np.uint16): Format(4, 1, 7, False),
}
# The first bit of each of the four codes in a 16-bit word.
PLACES = np.arange(0, 16, 4, dtype=np.uint16)


def _unpacked(words: np.ndarray, size: int) -> np.ndarray:
    """Return the 4-bit codes in words as int8; the first code is in the lowest bits."""
    codes = ((words.reshape(-1, 1).view(np.uint16) >> PLACES) & 15).astype(np.int8).reshape(-1)[:size]
    return (codes ^ 8) - 8 if FORMATS[words.dtype].is_signed else codes


def _packed(codes: np.ndarray, dtype) -> np.ndarray:
    """Return the words that hold 4-bit codes."""
    whole = np.zeros(-(-codes.size // PLACES.size) * PLACES.size, np.uint16)
    whole[: codes.size] = codes & 15
    return np.bitwise_or.reduce(whole.reshape(-1, PLACES.size) << PLACES, axis=1).view(dtype)


def decode(codes: np.ndarray, scales: np.ndarray, shape: Sequence[int] | None = None) -> np.ndarray:
    """Return the float32 numbers of codes.

    Args:
        codes: int8 or uint8, of any shape; int16 or uint16 for 4-bit codes.
        scales: float32, one for each block of 256.
        shape: The shape of the numbers, which 4-bit codes do not determine; by default the shape of the codes.
    """
    form, shape = FORMATS[codes.dtype], codes.shape if shape is None else tuple(shape)
    flat = codes.reshape(-1) if form.bits == 8 else _unpacked(codes.reshape(-1), int(np.prod(shape)))
    magnitude = np.abs(flat.astype(np.int32)).astype(np.uint32)
    numbers = ((magnitude << form.shift) + form.delta.view(np.uint32)).view(np.float32) - form.delta
    numbers = np.where(flat < 0, -numbers, numbers)
    units = scales / (1 - form.delta)
    return (numbers * np.repeat(units, CODE_BLOCK)[: flat.size]).reshape(shape)


def encode(numbers: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of float32 numbers.

    Args:
        numbers: float32, of any shape.
        dtype: int8 for signed and uint8 for unsigned 8-bit codes; int16 and uint16 for 4-bit codes, four per word.
    """
    form, flat = FORMATS[np.dtype(dtype)], numbers.astype(np.float32).reshape(-1)
    padded = np.zeros(-(-flat.size // CODE_BLOCK) * CODE_BLOCK, np.float32)
    padded[: flat.size] = np.abs(flat)
    scales = padded.reshape(-1, CODE_BLOCK).max(axis=1)
    delta = form.delta
    factors = np.divide(1 - delta, scales, out=np.zeros_like(scales), where=scales > np.float32(1e-37))
    z = padded[: flat.size] * np.repeat(factors, CODE_BLOCK)[: flat.size] + delta
    half = np.uint32(1 << (form.shift - 1))
    magnitude = ((z.view(np.uint32) - delta.view(np.uint32) + half) >> form.shift).astype(np.int32)
    if not form.is_signed:
        magnitude = np.maximum(magnitude, flat > 0)
    codes = np.where(flat < 0, -magnitude, magnitude)
    return (codes.astype(dtype).reshape(numbers.shape) if form.bits == 8 else _packed(codes, dtype)), scales
