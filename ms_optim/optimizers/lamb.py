"""Lamb: Adam with its update scaled by a trust ratio for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mindspore import ops

from ..arguments.checks import check_bounds, check_type
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..kernels.interface import LambFlag
from ..rules.arithmetic import bounded, trust_ratio
from .adam_family import AdamFamily

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared


@documented
class Lamb(AdamFamily):
    r"""Layer-wise adaptive moments for training with large batches.

    You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
    <https://arxiv.org/abs/1904.00962>`_ (2020), Algorithm 2, for each parameter tensor with gradient :math:`g_t`,
    moments :math:`m_t` and :math:`v_t`, learning rate :math:`\eta_t`, weight decay :math:`\lambda` and weights
    :math:`w_t`:

    .. math::
        \begin{aligned}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda w_{t-1} \\
        w_t &= w_{t-1} - \eta_t \frac{\phi(\left\lVert w_{t-1} \right\rVert)}{\left\lVert u_t \right\rVert} u_t
        \end{aligned}

    The fraction is the trust ratio; it is 1 where either norm is 0. Norms are those of the whole tensor.

    Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate}
        beta1 (float): Decay rate of the first moment, in the range (0.0, 1.0). Default: ``0.9`` .
        beta2 (float): Decay rate of the second moment, in the range (0.0, 1.0). Default: ``0.999`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-6`` .
        {weight_decay}
        bias_correction (bool): Whether to divide the moments by :math:`1 - \beta^t`; ``False`` is the rule in the
            paper's third version. Default: ``True`` .
        always_adapt (bool): Whether the trust ratio also applies to tensors with a weight decay of 0; with ``False`` it
            is 1 for them. Default: ``True`` .
        weight_norm_bounds (Union[tuple[float], None]): The limits (low, high) of the weight's norm, which
            :math:`\phi` applies; ``None`` for either limit, or an infinite upper limit, means no limit. Default:
            ``None`` .
        trust_ratio_bounds (Union[tuple[float], None]): The limits (low, high) of the trust ratio; ``None`` for either
            limit, or an infinite upper limit, means no limit. Default: ``None`` .
        {shared}
        {offload}
        {decay}
        {average_decay}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `beta1`, `beta2` or `eps` is not a float.
        ValueError: If `eps` is less than or equal to 0, or `beta1` or `beta2` is not in the range (0.0, 1.0).
        ValueError: If bounds are negative or in the wrong order.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Lamb
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> rate = nn.PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
        >>> optimizer = Lamb(net.trainable_params(), learning_rate=rate, weight_decay=0.01)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    refuses: ClassVar[dict[str, str]] = {"weight_norm": "scales its updates by the norm of the weights already"}
    rules: tuple[Rule, ...] = (Rule("lamb", ("lamb_m", "lamb_v"), is_layerwise=True, is_elementwise=True),)

    always_adapt: bool
    weight_norm_bounds: tuple[float, float]
    trust_ratio_bounds: tuple[float, float]

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: WeightDecay = 0.0,
        *,
        bias_correction: bool = True,
        always_adapt: bool = True,
        weight_norm_bounds: Sequence[float | None] | None = None,
        trust_ratio_bounds: Sequence[float | None] | None = None,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        check_type(name, "always_adapt", always_adapt, bool)
        check_type(name, "bias_correction", bias_correction, bool)
        phi = check_bounds(name, "weight_norm_bounds", weight_norm_bounds)
        ratio = check_bounds(name, "trust_ratio_bounds", trust_ratio_bounds)
        flags = LambFlag.BIAS_CORRECTION * bias_correction + LambFlag.ALWAYS_ADAPT * always_adapt
        rule = self.rules[0]._replace(constants=(*phi, *ratio), flags=flags)
        betas = {"beta1": beta1, "beta2": beta2}
        self.always_adapt = always_adapt
        self.weight_norm_bounds, self.trust_ratio_bounds = phi, ratio
        super().__init__(params, learning_rate, weight_decay, rule, betas, eps, shared, bias_correction)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update: the direction u, including the decay."""
        states = self.moments(gradient, states)
        return self.directions_of(scalars, weight, gradient, weight_decay, states), states

    def directions_of(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> Tensors:
        """Compute the direction u from the new moments."""
        return (self.with_decay(self.adam_direction(scalars, states[0], states[1]), weight, weight_decay),)

    def coefficients(
        self, learning_rate: Tensor, weight_decay: Tensor, weight_norm: Tensor, direction_norms: Tensors
    ) -> tuple[Tensors, Tensor]:
        """Compute the trust ratio."""
        ratio = trust_ratio(bounded(weight_norm, self.weight_norm_bounds), direction_norms[0])
        ratio = bounded(ratio, self.trust_ratio_bounds)
        if not self.always_adapt:
            ratio = ops.where(weight_decay == 0, ops.ones_like(ratio), ratio)
        return (learning_rate * ratio,), ratio
