"""Orthogonalizes a stack of tensors between the passes of a rule of matrices, and keeps the averages of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn, ops
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...unregistered import unregistered

if TYPE_CHECKING:
    from ..parts import Parts

MOMENTUM = 3  # the index of the momentum among the constants of a rule of matrices; AdamW's constants are before it


class Orthogonalized(nn.Cell):
    """The products of a rule of matrices, in MindSpore's operators.

    Args:
        parts: The parts that every path is built from.
        dtype: The dtype in which singular values are returned.
    """

    def __init__(self, parts: Parts, dtype):
        super().__init__(auto_prefix=False)
        unregistered(self, statement=parts.statement)
        self.has_rows, self.dtype = len(parts.rule.states) > 1, dtype
        self.each, self.assign = C.Map(), ops.Assign()

    def construct(self, form, directions, rows, applied):
        """Return the updates of a stack, and the root mean square of each tensor's singular values.

        Args:
            form: The index of the tensors' form.
            directions: What is orthogonalized, stacked.
            rows: The parameters with the averages of their rows, which are written if the step is applied; not read
                if the rule keeps none.
            applied: Whether the step is applied.
        """
        if not self.has_rows:
            moves, _, values = self.statement.orthogonalized(form, directions, ())
            return moves, F.cast(values, self.dtype)
        before = ops.stack(rows)
        moves, after, values = self.statement.orthogonalized(form, directions, (before,))
        written = self.each(self.assign, rows, ops.unstack(ops.where(applied, after[0], before), 0))
        return F.depend(moves, written), F.cast(values, self.dtype)
