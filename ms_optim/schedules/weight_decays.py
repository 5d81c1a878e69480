"""Weight decays of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import MOST, check_count, check_not_negative, check_positive, check_type, fail
from ..arguments.docstrings import documented
from .arithmetic import constant, ratio, whole

if TYPE_CHECKING:
    from ..arguments.checks import GlobalStep


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
        self.end, self.change = constant(end_weight_decay), constant(weight_decay - end_weight_decay)
        self.steps, self.power = constant(decay_steps), constant(power)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        step = whole(global_step)
        if self.update_decay_steps:
            past = F.maximum(step - 1, 0) // self.decay_steps
            left = self.decay_steps - (step - past * self.decay_steps)
            remaining = ratio(left, self.steps) / F.cast(past + 1, self.steps.dtype)
        else:
            remaining = ratio(F.maximum(self.decay_steps - step, 0), self.steps)
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
        self.end, self.change = constant(min_weight_decay), constant(max_weight_decay - min_weight_decay)
        self.steps, self.quarter = constant(decay_steps), constant(math.pi / 2)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        remaining = ratio(F.maximum(self.decay_steps - whole(global_step), 0), self.steps)
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
        self.first, self.log_rate = constant(weight_decay), constant(math.log(decay_rate))
        self.most, self.most_log = constant(MOST), constant(math.floor(math.log(MOST)))
        self.steps = constant(decay_steps)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        step = whole(global_step)
        periods = F.cast(step // self.decay_steps, self.steps.dtype) if self.is_stair else ratio(step, self.steps)
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
        begun = F.cast(whole(global_step) >= self.starts, mstype.int32)
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
        self.peak, self.steps = constant(weight_decay), constant(warmup_steps)

    def construct(self, global_step: GlobalStep) -> Tensor:
        """Return the weight decay of a step."""
        risen = ratio(F.minimum(whole(global_step), self.warmup_steps), self.steps)
        return F.cast(self.peak * risen, mstype.float32)
