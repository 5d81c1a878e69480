"""How much memory each optimizer takes, on the device and on the host, for a number of parameters or a network."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
from rich import box
from rich.console import Console
from rich.table import Table

from .. import OPTIMIZERS, _kernels, _memory
from .._arguments import STATE_DTYPES, WEIGHT_DTYPES, Options
from .._base import FusedOptimizer
from .._shares import Shares, Workers
from ..adam_offload import DEVICES
from ..paths import ascend
from .plan_arguments import UNITS, Weight, count, parameters, size, weights_of_checkpoint, weights_of_json

DTYPES: dict[str, Any] = {str(dtype).lower(): dtype for dtype in WEIGHT_DTYPES}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes that training with an optimizer takes on one worker; gradients have the dtype of their parameter."""

    optimizer: str
    state_dtype: str
    weights: int
    gradients: int
    masters: int
    states: int
    scales: int
    device: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device and on the host together."""
        return self.device + self.host


class NotPossibleError(ValueError):
    """An optimizer would refuse the options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--parameters", type=parameters, help="number of parameters, such as 7e9, as one large tensor")
    source.add_argument("--shapes", type=weights_of_json, help="a JSON file: a list of shapes, or shapes by name")
    source.add_argument("--checkpoint", type=weights_of_checkpoint, help="a MindSpore checkpoint of the network")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters; default: the checkpoint's, or float32")
    parser.add_argument("--optimizer", nargs="+", choices=[optimizer.__name__ for optimizer in OPTIMIZERS])
    parser.add_argument("--state-dtype", nargs="+", choices=STATE_DTYPES, default=STATE_DTYPES)
    parser.add_argument("--no-master-weights", action="store_true", help="keep no float32 masters of 16-bit weights")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=_kernels.device_target(),
        help="default: this machine's",
    )
    parser.add_argument("--workers", type=count, default=1, help="number of workers that train together; default: 1")
    parser.add_argument("--shard-states", action="store_true", help="the workers split the states")
    parser.add_argument("--memory", type=size, help="memory of the device, such as 64GB; on CPU, memory of the host")
    parser.add_argument("--host-memory", type=size, help="memory of the host for each worker, unless --device is CPU")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def main(arguments: argparse.Namespace) -> int:
    """Print the plans; return 0, or 1 if there is none."""
    given = arguments.parameters or arguments.shapes or arguments.checkpoint
    chosen = DTYPES.get(arguments.dtype)
    weights = [Weight(w.shape, chosen or w.dtype or ms.float32) for w in given]
    plans, refused = [], []
    for optimizer in OPTIMIZERS:
        if arguments.optimizer and optimizer.__name__ not in arguments.optimizer:
            continue
        for state_dtype in arguments.state_dtype:
            options = Options(
                state_dtype=state_dtype,
                master_weights=not arguments.no_master_weights,
                shard_states=arguments.shard_states,
            )
            try:
                plans.append(plan(optimizer, weights, options, arguments.device, arguments.workers))
            except NotPossibleError as reason:
                refused.append({"optimizer": optimizer.__name__, "state_dtype": state_dtype, "reason": str(reason)})
    if arguments.json:
        print(as_json(plans, refused, weights, arguments))
    else:
        show(plans, refused, weights, arguments)
    return 0 if plans else 1


# ---- Counting -----------------------------------------------------------------------------------------------------


def plan(
    optimizer: type[FusedOptimizer], weights: Sequence[Weight], options: Options, device: str, workers: int = 1
) -> Plan:
    """Count the bytes on the worker that holds the most.

    Args:
        optimizer: The optimizer's class.
        weights: The parameters' shapes and dtypes.
        options: The optimizer's shared arguments.
        device: Where the weights are, "CPU", "GPU" or "Ascend".
        workers: The number of workers that train together.

    Raises:
        NotPossibleError: If the optimizer would refuse the options.
    """
    reason = why_refused(optimizer, options, device)
    if reason is not None:
        raise NotPossibleError(reason)
    prefixes = optimizer.rules[0].states
    shapes, dtypes = [w.shape for w in weights], [w.dtype for w in weights]
    kept = [tuple(enumerate(shapes))]
    if options.shard_states and workers > 1:
        costs = [_memory.bytes_each(prefixes, options, w.dtype, math.prod(w.shape)) for w in weights]
        names, whole = [str(i) for i in range(len(weights))], [False] * len(weights)
        shares = Shares(Workers(0, workers, None), names, shapes, costs, whole, (*prefixes, "master"))
        kept = [shares.kept_by(rank) for rank in range(workers)]
    states, scales, masters = max((held(prefixes, options, shapes, dtypes, own) for own in kept), key=sum)
    own = sum(_memory.BYTES[w.dtype] * math.prod(w.shape) for w in weights)
    on_device, on_host = _memory.placed(device, optimizer.runs_on_host, 2 * own, states + scales + masters)
    name = optimizer.__name__
    return Plan(name, options.state_dtype, own, own, masters, states, scales, on_device, on_host)


def held(
    prefixes: Sequence[str],
    options: Options,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    kept: Iterable[Any],
) -> tuple[int, int, int]:
    """Return the bytes of states, scales and masters."""
    states = list(_memory.states(prefixes, options, shapes, kept))
    scales = [scale for state in states if (scale := _memory.scale(state)) is not None]
    masters = _memory.masters(options, dtypes, kept)
    return sum(x.nbytes for x in states), sum(x.nbytes for x in scales), sum(x.nbytes for x in masters)


def why_refused(optimizer: type[FusedOptimizer], options: Options, device: str) -> str | None:
    """Return why an optimizer would refuse the options, or None."""
    if options.state_dtype != "float32" and not optimizer.rules[0].takes_low_states:
        return "it keeps its states in float32"
    if options.shard_states and not optimizer.takes_shares:
        return "its states are each worker's own and cannot be split"
    if options.shard_states and device != "CPU":
        return "states are split over workers on CPU only"
    if device == "Ascend" and not optimizer.runs_on_host:
        return ascend.why_not(options, False, False)
    return None


# ---- Writing ------------------------------------------------------------------------------------------------------


def spare(plan: Plan, arguments: argparse.Namespace) -> int | None:
    """Return how many bytes are left, less than 0 if the plan does not fit, or None if no memory was given."""
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
        "master_weights": not arguments.no_master_weights,
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
        numbers = ("weights", "gradients", "masters", "states", "scales", "device", "host", "total")
        table.add_column("optimizer", no_wrap=True)
        table.add_column("state_dtype", no_wrap=True)
        for heading in numbers:
            table.add_column(heading, justify="right")
        if spare(plans[0], arguments) is not None:
            table.add_column("fits, and what is left", no_wrap=True)
        for one in plans:
            cells = [f"{getattr(one, name) / UNITS[unit]:,.2f}" for name in numbers]
            left = spare(one, arguments)
            cells += [f"{'yes' if left >= 0 else 'no'}, {left / UNITS[unit]:+,.2f}"] if left is not None else []
            table.add_row(one.optimizer, one.state_dtype, *cells)
        # No number is cut off: in a narrow terminal, lines wrap instead.
        console.width = max(console.width, Console(width=1000).measure(table).maximum)
        console.print(table)
        console.print("Activations, workspaces and the framework's own memory are not counted.")
    for one in refused:
        line = f"Not possible: {one['optimizer']}, state_dtype {one['state_dtype']}: {one['reason']}."
        console.print(line, soft_wrap=True)
