"""AdamOffload: Adam with its moments in host memory and its arithmetic on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mindspore import Parameter, Tensor

from ..arguments.checks import check_choice, check_type, fail
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..kernels import table as kernels
from ..kernels.capabilities import DEVICES
from ..kernels.interface import AdamFlag, SharedFlag
from ..paths.choice import Choice, check_composite
from .adam_family import CoupledAdam

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, WeightDecay
    from ..arguments.options import SharedButLossScale


@documented
class AdamOffload(CoupledAdam):
    r"""Adam with its moments in host memory, for models whose moments do not fit on the device.

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

    With `use_nesterov`, :math:`\beta_1 m_t + (1 - \beta_1) g_t` replaces :math:`m_t` in the last line. Unlike
    :class:`AdamW`, the weight decay is an L2 penalty that acts through the moments, and :math:`\epsilon` is not
    corrected for bias.

    The arithmetic runs on the host's processor for every device target. Gradients are copied to the host, and updates
    are copied back. float16 and bfloat16 weights have float32 masters on the host, and are copied in their own
    precision. Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate|1e-3}
        beta1 (float): Decay rate of the first moment, in the range (0.0, 1.0). Default: ``0.9`` .
        beta2 (float): Decay rate of the second moment, in the range (0.0, 1.0). Default: ``0.999`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-8`` .
        use_locking (bool): Whether to lock the update, so that no other AdamOffload with this argument updates the same
            weights at the same time from another thread. Default: ``False`` .
        use_nesterov (bool): Whether to use Nesterov's momentum. Default: ``False`` .
        {weight_decay}
        {shared}
        {average_decay}
        {weight_norm}

    Inputs:
        {inputs}

    Outputs:
        Tensor[bool], the value is ``True`` .

    Raises:
        TypeError: If `beta1`, `beta2`, `eps` or `loss_scale` is not a float.
        TypeError: If `use_locking` or `use_nesterov` is not a bool.
        ValueError: If `eps` or `loss_scale` is less than or equal to 0, or `beta1` or `beta2` is not in the range
            (0.0, 1.0).
        RuntimeError: If `use_locking` is ``True`` and the host's operator is missing.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamOffload
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
        >>> optimizer = AdamOffload(net.trainable_params(), learning_rate=1e-3)
        >>> print(optimizer.offload_report("Ascend").to_host_bytes)
        268
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    _support_parallel_optimizer = False
    runs_on_host = True
    refuses: ClassVar[dict[str, str]] = {
        "decay": "has an L2 decay, which acts through the moments",
        "offload": "always keeps its states on the host",
        "multi": "keeps a count of its own, by powers of its betas",
    }
    rules: tuple[Rule, ...] = (Rule("adam_offload", ("moment1", "moment2"), is_elementwise=True),)
    trials: tuple[dict[str, Any], ...] = ({"eps": 1e-3},)  # a smaller eps magnifies rounding
    counters: tuple[str, ...] = (*CoupledAdam.counters, "beta1_power", "beta2_power")

    use_locking: bool
    use_nesterov: bool
    fused: bool
    beta1_power: Parameter
    beta2_power: Parameter

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: WeightDecay = 0.0,
        loss_scale: float = 1.0,
        **shared: Unpack[SharedButLossScale],
    ):
        name = type(self).__name__
        check_type(name, "use_locking", use_locking, bool)
        check_type(name, "use_nesterov", use_nesterov, bool)
        check_type(name, "loss_scale", loss_scale, float)
        flags = AdamFlag.NESTEROV * use_nesterov
        rule = self.rules[0]._replace(flags=flags, shared_flags=SharedFlag.LOCKS * use_locking)
        betas = {"beta1": beta1, "beta2": beta2}
        self.use_locking, self.use_nesterov = use_locking, use_nesterov
        super().__init__(params, learning_rate, weight_decay, rule, betas, eps, {"loss_scale": loss_scale, **shared})
        if use_locking and not self.fused:
            raise RuntimeError(f"For '{name}', use_locking=True needs the host's operator: {self.backend_reason}.")
        self._target = "CPU"
        # In a dict, so that the Cell lists only the path that runs.
        self._paths = {"CPU": (self._choice, self._path)} if self.fused else {}
        self._succeeded = Tensor(True)

    def _hold_more(self, held):
        self.beta1_power, self.beta2_power = held.keep_beta_powers(self.rule.constants[:2])

    @property
    def target(self) -> str:
        """The device that runs the arithmetic: "CPU", which is the host, or the device of the weights.

        Setting it to the device also moves the moments there; nothing is offloaded then. Set it before the first step.

        Raises:
            TypeError: If it is set to a value that is not a string.
            ValueError: If it is set to a device that is not the device target.
            RuntimeError: If the device does not support the requested features, such as states in fewer bits.
        """
        return self._target

    @target.setter
    def target(self, value: str) -> None:
        check_choice(self.cls_name, "target", value, DEVICES)
        if value not in ("CPU", device := kernels.device_target()):
            fail(ValueError, self.cls_name, "target", f"'CPU' with the device target {device}", value)
        if self._paths and value != self._target:
            if value not in self._paths:
                check_composite(self._parts)
                choice = Choice("composite")
                self._paths[value] = choice, self._path_for(choice, self._parts)
            self.fused, (self._choice, self._path) = value == "CPU", self._paths[value]
        self._target = value
