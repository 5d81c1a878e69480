"""The send buffer ("wire") of a worker: how many elements of each tensor it has in a step, and its size."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..kernels.interface import LIMB_BITS, MARK_WORDS

WIRE_DTYPES = ("float32", "float16")


# The mark at the end of a wire, in limbs of 6 bits, each with its square: see ops/include/dgc.h. In the composite path,
# where no kernel reads the wire, the step and the settings have separate limbs: 6 and 4.
STEP_LIMBS = 6
LARGEST_LIMB = (1 << LIMB_BITS) - 1


class Compression(NamedTuple):
    """When compression begins, how it increases, which tensors it excludes, and the dtype of sent values."""

    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    min_compress_numel: int
    wire_dtype: str


def place_bytes(size: int) -> int:
    """Return how many bytes are needed for an index into a tensor."""
    return max(1, ((size - 1).bit_length() + 7) // 8)


def wire_words(sizes: Sequence[int], counts: Sequence[int], wire_dtype: str = "float32") -> int:
    """Return how many 4-byte words a worker sends: see ops/include/dgc.h.

    Args:
        sizes: The tensors' sizes.
        counts: The number of elements of each that are sent; 0 means all.
        wire_dtype: The dtype of the sent values of compressed tensors.
    """
    value = np.dtype(wire_dtype).itemsize
    sent = (count * (value + place_bytes(size)) if count else 4 * size for size, count in zip(sizes, counts))
    return (sum(sent) + 3) // 4 + MARK_WORDS


def settings_number(*settings: Any) -> int:
    """Return a 28-bit number that is equal for equal settings, and almost always different for others."""
    return zlib.crc32(repr(settings).encode()) >> 4


def ramp(begin: int, length: int, sparsity: Sequence[float]) -> list[tuple[int, float | None]]:
    """Return the periods of training: the first step of each, and its sparsity, None if all elements are sent.

    Args:
        begin: The first step with compression.
        length: Number of steps from there to the last sparsity.
        sparsity: The sparsities of the ramp, each for the same number of steps.
    """
    periods: dict[int, float | None] = {0: None} if begin > 0 else {}
    for stage, part in enumerate(sparsity):
        periods[begin + math.ceil(stage * length / len(sparsity))] = part
    # Stages shorter than a step begin at the same step; the last of them is used.
    return [next(same) for _, same in groupby(periods.items(), key=lambda period: period[1])]


def sent(sparsity: float | None, size: int, min_compress_numel: int) -> int:
    """Return how many elements of a tensor a worker sends; 0 means all, without compression."""
    if sparsity is None or size < min_compress_numel:
        return 0
    return max(1, round((1.0 - sparsity) * size))
