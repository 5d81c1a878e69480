"""The step with one or a few operators for each tensor on Ascend, and MindSpore's operators across tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...unregistered import unregistered
from ..operators.counting import Counting, RatesOfEach
from ..operators.stacks import Stacks, first_of, own_rows
from ..operators.survey import Survey
from .operators import AscendOperators, maximizes

if TYPE_CHECKING:
    from ..parts import Parts


class TensorByTensorPath(nn.Cell):
    """The step with operators that each take one tensor.

    Args:
        parts: The parts that every path is built from.
    """

    addresses = None

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        layout, held, settings = parts.layout, parts.held, parts.settings
        unregistered(self, statement=parts.statement)
        self.normalizes, self.unscale = parts.statement.normalizes_gradient, settings.unscale
        # The operators cannot maximize.
        self.sign = -1.0 if maximizes(parts.rule) else 1.0
        self.operators, self.centralized, self.owned = AscendOperators(parts), layout.centralized, layout.owned
        stacks = Stacks([[i] for i in range(layout.count)])
        self.survey = Survey(stacks, layout.centralized, parts)
        self.counting = Counting(parts)
        self.rates_of_each, self.each = RatesOfEach(layout), C.Map()
        self.zero, self.rows = Tensor(0.0, mstype.float32), (layout.rows.start, layout.rows.stop)
        columns = (held.parameters, held.masters_or_weights(), held.has_master(), *held.states_of_each())
        unregistered(self, columns=columns)
        unregistered(self, statistics=held.statistics)

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        found = self.survey(gradients)
        return self.counting(*self.update(rates, gradients, found, self.counting.applies(found[3]), found[4]))

    def update(self, rates, gradients, found, applied, clip):
        """Update all parameters, as :meth:`ms_optim.paths.operators.composite.CompositePath.update` does."""
        stacks, norms, finite = found[0], found[1], found[2]
        scalars = self.statement.scalars(self.counting.number())
        table = self.rates_of_each(rates)
        reports = self.each(
            F.partial(self.updated, self.operators.shared(scalars, applied), clip, applied),
            self.owned,
            ops.unstack(own_rows(self.statistics, self.rows), 0),
            self.operators.kind_of_each,
            ops.unstack(table[0], 0),
            gradients,
            self.each(first_of, stacks),
            self.centralized,
            self.each(first_of, norms),
            self.each(first_of, finite),
            ops.unstack(table[1], 0),
            *self.columns,
        )
        return applied, ops.stack(reports)

    def updated(
        self,
        shared,
        clip,
        applied,
        is_owned,
        reported,
        kind,
        rate,
        gradient,
        prepared,
        is_centralized,
        size,
        finite,
        decay,
        *held,
    ):
        """Update one tensor, unless another process does; return its row of statistics."""
        if not is_owned:
            return reported
        gradient, scale = self.scaled(held[0], gradient, prepared, is_centralized, size, clip)
        weight_norm, update_norm, ratio = self.operators.move(shared, kind, rate, gradient, scale, decay, *held)
        moved = (ops.where(applied, update_norm, self.zero), ops.where(applied, ratio, self.zero))
        return ops.stack((size, weight_norm, *moved, F.cast(finite, mstype.float32)))

    def scaled(self, parameter, gradient, prepared, is_centralized, size, clip):
        """Return the gradient that an operator takes, and the factor that it multiplies the gradient by."""
        scale = self.sign * clip * ops.ones_like(size)
        if self.normalizes:
            # This cancels clipping.
            scale = 1.0 / ops.where(size == 0, ops.ones_like(size), size)
        if is_centralized:
            return prepared, scale
        if F.dtype(gradient) not in (mstype.float32, parameter.dtype):
            gradient = F.cast(gradient, mstype.float32)
        return gradient, scale * self.unscale
