"""What may be set as an attribute of an optimizer, and how parameters are registered whose names attributes have."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, nn

from ..arguments.checks import Options, keywords_of

if TYPE_CHECKING:
    from ..paths.parts import Parts

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


class Attributes(nn.Optimizer):
    """Guards the attributes of an optimizer: arguments stay as they are, and no parameter takes an attribute's place.

    ``nn.Cell`` registers the parameters of a tuple by their names, as it registers attributes.
    """

    # Attributes that cannot be set any more, because the steps hold them: empty until the constructor ends.
    _fixed: frozenset[str] = frozenset()
    _parts: Parts
    _entries: Any

    @property
    def _listed(self) -> set[str]:
        """The keys of registered parameters that are their own names."""
        return self.__dict__.setdefault("_own_names", set())

    def _fix_attributes(self) -> None:
        """Refuse from now on that arguments are set.

        A subclass of the user's may set attributes after the constructor of its base, which steps do not hold.
        """
        package = next(
            base for base in type(self).__mro__ if base.__module__.partition(".")[0] == __name__.partition(".")[0]
        )
        own = {*keywords_of(type(self)), "beta1", "beta2", "beta3"} & self.__dict__.keys()
        object.__setattr__(self, "_fixed", NEVER_SET.union(own, keywords_of(package)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless the step was built with its value; a parameter's name never takes its place."""
        if name in self._fixed:
            raise AttributeError(fixed(self.cls_name, name))
        listed = self.__dict__.get("_params", {}).get(name)
        if listed is not None and listed is not value and name in self._listed:
            self._list_elsewhere(name)
        super().__setattr__(name, value)

    def insert_param_to_cell(
        self, param_name: str, param: Parameter | None, check_name_contain_dot: bool = True
    ) -> None:
        """Register a parameter; one of a tuple by its name, unless the optimizer has an attribute of that name."""
        if not check_name_contain_dot and "." not in param_name:
            if hasattr(self, param_name) and param_name not in self._listed:
                param_name += "."
            else:
                self._listed.add(param_name)
        super().insert_param_to_cell(param_name, param, check_name_contain_dot)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Raise an error: the parameters of a copy would be no network's."""
        raise TypeError(
            f"For '{self.cls_name}', an optimizer cannot be copied: copy the network, make a new optimizer of its "
            "parameters, and load this one's state_dict()."
        )

    def _rename_like_no_weight(self):
        """Rename what the optimizer keeps under the name of a weight: graphs and files take each name once."""
        for p in self.get_parameters():
            if p.name in self._parts.layout.names and all(p is not weight for weight in self._parameters):
                p.name = f"{self.cls_name}.{p.name}"

    def _list_elsewhere(self, name):
        """Give a registered parameter a key that no attribute can have, in the place where it is."""
        self._listed.discard(name)
        entries = [(key + "." if key == name else key, p) for key, p in self._params.items()]
        self._params.clear()
        self._params.update(entries)
        first_names = self._entries.first_names if "_entries" in self.__dict__ else {}
        if name in first_names:
            first_names[name + "."] = first_names.pop(name)
