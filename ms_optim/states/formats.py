"""The formats that states are stored in: a row of FORMATS is all that makes one known in Python.

ops/include/formats.h states the same for the kernels. The step in MindSpore's operators and checkpoints convert states
here. A step rounds to codes stochastically; a checkpoint rounds to the nearest code, because it has no step to draw
random numbers for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..kernels.interface import CODE_BLOCK
from ..rules.arithmetic import expanded
from . import bits

ROWS = "rows"  # the kind of a state that has one number for each row


class BFloat16(nn.Cell):
    """Numbers that are rounded to bfloat16 stochastically; see ops/include/codes.h."""

    has_scales = False

    def __init__(self):
        super().__init__(auto_prefix=False)

    def noise(self, noise, use):
        """Return the random bits of a state that rounding takes, of the 32 for each element."""
        return bits.noise_of_16_bits(noise, use)

    def encode(self, numbers, noise, is_signed):
        """Return rounded numbers, still in float32; see :meth:`Codes.encode`."""
        return bits.bfloat16_with_noise(numbers, noise[:, : F.shape(numbers)[1]]), ()

    def decode(self, numbers, scales, size, is_signed):
        """Return the numbers; see :meth:`Codes.decode`."""
        return numbers


class Codes(nn.Cell):
    """Codes with one float32 scale for each block of 256; see ops/include/codes.h.

    Args:
        bits: The bits of a code.
        mantissa: The mantissa bits among these.
        in_word: Number of codes in an element of the state. The first is in the lowest bits.
    """

    has_scales = True

    def __init__(self, bits: int, mantissa: int, in_word: int = 1):
        super().__init__(auto_prefix=False)
        self.bits, self.in_word, self.cut_off = bits, in_word, 23 - mantissa
        self.half = 1 << (self.cut_off - 1)
        # The number of octaves of unsigned and of signed codes; in each pair below, signed codes come second.
        self.octaves = tuple((1 << (bits - is_signed - mantissa)) - 1 for is_signed in (0, 1))
        self.deltas = tuple(2.0**-octaves for octaves in self.octaves)
        self.largest = tuple(float(1 - np.float32(delta)) for delta in self.deltas)
        self.numbers = tuple(Tensor(self._numbers(is_signed)) for is_signed in (0, 1))

    def _numbers(self, is_signed):
        """Return the number of each code, at the place that its bits are as an integer."""
        codes = np.arange(1 << self.bits, dtype=np.int32)
        codes = np.where(is_signed & codes >> (self.bits - 1), codes - (1 << self.bits), codes)
        delta = np.float32(self.deltas[is_signed])
        upper = np.abs(codes).astype(np.uint32) << self.cut_off
        return np.copysign((upper + delta.view(np.uint32)).view(np.float32) - delta, codes).astype(np.float32)

    def noise(self, noise, use):
        """Return the random bits of a state that rounding takes, of the 32 for each element."""
        return bits.noise_of_code(noise, use, self.cut_off)

    def encode(self, numbers, noise, is_signed):
        """Return the codes and scales of some tensors.

        Args:
            numbers: Float32 of shape (tensors, elements).
            noise: int32, what is added to the bits that are cut off: what :meth:`noise` returned, for whole blocks, or
                `half`, which rounds to nearest.
            is_signed: Whether the codes are signed.

        Returns:
            The words that hold the codes, int32 of shape (tensors, words), and the scales, float32 of shape (tensors,
            blocks).
        """
        size, delta, top = F.shape(numbers)[1], self.deltas[is_signed], self.largest[is_signed]
        numbers = self._in_blocks(numbers)
        is_nan = ops.isnan(numbers)
        magnitude = ops.masked_fill(ops.abs(numbers), is_nan, 0.0)
        scales = ops.amax(magnitude, 2, True)
        factors = ops.where(scales > 1e-37, top / scales, ops.zeros_like(scales))
        magnitude = ops.masked_fill(magnitude, ops.isinf(magnitude), 0.0)
        exponent, mantissa = bits.significand(magnitude * expanded(factors, magnitude) + delta)
        upper = bits.joined(exponent + (self.octaves[is_signed] - 1.0), mantissa)
        upper = upper + noise if isinstance(noise, int) else bits.added(upper, noise.reshape(F.shape(upper)))
        codes = ops.bitwise_right_shift(upper, self.cut_off)
        if is_signed:
            codes = ops.where(numbers < 0.0, -codes, codes)
        else:
            # Code 0 stands for 0 alone.
            codes = ops.maximum(codes, F.cast(numbers > 0.0, mstype.int32))
        has_nan = ops.amax(F.cast(is_nan, mstype.float32), 2, True) > 0.0
        scales = ops.where(has_nan, float("nan"), scales)
        return self._words(codes, is_signed)[:, : -(-size // self.in_word)], scales[:, :, 0]

    def decode(self, words, scales, size, is_signed):
        """Return the float32 numbers, of shape (tensors, size), of what :meth:`encode` returned."""
        codes = words if self.in_word == 1 else self._unpacked(words)
        places = ops.bitwise_and(self._in_blocks(codes), (1 << self.bits) - 1)
        numbers = ops.gather(self.numbers[is_signed], places, 0)
        units = (scales / self.largest[is_signed]).expand_dims(2)
        return (numbers * expanded(units, numbers)).reshape((F.shape(words)[0], -1))[:, :size]

    def _in_blocks(self, x):
        """Return x of shape (tensors, elements) in blocks, the last of which is filled up with zeros."""
        tensors, size = F.shape(x)
        rest = -size % CODE_BLOCK
        if rest > 0:
            x = ops.concat((x, ops.zeros((tensors, rest), x.dtype)), 1)
        return x.reshape((tensors, -1, CODE_BLOCK))

    def _words(self, codes, is_signed):
        """Return codes in words."""
        codes = codes.reshape((F.shape(codes)[0], -1))
        if self.in_word == 1:
            return codes
        codes = ops.bitwise_and(codes, (1 << self.bits) - 1).reshape((F.shape(codes)[0], -1, self.in_word))
        words = codes[:, :, 0]
        for k in range(1, self.in_word):
            words = ops.bitwise_xor(words, ops.bitwise_left_shift(codes[:, :, k], self.bits * k))
        return bits.signed_16(words) if is_signed else words

    def _unpacked(self, words):
        """Return the codes in words."""
        codes = ()
        for k in range(self.in_word):
            codes += (ops.bitwise_and(ops.bitwise_right_shift(words, self.bits * k), (1 << self.bits) - 1),)
        return ops.stack(codes, 2).reshape((F.shape(words)[0], -1))


class Format(NamedTuple):
    """How the states of an optimizer are stored.

    Attributes:
        name: The value of the argument `state_dtype`.
        signed: The dtype of states that may be negative. The dtype of a state alone says its format.
        unsigned: The dtype of states that are never negative.
        conversion: How numbers become what is stored; None if they are stored as they are.
        least: The elements of the smallest tensor whose states are stored so; the states of others are float32.
    """

    name: str
    signed: Any
    unsigned: Any
    conversion: BFloat16 | Codes | None = None
    least: int = 0

    @property
    def in_element(self) -> int:
        """How many numbers an element of a state holds."""
        return self.conversion.in_word if isinstance(self.conversion, Codes) else 1

    @property
    def has_scales(self) -> bool:
        """Whether each block of a state has a scale."""
        return self.conversion is not None and self.conversion.has_scales

    def stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a state that represents numbers of a shape."""
        return tuple(shape) if self.in_element == 1 else self.part(0, math.prod(shape))[1:]

    def scales(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the scales of numbers of a shape; None if the format has no scales."""
        return (-(-math.prod(shape) // CODE_BLOCK),) if self.has_scales else None

    def part(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of a state's elements that hold a range of numbers; it begins with a whole element."""
        return begin // self.in_element, -(-end // self.in_element)

    def encode(self, numbers: np.ndarray, dtype: Any) -> tuple[Tensor, Tensor | None]:
        """Return a state of a dtype of this format that represents float32 numbers, and its scales if it has any."""
        if not isinstance(self.conversion, Codes):
            return Tensor(numbers, dtype), None
        flat = Tensor(numbers.astype(np.float32).reshape(1, -1))
        words, scales = self.conversion.encode(flat, self.conversion.half, dtype == self.signed)
        return ops.cast(words, dtype).reshape(self.stored(numbers.shape)), scales[0]

    def decode(self, state: Tensor, scales: Tensor | None, shape: Sequence[int]) -> np.ndarray:
        """Return the float32 numbers of a shape that a state represents."""
        if not isinstance(self.conversion, Codes) or scales is None:
            return ops.cast(state, ms.float32).asnumpy()
        words, size = ops.cast(state, ms.int32).reshape((1, -1)), math.prod(shape)
        numbers = self.conversion.decode(words, scales.reshape((1, -1)), size, state.dtype == self.signed)
        return numbers.asnumpy().reshape(tuple(shape))


class Conversions(nn.Cell):
    """The conversions of some formats, chosen by the dtype that a state is stored in, when a graph is compiled.

    Args:
        rows: The formats; the last one takes all dtypes that no other has.
    """

    def __init__(self, rows: Sequence[Format]):
        super().__init__(auto_prefix=False)
        self.signed, self.unsigned = rows[0].signed, rows[0].unsigned
        self.conversion: Any = rows[0].conversion
        self.is_last = len(rows) == 1
        self.others: Any = None if self.is_last else Conversions(rows[1:])

    def noise(self, dtype, noise, use):
        """Return the random bits that rounding to a dtype takes; see :meth:`Codes.noise`."""
        if self.is_last or dtype == self.signed or dtype == self.unsigned:
            return self.conversion.noise(noise, use)
        return self.others.noise(dtype, noise, use)

    def encode(self, dtype, numbers, noise, is_signed):
        """Return what is stored in a dtype; see :meth:`Codes.encode`."""
        if self.is_last or dtype == self.signed or dtype == self.unsigned:
            return self.conversion.encode(numbers, noise, is_signed)
        return self.others.encode(dtype, numbers, noise, is_signed)

    def decode(self, dtype, words, scales, size, is_signed):
        """Return the numbers that are stored in a dtype; see :meth:`Codes.decode`."""
        if self.is_last or dtype == self.signed or dtype == self.unsigned:
            return self.conversion.decode(words, scales, size, is_signed)
        return self.others.decode(dtype, words, scales, size, is_signed)


_LEAST = 4096
FORMATS = {
    row.name: row
    for row in (
        Format("float32", ms.float32, ms.float32),
        Format("bfloat16", ms.bfloat16, ms.bfloat16, BFloat16()),
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
