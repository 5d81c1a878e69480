"""What an optimizer holds from step to step, and the check that none of it has changed its dtype, size or memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, ParameterTuple, Tensor
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer

from . import _memory

if TYPE_CHECKING:
    from ._layout import Layout


def _zeros_like(held: _memory.Held, parameter: Parameter) -> Parameter:
    """Make zeros with what parallel training knows of a parameter.

    ``Parameter.clone`` would keep the dtype, and spoil a parameter whose data is yet to be initialized.
    """
    state = Parameter(initializer("zeros", held.shape, held.dtype), requires_grad=parameter.requires_grad)
    info = parameter.param_info.clone()
    info.obj = state
    if not hasattr(parameter.param_info, "cloned_obj"):
        parameter.param_info.cloned_obj = []
    parameter.param_info.cloned_obj.append(state)
    state.param_info = info
    state.is_init = False
    state.name = f"{held.prefix}.{parameter.name}"
    return state


def _scales(held: _memory.Held, parameter: Parameter) -> Parameter:
    """Make the scales of a state that is held in codes, which nothing else needs to know of."""
    zeros = initializer("zeros", held.shape, held.dtype)
    return Parameter(zeros, name=f"{held.prefix}.{parameter.name}", requires_grad=False)


class Held:
    """The parameters of a network that an optimizer updates, and all that it keeps for them.

    Args:
        layout: What is known of the parameters.
        parameters: The parameters.
        prefixes: What the names of the rule's states begin with, in its order.
        options: The optimizer's shared arguments.
        kept: Places of the parameters whose states this process holds, and the shape of what it holds.
        counters: The count of steps, that of skipped steps, and the statistics.

    Attributes:
        parameters: The parameters.
        states: All parameters' first states, then all second ones, and so on.
        scales: The scales of states in codes.
        masters: The float32 masters.
        state_count: How many states the rule has.
        master_places: For each parameter the place of its master, -1 where it has none.
        scale_places: For each state the place of its scales, -1 where it has none.
        global_step: The count of steps.
        skipped_steps: The count of skipped steps.
        statistics: The statistics of the last step.
        beta_powers: Powers of betas, kept for checkpoints; see :meth:`keep_beta_powers`.
        log_betas: The logarithms of these betas.
    """

    optimizer: str
    parameters: ParameterTuple
    states: ParameterTuple
    scales: ParameterTuple
    masters: ParameterTuple
    state_count: int
    master_places: tuple[int, ...]
    scale_places: tuple[int, ...]
    global_step: Parameter
    skipped_steps: Parameter
    statistics: Parameter
    beta_powers: tuple[Parameter, ...] = ()
    log_betas: tuple[float, ...] = ()

    def __init__(
        self,
        layout: Layout,
        parameters: ParameterTuple,
        prefixes: Sequence[str],
        options: Any,
        kept: Sequence[tuple[int, tuple[int, ...]]],
        counters: tuple[Parameter, Parameter, Parameter],
    ):
        states = list(_memory.states(prefixes, options, layout.shapes, kept))
        scales = [_memory.scale(state) for state in states]
        masters = list(_memory.masters(options, layout.dtypes, kept))
        places = {master.place: i for i, master in enumerate(masters)}
        place = itertools.count()
        self.optimizer, self.parameters, self.state_count = layout.optimizer, parameters, len(prefixes)
        self.scale_places = tuple(-1 if scale is None else next(place) for scale in scales)
        self.master_places = tuple(places.get(i, -1) for i in range(layout.count))

        def made(make, tensors):
            return ParameterTuple([make(held, parameters[held.place]) for held in tensors if held is not None])

        self.states, self.scales = made(_zeros_like, states), made(_scales, scales)
        self.masters = made(_zeros_like, masters)
        self.global_step, self.skipped_steps, self.statistics = counters

    def keep_beta_powers(self, betas: Sequence[float]) -> tuple[Parameter, ...]:
        """Make Parameters that each step keeps at beta^t."""
        self.log_betas = tuple(math.log(beta) for beta in betas)
        self.beta_powers = tuple(
            Parameter(Tensor([1.0], mstype.float32), name=f"beta{k}_power", requires_grad=False)
            for k in range(1, 1 + len(betas))
        )
        return self.beta_powers

    @property
    def counters(self) -> tuple[Parameter, ...]:
        """What is kept once, and not for each parameter, in the order of the kernels."""
        return (self.global_step, self.skipped_steps, self.statistics, *self.beta_powers)

    @property
    def of_tensors(self) -> tuple[Parameter, ...]:
        """States, masters and scales, in the order of the kernels."""
        return (*self.states, *self.masters, *self.scales)

    def places_of(self, tensors: Sequence[int]) -> tuple[int, ...]:
        """Return the places in :attr:`of_tensors` of what is held for some parameters, in the order of the kernels."""
        n = len(self.parameters)
        states = tuple(k * n + i for k in range(self.state_count) for i in tensors)
        masters = (len(self.states) + self.master_places[i] for i in tensors if self.master_places[i] >= 0)
        before = len(self.states) + len(self.masters)
        scales = (before + self.scale_places[place] for place in states if self.scale_places[place] >= 0)
        return (*states, *masters, *scales)

    def has_master(self) -> tuple[bool, ...]:
        """Tell of each parameter whether it has a master."""
        return tuple(place >= 0 for place in self.master_places)

    def masters_or_weights(self) -> ParameterTuple:
        """Return each parameter's master, or where it has none itself."""
        return ParameterTuple([self.masters[k] if k >= 0 else p for k, p in zip(self.master_places, self.parameters)])

    def states_of_each(self) -> tuple[ParameterTuple, ...]:
        """Return for each state of the rule those of all parameters."""
        n = len(self.parameters)
        return tuple(ParameterTuple(self.states[k * n : (k + 1) * n]) for k in range(self.state_count))

    def note(self) -> None:
        """Note dtypes and sizes, which :meth:`check` compares."""
        written = (*self.parameters, *self.of_tensors, *self.counters)
        self._seen = [(p, p.dtype, p.size) for p in written]

    def check(self) -> None:
        """Raise an error that names what has changed since construction; a view gets memory of its own."""
        for p, dtype, size in self._seen:
            if p.dtype != dtype or p.size != size:
                raise ValueError(
                    f"For '{self.optimizer}', the parameter '{p.name}' must stay as it was when the optimizer was "
                    f"made, {dtype} of {size} elements, but is {p.dtype} of shape {p.shape}. Change parameters before "
                    "the optimizer is made."
                )
            # MindSpore's own question: operators copy a view before they write it, even if it is contiguous.
            if not p.has_init and p._need_contiguous():
                p.set_data(Tensor(p.asnumpy(), dtype))
