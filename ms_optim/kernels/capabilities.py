"""The one table of supported combinations, for construction, `AdamOffload.target`, commands and documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments.checks import SPLIT_MASTERS
from ..arguments.options import STAGES, asked_stages
from . import table

if TYPE_CHECKING:
    from ..rules.rule import Statement

# The features that can be requested in addition to the rule, and how a user writes each.
FEATURES = {
    "stochastic_rounding": "'stochastic_rounding'",
    "state_dtype": "'state_dtype'",
    "master_weights": "master_weights='split'",
    "shard_states": "'shard_states'",
    "shard_group": "the group key 'shard_group'",
    "offload": "'offload'",
    **{stage.keyword: stage.words or f"'{stage.keyword}'" for stage in STAGES},
    "attach": "attach()",
    "local_steps": "LocalSteps",
    "multi": "MultiOptimizer",
}
_FORMATS = ("stochastic_rounding", "state_dtype", "master_weights")
DEVICES = ("CPU", "GPU", "Ascend")
# Why a path does not support what it lacks, if there is no other reason.
_REASONS = {
    "CPU": "is not supported by the kernels for CPU",
    "GPU": "is not supported by the kernels for GPU",
    "passes": "is not supported by the kernels for GPU",
    "Ascend": "is not supported by the operators for Ascend",
    "offload": "needs weights in host memory",
    "host": "needs the arithmetic where the weights are",
    "composite": "needs the fused kernel",
}


def _lacks(path: str, *features: str, **others: str) -> dict[str, str]:
    """Return what a path lacks and why: features, the stages that say so, and others with a reason of their own."""
    lacking = (*features, *(stage.keyword for stage in STAGES if path in stage.lacking))
    return {**(dict.fromkeys(lacking, _REASONS[path]) if lacking else {}), **others}


# The features that a path does not support, and why. It supports all others: with float32, float16 and bfloat16
# weights, with and without masters, in Graph and in PyNative mode.
LACKS: dict[str, Mapping[str, str]] = {
    "CPU": _lacks("CPU"),
    "GPU": _lacks("GPU", "shard_states"),
    "Ascend": _lacks("Ascend", *_FORMATS, "shard_states", "shard_group", "offload", "attach"),
    # Fused passes before and after products of matrices, on GPUs.
    "passes": _lacks(
        "passes",
        "shard_states",
        attach="is not supported for rules of matrices on GPUs, which multiply stacks of tensors",
    ),
    # A float32 weight stays on the device, and its update returns; the path "host" keeps copies of all weights.
    "offload": _lacks("offload", "stochastic_rounding", "master_weights", "shard_group", "shard_states", "attach"),
    "host": _lacks("host", "attach"),
    "composite": _lacks("composite", "offload"),
}


def asked(options: Any, is_sharded: bool, is_sliced: bool) -> tuple[str, ...]:
    """Return the requested features.

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
        **{stage.keyword: True for stage in asked_stages(options)},
    }
    return tuple(feature for feature in FEATURES if wanted.get(feature))


def why_not(path: str, features: Iterable[str]) -> str | None:
    """Return the first of the features that a path does not support, with the reason; None if it supports all."""
    return lacking(LACKS[path], features)


def lacking(lacks: Mapping[str, str], features: Iterable[str]) -> str | None:
    """Return the first of the features that a table lists as missing, with the reason; None if it lists none."""
    return next((f"{FEATURES[one]} {lacks[one]}" for one in features if one in lacks), None)


def copies_weights(optimizer: type[Statement] | Statement, features: Iterable[str]) -> bool:
    """Return whether the host keeps copies of the weights of a device, if the arithmetic of an optimizer runs there."""
    features = tuple(features)
    return "offload" in features or (optimizer.runs_on_host and why_not("offload", features) is not None)


class Answer(NamedTuple):
    """Which path runs an optimizer's step.

    Attributes:
        path: The path, from :data:`LACKS`; None if none supports the requested features.
        reason: Why no fused kernel supports them; None if one does.
    """

    path: str | None
    reason: str | None


def path_of(
    optimizer: type[Statement],
    device: str,
    features: Iterable[str],
    rule: str | None = None,
    missing: str | None = None,
) -> Answer:
    """Return which path runs an optimizer's step, and why no fused kernel does.

    Args:
        optimizer: The optimizer's class.
        device: The device of the weights: "CPU", "GPU" or "Ascend".
        features: The requested features, from :data:`FEATURES`.
        rule: The name of its rule; None for the first of its class.
        missing: Why the rule's kernel cannot run here, for example because it is not built; None if it can.
    """
    features = tuple(features)
    for feature in features:
        if feature in optimizer.refuses:
            return Answer(None, f"it {optimizer.refuses[feature]}")
    rule = optimizer.rules[0].name if rule is None else rule
    path = device
    if device != "CPU" and (optimizer.runs_on_host or "offload" in features):
        path = "host" if copies_weights(optimizer, features) else "offload"
    elif device == "Ascend" and rule not in table.ON_ASCEND:
        missing = missing or "there is no kernel for Ascend"
    elif device == "GPU" and rule in table.GPU_PASSES:
        path = "passes"
    lacks = lacking(optimizer.kernels_lack, features) or why_not(path, features)
    if lacks is None and {"shard_states", "shard_group"} <= {*features}:
        lacks = f"{FEATURES['shard_states']} together with {FEATURES['shard_group']} needs sums over both"
    if missing is None and lacks is None:
        return Answer(path, None)
    without_kernel = why_not("composite", features)
    if without_kernel is None:
        return Answer("composite", missing or lacks)
    return Answer(None, lacks if missing is None else without_kernel)
