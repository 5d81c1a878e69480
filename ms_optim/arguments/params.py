"""Checks of an optimizer's inputs: parameters, their groups, learning rates and weight decays."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from .checks import FINITE, MOST, WEIGHT_DTYPES, check_count, check_type, is_number
from .words import closest, described, fail, listed, shortened, warn_once

NUMBER_DTYPES = (*WEIGHT_DTYPES, mstype.float64, *mstype.int_type, *mstype.uint_type)
FORMAT_KEYS = ("state_dtype", "master_weights")
GROUP_KEYS = ("params", "lr", "weight_decay", "grad_centralization", *FORMAT_KEYS, "shard_group", "order_params")


def check_params(optimizer: str, params: Any, argument: str = "params", own_keys: Sequence[str] = ()) -> list[Any]:
    """Check the parameters or the groups of parameters.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        params: What the user passed as ``params``.
        argument: The name of the argument that the user passed it as.
        own_keys: Group keys of this optimizer, in addition to those of all optimizers.

    Returns:
        A list of Parameters, or a list of dicts whose iterables are lists, without empty groups.

    Raises:
        TypeError: If an element is neither a Parameter nor a dict, or a group's value has the wrong type.
        ValueError: If there is nothing to optimize, a parameter is listed twice, or ``order_params`` does not match.
        KeyError: If a group has an unknown key, or lacks ``params``.
    """
    if params is None:
        fail(ValueError, optimizer, argument, "a list of Parameters or of dicts", params)
    given, params = params, ordered(params)
    if params is None:
        expected = "a list of Parameters or of dicts, as net.trainable_params() returns"
        fail(TypeError, optimizer, argument, expected, given, of_dict(given))
    if not params:
        fail(ValueError, optimizer, argument, "a list of at least one Parameter or dict", params)
    grouped = isinstance(params[0], dict)
    for i, element in enumerate(params):
        if not isinstance(element, dict if grouped else Parameter):
            kind = "a dict, because the first element is a dict" if grouped else "a Parameter or a dict"
            fail(TypeError, optimizer, f"{argument}[{i}]", kind, element)
    if not grouped:
        check_parameters(optimizer, params, argument)
        return params

    groups = [
        _check_group(optimizer, f"{argument}[{i}]", group, (*GROUP_KEYS, *own_keys)) for i, group in enumerate(params)
    ]
    members = [p for group in groups for p in group.get("params", ())]
    if not members:
        fail(ValueError, optimizer, argument, "groups with at least one Parameter", params)
    check_parameters(optimizer, members, argument)
    orders = [group["order_params"] for group in groups if "order_params" in group]
    if len(orders) > 1:
        raise ValueError(f"For '{optimizer}', 'order_params' must be in at most one group, but is in {len(orders)}.")
    if orders:
        _check_order(optimizer, members, orders[0])
    # MindSpore refuses empty groups, which a network without biases may have.
    return [group for group in groups if group.get("params") != []]


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


def _check_group(optimizer: str, name: str, group: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in group:
        if key not in keys:
            raise KeyError(unknown_key(optimizer, name, key, keys))
    key = "order_params" if "order_params" in group else "params"
    if key == "order_params" and len(group) > 1:
        others = [other for other in group if other != key]
        raise ValueError(f"For '{optimizer}', a group with 'order_params' must have no other key, but got {others}.")
    if key not in group:
        raise KeyError(f"For '{optimizer}', '{name}' must have the key 'params', but has {list(group)}.")
    members = ordered(group[key])
    if members is None:
        fail(TypeError, optimizer, f"{name}[{key!r}]", "a list of Parameters", group[key], of_dict(group[key]))
    for i, p in enumerate(members):
        if not isinstance(p, Parameter):
            fail(TypeError, optimizer, f"{name}[{key!r}][{i}]", "a Parameter", p)
    return {**check_settings(optimizer, name, group), key: members}


def unknown_key(function: str, name: str, key: Any, keys: Sequence[str]) -> str:
    """Return the words for a key that a group does not have."""
    got = f"but got {shortened(key) or described(key)}.{closest(key, keys)}"
    return f"For '{function}', the keys of '{name}' must be among {list(keys)}, {got}"


def of_dict(value: Any) -> str:
    """Return a sentence for a dict in the place of parameters, such as `net.parameters_dict()`; else nothing."""
    return " Pass net.trainable_params(), or list(...) of the dict's values()." if isinstance(value, dict) else ""


def check_settings(optimizer: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Check a group's settings, which are all keys but its parameters; return an iterable learning rate as a list."""
    checked = dict(settings)
    if "lr" in settings:
        checked["lr"] = check_learning_rate(optimizer, f"{name}['lr']", settings["lr"])
    if "weight_decay" in settings:
        check_weight_decay(optimizer, f"{name}['weight_decay']", settings["weight_decay"])
    for key in ("grad_centralization", "muon"):
        if key in settings:
            check_type(optimizer, f"{name}[{key!r}]", settings[key], bool)
    if "shard_group" in settings:
        check_type(optimizer, f"{name}['shard_group']", settings["shard_group"], str)
    if "shard_axis" in settings:
        check_count(optimizer, f"{name}['shard_axis']", settings["shard_axis"], 0)
    return checked


