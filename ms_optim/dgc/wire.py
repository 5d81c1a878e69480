"""What a worker sends: how many elements of each tensor in which step, and the bytes that they take."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from .._abi import LIMB_BITS, MARK_WORDS

WIRE_DTYPES = ("float32", "float16")


# The mark at a wire's end, in limbs of 6 bits, each with its square: see ops/include/dgc.h. The composite path, whose
# wires no kernel reads, has limbs of the step and of the settings apart: 6 and 4.
STEP_LIMBS = 6
LARGEST_LIMB = (1 << LIMB_BITS) - 1
MOST_PROCESSES = 4096  # whose limbs' squares float32 adds up exactly


class Compression(NamedTuple):
    """When compression begins, how it grows, which tensors it spares, and as what values travel."""

    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    min_compress_numel: int
    wire_dtype: str


def place_bytes(size: int) -> int:
    """Return how many bytes hold any place in a tensor."""
    return max(1, ((size - 1).bit_length() + 7) // 8)


def wire_words(sizes: Sequence[int], counts: Sequence[int], wire_dtype: str = "float32") -> int:
    """Return how many 4-byte words a worker sends: see ops/include/dgc.h.

    Args:
        sizes: The tensors' sizes.
        counts: How many elements of each are sent; 0: all.
        wire_dtype: The dtype of what is sent of compressed tensors.
    """
    value = np.dtype(wire_dtype).itemsize
    sent = (count * (value + place_bytes(size)) if count else 4 * size for size, count in zip(sizes, counts))
    return (sum(sent) + 3) // 4 + MARK_WORDS


def settings_number(*settings: Any) -> int:
    """Return 28 bits that are the same on workers of the same settings, and hardly ever on others."""
    return zlib.crc32(repr(settings).encode()) >> 4


def ramp(begin: int, length: int, sparsity: Sequence[float]) -> list[tuple[int, float | None]]:
    """Return the periods of training: the step that each begins with, and its sparsity, None while all is sent.

    Args:
        begin: The first step with compression.
        length: Steps from there to the last sparsity.
        sparsity: The sparsities on the way, of equally many steps each.
    """
    periods: dict[int, float | None] = {0: None} if begin > 0 else {}
    for stage, part in enumerate(sparsity):
        periods[begin + math.ceil(stage * length / len(sparsity))] = part
    # Stages shorter than a step begin together: the last of them counts.
    return [next(same) for _, same in groupby(periods.items(), key=lambda period: period[1])]


def sent(sparsity: float | None, size: int, min_compress_numel: int) -> int:
    """Return how many elements of a tensor a worker sends; 0: all, uncompressed."""
    if sparsity is None or size < min_compress_numel:
        return 0
    return max(1, round((1.0 - sparsity) * size))
