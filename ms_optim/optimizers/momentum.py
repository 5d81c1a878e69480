"""Momentum: stochastic gradient descent with a velocity, and an L2 penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_momentum, check_type, fail
from ..arguments.docstrings import documented
from ..base.optimizer import FusedOptimizer, Rule
from ..kernels.interface import MomentumFlag
from ..rules.arithmetic import summed

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared


@documented
class Momentum(FusedOptimizer):
    r"""Stochastic gradient descent with momentum and an L2 penalty, as :class:`mindspore.nn.Momentum` has it.

    Sutskever et al., `On the importance of initialization and momentum in deep learning
    <https://proceedings.mlr.press/v28/sutskever13.html>`_ (2013), in the form of Goyal et al., `Accurate, Large
    Minibatch SGD <https://arxiv.org/abs/1706.02677>`_ (2017), equation 9, where the learning rate does not enter the
    velocity; with gradient :math:`g_t`, velocity :math:`v_t`, momentum :math:`\mu`, dampening :math:`\tau`, learning
    rate :math:`\gamma_t`, weight decay :math:`\lambda` and weights :math:`w_t`:

    .. math::
        \begin{aligned}
        g_t &\leftarrow g_t + \lambda w_{t-1} \\
        v_t &= \mu v_{t-1} + (1 - \tau) g_t \\
        w_t &= w_{t-1} - \gamma_t v_t
        \end{aligned}

    The first velocity is :math:`v_1 = g_1`, without dampening. With `use_nesterov`, :math:`g_t + \mu v_t` replaces
    :math:`v_t` in the last line. Parameters that are not in groups are decayed unless their name contains ``beta`` or
    ``gamma``.

    Args:
        {params}
        {learning_rate|0.1}
        momentum (Union[float, int]): Decay rate of the velocity, in the range [0.0, 1.0). Default: ``0.9`` .
        {weight_decay}
        use_nesterov (bool): Whether to use Nesterov's momentum. Default: ``False`` .
        dampening (Union[float, int]): The part of each gradient but the first that does not enter the velocity, in the
            range [0.0, 1.0). Default: ``0.0`` .
        {shared}
        {offload}
        {average_decay}
        {weight_norm}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `momentum` or `dampening` is not a number, or `use_nesterov` is not a bool.
        ValueError: If `momentum` or `dampening` is not in the range [0.0, 1.0).
        ValueError: If `use_nesterov` is ``True`` and `momentum` is 0 or `dampening` is not.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Momentum
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> optimizer = Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    refuses: ClassVar[dict[str, str]] = {"decay": "has an L2 decay, which acts through the velocity"}
    rules: tuple[Rule, ...] = (Rule("momentum", ("moments",), is_elementwise=True),)
    trials: tuple[dict[str, Any], ...] = ({},)

    momentum: float
    dampening: float
    use_nesterov: bool

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 0.1,
        momentum: float = 0.9,
        weight_decay: WeightDecay = 0.0,
        *,
        use_nesterov: bool = False,
        dampening: float = 0.0,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        check_momentum(name, "momentum", momentum)
        check_momentum(name, "dampening", dampening)
        check_type(name, "use_nesterov", use_nesterov, bool)
        if use_nesterov and (momentum == 0 or dampening != 0):
            expected = "False unless 'momentum' is positive and 'dampening' is 0"
            fail(ValueError, name, "use_nesterov", expected, use_nesterov)
        self.momentum, self.dampening, self.use_nesterov = float(momentum), float(dampening), use_nesterov
        # Computed here, in float64, as the kernels do.
        self._one_minus_dampening = 1.0 - self.dampening
        constants, flags = (self.momentum, self.dampening), MomentumFlag.NESTEROV * use_nesterov
        rule = self.rules[0]._replace(constants=constants, flags=flags)
        super().__init__(params, learning_rate, weight_decay, rule, **shared)

    def scalars(self, t: Tensor) -> Scalars:
        """Return the factor of the gradient that enters the velocity."""
        first = F.cast(t == 1, mstype.float32)
        return (self._one_minus_dampening + self.dampening * first,)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the update, which is scaled only by the learning rate."""
        g = summed(gradient, weight_decay * weight)  # both enter the velocity
        v = summed(self.momentum * states[0], scalars[0] * g)
        return (summed(g, self.momentum * v) if self.use_nesterov else v,), (v,)
