"""Averages of weights, in MindSpore's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import normal, selected

if TYPE_CHECKING:
    from ...arguments.options import Options


def averages_of(options: Options) -> Averages | None:
    """Return the Cell that averages weights with an optimizer's arguments; None without an average."""
    return None if options.average_decay is None else Averages(options.average_decay, options.average_warmup)


class Averages(nn.Cell):
    """Averages of weights.

    Args:
        kept: The decay rate of the average.
        rises: Whether the rate has a warmup.
    """

    def __init__(self, kept: float, rises: bool):
        super().__init__(auto_prefix=False)
        self.kept, self.taken, self.rises = kept, 1.0 - kept, rises

    def construct(self, t, before, average, stored):
        """Return the new average of a stack.

        Args:
            t: The step count, from 1.
            before: The weights before the step, with which the average starts.
            average: The average so far.
            stored: The weights with the rounding of their storage.
        """
        taken = self.taken * ops.ones_like(t)
        if self.rises:
            taken = ops.maximum(taken, 9.0 / (10.0 + t))
        average = selected(t == 1, before, average)
        return normal(average + normal(F.cast(taken, mstype.float32) * normal(stored - average)))
