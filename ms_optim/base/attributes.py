"""What may be set as an attribute of an optimizer, and how parameters are registered whose names attributes have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter

from ..arguments.options import Options, keywords_of

if TYPE_CHECKING:
    from ..states.layout import Layout

# What a user may take for an attribute: the arguments that all optimizers share, which are in `options`, and others.
NEVER_SET = frozenset((*(field.name for field in dataclasses.fields(Options)), "lr", "learning_rate", "betas"))


def fixed(optimizer: str, name: str) -> str:
    """Return the error for an attribute that was set after the optimizer was made."""
    if name in ("lr", "learning_rate"):
        remedy = "Set optimizer.param_groups[0]['lr'], for each group with a rate of its own, or pass a schedule."
    else:
        remedy = "Make a new optimizer with that value, and load this one's state_dict()."
    if name == "weight_decay":
        remedy += " For a decay that changes over time, pass a WeightDecaySchedule."
    return f"For '{optimizer}', '{name}' cannot be set after the optimizer was made: its steps hold the value. {remedy}"


def held(optimizer: Any) -> frozenset[str]:
    """Return the attributes of an optimizer that cannot be set any more, because the steps hold their values.

    A subclass of the user's may set attributes after the constructor of its base, which steps do not hold.
    """
    ours = __name__.partition(".")[0]
    package = next(base for base in type(optimizer).__mro__ if base.__module__.partition(".")[0] == ours)
    own = {*keywords_of(type(optimizer)), "beta1", "beta2", "beta3"} & optimizer.__dict__.keys()
    return NEVER_SET.union(own, keywords_of(package))


class Keys:
    """The keys under which a Cell registers the parameters of a tuple, so that none takes an attribute's place.

    ``nn.Cell`` registers them by their names, as it registers attributes. A parameter that has the name of an attribute
    gets a key that no attribute can have.
    """

    def __init__(self) -> None:
        self._own_names: set[str] = set()

    def of(self, optimizer: Any, name: str) -> str:
        """Return the key of a parameter of a tuple."""
        if hasattr(optimizer, name) and name not in self._own_names:
            return name + "."
        self._own_names.add(name)
        return name

    def give_way(self, registered: dict[str, Parameter], name: str, value: Any) -> bool:
        """Give a parameter another key, in the place where it is, if an attribute of its name is set; return whether.

        Args:
            registered: The parameters of the Cell.
            name: The attribute's name.
            value: Its value.
        """
        if name not in self._own_names or registered.get(name) is None or registered[name] is value:
            return False
        self._own_names.discard(name)
        entries = [(key + "." if key == name else key, p) for key, p in registered.items()]
        registered.clear()
        registered.update(entries)
        return True


def rename_like_no_weight(optimizer: Any, layout: Layout, weights: Sequence[Parameter]) -> None:
    """Rename what the optimizer keeps under the name of a weight: graphs and files take each name once."""
    for p in optimizer.get_parameters():
        if p.name in layout.names and all(p is not weight for weight in weights):
            p.name = f"{layout.optimizer}.{p.name}"
