"""The step as launches of a fused kernel: one for all tensors, unless less is asked for in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .. import _abi, _kernels
from .._abi import launch
from .._addresses import AddressTable
from .._kernels import ALL_STAGES, APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from .places import chosen, picked

if TYPE_CHECKING:
    from .parts import Parts


class Launch(NamedTuple):
    """What one launch does, and the places of the tensors it takes."""

    stages: int
    tensors: tuple[int, ...]


def phases_of(count: int, own: tuple[int, ...], at_most: int, looks_at_all: bool) -> list[list[Launch]]:
    """Cut a step into phases of launches; each phase sees the sums of the phase before.

    Args:
        count: How many tensors there are.
        own: Places of those that this process updates.
        at_most: How many tensors one launch may take.
        looks_at_all: Whether nothing may move before all gradients were read, as for their global norm.
    """
    if not looks_at_all or count == len(own) <= at_most:
        return _committed([_launches(ALL_STAGES - COMMIT_STAGE, own, at_most)])
    everything = tuple(range(count))
    first = _launches(GRADIENT_STAGE, everything, at_most)
    return _committed([first, _launches(MOMENTS_STAGE + APPLY_STAGE, own, at_most)])


def phases_of_parts(count: int, at_most: int, is_layerwise: bool, looks_first: bool) -> list[list[Launch]]:
    """Cut a step on parts of tensors into phases: between phases, sums are added up over processes.

    Args:
        count: How many tensors there are.
        at_most: How many tensors one launch may take.
        is_layerwise: Whether weights move by the sums of the moments' phase.
        looks_first: Whether the moments need sums of gradients.
    """
    everything = tuple(range(count))
    phases = [_launches(GRADIENT_STAGE, everything, at_most)] if looks_first else []
    moments = MOMENTS_STAGE if looks_first else GRADIENT_STAGE + MOMENTS_STAGE
    if is_layerwise:
        phases += [_launches(moments, everything, at_most), _launches(APPLY_STAGE, everything, at_most)]
        return _committed(phases)
    return [*phases, _launches(moments + APPLY_STAGE, everything, at_most), [Launch(COMMIT_STAGE, everything)]]


def _launches(stages: int, tensors: tuple[int, ...], at_most: int) -> list[Launch]:
    return [Launch(stages, tensors[k : k + at_most]) for k in range(0, len(tensors), at_most)]


def _committed(phases: list[list[Launch]]) -> list[list[Launch]]:
    """Have the last launch commit the step."""
    last = phases[-1][-1]
    phases[-1][-1] = last._replace(stages=last.stages + COMMIT_STAGE)
    return phases


# Each launch that a graph has besides makes it compile longer.
MOST_LAUNCHES = 16


def as_tuple(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a tuple that graphs take as it is: of a plain tuple they compile each Parameter by itself."""
    if len(tensors) > 0 and all(isinstance(tensor, Parameter) for tensor in tensors):
        return ParameterTuple(tensors)
    return tuple(tensors)


class LaunchCell(nn.Cell):
    """One launch: its operator and what that takes besides gradients.

    Args:
        kernel: The operator.
        flags: What it is to do.
        layout: The layout of its tensors.
        before: What it takes before the tensors: the counters, and ranges if it is one of a share.
        weights: The weights that it moves.
        held: Their states, masters and scales.
        places: Places of its gradients among all, as :func:`ms_optim.paths.places.chosen` states these; None: it takes
            all that it is given.
        matrices: Of a rule of matrices the table of these, and the coefficients of its iterations.
    """

    def __init__(self, kernel, flags, layout, before=(), weights=(), held=(), places=None, matrices=()):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags, self.layout, self.matrices = kernel, flags, layout, matrices
        self.takes_all, self.places = places is None, places or ()
        # The optimizer holds these already, and Cell would list them twice.
        for name, tensors in (("before", before), ("weights", weights), ("held", held)):
            object.__setattr__(self, name, as_tuple(tensors))

    def construct(self, constants, rates, sums, gradients):
        """Run the kernel on its part of all gradients, and return its sums."""
        if not self.takes_all:
            gradients = picked(gradients, self.places)
        parts = (self.matrices, self.before, self.weights, gradients, self.held)
        return launch(self.kernel, self.flags, self.layout, constants, rates, sums, *parts)


