"""The bits of float32 numbers, and random bits, in MindSpore's operators: what formats of fewer bits are made of.

No operator of MindSpore reads a number's bits in a graph, so arithmetic computes them. All of it is exact: on any
device, the results are those of the kernels, where ops/include/codes.h and weights.h do the same. Integers are int32,
and their products and sums keep the lowest 32 bits. Over whole stacks, :func:`added` and :func:`product` compute them,
for the reason that rules/arithmetic.py gives. A number below 2^-126 in magnitude counts as 0.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..rules.arithmetic import SMALLEST

SIGN, INFINITY, NAN = -(2**31), 0x7F800000, 0x7FC00000
MANTISSA = 2**23  # the smallest significand as an integer: a float32 number has 23 bits of mantissa
_POWERS = Tensor(np.array([0.0, *(2.0**e for e in range(-126, 128)), np.inf], np.float32))
_mul_no_nan = ops.MulNoNan()


def shifted(x, count):
    """Return int32 numbers shifted right by a constant count, with zeros from the left, as if they were unsigned."""
    return ops.bitwise_and(ops.bitwise_right_shift(x, count), (1 << (32 - count)) - 1)


def power(exponent):
    """Return 2^exponent, for integers in float32 from -126 to 127; 0 for -127, infinity for 128."""
    return ops.gather(_POWERS, F.cast(exponent + 127.0, mstype.int32), 0)


def significand(x):
    """Return the exponents, in float32, and significands, int32, of float32 numbers from 2^-64 to below 2^64.

    A number is significand * 2^(exponent - 23), and its significand is from 2^23 to below 2^24.
    """
    # A logarithm near an integer may be rounded to either side: the comparisons correct it.
    about = ops.floor(ops.log(x) * 1.4426950408889634)
    between = x * power(-about)
    is_less, is_more = between < 1.0, between >= 2.0
    exponent = about - F.cast(is_less, mstype.float32) + F.cast(is_more, mstype.float32)
    between = ops.where(is_less, between * 2.0, ops.where(is_more, between * 0.5, between))
    return exponent, F.cast(between * MANTISSA, mstype.int32)


def joined(exponent, mantissa):
    """Return exponent * 2^23, for an exponent of at least 0 in float32, plus a significand, as int32."""
    upper = ops.bitwise_left_shift(F.cast(exponent + 1.0, mstype.int32), 23)
    return ops.bitwise_xor(upper, ops.bitwise_and(mantissa, MANTISSA - 1))


def bits_of(x):
    """Return the bits of float32 numbers, as int32; every NaN has the same."""
    magnitude = ops.abs(x)
    is_number = ops.logical_and(magnitude >= SMALLEST, ops.isfinite(x))
    is_none = ops.logical_not(is_number)
    magnitude = ops.masked_fill(magnitude, is_none, 1.0)
    is_large = magnitude >= 1.0
    exponent, mantissa = significand(ops.where(is_large, magnitude * 2.0**-64, magnitude * 2.0**64))
    bits = joined(exponent + F.cast(is_large, mstype.float32) * 128.0 + (127.0 - 65.0), mantissa)
    bits = ops.masked_fill(ops.masked_fill(bits, is_none, 0), ops.isinf(x), INFINITY)
    bits = ops.where(ops.logical_and(x < 0.0, bits != 0), ops.bitwise_xor(bits, SIGN), bits)
    return ops.masked_fill(bits, ops.isnan(x), NAN)


def from_bits(bits):
    """Return the float32 numbers of bits."""
    exponent = ops.bitwise_and(ops.bitwise_right_shift(bits, 23), 0xFF)
    mantissa = ops.bitwise_and(bits, MANTISSA - 1)
    magnitude = (F.cast(mantissa, mstype.float32) * (1.0 / MANTISSA) + 1.0) * ops.gather(_POWERS, exponent, 0)
    magnitude = ops.masked_fill(magnitude, ops.logical_and(exponent == 255, mantissa != 0), float("nan"))
    return ops.where(bits < 0, -magnitude, magnitude)


def added(x, y):
    """Return the sum of int32 numbers, of one shape."""
    return ops.addn((x, y))


def product(x, factor):
    """Return int32 numbers times a constant."""
    return _mul_no_nan(x, F.cast(factor, mstype.int32))


def truncated(bits, count):
    """Return bits with a constant number of the lowest ones set to 0."""
    return ops.bitwise_and(bits, -(1 << count))


def signed_16(bits):
    """Return the lowest 16 bits of int32 numbers as numbers with a sign."""
    return ops.bitwise_right_shift(ops.bitwise_left_shift(bits, 16), 16)


# ---- Noise -----------------------------------------------------------------------------------------------------------

GROUP = 1024  # elements whose noise differs by a table
FIRST_STATE, SECOND_STATE, THIRD_STATE, WEIGHT = range(4)
# What mixes the bits of the third state and of the weight, so that they differ from those of the first two states.
_FACTORS = {THIRD_STATE: 0x9E3779B1 - 2**32, WEIGHT: 0x85EBCA6B - 2**32}


def _hash(x):
    """Return a hash of int32 numbers, each of whose bits depends on every bit (Wellons' lowbias32)."""
    x = ops.bitwise_xor(x, shifted(x, 16)) * 0x7FEB352D
    x = ops.bitwise_xor(x, shifted(x, 15)) * (0x846CA68B - 2**32)
    return ops.bitwise_xor(x, shifted(x, 16))


def _hashed(x: np.ndarray) -> np.ndarray:
    """Return the same hash of uint32 numbers, when an optimizer is made."""
    x = x.astype(np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)).view(np.int32)


