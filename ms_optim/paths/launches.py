"""Launches of a fused kernel: how a step is cut into them, and what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from .. import _abi, _kernels
from .._abi import launch
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


class Maker:
    """Makes the launches of an optimizer's step.

    Args:
        parts: What every path is made from.
        ranges: Which elements of each tensor this process updates, int64 of shape (tensors, 2), where it has whole
            gradients all the same; None: all that it has.
        more_flags: Shared flags besides those that follow from the arguments.

    Attributes:
        constants: What all launches take as their constants.
    """

    def __init__(self, parts: Parts, ranges: np.ndarray | None = None, more_flags: int = 0):
        layout, settings = parts.layout, parts.settings
        self.parts, self.ranges, self.shared = parts, ranges, shared_flags(parts) + more_flags
        numbers = (settings.unscale, settings.clip_norm, settings.seed, parts.rule.constants)
        self.constants = Tensor(_abi.constants(*numbers, settings.cautious, settings.average))
        self.columns = _abi.layout(layout.rate_places, layout.decay_places, layout.centralized)
        self.has_matrices = len(parts.rule.iterations) > 0

    def made(self, planned: Launch, picks: bool = True) -> LaunchCell:
        """Make a launch that takes tensors; it picks its gradients from all, or is given those that it takes."""
        layout, held, rule = self.parts.layout, self.parts.held, self.parts.rule
        stages, tensors = planned
        n = len(tensors)
        reads, moves = stages != COMMIT_STAGE, stages not in (GRADIENT_STAGE, COMMIT_STAGE)
        weights = [held.parameters[i] for i in tensors] if moves else []
        states = held.tensors_for(tensors) if moves else ()
        ranges = () if self.ranges is None or not moves else (Tensor(self.ranges[list(tensors)]),)
        counts = (len(held.counters), len(weights), n * reads, len(states))
        written = _abi.written(*counts, ranges=len(ranges) > 0, matrices=self.has_matrices)
        shapes = [layout.shapes[i] if reads else (0,) for i in tensors]
        sums = ((n, len(_kernels.SUMS)), ms.float64)
        kernel = _kernels.operator(rule.name, self.parts.settings.device, written, [sums], shapes, self.shared)
        own_layout = Tensor(np.ascontiguousarray(self.columns[list(tensors)]))
        flags = _kernels.flags(stages, self.shared + _kernels.SHARES * len(ranges), rule.flags)
        places = None if not picks or (n == layout.count and reads) else chosen(tensors if reads else ())
        before = (*ranges, *held.counters)
        return LaunchCell(kernel, flags, own_layout, before, weights, states, places, self.matrices_of(tensors))

    def made_by_address(self, stages: Sequence[int]) -> nn.CellList:
        """Make launches, each of all tensors, that take a table of addresses in the place of tensors."""
        layout, rule = self.parts.layout, self.parts.rule
        sums = [((layout.count, len(_kernels.SUMS)), ms.float64)]
        kernel = _kernels.operator(rule.name, "CPU", _abi.written(gradients=1, matrices=self.has_matrices), sums)
        flags = [_kernels.flags(one, self.shared + _kernels.BY_ADDRESS, rule.flags) for one in stages]
        matrices = self.matrices_of(range(layout.count))
        return nn.CellList([LaunchCell(kernel, one, Tensor(self.columns), matrices=matrices) for one in flags])

    def matrices_of(self, tensors: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what a launch of a rule of matrices takes of these, of no other rule anything."""
        rule = self.parts.rule
        if not rule.iterations:
            return ()
        table = Tensor(_abi.matrices([self.parts.layout.matrices(i) for i in tensors]))
        return table, Tensor(np.array(rule.iterations, np.float64))
