"""Parsers of the arguments of plan: numbers of parameters, bytes, and files with shapes."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
from typing import Any, NamedTuple

import mindspore as ms

from .. import OPTIMIZERS
from .._arguments import WEIGHT_DTYPES

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# MindSpore's names of buffers in normalization layers.
BUFFERS = ("moving_mean", "moving_variance")


class Weight(NamedTuple):
    """A parameter's shape, its dtype or None, and its name, empty if unknown."""

    shape: tuple[int, ...]
    dtype: Any = None
    name: str = ""


def count(text: str) -> int:
    """Read a whole number, 1 or greater."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number >= 1 and number.is_integer()):
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or greater, such as 7e9, but got {text!r}")
    return int(number)


def parameters(text: str) -> list[Weight]:
    """Read a number of parameters."""
    return [Weight((count(text),))]


def size(text: str) -> int:
    """Read a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]I?B|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 64GB or 64GiB, but got {text!r}")
    return round(float(found[1]) * UNITS[found[2].upper()])


def weights_of_json(path: str) -> list[Weight]:
    """Read shapes from a JSON file: a list of shapes, or an object of shapes by name."""
    what = 'a list of shapes, or an object of shapes by name, such as {"dense.weight": [64, 32]}'
    try:
        content = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(content, (dict, list)) or not content:
        raise argparse.ArgumentTypeError(f"expected {what} in {path}, but got {str(content)[:60]}")
    named = list(content.items() if isinstance(content, dict) else enumerate(content))
    for name, shape in named:
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise argparse.ArgumentTypeError(
                f"expected a list of whole numbers greater than 0 for {name!r} in {path}, but got {shape!r}"
            )
    return [Weight(tuple(shape), None, str(name)) for name, shape in named]


def weights_of_checkpoint(path: str) -> list[Weight]:
    """Read the shapes and dtypes of the weights in a checkpoint; states, counters and buffers are omitted.

    The name of a state is a prefix and the name of its weight. Either it is a prefix of this package's states, or the
    state has the shape of its weight.
    """
    try:
        content = ms.load_checkpoint(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path} as a checkpoint: {error}") from None
    counters = {name for optimizer in OPTIMIZERS for name in optimizer.counters}
    states = {prefix for optimizer in OPTIMIZERS for rule in optimizer.rules for prefix in rule.prefixes}
    prefixes = {"master", "main_param", "average", *states, *(f"{prefix}_scale" for prefix in states)}

    def is_weight(name, value):
        prefix, _, rest = name.partition(".")
        is_state = rest in content and (prefix in prefixes or content[rest].shape == value.shape)
        return value.dtype in WEIGHT_DTYPES and name not in counters and not is_state and not name.endswith(BUFFERS)

    found = [Weight(tuple(p.shape), p.dtype, name) for name, p in content.items() if is_weight(name, p)]
    if not found:
        raise argparse.ArgumentTypeError(f"expected a network's parameters in {path}, but found none")
    return found
