"""The bits of float32 numbers, and random bits, in MindSpore's operators: what formats of fewer bits are made of.

No operator of MindSpore reads a number's bits in a graph, so arithmetic computes them. All of it is exact: on any
device, the results are those of the kernels, where ops/include/codes.h and weights.h do the same. Integers are int32,
and their products and sums keep the lowest 32 bits. A number below 2^-126 in magnitude counts as 0.
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


def shifted(x, count):
    """Return int32 numbers shifted right by a constant count, with zeros from the left, as if they were unsigned."""
    return ops.bitwise_and(ops.bitwise_right_shift(x, count), (1 << (32 - count)) - 1)


def power(exponent):
    """Return 2^exponent in float32, for int32 exponents from -126 to 127; 0 for -127, infinity for 128."""
    return ops.gather(_POWERS, exponent + 127, 0)


def significand(x):
    """Return the exponents and significands, both int32, of float32 numbers from 2^-64 to below 2^64.

    A number is significand * 2^(exponent - 23), and its significand is from 2^23 to below 2^24.
    """
    # A logarithm near an integer may be rounded to either side: the comparisons correct it.
    about = F.cast(ops.floor(ops.log(x) * 1.4426950408889634), mstype.int32)
    between = x * power(-about)
    is_less, is_more = between < 1.0, between >= 2.0
    exponent = about - F.cast(is_less, mstype.int32) + F.cast(is_more, mstype.int32)
    between = ops.where(is_less, between * 2.0, ops.where(is_more, between * 0.5, between))
    return exponent, F.cast(between * MANTISSA, mstype.int32)


def bits_of(x):
    """Return the bits of float32 numbers, as int32; every NaN has the same."""
    magnitude = ops.abs(x)
    is_number = ops.logical_and(magnitude >= SMALLEST, ops.isfinite(x))
    magnitude = ops.where(is_number, magnitude, ops.ones_like(magnitude))
    is_large = magnitude >= 1.0
    exponent, mantissa = significand(magnitude * ops.where(is_large, 2.0**-64, 2.0**64))
    bits = (exponent + ops.where(is_large, 127 + 63, 127 - 65)) * MANTISSA + mantissa
    bits = ops.where(is_number, bits, ops.where(ops.isinf(x), INFINITY, 0))
    bits = bits + ops.where(ops.logical_and(x < 0.0, bits != 0), SIGN, 0)
    return ops.where(ops.isnan(x), NAN, bits)


def from_bits(bits):
    """Return the float32 numbers of bits."""
    exponent = ops.bitwise_and(ops.bitwise_right_shift(bits, 23), 0xFF)
    mantissa = ops.bitwise_and(bits, MANTISSA - 1)
    magnitude = (F.cast(mantissa, mstype.float32) * (1.0 / MANTISSA) + 1.0) * power(exponent - 127)
    magnitude = ops.where(ops.logical_and(exponent == 255, mantissa != 0), float("nan"), magnitude)
    return ops.where(bits < 0, -magnitude, magnitude)


def truncated(bits, count):
    """Return bits with a constant number of the lowest ones set to 0."""
    return ops.bitwise_and(bits, -(1 << count))


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
    return shifted(noise if use == SECOND_STATE else noise * _FACTORS[THIRD_STATE], 32 - count)


def noise_of_16_bits(noise, use):
    """Return 16 random bits for a state or a weight of 16 bits."""
    if use == FIRST_STATE:
        return ops.bitwise_and(noise, 0xFFFF)
    return shifted(noise if use == SECOND_STATE else noise * _FACTORS[use], 16)


# ---- Rounding to 16 bits ---------------------------------------------------------------------------------------------


def bfloat16_with_noise(x, noise):
    """Return float32 numbers rounded stochastically to bfloat16, by 16 random bits for each; still in float32."""
    return ops.where(ops.isfinite(x), from_bits(truncated(bits_of(x) + noise, 16)), x)


def float16_with_noise(x, noise):
    """Return float32 numbers rounded stochastically to float16, by 16 random bits for each; still in float32."""
    noise, magnitude = ops.bitwise_right_shift(noise, 3), ops.abs(x)
    rounded = from_bits(truncated(bits_of(magnitude) + noise, 13))
    # Below 2^-14, float16 numbers are 2^-24 apart.
    is_small = magnitude < 2.0**-14
    units = ops.where(is_small, magnitude, ops.zeros_like(magnitude)) * 2.0**24
    small = ops.floor(units + F.cast(noise, mstype.float32) * 2.0**-13) * 2.0**-24
    rounded = ops.where(is_small, small, rounded)
    return ops.where(ops.isfinite(x), ops.where(x < 0.0, -rounded, rounded), x)
