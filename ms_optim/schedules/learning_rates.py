"""Learning rates of a step: they rise, stay constant and fall."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_choice, check_count, check_not_negative, check_positive, fail
from ..arguments.docstrings import documented
from .arithmetic import constant, ratio, whole

if TYPE_CHECKING:
    from ..arguments.checks import GlobalStep


class _WarmUp(nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate that rises linearly; a subclass says how it falls."""

    ahead: int
    rising: int
    total_steps: int
    rise: Tensor
    power: Tensor

    def __init__(self, learning_rate: float, warmup_steps: int, total_steps: int, power: float):
        super().__init__()
        name = type(self).__name__
        check_positive(name, "learning_rate", learning_rate)
        check_count(name, "warmup_steps", warmup_steps, 0)
        check_count(name, "total_steps", total_steps, 1)
        check_positive(name, "power", power)
        # Without warm-up, step 0 has the rate of the step after a warm-up of one step.
        self.ahead, self.rising = int(warmup_steps == 0), max(int(warmup_steps), 1)
        self.total_steps = int(total_steps)
        self.rise, self.power = constant(self.rising), constant(power)

    def _risen(self, step):
        """Return the part of the peak that the warm-up has reached: 1 after it."""
        return ratio(F.minimum(step, self.rising - self.ahead) + self.ahead, self.rise)


