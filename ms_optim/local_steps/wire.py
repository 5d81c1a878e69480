"""What workers send of weight differences, and what they compare first: see ops/include/local_steps.h."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..kernels.libraries import wire_words
from ..kernels.local_interface import LocalMark, LocalNumber

if TYPE_CHECKING:
    from ..workers.transport import Workers
    from .compression import Quantized, SparseTopK


class Outer(NamedTuple):
    """Settings of the outer step: its arguments, what is sent, and when."""

    every: int
    fragments: int
    learning_rate: float
    momentum: float
    nesterov: bool
    compress: SparseTopK | Quantized | None

    def numbers(self, workers: Workers) -> np.ndarray:
        """Return the numbers that a launch receives in addition to tensors."""
        bits, chunk, density, decay = self.format()
        decay = -1.0 if decay is None else decay
        outer = (self.learning_rate, self.momentum, self.nesterov)
        numbers = np.array((workers.count, workers.rank, *outer, decay, bits, chunk, density), np.float64)
        assert numbers.size == LocalNumber.LOCAL_NUMBERS
        return numbers

    def format(self) -> tuple[int, int, float, float | None]:
        """Return bits, chunk, density and decay; 0 bits if all differences are sent and summed in float32."""
        given = self.compress
        return (0, 4096, 1.0, None) if given is None else (given.bits, given.chunk, given.density, given.decay)

    @property
    def has_residuals(self) -> bool:
        """Whether what is not sent is kept."""
        return self.format()[3] is not None

    def mark(self, optimizer: Sequence[Any], tensors: Sequence[Any]) -> np.ndarray:
        """Return the numbers that workers compare, without the last two: the step and the checksum of their weights."""
        bits, chunk, density, decay = self.format()
        real = np.array((self.learning_rate, self.momentum, density, -1.0 if decay is None else decay), np.float32)
        rate, momentum, density_bits, decay_bits = real.view(np.int32).tolist()
        checksums = [zlib.crc32(repr(tuple(one)).encode()) & 0x7FFFFFFF for one in (optimizer, tensors)]
        schedule = (self.every, self.fragments, rate, momentum, int(self.nesterov))
        mark = np.array((*schedule, bits, chunk, density_bits, decay_bits, *checksums), np.int32)
        assert mark.size == LocalMark.LOCAL_MARKS - 2
        return mark

    def words(self, sizes: Sequence[int]) -> int:
        """Return how many 4-byte words a worker sends for tensors."""
        bits, chunk, density, _ = self.format()
        # If all differences are summed, the sum of their squares is sent with them.
        return sum(sizes) + 1 if bits == 0 else sum(wire_words(size, chunk, density, bits) for size in sizes)


def fragments_of(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divide tensors, in order, into fragments of about equal numbers of elements; no fragment is empty.

    Args:
        sizes: The tensors' elements.
        count: Number of fragments.
    """
    ends = np.cumsum(sizes)
    middles = ends - np.array(sizes) / 2
    of_each = np.minimum(middles * count // ends[-1], count - 1).astype(int)
    # A large tensor may be larger than a fragment; each fragment gets at least one tensor.
    n = len(sizes)
    for i in range(n):
        lowest = max(0, count - (n - i), of_each[i - 1] if i else 0)
        of_each[i] = min(max(of_each[i], lowest), (of_each[i - 1] + 1) if i else 0)
    return [tuple(np.flatnonzero(of_each == k).tolist()) for k in range(count)]


def due(every: int, fragments: int) -> tuple[int, ...]:
    """Return for each fragment the step within a round, from 0, after which it is exchanged."""
    return tuple((k + 1) * every // fragments % every for k in range(fragments))
