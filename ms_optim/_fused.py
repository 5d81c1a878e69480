"""The step as launches of a fused kernel: one for all tensors, unless less is asked for in a graph."""

# FusedStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from . import _kernels
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


def picked(tensors, places):
    """Return the tensors at some places; usable in graphs."""
    found = ()
    for i in places:
        found += (tensors[i],)
    return found


class LaunchCell(nn.Cell):
    """One launch: its operator and what that always takes."""

    def __init__(self, kernel, flags, layout):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags, self.layout = kernel, flags, layout

    def construct(self, constants, rates, sums, tensors):
        """Run the kernel and return its sums."""
        return self.kernel(self.flags, self.layout, constants, rates, sums, *tensors)


class FusedStep:
    """The fused form of the step; a mixin that reads the optimizer's attributes."""

    def _lay_out(self, rule, options):
        """Set the constant inputs of all launches, and return the layout of all tensors."""
        columns = [self._rate_index, self._decay_index, self._centralized, range(self.param_length)]
        constants = (self._unscale, options.grad_clip_norm or 0.0, self._seed, *rule.constants)
        self._constants = Tensor(np.array(constants, np.float64))
        self._no_sums = Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))
        self._counters = ParameterTuple((self.global_step, self.skipped_steps, self.statistics, *self.beta_powers))
        return Tensor(np.array(columns, np.int32).T)

    def _prepare_launches(self, rule, options, device):
        """Lay out the launches: flags, operator and constant inputs of each."""
        own = tuple(i for i, mine in enumerate(self.optim_filter) if mine)
        looks_at_all = options.grad_clip_norm is not None or options.skip_nonfinite

        def planned(at_most):
            if self._sharded:
                looks_first = looks_at_all or self.normalizes_gradient
                return sharded_plan(self.param_length, at_most, rule.is_layerwise, looks_first)
            return plan(self.param_length, own, at_most, looks_at_all)

        phases = planned(rule.at_most or self.param_length)
        launches = [launch for phase in phases for launch in phase]
        places = iter(range(len(launches)))
        self._phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        self._launch_tensors = tuple(launch.tensors for launch in launches)
        self._takes_all = tuple(len(launch.tensors) == self.param_length for launch in launches)
        self._takes_gradients = tuple(launch.stages != COMMIT_STAGE for launch in launches)
        self._takes_weights = tuple(launch.stages not in (GRADIENT_STAGE, COMMIT_STAGE) for launch in launches)
        self._launch_held = tuple(self._held_by(launch.tensors) for launch in launches)
        shared = self._shared_flags(rule, options)
        layout = self._lay_out(rule, options)

        cells = []
        for k, ((stages, tensors), held) in enumerate(zip(launches, self._launch_held)):
            n, reads, moves = len(tensors), self._takes_gradients[k], self._takes_weights[k]
            written = (False,) * 5 + (True,) * len(self._counters)
            written += (True,) * n * moves + (False,) * n * reads + (True,) * len(held) * moves
            shapes = [self._shapes[i] if stages != COMMIT_STAGE else (0,) for i in tensors]
            sums = ((n, len(_kernels.SUMS)), ms.float64)
            kernel = _kernels.operator(rule.name, device, written, [sums], shapes, shared)
            own_layout = Tensor(np.ascontiguousarray(layout.asnumpy()[list(tensors)]))
            cells.append(LaunchCell(kernel, _kernels.flags(stages, shared, rule.flags), own_layout))
        self._launches = nn.CellList(cells)
        if device == "CPU" and not self.use_parallel:
            sums = [((self.param_length, len(_kernels.SUMS)), ms.float64)]
            kernel = _kernels.operator(rule.name, device, (False,) * 6, sums)
            cells = []
            for ((stages, _),) in planned(self.param_length):
                flags = _kernels.flags(stages, shared + _kernels.BY_ADDRESS, rule.flags)
                cells.append(LaunchCell(kernel, flags, layout))
            self._launches_by_address = nn.CellList(cells)
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
        return self._launch_all(rates, gradients)

    def _launch_all(self, rates, gradients):
        rates = ops.stack(rates)
        sums = self._no_sums
        for place, phase in enumerate(self._phases):
            found = ()
            for k in phase:
                found += (self._launches[k](self._constants, rates, sums, self._taken_by(k, gradients)),)
            made = found[0] if len(phase) == 1 else ops.concat(found)
            sums = self._whole_sums(place, made, sums) if self._sharded else made
        return sums

    def _taken_by(self, k, gradients):
        """Return the tensors that a launch takes."""
        weights, held = self.parameters, self.states + self.masters + self.scales
        if not self._takes_all[k]:
            weights = picked(weights, self._launch_tensors[k])
            gradients = picked(gradients, self._launch_tensors[k])
            held = picked(held, self._launch_held[k])
        if not self._takes_gradients[k]:
            return self._counters
        if not self._takes_weights[k]:
            return self._counters + gradients
        return self._counters + weights + gradients + held

    @ms.jit(backend="ms_backend")
    def _step_by_address(self, step, addresses):
        """Run the step, one launch a phase whatever the number of tensors, on what a table of addresses names."""
        rates = ops.stack(self._current_rates(step))
        sums = self._no_sums
        for place, launch in enumerate(self._launches_by_address):
            made = launch(self._constants, rates, sums, (addresses,))
            sums = self._whole_sums(place, made, sums) if self._sharded else made
        return sums
