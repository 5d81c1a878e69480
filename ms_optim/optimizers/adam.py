"""Adam: two moments, and a weight decay that acts through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..arguments.checks import check_type, fail
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..kernels.interface import AdamFlag
from ..rules.arithmetic import SMALLEST
from .adam_family import CoupledAdam

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, WeightDecay
    from ..arguments.options import Shared


@documented
class Adam(CoupledAdam):
    r"""Adam with an L2 penalty, as :class:`mindspore.nn.Adam` has it.

    Kingma and Ba, `Adam: A Method for Stochastic Optimization <https://arxiv.org/abs/1412.6980>`_ (2015), in the form
    of its section 2, which folds the bias corrections into the learning rate, with gradient :math:`g_t`, moments
    :math:`m_t` and :math:`v_t`, learning rate :math:`\alpha`, weight decay :math:`\lambda` and weights :math:`w_t`:

    .. math::
        \begin{aligned}
        g_t &\leftarrow g_t + \lambda w_{t-1} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        l &= \alpha \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \\
        w_t &= w_{t-1} - l \frac{m_t}{\sqrt{v_t} + \epsilon}
        \end{aligned}

    With `use_nesterov`, :math:`\beta_1 m_t + (1 - \beta_1) g_t` replaces :math:`m_t` in the last line (Dozat,
    `Incorporating Nesterov Momentum into Adam <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016). With
    `use_amsgrad`, the largest :math:`v` so far replaces :math:`v_t` there (Reddi et al., `On the Convergence of Adam
    and Beyond <https://arxiv.org/abs/1904.09237>`_, 2018). Unlike in :class:`AdamW`, the weight decay is an L2 penalty
    that acts through the moments. Parameters that are not in groups are decayed unless their name contains ``beta`` or
    ``gamma``.

    Args:
        {params}
        {learning_rate|1e-3}
        beta1 (float): Decay rate of the first moment, in the range (0.0, 1.0). Default: ``0.9`` .
        beta2 (float): Decay rate of the second moment, in the range (0.0, 1.0). Default: ``0.999`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-8`` .
        {weight_decay}
        use_nesterov (bool): Whether to use Nesterov's momentum. Default: ``False`` .
        use_amsgrad (bool): Whether the denominator uses the largest second moment so far, kept in a third state.
            Default: ``False`` .
        corrects_eps (bool): Whether `eps` is added after the bias correction, as in Algorithm 1 of the paper and in
            PyTorch: :math:`\epsilon \sqrt{1 - \beta_2^t}` replaces :math:`\epsilon` above. Default: ``False`` .
        {shared}
        {offload}
        {average_decay}
        {weight_norm}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `beta1`, `beta2` or `eps` is not a float, or `use_nesterov`, `use_amsgrad` or `corrects_eps` not a
            bool.
        ValueError: If `eps` is less than or equal to 0, or `beta1` or `beta2` is not in the range (0.0, 1.0).
        ValueError: If `corrects_eps` is ``True`` and `eps` is denormal in float32 once it is multiplied with
            :math:`\sqrt{1 - \beta_2}`.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Adam
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> optimizer = Adam(net.trainable_params(), learning_rate=1e-3)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    refuses: ClassVar[dict[str, str]] = {"decay": "has an L2 decay, which acts through the moments"}
    rules: tuple[Rule, ...] = (
        Rule("adam", ("moment1", "moment2"), is_elementwise=True),
        Rule("adam_amsgrad", ("moment1", "moment2", "vhat"), is_elementwise=True),
    )
    trials: tuple[dict[str, Any], ...] = ({"eps": 1e-3}, {"eps": 1e-3, "use_amsgrad": True})

    use_nesterov: bool
    use_amsgrad: bool
    corrects_eps: bool

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: WeightDecay = 0.0,
        *,
        use_nesterov: bool = False,
        use_amsgrad: bool = False,
        corrects_eps: bool = False,
        **shared: Unpack[Shared],
    ):
        name = type(self).__name__
        for argument, value in (
            ("use_nesterov", use_nesterov),
            ("use_amsgrad", use_amsgrad),
            ("corrects_eps", corrects_eps),
        ):
            check_type(name, argument, value, bool)
        flags = AdamFlag.NESTEROV * use_nesterov + AdamFlag.CORRECTS_EPS * corrects_eps
        self.use_nesterov, self.use_amsgrad, self.corrects_eps = use_nesterov, use_amsgrad, corrects_eps
        rule = self.rules[use_amsgrad]._replace(flags=flags)
        super().__init__(params, learning_rate, weight_decay, rule, {"beta1": beta1, "beta2": beta2}, eps, shared)
        if corrects_eps and eps * (1.0 - beta2) ** 0.5 < SMALLEST:
            fail(ValueError, name, "eps", f"at least {SMALLEST / (1.0 - beta2) ** 0.5:.2g} with corrects_eps=True", eps)