class ByAddress(nn.Cell):
    """The step that is called from Python, compiled by itself.

    MindSpore notes on a Cell which of its methods it compiled last, and takes that for the Cell's ``construct`` when it
    compiles a graph with the Cell in it: so this is no method of the optimizer.
    """

    def __init__(self, launch_all):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "launch_all", launch_all)

    @ms.jit(backend="ms_backend")
    def run(self, step, addresses):
        """Run the step on what a table of addresses names."""
        return self.launch_all(step, addresses)


def shared_flags(parts: Parts) -> int:
    """Return the flags that all launches of an optimizer share."""
    held, options = parts.held, parts.options
    return (
        _kernels.SKIP_NONFINITE * options.skip_nonfinite
        + _kernels.MASTERS * bool(len(held.masters))
        + _kernels.CENTRALIZES * any(parts.layout.centralized)
        + _kernels.BETA_POWERS * bool(held.beta_powers)
        + _kernels.STOCHASTIC_ROUNDING * options.stochastic_rounding
        + _kernels.CLIPS * (options.grad_clip_norm is not None)
        + _kernels.AVERAGES * (options.average_decay is not None)
        + parts.rule.shared_flags
    )


def no_sums() -> Tensor:
    """Return what a launch takes in the place of sums that nobody made."""
    return Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))


