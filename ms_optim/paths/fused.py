"""The step as launches of a fused kernel: one for all tensors, unless less is asked for in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .. import _abi, _kernels
from .._abi import launch
from .._kernels import ALL_STAGES, APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE

if TYPE_CHECKING:
    from .._held import Held
    from .._layout import Layout, Settings


class Launch(NamedTuple):
    """What one launch does, and the places of the tensors it takes."""

    stages: int
    tensors: tuple[int, ...]


def plan(count: int, own: tuple[int, ...], at_most: int, looks_at_all: bool) -> list[list[Launch]]:
    """Split a step into phases of launches; each phase sees the sums of the phase before.

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


def sharded_plan(count: int, at_most: int, is_layerwise: bool, looks_first: bool) -> list[list[Launch]]:
    """Split a step of split tensors into phases: after each but the last, sums are added up over processes.

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
# A graph unrolls loops by recursion, which MindSpore limits: no loop of a step has many more turns than this.
MOST_TURNS = 64


def in_parts(items: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return items in parts: as many loops over a part and one over the parts replace a loop with too many turns."""
    size = max(MOST_TURNS, -(-len(items) // MOST_TURNS))
    return tuple(tuple(items[k : k + size]) for k in range(0, len(items), size))


def runs(places: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return what :func:`picked` takes for places: ranges of consecutive places, in parts."""
    ranges: list[tuple[int, int]] = []
    for i in places:
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    return in_parts(ranges)


def picked(tensors, places):
    """Return the tensors at some places, as :func:`runs` states these; usable in graphs."""
    found = ()
    for ranges in places:
        found += _picked_ranges(tensors, ranges)
    return found


def _picked_ranges(tensors, ranges):
    found = ()
    for begin, end in ranges:
        found += tensors[begin:end]
    return found


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
        places: Places of its gradients among all, as :func:`runs` states these; None: it takes all that it is given.
    """

    def __init__(self, kernel, flags, layout, before=(), weights=(), held=(), places=None):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags, self.layout = kernel, flags, layout
        self.takes_all, self.places = places is None, places or ()
        # The optimizer holds these already, and Cell would list them twice.
        for name, tensors in (("before", before), ("weights", weights), ("held", held)):
            object.__setattr__(self, name, as_tuple(tensors))

    def construct(self, constants, rates, sums, gradients):
        """Run the kernel on its part of all gradients, and return its sums."""
        if not self.takes_all:
            gradients = picked(gradients, self.places)
        parts = ((), self.before, self.weights, gradients, self.held)
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


def shared_flags(layout: Layout, held: Held, rule, options) -> int:
    """Return the flags that all launches of an optimizer share."""
    return (
        _kernels.SKIP_NONFINITE * options.skip_nonfinite
        + _kernels.MASTERS * bool(len(held.masters))
        + _kernels.CENTRALIZES * any(layout.centralized)
        + _kernels.BETA_POWERS * bool(held.beta_powers)
        + _kernels.STOCHASTIC_ROUNDING * options.stochastic_rounding
        + _kernels.CLIPS * (options.grad_clip_norm is not None)
        + rule.shared_flags
    )


def launch_constants(rule, settings: Settings) -> Tensor:
    """Return the numbers that all launches of an optimizer take."""
    return Tensor(_abi.constants(settings.unscale, settings.clip_norm, settings.seed, rule.constants))


def launch_layout(layout: Layout) -> np.ndarray:
    """Return the layout of all tensors as launches take it: int32 of shape (tensors, columns)."""
    return _abi.layout(layout.rate_places, layout.decay_places, layout.centralized)


def no_sums() -> Tensor:
    """Return what a launch takes in the place of sums that nobody made."""
    return Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))


class FusedPath(nn.Cell):
    """The step as launches of a fused kernel.

    Args:
        layout: What is known of the parameters.
        held: What the optimizer holds.
        rule: The optimizer's rule.
        options: Its shared arguments.
        settings: What all paths are told.
        rates: The Cell that evaluates the rates of a step.
        normalizes: Whether each gradient is divided by its norm.
        slice_sums: What adds up sums of sliced tensors over processes; None: no tensor is sliced.

    Attributes:
        addresses: The table of addresses that steps called from Python fill; None where there is none.
    """

    addresses: _kernels.AddressTable | None

    def __init__(self, layout, held, rule, options, settings, rates, normalizes, slice_sums):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "rates", rates)
        self.slice_sums, self.addresses = slice_sums, None
        self.constants, self.no_sums = launch_constants(rule, settings), no_sums()
        count, device = layout.count, settings.device
        own = tuple(i for i, mine in enumerate(layout.owned) if mine)
        looks_at_all = options.grad_clip_norm is not None or options.skip_nonfinite

        def planned(at_most):
            if slice_sums is not None:
                return sharded_plan(count, at_most, rule.is_layerwise, looks_at_all or normalizes)
            return plan(count, own, at_most, looks_at_all)

        phases = planned(max(rule.at_most or count, -(-count // MOST_LAUNCHES)))
        shared, columns = shared_flags(layout, held, rule, options), launch_layout(layout)

        def made(planned_launch):
            stages, tensors = planned_launch
            n = len(tensors)
            reads, moves = stages != COMMIT_STAGE, stages not in (GRADIENT_STAGE, COMMIT_STAGE)
            weights = [held.parameters[i] for i in tensors] if moves else []
            states = [held.of_tensors[i] for i in held.places_of(tensors)] if moves else []
            written = _abi.written(len(held.counters), len(weights), n * reads, len(states))
            shapes = [layout.shapes[i] if reads else (0,) for i in tensors]
            sums = ((n, len(_kernels.SUMS)), ms.float64)
            kernel = _kernels.operator(rule.name, device, written, [sums], shapes, shared)
            own_layout = Tensor(np.ascontiguousarray(columns[list(tensors)]))
            flags = _kernels.flags(stages, shared, rule.flags)
            places = None if n == count and reads else runs(tensors if reads else ())
            return LaunchCell(kernel, flags, own_layout, held.counters, weights, states, places)

        self.launches = nn.CellList([made(launch) for phase in phases for launch in phase])
        places = iter(range(len(self.launches)))
        self.phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        if device == "CPU" and not settings.is_parallel:
            sums = [((count, len(_kernels.SUMS)), ms.float64)]
            kernel = _kernels.operator(rule.name, device, _abi.written(gradients=1), sums)
            cells = []
            for ((stages, _),) in planned(count):
                flags = _kernels.flags(stages, shared + _kernels.BY_ADDRESS, rule.flags)
                cells.append(LaunchCell(kernel, flags, Tensor(columns)))
            self.launches_by_address = nn.CellList(cells)
            self.phases_by_address = tuple((k,) for k in range(len(cells)))
            self.by_address = ByAddress(self.launch_by_address)
            self.addresses = _kernels.AddressTable(held)

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
            sums = made if self.slice_sums is None else self.whole(place == 0, place + 1 == len(phases), made, sums)
        return sums

    def whole(self, is_first, is_last, sums, known):
        """Return the sums that a phase of launches made, of whole tensors; after the last phase nobody needs them.

        The first phase settles the gradients' sums: a launch that skips the step only passes them on, and even where
        one sums them up anew, all launches shall clip alike.

        Args:
            is_first: Whether it is the first phase.
            is_last: Whether it is the last.
            sums: What the launches returned, float64 of shape (tensors, kinds of sums); gradients' sums are in front.
            known: What this returned after the phase before.
        """
        if is_last:
            return sums
        whole = self.slice_sums(sums)
        return whole if is_first else ops.concat((known[:, :1], whole[:, 1:]), 1)
