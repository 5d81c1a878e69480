"""Parsers of the arguments of plan: numbers of parameters, bytes, and files with shapes."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import mindspore as ms

from .. import OPTIMIZERS
from ..arguments.checks import WEIGHT_DTYPES
from ..arguments.words import described, meant, shortened
from ..optimizers.by_name import named

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
MOST = 10**18  # of parameters and bytes: what is counted from them fits into 64 bits
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# MindSpore's names of buffers in normalization layers.
BUFFERS = ("moving_mean", "moving_variance")


class Weight(NamedTuple):
    """A parameter's shape, its dtype or None, and its name, empty if unknown."""

    shape: tuple[int, ...]
    dtype: Any = None
    name: str = ""


def count(text: str) -> int:
    """Read a whole number from 1 to 10**18, such as 7e9 or 7B."""
    number = _number(text, COUNTS)
    if number is None or not (1 <= number <= MOST and number.is_integer()):
        expected = "a whole number from 1 to 1e18, such as 7e9, 7B or 350M"
        raise argparse.ArgumentTypeError(f"expected {expected}, but got {shortened(text)}")
    return int(number)


def _number(text: str, units: Mapping[str, int]) -> float | None:
    """Read a number with a unit; None if it is something else, infinity if it is too large for a float."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if found is None or found[2].upper() not in units:
        return None
    unit = units[found[2].upper()]
    number = float(found[1]) * unit
    # With a unit rounded: 8.03 * 10**9 may be no whole number.
    return float(round(number)) if unit > 1 and math.isfinite(number) else number


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return a reader of names in any case, and of what others call them, such as bf16."""
    names = list(names)
    return lambda text: meant(text, names) or text


def optimizer_name(text: str) -> str:
    """Read the name of an optimizer, in any form."""
    found = named(text)
    return text if found is None else found.__name__


def parameters(text: str) -> list[Weight]:
    """Read a number of parameters."""
    return [Weight((count(text),))]


def size(text: str) -> int:
    """Read a number of bytes."""
    number = _number(text, UNITS)
    if number is None or not number <= MOST:
        expected = "bytes, at most 1e18, such as 64GB or 64GiB"
        raise argparse.ArgumentTypeError(f"expected {expected}, but got {shortened(text)}")
    return round(number)


def weights_of_json(path: str) -> list[Weight]:
    """Read shapes from a JSON file: a list of shapes, or an object of shapes by name."""
    what = 'a list of shapes, or an object of shapes by name, such as {"dense.weight": [64, 32]}'
    try:
        content = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(content, (dict, list)) or not content:
        raise argparse.ArgumentTypeError(f"expected {what} in {path}, but got {described(content)}")
    named = list(content.items() if isinstance(content, dict) else enumerate(content))
    for name, shape in named:
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise argparse.ArgumentTypeError(
                f"expected a list of whole numbers greater than 0 for {name!r} in {path}, but got {described(shape)}"
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