@documented
class WarmUpHoldDecayLR(_WarmUp):
    r"""A learning rate that rises linearly, stays constant, and falls: a trapezoid, or warm-up, stable, decay.

    With the start :math:`\eta_{start}`, the peak :math:`\eta`, the end :math:`\eta_{end}`, warm-up :math:`T_w`, hold
    :math:`T_h` and total :math:`T`:

    .. math::
        \eta_t = \begin{cases}
        \eta_{start} + (\eta - \eta_{start}) \, t / T_w & \text{if } t < T_w \\
        \eta & \text{if } T_w \le t < T_w + T_h \\
        \eta_{end} + (\eta - \eta_{end}) \, f\left(\frac{t - T_w - T_h}{T - T_w - T_h}\right)
        & \text{if } T_w + T_h \le t < T \\
        \eta_{end} & \text{if } T \le t
        \end{cases}

    where :math:`f(x)` depends on `decay`:

    - "polynomial": :math:`(1 - x)^{power}`. LANS is trained with it: Zheng et al., `Accelerated Large Batch
      Optimization of BERT Pretraining in 54 minutes <https://arxiv.org/abs/2006.13484>`_ (2020), with
      :math:`\eta_{end} = 0` and a power of 1. The paper states warm-up and hold as fractions of all steps: with its
      ratios, `warmup_steps` is ``round(ratio_warmup * total_steps)`` and `hold_steps` is
      ``round(ratio_const * total_steps)`` .
    - "1-sqrt": :math:`1 - \sqrt{x}`. Hägele et al., `Scaling Laws and Compute-Optimal Training Beyond Fixed Training
      Durations <https://arxiv.org/abs/2405.18392>`_ (2024), who let it take the last 10 to 20 % of the steps.
    - "cosine": :math:`\frac{1}{2} (1 + \cos(\pi x))`. Loshchilov and Hutter, `SGDR: Stochastic Gradient Descent with
      Warm Restarts <https://arxiv.org/abs/1608.03983>`_ (2017), equation 5, without restarts.
    - "constant": 1. The rate never falls.

    Step 0 has the rate :math:`\eta_{start}`, by default 0 as with `mindspore.nn.WarmUpLR`, unless `warmup_steps` is 0.

    Args:
        learning_rate (Union[float, int]): The learning rate at its peak :math:`\eta`, greater than 0.
        warmup_steps (int): The number of steps to rise over, 0 or greater.
        hold_steps (int): The number of steps to stay at the peak, 0 or greater. Default: ``0`` .
        total_steps (Union[int, None]): The number of steps after which the end is reached, greater than `warmup_steps`
            and `hold_steps` together. The decay "constant" has no end: it needs no number, and uses none.
            Default: ``None`` .
        end_learning_rate (Union[float, int]): The learning rate from step `total_steps` on, 0 or greater.
            Default: ``0.0`` .
        power (Union[float, int]): The exponent of the fall, greater than 0, of the decay "polynomial" only; 1 makes it
            linear. Default: ``1.0`` .
        decay (str): How the rate falls: "polynomial", "1-sqrt", "cosine" or "constant". Default: ``"polynomial"`` .
        start_learning_rate (Union[float, int]): The learning rate of step 0, from 0 to `learning_rate`; 0 without
            warm-up. Default: ``0.0`` .

    Inputs:
        {global_step}

    Outputs:
        {scheduled_rate}

    Raises:
        {rate_raises}
        TypeError: If `end_learning_rate` or `start_learning_rate` is not a number, `hold_steps` is not an int, or
            `decay` is not a str.
        ValueError: If `end_learning_rate` or `hold_steps` is less than 0, or `decay` is not one of its choices.
        ValueError: If `start_learning_rate` is less than 0, greater than `learning_rate`, or not 0 without warm-up.
        ValueError: If `total_steps` is not greater than `warmup_steps` and `hold_steps` together.
        ValueError: If `power` is not 1 with a decay other than "polynomial".
        ValueError: If `end_learning_rate` is not 0 with the decay "constant".

    Supported Platforms:
        {platforms}

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import Lamb, WarmUpHoldDecayLR
        >>> schedule = WarmUpHoldDecayLR(0.5, warmup_steps=2, hold_steps=2, total_steps=8)
        >>> print([float(schedule(step)) for step in (0, 1, 2, 4, 6, 8, 9)])
        [0.0, 0.25, 0.5, 0.5, 0.25, 0.0, 0.0]
        >>> net = nn.Dense(4, 3)
        >>> optimizer = Lamb(net.trainable_params(), learning_rate=schedule)
        >>> cooldown = WarmUpHoldDecayLR(0.5, warmup_steps=2, hold_steps=2, total_steps=8, decay="1-sqrt")
        >>> print([float(cooldown(step)) for step in (4, 5, 8)])
        [0.5, 0.25, 0.0]
        >>> constant = WarmUpHoldDecayLR(0.5, warmup_steps=2, decay="constant", start_learning_rate=0.25)
        >>> print([float(constant(step)) for step in (0, 1, 2, 9)])
        [0.25, 0.375, 0.5, 0.5]
    """

    falling: int
    decay: str
    start: Tensor
    ascent: Tensor
    fall: Tensor
    right_angle: Tensor
    end: Tensor
    change: Tensor

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        hold_steps: int = 0,
        total_steps: int | None = None,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        decay: str = "polynomial",
        start_learning_rate: float = 0.0,
    ):
        name = type(self).__name__
        check_choice(name, "decay", decay, ("polynomial", "1-sqrt", "cosine", "constant"))
        is_constant = decay == "constant"
        total: Any = 1 if is_constant and total_steps is None else total_steps
        super().__init__(learning_rate, warmup_steps, total, power)
        check_count(name, "hold_steps", hold_steps, 0)
        check_not_negative(name, "end_learning_rate", end_learning_rate)
        check_not_negative(name, "start_learning_rate", start_learning_rate)
        falling = 1 if is_constant else self.total_steps - warmup_steps - hold_steps
        if falling <= 0:
            expected = f"greater than 'warmup_steps' and 'hold_steps' together, {warmup_steps + hold_steps}"
            fail(ValueError, name, "total_steps", expected, total_steps)
        if decay != "polynomial" and power != 1:
            fail(ValueError, name, "power", f"1 with the decay '{decay}', which has no other exponent", power)
        if is_constant and end_learning_rate != 0:
            fail(ValueError, name, "end_learning_rate", "0 with the decay 'constant'", end_learning_rate)
        if warmup_steps == 0 and start_learning_rate != 0:
            fail(ValueError, name, "start_learning_rate", "0 without warm-up", start_learning_rate)
        if start_learning_rate > learning_rate:
            expected = f"at most 'learning_rate', {learning_rate!r}"
            fail(ValueError, name, "start_learning_rate", expected, start_learning_rate)
        start, end = start_learning_rate / learning_rate, learning_rate if is_constant else end_learning_rate
        self.start, self.ascent = constant(start), constant(1 - start)
        self.falling, self.decay = int(falling), decay
        self.fall, self.right_angle = constant(self.falling), constant(math.pi / 2)
        self.end, self.change = constant(end), constant(learning_rate - end)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the learning rate of a step."""
        step = whole(global_step)
        # Each factor is 1 outside its phase, so that no branch is needed.
        to_go = F.minimum(F.maximum(self.total_steps - step, 0), self.falling)
        remaining = ratio(to_go, self.fall)
        if self.decay == "1-sqrt":
            # 1 - sqrt(x) as (1 - x) / (1 + sqrt(x)), which keeps its digits near the end.
            fallen = remaining / (1 + ops.sqrt(ratio(self.falling - to_go, self.fall)))
        elif self.decay == "cosine":
            # (1 + cos(pi x)) / 2 as a square, which keeps its digits near the end.
            fallen = ops.square(ops.sin(self.right_angle * remaining))
        else:
            fallen = ops.pow(remaining, self.power)
        risen = self.start + self.ascent * self._risen(step)
        return F.cast(risen * (self.end + self.change * fallen), mstype.float32)


@documented
class PowerCoolLR(_WarmUp):
    r"""A learning rate that is constant until it meets a power of the steps to go: PowerCool.

    With the peak :math:`\eta`, the coefficient :math:`c`, warm-up :math:`T_w` and total :math:`T`:

    .. math::
        \eta_t = \min\left(\eta \min(t / T_w, 1), \; c \, (T - t)^{power}\right), \quad
        \eta_t = 0 \text{ if } T \le t

    The fall begins :math:`(\eta / c)^{1 / power}` steps before :math:`T`. Rates with the same :math:`c` fall together,
    whatever their peaks. If the fall is to begin at a given step, :class:`ms_optim.WarmUpHoldDecayLR` with the same
    power is the same schedule.

    Yash Pande, `PowerCool <https://github.com/KellerJordan/modded-nanogpt/pull/291>`_ (2026), in the optimization track
    of Modded-NanoGPT. Its trainings stop before :math:`T`, while the rate is not yet 0. The warm-up is an addition.

    Args:
        learning_rate (Union[float, int]): The learning rate at its peak :math:`\eta`, greater than 0.
        coefficient (Union[float, int]): The factor :math:`c`, greater than 0.
        total_steps (int): The number of steps :math:`T` after which the rate is 0, 1 or greater.
        warmup_steps (int): The number of steps to rise over, 0 or greater. With warm-up, step 0 has the rate 0.
            Default: ``0`` .
        power (Union[float, int]): The exponent of the fall, greater than 0. Default: ``1.2`` .

    Inputs:
        {global_step}

    Outputs:
        {scheduled_rate}

    Raises:
        {rate_raises}
        TypeError: If `coefficient` is not a number.
        ValueError: If `coefficient` is not greater than 0.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import PowerCoolLR
        >>> matrices = PowerCoolLR(0.5, coefficient=0.0625, total_steps=8, power=2)
        >>> print([float(matrices(step)) for step in (0, 5, 6, 7, 8)])
        [0.5, 0.5, 0.25, 0.0625, 0.0]
        >>> others = PowerCoolLR(0.125, coefficient=0.0625, total_steps=8, power=2)
        >>> print([float(others(step)) for step in (0, 5, 6, 7, 8)])
        [0.125, 0.125, 0.125, 0.0625, 0.0]
    """

    peak: Tensor
    coefficient: Tensor

    def __init__(
        self,
        learning_rate: float,
        coefficient: float,
        total_steps: int,
        warmup_steps: int = 0,
        power: float = 1.2,
    ):
        super().__init__(learning_rate, warmup_steps, total_steps, power)
        check_positive(type(self).__name__, "coefficient", coefficient)
        self.peak, self.coefficient = constant(learning_rate), constant(coefficient)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the learning rate of a step."""
        step = whole(global_step)
        to_go = F.cast(F.maximum(self.total_steps - step, 0), self.power.dtype)
        falling = self.coefficient * ops.pow(to_go, self.power)
        return F.cast(F.minimum(self.peak * self._risen(step), falling), mstype.float32)
