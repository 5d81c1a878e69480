"""Schedule-Free AdamW: AdamW that averages its iterates instead of using a learning rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_at_most, check_betas, check_count
from ..arguments.docstrings import documented
from ..base.optimizer import Rule
from ..rules.arithmetic import normal, quotient, summed
from .adam_family import AdamFamily

if TYPE_CHECKING:
    from mindspore import Tensor
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import SharedButAverage

# Of r and weight_lr_power: with it, the sum of 2**31 weights of steps is finite in float64 up to learning rates of 1e9.
MOST_POWER = 16.0


@documented
class ScheduleFreeAdamW(AdamFamily):
    r"""AdamW without a learning rate schedule: an average of the iterates replaces the decay of the learning rate.

    Defazio et al., `The Road Less Scheduled <https://arxiv.org/abs/2405.15682>`_ (2024), Algorithm 1, with gradient
    :math:`g_t`, taken at :math:`y_t`, and learning rate :math:`\eta_t`, for :math:`W` warm-up steps:

    .. math::
        \begin{aligned}
        \gamma_t &= \eta_t \min(1, t / W), \qquad
        p_t = t^r \left( \max_{s \le t} \gamma_s \right)^q, \qquad c_t = p_t / \sum_{s \le t} p_s \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        n_t &= g_t / \left( \sqrt{v_t / (1 - \beta_2^t)} + \epsilon \right) + \lambda y_t \\
        y_{t+1} &= (1 - c_t)\, y_t + c_t z_t + \gamma_t \left( \beta_1 (1 - c_t) - 1 \right) n_t \\
        z_{t+1} &= z_t - \gamma_t n_t
        \end{aligned}

    During training the parameters hold :math:`y`. Evaluate and use the average :math:`x = y + (1 - 1/\beta_1)(z - y)`:
    :meth:`averaged`, :meth:`eval` and the callback :class:`ms_optim.AveragedWeights` put it into the parameters. If you
    evaluate :math:`y` by mistake, the only sign is a higher loss.

    It keeps two states: `schedule_free_z`, which starts as the weights and is float32 for every `state_dtype`, and
    `schedule_free_v`. Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate|2.5e-3}
        betas (Union[list[float], tuple[float]]): The fraction of the average in :math:`y`, and the decay rate of the
            second moment, each in the range (0.0, 1.0). Default: ``(0.9, 0.999)`` .
        eps (float): Added to the denominator, greater than 0 and not denormal in float32. Default: ``1e-8`` .
        {weight_decay}
        warmup_steps (int): The number of steps :math:`W` over which the rate rises, 0 or greater. Default: ``0`` .
        r (Union[float, int]): The power of the step in its weight :math:`p_t`, from 0 to 16. Default: ``0.0`` .
        weight_lr_power (Union[float, int]): The power :math:`q` of the largest rate so far in this weight, from 0 to
            16. Default: ``2.0`` .
        {shared}
        {offload}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `betas` is not a list or tuple of two floats, `eps` is not a float, `warmup_steps` is not an int,
            or `r` or `weight_lr_power` is not a number.
        ValueError: If `eps` is less than or equal to 0, `warmup_steps` is less than 0, `r` or `weight_lr_power` is not
            in the range [0, 16], or an element of `betas` is not in the range (0.0, 1.0).
        RuntimeError: If a step is taken while the average is in the parameters.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import ScheduleFreeAdamW
        >>> net = nn.Dense(4, 3)
        >>> optimizer = ScheduleFreeAdamW(net.trainable_params(), learning_rate=2.5e-3, warmup_steps=100)
        >>> model = ms.Model(net, nn.MSELoss(), optimizer)
        >>> with optimizer.averaged():
        ...     for_use = net.weight.asnumpy().copy()
    """

    rules: tuple[Rule, ...] = (
        Rule(
            "schedule_free_adamw",
            ("schedule_free_z", "schedule_free_v"),
            is_elementwise=True,
            state_kinds=("exact", "unsigned"),
            starts_at_weights=True,
            weighs_steps=True,
        ),
    )
    # Each process would average only the iterates of its own parameters.
    _support_parallel_optimizer = False
    averages_iterates = True
    refuses: ClassVar[dict[str, str]] = {
        "decay": "has no cautious decay: its weights move along more than one direction",
        "weight_norm": "moves its weights along more than one direction",
        "average_decay": "averages the weights itself",
    }
    counters: tuple[str, ...] = (*AdamFamily.counters, "step_weights")

    warmup_steps: int
    r: float
    weight_lr_power: float

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 2.5e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: WeightDecay = 0.0,
        *,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        **shared: Unpack[SharedButAverage],
    ):
        name = type(self).__name__
        beta1, beta2 = check_betas(name, betas, 2)
        check_count(name, "warmup_steps", warmup_steps)
        self.warmup_steps, self.r = warmup_steps, check_at_most(name, "r", r, MOST_POWER)
        self.weight_lr_power = check_at_most(name, "weight_lr_power", weight_lr_power, MOST_POWER)
        rule = self.rules[0]._replace(constants=(float(warmup_steps), self.r, self.weight_lr_power))
        named = {"betas[0]": beta1, "betas[1]": beta2}
        super().__init__(params, learning_rate, weight_decay, rule, named, eps, shared)

    def scalars(self, t: Tensor) -> Scalars:
        """Return sqrt(1 - beta2^t)."""
        return (super().scalars(t)[1],)

    def weighed(self, t: Tensor, learning_rate: Tensor, before: Tensor) -> tuple[Tensors, Tensor]:
        """Return the rate gamma of a step, and the fraction c of z in the new weight."""
        rate = F.cast(learning_rate, before.dtype)
        t = F.cast(t, before.dtype)
        if self.warmup_steps > 0:
            rate = rate * ops.minimum(t / self.warmup_steps, ops.ones_like(t))
        largest = ops.maximum(before[:, 0], rate)
        weight = ops.pow(t, self.r) * ops.pow(largest, self.weight_lr_power)
        total = before[:, 1] + weight
        c = ops.where(total > 0, weight / ops.where(total > 0, total, ops.ones_like(total)), ops.zeros_like(total))
        along = rate * (1.0 - self.beta1 * (1.0 - c))
        rates = (F.cast(rate, mstype.float32), F.cast(along, mstype.float32), F.cast(c, mstype.float32))
        return rates, ops.stack((largest, total), 1)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute the directions: n, including the decay, and y - z."""
        z, v = states
        v = summed(self.beta2 * v, self._one_minus_beta2 * gradient * gradient)
        n = self.with_decay(quotient(gradient, quotient(ops.sqrt(v), scalars[0]) + self.eps), weight, weight_decay)
        return (n, normal(weight - z)), (z, v)

    def followed(self, learning_rate: Tensors, directions: Tensors, states: Tensors) -> Tensors:
        """Return the new states: z moves along n by gamma."""
        return normal(states[0] - normal(learning_rate[0] * directions[0])), states[1]

    def coefficients(
        self, learning_rate: Tensors, weight_decay: Tensor, weight_norm: Tensor, direction_norms: Tensors
    ) -> tuple[Tensors, Tensor]:
        """Return how far the weight moves along n, and towards z."""
        return (learning_rate[1], learning_rate[2]), ops.ones_like(learning_rate[0])

    def averaged_weight(self, weight: NDArray[np.float32], first_state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return x, the weight to use."""
        return weight + np.float32(1.0 - 1.0 / self.beta1) * (first_state - weight)
