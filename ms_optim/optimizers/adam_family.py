"""The base class of the optimizers of the Adam family: two moments and their bias corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspore import ops

from ..arguments.checks import check_eps, check_open_unit
from ..base.optimizer import FusedOptimizer, Rule
from ..rules.arithmetic import power_complement, summed

if TYPE_CHECKING:
    from mindspore import Tensor

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay


class AdamFamily(FusedOptimizer):
    """Base class of the rules that keep a first moment m and a second moment v of the gradient.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), Algorithm 1.
    """

    beta1: float
    beta2: float
    eps: float
    bias_correction: bool

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate,
        weight_decay: WeightDecay,
        rule: Rule,
        betas: dict[str, float],
        eps: float,
        shared: Mapping[str, Any],
        bias_correction: bool = True,
    ):
        name = type(self).__name__
        for argument, beta in betas.items():
            check_open_unit(name, argument, beta)
        check_eps(name, eps)
        beta1, beta2 = betas.values()
        rule = rule._replace(constants=(beta1, beta2, eps, *rule.constants))
        # Set before the base class chooses a path, as that may try the rule.
        self.beta1, self.beta2, self.eps, self.bias_correction = beta1, beta2, eps, bias_correction
        # Computed here, in float64: a graph would use float32, where 1 - 0.999 has a relative error of 1e-5.
        self._one_minus_beta1, self._one_minus_beta2 = 1.0 - beta1, 1.0 - beta2
        self._log_beta1, self._log_beta2 = math.log(beta1), math.log(beta2)
        super().__init__(params, learning_rate, weight_decay, rule, **shared)

    def scalars(self, t: Tensor) -> Scalars:
        """Return 1 - beta1^t and sqrt(1 - beta2^t)."""
        if not self.bias_correction:
            return 1.0, 1.0
        return power_complement(self._log_beta1, t), ops.sqrt(power_complement(self._log_beta2, t))

    def akg_constants(self) -> tuple[float, ...]:
        """Return beta1, 1 - beta1, beta2, 1 - beta2 and eps."""
        return self.beta1, self._one_minus_beta1, self.beta2, self._one_minus_beta2, self.eps

    def moments(self, gradient: Tensor, states: Tensors) -> tuple[Tensor, Tensor]:
        """Return the new m and v."""
        m = summed(self.beta1 * states[0], self._one_minus_beta1 * gradient)
        v = summed(self.beta2 * states[1], self._one_minus_beta2 * gradient * gradient)
        return m, v

    def adam_direction(self, scalars: Scalars, m: Tensor, v: Tensor) -> Tensor:
        """Return m_hat / (sqrt(v_hat) + eps)."""
        return (m / scalars[0]) / (ops.sqrt(v) / scalars[1] + self.eps)
