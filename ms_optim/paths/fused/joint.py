"""The step of several rules: the launches of each rule's kernel on its own tensors, with one decision for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops

from ...arguments.options import stage_reading_all
from ...kernels import table as kernels
from ...kernels.libraries import Run, run_here
from ...unregistered import unregistered
from ..operators.selection import chosen, picked
from .addresses import AddressTable
from .launches import MOST_LAUNCHES, Maker, no_sums, phases_of_rule, run_launches
from .matrix_passes import LARGEST, MatrixPassesPath

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..parts import Parts


class RuleLaunches(nn.Cell):
    """The launches of one of several rules.

    Args:
        parts: The parts of the rule.
        commits: Whether its last launch counts the step.
    """

    def __init__(self, parts: Parts, commits: bool):
        super().__init__(auto_prefix=False)
        count, most, maker = parts.layout.count, parts.rule.at_most, Maker(parts)
        at_most = max(most or count, -(-count // MOST_LAUNCHES))
        self.measures = stage_reading_all(parts.options) is not None
        phases = phases_of_rule(count, at_most, self.measures, commits)
        self.constants, self.no_sums = maker.constants, no_sums()
        self.not_measured = Tensor(np.zeros((count, len(kernels.SUMS))))
        self.launches = nn.CellList([maker.made(launch) for phase in phases for launch in phase])
        first = len(phases[0]) if self.measures else 0
        self.measuring, self.moving = tuple(range(first)), tuple(range(first, len(self.launches)))

    def measure(self, rates, gradients):
        """Return the sums of the gradients; zeros if nothing depends on them before weights move."""
        if not self.measures:
            return self.not_measured
        return run_launches(self.launches, self.measuring, self.constants, rates, self.no_sums, gradients)

    def move(self, rates, sums, gradients):
        """Update all parameters, given the sums of the gradients of all rules."""
        return run_launches(self.launches, self.moving, self.constants, rates, sums, gradients)


class DirectLaunches:
    """The launches of one of several rules in a step that is called from Python: each takes a table of addresses.

    Args:
        parts: The parts of the rule.
        commits: Whether its last launch counts the step.
    """

    def __init__(self, parts: Parts, commits: bool):
        count, maker = parts.layout.count, Maker(parts)
        phases = phases_of_rule(count, count, stage_reading_all(parts.options) is not None, commits)
        self.constants, self.no_sums = maker.constants, no_sums()
        self.not_measured = np.zeros((count, len(kernels.SUMS)))
        *self.measuring, self.moving = [maker.direct(stages) for ((stages, _),) in phases]

    def measure(self, rates: np.ndarray, table: NDArray[np.int64]) -> np.ndarray:
        """Return the sums of the gradients; zeros if nothing depends on them before weights move."""
        sums = self.not_measured
        for launch in self.measuring:
            run = launch.run(self.constants, rates, self.no_sums, table)
            run_here(run)
            (sums,) = run.outputs
        return sums

    def move(self, rates: np.ndarray, sums: np.ndarray, table: NDArray[np.int64]) -> Run:
        """Return what updates all parameters, given the sums of the gradients of all rules."""
        return self.moving.run(self.constants, rates, sums, table)


class OwnNorm(nn.Cell):
    """The sums of all gradients as a rule takes them that clips its own gradients by their own norm.

    The sums of other rules' gradients are 0, or NaN if the step is skipped: the kernel then skips it, too.

    Args:
        parts: The parts of the rule.
    """

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        rows = np.arange(parts.held.statistics.shape[0]).reshape((-1, 1))
        self.is_own = Tensor((rows >= parts.layout.rows.start) & (rows < parts.layout.rows.stop))
        self.unscale, self.skips = parts.settings.unscale, parts.options.skip_nonfinite

    def now(self, sums: np.ndarray) -> np.ndarray:
        """Return the same to Python."""
        skipped = self.skips and not self.unscale * np.sqrt(sums[:, 0].sum()) <= LARGEST
        return np.where(self.is_own.asnumpy(), sums, float("nan") if skipped else 0.0)

    def construct(self, sums):
        """Return the sums of the rule's own gradients, and in other rows 0 or NaN."""
        others = ops.zeros_like(sums)
        if self.skips:
            finite = self.unscale * ops.sqrt(ops.sum(sums[:, 0])) <= LARGEST
            others = ops.where(finite, others, ops.full_like(sums, float("nan")))
        return ops.where(self.is_own, sums, others)


