"""Types of arguments, and checks of numbers, strings and flags.

Each error names the argument, what was expected and what was given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from .words import closest, fail

SPLIT_MASTERS = ("split", "split8")
WEIGHT_DTYPES = (mstype.float32, mstype.float16, mstype.bfloat16)
# Type checkers know none of MindSpore's types: in an expression such a type is unknown, in an annotation it is Any. A
# string counts as an annotation, so these aliases are strings.

# Arguments of all optimizers. A learning rate that is a Cell is a LearningRateSchedule.
Params: TypeAlias = "Sequence[Parameter] | Sequence[dict[str, Any]]"
LearningRate: TypeAlias = "float | Tensor | Iterable[float] | nn.Cell"
WeightDecay: TypeAlias = "float | nn.Cell"
# The network of groups, the step of a schedule, the tensors and numbers of a rule, and the path of a file.
Network: TypeAlias = "nn.Cell | Sequence[Parameter]"
GlobalStep: TypeAlias = "Tensor | int"
Tensors: TypeAlias = "tuple[Tensor, ...]"
Scalars: TypeAlias = "tuple[Tensor | float, ...]"
FilePath: TypeAlias = "str | os.PathLike[str]"
# A step computes in float32: a number below LEAST is treated as 0, a number above MOST is infinite.
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NORMAL = "a normal number in float32, from 2**-126 to 3.4e38"
FINITE = "finite in float32, at most 3.4e38"


def check_type(optimizer: str, name: str, value: Any, expected: type) -> None:
    """Check that a value has a type; True and False are not numbers."""
    if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
        fail(TypeError, optimizer, name, f"of type {expected.__name__}", value)


def check_choice(optimizer: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a value is one of the given strings."""
    if not isinstance(value, str):
        fail(TypeError, optimizer, name, "of type str", value, closest(value, choices))
    if value not in choices:
        fail(ValueError, optimizer, name, f"one of {list(choices)}", value, closest(value, choices))


def check_positive(optimizer: str, name: str, value: Any) -> None:
    """Check that a value is a number greater than 0, and that it is neither denormal nor infinite in float32."""
    if not is_number(value):
        fail(TypeError, optimizer, name, "a number greater than 0", value)
    if not value > 0:
        fail(ValueError, optimizer, name, "a number greater than 0", value)
    if not LEAST <= value <= MOST:
        fail(ValueError, optimizer, name, NORMAL, value)


def check_not_negative(optimizer: str, name: str, value: Any) -> None:
    """Check that a value is a number, 0 or greater, and that it is finite in float32."""
    if not is_number(value):
        fail(TypeError, optimizer, name, "a number, 0 or greater", value)
    if not value >= 0:
        fail(ValueError, optimizer, name, "a number, 0 or greater", value)
    if not value <= MOST:
        fail(ValueError, optimizer, name, FINITE, value)


def check_at_most(optimizer: str, name: str, value: Any, most: float) -> float:
    """Check that a value is a number from 0 to `most`, and return it as a float."""
    check_not_negative(optimizer, name, value)
    if value > most:
        fail(ValueError, optimizer, name, f"at most {most:g}", value)
    return float(value)


def check_count(optimizer: str, name: str, value: Any, least: int = 0, bits: int = 31) -> None:
    """Check that a value is an int, not less than `least`, and less than 2 to the power of `bits`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        fail(TypeError, optimizer, name, f"an int, {least} or greater", value)
    if not least <= value < 2**bits:
        fail(ValueError, optimizer, name, f"an int, {least} or greater and less than 2**{bits}", value)


def check_open_unit(optimizer: str, name: str, value: Any) -> None:
    """Check that a value is a float strictly between 0 and 1, and less than 1 in float32."""
    check_type(optimizer, name, value, float)
    if not 0.0 < value < 1.0:
        fail(ValueError, optimizer, name, "in the range (0.0, 1.0)", value)
    _check_forgets(optimizer, name, value)


def check_betas(optimizer: str, betas: Any, count: int) -> list[float]:
    """Check a list or tuple of decay rates, each a float strictly between 0 and 1, and return it as a list."""
    if not isinstance(betas, (list, tuple)) or len(betas) != count:
        fail(TypeError, optimizer, "betas", f"a list or tuple of {('two', 'three')[count - 2]} floats", betas)
    for k, beta in enumerate(betas):
        check_open_unit(optimizer, f"betas[{k}]", beta)
    return list(betas)


def check_momentum(optimizer: str, name: str, value: Any) -> None:
    """Check that a value is a number in the range [0, 1), and less than 1 in float32."""
    if not is_number(value):
        fail(TypeError, optimizer, name, "a number", value)
    if not 0.0 <= value < 1.0:
        fail(ValueError, optimizer, name, "in the range [0.0, 1.0)", value)
    _check_forgets(optimizer, name, value)


def _check_forgets(optimizer: str, name: str, value: float) -> None:
    """Check that a decay rate of a state is not 1 in float32: such a state would never forget."""
    if np.float32(value) == 1.0:
        fail(ValueError, optimizer, name, "less than 1 in float32, at most 1 - 2**-24", value)


def check_eps(optimizer: str, value: Any) -> None:
    """Check that eps is a float greater than 0, and a normal number in float32."""
    check_type(optimizer, "eps", value, float)
    check_positive(optimizer, "eps", value)


def check_bounds(optimizer: str, names: str | tuple[str, str], value: Any) -> tuple[float, float]:
    """Check a pair of limits (low, high) and return them as numbers; None and infinity mean no limit.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        names: Name of the argument that holds both limits, or the names of two arguments that hold one limit each.
        value: None for no limits, or the pair.
    """
    if value is None:
        return 0.0, math.inf
    if isinstance(names, str) and (not isinstance(value, (tuple, list)) or len(value) != 2):
        fail(TypeError, optimizer, names, "None or a pair (low, high) of numbers or None", value)
    names = (f"{names}[0]", f"{names}[1]") if isinstance(names, str) else names
    for name, bound in zip(names, value):
        if bound is not None and not is_number(bound):
            fail(TypeError, optimizer, name, "a number or None", bound)
        if bound is not None and not bound >= 0:
            fail(ValueError, optimizer, name, "0 or greater", bound)
        if bound and not LEAST <= bound <= MOST and (bound, name) != (math.inf, names[1]):
            fail(ValueError, optimizer, name, f"0 or {NORMAL}", bound)
    low = 0.0 if value[0] is None else float(value[0])
    high = math.inf if value[1] is None else float(value[1])
    if low > high:
        fail(ValueError, optimizer, names[0], f"no greater than '{names[1]}', which is {high}", low)
    return low, high


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float; True and False are not numbers."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def check_amounts(caller: str, key: str, value: Tensor) -> None:
    """Check that an entry of a state dict, such as a count, rate or scale, holds finite numbers, 0 or greater."""
    numbers = ops.cast(value, mstype.float32).asnumpy()
    wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))]
    if wrong.size:
        raise ValueError(
            f"For '{caller}', the entry {key!r} must hold finite numbers, 0 or greater, but holds {wrong[0]:g}."
        )
