"""The base class of the optimizers of the Adam family: two moments and their bias corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_eps, check_open_unit
from ..base.optimizer import FusedOptimizer, Rule
from ..rules.arithmetic import normal, power_complement, quotient, summed

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
        return self.corrections(t)

    def corrections(self, t: Tensor) -> Scalars:
        """Return 1 - beta1^t and sqrt(1 - beta2^t); graphs cannot call a method of the class above by super()."""
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
        return quotient(quotient(m, scalars[0]), quotient(ops.sqrt(v), scalars[1]) + self.eps)


class CoupledAdam(AdamFamily):
    """Base class of the rules whose weight decay is an L2 penalty: it acts through the moments.

    Kingma and Ba (2015), in the form of section 2, which folds the bias corrections into the learning rate.
    """

    use_nesterov: bool
    use_amsgrad: bool = False
    corrects_eps: bool = False

    def scalars(self, t: Tensor) -> Scalars:
        """Return the factor sqrt(1 - beta2^t) / (1 - beta1^t) of the learning rate, and what is added to sqrt(v)."""
        correction1, root2 = self.corrections(t)
        return root2 / correction1, self.eps * (root2 if self.corrects_eps else F.ones_like(root2))

    def akg_constants(self) -> tuple[float, ...]:
        """Return the constants of the moments, and the factors of m and of the gradient in the direction."""
        of_moment, of_gradient = (self.beta1, self._one_minus_beta1) if self.use_nesterov else (1.0, 0.0)
        return (*super().akg_constants()[:4], of_moment, of_gradient)

    def decayed(self, gradient: Tensor, weight: Tensor, weight_decay: Tensor) -> Tensor:
        """Return the gradient plus the weight decay; both enter the moments."""
        return summed(gradient, weight_decay * weight)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update, which is scaled only by the learning rate."""
        g = self.decayed(gradient, weight, weight_decay)
        m, v = self.moments(g, states)
        new_states = (m, v)
        if self.use_amsgrad:
            v = ops.maximum(normal(states[2]), v)
            new_states += (v,)
        first = summed(self.beta1 * m, self._one_minus_beta1 * g) if self.use_nesterov else m
        return (scalars[0] * normal(quotient(first, ops.sqrt(v) + scalars[1])),), new_states
