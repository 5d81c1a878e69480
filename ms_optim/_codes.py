"""Converts states between 8-bit codes and float32 for checkpoints, as ops/include/codes.h does in a step.

A step rounds at random. A checkpoint rounds to the nearest code, as it has no step to draw random numbers for.
"""

from __future__ import annotations

import numpy as np

from ._kernels import CODE_BLOCK

SHIFT = 20  # 23 bits of a float32 mantissa, less the 3 of a code
OCTAVES = {np.dtype(np.int8): 15, np.dtype(np.uint8): 31}


def _delta(dtype) -> np.ndarray:
    return np.array(2.0 ** -OCTAVES[np.dtype(dtype)], np.float32)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of codes.

    Args:
        codes: int8 or uint8, of any shape.
        scales: float32, one for each block of 256.
    """
    flat = codes.reshape(-1)
    delta = _delta(codes.dtype)
    magnitude = np.abs(flat.astype(np.int32)).astype(np.uint32)
    numbers = ((magnitude << SHIFT) + delta.view(np.uint32)).view(np.float32) - delta
    numbers = np.where(flat < 0, -numbers, numbers)
    units = scales / (1 - delta)
    return (numbers * np.repeat(units, CODE_BLOCK)[: flat.size]).reshape(codes.shape)


def encode(numbers: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of float32 numbers.

    Args:
        numbers: float32, of any shape.
        dtype: int8 for signed codes, uint8 for unsigned ones.
    """
    flat = numbers.astype(np.float32).reshape(-1)
    padded = np.zeros(-(-flat.size // CODE_BLOCK) * CODE_BLOCK, np.float32)
    padded[: flat.size] = np.abs(flat)
    scales = padded.reshape(-1, CODE_BLOCK).max(axis=1)
    delta = _delta(dtype)
    factors = np.divide(1 - delta, scales, out=np.zeros_like(scales), where=scales > np.float32(1e-37))
    z = padded[: flat.size] * np.repeat(factors, CODE_BLOCK)[: flat.size] + delta
    half = np.uint32(1 << (SHIFT - 1))
    magnitude = ((z.view(np.uint32) - delta.view(np.uint32) + half) >> SHIFT).astype(np.int32)
    if np.dtype(dtype) == np.uint8:
        magnitude = np.maximum(magnitude, flat > 0)
    return np.where(flat < 0, -magnitude, magnitude).astype(dtype).reshape(numbers.shape), scales
