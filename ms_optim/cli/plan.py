"""Print the memory that each optimizer needs on device and host, for a number of parameters or a network."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms

from .. import OPTIMIZERS
from ..arguments.checks import SPLIT_MASTERS, WEIGHT_DTYPES
from ..arguments.options import Options
from ..base.optimizer import FusedOptimizer, Rule
from ..kernels import capabilities
from ..kernels import table as kernels
from ..rules.matrices import unsplit
from ..states import inventory
from ..states.formats import FORMATS
from ..states.shares import Peers, Shares, share_costs
from .plan_arguments import (
    UNITS,
    Weight,
    count,
    one_of,
    optimizer_name,
    parameters,
    size,
    weights_of_checkpoint,
    weights_of_json,
)
from .plan_hints import changes, hints
from .plan_output import Plan, as_json, elements, show, spare

MASTER_WEIGHTS: dict[str, bool | str] = {
    "float32": True,
    **{split: split for split in SPLIT_MASTERS},
    "none": False,
}
DTYPES: dict[str, Any] = {str(dtype).lower(): dtype for dtype in WEIGHT_DTYPES}


class NotPossibleError(ValueError):
    """An optimizer does not support the options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--parameters",
        type=parameters,
        help="number of parameters, such as 7e9 or 7B; counted as one large tensor, or as matrices for Muon",
    )
    source.add_argument(
        "--shapes", type=weights_of_json, help="a JSON file with a list of shapes, or with shapes by name"
    )
    source.add_argument("--checkpoint", type=weights_of_checkpoint, help="a MindSpore checkpoint of the network")
    parser.add_argument(
        "--dtype",
        type=one_of(DTYPES),
        choices=DTYPES,
        help="dtype of the parameters, such as bfloat16 or bf16; default: the checkpoint's, or float32",
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        type=optimizer_name,
        choices=[optimizer.__name__ for optimizer in OPTIMIZERS],
        metavar="NAME",
        help="optimizers to list, such as AdamW Lion; default: all",
    )
    parser.add_argument(
        "--state-dtype",
        nargs="+",
        type=one_of(FORMATS),
        choices=FORMATS,
        default=tuple(FORMATS),
        metavar="DTYPE",
        help=f"dtypes of states to list: {', '.join(FORMATS)}; default: all",
    )
    parser.add_argument(
        "--master-weights",
        nargs="+",
        type=one_of(MASTER_WEIGHTS),
        choices=MASTER_WEIGHTS,
        help="formats of the masters of 16-bit weights to list: float32, split, split8, none; default: float32, and "
        "split8 with 8-bit states of bfloat16 weights",
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep all tensors except weights and gradients on the host"
    )
    parser.add_argument("--average", action="store_true", help="keep an average of the weights (average_decay)")
    parser.add_argument("--local-steps", action="store_true", help="count LocalSteps, with outer momentum or residuals")
    parser.add_argument(
        "--device",
        type=one_of(capabilities.DEVICES),
        choices=capabilities.DEVICES,
        default=kernels.device_target(),
        help="device of the weights; default: this machine's; with CPU, all memory is the host's",
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
    weights = weights_of(arguments)
    plans, refused = plans_of(arguments)
    if arguments.json:
        print(as_json(plans, refused, weights, arguments))
        return 0 if plans else 1
    show(plans, refused, weights, arguments)
    if plans and (words := what_fits(plans, arguments, weights)):
        print(words)
    return 0 if plans else 1


def fitting(plans: Sequence[Plan], arguments: argparse.Namespace) -> list[str]:
    """Return the optimizers of plans that fit, or all where no memory was given."""
    return list(dict.fromkeys(one.optimizer for one in plans if (spare(one, arguments) or 0) >= 0))


def what_fits(plans: Sequence[Plan], arguments: argparse.Namespace, weights: Sequence[Weight]) -> str:
    """Return what to change where nothing fits, or only an optimizer that runs on the host; else nothing."""
    fit = fitting(plans, arguments)
    on_host = [optimizer.__name__ for optimizer in OPTIMIZERS if optimizer.runs_on_host]
    others = [name for name in dict.fromkeys(one.optimizer for one in plans) if name not in on_host]
    if not set(fit) <= set(on_host) or (fit and not others):
        return ""
    start, they = "Nothing fits", "It"
    if fit:
        start, they = f"Only {', '.join(fit)} fits", "Others"
        arguments = argparse.Namespace(**{**vars(arguments), "optimizer": others})
    least = 2 * 2 * elements(weights)
    if arguments.memory is not None and least > arguments.memory:
        return f"{start}: weights and gradients alone take {least / UNITS['GB']:,.2f} GB in 16 bits."
    dtypes = sorted({str(w.dtype).lower() for w in weights})
    lines = hints(arguments, dtypes, lambda changed: fitting(plans_of(changed)[0], changed))
    if not lines:
        tried = dict(changes(arguments, dtypes))
        most = max((values.get("workers", 0) for values in tried.values()), default=0)
        shown = [text for text, values in tried.items() if values.get("workers", most) == most]
        return f"{start}. Nor would {they.lower()} with one or two of these: {', '.join(shown)}."
    return "\n  ".join([f"{start}. {they} would with one of these:", *lines])


def weights_of(arguments: argparse.Namespace) -> list[Weight]:
    """Return the parameters that were asked about, in the dtype that was asked for."""
    given = arguments.parameters or arguments.shapes or arguments.checkpoint
    chosen = DTYPES.get(arguments.dtype)
    return [Weight(w.shape, chosen or w.dtype or ms.float32, w.name) for w in given]


def plans_of(arguments: argparse.Namespace) -> tuple[list[Plan], list[dict[str, str]]]:
    """Return the plans that were asked for, those that fit first, and what is not possible with the reasons."""
    plans, refused, weights = [], [], weights_of(arguments)
    for optimizer in OPTIMIZERS:
        if arguments.optimizer and optimizer.__name__ not in arguments.optimizer:
            continue
        has_matrices = arguments.parameters is not None and optimizer.rules[0].has_matrices
        own = as_matrices(weights, arguments.workers) if has_matrices else weights
        for state_dtype, masters in formats(arguments, weights):
            options = Options(
                state_dtype=state_dtype,
                master_weights=MASTER_WEIGHTS[masters],
                shard_states=arguments.shard_states,
                offload=arguments.offload,
                average_decay=0.9999 if arguments.average else None,
            )
            try:
                given = (optimizer, own, options, arguments.device, arguments.workers, arguments.local_steps)
                plans.append(plan(*given))
            except NotPossibleError as reason:
                if arguments.master_weights or masters == "float32":  # else nobody asked for it
                    refused.append({"optimizer": optimizer.__name__, "state_dtype": state_dtype, "reason": str(reason)})
    return sorted(plans, key=lambda one: (spare(one, arguments) or 0) < 0), refused


def formats(arguments: argparse.Namespace, weights: Sequence[Weight]) -> list[tuple[str, str]]:
    """Return the formats of states and masters to list: by default also the smallest that train like the others."""
    every = itertools.product(arguments.state_dtype, arguments.master_weights or ["float32"])
    dtypes = {w.dtype for w in weights}
    can_split = ms.bfloat16 in dtypes and ms.float16 not in dtypes
    if can_split and arguments.master_weights is None and "8bit" in arguments.state_dtype:
        return [*every, ("8bit", "split8")]
    return list(every)


def as_matrices(weights: Sequence[Weight], workers: int) -> list[Weight]:
    """Return a number of parameters as matrices, one for each worker, because workers do not share matrices."""
    number = elements(weights)
    sizes = [number // workers + (rank < number % workers) for rank in range(workers)]
    return [weights[0]._replace(shape=(1, size)) for size in sizes if size]


# ---- Counting -----------------------------------------------------------------------------------------------------


def plan(
    optimizer: type[FusedOptimizer],
    weights: Sequence[Weight],
    options: Options,
    device: str,
    workers: int = 1,
    local_steps: bool = False,
) -> Plan:
    """Count the bytes on the worker that holds the most.

    Args:
        optimizer: The optimizer's class.
        weights: The parameters' shapes, dtypes and names.
        options: The optimizer's shared arguments.
        device: The device of the weights, "CPU", "GPU" or "Ascend".
        workers: The number of workers that train together.
        local_steps: Whether LocalSteps takes the optimizer's steps, with outer momentum or residuals.

    Raises:
        NotPossibleError: If the optimizer does not support the options.
    """
    features = capabilities.asked(options, options.shard_states, is_sliced=False)
    features += ("local_steps",) * local_steps
    if local_steps and options.shard_states:
        raise NotPossibleError("LocalSteps rejects shard_states, whose workers hold the same weights at every step")
    path, reason = capabilities.path_of(optimizer, device, features)
    if path is None:
        raise NotPossibleError(reason)
    rule = optimizer.rules[0]
    shapes, dtypes = [w.shape for w in weights], [w.dtype for w in weights]
    names, options_of = [w.name or str(i) for i, w in enumerate(weights)], [options] * len(weights)
    try:
        inventory.check(optimizer.__name__, rule, options_of, names, dtypes)
    except ValueError as error:
        raise NotPossibleError(str(error).rstrip(".")) from None
    rules = [rule.of_tensor(is_matrix) for is_matrix in optimizer.are_matrices(names, shapes)]
    kept = [tuple(enumerate(shapes))]
    if options.shard_states and workers > 1:
        whole = optimizer.are_matrices(names, shapes)
        matrices = [unsplit(shape) if is_matrix else () for shape, is_matrix in zip(shapes, whole)]
        costs = share_costs(rule, options_of, shapes, dtypes, matrices)
        prefixes = (*rule.prefixes, "master", "average")
        shares = Shares(Peers(0, workers, None), names, shapes, costs, [False] * len(weights), prefixes, whole)
        kept = [shares.kept_by(rank) for rank in range(workers)]
    bytes_held = max((held(rules, options_of, shapes, dtypes, own) for own in kept), key=sum)
    states, scales, masters, averages = bytes_held
    own = sum(inventory.BYTES[w.dtype] * math.prod(w.shape) for w in weights)
    runs_there = optimizer.runs_on_host or options.offload
    copies = capabilities.copies_weights(optimizer, features)
    on_device, on_host = inventory.placed(device, runs_there, copies, own, sum(bytes_held))
    local = inventory.local_steps(shapes, own + masters if device != "CPU" else 0) if local_steps else 0
    name, on_host = optimizer.__name__, on_host + local
    kept = next(key for key, value in MASTER_WEIGHTS.items() if value == options.master_weights)
    numbers = (own, own, masters, states, scales, averages, local, on_device, on_host)
    step = {"composite": "operators", "host": "host", "offload": "host"}.get(path, "kernel")
    return Plan(name, options.state_dtype, kept, *numbers, step)


def held(
    rules: Sequence[Rule],
    options_of: Sequence[Options],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    kept: Iterable[Any],
) -> tuple[int, ...]:
    """Return the bytes of states, scales, masters and averages."""
    states = [state for _, state in inventory.states(rules, options_of, shapes, kept)]
    scales = [scale for state in states if (scale := inventory.scale(state)) is not None]
    masters, averages = inventory.masters(options_of, dtypes, kept), inventory.averages(options_of, kept)
    return tuple(sum(x.nbytes for x in tensors) for tensors in (states, scales, masters, averages))
