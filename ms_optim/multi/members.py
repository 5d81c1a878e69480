"""The optimizers that are part of a MultiOptimizer: their rule as one, their rates, and what is left of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mindspore import Parameter, nn
from mindspore.nn.optim.optimizer import _ConvertToCell

from ..base.entries import RATE
from ..rules.rule import Rule

if TYPE_CHECKING:
    from ..base.optimizer import FusedOptimizer
    from ..states.joint import JointHeld


class Taken:
    """What an optimizer has in place of its step, once it is part of a MultiOptimizer: every use is an error.

    Args:
        optimizer: The name of the optimizer's class.
    """

    def __init__(self, optimizer: str):
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # which Python and MindSpore ask any object for
        raise RuntimeError(
            f"For '{self._optimizer}', this optimizer is part of a MultiOptimizer, which takes its steps and keeps its "
            "states: call the MultiOptimizer instead, also for state_dict(), averaged() and attach()."
        )


def take(optimizer: FusedOptimizer, held: JointHeld) -> None:
    """Make an optimizer part of a MultiOptimizer: it counts with it, and can no longer be called.

    Args:
        optimizer: The optimizer.
        held: What all optimizers hold.
    """
    for name in ("global_step", "skipped_steps", "statistics"):
        setattr(optimizer, name, getattr(held, name))
    for name, kept in (("step_weights", optimizer._held.step_weights), ("weight_radii", optimizer._held.radii)):
        setattr(optimizer, name, next(iter(kept), None))
    for name in ("_path", "_entries", "_swap", "_attachment"):
        object.__setattr__(optimizer, name, Taken(optimizer.cls_name))


def is_taken(optimizer: FusedOptimizer) -> bool:
    """Return whether an optimizer is part of a MultiOptimizer."""
    return isinstance(optimizer._swap, Taken)


def joint_rule(optimizers: Sequence[FusedOptimizer]) -> Rule:
    """Return what the state dict and other workers ask of the rules of several optimizers, as one rule."""
    rules = [each.rule for each in optimizers]
    return Rule(
        "+".join(rule.name for rule in rules),
        tuple(dict.fromkeys(prefix for rule in rules for prefix in rule.prefixes)),
        constants=tuple(number for rule in rules for number in (*rule.constants, float(rule.flags))),
    )


def rename_rates(rates: Sequence[Any]) -> None:
    """Name learning rates as nn.Optimizer names those of groups: each optimizer has a group or more here."""
    for k, rate in enumerate({id(rate): rate for rate in rates}.values()):
        number: Any = rate if isinstance(rate, Parameter) else getattr(rate, "learning_rate", None)
        if isinstance(number, Parameter) and RATE.fullmatch(number.name):
            number.name = f"learning_rate_group_{k}"


def as_schedule(rate: Parameter | nn.Cell) -> nn.Cell:
    """Return a learning rate in the form that nn.Optimizer has it if another one is a schedule."""
    return rate if isinstance(rate, nn.Cell) else _ConvertToCell(rate)


def as_decay(decay: Any) -> float | nn.Cell:
    """Return a weight decay in the form that nn.Optimizer takes."""
    return decay if isinstance(decay, nn.Cell) else float(decay.asnumpy())
