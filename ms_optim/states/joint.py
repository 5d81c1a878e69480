"""What several rules hold that take a step together, as one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor
from mindspore import dtype as mstype

from .layout import Layout
from .storage import Held

if TYPE_CHECKING:
    from ..arguments.rates import Collected


def joint_layouts(optimizer: str, layouts: Sequence[Layout], rates: Collected) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layout of all parameters, one rule's after the other's, and each rule's with its rows in it.

    Args:
        optimizer: Name of the class that holds the rules.
        layouts: The layout of each rule's parameters.
        rates: The rates of all parameters.
    """
    firsts = list(itertools.accumulate((layout.count for layout in layouts), initial=0))
    own = tuple(
        dataclasses.replace(
            layout,
            rate_places=rates.rate_places[first : first + layout.count],
            decay_places=rates.decay_places[first : first + layout.count],
            rate_count=rates.rates.count,
            first_row=first,
        )
        for first, layout in zip(firsts, layouts)
    )
    listed = ("names", "shapes", "dtypes", "rate_places", "decay_places", "centralized", "owned", "options")
    joined: dict[str, Any] = {name: tuple(x for layout in own for x in getattr(layout, name)) for name in listed}
    return Layout(optimizer=optimizer, rate_count=rates.rates.count, **joined), own


class JointHeld(Held):
    """The parameters and states of several rules. They share the counters, which are made here.

    Args:
        optimizer: Name of the class that holds the rules.
        members: What each rule holds; from now on, its counters are the shared ones.
        global_step: The count of steps.
    """

    def __init__(self, optimizer: str, members: Sequence[Held], global_step: Parameter):
        def joined(name):
            return ParameterTuple([p for held in members for p in getattr(held, name)])

        def shifted(places, counts):
            firsts = itertools.accumulate(counts, initial=0)
            return tuple(k if k < 0 else k + first for first, own in zip(firsts, places) for k in own)

        self.optimizer, self.own_ranges, self.starts_at_weights = optimizer, None, False
        self.parameters, self.states, self.scales = joined("parameters"), joined("states"), joined("scales")
        self.masters, self.averages = joined("masters"), joined("averages")
        self.numbers = tuple(shape for held in members for shape in held.numbers)
        self.state_counts = tuple(n for held in members for n in held.state_counts)
        self.master_places = shifted([held.master_places for held in members], [len(held.masters) for held in members])
        self.scale_places = shifted([held.scale_places for held in members], [len(held.scales) for held in members])
        firsts = list(itertools.accumulate((len(held.parameters) for held in members), initial=0))
        states = itertools.accumulate((len(held.states) for held in members), initial=0)
        self.state_places = {
            (k, i + first): place + state
            for held, first, state in zip(members, firsts, states)
            for (k, i), place in held.state_places.items()
        }
        self.rows = {i: i for i in range(len(self.parameters))}
        self.global_step = global_step
        self.skipped_steps = Parameter(Tensor([0], mstype.int32), name="skipped_steps", requires_grad=False)
        columns = members[0].statistics.shape[1]
        empty = Tensor(np.zeros((len(self.parameters), columns), np.float32))
        self.statistics = Parameter(empty, name="statistics", requires_grad=False)
        if any(held.step_weights for held in members):
            none = Tensor(np.zeros((len(self.parameters), 2)), mstype.float64)
            self.step_weights = (Parameter(none, name="step_weights", requires_grad=False),)
        if any(held.radii for held in members):
            none = Tensor(np.zeros(len(self.parameters), np.float32))
            self.radii = (Parameter(none, name="weight_radii", requires_grad=False),)
        for held in members:
            held.global_step, held.skipped_steps, held.statistics = global_step, self.skipped_steps, self.statistics
            held.step_weights = self.step_weights if held.step_weights else ()
            held.radii = self.radii if held.radii else ()
            held.note()

    def note(self) -> int:
        """Record dtypes and sizes for :meth:`check`; a rule's own object answers what is held for a parameter."""
        number = super().note()
        self.places = {}
        return number
