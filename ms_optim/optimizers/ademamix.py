"""AdEMAMix: Adam with a second, much slower moving average of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_at_most, check_betas, check_count
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..rules.arithmetic import power_complement, quotient, summed
from .adam_family import AdamFamily

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared

MOST_ALPHA = 1e18  # with it, the sum of moments is finite in float32 wherever the square of the gradient is


@documented
class AdEMAMix(AdamFamily):
    r"""Adam with decoupled weight decay and a second, much slower moving average of the gradient.

    Pagliardini et al., `The AdEMAMix Optimizer: Better, Faster, Older <https://arxiv.org/abs/2409.03137>`_ (2024),
    Algorithm 1, with gradient :math:`g_t`, learning rate :math:`\eta_t`, weight decay :math:`\lambda` and weights
    :math:`w_t`:

    .. math::
        \begin{aligned}
        m^{(1)}_t &= \beta_1 m^{(1)}_{t-1} + (1 - \beta_1) g_t \\
        m^{(2)}_t &= \beta_3(t)\, m^{(2)}_{t-1} + (1 - \beta_3(t)) g_t \\
        \nu_t &= \beta_2 \nu_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta_t \left(
            \frac{m^{(1)}_t / (1 - \beta_1^t) + \alpha(t)\, m^{(2)}_t}{\sqrt{\nu_t / (1 - \beta_2^t)} + \epsilon}
            + \lambda w_{t-1} \right)
        \end{aligned}

    With :math:`T` warm-up steps, both schedules rise to the values of the arguments and then stay constant:

    .. math::
        \alpha(t) = \min\left(\frac{t}{T} \alpha, \alpha\right), \qquad
        \beta_3(t) = \min\left(\exp\left(
            \frac{\ln \beta_1 \ln \beta_3}{(1 - t/T) \ln \beta_3 + (t/T) \ln \beta_1} \right), \beta_3\right)

    It keeps three states, `ademamix_m1`, `ademamix_nu` and `ademamix_m2`. Parameters that are not in groups are decayed
    unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate|1e-3}
        betas (Union[list[float], tuple[float]]): Decay rates of the fast moment, of the second moment and of the slow
            moment, each in the range (0.0, 1.0). Default: ``(0.9, 0.999, 0.9999)`` .
        alpha (Union[float, int]): The factor of the slow moment, from 0 to 1e18. Default: ``5.0`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-8`` .
        {weight_decay}
        warmup_steps (Union[int, None]): The number of steps :math:`T` over which the schedules rise, 1 or greater; the
            paper uses all steps of the training. ``None`` means that both are constant. Default: ``None`` .
        {shared}
        {offload}
        {decay}
        {average_decay}
        {weight_norm}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `betas` is not a list or tuple of three floats, `alpha` is not a number, `eps` is not a float, or
            `warmup_steps` is neither an int nor ``None``.
        ValueError: If `eps` is less than or equal to 0, `alpha` is not in the range [0, 1e18], `warmup_steps` is less
            than 1, or an element of `betas` is not in the range (0.0, 1.0).
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdEMAMix
        >>> net = nn.Dense(4, 3)
        >>> optimizer = AdEMAMix(net.trainable_params(), learning_rate=1e-3, weight_decay=0.1, warmup_steps=1000)
        >>> model = ms.Model(net, nn.MSELoss(), optimizer)
    """

    rules: tuple[Rule, ...] = (
        Rule(
            "ademamix",
            ("ademamix_m1", "ademamix_nu", "ademamix_m2"),
            is_elementwise=True,
            state_kinds=("signed", "unsigned", "signed"),
        ),
    )

    beta3: float
    alpha: float
    warmup_steps: int

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-3,
        betas: Sequence[float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: WeightDecay = 0.0,
        *,
        warmup_steps: int | None = None,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        beta1, beta2, beta3 = check_betas(name, betas, 3)
        check_at_most(name, "alpha", alpha, MOST_ALPHA)
        if warmup_steps is not None:
            check_count(name, "warmup_steps", warmup_steps, 1)
        self.beta3, self.alpha, self.warmup_steps = beta3, float(alpha), warmup_steps or 0
        # Computed here, in float64; a graph would compute them in float32.
        self._log_beta3, self._one_minus_beta3 = math.log(beta3), 1.0 - beta3
        self._product_of_logs = math.log(beta1) * self._log_beta3
        rule = self.rules[0]._replace(constants=(beta3, self.alpha, float(self.warmup_steps)))
        named = {"betas[0]": beta1, "betas[1]": beta2}
        super().__init__(params, learning_rate, weight_decay, rule, named, eps, shared)

    def scalars(self, t: Tensor) -> Scalars:
        """Return the scalars of the Adam family, then alpha, beta3 and 1 - beta3 of the step."""
        adam = super().scalars(t)
        if self.warmup_steps == 0:
            return (*adam, self.alpha, self.beta3, self._one_minus_beta3)
        part = ops.minimum(t / self.warmup_steps, ops.ones_like(t))
        between = (1.0 - part) * self._log_beta3 + part * self._log_beta1
        log_beta3 = ops.minimum(self._product_of_logs / between, self._log_beta3 * ops.ones_like(t))
        # 1 - beta3 is computed as 1 - e^(ln beta3), which keeps its precision without float64.
        slow = F.cast(ops.exp(log_beta3), mstype.float32), power_complement(1.0, log_beta3)
        return (*adam, F.cast(part * self.alpha, mstype.float32), *slow)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update: one direction, from both moving averages."""
        m1, nu = self.moments(gradient, states)
        m2 = summed(scalars[3] * states[2], scalars[4] * gradient)
        mixed = summed(quotient(m1, scalars[0]), scalars[2] * m2)
        direction = quotient(mixed, quotient(ops.sqrt(nu), scalars[1]) + self.eps)
        return (self.with_decay(direction, weight, weight_decay),), (m1, nu, m2)
