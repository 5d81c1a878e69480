"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import ops

from ..arguments.checks import check_betas, check_type
from ..arguments.docstrings import documented
from ..arguments.options import choose_backend
from ..base.optimizer import Rule
from ..kernels.interface import AdamWFlag
from ..rules.arithmetic import normal
from .adam_family import AdamFamily

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared


@documented
class AdamW(AdamFamily):
    r"""Adam with decoupled weight decay, which acts directly on the weights and not through the moments.

    Loshchilov and Hutter, `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_ (2019),
    Algorithm 2, with gradient :math:`g_t`, moments :math:`m_t` and :math:`v_t`, learning rate :math:`\gamma_t`, weight
    decay :math:`\lambda` and weights :math:`w_t`:

    .. math::
        \begin{aligned}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \gamma_t \left(
            \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda w_{t-1} \right)
        \end{aligned}

    Parameters that are not in groups are all decayed, regardless of their names.

    Args:
        {params}
        {learning_rate|1e-3}
        betas (Union[list[float], tuple[float]]): Decay rates of the first and the second moment, each in the range
            (0.0, 1.0). Default: ``(0.9, 0.999)`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-8`` .
        {weight_decay}
        amsgrad (bool): Whether the denominator uses the largest second moment so far, kept in a third state.
            Default: ``False`` .
        maximize (bool): Whether to maximize the objective instead of minimizing it. Default: ``False`` .
        use_fused (bool): Whether to use the fused kernel; ``False`` means the same as `backend` "composite".
            Default: ``True`` .
        bias_correction (bool): Whether to divide the moments by :math:`1 - \beta^t`. Default: ``True`` .
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
        TypeError: If `betas` is not a list or tuple of two floats, or `eps` is not a float.
        ValueError: If `eps` is less than or equal to 0, or an element of `betas` is not in the range (0.0, 1.0).
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> biases = [p for p in net.trainable_params() if p.name.endswith("bias")]
        >>> weights = [p for p in net.trainable_params() if not p.name.endswith("bias")]
        >>> groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases}]
        >>> optimizer = AdamW(groups, learning_rate=1e-3)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    decays_every_name = True
    rules: tuple[Rule, ...] = (
        Rule("adamw", ("adam_m", "adam_v"), is_elementwise=True),
        Rule("adamw_amsgrad", ("adam_m", "adam_v", "adam_vhat"), is_elementwise=True),
    )
    trials: tuple[dict[str, Any], ...] = ({}, {"amsgrad": True})

    amsgrad: bool
    maximize: bool

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: WeightDecay = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        use_fused: bool = True,
        bias_correction: bool = True,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        beta1, beta2 = check_betas(name, betas, 2)
        check_type(name, "amsgrad", amsgrad, bool)
        check_type(name, "maximize", maximize, bool)
        check_type(name, "bias_correction", bias_correction, bool)
        shared = choose_backend(name, "use_fused", use_fused, shared)
        flags = AdamWFlag.MAXIMIZE * maximize + AdamWFlag.BIAS_CORRECTION * bias_correction
        rule = self.rules[amsgrad]._replace(flags=flags + AdamWFlag.AMSGRAD * amsgrad)
        named_betas = {"betas[0]": beta1, "betas[1]": beta2}
        self.amsgrad, self.maximize = amsgrad, maximize
        super().__init__(params, learning_rate, weight_decay, rule, named_betas, eps, shared, bias_correction)

    def entering(self, gradient: Tensor) -> Tensor:
        """Return the gradient, negated if `maximize` is set."""
        return -gradient if self.maximize else gradient

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update: one direction, including the decay."""
        m, v = self.moments(gradient, states)
        new_states = (m, v)
        if self.amsgrad:
            v = ops.maximum(normal(states[2]), v)
            new_states += (v,)
        return (self.with_decay(self.adam_direction(scalars, m, v), weight, weight_decay),), new_states
