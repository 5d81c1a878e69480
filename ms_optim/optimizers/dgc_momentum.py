"""DGCMomentum: momentum SGD with compressed exchange of about one gradient element in a thousand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspore import ops

from ..arguments.checks import check_choice, check_count, check_momentum, check_type, fail, is_number
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..dgc.optimizer import CompressedStep
from ..dgc.wire import WIRE_DTYPES, Compression
from ..kernels.interface import DgcMomentumFlag
from ..rules.arithmetic import summed
from ..workers.transport import Workers

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, WeightDecay
    from ..arguments.options import CommonAndAverage


@documented
class DGCMomentum(CompressedStep):
    r"""Deep gradient compression: momentum SGD for data-parallel training over slow links.

    Lin et al., `Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training
    <https://arxiv.org/abs/1712.01887>`_ (2018), sections 3.1 to 3.3. On each of :math:`N` workers, for each parameter
    tensor of :math:`n` elements with gradient :math:`g_t`, momentum :math:`\mu`, learning rate :math:`\eta_t`, weight
    decay :math:`\lambda`, weights :math:`w_t`, velocity :math:`u_t` and residual :math:`r_t`, which has accumulated and
    has not been sent yet (error feedback):

    .. math::
        \begin{aligned}
        g_t &\leftarrow \mathrm{clip}(g_t + \lambda w_{t-1}), \qquad
        u_t = \mu u_{t-1} + g_t, \qquad
        r_t = r_{t-1} + u_t \\
        m_t &= \text{the } k = \max(1, \mathrm{round}((1 - s_t) n))
        \text{ elements of } r_t \text{ largest in magnitude} \\
        w_t &= w_{t-1} - \eta_t \frac{1}{N} \sum_{\text{workers}} m_t \odot r_t, \qquad
        u_t \leftarrow \lnot m_t \odot u_t, \qquad
        r_t \leftarrow \lnot m_t \odot r_t
        \end{aligned}

    With Nesterov momentum, :math:`r_t = r_{t-1} + g_t + \mu u_t`. Exactly :math:`k` elements are sent; among equal
    elements, those with the lowest index. Before `rampup_begin_step`, and always for tensors of fewer than
    `min_compress_numel` elements, the mean of the decayed gradients updates the weights with ordinary momentum:
    :math:`u_t = \mu u_{t-1} + {{\bar g}{}}_t` and :math:`w_t = w_{t-1} - \eta_t u_t`, or
    :math:`\eta_t ({{\bar g}{}}_t + \mu u_t)` with Nesterov. The velocity is kept when compression begins.

    The optimizer exchanges gradients itself: train in the parallel mode "stand_alone", after
    ``mindspore.communication.init()``, and start all workers from the same weights. A step exchanges one packed buffer
    for all parameters. One process computes the same without an exchange.

    Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate}
        momentum (Union[float, int]): Decay rate of the velocity, in the range [0.0, 1.0).
        rampup_begin_step (int): The first step with compression, counted from 0.
        rampup_step (int): The number of steps over which the sparsity takes the values of `sparsity`, each for the same
            number of steps. Default: ``1`` .
        sparsity (Union[list[float], tuple[float]]): The fractions of each gradient that are not sent, each in the range
            [0.0, 1.0); the last fraction applies to all later steps. Default: ``(0.999,)`` .
        use_nesterov (bool): Whether to use Nesterov momentum. Default: ``False`` .
        num_trainers (Union[int, None]): The number of processes that train together, as a check; ``None`` means no
            check. Default: ``None`` .
        {weight_decay}
        decay_type (str): What is added to the local gradient: "l2" adds the weight times `weight_decay`, "l1" the sign
            of the weight times `weight_decay`. Default: ``"l2"`` .
        grad_clip_norm (Union[float, None]): Largest L2 norm of a tensor's mean gradient. Each worker clips its own
            gradient, including the decay, to :math:`N^{-1/2}` times this norm. Only tensors that are compressed are
            clipped, and only after compression begins. Default: ``None`` .
        min_compress_numel (int): Tensors of fewer elements are not compressed. Default: ``16384`` .
        {loss_scale}
        group (Union[str, None]): The communication group of the processes that train together; ``None`` means all
            processes if communication is initialized, else only this process. Default: ``None`` .
        local_group (Union[str, None]): The communication group of the processes on this host, if these first average
            their gradients without compression. Then each host acts as one worker, :math:`N` is the number of hosts,
            and each host sends one packed buffer. All hosts must have the same number of processes, with consecutive
            ranks in `group`. Default: ``None`` .
        wire_dtype (str): The dtype in which the values of compressed tensors are sent, "float32" or "float16"; the
            rounding error of a value stays in :math:`r`. Default: ``"float32"`` .
        {common}
        {average_decay}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `momentum` is not a number, `sparsity` is not a list or tuple of numbers, or `use_nesterov` is not
            a bool.
        TypeError: If `rampup_begin_step`, `rampup_step`, `num_trainers` or `min_compress_numel` is not an int, or
            `decay_type`, `group`, `local_group` or `wire_dtype` not a string.
        ValueError: If `momentum` or an element of `sparsity` is not in the range [0.0, 1.0), or `sparsity` is empty.
        ValueError: If `rampup_begin_step` is negative, or `rampup_step` or `min_compress_numel` less than 1.
        ValueError: If `decay_type` is neither "l2" nor "l1", or `wire_dtype` neither "float32" nor "float16".
        ValueError: If `num_trainers` is not the number of processes, or `group` or `local_group` is given before
            communication is initialized, or the parallel mode of several processes is not "stand_alone".
        ValueError: If hosts have different numbers of processes, or their ranks in `group` are not consecutive.
        ValueError: If `group` has more than 4,096 processes.
        RuntimeError: If the residuals belong to another worker, or the workers are at different steps or were built
            with different arguments; nothing is changed.
        ValueError: If a parameter has more than 2,147,483,648 elements.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import DGCMomentum
        >>> net = nn.SequentialCell(nn.Dense(64, 256), nn.ReLU(), nn.Dense(256, 10))
        >>> sparsity = [0.75, 0.9375, 0.984375, 0.996, 0.999]
        >>> optimizer = DGCMomentum(net.trainable_params(), 0.1, 0.9, 1252, rampup_step=1000, sparsity=sparsity)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    rules: tuple[Rule, ...] = (Rule("dgc_momentum", ("dgc_u", "dgc_r"), is_elementwise=True, takes_low_states=False),)
    # Gradients are compressed from the first step, as they are for most of a long run.
    required: ClassVar[dict[str, Any]] = {"momentum": 0.9, "rampup_begin_step": 0}
    # The first steps are not compressed; later steps are, also for small tensors.
    trials: tuple[dict[str, Any], ...] = ({"momentum": 0.9, "rampup_begin_step": 3, "min_compress_numel": 100},)
    counters: tuple[str, ...] = (*CompressedStep.counters, "dgc_worker")

    momentum: float
    use_nesterov: bool
    decay_type: str

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate,
        momentum: float,
        rampup_begin_step: int,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        use_nesterov: bool = False,
        num_trainers: int | None = None,
        weight_decay: WeightDecay = 0.0,
        decay_type: str = "l2",
        grad_clip_norm: float | None = None,
        min_compress_numel: int = 16384,
        loss_scale: float = 1.0,
        group: str | Workers | None = None,
        local_group: str | None = None,
        wire_dtype: str = "float32",
        **shared: Unpack[CommonAndAverage],
    ):
        name = type(self).__name__
        check_momentum(name, "momentum", momentum)
        check_count(name, "rampup_begin_step", rampup_begin_step)
        check_count(name, "rampup_step", rampup_step, 1)
        check_count(name, "min_compress_numel", min_compress_numel, 1)
        if not isinstance(sparsity, (list, tuple)) or not all(is_number(part) for part in sparsity):
            fail(TypeError, name, "sparsity", "a list or tuple of numbers", sparsity)
        if not sparsity or not all(0.0 <= part < 1.0 for part in sparsity):
            fail(ValueError, name, "sparsity", "one or more numbers in the range [0.0, 1.0)", sparsity)
        check_type(name, "use_nesterov", use_nesterov, bool)
        if num_trainers is not None:
            check_count(name, "num_trainers", num_trainers, 1)
        check_choice(name, "decay_type", decay_type, ("l2", "l1"))
        check_choice(name, "wire_dtype", wire_dtype, WIRE_DTYPES)
        workers = group if isinstance(group, Workers) else Workers(name, group, local_group)
        workers.check_trainers(name, num_trainers)
        compression = Compression(rampup_begin_step, rampup_step, tuple(sparsity), min_compress_numel, wire_dtype)
        flags = DgcMomentumFlag.NESTEROV * use_nesterov + DgcMomentumFlag.L1 * (decay_type == "l1")
        flags += DgcMomentumFlag.HALF_VALUES * (wire_dtype == "float16")
        rule = self.rules[0]._replace(constants=(float(momentum), float(workers.count)), flags=flags)
        self.momentum, self.use_nesterov, self.decay_type = float(momentum), use_nesterov, decay_type
        super().__init__(
            params,
            learning_rate,
            weight_decay,
            rule,
            workers,
            compression,
            grad_clip_norm=grad_clip_norm,
            loss_scale=loss_scale,
            **shared,
        )

    def decayed(self, gradient: Tensor, weight: Tensor, weight_decay: Tensor) -> Tensor:
        """Return the local gradient plus the decay."""
        return summed(gradient, weight_decay * (ops.sign(weight) if self.decay_type == "l1" else weight))

    def moved(self, gradient: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the momentum update."""
        velocity = summed(self.momentum * velocity, gradient)
        return velocity, summed(gradient, self.momentum * velocity) if self.use_nesterov else velocity
