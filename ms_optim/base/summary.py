"""What an optimizer shows: its summary, as printed, and `param_groups`, whose learning rates can be set."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn

from ..arguments.checks import Options, is_number, keywords_of
from .learning_rates import RateGroup, groups_of

if TYPE_CHECKING:
    from ..arguments.rates import Rates
    from ..paths.parts import Parts
    from ..states.layout import Layout
    from .optimizer import FusedOptimizer

# Shown in separate lines.
SHOWN_APART = ("learning_rate", "weight_decay")
SHARED = [field.name for field in dataclasses.fields(Options)]


class Summarized(nn.Optimizer):
    """Prints a summary of an optimizer, and shows its param groups."""

    _parts: Parts
    _layout: Layout
    _rates: Rates
    _param_groups: list[RateGroup] | None = None

    @property
    def param_groups(self) -> list[RateGroup]:
        """The parameters by learning rate: for each a dict with `params` and `lr`, which can be set.

        Setting `lr` changes the learning rate from the next step on. Groups that share a learning rate are one here.
        :func:`ms_optim.for_scheduler` hands them to MindSpore's experimental schedulers.

        Raises:
            TypeError: If a learning rate is a schedule or a list.
        """
        groups = self._param_groups
        if groups is None:
            groups = groups_of(self._parts)
            object.__setattr__(self, "_param_groups", groups)
        return groups

    def current_step_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the next step.

        Returns:
            A float; if groups have their own learning rates, a tuple with one for each parameter.
        """
        rates = self._rates_at(self.global_step)
        if self.is_group_lr:
            return tuple(rates[place] for place in self._layout.rate_places)
        return rates[self._layout.rate_places[0]]

    def _rates_at(self, step: Tensor) -> list[float]:
        """Return the distinct learning rates and weight decays of a step, counted from 0."""
        return self._rates.construct(step).asnumpy().tolist()

    def __repr__(self) -> str:
        return summary(self)  # type: ignore[arg-type]


def summary(optimizer: FusedOptimizer) -> str:
    """Return a description of an optimizer.

    Args:
        optimizer: The optimizer.
    """
    held, kernel = optimizer._held, f"the fused kernel {optimizer.rule.name!r}"
    path = kernel if optimizer.fused else f"MindSpore's operators, because {optimizer.backend_reason}"
    kept = {"states": held.states, "scales": held.scales, "masters": held.masters, "averages": held.averages}
    sizes = []
    for name, tensors in kept.items():
        if len(tensors) > 0:
            dtypes = ", ".join(sorted({str(p.dtype).lower() for p in tensors}))
            sizes.append(f"{name} ({dtypes}) {sum(p.nbytes for p in tensors):,} bytes")
    numbers = [f"{name}={value!r}" for name, value in arguments(optimizer).items()]
    lines = [", ".join(numbers)] if numbers else []
    step = int(optimizer.global_step.asnumpy()[0])
    lines += [*groups(optimizer), f"step: {step}, by {path}", f"holds: {'; '.join(sizes)}"]
    return f"{type(optimizer).__name__}(\n" + "".join(f"  {line}\n" for line in lines) + ")"


def arguments(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Return the optimizer's own arguments by name, and the shared arguments that differ from their defaults."""
    found: dict[str, Any] = {}
    for name in keywords_of(type(optimizer)):
        if name in SHARED or name in SHOWN_APART:
            continue
        value = getattr(optimizer, name, None)
        if name == "betas":
            betas = (getattr(optimizer, f"beta{k}", None) for k in (1, 2, 3))
            found[name] = tuple(beta for beta in betas if beta is not None)
        elif is_number(value) or isinstance(value, (bool, str)):
            found[name] = value
    options, usual = vars(optimizer.options), vars(Options())
    return found | {name: options[name] for name in SHARED if options[name] != usual[name]}


def groups(optimizer: FusedOptimizer) -> list[str]:
    """Return a line for each learning rate with its weight decay.

    A schedule is shown by name, because MindSpore requests this text while it compiles a step, when no Cell may run.
    """
    layout, rates = optimizer._layout, optimizer._rates
    shown = [f"{float(rate.asnumpy()):g}" for rate in rates.fixed] + [named(schedule) for schedule in rates.schedules]
    members: dict[tuple[str, str], list[int]] = {}
    for i, (rate, decay) in enumerate(zip(layout.rate_places, layout.decay_places)):
        members.setdefault((shown[rate], shown[decay] if decay >= 0 else "0"), []).append(i)
    return [
        f"learning_rate={rate}, weight_decay={decay}: {len(places):,} parameters, "
        f"{sum(layout.sizes[i] for i in places):,} elements"
        for (rate, decay), places in members.items()
    ]


def named(schedule: nn.Cell) -> str:
    """Return the name of a schedule's class; for a list of rates, its length."""
    name = type(schedule).__name__
    return f"a list of {schedule.learning_rate.size}" if name == "_IteratorLearningRate" else name
