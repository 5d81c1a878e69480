"""Weight decay schedules, and learning rate schedules that rise, stay constant and fall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .arguments.checks import MOST, check_choice, check_count, check_not_negative, check_positive, check_type, fail
from .arguments.docstrings import documented

if TYPE_CHECKING:
    from .arguments.checks import GlobalStep


def _constant(value):
    """Make a constant of the dtype that schedules compute in.

    A Python number does not work: MindSpore rounds it to float32, even in a sum with a float64 tensor. A Tensor takes
    no int of more than 64 bits.
    """
    return Tensor(float(value), mstype.float32 if ms.get_context("device_target") == "Ascend" else mstype.float64)


def _whole(global_step):
    """Return the step as a 0-dimensional int32 tensor: differences and quotients of integers are exact."""
    return F.cast(global_step, mstype.int32).reshape(())


def _ratio(count, total):
    """Return count / total: an int32 tensor divided by a constant or another int32 tensor."""
    return F.cast(count, total.dtype) / total


def _check_decay(schedule, decay_steps, **decays):
    for name, value in decays.items():
        check_not_negative(schedule, name, value)
    check_count(schedule, "decay_steps", decay_steps, 1)


@documented
class WeightDecaySchedule(nn.Cell):
    """Base class of weight decay schedules; a subclass defines `construct`.

    Pass a schedule as the `weight_decay` of an optimizer or of a group; the optimizer calls it each step. It has no
    state: it depends only on the optimizer's step count, which a checkpoint keeps.

    Inputs:
        {global_step}

    Outputs:
        Tensor of 1 element, of floating-point dtype: the weight decay, 0 or greater.

    Raises:
        NotImplementedError: If a subclass that does not define `construct` is called.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_optim import AdamW, WeightDecaySchedule
        >>> class InverseWeightDecay(WeightDecaySchedule):
        ...     def construct(self, global_step):
        ...         return 0.1 / (1 + global_step)
        >>> net = nn.Dense(4, 3)
        >>> optimizer = AdamW(net.trainable_params(), weight_decay=InverseWeightDecay())
    """

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the weight decay of a step."""
        raise NotImplementedError(f"For '{type(self).__name__}', 'construct' must be defined.")


