"""Which parameters of a network form a group: those not decayed, those that a pattern matches, those of a layer."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from mindspore import Parameter, nn

from ..arguments.params import check_parameters, of_dict, ordered
from ..arguments.words import fail, listed, shortened

# A class normalizes if its name, or that of a base class, is like LayerNorm, BatchNorm2d, LayerNormExt, LlamaRMSNorm.
NORMALIZATION = re.compile(r"Norm(\dd|Ext)?$")


def parameters_of(function: str, network: Any) -> list[Parameter]:
    """Check the network and return its trainable parameters, or the parameters given."""
    params = list(network.trainable_params()) if isinstance(network, nn.Cell) else ordered(network)
    if params is None:
        fail(TypeError, function, "network", "a Cell or a list of Parameters", network, of_dict(network))
    for i, p in enumerate(params):
        if not isinstance(p, Parameter):
            fail(TypeError, function, f"network[{i}]", "a Parameter", p)
    if not params:
        raise ValueError(f"For '{function}', the argument 'network' must have trainable parameters, but has none.")
    check_parameters(function, params, "network")
    return params


def find_not_decayed(
    function: str, network: Any, params: list[Parameter], no_decay: Any = (), filter_bias_and_norm: bool = True
) -> set[str]:
    """Return the names of the parameters that are not decayed."""
    not_decayed = _biases_and_norms(network, params) if filter_bias_and_norm else set()
    for pattern in _check_patterns(function, "no_decay", no_decay):
        not_decayed |= _matches(function, "no_decay", pattern, params)
    return not_decayed


def _biases_and_norms(network: Any, params: list[Parameter]) -> set[str]:
    """Return the names of the biases and of the parameters of normalization layers."""
    names = {p.name for p in params if p.ndim <= 1 or p.name.split(".")[-1] == "bias"}
    for _, cell in network.cells_and_names() if isinstance(network, nn.Cell) else ():
        if any(NORMALIZATION.search(kind.__name__) for kind in type(cell).__mro__):
            names |= {p.name for p in cell.get_parameters(expand=False)}
    return names


def _check_patterns(function: str, argument: str, patterns: Any) -> Sequence[str]:
    """Check that patterns are a list or tuple of str."""
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        fail(TypeError, function, argument, "a list or tuple of str", patterns)
    return patterns


def _matches(function: str, argument: str, pattern: str, params: list[Parameter]) -> set[str]:
    """Return the names that a pattern matches; it must match at least one."""
    names = {p.name for p in params if fnmatch.fnmatchcase(p.name, pattern)}
    if not names:
        raise ValueError(
            f"For '{function}', the pattern {shortened(pattern)} in '{argument}' must match the name of a parameter, "
            f"such as '{params[0].name}' or '{params[-1].name}', but matches none."
        )
    return names


def first_matches(function: str, argument: str, patterns: Sequence[str], params: list[Parameter]) -> dict[str, int]:
    """Return, for each name that any pattern matches, the index of the first such pattern."""
    first: dict[str, int] = {}
    for i, pattern in enumerate(patterns):
        names = _matches(function, argument, pattern, params) - first.keys()
        if not names:
            raise ValueError(
                f"For '{function}', the pattern {shortened(pattern)} in '{argument}' must match a parameter that no "
                f"earlier pattern matches, but the earlier patterns {listed(patterns[:i])} match all of its parameters."
            )
        first |= dict.fromkeys(names, i)
    return first


def numbered_layers(function: str, params: list[Parameter]) -> dict[str, int]:
    """Return each name's layer, found by the first part of the name that is a number."""
    layers: dict[Any, int] = {}
    layer: dict[str, int] = {}
    key: Any = None
    for p in params:
        numbered = re.match(r"(.*?\.)??\d+(?=\.)", p.name)
        if numbered:
            key = numbered.group()
        elif not isinstance(key, int):
            key = len(layers)
        layer[p.name] = layers.setdefault(key, len(layers))
    if not any(isinstance(key, str) for key in layers):
        raise ValueError(
            f"For '{function}', the argument 'layers' is required if the parameters' names have no numbers, such as "
            f"'{params[0].name}'."
        )
    return layer


def stated_layers(function: str, layers: Any, params: list[Parameter]) -> dict[str, int]:
    """Return each name's layer, found by the patterns."""
    layer = first_matches(function, "layers", _check_patterns(function, "layers", layers), params)
    missing = [p.name for p in params if p.name not in layer]
    if missing:
        raise ValueError(
            f"For '{function}', the patterns in 'layers' must match every parameter, but do not match "
            f"{listed(missing)}."
        )
    return layer
