"""The step of a rule of matrices on a GPU: fused passes before and after products of MindSpore's operators."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels import table as kernels
from ...kernels.interface import AdamWFlag, SharedFlag, Sum
from ...kernels.table import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from ...unregistered import unregistered
from ..operators.counting import Counting
from ..operators.orthogonalized import MOMENTUM, Orthogonalized
from ..operators.stacks import stacked_places
from .launches import Launch, Maker, no_sums

if TYPE_CHECKING:
    from ..parts import Parts

LARGEST = float(np.finfo(np.float32).max)


class MatrixPassesPath(nn.Cell):
    """The step of a rule of matrices, with four launches of fused kernels, each for all of its tensors.

        gradients | other tensors | momentum and direction of matrices | products | weights of matrices and commit

    The directions of tensors of one shape are one array, which the first pass writes and the products take: no tensor
    is copied.

    Args:
        parts: The parts that every path is built from.
        commits: Whether the last launch counts the step.
    """

    addresses = None

    def __init__(self, parts: Parts, commits: bool = True):
        super().__init__(auto_prefix=False)
        layout, held, rule, settings = parts.layout, parts.held, parts.rule, parts.settings
        matrices = [i for i in range(layout.count) if layout.holds_matrices(i)]
        others = tuple(i for i in range(layout.count) if not layout.holds_matrices(i))
        kinds = [(layout.form_places[i], layout.shapes[i]) for i in matrices]
        stacks = stacked_places(kinds, [layout.stacking(i) for i in matrices], layout.most_stacked)
        self.stacks = tuple(tuple(matrices[k] for k in stack) for stack in stacks)
        self.forms = tuple(layout.form_places[stack[0]] for stack in self.stacks)
        ordered = tuple(i for stack in self.stacks for i in stack)
        shapes = [(len(stack), *layout.shapes[stack[0]]) for stack in self.stacks]

        def maker(which: int, constants, flags: int, no_flags: int = 0) -> Maker:
            name = kernels.GPU_PASSES[rule.name][which]
            own = rule._replace(name=name, constants=constants, flags=flags, iterations=())
            return Maker(dataclasses.replace(parts, rule=own), no_flags=no_flags)

        update, commit = MOMENTS_STAGE + APPLY_STAGE, COMMIT_STAGE * commits
        adamw = maker(0, rule.constants[:MOMENTUM], AdamWFlag.BIAS_CORRECTION)
        self.no_sums, self.constants, self.has_matrices = no_sums(), adamw.constants, len(matrices) > 0
        self.look = adamw.made(Launch(GRADIENT_STAGE, tuple(range(layout.count))))
        self.move_others = adamw.made(Launch(update + commit * (not matrices), others)) if others else None
        if not matrices:
            return
        before = maker(1, rule.constants[MOMENTUM : MOMENTUM + 1], rule.flags, SharedFlag.MASTERS | SharedFlag.AVERAGES)
        after = maker(2, (), 0)
        self.constants_before, self.constants_after = before.constants, after.constants
        momenta, weights = held.tensors_for(ordered, 1, weights=False), held.tensors_for(ordered, 0)
        self.before = before.made_with_stacks(Launch(MOMENTS_STAGE, ordered), momenta, shapes, returns=True)
        self.after = after.made_with_stacks(Launch(update + commit, ordered), weights, shapes, returns=False)
        self.orthogonalized = Orthogonalized(parts, mstype.float64)
        second = held.states_of_each()[-1]
        rows = [ParameterTuple([second[i] for i in stack]) for stack in self.stacks]
        unregistered(self, rows=tuple(rows))
        self.counting = Counting(parts)
        self.unscale, self.each = settings.unscale, C.Map()
        # The index of each row's singular values among those of all stacks, which a zero follows.
        places = np.full(held.statistics.shape[0], len(ordered), np.int32)
        places[[layout.rows[i] for i in ordered]] = np.arange(len(ordered))
        self.places, self.zero = Tensor(places), Tensor(np.zeros(1))

    def construct(self, rates, gradients):
        """Take a step; return sums that are not needed, once the step is done."""
        return self.move(rates, self.measure(rates, gradients), gradients)

    def measure(self, rates, gradients):
        """Return the sums of the gradients."""
        return self.look(self.constants, rates, self.no_sums, gradients)

    def move(self, rates, sums, gradients):
        """Update all parameters, given the sums of the gradients of all rules of the step."""
        done = sums
        if self.move_others is not None:
            done = self.move_others(self.constants, rates, sums, gradients)
        if not self.has_matrices:
            return done
        directions = self.before(self.constants_before, rates, sums, gradients)[1:]
        applied = (self.applies(sums),) * len(self.forms)
        found = self.each(self.orthogonalized, self.forms, directions, self.rows, applied)
        values = ops.concat((*self.each(_second, found), self.zero))
        squares = ops.square(ops.gather(values, self.places, 0)).reshape((-1, 1))
        # The last launch reports the singular values, and commits the step: after all others.
        known = ops.concat((sums[:, : Sum.DIRECTION2_SUM], squares, sums[:, Sum.DIRECTION2_SUM + 1 :]), 1)
        return self.after(self.constants_after, rates, F.depend(known, done), self.each(_first, found))

    def applies(self, sums):
        """Return whether the step is applied, as the launches decide it."""
        return self.counting.applies(self.unscale * ops.sqrt(ops.sum(sums[:, Sum.GRADIENT_SUM])) <= LARGEST)


def _first(pair):
    return pair[0]


def _second(pair):
    return pair[1]
