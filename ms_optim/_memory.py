"""The tensors that an optimizer holds besides weights and gradients: states, their scales, and masters.

An optimizer creates its tensors by these rules; ``python -m ms_optim plan`` counts their bytes and creates none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mindspore as ms

from . import _kernels

BYTES = {ms.float32: 4, ms.float16: 2, ms.bfloat16: 2, ms.int8: 1, ms.uint8: 1}
CODES = (ms.int8, ms.uint8)


class Held(NamedTuple):
    """A tensor that is held for a parameter: the prefix of its name, the parameter's index, its dtype and its shape."""

    prefix: str
    place: int
    dtype: Any
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BYTES[self.dtype]


def needs_master(options, dtype) -> bool:
    """Return whether a parameter of a dtype has a float32 master."""
    return options.master_weights and dtype != ms.float32


def bytes_each(prefixes: Sequence[str], options, dtype, size: int) -> int:
    """Return the bytes of states and master for each element of a parameter; scales are too small to matter."""
    dtypes = [_kernels.state_dtype(options.state_dtype, k, size) for k in range(len(prefixes))]
    return sum(BYTES[d] for d in dtypes) + BYTES[ms.float32] * needs_master(options, dtype)


def states(prefixes: Sequence[str], options, shapes: Sequence[tuple[int, ...]], kept: Iterable) -> Iterator[Held]:
    """Yield an optimizer's states.

    Args:
        prefixes: Prefixes of the states' names, in the rule's order.
        options: The optimizer's shared arguments.
        shapes: The parameters' shapes.
        kept: Indices of the parameters whose states are held, and the shapes held: those of whole parameters or shares.
    """
    kept = tuple(kept)
    for k, prefix in enumerate(prefixes):
        for i, shape in kept:
            yield Held(prefix, i, _kernels.state_dtype(options.state_dtype, k, math.prod(shapes[i])), tuple(shape))


def scale(state: Held) -> Held | None:
    """Return the scales of a state in codes, one for each block; None for any other state."""
    if state.dtype not in CODES:
        return None
    blocks = -(-math.prod(state.shape) // _kernels.CODE_BLOCK)
    return Held(f"{state.prefix}_scale", state.place, ms.float32, (blocks,))


def masters(options, dtypes: Sequence[Any], kept: Iterable) -> Iterator[Held]:
    """Yield an optimizer's masters; see :func:`states` for the arguments."""
    return (Held("master", i, ms.float32, tuple(shape)) for i, shape in kept if needs_master(options, dtypes[i]))


def placed(device: str, runs_on_host: bool, weights_and_gradients: int, held: int) -> tuple[int, int]:
    """Return the bytes on the device and in host memory; on "CPU", all are in host memory."""
    if device == "CPU":
        return 0, weights_and_gradients + held
    return (weights_and_gradients, held) if runs_on_host else (weights_and_gradients + held, 0)
