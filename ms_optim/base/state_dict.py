"""State dicts: saving and loading what an optimizer keeps from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor

from ..arguments.checks import check_amounts, check_choice, check_type
from ..states import split_masters
from ..states.formats import OF_DTYPE
from ..states.in_place import fitted
from ..states.inventory import MASTERS
from ..states.shares import ENTRY, refuse_share
from .entries import RATE, check_names, unwrapped

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..paths.parts import Parts
    from .averaged import Swap

LEARNING_RATE = ("load", "keep")  # what loading does with the learning rate


class StateEntries:
    """The entries of an optimizer's state dict: the parameters that it holds, by their names from construction.

    Args:
        parts: The parts that its path is built from.
        listed: Returns the optimizer's parameters with their paths in it, as ``nn.Cell.parameters_and_names`` does. The
            paths stay when an outer Cell changes the names.
        share: The parameter that records which part of the states this worker keeps; None if it keeps all.
        check: Raises an error if entries do not fit this optimizer.
        swap: The object that puts averaged weights into the parameters.
    """

    parts: Parts
    listed: Callable[[], Iterable[tuple[str, Parameter]]]
    share: Parameter | None
    check: Callable[[dict[str, Tensor]], None]
    swap: Swap
    first_names: dict[str, str]

    def __init__(
        self,
        parts: Parts,
        listed: Callable[[], Iterable[tuple[str, Parameter]]],
        share: Parameter | None,
        check: Callable[[dict[str, Tensor]], None],
        swap: Swap,
    ):
        self.parts, self.listed, self.share, self.check, self.swap = parts, listed, share, check, swap
        self.first_names = {place: p.name for place, p in listed()}

    def give_way(self, name: str) -> None:
        """Follow a parameter that got the key of :class:`attributes.Keys` in place of its name."""
        if name in self.first_names:
            self.first_names[name + "."] = self.first_names.pop(name)

    def named(self) -> dict[str, Parameter]:
        """Return the weights and the optimizer's own parameters by their names from construction, without statistics.

        A parameter that a subclass makes later has its path in the optimizer as its name.
        """
        statistics = self.parts.held.statistics
        return {self.first_names.get(place, place): p for place, p in self.listed() if p is not statistics}

    def own(self) -> dict[str, Parameter]:
        """Return the same without the weights."""
        weights = {id(p) for p in self.parts.held.parameters}
        return {name: p for name, p in self.named().items() if id(p) not in weights}

    def copied(self) -> dict[str, Tensor]:
        """Return copies of what :meth:`named` returns, with the weights that training uses."""
        self.swap.check_between("state_dict()")
        return {name: Tensor(self.swap.in_training(p).copy(), p.dtype) for name, p in self.named().items()}

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of one of the optimizer's own parameters."""
        return next(name for name, p in self.own().items() if p is parameter)

    def fitting(
        self,
        state_dict: dict[str, Tensor],
        strict: bool,
        weights: Iterable[tuple[Parameter, NDArray[Any]]] = (),
        learning_rate: str = "load",
    ) -> list[tuple[Parameter, NDArray[Any]]]:
        """Check a whole state dict, and return the parameters to write with their values.

        Args:
            state_dict: The state dict.
            strict: Whether missing and unknown names are an error.
            weights: Weights that are loaded together with the state dict but are not in it.
            learning_rate: Whether learning rates are written: "load" or "keep".
        """
        name = self.parts.layout.optimizer
        check_type(name, "strict", strict, bool)
        check_choice(name, "learning_rate", learning_rate, LEARNING_RATE)
        self.swap.check_outside("load_state_dict()")
        own = self.own()
        given = self.checked(name, state_dict)
        if learning_rate == "keep":
            rates = self.rates()
            own = {key: p for key, p in own.items() if key not in rates}
            given = {key: value for key, value in given.items() if key not in rates and not RATE.fullmatch(key)}
        beside = {id(p): value for p, value in weights}
        if self.parts.shares is not None and self.share is not None:
            given = self.parts.shares.taken(name, self.share, given)
        elif ENTRY in given:
            refuse_share(name, given, "an optimizer that keeps all states")
        given = self.with_masters(own, given, lambda i: self.weight_beside(i, unwrapped(state_dict), beside))
        given = self.converted(own, given)
        if strict:
            check_names(name, own, given, self.parts.rule.prefixes)
        found = [(own[key], fitted(name, key, own[key], given[key])) for key in own.keys() & given.keys()]
        return found + self.started(own, given)

    def started(self, own: dict[str, Parameter], given: dict[str, Tensor]) -> list[tuple[Parameter, NDArray[Any]]]:
        """If the entries have a step count, return each missing state that starts as the weights, with the weights."""
        if "global_step" not in given:
            return []
        absent, found = {id(p) for name, p in own.items() if name not in given}, []
        for parts in self.parts.of_rules:
            held = parts.held
            starting = held.states[: len(held.rows)] if parts.rule.starts_at_weights else held.averages
            rows = held.rows.items() if len(starting) > 0 else ()
            found += [(starting[row], held.weights(i)) for i, row in rows if id(starting[row]) in absent]
        return [(state, weights.reshape(state.shape)) for state, weights in found]

    def checked(self, name: str, state_dict: Any) -> dict[str, Tensor]:
        """Return the entries except weights and statistics, checked to be Tensors, by their names from construction."""
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"For '{name}', 'state_dict' must be a dict of Tensors, but got {type(state_dict).__name__}."
            )
        for key, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"For '{name}', the entry {key!r} must be a Tensor, but got {type(value).__name__}.")
        ignored = {*self.parts.layout.names, "statistics", self.parts.held.statistics.name}
        # Names that an outer Cell gave to the parameters of schedules.
        renamed = {place: name for place, name in self.first_names.items() if place not in (name, *ignored)}
        first = renamed | self.masters_elsewhere()
        entries = {first.get(key, key): value for key, value in unwrapped(state_dict).items()}
        for key in self.amounts() & entries.keys():
            check_amounts(name, key, entries[key])
        entries = {key: value for key, value in entries.items() if key not in ignored}
        self.check(entries)
        return entries

    def masters_elsewhere(self) -> dict[str, str]:
        """Map the names that the masters may have in another optimizer to their names in this one."""
        masters = {id(p) for p in self.parts.held.masters}
        names = [name for name, p in self.own().items() if id(p) in masters]
        return {prefix + name.partition(".")[2]: name for name in names for prefix in split_masters.PREFIXES}

    def rates(self) -> set[str]:
        """Return the names of learning rates, and of the parameters of their schedules."""
        places = self.first_names.items()
        return {name for place, name in places if RATE.fullmatch(place.partition(".")[0])}

    def amounts(self) -> set[str]:
        """Return the names of counts, learning rates and scales, the entries that must be 0 or greater."""
        scales = {f"{prefix}_scale.{name}" for prefix in self.parts.rule.prefixes for name in self.parts.layout.names}
        every_rate, held = (*self.parts.rates.fixed, *self.parts.rates.schedules), self.parts.held
        rates = (getattr(rate, "learning_rate", rate) for rate in every_rate)
        numbers = {id(p) for p in (held.global_step, held.skipped_steps, *held.step_weights, *held.radii, *rates)}
        return scales | {name for name, p in self.own().items() if id(p) in numbers}

    def with_masters(
        self, own: dict[str, Parameter], given: dict[str, Tensor], weight: Callable[[int], NDArray[Any]]
    ) -> dict[str, Tensor]:
        """Return the entries with masters converted to the format of this optimizer.

        Args:
            own: The optimizer's own parameters by name.
            given: The entries.
            weight: Returns, for a parameter's index, the float32 weight that the entries belong to.
        """
        given, held = dict(given), self.parts.held
        places = {id(held.masters[k]): i for i, k in enumerate(held.master_places) if k >= 0}
        for name, master in own.items():
            value = given.get(name) if id(master) in places else None
            if value is None or value.dtype == master.dtype or value.shape != master.shape:
                continue
            if value.dtype in MASTERS.values():
                masters = value.asnumpy().reshape(-1)
                masters = split_masters.converted(masters, master.asnumpy().dtype, weight(places[id(master)]))
                given[name] = Tensor(masters.reshape(value.shape))
        return given

    def weight_beside(self, i: int, state_dict: dict[str, Tensor], beside: dict[int, NDArray[Any]]) -> NDArray[Any]:
        """Return the weight from a state dict, or else the current one: the part whose states this process has."""
        p = self.parts.held.parameters[i]
        own = state_dict.get(self.parts.layout.names[i])
        value = beside.get(id(p), self.swap.in_training(p) if own is None else own.asnumpy())
        begin, end = (0, value.size) if self.parts.shares is None else self.parts.shares.own[i].tolist()
        return value.reshape(-1)[begin:end].astype(np.float32)

    def converted(self, own: dict[str, Parameter], given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries with states converted to this optimizer's dtypes, and codes only with their scales."""
        held, given = self.parts.held, dict(given)
        shapes = {id(state): shape for state, shape in zip(held.states, held.numbers)}
        for name, state in own.items():
            shape = shapes.get(id(state))
            if shape is None:
                continue
            prefix, _, parameter = name.partition(".")
            scale = f"{prefix}_scale.{parameter}"
            value, to = given.get(name), OF_DTYPE[state.dtype]
            source = None if value is None else OF_DTYPE.get(value.dtype)
            stored = tuple(shape) if source is None else source.stored(shape)
            if value is None or value.dtype == state.dtype or value.shape != stored:
                if to.has_scales and (name in given) != (scale in given):
                    given.pop(name, None)
                    given.pop(scale, None)
                continue
            if source is None or (source.has_scales and scale not in given):
                continue
            scales = given.pop(scale) if source.has_scales else None
            if scales is not None and scales.shape != source.scales(shape):
                raise ValueError(
                    f"For '{self.parts.layout.optimizer}', the entry {scale!r} must have the shape "
                    f"{source.scales(shape)}, but got {scales.shape}."
                )
            converted, scales = to.encode(source.decode(value, scales, shape), state.dtype)
            given |= {name: converted} if scales is None else {name: converted, scale: scales}
        return given
