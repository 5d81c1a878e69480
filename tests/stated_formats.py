"""The formats of states in fewer bits, stated once more in NumPy: noise, codes, and what codes stand for."""

from typing import NamedTuple

import numpy as np

BLOCK = 256


def scrambled(x):
    x = np.asarray(x, np.uint64)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


def noise(seed, step, row, n):
    """Return the 32 random bits of each element of a tensor."""
    mask = 0xFFFFFFFF
    key = int(scrambled((int(scrambled((int(scrambled(seed)) + step) & mask)) + row) & mask))
    i = np.arange(n)
    return scrambled(i % 1024) ^ scrambled((key + i // 1024) & mask)


class Codes(NamedTuple):
    """How codes are made: bits of mantissa, octaves of a signed and of an unsigned one, dtypes, codes in an element."""

    mantissa: int
    octaves: tuple[int, int]
    dtypes: tuple[type, type]
    each: int


CODES = {"8bit": Codes(3, (15, 31), (np.int8, np.uint8), 1), "4bit": Codes(1, (3, 7), (np.int16, np.uint16), 4)}


def noise_of(kind, k, bits):
    """Return the noise of a state's codes: as many bits as a code lacks of the 23 of a float32 mantissa."""
    lacking = 23 - CODES[kind].mantissa
    if k == 0:
        return bits % np.uint64(2**lacking)
    bits = bits * np.uint64(0x9E3779B1) % np.uint64(2**32) if k == 2 else bits
    return bits >> np.uint64(32 - lacking)


def coded(x, kind, k, bits, is_signed=None):
    """Return codes without their signs, and scales: z = |x| / scale (1 - delta) + delta, its upper bits counted."""
    is_signed = k == 0 if is_signed is None else is_signed
    octaves, bits = CODES[kind].octaves[not is_signed], noise_of(kind, k, bits)
    delta = np.float32(2.0**-octaves)
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK, np.float32)
    padded[: x.size] = np.abs(x)
    scales = padded.reshape(-1, BLOCK).max(1)
    factors = np.where(scales > 1e-37, (1 - delta) / np.where(scales > 0, scales, 1), 0).astype(np.float32)
    z = padded[: x.size] * np.repeat(factors, BLOCK)[: x.size] + delta
    offset = z.view(np.uint32).astype(np.uint64) - int(delta.view(np.uint32)) + bits
    return (offset >> np.uint64(23 - CODES[kind].mantissa)).astype(int), scales


def codes_in(array, kind, n):
    """Return the codes that an array holds; of 4 bits, the first of two is in the lower half of a byte."""
    if kind == "8bit":
        return array.astype(int)
    raw = array.view(np.uint8)
    assert array.size == -(-n // 4)
    digits = np.stack([raw % 16, raw // 16], 1).reshape(-1).astype(int)
    assert (digits[n:] == 0).all()
    return np.where((digits > 7) & (array.dtype == np.int16), digits - 16, digits)[:n]


def numbers_in(array, scales, kind, k, n):
    """Return what an array of codes stands for, as z is delta times a power of two and a fraction."""
    codes, steps, delta = codes_in(array, kind, n), 2 ** CODES[kind].mantissa, 2.0 ** -CODES[kind].octaves[k > 0]
    octave, fraction = np.divmod(np.abs(codes), steps)
    z = delta * 2.0**octave * (1 + fraction / steps)
    return np.sign(codes) * (z - delta) / (1 - delta) * np.repeat(scales.astype(np.float64), BLOCK)[:n]
