"""The summary of an optimizer, as printed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mindspore import nn

from ..arguments.checks import is_number
from ..arguments.options import Options, keywords_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..paths.parts import Parts
    from ..states.storage import Held

# Shown in separate lines.
SHOWN_APART = ("learning_rate", "weight_decay")
SHARED = [field.name for field in dataclasses.fields(Options)]


def summary(parts: Parts, no_kernel: str | None) -> str:
    """Return a description of an optimizer.

    Args:
        parts: The parts that its path is built from.
        no_kernel: Why it runs no fused kernel; None if it does.
    """
    numbers = arguments(parts)
    lines = [shown(numbers)] if numbers else []
    step = int(parts.held.global_step.asnumpy()[0])
    lines += [*groups(parts), f"step: {step}, by {path_of(parts, no_kernel)}", f"holds: {holds(parts.held)}"]
    return f"{parts.layout.optimizer}(\n" + "".join(f"  {line}\n" for line in lines) + ")"


def shown(numbers: dict[str, Any]) -> str:
    """Return arguments as they are shown."""
    return ", ".join(f"{name}={value!r}" for name, value in numbers.items())


def path_of(parts: Parts, no_kernel: str | None) -> str:
    """Return what runs the step; `no_kernel` is why it is no fused kernel, None if it is one."""
    if no_kernel is not None:
        return f"MindSpore's operators, because {no_kernel}"
    names = list(dict.fromkeys(own.rule.name for own in parts.of_rules))
    return f"the fused kernel{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def holds(held: Held) -> str:
    """Return the kinds of what an optimizer holds, with their dtypes and bytes."""
    kept = {"states": held.states, "scales": held.scales, "masters": held.masters, "averages": held.averages}
    sizes = []
    for name, tensors in kept.items():
        if len(tensors) > 0:
            dtypes = ", ".join(sorted({str(p.dtype).lower() for p in tensors}))
            sizes.append(f"{name} ({dtypes}) {sum(p.nbytes for p in tensors):,} bytes")
    return "; ".join(sizes)


def arguments(parts: Parts, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the optimizer's own arguments by name, and the shared arguments that differ from their defaults.

    Args:
        parts: The parts that its path is built from.
        without: Names of arguments that are left out.
    """
    optimizer, found = parts.statement, dict[str, Any]()
    for name in keywords_of(type(optimizer)):
        if name in SHARED or name in SHOWN_APART:
            continue
        value = getattr(optimizer, name, None)
        if name == "betas":
            betas = (getattr(optimizer, f"beta{k}", None) for k in (1, 2, 3))
            found[name] = tuple(beta for beta in betas if beta is not None)
        elif is_number(value) or isinstance(value, (bool, str)):
            found[name] = value
    options, usual = vars(parts.options), vars(Options())
    return found | {name: options[name] for name in SHARED if options[name] != usual[name] and name not in without}


def groups(parts: Parts) -> list[str]:
    """Return a line for each learning rate with its weight decay.

    A schedule is shown by name, because MindSpore requests this text while it compiles a step, when no Cell may run.
    """
    layout, rates = parts.layout, parts.rates
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
