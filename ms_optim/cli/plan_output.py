"""What `plan` prints: the table, or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from .plan_arguments import UNITS, Weight

if TYPE_CHECKING:
    from .plan import Plan


def spare(plan: Plan, arguments: argparse.Namespace) -> int | None:
    """Return the remaining bytes, negative if the plan does not fit, or None if no memory was given."""
    on_device = plan.host if arguments.device == "CPU" else plan.device
    left = [] if arguments.memory is None else [arguments.memory - on_device]
    if arguments.host_memory is not None and arguments.device != "CPU":
        left.append(arguments.host_memory - plan.host)
    return min(left, default=None)


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
        "master_weights": arguments.master_weights,
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
        largest = max(one.total for one in plans)
        unit = next((name for name in ("GB", "MB") if largest >= UNITS[name]), "KB")
        dtypes = sorted({str(w.dtype).lower() for w in weights})
        title = f"{elements(weights):,} parameters in {' and '.join(dtypes)}, on {arguments.device}"
        title += f", one of {arguments.workers} workers" if arguments.workers > 1 else ""
        table = Table(title=f"{title}: {unit}", title_justify="left", box=box.SIMPLE_HEAD)
        held = ["weights", "gradients", "masters", "states", "scales", "averages"]
        numbers = (*held, *["local"] * arguments.local_steps, "device", "host", "total")
        table.add_column("optimizer", no_wrap=True)
        table.add_column("state_dtype", no_wrap=True)
        for heading in numbers:
            table.add_column(heading, justify="right")
        if spare(plans[0], arguments) is not None:
            table.add_column("fits, remaining", no_wrap=True)
        for one in plans:
            cells = [f"{getattr(one, name) / UNITS[unit]:,.2f}" for name in numbers]
            left = spare(one, arguments)
            cells += [f"{'yes' if left >= 0 else 'no'}, {left / UNITS[unit]:+,.2f}"] if left is not None else []
            table.add_row(one.optimizer, one.state_dtype, *cells)
        # Numbers are never truncated; in a narrow terminal, lines wrap instead.
        console.width = max(console.width, Console(width=1000).measure(table).maximum)
        console.print(table)
        console.print("Activations, workspaces and the framework's own memory are not counted.")
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in refused:
        reasons.setdefault((one["optimizer"], one["reason"]), []).append(one["state_dtype"])
    together: dict[tuple[str, str], list[str]] = {}
    for (optimizer, reason), dtypes in reasons.items():
        together.setdefault((f"state_dtype {', '.join(dtypes)}", reason), []).append(optimizer)
    for (dtypes, reason), optimizers in together.items():
        console.print(f"Not possible: {', '.join(optimizers)} with {dtypes}: {reason}.", soft_wrap=True)
