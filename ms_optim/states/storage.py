"""What an optimizer keeps from step to step, and a check that no dtype, size or memory of it has changed."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from ..arguments.weight_norms import HYPERBALL
from ..kernels.interface import Statistic
from ..questions import all_require_gradients, any_is_view, dtypes_of, sizes_of
from . import inventory, split_masters
from .in_place import as_float32, is_view, own_memory, stored_as

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..rules.rule import Rule
    from .layout import Layout


def _zeros_like(held: inventory.Held, parameter: Parameter) -> Parameter:
    """Create zeros that inherit what parallel training knows of a parameter.

    ``Parameter.clone`` would keep the dtype, and break a parameter whose data is not yet initialized.
    """
    state = Parameter(initializer("zeros", held.shape, held.dtype), requires_grad=parameter.requires_grad)
    info = parameter.param_info.clone()
    info.obj = state
    state.param_info = info
    state.is_init = False
    state.name = f"{held.prefix}.{parameter.name}"
    return state


def _scales(held: inventory.Held, parameter: Parameter) -> Parameter:
    """Create the scales of a state that is held as codes; parallel training does not need to know them."""
    zeros = initializer("zeros", held.shape, held.dtype)
    return Parameter(zeros, name=f"{held.prefix}.{parameter.name}", requires_grad=False)


def _clone(states: Iterable[tuple[Parameter, Parameter]]) -> Callable[[], None]:
    """List each state with its parameter as a clone of it, as ``Parameter.clone`` does; return what undoes that.

    A network would otherwise keep the states of all optimizers that it ever had.
    """
    listed = []
    for state, parameter in states:
        if not hasattr(parameter.param_info, "cloned_obj"):
            parameter.param_info.cloned_obj = []
        parameter.param_info.cloned_obj.append(state)
        listed.append((parameter.param_info.cloned_obj, state))

    def undo():
        for clones, state in listed:
            clones[:] = [clone for clone in clones if clone is not state]

    return undo


class Held:
    """The parameters of a network that an optimizer updates, and all that it keeps for them.

    Args:
        layout: The properties of the parameters.
        parameters: The parameters.
        rule: The optimizer's rule.
        options: The optimizer's shared arguments.
        kept: Indices of the parameters whose states this process holds, and the shapes that it holds.
        global_step: The count of steps.
        own_ranges: For each parameter, the range of its elements whose states this process holds, int64 of shape
            (parameters, 2); None if it holds all.

    Attributes:
        parameters: The parameters.
        states: The first states of all parameters, then all second states, and so on.
        scales: The scales of states that are held as codes.
        numbers: For each state, the shape of the numbers that it represents.
        masters: The masters.
        averages: The float32 averages of the weights.
        state_counts: For each parameter, the number of states of its rule.
        state_places: The index in `states` for a pair: which state of its rule it is, from 0, and the parameter's
            index.
        rows: For each parameter that has states in this process, their index among the first states.
        master_places: For each parameter, the index of its master; -1 if it has none.
        scale_places: For each state, the index of its scales; -1 if it has none.
        global_step: The count of steps.
        skipped_steps: The count of skipped steps.
        statistics: The statistics of the last step.
        step_weights: For a rule that weights steps: what it keeps for that purpose; otherwise empty.
        radii: If norms of weights are held at what they were, these norms, 0 before the first step; otherwise empty.
        beta_powers: Powers of betas, kept for checkpoints; see :meth:`keep_beta_powers`.
        log_betas: The logarithms of these betas.
    """

    optimizer: str
    parameters: ParameterTuple
    states: ParameterTuple
    scales: ParameterTuple
    numbers: tuple[tuple[int, ...], ...]
    masters: ParameterTuple
    averages: ParameterTuple
    state_counts: tuple[int, ...]
    state_places: dict[tuple[int, int], int]
    rows: dict[int, int]
    master_places: tuple[int, ...]
    scale_places: tuple[int, ...]
    own_ranges: NDArray[np.int64] | None
    starts_at_weights: bool
    places: dict[int, int]
    global_step: Parameter
    skipped_steps: Parameter
    statistics: Parameter
    step_weights: tuple[Parameter, ...] = ()
    radii: tuple[Parameter, ...] = ()
    beta_powers: tuple[Parameter, ...] = ()
    log_betas: tuple[float, ...] = ()

    def __init__(
        self,
        layout: Layout,
        parameters: ParameterTuple,
        rule: Rule,
        options: Any,
        kept: Sequence[tuple[int, tuple[int, ...]]],
        global_step: Parameter,
        own_ranges: NDArray[np.int64] | None = None,
    ):
        rules = [rule.of_tensor(layout.holds_matrices(i)) for i in range(layout.count)]
        numbered = list(inventory.states(rules, layout.options, layout.shapes, kept))
        states = [state for _, state in numbered]
        scales = [inventory.scale(state) for state in states]
        masters = list(inventory.masters(layout.options, layout.dtypes, kept))
        places = {master.place: i for i, master in enumerate(masters)}
        place = itertools.count()
        self.optimizer, self.parameters, self.own_ranges = layout.optimizer, parameters, own_ranges
        self.starts_at_weights = rule.starts_at_weights
        self.state_counts = tuple(len(rule.states) for rule in rules)
        self.state_places = {(k, state.place): i for i, (k, state) in enumerate(numbered)}
        self.rows = {i: row for row, (i, _) in enumerate(kept)}
        self.numbers = tuple(state.numbers for state in states)
        self.scale_places = tuple(-1 if scale is None else next(place) for scale in scales)
        self.master_places = tuple(places.get(i, -1) for i in range(layout.count))

        def made(make, tensors):
            return ParameterTuple([make(held, parameters[held.place]) for held in tensors if held is not None])

        averages = list(inventory.averages(layout.options, kept))
        self.states, self.scales = made(_zeros_like, states), made(_scales, scales)
        self.masters, self.averages = made(_zeros_like, masters), made(_zeros_like, averages)
        clones = ((self.states, states), (self.masters, masters), (self.averages, averages))
        pairs = [(state, parameters[of.place]) for tensors, kinds in clones for state, of in zip(tensors, kinds)]
        weakref.finalize(self, _clone(pairs))
        self.global_step = global_step
        self.skipped_steps = Parameter(Tensor([0], mstype.int32), name="skipped_steps", requires_grad=False)
        empty = Tensor(np.zeros((layout.count, len(Statistic) - 1), np.float32))
        self.statistics = Parameter(empty, name="statistics", requires_grad=False)
        if rule.weighs_steps:
            none = Tensor(np.zeros((layout.count, 2)), mstype.float64)
            self.step_weights = (Parameter(none, name="step_weights", requires_grad=False),)
        if options.weight_norm == HYPERBALL:
            none = Tensor(np.zeros(layout.count, np.float32))
            self.radii = (Parameter(none, name="weight_radii", requires_grad=False),)

    def keep_beta_powers(self, betas: Sequence[float]) -> tuple[Parameter, ...]:
        """Create Parameters that each step sets to beta^t."""
        self.log_betas = tuple(math.log(beta) for beta in betas)
        self.beta_powers = tuple(
            Parameter(Tensor([1.0], mstype.float32), name=f"beta{k}_power", requires_grad=False)
            for k in range(1, 1 + len(betas))
        )
        return self.beta_powers

    def beside(self, parameters: ParameterTuple, counters: Sequence[Parameter]) -> Held:
        """Return a copy with other parameters and counters of the same shapes, in the same order."""
        other, count = copy.copy(self), iter(counters)
        other.parameters = parameters
        other.global_step, other.skipped_steps, other.statistics = (next(count) for _ in range(3))
        other.step_weights = tuple(next(count) for _ in self.step_weights)
        other.radii = tuple(next(count) for _ in self.radii)
        other.beta_powers = tuple(next(count) for _ in self.beta_powers)
        return other

    @property
    def counters(self) -> tuple[Parameter, ...]:
        """What is kept once and not for each parameter, in the order of the kernels."""
        return (
            self.global_step,
            self.skipped_steps,
            self.statistics,
            *self.step_weights,
            *self.radii,
            *self.beta_powers,
        )

    @property
    def of_tensors(self) -> tuple[Parameter, ...]:
        """States, masters, averages and scales, in the order of the kernels."""
        return (*self.states, *self.masters, *self.averages, *self.scales)

    def tensors_for(
        self, places: Sequence[int], states: int | None = None, weights: bool = True
    ) -> tuple[Parameter, ...]:
        """Return what is held for the parameters at the given indices, in the order of the kernels.

        Args:
            places: The indices.
            states: How many states of each parameter; all if None.
            weights: Whether masters and averages are among them.
        """
        rows = [self.rows[i] for i in places if weights and i in self.rows]
        most = max(self.state_counts) if states is None else states
        found = (self.state_places.get((k, i)) for k in range(most) for i in places)
        known = [place for place in found if place is not None]
        masters = (self.masters[k] for k in (self.master_places[i] for i in places if weights) if k >= 0)
        averages = (self.averages[row] for row in rows if len(self.averages) > 0)
        scales = (self.scales[k] for k in (self.scale_places[state] for state in known) if k >= 0)
        return (*(self.states[state] for state in known), *masters, *averages, *scales)

    def has_master(self) -> tuple[bool, ...]:
        """Return for each parameter whether it has a master."""
        return tuple(place >= 0 for place in self.master_places)

    def masters_or_weights(self) -> ParameterTuple:
        """Return each parameter's master, or the parameter itself if it has none."""
        return ParameterTuple([self.masters[k] if k >= 0 else p for k, p in zip(self.master_places, self.parameters)])

    def state_of(self, k: int, i: int) -> Parameter | None:
        """Return a state of a parameter, or None if it has none."""
        place = self.state_places.get((k, i))
        return None if place is None else self.states[place]

    def has_scales(self, i: int) -> bool:
        """Return whether a state of a parameter is held as codes with scales."""
        places = (self.state_places.get((k, i)) for k in range(max(self.state_counts)))
        return any(place is not None and self.scale_places[place] >= 0 for place in places)

    def states_of_each(self) -> tuple[ParameterTuple, ...]:
        """Return, for each state of the rule, the states of all parameters; the parameter itself if it has none."""
        return tuple(
            ParameterTuple([p if (s := self.state_of(k, i)) is None else s for i, p in enumerate(self.parameters)])
            for k in range(max(self.state_counts))
        )

    def scales_of_each(self) -> tuple[ParameterTuple, ...]:
        """Return, for each state of the rule, the scales of all parameters; the parameter itself if it has none."""
        found = []
        for k in range(max(self.state_counts)):
            places = [self.state_places.get((k, i)) for i in range(len(self.parameters))]
            scales = [-1 if place is None else self.scale_places[place] for place in places]
            found.append(ParameterTuple([p if s < 0 else self.scales[s] for p, s in zip(self.parameters, scales)]))
        return tuple(found)

    def averages_of_each(self) -> ParameterTuple:
        """Return the averages of all parameters; the parameter itself if it has none."""
        return ParameterTuple(
            [self.averages[self.rows[i]] if i in self.rows else p for i, p in enumerate(self.parameters)]
        )

    def own_range(self, i: int) -> tuple[int, int]:
        """Return the range of a parameter's elements whose states this process has."""
        return (0, self.parameters[i].size) if self.own_ranges is None else tuple(self.own_ranges[i].tolist())

    def weights(self, i: int) -> NDArray[np.float32]:
        """Return the weights whose states this process has, flat: from their master, if there is one."""
        p, (begin, end) = self.parameters[i], self.own_range(i)
        weights = as_float32(p)[begin:end]
        if self.master_places[i] < 0:
            return weights
        master = self.masters[self.master_places[i]]
        if master.dtype != mstype.float32:
            return split_masters.restored(weights, master.asnumpy().reshape(-1))
        return np.where(stored_as(master.asnumpy(), p.dtype) == weights, master.asnumpy().reshape(-1), weights)

    def note(self) -> int:
        """Record dtypes and sizes for :meth:`check`, and return the number that :func:`check_held` takes."""
        self._seen = noted((*self.parameters, *self.of_tensors, *self.counters))
        self.places = {id(p): i for i, p in enumerate(self.parameters)}
        self._trained = [p for p in self.parameters if p.requires_grad]
        all_held[id(self)] = self
        return id(self)

    def check(self) -> None:
        """Raise an error that names what has changed since construction; copy each view to memory of its own."""
        check_noted(self.optimizer, self._seen)
        if all_require_gradients(self._trained):
            return
        for p in self._trained:
            if not p.requires_grad:
                raise ValueError(
                    f"For '{self.optimizer}', the parameter '{p.name}' was frozen (requires_grad=False) after the "
                    "optimizer was made, which goes on to update it. Make a new optimizer of net.trainable_params(), "
                    "and load this one's state_dict() with strict=False."
                )


