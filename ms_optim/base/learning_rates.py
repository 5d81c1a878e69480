"""Learning rates that are set from outside: `param_groups`, and what MindSpore's experimental schedulers take."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

from ..arguments.checks import check_not_negative, fail
from ..states.in_place import write
from ..unregistered import unregistered
from .any_optimizer import AnyOptimizer, is_any_optimizer

if TYPE_CHECKING:
    from ..paths.parts import Parts
    from .any_optimizer import AnyOptimizer


class RateGroup(UserDict[str, Any]):
    """The parameters of one learning rate.

    Its keys are `params`, a list of Parameters, and `lr`, the Parameter from which every step reads the learning rate.
    Setting `lr` writes into that Parameter. Other keys are the user's own.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        params: The parameters.
        rate: Their learning rate.
    """

    data: dict[str, Any]

    def __init__(self, optimizer: str, params: list[Parameter], rate: Parameter):
        super().__init__()
        self.optimizer = optimizer
        self.data = {"params": params, "lr": rate}

    def __setitem__(self, key: str, value: Any) -> None:
        if key in ("params", "weight_decay"):
            raise KeyError(f"For '{self.optimizer}', only 'lr' of a group can be set after construction, not '{key}'.")
        if key != "lr":
            super().__setitem__(key, value)
            return
        number = value.asnumpy().item() if isinstance(value, Tensor) and value.size == 1 else value
        check_not_negative(self.optimizer, "lr", number)
        rate = self.data["lr"]
        write(rate, np.full(rate.shape, number, np.float32))


def groups_of(parts: Parts) -> list[RateGroup]:
    """Return a group for each learning rate.

    Args:
        parts: What the optimizer's path is made from.

    Raises:
        TypeError: If a learning rate is a schedule or a list: it sets the rates then.
    """
    layout, rates = parts.layout, parts.rates
    members: dict[int, list[Parameter]] = {}
    for p, place in zip(parts.held.parameters, layout.rate_places):
        members.setdefault(place, []).append(p)
    for place in members:
        if place >= len(rates.fixed):
            schedule = rates.schedules[place - len(rates.fixed)]
            fail(TypeError, layout.optimizer, "learning_rate", "a number where 'param_groups' is used", schedule)
    return [RateGroup(layout.optimizer, params, rates.fixed[place]) for place, params in members.items()]


class _Scheduled(optim.Optimizer):
    """What MindSpore's schedulers read and write: the groups of another optimizer."""

    def __init__(self, optimizer):
        # Not that of the base class, which would make groups and learning rates of its own.
        nn.Cell.__init__(self, auto_prefix=False)
        groups = optimizer.param_groups
        unregistered(self, param_groups=groups, lrs=[group["lr"] for group in groups], optimizer=optimizer)

    def __call__(self, gradients):
        return self.optimizer(gradients)

    def __repr__(self):
        return repr(self.optimizer)


def for_scheduler(optimizer: AnyOptimizer) -> optim.Optimizer:
    """Return an optimizer as the schedulers of ``mindspore.experimental.optim.lr_scheduler`` take one.

    They set the learning rates of `optimizer` itself, which goes on being called as before. Its groups are those of
    ``optimizer.param_groups``: one for each learning rate.

    Args:
        optimizer (Union[FusedOptimizer, LocalSteps]): An optimizer of this package, whose learning rates are numbers.

    Returns:
        mindspore.experimental.optim.Optimizer, with `param_groups` and `lrs`.

    Raises:
        TypeError: If `optimizer` is not an optimizer of this package, or a learning rate is a schedule or a list.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.experimental.optim.lr_scheduler import StepLR
        >>> from ms_optim import AdamW, for_scheduler
        >>> optimizer = AdamW(nn.Dense(4, 3).trainable_params(), learning_rate=0.1)
        >>> scheduler = StepLR(for_scheduler(optimizer), step_size=2, gamma=0.5)
        >>> for epoch in range(4):
        ...     print(round(optimizer.current_step_lr(), 4))
        ...     done = scheduler.step()
        0.1
        0.1
        0.05
        0.05
    """
    if not is_any_optimizer(optimizer):
        fail(TypeError, "for_scheduler", "optimizer", "an optimizer of this package", optimizer)
    return _Scheduled(optimizer)
