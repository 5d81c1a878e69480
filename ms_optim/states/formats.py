"""The formats that states are stored in: a row of FORMATS is all that makes one known in Python.

ops/include/formats.h states the same for the kernels. Checkpoints convert between formats. A step rounds to codes
stochastically; a checkpoint rounds to the nearest code, because it has no step to draw random numbers for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ..kernels.interface import CODE_BLOCK

ROWS = "rows"  # the kind of a state that has one number for each row


class Codes(NamedTuple):
    """Codes with one float32 scale for each block of 256; see ops/include/codes.h.

    Attributes:
        bits: The bits of a code.
        mantissa: The mantissa bits among these.
        in_word: Number of codes in an element of the state. The first is in the lowest bits.
    """

    bits: int
    mantissa: int
    in_word: int = 1

    def encode(self, numbers: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and scales of float32 numbers.

        Args:
            numbers: float32, of any shape.
            dtype: The NumPy dtype of the codes, signed or unsigned.
        """
        flat, is_signed = numbers.astype(np.float32).reshape(-1), np.dtype(dtype).kind == "i"
        padded = np.zeros(-(-flat.size // CODE_BLOCK) * CODE_BLOCK, np.float32)
        padded[: flat.size] = np.abs(flat)
        scales = padded.reshape(-1, CODE_BLOCK).max(axis=1)
        delta, shift = self._delta(is_signed), 23 - self.mantissa
        factors = np.divide(1 - delta, scales, out=np.zeros_like(scales), where=scales > np.float32(1e-37))
        z = padded[: flat.size] * np.repeat(factors, CODE_BLOCK)[: flat.size] + delta
        half = np.uint32(1 << (shift - 1))
        magnitude = ((z.view(np.uint32) - delta.view(np.uint32) + half) >> shift).astype(np.int32)
        if not is_signed:
            magnitude = np.maximum(magnitude, flat > 0)
        codes = np.where(flat < 0, -magnitude, magnitude)
        return (codes.astype(dtype).reshape(numbers.shape) if self.in_word == 1 else self._packed(codes, dtype)), scales

    def decode(self, codes: np.ndarray, scales: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return the float32 numbers of codes.

        Args:
            codes: What :meth:`encode` returned.
            scales: float32, one for each block.
            shape: The shape of the numbers, which words of several codes do not determine.
        """
        delta = self._delta(codes.dtype.kind == "i")
        flat = codes.reshape(-1) if self.in_word == 1 else self._unpacked(codes.reshape(-1), math.prod(shape))
        magnitude = np.abs(flat.astype(np.int32)).astype(np.uint32)
        numbers = ((magnitude << (23 - self.mantissa)) + delta.view(np.uint32)).view(np.float32) - delta
        numbers = np.where(flat < 0, -numbers, numbers)
        units = scales / (1 - delta)
        return (numbers * np.repeat(units, CODE_BLOCK)[: flat.size]).reshape(tuple(shape))

    def _delta(self, is_signed: bool) -> np.ndarray:
        """Return the offset that is added to a number before its upper bits are taken as the code."""
        octaves = (1 << (self.bits - is_signed - self.mantissa)) - 1
        return np.array(2.0**-octaves, np.float32)

    def _bits(self) -> np.ndarray:
        """Return the first bit of each code in a word."""
        return (self.bits * np.arange(self.in_word)).astype(np.uint32)

    def _unpacked(self, words: np.ndarray, size: int) -> np.ndarray:
        """Return the codes in words, sign-extended."""
        codes = words.reshape(-1, 1).astype(np.uint32) >> self._bits() & np.uint32((1 << self.bits) - 1)
        codes, sign = codes.astype(np.int32).reshape(-1)[:size], 1 << (self.bits - 1)
        return (codes ^ sign) - sign if words.dtype.kind == "i" else codes

    def _packed(self, codes: np.ndarray, dtype: Any) -> np.ndarray:
        """Return the words that hold codes."""
        whole = np.zeros(-(-codes.size // self.in_word) * self.in_word, np.uint32)
        whole[: codes.size] = codes & ((1 << self.bits) - 1)
        words = np.bitwise_or.reduce(whole.reshape(-1, self.in_word) << self._bits(), axis=1)
        return words.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


class Format(NamedTuple):
    """How the states of an optimizer are stored.

    Attributes:
        name: The value of the argument `state_dtype`.
        signed: The dtype of states that may be negative. The dtype of a state alone says its format.
        unsigned: The dtype of states that are never negative.
        codes: How numbers become codes with scales; None if elements are numbers.
        least: The elements of the smallest tensor whose states are stored so; the states of others are float32.
    """

    name: str
    signed: Any
    unsigned: Any
    codes: Codes | None = None
    least: int = 0

    @property
    def in_element(self) -> int:
        """How many numbers an element of a state holds."""
        return 1 if self.codes is None else self.codes.in_word

    def stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a state that represents numbers of a shape."""
        return tuple(shape) if self.in_element == 1 else self.part(0, math.prod(shape))[1:]

    def scales(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the scales of numbers of a shape; None if the format has no scales."""
        return None if self.codes is None else (-(-math.prod(shape) // CODE_BLOCK),)

    def part(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of a state's elements that hold a range of numbers; it begins with a whole element."""
        return begin // self.in_element, -(-end // self.in_element)

    def encode(self, numbers: np.ndarray, dtype: Any) -> tuple[Tensor, Tensor | None]:
        """Return a state of a dtype of this format that represents float32 numbers, and its scales if it has any."""
        if self.codes is None:
            return Tensor(numbers, dtype), None
        codes, scales = self.codes.encode(numbers, ms.dtype_to_nptype(dtype))
        return Tensor(codes), Tensor(scales)

    def decode(self, state: Tensor, scales: Tensor | None, shape: Sequence[int]) -> np.ndarray:
        """Return the float32 numbers of a shape that a state represents."""
        if self.codes is None or scales is None:
            return ops.cast(state, ms.float32).asnumpy()
        return self.codes.decode(state.asnumpy(), scales.asnumpy(), shape)


_LEAST = 4096
FORMATS = {
    row.name: row
    for row in (
        Format("float32", ms.float32, ms.float32),
        Format("bfloat16", ms.bfloat16, ms.bfloat16),
        Format("8bit", ms.int8, ms.uint8, Codes(8, mantissa=3), _LEAST),
        Format("4bit", ms.int16, ms.uint16, Codes(4, mantissa=1, in_word=4), _LEAST),
    )
}
OF_DTYPE = {dtype: row for row in FORMATS.values() for dtype in (row.signed, row.unsigned)}


def state_dtype(asked: str, kind: str, size: int) -> ms.dtype.Type:
    """Return the dtype of a state.

    Args:
        asked: The argument `state_dtype`.
        kind: The state's kind, as in :class:`ms_optim.Rule`.
        size: Number of elements of its parameter.
    """
    row = FORMATS[asked]
    if kind in ("exact", ROWS) or size < row.least:
        row = FORMATS["float32"]
    return row.signed if kind == "signed" else row.unsigned
