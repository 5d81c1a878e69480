"""Checks of arguments: each error names the argument, what was expected and what was given."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, TypedDict

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

STATE_DTYPES = ("float32", "bfloat16", "8bit")
BACKENDS = ("auto", "aot", "akg", "composite", "native")
WEIGHT_DTYPES = (mstype.float32, mstype.float16, mstype.bfloat16)
NUMBER_DTYPES = (*WEIGHT_DTYPES, mstype.float64, *mstype.int_type, *mstype.uint_type)
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
# A step computes in float32: a number below the first limit counts as 0, one above the second is infinite.
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NORMAL = "a normal number in float32, from 2**-126 to 3.4e38"
FINITE = "finite in float32, at most 3.4e38"
GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "shard_group", "order_params")


class Common(TypedDict, total=False):
    """Shared keyword arguments that no optimizer has among its own."""

    state_dtype: str
    master_weights: bool
    stochastic_rounding: bool
    skip_nonfinite: bool
    backend: str


class SharedButLossScale(Common, total=False):
    """Shared keyword arguments of an optimizer that has `loss_scale` among its own."""

    grad_clip_norm: float | None
    shard_states: bool


class Shared(SharedButLossScale, total=False):
    """Keyword arguments that the optimizers share; each takes them after its own."""

    loss_scale: float


@dataclasses.dataclass(frozen=True)
class Options:
    """The shared keyword arguments with their defaults, checked."""

    loss_scale: float = 1.0
    grad_clip_norm: float | None = None
    state_dtype: str = "float32"
    master_weights: bool = True
    stochastic_rounding: bool = False
    skip_nonfinite: bool = False
    backend: str = "auto"
    shard_states: bool = False

    @classmethod
    def of(cls, optimizer: str, given: dict[str, Any], accepted: Sequence[str]) -> Options:
        """Check the keyword arguments given to an optimizer.

        Args:
            optimizer: Name of the optimizer's class, for the errors.
            given: Keyword arguments by name.
            accepted: Names of all arguments that this optimizer takes.

        Raises:
            TypeError: If a name is unknown or a value has the wrong type.
            ValueError: If a value is out of range.
        """
        unknown = [name for name in given if name not in accepted]
        if unknown:
            raise TypeError(f"For '{optimizer}', unknown keyword argument {unknown[0]!r}: it takes {sorted(accepted)}.")
        options = cls(**given)
        check_positive(optimizer, "loss_scale", options.loss_scale)
        if options.grad_clip_norm is not None:
            check_positive(optimizer, "grad_clip_norm", options.grad_clip_norm)
        for name in ("master_weights", "stochastic_rounding", "skip_nonfinite", "shard_states"):
            check_type(optimizer, name, getattr(options, name), bool)
        check_choice(optimizer, "state_dtype", options.state_dtype, STATE_DTYPES)
        check_choice(optimizer, "backend", options.backend, BACKENDS)
        if options.stochastic_rounding and options.master_weights:
            fail(
                ValueError,
                optimizer,
                "master_weights",
                "False with stochastic_rounding=True, or nothing is rounded",
                True,
            )
        return options


def fail(error: type[Exception], optimizer: str, name: str, expected: str, value: Any) -> NoReturn:
    """Raise an error that names the argument, what was expected and what was given."""
    if isinstance(value, Tensor):
        got = f"a Tensor of shape {value.shape}"
    else:
        got = f"{value!r} of type {type(value).__name__}"
    raise error(f"For '{optimizer}', the argument '{name}' must be {expected}, but got {got}.")


def check_type(optimizer: str, name: str, value: Any, expected: type) -> None:
    """Check that a value has a type; True and False are not numbers."""
    if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
        fail(TypeError, optimizer, name, f"of type {expected.__name__}", value)


def check_choice(optimizer: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that a value is one of a few words."""
    check_type(optimizer, name, value, str)
    if value not in choices:
        fail(ValueError, optimizer, name, f"one of {list(choices)}", value)


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
        names: Name of the argument that holds both limits, or the names of two arguments with one each.
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
        fail(ValueError, optimizer, "backend", f"'auto' or 'composite' where {name}=False", shared.get("backend"))
    return {**shared, "backend": "composite"}


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float; True and False are not numbers."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def ordered(value: Any) -> list[Any] | None:
    """Return an iterable as a list; None if the value is no iterable, has no order or has several dimensions."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict, set, frozenset, Tensor)):
        return None
    return None if isinstance(value, np.ndarray) and value.ndim != 1 else list(value)


def check_weight_decay(optimizer: str, name: str, value: Any) -> None:
    """Check a weight decay: a number that is not negative, or a Cell."""
    if isinstance(value, nn.Cell):
        return
    if not is_number(value):
        fail(TypeError, optimizer, name, "a float, an int or a Cell", value)
    _check_rate(optimizer, name, value)


def _check_rate(optimizer: str, name: str, value: Any) -> None:
    if not value >= 0:
        fail(ValueError, optimizer, name, "equal to or greater than 0", value)
    if not value <= MOST:
        fail(ValueError, optimizer, name, FINITE, value)


def check_learning_rate(optimizer: str, name: str, value: Any) -> Any:
    """Check a learning rate and return it, a number as a float, an iterable as a list of floats."""
    expected = "a float, an int, a Tensor, an Iterable of numbers in order or a LearningRateSchedule"
    if isinstance(value, nn.learning_rate_schedule.LearningRateSchedule):
        return value
    if is_number(value):
        _check_rate(optimizer, name, value)
        return float(value)
    if isinstance(value, Tensor):
        if value.ndim > 1:
            fail(ValueError, optimizer, name, "a Tensor of 0 or 1 dimensions", value)
        if value.dtype not in NUMBER_DTYPES:
            fail(TypeError, optimizer, name, "a Tensor of numbers", value)
        if value.size == 0:
            fail(ValueError, optimizer, name, "a Tensor of 1 or more numbers", value)
        rates = ops.cast(value, mstype.float32).asnumpy()
        if value.ndim == 0:
            _check_rate(optimizer, name, float(rates))
        else:
            _check_rates(optimizer, name, rates.tolist())
        return value
    rates = ordered(value)
    if not rates or not all(is_number(rate) for rate in rates):
        fail(TypeError, optimizer, name, expected, value)
    _check_rates(optimizer, name, rates)
    return [float(rate) for rate in rates]


def _check_rates(optimizer: str, name: str, rates: list[Any]) -> None:
    for i, rate in enumerate(rates):
        if not 0 <= rate <= MOST:
            _check_rate(optimizer, f"{name}[{i}]", rate)


def check_params(optimizer: str, params: Any) -> list[Any]:
    """Check the parameters or the groups of parameters.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        params: What the user passed as ``params``.

    Returns:
        A list of Parameters, or a list of dicts whose iterables are lists.

    Raises:
        TypeError: If an element is neither a Parameter nor a dict, or a group's value has the wrong type.
        ValueError: If there is nothing to optimize, a parameter is listed twice, or ``order_params`` does not match.
        KeyError: If a group has an unknown key, or lacks ``params``.
    """
    if params is None:
        fail(ValueError, optimizer, "params", "a list of Parameters or of dicts", params)
    given, params = params, ordered(params)
    if params is None:
        fail(TypeError, optimizer, "params", "a list of Parameters or of dicts", given)
    if not params:
        fail(ValueError, optimizer, "params", "not empty", params)
    grouped = isinstance(params[0], dict)
    for i, element in enumerate(params):
        if not isinstance(element, dict if grouped else Parameter):
            kind = "a dict, as its first element is" if grouped else "a Parameter or a dict"
            fail(TypeError, optimizer, f"params[{i}]", kind, element)
    if not grouped:
        check_parameters(optimizer, params)
        return params

    groups = [_check_group(optimizer, i, group) for i, group in enumerate(params)]
    members = [p for group in groups for p in group.get("params", ())]
    if not members:
        fail(ValueError, optimizer, "params", "groups with at least one Parameter", params)
    check_parameters(optimizer, members)
    orders = [group["order_params"] for group in groups if "order_params" in group]
    if len(orders) > 1:
        raise ValueError(f"For '{optimizer}', 'order_params' must be in one group at most, but is in {len(orders)}.")
    if orders:
        _check_order(optimizer, members, orders[0])
    return groups


def check_parameters(optimizer: str, params: list[Parameter], argument: str = "params") -> None:
    """Check that each parameter has a dtype that can be trained, and that none is listed twice."""
    seen: dict[str, Parameter] = {}
    for p in params:
        if p.dtype not in WEIGHT_DTYPES:
            raise TypeError(
                f"For '{optimizer}', the parameter '{p.name}' must be float32, float16 or bfloat16, but is {p.dtype}."
            )
        if p.size == 0:
            raise ValueError(f"For '{optimizer}', the parameter '{p.name}' must not be empty, but has shape {p.shape}.")
        if p.name in seen:
            how = f"is listed twice in '{argument}'" if seen[p.name] is p else "shares its name with another parameter"
            raise ValueError(
                f"For '{optimizer}', each parameter must be listed once in '{argument}', but '{p.name}' {how}."
            )
        seen[p.name] = p


def _check_group(optimizer: str, index: int, group: dict[str, Any]) -> dict[str, Any]:
    name = f"params[{index}]"
    for key in group:
        if key not in GROUP_KEYS:
            raise KeyError(
                f"For '{optimizer}', the keys of '{name}' must be among {list(GROUP_KEYS)}, but got {key!r}."
            )
    key = "order_params" if "order_params" in group else "params"
    if key == "order_params" and len(group) > 1:
        others = [other for other in group if other != key]
        raise ValueError(f"For '{optimizer}', a group with 'order_params' must have no other key, but got {others}.")
    if key not in group:
        raise KeyError(f"For '{optimizer}', '{name}' must have the key 'params', but has {list(group)}.")
    members = ordered(group[key])
    if members is None:
        fail(TypeError, optimizer, f"{name}[{key!r}]", "a list of Parameters", group[key])
    for i, p in enumerate(members):
        if not isinstance(p, Parameter):
            fail(TypeError, optimizer, f"{name}[{key!r}][{i}]", "a Parameter", p)
    return {**check_settings(optimizer, name, group), key: members}


def check_settings(optimizer: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Check a group's settings, which are all but its parameters; return an iterable learning rate as a list."""
    checked = dict(settings)
    if "lr" in settings:
        checked["lr"] = check_learning_rate(optimizer, f"{name}['lr']", settings["lr"])
    if "weight_decay" in settings:
        check_weight_decay(optimizer, f"{name}['weight_decay']", settings["weight_decay"])
    if "grad_centralization" in settings:
        check_type(optimizer, f"{name}['grad_centralization']", settings["grad_centralization"], bool)
    if "shard_group" in settings:
        check_type(optimizer, f"{name}['shard_group']", settings["shard_group"], str)
    return checked