class FusedPath(nn.Cell):
    """The step as launches of a fused kernel.

    Where a process has parts of tensors, sums over these are exchanged between two phases:

        gradients | moments and weights | commit     a rule that looks at single elements
        gradients | moments | weights and commit     a layer-wise rule

    Gradients have a phase of their own only if all of them are looked at first, for clipping, say.

    Args:
        parts: What every path is made from.
        exchange: What adds up sums of parts of tensors over processes; None: this process has all of each tensor.
        ranges: Which elements of each tensor this process updates, int64 of shape (tensors, 2), where it has whole
            gradients all the same; None: all that it has.

    Attributes:
        addresses: The table of addresses that steps called from Python fill; None where there is none.
    """

    addresses: AddressTable | None

    def __init__(self, parts: Parts, exchange: nn.Cell | None = None, ranges: np.ndarray | None = None):
        super().__init__(auto_prefix=False)
        layout, held, rule, options, settings = parts.layout, parts.held, parts.rule, parts.options, parts.settings
        object.__setattr__(self, "rates", parts.rates)
        self.exchange: Any
        self.exchange, self.has_whole_gradients, self.addresses = exchange, ranges is not None, None
        numbers = (settings.unscale, settings.clip_norm, settings.seed, rule.constants)
        constants = _abi.constants(*numbers, settings.cautious, settings.average)
        self.constants, self.no_sums = Tensor(constants), no_sums()
        count, device = layout.count, settings.device
        own = tuple(i for i, mine in enumerate(layout.owned) if mine)
        looks_at_all = options.grad_clip_norm is not None or options.skip_nonfinite
        looks_first = looks_at_all or parts.statement.normalizes_gradient

        def planned(at_most):
            if exchange is not None:
                return phases_of_parts(count, at_most, rule.is_layerwise, looks_first)
            return phases_of(count, own, at_most, looks_at_all)

        phases = planned(count if ranges is not None else max(rule.at_most or count, -(-count // MOST_LAUNCHES)))
        shared = shared_flags(parts)
        columns = _abi.layout(layout.rate_places, layout.decay_places, layout.centralized)

        def matrices_of(tensors):
            if not rule.iterations:
                return ()
            table = Tensor(_abi.matrices([layout.matrices(i) for i in tensors]))
            return table, Tensor(np.array(rule.iterations, np.float64))

        has_matrices = len(rule.iterations) > 0

        def made(planned_launch):
            stages, tensors = planned_launch
            n = len(tensors)
            reads, moves = stages != COMMIT_STAGE, stages not in (GRADIENT_STAGE, COMMIT_STAGE)
            weights = [held.parameters[i] for i in tensors] if moves else []
            states = held.tensors_for(tensors) if moves else ()
            own_ranges = () if ranges is None or not moves else (Tensor(ranges[list(tensors)]),)
            counts = (len(held.counters), len(weights), n * reads, len(states))
            written = _abi.written(*counts, ranges=len(own_ranges) > 0, matrices=has_matrices)
            shapes = [layout.shapes[i] if reads else (0,) for i in tensors]
            sums = ((n, len(_kernels.SUMS)), ms.float64)
            kernel = _kernels.operator(rule.name, device, written, [sums], shapes, shared)
            own_layout = Tensor(np.ascontiguousarray(columns[list(tensors)]))
            flags = _kernels.flags(stages, shared + _kernels.SHARES * len(own_ranges), rule.flags)
            places = None if n == count and reads else chosen(tensors if reads else ())
            before = (*own_ranges, *held.counters)
            return LaunchCell(kernel, flags, own_layout, before, weights, states, places, matrices_of(tensors))

        self.launches = nn.CellList([made(launch) for phase in phases for launch in phase])
        self.is_exchanged = self.exchanged_after(phases)
        places = iter(range(len(self.launches)))
        self.phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        if device == "CPU" and not settings.is_parallel and ranges is None:
            sums = [((count, len(_kernels.SUMS)), ms.float64)]
            kernel = _kernels.operator(rule.name, device, _abi.written(gradients=1, matrices=has_matrices), sums)
            cells = []
            for ((stages, _),) in planned(count):
                flags = _kernels.flags(stages, shared + _kernels.BY_ADDRESS, rule.flags)
                cells.append(LaunchCell(kernel, flags, Tensor(columns), matrices=matrices_of(range(count))))
            self.launches_by_address = nn.CellList(cells)
            self.phases_by_address = tuple((k,) for k in range(len(cells)))
            self.by_address = ByAddress(self.launch_by_address)
            self.addresses = AddressTable(held)

    def exchanged_after(self, phases):
        """Tell of each phase whether its sums are exchanged: not those of the last, nor those of whole gradients."""
        if self.exchange is None:
            return (False,) * len(phases)
        known = [self.has_whole_gradients and phase[0].stages == GRADIENT_STAGE for phase in phases]
        return tuple(place + 1 < len(phases) and not is_known for place, is_known in enumerate(known))

    def construct(self, rates, gradients):
        """Take a step; return sums that nobody needs, once it is taken."""
        return self.launch_all(self.launches, self.phases, rates, gradients)

    def run_by_address(self, step, addresses):
        """Take a step, called from Python, on what a table of addresses names."""
        return self.by_address.run(step, addresses)

    def launch_by_address(self, step, addresses):
        """Take a step, one launch a phase whatever the number of tensors, on what a table of addresses names."""
        return self.launch_all(self.launches_by_address, self.phases_by_address, self.rates(step), (addresses,))

    def launch_all(self, launches, phases, rates, gradients):
        """Run the launches of all phases."""
        sums = self.no_sums
        for place, phase in enumerate(phases):
            found = ()
            for k in phase:
                found += (launches[k](self.constants, rates, sums, gradients),)
            made = found[0] if len(found) == 1 else ops.concat(found)
            sums = self.whole(place == 0, made, sums) if self.is_exchanged[place] else made
        return sums

    def whole(self, is_first, sums, known):
        """Return the sums of whole tensors from those of the parts that the processes have.

        The first phase settles the gradients' sums: a launch that skips the step only passes them on, and even where
        one sums them up anew, all launches shall clip alike.

        Args:
            is_first: Whether a phase of launches before this one knew no sums.
            sums: What the launches returned, float64 of shape (tensors, kinds of sums); gradients' sums are in front.
            known: The sums that they took.
        """
        whole = self.exchange(sums)
        return whole if is_first else ops.concat((known[:, :1], whole[:, 1:]), 1)
