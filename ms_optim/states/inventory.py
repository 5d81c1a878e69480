"""The tensors that an optimizer holds in addition to weights and gradients: states, scales, masters and averages.

An optimizer creates its tensors by these rules. ``python -m ms_optim plan`` counts their bytes without creating them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms

from ..arguments.checks import SPLIT_MASTERS, fail
from .formats import OF_DTYPE, ROWS, state_dtype

if TYPE_CHECKING:
    from ..arguments.options import Options
    from ..rules.rule import Rule

BYTES = {ms.float32: 4, ms.float16: 2, ms.bfloat16: 2, ms.int16: 2, ms.uint16: 2, ms.int8: 1, ms.uint8: 1}


class Held(NamedTuple):
    """A tensor that is held for a parameter.

    Attributes:
        prefix: The prefix of its name.
        place: The parameter's index.
        dtype: Its dtype.
        shape: Its shape.
        numbers: For a state, the shape of the numbers that it represents; an element of 4-bit codes holds four numbers.
    """

    prefix: str
    place: int
    dtype: Any
    shape: tuple[int, ...]
    numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BYTES[self.dtype]


MASTERS = {True: ms.float32, "split": ms.int16, "split8": ms.int8}


def master_dtype(options: Options, dtype) -> Any:
    """Return the dtype of masters, or of split masters' remainders, for parameters of a dtype; None without masters."""
    return None if dtype == ms.float32 else MASTERS.get(options.master_weights)


def check(
    optimizer: str, rule: Rule, options_of: Sequence[Options], names: Sequence[str], dtypes: Sequence[Any]
) -> None:
    """Raise a ValueError if states or masters do not support the requested format, for parameters by name."""
    for options, name, dtype in zip(options_of, names, dtypes):
        if options.state_dtype != "float32" and not rule.takes_low_states:
            fail(ValueError, optimizer, "state_dtype", "'float32'", options.state_dtype)
        if options.master_weights in SPLIT_MASTERS and dtype == ms.float16:
            kept = "True or False, because 16 bits cannot restore the master of a small float16 number"
            fail(ValueError, optimizer, "master_weights", f"{kept}, and '{name}' is float16", options.master_weights)


def bytes_each(rule: Rule, options: Options, dtype, size: int) -> float:
    """Return the bytes of states, master and average per element of a parameter, without scales and states of rows."""
    dtypes = [state_dtype(options.state_dtype, kind, size) for _, kind in rule.kinds if kind != ROWS]
    average = 0 if options.average_decay is None else BYTES[ms.float32]
    master = master_dtype(options, dtype)
    states = sum(BYTES[d] / OF_DTYPE[d].in_element for d in dtypes)
    return states + average + (0 if master is None else BYTES[master])


def rows_of(shape: tuple[int, ...]) -> int:
    """Return the number of rows of a tensor as a matrix, or of a 3-dimensional tensor as a batch of matrices."""
    return shape[0] * shape[1] if len(shape) == 3 else shape[0]


def states(
    rules: Sequence[Rule], options_of: Sequence[Options], shapes: Sequence[tuple[int, ...]], kept: Iterable
) -> Iterator[tuple[int, Held]]:
    """Yield an optimizer's states, each with its index among the states of its parameter.

    Args:
        rules: The rule of each parameter.
        options_of: The shared arguments as they hold for each parameter.
        shapes: The parameters' shapes.
        kept: Indices of the parameters whose states are held, and the shapes held, of whole parameters or of shares.
    """
    kept = tuple(kept)
    for k in range(max(len(rule.states) for rule in rules)):
        for i, shape in kept:
            if k < len(rules[i].states):
                prefix, kind = rules[i].kinds[k]
                dtype = state_dtype(options_of[i].state_dtype, kind, math.prod(shapes[i]))
                numbers = (rows_of(shapes[i]),) if kind == ROWS else tuple(shape)
                yield k, Held(prefix, i, dtype, OF_DTYPE[dtype].stored(numbers), numbers)


def scale(state: Held) -> Held | None:
    """Return the scales of a state that is held as codes, one for each block; None for any other state."""
    shape = OF_DTYPE[state.dtype].scales(state.numbers)
    return None if shape is None else Held(f"{state.prefix}_scale", state.place, ms.float32, shape)


def masters(options_of: Sequence[Options], dtypes: Sequence[Any], kept: Iterable) -> Iterator[Held]:
    """Yield an optimizer's masters; see :func:`states` for the arguments."""
    for i, shape in kept:
        dtype = master_dtype(options_of[i], dtypes[i])
        if dtype is not None:
            yield Held("master", i, dtype, tuple(shape))


def averages(options_of: Sequence[Options], kept: Iterable) -> Iterator[Held]:
    """Yield the averages of an optimizer's weights; see :func:`states` for the arguments."""
    has_average = [options.average_decay is not None for options in options_of]
    return (Held("average", i, ms.float32, tuple(shape)) for i, shape in kept if has_average[i])


def local_steps(shapes: Sequence[tuple[int, ...]], copied: int) -> int:
    """Return the bytes that local steps keep in host memory: weights at the last exchange, velocities or residuals.

    Args:
        shapes: The shapes of the parameters.
        copied: Bytes of weights and masters that have copies in host memory.
    """
    return 2 * 4 * sum(math.prod(shape) for shape in shapes) + copied


def placed(device: str, on_host: bool, copies: bool, weights: int, held: int) -> tuple[int, int]:
    """Return the bytes on the device and in host memory; on "CPU", all are in host memory.

    Args:
        device: The device that the weights are on.
        on_host: Whether the optimizer's arithmetic runs on the host.
        copies: Whether the host then keeps copies of the weights.
        weights: Bytes of the weights; gradients take the same number.
        held: Bytes of everything else that is held.
    """
    if device == "CPU":
        return 0, 2 * weights + held
    if on_host:
        return 2 * weights, held + weights * copies
    return 2 * weights + held, 0
