"""What holds the norm of weights, in MindSpore's operators.

With a weight W, a direction U and two numbers of the tensor, the weight becomes W - c U - k W. Both follow from the
norms of W and U and their product before the weight moves, so no norm of the new weight is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.weight_norms import BRAKE, HYPERBALL, RadialBrake

if TYPE_CHECKING:
    from ...arguments.options import Options


def weight_norms_of(options: Options, dtype) -> WeightNorms | None:
    """Return the Cell that holds norms as an optimizer's arguments say; None if nothing does."""
    return None if options.weight_norm is None else WeightNorms(options.weight_norm, dtype)


class WeightNorms(nn.Cell):
    """Decides how weights move whose norms are held.

    Args:
        weight_norm: The argument of the optimizer.
        dtype: The dtype of numbers that are computed once a tensor.
    """

    def __init__(self, weight_norm: str | RadialBrake, dtype):
        super().__init__(auto_prefix=False)
        brake = weight_norm if isinstance(weight_norm, RadialBrake) else RadialBrake()
        self.kind, self.dtype = BRAKE if isinstance(weight_norm, RadialBrake) else weight_norm, dtype
        self.outward_lost, self.inward_lost = 1.0 - brake.outward, 1.0 - brake.inward

    def radii(self, radii, norms):
        """Return the norms to hold: those at the first step, at which they are 0."""
        return ops.where(radii > 0, radii, norms)

    def construct(self, rate, coefficient, radii, norms):
        """Return of each tensor the coefficients c and k, and its trust ratio.

        Args:
            rate: The learning rates.
            coefficient: The rule's coefficients of its direction.
            radii: The norms that are held.
            norms: The norms of weights and directions, and the signed roots of their products, a row for each tensor.
        """
        numbers = ops.unstack(F.cast(norms, self.dtype), 1)
        weight, direction, product = numbers[0], numbers[1], numbers[-1] * ops.abs(numbers[-1])
        rate, none = F.cast(rate, self.dtype), ops.zeros_like(weight)
        # A NaN stays one, as nothing is 0 then.
        nothing = ops.logical_or(weight == 0, direction == 0)
        along = ops.where(nothing, ops.ones_like(direction), direction)
        if self.kind == BRAKE:
            ratio = ops.ones_like(weight)
            step = F.cast(coefficient, self.dtype)
        else:
            target = F.cast(radii, self.dtype) if self.kind == HYPERBALL else weight
            ratio = ops.where(nothing, none, target / along)
            step = rate * ratio
        # The square of the new norm is that of the old one plus this.
        grown = step * (step * ops.square(direction) - 2.0 * product)
        moved = ops.sqrt(ops.maximum(ops.square(weight) + grown, none))
        usable = ops.where(moved == 0, ops.ones_like(moved), moved)
        if self.kind == HYPERBALL:
            lost = ops.where(nothing, none, 1.0 - F.cast(radii, self.dtype) / usable)
        elif self.kind == BRAKE:
            part = ops.where(grown > 0, self.outward_lost * ops.ones_like(grown), self.inward_lost)
            # The difference of the norms, without cancellation.
            lost = ops.where(moved == 0, none, part * grown / (usable * (usable + weight)))
        else:
            lost = none
        kept = 1.0 - lost
        return F.cast(step * kept, mstype.float32), F.cast(lost, mstype.float32), F.cast(ratio * kept, mstype.float32)
