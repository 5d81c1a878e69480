"""Launches of a fused kernel: how a step is divided into launches, and the inputs of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ...arguments.options import asked_stages, stage_constants
from ...arguments.weight_norms import is_held
from ...kernels import interface
from ...kernels import table as kernels
from ...kernels.interface import SharedFlag, launch
from ...kernels.table import ALL_STAGES, APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from ...unregistered import unregistered
from ..operators.selection import chosen, picked
from .direct import DirectLaunch

if TYPE_CHECKING:
    from ..parts import Parts


class Launch(NamedTuple):
    """What one launch does, and the indices of the tensors that it takes."""

    stages: int
    tensors: tuple[int, ...]


def phases_of(count: int, own: tuple[int, ...], at_most: int, looks_at_all: bool) -> list[list[Launch]]:
    """Divide a step into phases of launches; each phase gets the sums of the previous phase.

    Args:
        count: Number of tensors.
        own: Indices of the tensors that this process updates.
        at_most: The maximum number of tensors in one launch.
        looks_at_all: Whether all gradients must be read before any weight is updated, for example for their global
            norm.
    """
    if not looks_at_all or count == len(own) <= at_most:
        return _committed([_launches(ALL_STAGES - COMMIT_STAGE, own, at_most)])
    everything = tuple(range(count))
    first = _launches(GRADIENT_STAGE, everything, at_most)
    return _committed([first, _launches(MOMENTS_STAGE + APPLY_STAGE, own, at_most)])


def phases_of_rule(count: int, at_most: int, measures: bool, commits: bool) -> list[list[Launch]]:
    """Divide what one of several rules does in a step into phases: one that measures its gradients, and one that moves.

    Args:
        count: Number of its tensors.
        at_most: The maximum number of tensors in one launch.
        measures: Whether the sums of its gradients are taken before any weight is updated; else there is one phase.
        commits: Whether its last launch counts the step.
    """
    everything = tuple(range(count))
    update = MOMENTS_STAGE + APPLY_STAGE + (0 if measures else GRADIENT_STAGE)
    phases = [_launches(GRADIENT_STAGE, everything, at_most)] if measures else []
    phases += [_launches(update, everything, at_most)]
    return _committed(phases) if commits else phases


def phases_of_parts(count: int, at_most: int, waits: bool, looks_first: bool) -> list[list[Launch]]:
    """Divide a step on parts of tensors into phases; between phases, sums are summed over processes.

    Args:
        count: Number of tensors.
        at_most: The maximum number of tensors in one launch.
        waits: Whether the update of weights depends on the sums of the moments' phase.
        looks_first: Whether the moments depend on sums of gradients.
    """
    everything = tuple(range(count))
    phases = [_launches(GRADIENT_STAGE, everything, at_most)] if looks_first else []
    moments = MOMENTS_STAGE if looks_first else GRADIENT_STAGE + MOMENTS_STAGE
    if waits:
        phases += [_launches(moments, everything, at_most), _launches(APPLY_STAGE, everything, at_most)]
        return _committed(phases)
    return [*phases, _launches(moments + APPLY_STAGE, everything, at_most), [Launch(COMMIT_STAGE, everything)]]


def _launches(stages: int, tensors: tuple[int, ...], at_most: int) -> list[Launch]:
    return [Launch(stages, tensors[k : k + at_most]) for k in range(0, len(tensors), at_most)]


def _committed(phases: list[list[Launch]]) -> list[list[Launch]]:
    """Let the last launch commit the step."""
    last = phases[-1][-1]
    phases[-1][-1] = last._replace(stages=last.stages + COMMIT_STAGE)
    return phases


# Each additional launch increases the compile time of a graph.
MOST_LAUNCHES = 16


def as_tuple(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a tuple that graphs take as a whole; in a plain tuple they compile each Parameter separately."""
    if len(tensors) > 0 and all(isinstance(tensor, Parameter) for tensor in tensors):
        return ParameterTuple(tensors)
    return tuple(tensors)


