"""LANS: layer-wise adaptive steps from normalized gradients, with Nesterov momentum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from mindspore import ops

from ..arguments.checks import check_bounds, check_count, check_positive
from ..arguments.docstrings import documented
from ..arguments.options import choose_backend
from ..base.optimizer import Rule
from ..rules.arithmetic import bounded, quotient, trust_ratio
from .adam_family import AdamFamily

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared


@documented
class LANS(AdamFamily):
    r"""Large-batch training with normalized gradients and Nesterov momentum, scaled layer by layer.

    Zheng et al., `Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
    <https://arxiv.org/abs/2006.13484>`_ (2020), Algorithm 2, for each parameter tensor with gradient :math:`g_t`,
    moments :math:`m_t` and :math:`v_t`, learning rate :math:`\eta_t`, weight decay :math:`\lambda` and weights
    :math:`w_t`:

    .. math::
        \begin{aligned}
        {{\tilde g}{}}_t &= g_t / \left\lVert g_t \right\rVert \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) {{\tilde g}{}}_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) {{\tilde g}{}}_t^2 \\
        d_t &= \sqrt{v_t / (1 - \beta_2^t)} + \epsilon \\
        c_t &= \frac{m_t / (1 - \beta_1^t)}{d_t} + \lambda w_{t-1}, \qquad
        s_t = \frac{{{\tilde g}{}}_t}{d_t} + \lambda w_{t-1} \\
        w_t &= w_{t-1} - \eta_t\, \phi(\left\lVert w_{t-1} \right\rVert) \left[
            \beta_1 \frac{c_t}{\left\lVert c_t \right\rVert}
            + (1 - \beta_1) \frac{s_t}{\left\lVert s_t \right\rVert} \right]
        \end{aligned}

    :math:`\phi` clamps the weight's norm to the range from `lower_bound` to `upper_bound`. A gradient of norm 0 stays
    0, and a ratio of norms that is 0 or NaN is replaced by 1. Norms are those of the whole tensor. Both terms use the
    weight from before the step. Normalization cancels factors of a whole gradient (`rescale_grad`, `loss_scale`,
    `grad_clip_norm`); such factors change only the statistics.

    Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate|1e-3}
        beta1 (float): Decay rate of the first moment, in the range (0.0, 1.0). Default: ``0.9`` .
        beta2 (float): Decay rate of the second moment, in the range (0.0, 1.0). Default: ``0.999`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-6`` .
        lower_bound (Union[float, None]): The lower limit of the weight's norm. Default: ``None`` .
        upper_bound (Union[float, None]): The upper limit of the weight's norm; ``None`` and infinity mean no limit.
            Default: ``None`` .
        aggregate_num (Union[int, None]): The maximum number of tensors in one launch in a graph; 0 and ``None`` mean
            all. A launch takes more tensors if a step would otherwise need more than 16 launches. The result does not
            depend on it. A step that is called from Python is always one launch. Default: ``4`` .
        use_fused_step (bool): Whether to use the fused kernel; ``False`` means the same as `backend` "composite".
            Default: ``True`` .
        {weight_decay}
        clip_gradient (Union[float, None]): The largest magnitude of an element of :math:`{{\tilde g}{}}_t`; larger
            ones are clipped to it. Default: ``None`` .
        rescale_grad (float): The factor that gradients are multiplied by first, greater than 0. Default: ``1.0`` .
        {shared}
        {offload}
        {decay}
        {average_decay}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `beta1`, `beta2` or `eps` is not a float, or `aggregate_num` is neither an int nor ``None``.
        TypeError: If `lower_bound`, `upper_bound` or `clip_gradient` is neither a number nor ``None``, or
            `rescale_grad` is not a number.
        ValueError: If `eps`, `clip_gradient` or `rescale_grad` is less than or equal to 0, or `beta1` or `beta2` is not
            in the range (0.0, 1.0).
        ValueError: If bounds are negative or in the wrong order, or `aggregate_num` is negative.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import LANS
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> rate = nn.WarmUpLR(learning_rate=0.02, warmup_steps=10)
        >>> optimizer = LANS(net.trainable_params(), learning_rate=rate, weight_decay=0.01)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    direction_count = 2
    normalizes_gradient = True
    refuses: ClassVar[dict[str, str]] = {"weight_norm": "scales its updates by the norm of the weights already"}
    rules: tuple[Rule, ...] = (Rule("lans", ("lans_m", "lans_v"), is_layerwise=True, is_elementwise=True),)

    weight_norm_bounds: tuple[float, float]
    clip_gradient: float | None

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        aggregate_num: int | None = 4,
        use_fused_step: bool = True,
        weight_decay: WeightDecay = 0.0,
        clip_gradient: float | None = None,
        rescale_grad: float = 1.0,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        phi = check_bounds(name, ("lower_bound", "upper_bound"), (lower_bound, upper_bound))
        if aggregate_num is not None:
            check_count(name, "aggregate_num", aggregate_num)
        if clip_gradient is not None:
            check_positive(name, "clip_gradient", clip_gradient)
        check_positive(name, "rescale_grad", rescale_grad)
        shared = choose_backend(name, "use_fused_step", use_fused_step, shared)
        largest = math.inf if clip_gradient is None else float(clip_gradient)
        constants, at_most = (largest, *phi), aggregate_num or 0
        rule = self.rules[0]._replace(constants=constants, at_most=at_most, rescale=float(rescale_grad))
        betas = {"beta1": beta1, "beta2": beta2}
        # Set before the base class chooses a path, because this may run the rule.
        self.weight_norm_bounds, self.clip_gradient = phi, None if clip_gradient is None else largest
        super().__init__(params, learning_rate, weight_decay, rule, betas, eps, shared)

    def entering(self, gradient: Tensor) -> Tensor:
        """Return the gradient with clipped elements."""
        if self.clip_gradient is None:
            return gradient
        return ops.clamp(gradient, -self.clip_gradient, self.clip_gradient)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update: the directions c of the moments and s of the gradient, including the decay."""
        states = self.moments(gradient, states)
        return self.directions_of(scalars, weight, gradient, weight_decay, states), states

    def directions_of(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> Tensors:
        """Compute the directions c and s from the new moments."""
        d = quotient(ops.sqrt(states[1]), scalars[1]) + self.eps
        c = self.with_decay(quotient(quotient(states[0], scalars[0]), d), weight, weight_decay)
        return c, self.with_decay(quotient(gradient, d), weight, weight_decay)

    def coefficients(
        self, learning_rate: Tensor, weight_decay: Tensor, weight_norm: Tensor, direction_norms: Tensors
    ) -> tuple[Tensors, Tensor]:
        """Compute how far the weight moves along c and along s."""
        phi = bounded(weight_norm, self.weight_norm_bounds)
        ratio_c, ratio_s = trust_ratio(phi, direction_norms[0]), trust_ratio(phi, direction_norms[1])
        along_c, along_s = self.beta1 * ratio_c, self._one_minus_beta1 * ratio_s
        return (learning_rate * along_c, learning_rate * along_s), along_c + along_s