def _check_order(optimizer: str, members: list[Parameter], order: list[Parameter]) -> None:
    check_parameters(optimizer, order)
    grouped, ordered = {p.name for p in members}, {p.name for p in order}
    missing, extra = sorted(grouped - ordered), sorted(ordered - grouped)
    if missing or extra:
        raise ValueError(
            f"For '{optimizer}', 'order_params' must hold exactly the parameters of the groups, but it lacks {missing} "
            f"and has also {extra}."
        )


def check_amounts(caller: str, key: str, value: Tensor) -> None:
    """Check that an entry of a state dict holds finite numbers, 0 or greater, as counts, rates and scales are."""
    numbers = ops.cast(value, mstype.float32).asnumpy()
    wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))]
    if wrong.size:
        raise ValueError(
            f"For '{caller}', the entry {key!r} must hold finite numbers, 0 or greater, but holds {wrong[0]:g}."
        )


def worker_of(caller: str, value: Tensor) -> tuple[int, int]:
    """Return the worker that the entry 'dgc_worker' of a state dict names, and the number of workers."""
    places = value.asnumpy()
    if value.dtype != mstype.int32 or places.ndim != 1 or np.count_nonzero(places) != 1 or places.max() != 1:
        raise ValueError(
            f"For '{caller}', the entry 'dgc_worker' must be int32 of 1 dimension, 1 at the worker's place and 0 "
            f"elsewhere, but got {value.dtype} {places.tolist()}."
        )
    return int(places.argmax()), places.size