class AllNorms(nn.Cell):
    """The sums of all gradients, for a rule that clips by the norm of all, or does not clip."""

    def now(self, sums: np.ndarray) -> np.ndarray:
        """Return the same to Python."""
        return sums

    def construct(self, sums):
        """Return the sums."""
        return sums


def seen_by(parts: Parts, has_one_norm: bool) -> AllNorms | OwnNorm:
    """Return what gives a rule, from the sums of all gradients, the sums by which it decides.

    Args:
        parts: The parts of the rule.
        has_one_norm: Whether the norm of all rules' gradients is clipped.
    """
    return AllNorms() if has_one_norm or parts.options.grad_clip_norm is None else OwnNorm(parts)


class JointAddresses:
    """The tables of addresses of all rules, which steps called from Python fill.

    Args:
        parts: The parts of all rules.
    """

    def __init__(self, parts: Parts):
        self._tables = [AddressTable(own.held) for own in parts.members]
        self._rows = [slice(own.layout.rows.start, own.layout.rows.stop) for own in parts.members]

    def filled(self, gradients: Sequence[Tensor]) -> list[NDArray[np.int64]]:
        """Return the tables for a step with these gradients; the caller has checked the tensors."""
        return [table.filled(gradients[rows]) for table, rows in zip(self._tables, self._rows)]


class JointFusedPath(nn.Cell):
    """The step of several rules as launches of fused kernels, with one decision about clipping and skipping.

        gradients of each rule that clips or skips | moments and weights of each rule, and the last one's commit

    Each launch writes its rows of the statistics, and decides by the sums of all rules' gradients, which have as many
    rows. These are added in the order of the parameters, as by a single launch for all.

    Args:
        parts: The parts of all rules.

    Attributes:
        addresses: The tables of addresses that steps called from Python fill; None if there are none.
    """

    addresses: Any

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        self.addresses = None
        unregistered(self, rates=parts.rates)
        members, last = parts.members, parts.members[-1]
        self.gradients_of = tuple(chosen(own.layout.rows) for own in members)
        has_one_norm = parts.options.grad_clip_norm is not None
        self.measures = parts.stage_reading_all is not None
        self.seen = nn.CellList([seen_by(own, has_one_norm) for own in members])
        self.no_sums = no_sums()
        on_cpu = parts.settings.device == "CPU"

        def launches(own: Parts) -> nn.Cell:
            if not on_cpu and own.rule.name in kernels.GPU_PASSES:
                return MatrixPassesPath(own, commits=own is last)
            return RuleLaunches(own, commits=own is last)

        self.rules = nn.CellList([launches(own) for own in members])
        if parts.settings.weights_on == "CPU":
            unregistered(self, direct=tuple(DirectLaunches(own, own is last) for own in members))
            self.addresses = JointAddresses(parts)

    def construct(self, rates, gradients):
        """Measure the gradients of all rules, if some rule depends on that, and then let each rule move.

        Returns:
            Sums that are not needed, once the step is done.
        """
        own = ()
        for places in self.gradients_of:
            own += (picked(gradients, places),)
        sums = self.no_sums
        if self.measures:
            found = ()
            for k in range(len(self.rules)):
                found += (self.rules[k].measure(rates, own[k]),)
            sums = ops.concat(found)
        done = sums
        for k in range(len(self.rules)):
            done = self.rules[k].move(rates, self.seen[k](sums), own[k])
        return done

    def run_by_address(self, step, gradients):
        """Take a step, called from Python, in the same way; an interrupt finds no rule or all rules moved."""
        rates, tables = self.rates.now(step), self.addresses.filled(gradients)
        sums = self.no_sums
        if self.measures:
            sums = np.concatenate([rule.measure(rates, own) for rule, own in zip(self.direct, tables)])
        moves = [rule.move(rates, seen.now(sums), own) for rule, seen, own in zip(self.direct, self.seen, tables)]
        run_here(*moves)
