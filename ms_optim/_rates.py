"""The learning rates and weight decays of a step: each distinct one is evaluated once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it


def _number(rate):
    return F.cast(rate, mstype.float32).reshape(())


class Rates(nn.Cell):
    """Distinct learning rates and weight decays.

    Args:
        rates: Tensors and Parameters, which are fixed from the view of a step, and Cells, which are called with the
            step. The fixed ones come first.
    """

    fixed: tuple[Tensor | Parameter, ...]
    schedules: tuple[nn.Cell, ...]
    count: int

    def __init__(self, rates: Sequence[Any]):
        super().__init__(auto_prefix=False)
        self.each = C.Map()
        # The optimizer holds these Cells and Parameters too, and Cell refuses to hold one under two names.
        object.__setattr__(self, "fixed", tuple(rate for rate in rates if not isinstance(rate, nn.Cell)))
        self.count = len(rates)
        object.__setattr__(self, "schedules", tuple(rate for rate in rates if isinstance(rate, nn.Cell)))

    def construct(self, step: Tensor) -> Tensor:
        """Return the rates of a step, counted from 0: float32 of shape (rates,)."""
        values = ()
        if len(self.fixed) > 0:
            values += self.each(_number, self.fixed)
        for schedule in self.schedules:
            values += (_number(schedule(step)),)
        return ops.stack(values)