def _check_order(optimizer: str, members: list[Parameter], order: list[Parameter]) -> None:
    check_parameters(optimizer, order)
    grouped, ordered = {p.name for p in members}, {p.name for p in order}
    missing, extra = sorted(grouped - ordered), sorted(ordered - grouped)
    if missing or extra:
        raise ValueError(
            f"For '{optimizer}', 'order_params' must hold exactly the parameters of the groups, but it lacks "
            f"{listed(missing)} and also has {listed(extra)}."
        )


def check_weight_decay(optimizer: str, name: str, value: Any) -> None:
    """Check a weight decay: a number that is not negative, or a Cell."""
    if isinstance(value, nn.Cell):
        return
    if not is_number(value):
        fail(TypeError, optimizer, name, "a float, an int or a Cell", value)
    _check_rate(optimizer, name, value)


def warn_of_unused_decay(optimizer: type[Any], params: list[Any], value: Any) -> None:
    """Warn of a weight decay that no group uses, unless it is the default or a group has the same.

    Args:
        optimizer: The optimizer's class.
        params: Parameters or groups, checked.
        value: The weight decay that the optimizer was given.
    """
    groups = [group for group in params if isinstance(group, dict) and "params" in group]
    own = [group["weight_decay"] for group in groups if "weight_decay" in group]
    signature = inspect.signature(optimizer).parameters
    default = signature["weight_decay"].default if "weight_decay" in signature else 0.0
    if groups and len(own) == len(groups) and not any(value is other or value == other for other in (default, *own)):
        warn_once(
            f"For '{optimizer.__name__}', weight_decay={shortened(value) or described(value)} has no effect: each "
            "group has its own 'weight_decay'.",
            stacklevel=5,
        )


def _check_rate(optimizer: str, name: str, value: Any) -> None:
    if not value >= 0:
        fail(ValueError, optimizer, name, "equal to or greater than 0", value)
    if not value <= MOST:
        fail(ValueError, optimizer, name, FINITE, value)


def check_learning_rate(optimizer: str, name: str, value: Any) -> Any:
    """Check a learning rate and return it, a number as a float, an iterable as a list of floats."""
    expected = "a number, a Tensor, a sequence of numbers (not a set) or a LearningRateSchedule"
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


def ordered(value: Any) -> list[Any] | None:
    """Return an iterable as a list; None if the value is not iterable, is unordered or has several dimensions."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict, set, frozenset, Tensor)):
        return None
    return None if isinstance(value, np.ndarray) and value.ndim != 1 else list(value)
