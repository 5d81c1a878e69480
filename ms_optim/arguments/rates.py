"""The learning rates and weight decays of a step: each distinct one is evaluated once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..unregistered import unregistered

CELL_ATTRIBUTES = frozenset(vars(nn.Cell()))


def _number(rate):
    return F.cast(rate, mstype.float32).reshape(())


class Rates(nn.Cell):
    """Distinct learning rates and weight decays.

    Args:
        rates: Tensors and Parameters, which a step treats as fixed, and Cells, which are called with the step. The
            fixed rates come first.
    """

    each: Any
    fixed: tuple[Tensor | Parameter, ...]
    schedules: tuple[nn.Cell, ...]
    count: int
    from_python: CompiledRates
    _seen: list[dict[tuple[int, str], Any]]

    def __init__(self, rates: Sequence[Any]):
        super().__init__(auto_prefix=False)
        self.each = C.Map()
        unregistered(self, fixed=tuple(rate for rate in rates if not isinstance(rate, nn.Cell)))
        self.count = len(rates)
        unregistered(self, schedules=tuple(rate for rate in rates if isinstance(rate, nn.Cell)))
        self._seen = [_settings(schedule) for schedule in self.schedules]
        unregistered(self, from_python=CompiledRates(self))

    def construct(self, step: Tensor) -> Tensor:
        """Return the rates of a step, counted from 0: float32 of shape (rates,)."""
        values = ()
        if len(self.fixed) > 0:
            values += self.each(_number, self.fixed)
        for schedule in self.schedules:
            values += (_number(schedule(step)),)
        return ops.stack(values)

    def now(self, step: Tensor) -> np.ndarray:
        """Return the same to Python, which calls no operator if all rates are fixed."""
        if self.schedules:
            return self.from_python.run(step).asnumpy()
        return np.array([rate.asnumpy().reshape(()) for rate in self.fixed], np.float32)

    def at(self, step: Tensor) -> list[float]:
        """Return the rates of a step, counted from 0, to Python."""
        return self.construct(step).asnumpy().tolist()

    def described(self) -> list[Any]:
        """Return what decides about the rates, as plain values, by which processes compare theirs."""
        lists: list[Any] = [getattr(schedule, "learning_rate", None) for schedule in self.schedules]
        return [
            [float(rate.asnumpy()) for rate in self.fixed],
            [(type(schedule).__name__, seen) for schedule, seen in zip(self.schedules, self._seen)],
            [values.asnumpy().tolist() for values in lists if isinstance(values, Tensor)],
        ]

    def check(self, optimizer: str) -> None:
        """Raise an error if an attribute of a schedule has changed, as compiled steps go on with its first value."""
        for schedule, seen in zip(self.schedules, self._seen):
            found = _settings(schedule)
            for key in found.keys() & seen.keys() if found != seen else ():
                if found[key] != seen[key]:
                    raise ValueError(
                        f"For '{optimizer}', the attribute '{key[1]}' of the schedule {type(schedule).__name__} must "
                        f"stay as it was when the optimizer was made, {seen[key]!r}, but is {found[key]!r}: compiled "
                        "steps go on with the first value. Pass a number as the rate, and set "
                        "optimizer.param_groups[0]['lr']."
                    )


class CompiledRates(nn.Cell):
    """Rates that are called from Python, compiled separately.

    MindSpore records on a Cell which of its methods it compiled last, and uses that as the Cell's ``construct`` when it
    compiles a graph that contains the Cell. Therefore this is not a method of :class:`Rates`.
    """

    def __init__(self, rates: Rates):
        super().__init__(auto_prefix=False)
        unregistered(self, rates=rates)

    @ms.jit(backend="ms_backend")
    def run(self, step):
        """Return the rates of a step."""
        return self.rates(step)


def _settings(schedule: nn.Cell) -> dict[tuple[int, str], Any]:
    """Return the numbers and strings that a schedule and the Cells in it have as public attributes."""
    return {
        (k, name): value
        for k, (_, cell) in enumerate(schedule.cells_and_names())
        for name, value in vars(cell).items()
        if isinstance(value, (int, float, str)) and not name.startswith("_") and name not in CELL_ATTRIBUTES
    }


class Collected(NamedTuple):
    """The distinct rates of an optimizer.

    Attributes:
        rates: The Cell that evaluates them.
        rate_places: For each parameter, the index of its learning rate among them.
        decay_places: For each parameter, the index of its weight decay; -1 if it is not decayed.
        fewest_steps: The length of the shortest Iterable of learning rates; None if there is no such limit.
    """

    rates: Rates
    rate_places: tuple[int, ...]
    decay_places: tuple[int, ...]
    fewest_steps: int | None


def collected(learning_rates: Sequence[Any], weight_decays: Sequence[Any], is_decayed: Sequence[bool]) -> Collected:
    """Find the distinct learning rates and weight decays, so that each is evaluated once a step.

    Args:
        learning_rates: For each parameter, its learning rate as ``nn.Optimizer`` keeps it.
        weight_decays: For each parameter its weight decay.
        is_decayed: For each parameter, whether parameters of its name are decayed.
    """
    rates: list[Any] = []
    index: dict[Any, int] = {}

    def place(rate):
        if type(rate).__name__ == "_ConvertToCell":
            # MindSpore makes a fixed rate a schedule by rate + 1 - 1, which rounds the rate to about 1e-7.
            rate = rate.learning_rate
        key = id(rate) if isinstance(rate, (nn.Cell, Parameter)) else float(rate.asnumpy())
        if key not in index:
            index[key] = len(rates)
            rates.append(rate)
        return index[key]

    rate_places = [place(rate) for rate in learning_rates]
    decayed = [
        flag and (isinstance(decay, nn.Cell) or float(decay.asnumpy()) > 0.0)
        for flag, decay in zip(is_decayed, weight_decays)
    ]
    decay_places = [place(decay) if used else -1 for used, decay in zip(decayed, weight_decays)]
    fixed_first = sorted(range(len(rates)), key=lambda k: isinstance(rates[k], nn.Cell))
    moved = {old: new for new, old in enumerate(fixed_first)} | {-1: -1}
    listed = (rate.learning_rate.size for rate in rates if type(rate).__name__ == "_IteratorLearningRate")
    return Collected(
        Rates([rates[k] for k in fixed_first]),
        tuple(moved[k] for k in rate_places),
        tuple(moved[k] for k in decay_places),
        min(listed, default=None),
    )


def check_step(optimizer: str, step: int, fewest_steps: int | None) -> None:
    """Check that a step can be taken at a step count.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        step: The step, counted from 0.
        fewest_steps: The number of steps that have learning rates; None if there is no limit.
    """
    if step < 0:
        raise RuntimeError(
            f"For '{optimizer}', 'global_step' must be 0 or greater, but is {step}. Set or load a valid one."
        )
    if fewest_steps is not None and step >= fewest_steps:
        raise RuntimeError(
            f"For '{optimizer}', the argument 'learning_rate' must have a learning rate for each step, but has "
            f"{fewest_steps}, and this is step {step}, counted from 0."
        )