def run_launches(launches, places, constants, rates, sums, gradients):
    """Run some of the launches, one after the other, and return the sums of all their tensors; usable in graphs."""
    found = ()
    for k in places:
        found += (launches[k](constants, rates, sums, gradients),)
    return found[0] if len(found) == 1 else ops.concat(found)


class LaunchCell(nn.Cell):
    """One launch: its operator and its inputs except gradients.

    Args:
        kernel: The operator.
        flags: What the operator does.
        layout: The layout of its tensors.
        before: Its inputs before the tensors: the counters, and ranges if it is a launch for a share.
        weights: The weights that it updates.
        held: Their states, masters and scales.
        places: Indices of its gradients among all, as :func:`ms_optim.paths.places.chosen` returns them; None if it
            takes all given gradients.
        matrices: For a rule of matrices, the table of matrices and the coefficients of its iterations.
    """

    def __init__(self, kernel, flags, layout, before=(), weights=(), held=(), places=None, matrices=()):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags, self.layout, self.matrices = kernel, flags, layout, matrices
        self.takes_all, self.places = places is None, places or ()
        unregistered(self, before=as_tuple(before), weights=as_tuple(weights), held=as_tuple(held))

    def construct(self, constants, rates, sums, gradients):
        """Run the kernel on its part of all gradients, and return its sums."""
        if not self.takes_all:
            gradients = picked(gradients, self.places)
        parts = (self.matrices, self.before, self.weights, gradients, self.held)
        return launch(self.kernel, self.flags, self.layout, constants, rates, sums, *parts)


def shared_flags(parts: Parts) -> int:
    """Return the flags that all launches of an optimizer share."""
    held, options = parts.held, parts.options
    return (
        SharedFlag.MASTERS * bool(len(held.masters))
        | SharedFlag.CENTRALIZES * any(parts.layout.centralized)
        | SharedFlag.BETA_POWERS * bool(held.beta_powers)
        | SharedFlag.KEEPS_RADII * bool(held.radii)
        | SharedFlag.STOCHASTIC_ROUNDING * options.stochastic_rounding
        | sum(interface.SharedFlag[stage.flag] for stage in asked_stages(options) if stage.flag)
        | parts.rule.shared_flags
    )


def no_sums() -> Tensor:
    """Return the placeholder that a launch takes if there are no sums yet."""
    return Tensor(np.zeros((1, len(kernels.SUMS)), np.float64))


