"""The platform's own AdamW on Ascend, one operator for each tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels import table as kernels
from ...kernels.interface import AdamWFlag
from ...rules.arithmetic import norm, weights_of, write

if TYPE_CHECKING:
    from ..parts import Parts


def why_not(parts: Parts) -> str | None:
    """Return why the platform's own AdamW is not this rule or cannot run on these parameters, or None."""
    rule, rates = parts.rule, parts.rates
    kinds = zip(parts.layout.dtypes, parts.held.has_master())
    beyond = {
        "it exists only for AdamW on Ascend": parts.settings.device != "Ascend" or rule.name != "adamw",
        "it always corrects the bias": not rule.flags & AdamWFlag.BIAS_CORRECTION,
        "it takes only learning rates and weight decays that are numbers": len(rates.schedules) > 0,
        "it does not support weights of lower precision than the states": (
            any(dtype != mstype.float32 and not has_master for dtype, has_master in kinds)
        ),
    }
    found = [why for why, asked in beyond.items() if asked]
    return found[0] if found else None


class NativeAdamW(nn.Cell):
    """MindSpore's own AdamW, which does not report the size of its update.

    Args:
        parts: The parts that every path is built from; all rates are numbers.
    """

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        layout, rates = parts.layout, [float(rate.asnumpy()) for rate in parts.rates.fixed]
        self.learning_rates = tuple(rates[k] for k in layout.rate_places)
        self.weight_decays = tuple(rates[k] if k >= 0 else 0.0 for k in layout.decay_places)
        self.constants = tuple(float(c) for c in parts.rule.constants[:3])
        self.adamw, self.dtype = kernels.platform_adamw(), parts.settings.step_dtype
        self.unknown = Tensor(math.nan, mstype.float32)
        object.__setattr__(self, "global_step", parts.held.global_step)

    def shared(self, scalars, applied):
        """Return the inputs that all tensors share."""
        return (applied,)

    def columns(self, rate):
        """Return the learning rate and the weight decay of each tensor."""
        return self.learning_rates, self.weight_decays

    def move(self, shared, rate, decay, gradient, scale, _, parameter, master, has_master, *states):
        """Update a tensor; return the norms of the weight before the step and of the update, and the trust ratio."""
        weight = weights_of(F.dtype(parameter), F.cast(parameter, mstype.float32), master, has_master)
        held = master if has_master else parameter
        before = norm(weight, self.dtype)
        if has_master:
            write(held, weight)
        step = F.depend(F.cast(self.global_step, mstype.float32), before)  # the operator adds 1
        beta1, beta2, eps = self.constants
        m, v = states
        g = F.cast(gradient, mstype.float32) * scale
        moved = self.adamw(held, m, v, v, g, step, rate, beta1, beta2, decay, eps, False, False)
        if has_master:
            write(parameter, F.depend(held, moved))
        return before, F.depend(self.unknown, moved), ops.ones_like(before)
