"""Entries of state dicts: their names, errors for names that do not fit, and values that are written together."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from ..states.in_place import write

RATE = re.compile(r"learning_rate(_group_[0-9]+)?")


class EntryError(KeyError, ValueError):
    """An entry is missing or unknown. It is a KeyError, whose text Python would print in quotes, and a ValueError."""

    __str__ = Exception.__str__


def check_names(name: str, own: Collection[str], given: Collection[str], prefixes: Sequence[str]) -> None:
    """Raise an error if entries are missing or unknown.

    Args:
        name: Name of the optimizer's class, for the errors.
        own: The names of its entries.
        given: The names of the given entries.
        prefixes: The prefixes of its states' names.
    """
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if not missing and not unknown:
        return
    states, others = ([n for n in names if n.partition(".")[0] in prefixes] for names in (missing, given))
    if states and not others and (other := _optimizer_of(given)):
        theirs = next(n for n in sorted(given) if n.partition(".")[0] in other[1])
        raise EntryError(
            f"For '{name}', 'state_dict' has the states of {other[0]}, such as {theirs!r}, and not of {name}, such as "
            f"{states[0]!r}. They cannot be converted: load only the weights, by ms_optim.load(path, net)."
        )
    which = missing or unknown
    what = f"must have the entry {missing[0]!r}" if missing else f"has the entry {unknown[0]!r}, which is unknown"
    remedy = "strict=False ignores it"
    if missing:
        remedy = "strict=False keeps the values that the optimizer has for it; averages start from the weights"
    if all(RATE.fullmatch(n) for n in (*missing, *unknown)):
        remedy = "learning_rate='keep' keeps the learning rate or schedule that the optimizer was made with"
    raise EntryError(f"For '{name}', 'state_dict' {what} ({len(which)} such entries). {remedy}.")


def _optimizer_of(given: Collection[str]) -> tuple[str, Collection[str]] | None:
    """Return the name of the optimizer whose states are given, and the prefixes of their names."""
    found = {n.partition(".")[0] for n in given if "." in n}
    known = [(cls.__name__, rule.prefixes) for cls in _subclasses(nn.Optimizer) for rule in getattr(cls, "rules", ())]
    fitting = [(name, prefixes) for name, prefixes in known if prefixes and found.issuperset(prefixes)]
    return max(fitting, key=lambda each: len(each[1]), default=None)


def _subclasses(cls: type) -> Iterable[type]:
    for sub in cls.__subclasses__():
        yield from (sub, *_subclasses(sub))


def unwrapped(entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries without the prefix that an outer Cell gave to the optimizer's names, as in `opt.global_step`.

    Names without the prefix belong to other parts of a network and are not changed.
    """
    steps = [name for name in entries if name.rpartition(".")[2] == "global_step"]
    if len(steps) != 1:
        return entries
    prefix = steps[0].removesuffix("global_step")
    return {name.removeprefix(prefix): value for name, value in entries.items()}


def written_together(values: Sequence[tuple[Parameter, np.ndarray]]) -> None:
    """Write values into parameters; an interrupt in between is raised when all are written."""
    interrupt = None
    while True:
        try:
            for parameter, value in values:
                write(parameter, value)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