class Noted(NamedTuple):
    """Parameters, with the dtypes and sizes that they had."""

    parameters: tuple[Parameter, ...]
    dtypes: list[Any]
    sizes: list[int]


def noted(parameters: Iterable[Parameter]) -> Noted:
    """Return parameters with the dtypes and sizes that :func:`check_noted` compares."""
    found = tuple(parameters)
    return Noted(found, dtypes_of(found), sizes_of(found))


def check_noted(optimizer: str, seen: Noted) -> None:
    """Raise an error that names the first changed parameter; copy each view to memory of its own."""
    is_as_noted = dtypes_of(seen.parameters) == seen.dtypes and sizes_of(seen.parameters) == seen.sizes
    if is_as_noted and not any_is_view(seen.parameters):
        return
    for p, dtype, size in zip(*seen):
        if p.dtype != dtype or p.size != size:
            raise ValueError(
                f"For '{optimizer}', the parameter '{p.name}' must stay as it was when the "
                f"optimizer was made: {dtype} of {size} elements. It is now {p.dtype} of shape {p.shape}. Change "
                "parameters before the optimizer is made."
            )
        if is_view(p):
            own_memory((p,))


# What each optimizer holds, by number, because a graph cannot pass other objects.
all_held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


def check_held(number: int) -> int:
    """Check what the optimizer with this number holds."""
    held = all_held.get(number)
    if held is not None:
        held.check()
    return number
