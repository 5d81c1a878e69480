"""The tensors that an optimizer holds besides weights and gradients: states, their scales, masters and averages.

An optimizer creates its tensors by these rules; ``python -m ms_optim plan`` counts their bytes and creates none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms

from . import _kernels

if TYPE_CHECKING:
    from ._rule import Rule

BYTES = {ms.float32: 4, ms.float16: 2, ms.bfloat16: 2, ms.int8: 1, ms.uint8: 1}
CODES = (ms.int8, ms.uint8)
ROWS = "rows"  # the kind of a state that has one number for each row


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


def bytes_each(rule: Rule, options, dtype, size: int) -> int:
    """Return the bytes of states, master and average for each element of a parameter, but not of scales and rows."""
    dtypes = [_kernels.state_dtype(options.state_dtype, kind, size) for _, kind in rule.kinds if kind != ROWS]
    floats = needs_master(options, dtype) + (options.average_decay is not None)
    return sum(BYTES[d] for d in dtypes) + BYTES[ms.float32] * floats


def rows_of(shape: tuple[int, ...]) -> int:
    """Return how many rows a tensor has as a matrix, or, of three dimensions, as several matrices."""
    return shape[0] * shape[1] if len(shape) == 3 else shape[0]


def states(
    rules: Sequence[Rule], options, shapes: Sequence[tuple[int, ...]], kept: Iterable
) -> Iterator[tuple[int, Held]]:
    """Yield an optimizer's states, each with its place among those of its parameter.

    Args:
        rules: The rule of each parameter.
        options: The optimizer's shared arguments.
        shapes: The parameters' shapes.
        kept: Indices of the parameters whose states are held, and the shapes held: those of whole parameters or shares.
    """
    kept = tuple(kept)
    for k in range(max(len(rule.states) for rule in rules)):
        for i, shape in kept:
            if k < len(rules[i].states):
                prefix, kind = rules[i].kinds[k]
                dtype = _kernels.state_dtype(options.state_dtype, kind, math.prod(shapes[i]))
                yield k, Held(prefix, i, dtype, (rows_of(shapes[i]),) if kind == ROWS else tuple(shape))


def scale(state: Held) -> Held | None:
    """Return the scales of a state in codes, one for each block; None for any other state."""
    if state.dtype not in CODES:
        return None
    blocks = -(-math.prod(state.shape) // _kernels.CODE_BLOCK)
    return Held(f"{state.prefix}_scale", state.place, ms.float32, (blocks,))


def masters(options, dtypes: Sequence[Any], kept: Iterable) -> Iterator[Held]:
    """Yield an optimizer's masters; see :func:`states` for the arguments."""
    return (Held("master", i, ms.float32, tuple(shape)) for i, shape in kept if needs_master(options, dtypes[i]))


def averages(options, kept: Iterable) -> Iterator[Held]:
    """Yield the averages of an optimizer's weights; see :func:`states` for the arguments."""
    return (Held("average", i, ms.float32, tuple(shape)) for i, shape in kept if options.average_decay is not None)


def placed(device: str, runs_on_host: bool, weights_and_gradients: int, held: int) -> tuple[int, int]:
    """Return the bytes on the device and in host memory; on "CPU", all are in host memory."""
    if device == "CPU":
        return 0, weights_and_gradients + held
    return (weights_and_gradients, held) if runs_on_host else (weights_and_gradients + held, 0)
