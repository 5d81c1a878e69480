"""The step of several rules: the launches of each rule's kernel on its own tensors, with one decision for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops

from ...arguments.options import stage_reading_all
from ...kernels import table as kernels
from ...unregistered import unregistered
from ..operators.selection import chosen, picked
from .addresses import AddressTable
from .launches import MOST_LAUNCHES, Maker, no_sums, phases_of_rule, run_launches
from .matrix_passes import LARGEST, MatrixPassesPath
from .step import ByAddress

if TYPE_CHECKING:
    from ..parts import Parts


class RuleLaunches(nn.Cell):
    """The launches of one of several rules.

    Args:
        parts: The parts of the rule.
        commits: Whether its last launch counts the step.
        by_address: Whether launches take a table of addresses instead of tensors.
    """

    def __init__(self, parts: Parts, commits: bool, by_address: bool = False):
        super().__init__(auto_prefix=False)
        count, most, maker = parts.layout.count, parts.rule.at_most, Maker(parts)
        at_most = count if by_address else max(most or count, -(-count // MOST_LAUNCHES))
        self.measures = stage_reading_all(parts.options) is not None
        phases = phases_of_rule(count, at_most, self.measures, commits)
        self.constants, self.no_sums = maker.constants, no_sums()
        self.not_measured = Tensor(np.zeros((count, len(kernels.SUMS))))
        if by_address:
            self.launches = maker.made_by_address([stages for ((stages, _),) in phases])
        else:
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

    def construct(self, sums):
        """Return the sums of the rule's own gradients, and in other rows 0 or NaN."""
        others = ops.zeros_like(sums)
        if self.skips:
            finite = self.unscale * ops.sqrt(ops.sum(sums[:, 0])) <= LARGEST
            others = ops.where(finite, others, ops.full_like(sums, float("nan")))
        return ops.where(self.is_own, sums, others)


def seen_by(parts: Parts, has_one_norm: bool) -> nn.Cell:
    """Return what gives a rule, from the sums of all gradients, the sums by which it decides.

    Args:
        parts: The parts of the rule.
        has_one_norm: Whether the norm of all rules' gradients is clipped.
    """
    return nn.Identity() if has_one_norm or parts.options.grad_clip_norm is None else OwnNorm(parts)


class JointAddresses:
    """The tables of addresses of all rules, one below the other, which steps called from Python fill.

    Args:
        parts: The parts of all rules.
    """

    def __init__(self, parts: Parts):
        self._tables = [AddressTable(own.held) for own in parts.members]
        self._rows = [slice(own.layout.rows.start, own.layout.rows.stop) for own in parts.members]

    def fill(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the tables for a step with these gradients; the caller has checked the tensors."""
        filled = [table.filled(gradients[rows]) for table, rows in zip(self._tables, self._rows)]
        return Tensor(np.concatenate(filled))


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

    addresses: JointAddresses | None

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
            self.rules_by_address = nn.CellList([RuleLaunches(own, own is last, by_address=True) for own in members])
            self.by_address = ByAddress(self.launch_by_address)
            self.addresses = JointAddresses(parts)
            # The rows of each rule's table: one for each tensor, and one more.
            self.tables = tuple(
                (own.layout.rows.start + k, own.layout.rows.stop + k + 1) for k, own in enumerate(members)
            )

    def construct(self, rates, gradients):
        """Take a step; return sums that are not needed, once the step is done."""
        own = ()
        for places in self.gradients_of:
            own += (picked(gradients, places),)
        return self.launch_all(self.rules, rates, own)

    def run_by_address(self, step, addresses):
        """Take a step, called from Python, on the tensors in tables of addresses."""
        return self.by_address.run(step, addresses)

    def launch_by_address(self, step, addresses):
        """Take a step on the tensors in tables of addresses."""
        own = ()
        for begin, end in self.tables:
            own += ((addresses[begin:end],),)
        return self.launch_all(self.rules_by_address, self.rates(step), own)

    def launch_all(self, rules, rates, gradients):
        """Measure the gradients of all rules, if some rule depends on that, and then let each rule move."""
        sums = self.no_sums
        if self.measures:
            found = ()
            for k in range(len(rules)):
                found += (rules[k].measure(rates, gradients[k]),)
            sums = ops.concat(found)
        done = sums
        for k in range(len(rules)):
            done = rules[k].move(rates, self.seen[k](sums), gradients[k])
        return done