def check_shapes(
    optimizer: str, names: tuple, shapes: tuple, given_shapes: tuple, given_dtypes: tuple, takes_sparse: bool = True
) -> None:
    """Check the shapes and dtypes of gradients against their parameters.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        names: The parameters' names.
        shapes: The parameters' shapes.
        given_shapes: The gradients' shapes. A shape is None while a graph does not know it yet, which happens with
            sparse gradients.
        given_dtypes: The gradients' dtypes.
        takes_sparse: Whether sparse gradients are accepted.

    Raises:
        ValueError: If there are too few or too many gradients, or one has another shape than its parameter.
        TypeError: If a gradient is not of floating-point dtype, or sparse where it must not be.
    """
    if len(given_shapes) != len(names):
        raise ValueError(
            f"For '{optimizer}', the argument 'gradients' must hold {len(names)} tensors, one for each parameter, "
            f"but got {len(given_shapes)}."
        )
    for name, shape, given, dtype in zip(names, shapes, given_shapes, given_dtypes):
        if given is None:
            if not takes_sparse:
                raise TypeError(
                    f"For '{optimizer}', the gradient of '{name}' must be a Tensor, but is sparse (a RowTensor): only "
                    "fused kernels accept those. Build the embedding with sparse=False (and target='DEVICE')."
                )
            continue
        if tuple(given) != tuple(shape):
            rows = len(given) == len(shape) > 1 and tuple(given[1:]) == tuple(shape[1:])
            hint = (
                " If it is the sparse gradient of an embedding: PyNative mode loses its indices, Graph mode does not."
            )
            raise ValueError(
                f"For '{optimizer}', the gradient of '{name}' must have the parameter's shape {tuple(shape)}, "
                f"but got {tuple(given)}.{hint if rows else ''}"
            )
        if dtype not in WEIGHT_DTYPES:
            raise TypeError(
                f"For '{optimizer}', the gradient of '{name}' must be float32, float16 or bfloat16, but got {dtype}."
            )


def check_tensors(optimizer: str, gradients: Any, kinds: Any) -> None:
    """Check that gradients that come from Python are a tuple or list of Tensors, or of other kinds of tensors."""
    if not isinstance(gradients, (tuple, list)):
        fail(TypeError, optimizer, "gradients", "a tuple of Tensors", gradients)
    for i, g in enumerate(gradients):
        if not isinstance(g, kinds):
            fail(TypeError, optimizer, f"gradients[{i}]", "a Tensor", g)


def check_gradients(optimizer: str, names: tuple, shapes: tuple, gradients: Any) -> Sequence[Tensor]:
    """Check gradients that are passed from Python and return them, contiguous in memory.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        names: The parameters' names.
        shapes: The parameters' shapes.
        gradients: What the optimizer was called with.

    Raises:
        TypeError: If it is not a tuple or list of Tensors.
        ValueError: If :func:`check_shapes` raises one.
    """
    check_tensors(optimizer, gradients, Tensor)
    check_shapes(optimizer, names, shapes, tuple(g.shape for g in gradients), tuple(g.dtype for g in gradients))
    return [g if g.is_contiguous() else g.contiguous() for g in gradients]
