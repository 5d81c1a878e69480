"""What `plan` prints: the table, or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..kernels import libraries
from ..states.formats import FORMATS
from .plan_arguments import UNITS, Weight

# What optimizers hold, by the names of a plan's fields; scales are shown with the states.
HELD = ("weights", "gradients", "masters", "states", "averages", "local")
# Where steps are not a kernel's for the device.
STEPS = {
    "host": "Steps on the host, by the kernel for CPU",
    "operators": "Steps by MindSpore's operators, which are slower than a kernel",
}
TIGHT = 0.1  # the part of a memory that should remain for activations


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes that training with an optimizer takes on one worker; gradients have the dtype of their parameter.

    `step` says what takes its steps: "kernel", or a key of :data:`STEPS`.
    """

    optimizer: str
    state_dtype: str
    master_weights: str
    weights: int
    gradients: int
    masters: int
    states: int
    scales: int
    averages: int
    local: int
    device: int
    host: int
    step: str

    @property
    def total(self) -> int:
        """Bytes on the device and on the host together."""
        return self.device + self.host


def spare(plan: Plan, arguments: argparse.Namespace) -> int | None:
    """Return the remaining bytes, negative if the plan does not fit, or None if no memory was given."""
    return min((left for left, _ in _rooms(plan, arguments)), default=None)


def _rooms(plan: Plan, arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the remaining bytes, and all bytes, of each memory that was given."""
    on_device = plan.host if arguments.device == "CPU" else plan.device
    rooms = [] if arguments.memory is None else [(arguments.memory - on_device, arguments.memory)]
    if arguments.host_memory is not None and arguments.device != "CPU":
        rooms.append((arguments.host_memory - plan.host, arguments.host_memory))
    return rooms


def elements(weights: Sequence[Weight]) -> int:
    """Return the number of elements of the parameters."""
    return sum(math.prod(w.shape) for w in weights)


def as_json(
    plans: Sequence[Plan], refused: Sequence[dict[str, str]], weights: Sequence[Weight], arguments: argparse.Namespace
) -> str:
    """Return all numbers, in bytes, as JSON."""
    rows = []
    for one in plans:
        left = spare(one, arguments)
        rows.append({**dataclasses.asdict(one), "total": one.total, "fits": None if left is None else left >= 0})
    asked = {name: getattr(arguments, name) for name in ("device", "workers", "shard_states", "memory", "host_memory")}
    asked |= {
        "parameters": elements(weights),
        "tensors": len(weights),
        "offload": arguments.offload,
        "average": arguments.average,
        "local_steps": arguments.local_steps,
    }
    return json.dumps({**asked, "plans": rows, "not_possible": refused}, indent=2)


def show(
    plans: Sequence[Plan], refused: Sequence[dict[str, str]], weights: Sequence[Weight], arguments: argparse.Namespace
) -> None:
    """Print the numbers as a table."""
    console = Console(highlight=False)
    if plans:
        unit = _unit(plans)
        console.print(_title(weights, arguments, unit), soft_wrap=True)
        table, same = _table(plans, arguments, unit)
        if same:
            console.print(f"Each has {', '.join(same)}.", soft_wrap=True)
        # Numbers are never truncated; in a narrow terminal, lines wrap instead.
        console.width = max(console.width, Console(width=1000).measure(table).maximum)
        console.print(table)
        console.print("Not counted: activations, workspaces and the framework's own memory.", soft_wrap=True)
        if any(_fits(one, arguments) == "tight" for one in plans):
            console.print("tight: less than 10 % of the memory remains for these.")
        for step, words in STEPS.items():
            own = _by_formats((one.optimizer, one.state_dtype, words) for one in plans if one.step == step)
            if names := [f"{optimizers} with states in {dtypes}" for optimizers, dtypes, _ in own]:
                console.print(f"{words}: {'; '.join(names)}.", soft_wrap=True)
        reason = libraries.why_missing(arguments.device)
        if reason and any(one.step == "kernel" for one in plans):
            start = f"The kernels for {arguments.device} are not built here, and without them operators take the steps"
            console.print(f"{start}: {reason}", soft_wrap=True)
    reasons = ((one["optimizer"], one["state_dtype"], one["reason"]) for one in refused)
    for optimizers, dtypes, reason in _by_formats(reasons):
        console.print(f"Not possible: {optimizers} with state_dtype {dtypes}: {reason}.", soft_wrap=True)


def _by_formats(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return optimizers, dtypes of states, and what is said of them; rows of which the same is said are one."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for optimizer, dtype, said in dict.fromkeys(rows):
        dtypes.setdefault((optimizer, said), []).append(dtype)
    together: dict[tuple[str, str], list[str]] = {}
    for (optimizer, said), own in dtypes.items():
        together.setdefault((", ".join(sorted(own, key=[*FORMATS].index)), said), []).append(optimizer)
    return [(", ".join(optimizers), own, said) for (own, said), optimizers in together.items()]


def _unit(plans: Sequence[Plan]) -> str:
    largest = max(one.total for one in plans)
    return next((name for name in ("TB", "GB", "MB") if largest >= UNITS[name]), "KB")


def _title(weights: Sequence[Weight], arguments: argparse.Namespace, unit: str) -> str:
    dtypes = sorted({str(w.dtype).lower() for w in weights})
    where = "in the host's memory" if arguments.device == "CPU" else f"on {arguments.device}"
    title = f"{elements(weights):,} parameters in {' and '.join(dtypes)}, {where}"
    title += f", on one of {arguments.workers} workers" if arguments.workers > 1 else ""
    if arguments.device == "CPU" and arguments.memory is not None:
        title += ", as --device is CPU"
    return f"{title}; in {unit}"


def _table(plans: Sequence[Plan], arguments: argparse.Namespace, unit: str) -> tuple[Table, list[str]]:
    """Return the table, without columns of zeros, and what the rows have in common, which has no column either."""
    columns = {name: [getattr(one, name) for one in plans] for name in HELD}
    columns["states"] = [one.states + one.scales for one in plans]
    same = [name for name, numbers in columns.items() if len(plans) > 1 and len(set(numbers)) == 1]
    is_split = any(one.device for one in plans) and any(one.host for one in plans)
    sums = ("device", "host") if is_split else ("total",)
    columns |= {name: [getattr(one, name) for one in plans] for name in sums}
    shown = {name: numbers for name, numbers in columns.items() if name not in same and any(numbers)}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("optimizer", "states in"):
        table.add_column(heading, no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right")
    if spare(plans[0], arguments) is not None:
        table.add_column("fits", no_wrap=True)
    has_formats = len({one.master_weights for one in plans}) > 1
    for i, one in enumerate(plans):
        masters = f", {one.master_weights}" if has_formats and one.master_weights != "float32" else ""
        cells = [f"{numbers[i] / UNITS[unit]:,.2f}" for numbers in shown.values()]
        left = spare(one, arguments)
        cells += [f"{_fits(one, arguments)}, {left / UNITS[unit]:+,.2f}"] if left is not None else []
        table.add_row(one.optimizer, one.state_dtype + masters, *cells)
    return table, [f"{name} {columns[name][0] / UNITS[unit]:,.2f}" for name in same if columns[name][0]]


def _fits(plan: Plan, arguments: argparse.Namespace) -> str:
    """Return whether a plan fits, in a word."""
    rooms = _rooms(plan, arguments)
    if any(left < 0 for left, _ in rooms):
        return "no"
    return "tight" if any(left < TIGHT * memory for left, memory in rooms) else "yes"
