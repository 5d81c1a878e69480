"""SparseTopK and Quantized: how LocalSteps compresses the differences of weights that it sends."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..arguments.checks import check_count, check_positive, fail, is_number

VALUE_BITS = (2, 4, 8, 16, 32)
LARGEST_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class SparseTopK:
    r"""Send the largest accumulated elements, in few bits, and keep the rest as residuals (error feedback).

    Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo <https://arxiv.org/abs/2508.15706>`_ (2025).
    Each worker accumulates the differences :math:`\Delta` of its weights in residuals,
    :math:`e \leftarrow \beta e + \Delta`, sends the :math:`k = \max(1, \mathrm{round}(\text{density} \cdot n))`
    elements of largest magnitude of each chunk of :math:`n` elements, and keeps in :math:`e` what it has not sent,
    including rounding errors. Chunks are consecutive elements of each flattened tensor; the last chunk may be shorter.

    The residuals take 4 bytes per element. The positions of the sent elements are encoded with Elias-Fano coding: with
    the defaults, 8 bits per position in addition to 2 bits per value.

    Args:
        density (float): The fraction of each chunk that is sent, in the range (0.0, 1.0]. Default: ``0.0156`` .
        bits (int): The number of bits of a value. 32 is exact, 16 is float16. With 8 and 4 bits, values are multiples
            of one float32 scale for each chunk. With 2 bits, a value is its sign and one of two float16 magnitudes for
            each chunk: the mean of the magnitudes up to their mean, and the mean of the others. Default: ``2`` .
        chunk (int): The number of elements of a chunk, from 2 to 65,536. Default: ``4096`` .
        decay (float): The factor :math:`\beta` of the residuals at the next exchange, in the range [0.0, 1.0]. Default:
            ``0.95`` .

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range.

    Examples:
        >>> from ms_optim import SparseTopK
        >>> print(SparseTopK(density=0.01, bits=4))
        SparseTopK(density=0.01, bits=4, chunk=4096, decay=0.95)
    """

    density: float = 0.0156
    bits: int = 2
    chunk: int = 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_format("SparseTopK", self.bits, self.chunk)
        check_positive("SparseTopK", "density", self.density)
        if self.density > 1.0:
            fail(ValueError, "SparseTopK", "density", "a number in the range (0.0, 1.0]", self.density)
        if not is_number(self.decay) or not 0.0 <= self.decay <= 1.0:
            fail(_error(self.decay), "SparseTopK", "decay", "a number in the range [0.0, 1.0]", self.decay)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Send all differences in few bits; rounding errors are not kept.

    Jaghouar et al., `INTELLECT-1 Technical Report <https://arxiv.org/abs/2412.01152>`_ (2024), sends 8 bits per
    element.

    Args:
        bits (int): The number of bits of a value, as in :class:`SparseTopK`. Default: ``8`` .
        chunk (int): The number of elements that share scales, from 2 to 65,536. Default: ``4096`` .

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range.

    Examples:
        >>> from ms_optim import Quantized
        >>> print(Quantized())
        Quantized(bits=8, chunk=4096)
    """

    bits: int = 8
    chunk: int = 4096

    def __post_init__(self) -> None:
        check_format("Quantized", self.bits, self.chunk)

    @property
    def density(self) -> float:
        """The fraction of each chunk that is sent."""
        return 1.0

    @property
    def decay(self) -> float | None:
        """None, because there are no residuals."""
        return None


def check_format(name: str, bits: Any, chunk: Any) -> None:
    """Check the bits of a value and the elements of a chunk."""
    check_count(name, "bits", bits, 1)
    if bits not in VALUE_BITS:
        fail(ValueError, name, "bits", f"one of {VALUE_BITS}", bits)
    check_count(name, "chunk", chunk, 2)
    if chunk > LARGEST_CHUNK:
        fail(ValueError, name, "chunk", f"at most {LARGEST_CHUNK}", chunk)


def _error(value):
    return ValueError if is_number(value) else TypeError