class Noise(nn.Cell):
    """Draws 32 random bits for each element of a tensor, the same as the kernels.

    Args:
        seed: The seed.
        most: The largest number of elements of a tensor.
    """

    def __init__(self, seed: float, most: int):
        super().__init__(auto_prefix=False)
        self.key = int(_hashed(np.array([int(seed) & 0xFFFFFFFF]))[0])
        self.table = Tensor(_hashed(np.arange(GROUP)))
        self.groups = Tensor(np.arange(-(-most // GROUP) + 1, dtype=np.int32))

    def construct(self, step, rows, begin, end):
        """Return the bits of a range of elements of some tensors, int32 of shape (tensors, end - begin).

        Args:
            step: The number of steps so far, int32 of shape (1,).
            rows: The indices of the tensors among all, int32 of shape (tensors,).
            begin: The first element, a constant, divisible by 1,024.
            end: The end of the range.
        """
        key = _hash(_hash(step + self.key) + rows).reshape((-1, 1))
        above = _hash(key + self.groups[begin // GROUP : -(-end // GROUP)])
        noise = ops.bitwise_xor(above.expand_dims(2), self.table)
        return noise.reshape((F.shape(rows)[0], -1))[:, : end - begin]


def noise_of_code(noise, use, count):
    """Return a constant number of random bits for the codes of a state.

    Args:
        noise: 32 random bits for each element.
        use: Which state it is.
        count: The number of bits.
    """
    if use == FIRST_STATE:
        return ops.bitwise_and(noise, (1 << count) - 1)
    return shifted(noise if use == SECOND_STATE else product(noise, _FACTORS[THIRD_STATE]), 32 - count)


def noise_of_16_bits(noise, use):
    """Return 16 random bits for a state or a weight of 16 bits."""
    if use == FIRST_STATE:
        return ops.bitwise_and(noise, 0xFFFF)
    return shifted(noise if use == SECOND_STATE else product(noise, _FACTORS[use]), 16)


# ---- Rounding to 16 bits ---------------------------------------------------------------------------------------------


def bfloat16_with_noise(x, noise):
    """Return float32 numbers rounded stochastically to bfloat16, by 16 random bits for each; still in float32."""
    return ops.where(ops.isfinite(x), from_bits(truncated(added(bits_of(x), noise), 16)), x)


def float16_with_noise(x, noise):
    """Return float32 numbers rounded stochastically to float16, by 16 random bits for each; still in float32."""
    noise, magnitude = ops.bitwise_right_shift(noise, 3), ops.abs(x)
    rounded = from_bits(truncated(added(bits_of(magnitude), noise), 13))
    # Below 2^-14, float16 numbers are 2^-24 apart.
    is_small = magnitude < 2.0**-14
    units = ops.masked_fill(magnitude, ops.logical_not(is_small), 0.0) * 2.0**24
    small = ops.floor(units + F.cast(noise, mstype.float32) * 2.0**-13) * 2.0**-24
    rounded = ops.where(is_small, small, rounded)
    return ops.where(ops.isfinite(x), ops.where(x < 0.0, -rounded, rounded), x)