@documented
class ConstantWeightDecay(WeightDecaySchedule):
    r"""A constant weight decay.

    .. math::
        \lambda_t = \lambda

    An optimizer also takes the number itself; this class is for code that requires a Cell.

    Args:
        weight_decay (Union[float, int]): The weight decay, 0 or greater.

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        TypeError: If `weight_decay` is not a number.
        ValueError: If `weight_decay` is less than 0 or not finite.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import ConstantWeightDecay
        >>> print(ConstantWeightDecay(0.25)(1000))
        0.25
    """

    weight_decay: Tensor

    def __init__(self, weight_decay: float):
        super().__init__()
        check_not_negative(type(self).__name__, "weight_decay", weight_decay)
        self.weight_decay = Tensor(float(weight_decay), mstype.float32)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay, which does not depend on the step."""
        return self.weight_decay


@documented
class PolynomialWeightDecay(WeightDecaySchedule):
    r"""A weight decay that changes from one value to another as a polynomial, like `mindspore.nn.PolynomialDecayLR`.

    .. math::
        \lambda_t = \lambda_{end} + (\lambda - \lambda_{end}) \left(1 - \frac{\min(t, T)}{T}\right)^{power}

    With `update_decay_steps`, :math:`T \max(\lceil t / T \rceil, 1)` replaces :math:`T`: after each `decay_steps` steps
    the decay rises again, each time to a lower value.

    Args:
        {first_weight_decay}
        {end_weight_decay}
        {decay_steps}
        power (float): The exponent, greater than 0; 1 makes the decay linear.
        update_decay_steps (bool): Whether to restart over a longer period each time the end is reached. Default:
            ``False`` .

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}
        TypeError: If `power` is not a number, or `update_decay_steps` is not a bool.
        ValueError: If `power` is not greater than 0.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import PolynomialWeightDecay
        >>> schedule = PolynomialWeightDecay(0.5, 0.25, decay_steps=4, power=2.0)
        >>> print([float(schedule(step)) for step in (0, 2, 4, 5)])
        [0.5, 0.3125, 0.25, 0.25]
    """

    decay_steps: int
    update_decay_steps: bool
    end: Tensor
    change: Tensor
    steps: Tensor
    power: Tensor

    def __init__(
        self,
        weight_decay: float,
        end_weight_decay: float,
        decay_steps: int,
        power: float,
        update_decay_steps: bool = False,
    ):
        super().__init__()
        name = type(self).__name__
        _check_decay(name, decay_steps, weight_decay=weight_decay, end_weight_decay=end_weight_decay)
        check_positive(name, "power", power)
        check_type(name, "update_decay_steps", update_decay_steps, bool)
        self.decay_steps, self.update_decay_steps = int(decay_steps), update_decay_steps
        self.end, self.change = _constant(end_weight_decay), _constant(weight_decay - end_weight_decay)
        self.steps, self.power = _constant(decay_steps), _constant(power)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        step = _whole(global_step)
        if self.update_decay_steps:
            past = F.maximum(step - 1, 0) // self.decay_steps
            left = self.decay_steps - (step - past * self.decay_steps)
            remaining = _ratio(left, self.steps) / F.cast(past + 1, self.steps.dtype)
        else:
            remaining = _ratio(F.maximum(self.decay_steps - step, 0), self.steps)
        return F.cast(self.end + self.change * ops.pow(remaining, self.power), mstype.float32)


@documented
class LinearWeightDecay(PolynomialWeightDecay):
    r"""A weight decay that changes linearly from one value to another, which may be greater or smaller.

    .. math::
        \lambda_t = \lambda + (\lambda_{end} - \lambda) \frac{\min(t, T)}{T}

    Args:
        {first_weight_decay}
        {end_weight_decay}
        {decay_steps}

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, LinearWeightDecay
        >>> schedule = LinearWeightDecay(0.5, 0.0, decay_steps=4)
        >>> print([float(schedule(step)) for step in (0, 1, 4, 5)])
        [0.5, 0.375, 0.0, 0.0]
        >>> net = nn.Dense(4, 3)
        >>> optimizer = AdamW(net.trainable_params(), weight_decay=schedule)
    """

    def __init__(self, weight_decay: float, end_weight_decay: float, decay_steps: int):
        super().__init__(weight_decay, end_weight_decay, decay_steps, 1.0)


@documented
class CosineWeightDecay(WeightDecaySchedule):
    r"""A weight decay that falls as a half cosine, like `mindspore.nn.CosineDecayLR`.

    .. math::
        \lambda_t = \lambda_{min} + \frac{\lambda_{max} - \lambda_{min}}{2}
        \left(1 + \cos\left(\pi \frac{\min(t, T)}{T}\right)\right)

    Args:
        min_weight_decay (Union[float, int]): The weight decay from step `decay_steps` on, 0 or greater.
        max_weight_decay (Union[float, int]): The weight decay of step 0, greater than `min_weight_decay`.
        {decay_steps}

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}
        ValueError: If `max_weight_decay` is not greater than `min_weight_decay`.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import CosineWeightDecay
        >>> schedule = CosineWeightDecay(0.0, 0.5, decay_steps=4)
        >>> print([float(schedule(step)) for step in (0, 2, 4, 5)])
        [0.5, 0.25, 0.0, 0.0]
    """

    decay_steps: int
    end: Tensor
    change: Tensor
    steps: Tensor
    quarter: Tensor

    def __init__(self, min_weight_decay: float, max_weight_decay: float, decay_steps: int):
        super().__init__()
        name = type(self).__name__
        _check_decay(name, decay_steps, min_weight_decay=min_weight_decay, max_weight_decay=max_weight_decay)
        if max_weight_decay <= min_weight_decay:
            expected = f"greater than 'min_weight_decay', {min_weight_decay!r}"
            fail(ValueError, name, "max_weight_decay", expected, max_weight_decay)
        self.decay_steps = int(decay_steps)
        self.end, self.change = _constant(min_weight_decay), _constant(max_weight_decay - min_weight_decay)
        self.steps, self.quarter = _constant(decay_steps), _constant(math.pi / 2)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        remaining = _ratio(F.maximum(self.decay_steps - _whole(global_step), 0), self.steps)
        # (1 + cos(pi (1 - r))) / 2 = sin(pi r / 2)^2, which avoids a difference that loses digits near the end.
        return F.cast(self.end + self.change * F.square(ops.sin(self.quarter * remaining)), mstype.float32)


@documented
class ExponentialWeightDecay(WeightDecaySchedule):
    r"""A weight decay that changes exponentially, like `mindspore.nn.ExponentialDecayLR`.

    .. math::
        \lambda_t = \lambda \, decay\_rate^{\, t / T}

    With `is_stair`, :math:`\lfloor t / T \rfloor` replaces :math:`t / T`. A decay that grows stays finite in float32.

    Args:
        {first_weight_decay}
        decay_rate (float): The factor over `decay_steps` steps, greater than 0.
        decay_steps (int): The number of steps in which the decay is multiplied by `decay_rate`, 1 or greater.
        is_stair (bool): Whether the decay changes only every `decay_steps` steps. Default: ``False`` .

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}
        TypeError: If `decay_rate` is not a number, or `is_stair` is not a bool.
        ValueError: If `decay_rate` is not greater than 0.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import ExponentialWeightDecay
        >>> schedule = ExponentialWeightDecay(0.5, decay_rate=0.5, decay_steps=2, is_stair=True)
        >>> print([float(schedule(step)) for step in (0, 1, 2, 4)])
        [0.5, 0.5, 0.25, 0.125]
    """

    decay_steps: int
    is_stair: bool
    first: Tensor
    log_rate: Tensor
    most: Tensor
    most_log: Tensor
    steps: Tensor

    def __init__(self, weight_decay: float, decay_rate: float, decay_steps: int, is_stair: bool = False):
        super().__init__()
        name = type(self).__name__
        _check_decay(name, decay_steps, weight_decay=weight_decay)
        check_positive(name, "decay_rate", decay_rate)
        check_type(name, "is_stair", is_stair, bool)
        self.decay_steps, self.is_stair = int(decay_steps), is_stair
        self.first, self.log_rate = _constant(weight_decay), _constant(math.log(decay_rate))
        self.most, self.most_log = _constant(MOST), _constant(math.floor(math.log(MOST)))
        self.steps = _constant(decay_steps)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        step = _whole(global_step)
        periods = F.cast(step // self.decay_steps, self.steps.dtype) if self.is_stair else _ratio(step, self.steps)
        grown = self.first * ops.exp(F.minimum(self.log_rate * periods, self.most_log))
        return F.cast(F.minimum(grown, self.most), mstype.float32)


@documented
class PiecewiseConstantWeightDecay(WeightDecaySchedule):
    r"""A weight decay that changes at given steps, like `mindspore.nn.piecewise_constant_lr`.

    With milestones :math:`M_1, \ldots, M_N`, :math:`M_0 = 0` and weight decays :math:`x_1, \ldots, x_N`:

    .. math::
        \lambda_t = x_i \quad \text{for } M_{i-1} \le t < M_i

    The last weight decay also applies from :math:`M_N` on, where MindSpore's list of learning rates ends.

    Args:
        milestone (Union[list[int], tuple[int]]): For each weight decay, the first step after it, 1 or greater, in
            order.
        weight_decays (Union[list[float], tuple[float]]): The weight decays, 0 or greater, one for each milestone.

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}
        TypeError: If `milestone` or `weight_decays` is neither a list nor a tuple.
        ValueError: If `milestone` and `weight_decays` are empty or differ in length, or `milestone` is not in order.

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import PiecewiseConstantWeightDecay
        >>> schedule = PiecewiseConstantWeightDecay([2, 5], [0.5, 0.25])
        >>> print([float(schedule(step)) for step in (0, 1, 2, 4, 5)])
        [0.5, 0.5, 0.25, 0.25, 0.25]
    """

    starts: Tensor
    values: Tensor

    def __init__(self, milestone: Sequence[int], weight_decays: Sequence[float]):
        super().__init__()
        name = type(self).__name__
        for argument, value in (("milestone", milestone), ("weight_decays", weight_decays)):
            if not isinstance(value, (list, tuple)):
                fail(TypeError, name, argument, "a list or tuple", value)
        if not milestone:
            fail(ValueError, name, "milestone", "a list or tuple of at least one int", milestone)
        if len(weight_decays) != len(milestone):
            expected = f"of the length of 'milestone', {len(milestone)}"
            fail(ValueError, name, "weight_decays", expected, weight_decays)
        for i, (step, value) in enumerate(zip(milestone, weight_decays)):
            check_count(name, f"milestone[{i}]", step, 1)
            check_not_negative(name, f"weight_decays[{i}]", value)
            if i and step < milestone[i - 1]:
                fail(ValueError, name, f"milestone[{i}]", f"at least milestone[{i - 1}], {milestone[i - 1]}", step)
        self.starts = Tensor([0, *milestone[:-1]], mstype.int32)
        self.values = Tensor([float(value) for value in weight_decays], mstype.float32)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        begun = F.cast(_whole(global_step) >= self.starts, mstype.int32)
        return self.values[begun.sum() - 1]


@documented
class WarmUpWeightDecay(WeightDecaySchedule):
    r"""A weight decay that rises linearly from 0, like `mindspore.nn.WarmUpLR`.

    .. math::
        \lambda_t = \lambda \frac{\min(t, T)}{T}

    Args:
        weight_decay (Union[float, int]): The weight decay from step `warmup_steps` on, 0 or greater.
        warmup_steps (int): The number of steps :math:`T` to rise over, 1 or greater.

    Inputs:
        {global_step}

    Outputs:
        {scheduled_decay}

    Raises:
        {decay_raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> from ms_optim import WarmUpWeightDecay
        >>> schedule = WarmUpWeightDecay(0.5, warmup_steps=4)
        >>> print([float(schedule(step)) for step in (0, 1, 4, 5)])
        [0.0, 0.125, 0.5, 0.5]
    """

    warmup_steps: int
    peak: Tensor
    steps: Tensor

    def __init__(self, weight_decay: float, warmup_steps: int):
        super().__init__()
        name = type(self).__name__
        check_not_negative(name, "weight_decay", weight_decay)
        check_count(name, "warmup_steps", warmup_steps, 1)
        self.warmup_steps = int(warmup_steps)
        self.peak, self.steps = _constant(weight_decay), _constant(warmup_steps)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        risen = _ratio(F.minimum(_whole(global_step), self.warmup_steps), self.steps)
        return F.cast(self.peak * risen, mstype.float32)


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
        self.rise, self.power = _constant(self.rising), _constant(power)

    def _risen(self, step):
        """Return the part of the peak that the warm-up has reached: 1 after it."""
        return _ratio(F.minimum(step, self.rising - self.ahead) + self.ahead, self.rise)


@documented
class WarmUpHoldDecayLR(_WarmUp):
    r"""A learning rate that rises linearly, stays constant, and falls: a trapezoid, or warm-up, stable, decay.

    With the peak :math:`\eta`, the end :math:`\eta_{end}`, warm-up :math:`T_w`, hold :math:`T_h` and total :math:`T`:

    .. math::
        \eta_t = \begin{cases}
        \eta \, t / T_w & \text{if } t < T_w \\
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

    Step 0 has the rate 0, as with `mindspore.nn.WarmUpLR`, unless `warmup_steps` is 0.

    Args:
        learning_rate (Union[float, int]): The learning rate at its peak :math:`\eta`, greater than 0.
        warmup_steps (int): The number of steps to rise over, 0 or greater.
        hold_steps (int): The number of steps to stay at the peak, 0 or greater.
        total_steps (int): The number of steps after which the end is reached, greater than `warmup_steps` and
            `hold_steps` together.
        end_learning_rate (Union[float, int]): The learning rate from step `total_steps` on, 0 or greater.
            Default: ``0.0`` .
        power (Union[float, int]): The exponent of the fall, greater than 0, of the decay "polynomial" only; 1 makes it
            linear. Default: ``1.0`` .
        decay (str): How the rate falls: "polynomial", "1-sqrt" or "cosine". Default: ``"polynomial"`` .

    Inputs:
        {global_step}

    Outputs:
        {scheduled_rate}

    Raises:
        {rate_raises}
        TypeError: If `end_learning_rate` is not a number, `hold_steps` is not an int, or `decay` is not a str.
        ValueError: If `end_learning_rate` or `hold_steps` is less than 0, or `decay` is not one of its choices.
        ValueError: If `total_steps` is not greater than `warmup_steps` and `hold_steps` together.
        ValueError: If `power` is not 1 with the decay "1-sqrt" or "cosine".

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
    """

    falling: int
    decay: str
    fall: Tensor
    right_angle: Tensor
    end: Tensor
    change: Tensor

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        hold_steps: int,
        total_steps: int,
        end_learning_rate: float = 0.0,
        power: float = 1.0,
        decay: str = "polynomial",
    ):
        super().__init__(learning_rate, warmup_steps, total_steps, power)
        name = type(self).__name__
        check_count(name, "hold_steps", hold_steps, 0)
        check_not_negative(name, "end_learning_rate", end_learning_rate)
        check_choice(name, "decay", decay, ("polynomial", "1-sqrt", "cosine"))
        falling = total_steps - warmup_steps - hold_steps
        if falling <= 0:
            expected = f"greater than 'warmup_steps' and 'hold_steps' together, {warmup_steps + hold_steps}"
            fail(ValueError, name, "total_steps", expected, total_steps)
        if decay != "polynomial" and power != 1:
            fail(ValueError, name, "power", f"1 with the decay '{decay}', which has no other exponent", power)
        self.falling, self.decay = int(falling), decay
        self.fall, self.right_angle = _constant(self.falling), _constant(math.pi / 2)
        self.end, self.change = _constant(end_learning_rate), _constant(learning_rate - end_learning_rate)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the learning rate of a step."""
        step = _whole(global_step)
        # Each factor is 1 outside its phase, so that no branch is needed.
        to_go = F.minimum(F.maximum(self.total_steps - step, 0), self.falling)
        remaining = _ratio(to_go, self.fall)
        if self.decay == "1-sqrt":
            # 1 - sqrt(x) as (1 - x) / (1 + sqrt(x)), which keeps its digits near the end.
            fallen = remaining / (1 + ops.sqrt(_ratio(self.falling - to_go, self.fall)))
        elif self.decay == "cosine":
            # (1 + cos(pi x)) / 2 as a square, which keeps its digits near the end.
            fallen = ops.square(ops.sin(self.right_angle * remaining))
        else:
            fallen = ops.pow(remaining, self.power)
        return F.cast(self._risen(step) * (self.end + self.change * fallen), mstype.float32)


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
        self.peak, self.coefficient = _constant(learning_rate), _constant(coefficient)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the learning rate of a step."""
        step = _whole(global_step)
        to_go = F.cast(F.maximum(self.total_steps - step, 0), self.power.dtype)
        falling = self.coefficient * ops.pow(to_go, self.power)
        return F.cast(F.minimum(self.peak * self._risen(step), falling), mstype.float32)
