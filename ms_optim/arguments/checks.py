"""Types of arguments, the arguments that all optimizers share, and checks of numbers, strings and flags.

Each error names the argument, what was expected and what was given.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from .keywords import Shared, SharedButAverage, SharedButLossScale, SharedButSkipping  # noqa: F401 - read from here
from .words import closest, fail

SPLIT_MASTERS = ("split", "split8")
BACKENDS = ("auto", "aot", "akg", "composite")
DECAYS = ("decoupled", "cautious")
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The shared keyword arguments with their defaults, checked."""

    loss_scale: float = 1.0
    grad_clip_norm: float | None = None
    state_dtype: str = "float32"
    master_weights: bool | str = True
    stochastic_rounding: bool = False
    skip_nonfinite: bool = False
    backend: str = "auto"
    shard_states: bool = False
    offload: bool = False
    decay: str = "decoupled"
    average_decay: float | None = None
    average_warmup: bool = False

    @classmethod
    def of(cls, of_class: Any, given: dict[str, Any], state_dtypes: Collection[str]) -> Options:
        """Check the keyword arguments given to an optimizer.

        Args:
            of_class: The optimizer's class.
            given: Keyword arguments by name.
            state_dtypes: The formats of states.

        Raises:
            TypeError: If a name is unknown or a value has the wrong type.
            ValueError: If a value is out of range.
        """
        optimizer, accepted = of_class.__name__, of_class.keywords()
        unknown = [name for name in given if name not in accepted]
        if unknown:
            takers = ", ".join(other.__name__ for other in of_class.all_optimizers if unknown[0] in other.keywords())
            hint = closest(unknown[0], accepted) or (f" Optimizers that take it: {takers}." if takers else "")
            raise TypeError(
                f"For '{optimizer}', unknown keyword argument {unknown[0]!r}.{hint} It takes {sorted(accepted)}."
            )
        options = cls(**given | {"state_dtype": name_of_dtype(given.get("state_dtype", "float32"))})
        check_positive(optimizer, "loss_scale", options.loss_scale)
        if options.grad_clip_norm is not None:
            check_positive(optimizer, "grad_clip_norm", options.grad_clip_norm)
        for name in ("stochastic_rounding", "skip_nonfinite", "shard_states", "offload", "average_warmup"):
            check_type(optimizer, name, getattr(options, name), bool)
        check_masters(optimizer, options.master_weights)
        check_choice(optimizer, "state_dtype", options.state_dtype, state_dtypes)
        check_choice(optimizer, "backend", options.backend, BACKENDS)
        check_choice(optimizer, "decay", options.decay, DECAYS)
        if options.average_decay is not None:
            check_open_unit(optimizer, "average_decay", options.average_decay)
        if options.average_warmup and options.average_decay is None:
            fail(ValueError, optimizer, "average_warmup", "False without 'average_decay'", True)
        if options.stochastic_rounding and options.master_weights:
            raise ValueError(
                f"For '{optimizer}', stochastic_rounding=True requires master_weights=False, "
                f"but got master_weights={options.master_weights!r}."
            )
        # MindSpore's operators take no int of more than 64 bits.
        clip = options.grad_clip_norm
        floats = {"loss_scale": float(options.loss_scale), "grad_clip_norm": None if clip is None else float(clip)}
        return dataclasses.replace(options, **floats)


def name_of_dtype(value: Any) -> Any:
    """Return the name of a dtype of MindSpore; anything else as it is."""
    return str(value).lower() if isinstance(value, mstype.Type) else value


def check_masters(optimizer: str, value: Any) -> None:
    """Check the argument `master_weights`."""
    if not isinstance(value, (bool, str)) or (isinstance(value, str) and value not in SPLIT_MASTERS):
        error = ValueError if isinstance(value, str) else TypeError
        hint = " Masters are float32 with True." if name_of_dtype(value) in ("float32", "fp32") else ""
        fail(error, optimizer, "master_weights", f"True, False or one of {SPLIT_MASTERS}", value, hint)


def keywords_of(optimizer: Any) -> list[str]:
    """Return the names of the arguments that an optimizer's class takes, except its parameters."""
    signatures = (inspect.signature(base.__init__).parameters for base in optimizer.__mro__)
    own = next(names for names in signatures if "learning_rate" in names)
    kept = [name for name, p in own.items() if p.kind is not p.VAR_KEYWORD and name not in ("self", "params")]
    refused = {"shard_states", "offload", "decay", "average_decay"} & optimizer.refuses.keys()
    refused |= {"average_warmup"} if "average_decay" in refused else set()
    shared = [field.name for field in dataclasses.fields(Options)]
    return kept + [name for name in shared if name not in kept and name not in refused]


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


def check_count(optimizer: str, name: str, value: Any, least: int = 0) -> None:
    """Check that a value is an int, not less than `least`, that fits into an int32."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        fail(TypeError, optimizer, name, f"an int, {least} or greater", value)
    if not least <= value < 2**31:
        fail(ValueError, optimizer, name, f"an int, {least} or greater and less than 2**31", value)


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


def choose_backend(optimizer: str, name: str, fused: Any, shared: Shared) -> Shared:
    """Set `backend` by an argument that chooses between the fused kernel and MindSpore's operators."""
    check_type(optimizer, name, fused, bool)
    if fused:
        return shared
    if shared.get("backend", "auto") not in ("auto", "composite"):
        fail(ValueError, optimizer, "backend", f"'auto' or 'composite' with {name}=False", shared.get("backend"))
    return {**shared, "backend": "composite"}


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