class Maker:
    """Makes the launches of an optimizer's step.

    Args:
        parts: The parts that every path is built from.
        ranges: The elements of each tensor that this process updates, int64 of shape (tensors, 2), if it still has
            whole gradients; None if it updates all elements that it has.
        more_flags: Shared flags in addition to those that follow from the arguments.
        no_flags: Shared flags that do not apply to these launches.

    Attributes:
        constants: The constants that all launches take.
    """

    def __init__(self, parts: Parts, ranges: np.ndarray | None = None, more_flags: int = 0, no_flags: int = 0):
        layout, settings = parts.layout, parts.settings
        self.parts, self.ranges, self.shared = parts, ranges, (shared_flags(parts) + more_flags) & ~no_flags
        numbers = (settings.unscale, settings.seed, parts.rule.constants)
        self.constants = Tensor(interface.constants(*numbers, **stage_constants(parts.options)))
        columns = (layout.rate_places, layout.decay_places, layout.centralized)
        held = [is_held(shape) for shape in layout.shapes]
        self.columns = interface.layout(*columns, rows=layout.rows, held=held)
        self.has_matrices = len(parts.rule.iterations) > 0

    def made(self, planned: Launch, picks: bool = True) -> LaunchCell:
        """Make a launch that takes tensors; it selects its gradients from all, or gets only its own gradients."""
        layout, held, rule = self.parts.layout, self.parts.held, self.parts.rule
        stages, tensors = planned
        n = len(tensors)
        reads, moves = stages != COMMIT_STAGE, stages not in (GRADIENT_STAGE, COMMIT_STAGE)
        weights = [held.parameters[i] for i in tensors] if moves else []
        states = held.tensors_for(tensors) if moves else ()
        ranges = () if self.ranges is None or not moves else (Tensor(self.ranges[list(tensors)]),)
        counts = (len(held.counters), len(weights), n * reads, len(states))
        written = interface.written(*counts, ranges=len(ranges) > 0, matrices=self.has_matrices)
        shapes = [layout.shapes[i] if reads else (0,) for i in tensors]
        sums = ((n, len(kernels.SUMS)), ms.float64)
        kernel = kernels.operator(rule.name, self.parts.settings.device, written, [sums], shapes, self.shared)
        own_layout = Tensor(np.ascontiguousarray(self.columns[list(tensors)]))
        flags = kernels.flags(stages, self.shared + SharedFlag.SHARES * len(ranges), rule.flags)
        places = None if not picks or (n == layout.count and reads) else chosen(tensors if reads else ())
        before = (*ranges, *held.counters)
        return LaunchCell(kernel, flags, own_layout, before, weights, states, places, self.matrices_of(tensors))

    def made_with_stacks(
        self, planned: Launch, held: Sequence[Parameter], stacks: Sequence[tuple[int, ...]], returns: bool
    ) -> LaunchCell:
        """Make a launch of a rule that returns directions, or takes them in place of gradients.

        Args:
            planned: What it does, and its tensors in the order of the stacks.
            held: States, masters, averages and scales that it updates.
            stacks: The shape of each stack: an array with the directions of some tensors of one shape.
            returns: Whether it returns directions.
        """
        layout, rule, n = self.parts.layout, self.parts.rule, len(planned.tensors)
        weights, counters = [self.parts.held.parameters[i] for i in planned.tensors], self.parts.held.counters
        gradients = n if returns else len(stacks)
        written = interface.written(len(counters), n, gradients, len(held))
        outputs = [((n, len(kernels.SUMS)), ms.float64), *((shape, ms.float32) for shape in stacks if returns)]
        shapes = [layout.shapes[i] for i in planned.tensors]
        kernel = kernels.operator(rule.name, self.parts.settings.device, written, outputs, shapes, self.shared)
        own_layout = Tensor(np.ascontiguousarray(self.columns[list(planned.tensors)]))
        flags = kernels.flags(planned.stages, self.shared, rule.flags)
        places = chosen(planned.tensors) if returns else None
        return LaunchCell(kernel, flags, own_layout, counters, weights, held, places)

    def made_by_address(self, stages: Sequence[int]) -> nn.CellList:
        """Make launches of all tensors for a compiled step, which take a table of addresses instead of tensors."""
        rule, sums = self.parts.rule, [((self.parts.layout.count, len(kernels.SUMS)), ms.float64)]
        kernel = kernels.operator(rule.name, "CPU", interface.written(gradients=1, matrices=self.has_matrices), sums)
        flags = [kernels.flags(one, self.shared + SharedFlag.BY_ADDRESS, rule.flags) for one in stages]
        matrices = self.matrices_of(range(self.parts.layout.count))
        return nn.CellList([LaunchCell(kernel, one, Tensor(self.columns), matrices=matrices) for one in flags])

    def direct(self, stages: int) -> DirectLaunch:
        """Make a launch of all tensors, which takes a table of addresses instead of tensors."""
        rule, layout = self.parts.rule, self.parts.layout
        flags = interface.flags(stages, self.shared + SharedFlag.BY_ADDRESS, rule.flags)
        return DirectLaunch(rule.name, flags, self.columns, self.matrices_of(range(layout.count)))

    def matrices_of(self, tensors: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the inputs of a launch that describe matrices; an empty tuple for other rules."""
        rule = self.parts.rule
        if not rule.iterations:
            return ()
        table = Tensor(interface.matrices([self.parts.layout.matrices(i) for i in tensors]))
        return table, Tensor(np.array(rule.iterations, np.float64))
