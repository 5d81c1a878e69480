"""Print the memory that each optimizer needs on device and host, for a number of parameters or a network."""

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

from .. import OPTIMIZERS, _capabilities, _kernels, _memory
from .._arguments import SPLIT_MASTERS, STATE_DTYPES, WEIGHT_DTYPES, Options
from .._base import FusedOptimizer, Rule
from .._shares import Peers, Shares, share_costs
from .plan_arguments import UNITS, Weight, count, parameters, size, weights_of_checkpoint, weights_of_json

MASTER_WEIGHTS: dict[str, bool | str] = {
    "float32": True,
    **{split: split for split in SPLIT_MASTERS},
    "none": False,
}
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
    averages: int
    device: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device and on the host together."""
        return self.device + self.host


class NotPossibleError(ValueError):
    """An optimizer does not support the options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--parameters",
        type=parameters,
        help="number of parameters, such as 7e9; counted as one large tensor, or as matrices for Muon",
    )
    source.add_argument(
        "--shapes", type=weights_of_json, help="a JSON file with a list of shapes, or with shapes by name"
    )
    source.add_argument("--checkpoint", type=weights_of_checkpoint, help="a MindSpore checkpoint of the network")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the parameters; default: the checkpoint's, or float32"
    )
    parser.add_argument("--optimizer", nargs="+", choices=[optimizer.__name__ for optimizer in OPTIMIZERS])
    parser.add_argument("--state-dtype", nargs="+", choices=STATE_DTYPES, default=STATE_DTYPES)
    parser.add_argument(
        "--master-weights",
        choices=MASTER_WEIGHTS,
        default="float32",
        help="format of the masters of 16-bit weights; none: no masters; default: float32",
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep all tensors except weights and gradients on the host"
    )
    parser.add_argument("--average", action="store_true", help="keep an average of the weights (average_decay)")
    parser.add_argument(
        "--device",
        choices=_capabilities.DEVICES,
        default=_kernels.device_target(),
        help="device of the weights; default: this machine's",
    )
    parser.add_argument("--workers", type=count, default=1, help="number of workers that train together; default: 1")
    parser.add_argument("--shard-states", action="store_true", help="shard the states over the workers")
    parser.add_argument(
        "--memory", type=size, help="memory of the device, such as 64GB; with --device CPU, memory of the host"
    )
    parser.add_argument("--host-memory", type=size, help="memory of the host for each worker, unless --device is CPU")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")


def main(arguments: argparse.Namespace) -> int:
    """Print the plans; return 0, or 1 if there is none."""
    given = arguments.parameters or arguments.shapes or arguments.checkpoint
    chosen = DTYPES.get(arguments.dtype)
    weights = [Weight(w.shape, chosen or w.dtype or ms.float32, w.name) for w in given]
    plans, refused = [], []
    for optimizer in OPTIMIZERS:
        if arguments.optimizer and optimizer.__name__ not in arguments.optimizer:
            continue
        has_matrices = arguments.parameters is not None and optimizer.rules[0].others is not None
        own = as_matrices(weights, arguments.workers) if has_matrices else weights
        for state_dtype in arguments.state_dtype:
            options = Options(
                state_dtype=state_dtype,
                master_weights=MASTER_WEIGHTS[arguments.master_weights],
                shard_states=arguments.shard_states,
                offload=arguments.offload,
                average_decay=0.9999 if arguments.average else None,
            )
            try:
                plans.append(plan(optimizer, own, options, arguments.device, arguments.workers))
            except NotPossibleError as reason:
                refused.append({"optimizer": optimizer.__name__, "state_dtype": state_dtype, "reason": str(reason)})
    if arguments.json:
        print(as_json(plans, refused, weights, arguments))
    else:
        show(plans, refused, weights, arguments)
    return 0 if plans else 1


def as_matrices(weights: Sequence[Weight], workers: int) -> list[Weight]:
    """Return a number of parameters as matrices, one for each worker, because workers do not share matrices."""
    number = elements(weights)
    sizes = [number // workers + (rank < number % workers) for rank in range(workers)]
    return [weights[0]._replace(shape=(1, size)) for size in sizes if size]


# ---- Counting -----------------------------------------------------------------------------------------------------


def plan(
    optimizer: type[FusedOptimizer], weights: Sequence[Weight], options: Options, device: str, workers: int = 1
) -> Plan:
    """Count the bytes on the worker that holds the most.

    Args:
        optimizer: The optimizer's class.
        weights: The parameters' shapes, dtypes and names.
        options: The optimizer's shared arguments.
        device: The device of the weights, "CPU", "GPU" or "Ascend".
        workers: The number of workers that train together.

    Raises:
        NotPossibleError: If the optimizer does not support the options.
    """
    features = _capabilities.asked(options, options.shard_states, is_sliced=False)
    path, reason = _capabilities.answer(optimizer, device, features)
    if path is None:
        raise NotPossibleError(reason)
    rule = optimizer.rules[0]
    shapes, dtypes = [w.shape for w in weights], [w.dtype for w in weights]
    names = [w.name or str(i) for i, w in enumerate(weights)]
    try:
        _memory.check(optimizer.__name__, rule, options, names, dtypes)
    except ValueError as error:
        raise NotPossibleError(str(error).rstrip(".")) from None
    rules = [rule.of_tensor(is_matrix) for is_matrix in optimizer.are_matrices(names, shapes)]
    kept = [tuple(enumerate(shapes))]
    if options.shard_states and workers > 1:
        whole = optimizer.are_matrices(names, shapes)
        costs = share_costs(rule, options, shapes, dtypes, whole)
        prefixes = (*rule.prefixes, "master", "average")
        shares = Shares(Peers(0, workers, None), names, shapes, costs, [False] * len(weights), prefixes, whole)
        kept = [shares.kept_by(rank) for rank in range(workers)]
    bytes_held = max((held(rules, options, shapes, dtypes, own) for own in kept), key=sum)
    states, scales, masters, averages = bytes_held
    own = sum(_memory.BYTES[w.dtype] * math.prod(w.shape) for w in weights)
    on_device, on_host = _memory.placed(device, options, optimizer.runs_on_host, own, sum(bytes_held))
    name = optimizer.__name__
    return Plan(name, options.state_dtype, own, own, masters, states, scales, averages, on_device, on_host)


def held(
    rules: Sequence[Rule],
    options: Options,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    kept: Iterable[Any],
) -> tuple[int, ...]:
    """Return the bytes of states, scales, masters and averages."""
    states = [state for _, state in _memory.states(rules, options, shapes, kept)]
    scales = [scale for state in states if (scale := _memory.scale(state)) is not None]
    masters, averages = _memory.masters(options, dtypes, kept), _memory.averages(options, kept)
    return tuple(sum(x.nbytes for x in tensors) for tensors in (states, scales, masters, averages))


# ---- Writing ------------------------------------------------------------------------------------------------------


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
        numbers = ("weights", "gradients", "masters", "states", "scales", "averages", "device", "host", "total")
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
    for one in refused:
        line = f"Not possible: {one['optimizer']}, state_dtype {one['state_dtype']}: {one['reason']}."
        console.print(line, soft_wrap=True)
