"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import ops

from ..arguments.checks import check_betas
from ..arguments.docstrings import documented
from ..base.optimizer import FusedOptimizer, Rule
from ..rules.arithmetic import summed

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared


@documented
class Lion(FusedOptimizer):
    r"""Lion: moves each weight by the learning rate along the sign of its momentum, with decoupled weight decay.

    Chen et al., `Symbolic Discovery of Optimization Algorithms <https://arxiv.org/abs/2302.06675>`_ (2023), with the
    update of Algorithm 2:

    .. math::
        \begin{aligned}
        u_t &= \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) \\
        w_t &= w_{t-1} - \gamma_t (u_t + \lambda w_{t-1}) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t
        \end{aligned}

    :math:`g_t` is the gradient after unscaling, centralization and clipping, :math:`\gamma_t` the learning rate,
    :math:`\lambda` the weight decay, and the sign of 0 is 0. It keeps one state, `lion_m`.

    Args:
        {params}
        {learning_rate|1e-4}
        betas (Union[list[float], tuple[float]]): The fraction of the momentum in the sign, and the decay rate of the
            momentum, each in the range (0.0, 1.0). Default: ``(0.9, 0.99)`` .
        {weight_decay}
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
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Lion
        >>> net = nn.Dense(4, 3)
        >>> optimizer = Lion(net.trainable_params(), learning_rate=1e-4, weight_decay=0.1)
        >>> model = ms.Model(net, nn.MSELoss(), optimizer)
    """

    rules: tuple[Rule, ...] = (Rule("lion", ("lion_m",), is_elementwise=True),)

    beta1: float
    beta2: float

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: WeightDecay = 0.0,
        **shared: Unpack[Shared],
    ):
        self.beta1, self.beta2 = check_betas(type(self).__name__, betas, 2)
        # Computed here, in float64; in a graph they would be differences of float32 numbers.
        self._one_minus_beta1, self._one_minus_beta2 = 1.0 - self.beta1, 1.0 - self.beta2
        rule = self.rules[0]._replace(constants=(self.beta1, self.beta2))
        super().__init__(params, learning_rate, weight_decay, rule, **shared)

    def scalars(self, t: Tensor) -> Scalars:
        """Return an empty tuple: no value of the rule depends on the step."""
        return ()

    def akg_constants(self) -> tuple[float, ...]:
        """Return beta1, 1 - beta1, beta2 and 1 - beta2."""
        return self.beta1, self._one_minus_beta1, self.beta2, self._one_minus_beta2

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update: the sign, from the momentum before the step, and the decay."""
        m = states[0]
        interpolated = summed(self.beta1 * m, self._one_minus_beta1 * gradient)
        # MindSpore's sign does not return NaN for NaN.
        sign = ops.where(ops.isnan(interpolated), interpolated, ops.sign(interpolated))
        new_m = summed(self.beta2 * m, self._one_minus_beta2 * gradient)
        return (self.with_decay(sign, weight, weight_decay),), (new_m,)
