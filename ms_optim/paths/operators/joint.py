"""The step of several rules in operators: each rule's path on its own tensors, with one decision for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import nn, ops

from ...rules.arithmetic import clipping, norm
from .counting import Counting
from .selection import chosen, picked

if TYPE_CHECKING:
    from ..parts import Parts


class JointOperatorsPath(nn.Cell):
    """The step of several rules, with one decision about clipping and skipping.

    Args:
        parts: The parts of all rules.
        paths: The path of each rule, in MindSpore's operators or those for Ascend.
    """

    addresses = None

    def __init__(self, parts: Parts, paths: Sequence[Any]):
        super().__init__(auto_prefix=False)
        self.paths = nn.CellList(paths)
        self.gradients_of = tuple(chosen(own.layout.rows) for own in parts.members)
        self.counting, self.dtype = Counting(parts), parts.settings.step_dtype
        self.clip_norm = parts.options.grad_clip_norm
        self.may_be_averaged = any(
            len(own.held.averages) > 0 or own.statement.averages_iterates for own in parts.members
        )

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        if self.may_be_averaged:
            self.counting.check()
        own, found, norms, finite = (), (), (), ()
        for k in range(len(self.paths)):
            own += (picked(gradients, self.gradients_of[k]),)
            found += (self.paths[k].survey(own[k]),)
            norms += (self.paths[k].survey.stacks.in_order(found[k][1]),)
            finite += (found[k][3],)
        applied = self.counting.applies(ops.all(ops.stack(finite)))
        rows = ()
        for k in range(len(self.paths)):
            clip = found[k][4] if self.clip_norm is None else self.clip_factor(norms)
            applied, of_rule = self.paths[k].update(rates, own[k], found[k], applied, clip)
            rows += (of_rule,)
        return self.counting(applied, ops.concat(rows))

    def clip_factor(self, norms):
        """Return the factor of clipping for the norms of all rules' gradients."""
        return clipping(norm(ops.concat(norms), self.dtype), self.clip_norm)
