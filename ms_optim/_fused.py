"""The step as launches of a fused kernel: one for all tensors, unless less is asked for in a graph."""

# FusedStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from . import _abi, _kernels
from ._abi import launch
from ._kernels import ALL_STAGES, APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE


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
        parts = (self.before, self.weights, gradients, self.held)
        return launch(self.kernel, self.flags, self.layout, constants, rates, sums, (), *parts)


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


class FusedStep:
    """The fused form of the step; a mixin that reads the optimizer's attributes."""

    def _lay_out(self, rule, options):
        """Set the constant inputs of all launches, and return the layout of all tensors."""
        layout = _abi.layout(self._rate_index, self._decay_index, self._centralized)
        self._constants = Tensor(_abi.constants(self._unscale, options.grad_clip_norm, self._seed, rule.constants))
        self._no_sums = Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))
        self._counters = ParameterTuple((self.global_step, self.skipped_steps, self.statistics, *self.beta_powers))
        return Tensor(layout)

    def _prepare_launches(self, rule, options, device):
        """Lay out the launches: flags, operator and constant inputs of each."""
        own = tuple(i for i, mine in enumerate(self.optim_filter) if mine)
        looks_at_all = options.grad_clip_norm is not None or options.skip_nonfinite

        def planned(at_most):
            if self._sharded:
                looks_first = looks_at_all or self.normalizes_gradient
                return sharded_plan(self.param_length, at_most, rule.is_layerwise, looks_first)
            return plan(self.param_length, own, at_most, looks_at_all)

        at_most = rule.at_most or self.param_length
        phases = planned(max(at_most, -(-self.param_length // MOST_LAUNCHES)))
        shared = self._shared_flags(rule, options)
        layout = self._lay_out(rule, options)
        held_parts = self.states + self.masters + self.scales

        def made(planned_launch):
            stages, tensors = planned_launch
            n = len(tensors)
            reads, moves = stages != COMMIT_STAGE, stages not in (GRADIENT_STAGE, COMMIT_STAGE)
            weights = [self._parameters[i] for i in tensors] if moves else []
            held = [held_parts[i] for i in self._held_by(tensors)] if moves else []
            written = _abi.written(len(self._counters), len(weights), n * reads, len(held))
            shapes = [self._shapes[i] if reads else (0,) for i in tensors]
            sums = ((n, len(_kernels.SUMS)), ms.float64)
            kernel = _kernels.operator(rule.name, device, written, [sums], shapes, shared)
            own_layout = Tensor(np.ascontiguousarray(layout.asnumpy()[list(tensors)]))
            flags = _kernels.flags(stages, shared, rule.flags)
            places = None if n == self.param_length and reads else runs(tensors if reads else ())
            return LaunchCell(kernel, flags, own_layout, self._counters, weights, held, places)

        self._launches = nn.CellList([made(one) for phase in phases for one in phase])
        places = iter(range(len(self._launches)))
        self._phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        if device == "CPU" and not self.use_parallel:
            sums = [((self.param_length, len(_kernels.SUMS)), ms.float64)]
            kernel = _kernels.operator(rule.name, device, _abi.written(gradients=1), sums)
            cells = []
            for ((stages, _),) in planned(self.param_length):
                flags = _kernels.flags(stages, shared + _kernels.BY_ADDRESS, rule.flags)
                cells.append(LaunchCell(kernel, flags, layout))
            self._launches_by_address = nn.CellList(cells)
            self._phases_by_address = tuple((k,) for k in range(len(cells)))
            self._by_address = ByAddress(self._launch_by_address)
            self._addresses = _kernels.AddressTable(
                self._parameters,
                self.states,
                self.masters,
                self._master_index,
                self.scales,
                self._scale_index,
                self._counters,
            )

    def _shared_flags(self, rule, options):
        return (
            _kernels.SKIP_NONFINITE * options.skip_nonfinite
            + _kernels.MASTERS * bool(len(self.masters))
            + _kernels.CENTRALIZES * any(self._centralized)
            + _kernels.BETA_POWERS * bool(self.beta_powers)
            + _kernels.STOCHASTIC_ROUNDING * options.stochastic_rounding
            + _kernels.CLIPS * (options.grad_clip_norm is not None)
            + rule.shared_flags
        )

    def _held_by(self, tensors):
        """Return the places of some tensors' states, masters and scales among all, in the kernel's order."""
        n = self.param_length
        states = tuple(k * n + i for k in range(self._state_count) for i in tensors)
        masters = (len(self.states) + self._master_index[i] for i in tensors if self._master_index[i] >= 0)
        before = len(self.states) + len(self.masters)
        scales = (before + self._scale_index[place] for place in states if self._scale_index[place] >= 0)
        return (*states, *masters, *scales)

    def _fused_step(self, rates, gradients):
        """Run the step in a graph."""
        return self._launch_all(self._launches, self._phases, rates, gradients)

    def _launch_by_address(self, step, addresses):
        """Run the step, one launch a phase whatever the number of tensors, on what a table of addresses names."""
        return self._launch_all(self._launches_by_address, self._phases_by_address, self._rates(step), (addresses,))

    def _launch_all(self, launches, phases, rates, gradients):
        sums = self._no_sums
        for place, phase in enumerate(phases):
            found = ()
            for k in phase:
                found += (launches[k](self._constants, rates, sums, gradients),)
            made = found[0] if len(found) == 1 else ops.concat(found)
            sums = self._whole_sums(place == 0, place + 1 == len(phases), made, sums) if self._sharded else made
        return sums
