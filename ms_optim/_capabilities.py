"""What works together: the one table that construction, `AdamOffload.target`, the commands and the documents ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _kernels
from ._arguments import SPLIT_MASTERS

if TYPE_CHECKING:
    from ._base import FusedOptimizer

# What may be asked for besides the rule, and how a user writes it.
FEATURES = {
    "stochastic_rounding": "'stochastic_rounding'",
    "state_dtype": "'state_dtype'",
    "master_weights": "master_weights='split'",
    "shard_states": "'shard_states'",
    "shard_group": "the group key 'shard_group'",
    "offload": "'offload'",
    "skip_nonfinite": "'skip_nonfinite'",
    "decay": "decay='cautious'",
    "average_decay": "'average_decay'",
    "attach": "attach()",
    "local_steps": "LocalSteps",
}
_KERNEL = "needs the fused kernel"
_ON_CPU = "needs the device target 'CPU'"
_ON_HOST = "needs weights in host memory"
_FOR_ASCEND: dict[str, str] = {
    feature: "is unknown to the operators for Ascend"
    for feature in FEATURES
    if feature not in ("skip_nonfinite", "local_steps")
}
DEVICES = ("CPU", "GPU", "Ascend")
# What a path cannot do, and why. All else it does: with float32, float16 and bfloat16 weights, with and without
# masters, in Graph and in PyNative mode.
LACKS: dict[str, Mapping[str, str]] = {
    "CPU": {},
    "GPU": {"shard_states": _ON_CPU},
    "Ascend": _FOR_ASCEND,
    "native": {**_FOR_ASCEND, "skip_nonfinite": "is nothing for the platform's own AdamW, which cannot skip a step"},
    "offload": {
        **dict.fromkeys(("stochastic_rounding", "master_weights", "shard_group", "average_decay", "attach"), _ON_HOST),
        "shard_states": _ON_CPU,
    },
    "host": {**dict.fromkeys(("shard_group", "attach"), _ON_HOST), "shard_states": _ON_CPU},
    "composite": dict.fromkeys(
        ("stochastic_rounding", "state_dtype", "master_weights", "shard_states", "offload", "attach"), _KERNEL
    ),
}


def asked(options: Any, is_sharded: bool, is_sliced: bool) -> tuple[str, ...]:
    """Return what is asked for among the features.

    Args:
        options: The optimizer's shared arguments.
        is_sharded: Whether states are sharded over workers.
        is_sliced: Whether tensors are sliced.
    """
    wanted = {
        "stochastic_rounding": options.stochastic_rounding,
        "state_dtype": options.state_dtype != "float32",
        "master_weights": options.master_weights in SPLIT_MASTERS,
        "shard_states": is_sharded,
        "shard_group": is_sliced,
        "offload": options.offload,
        "skip_nonfinite": options.skip_nonfinite,
        "decay": options.decay != "decoupled",
        "average_decay": options.average_decay is not None,
        "attach": False,  # these are asked for later
        "local_steps": False,
    }
    return tuple(feature for feature in FEATURES if wanted[feature])


def why_not(path: str, features: Iterable[str]) -> str | None:
    """Say which of some features a path does not have, and why, or return None."""
    return lacking(LACKS[path], features)


def lacking(lacks: Mapping[str, str], features: Iterable[str]) -> str | None:
    """Say which of some features something lacks, and why, or return None."""
    return next((f"{FEATURES[one]} {lacks[one]}" for one in features if one in lacks), None)


class Answer(NamedTuple):
    """Whether an optimizer does what is asked for.

    Attributes:
        path: The path that does it; None: there is none.
        reason: Why no fused kernel does it; None: one does.
    """

    path: str | None
    reason: str | None


def answer(optimizer: type[FusedOptimizer], device: str, features: Iterable[str]) -> Answer:
    """Tell how an optimizer whose weights are on a device does what is asked for, where all kernels are built.

    Args:
        optimizer: The optimizer's class.
        device: "CPU", "GPU" or "Ascend".
        features: What is asked for, among :data:`FEATURES`.
    """
    features = tuple(features)
    for feature in features:
        if feature in optimizer.refuses:
            return Answer(None, f"it {optimizer.refuses[feature]}")
    path, reason = device, None
    if optimizer.runs_on_host and device != "CPU":
        path = "offload"
    elif "offload" in features and device != "CPU":
        path = "host"
    elif device == "Ascend" and optimizer.rules[0].name not in _kernels.ON_ASCEND:
        path, reason = "composite", "there is no kernel for Ascend"
    elif device == "GPU" and optimizer.rules[0].name in _kernels.HOST_RULES:
        path, reason = "composite", "there is no kernel for GPUs"
    without = lacking(optimizer.kernels_lack, features) if path != "composite" else None
    without = without or why_not(path, features)
    if without is None:
        return Answer(path, reason)
    # Where the host has the states, no other path takes over.
    takes_over = path != "offload" and why_not("composite", features) is None
    return Answer("composite" if takes_over else None, without)
