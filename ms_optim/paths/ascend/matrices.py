"""The step of a rule of matrices on Ascend: operators before and after products that MindSpore's operators compute."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels import table as kernels
from ...kernels.interface import MuonFlag
from ...unregistered import unregistered
from ..operators.counting import Counting, RatesOfEach
from ..operators.held_stacks import HeldStacks
from ..operators.orthogonalized import MOMENTUM, Orthogonalized
from ..operators.survey import Survey
from .operators import AscendOperators, OperatorCell, tile_sums, total_of_tiles, written_weights

if TYPE_CHECKING:
    from ..parts import Parts


class AscendMatricesPath(nn.Cell):
    """The step of a rule of matrices, in stacks of tensors of one shape.

    For each matrix, one operator returns its direction and one updates its weight; the products between them are of
    whole stacks. Other tensors are updated by AdamW's operator.

    Args:
        parts: The parts that every path is built from.
    """

    addresses = None

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        layout, rule = parts.layout, parts.rule
        assert rule.others is not None
        unregistered(self, statement=parts.statement)
        self.stacks = HeldStacks(parts, False)
        self.survey = Survey(self.stacks, self.stacks.centralized, parts)
        self.counting, self.rates_of_each = Counting(parts), RatesOfEach(layout)
        self.others = AscendOperators(dataclasses.replace(parts, rule=rule.others))
        self.kinds = tuple(self.others.kind_of_each[stack[0]] for stack in self.stacks.places)
        self.each, self.orthogonalized = C.Map(), Orthogonalized(parts, mstype.float32)
        first, last = kernels.ON_ASCEND[rule.name]
        self.momentum = kernels.ascend_operator(first.function, (True, False, False, False), lambda m, *others: m)
        total = total_of_tiles()

        def cell(is_float32: bool, has_master: bool) -> OperatorCell:
            written = (*written_weights(is_float32, has_master), False, False)
            return OperatorCell(kernels.ascend_operator(last.function, written, tile_sums(last.kinds, place=2)), total)

        self.apply_cells = nn.CellList([cell(*kind) for kind in self.others.weight_kinds])
        numbers = (rule.constants[MOMENTUM], float(bool(rule.flags & MuonFlag.NESTEROV)))
        self.constants = Tensor(np.array(numbers, np.float32))
        self.zero, self.one = Tensor(0.0, mstype.float32), Tensor(1.0, mstype.float32)

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        found = self.survey(gradients)
        return self.counting(*self.update(rates, gradients, found, self.counting.applies(found[3]), found[4]))

    def update(self, rates, given, found, applied, clip):
        """Update all parameters, as :meth:`ms_optim.paths.operators.composite.CompositePath.update` does."""
        stacks, gradients, norms, finite = self.stacks, found[0], found[1], found[2]
        table = self.rates_of_each(rates)
        rate, decay = stacks.spread(table[0], gradients), stacks.spread(table[1], gradients)
        shared = self.others.shared(self.statement.scalars(self.counting.number()), applied)
        # With a partial function, Map replaces elements of nested tuples by 0 if several tuples have the same type.
        every = ((shared, self.one * clip, applied),) * len(gradients)
        columns = (every, stacks.forms, self.kinds, rate, decay, gradients, norms, finite)
        return applied, stacks.in_order(self.each(self.updated, *columns, *stacks.columns))

    def updated(
        self, every, form, kind, rate, decay, gradients, sizes, finite, parameters, masters, has_master, place, *states
    ):
        """Update the tensors of a stack; return their rows of statistics."""
        shared, clip, applied = every
        count = len(parameters)
        rates, decays, factors = ops.unstack(rate, 0), ops.unstack(decay, 0), ops.ones_like(rate)
        kept = (parameters, masters, (has_master,) * count)
        if form >= 0:
            directions, factors = self.directed(form, clip, applied, ops.unstack(gradients, 0), states)
            columns = ((shared,) * count, (kind,) * count, rates, decays, ops.unstack(directions, 0))
            found = self.each(self.along, *columns, *kept)
        else:
            columns = ((shared,) * count, (kind,) * count, rates, ops.unstack(gradients, 0), (clip,) * count, decays)
            found = self.each(self.moved_by_adamw, *columns, *kept, *states)
        # A row of `found`: the norms of the weight and of the update.
        norms = ops.stack(found)
        moved = ops.stack((norms[:, 1], factors), 1)
        moved = ops.where(applied, moved, ops.zeros_like(moved))
        return ops.concat((sizes.reshape((-1, 1)), norms[:, :1], moved, _as_column(finite)), 1)

    def directed(self, form, clip, applied, gradients, states):
        """Return the updates of a stack of matrices without decay, and the root mean squares of singular values."""
        count = len(gradients)
        numbers = ops.stack((clip, F.cast(applied, mstype.float32)))
        u = ops.stack(self.each(self.momentum_of, (numbers,) * count, states[0], gradients))
        return self.orthogonalized(form, u, states[-1], applied)

    def momentum_of(self, numbers, m, gradient):
        """Update the momentum of a tensor, unless the step is skipped; return its direction."""
        return self.momentum(m, gradient, self.constants, numbers)

    def along(self, shared, kind, rate, decay, direction, parameter, master, has_master):
        """Move a weight along a direction; return the norms of the weight before the step and of the update."""
        numbers = ops.stack((self.one, decay, rate, self.zero, shared[0]))
        weights = self.others.weights_of(kind, parameter, master, has_master)
        return self.apply_cells[kind](*weights, direction, numbers)

    def moved_by_adamw(self, shared, kind, rate, gradient, clip, decay, parameter, master, has_master, *states):
        """Update a tensor by AdamW; return the same norms as :meth:`along`."""
        taken = (shared, kind, rate, gradient, clip, decay, parameter, master, has_master, *states)
        weight_norm, update_norm, _ = self.others.move(*taken)
        return ops.stack((weight_norm, update_norm))


def _as_column(flags):
    return F.cast(flags, mstype.float32).reshape((-1, 1))
