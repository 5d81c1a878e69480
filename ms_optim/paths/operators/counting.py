"""The step count and the rates of a step, for paths in MindSpore's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import counted, normal, write
from ...unregistered import unregistered

if TYPE_CHECKING:
    from ...states.layout import Layout
    from ..parts import Parts


class RatesOfEach(nn.Cell):
    """Finds each parameter's learning rate and weight decay among the rates of a step."""

    def __init__(self, layout: Layout):
        super().__init__(auto_prefix=False)
        decays = [k if k >= 0 else layout.rate_count for k in layout.decay_places]
        self.places = Tensor(np.array([layout.rate_places, decays], np.int32))
        self.none = Tensor(np.zeros(1, np.float32))

    def construct(self, rates: Tensor) -> Tensor:
        """Return learning rates and weight decays, 0 if there is none: float32 of shape (2, parameters)."""
        return ops.gather(ops.concat((rates, self.none)), self.places, 0)


class Counting(nn.Cell):
    """Decides whether a step is applied, and counts it.

    Args:
        parts: The parts that every path is built from.
    """

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        held = parts.held
        self.dtype, self.log_betas = parts.settings.step_dtype, held.log_betas
        self.never_skips = Tensor(not parts.options.skip_nonfinite)
        names = ("global_step", "skipped_steps", "statistics", "beta_powers")
        unregistered(self, **{name: getattr(held, name) for name in names})

    def check(self):
        """Raise an error if averaged weights are in the parameters, which a negative step count indicates."""
        if self.global_step[0] < 0:
            raise RuntimeError(
                "the parameters hold the averaged weights: leave 'with optimizer.averaged()', or call "
                "optimizer.train(), before the next step."
            )

    def number(self):
        """Return the count of this step, from 1, in the dtype of what depends only on the step."""
        return F.cast(self.global_step, self.dtype).reshape(()) + 1.0

    def applies(self, finite):
        """Return whether a step is applied, given whether all gradients are finite; never at a negative step count."""
        return ops.logical_and(ops.logical_or(finite, self.never_skips), self.global_step[0] >= 0)

    def construct(self, applied, statistics):
        """Count the step, or count it as skipped."""
        write(self.statistics, statistics)
        taken = F.cast(applied, mstype.int32).reshape((1,))
        F.assign(self.skipped_steps, counted(self.skipped_steps, 1 - taken))
        F.assign(self.global_step, counted(self.global_step, taken))
        for k in range(len(self.beta_powers)):
            t = F.cast(self.global_step, self.dtype)
            F.assign(self.beta_powers[k], normal(F.cast(ops.exp(t * self.log_betas[k]), mstype.float32)))
        return applied
