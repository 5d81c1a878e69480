"""The choice of a path: fused kernels, AKG's kernels or MindSpore's operators, with the reason for no fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..arguments.words import warn_once
from ..kernels import capabilities
from ..kernels import table as kernels
from ..unregistered import bind_once
from .ascend.matrices import AscendMatricesPath
from .ascend.tensor_by_tensor import TensorByTensorPath
from .fused.adam_offload import CrossingPath
from .fused.joint import JointFusedPath
from .fused.matrix_passes import MatrixPassesPath
from .fused.offloaded import HostPath
from .fused.released import ReleasedPath
from .fused.sharded_states import ShardedStatesPath
from .fused.step import FusedPath
from .joint_released import JointReleasedPath
from .no_effect import warn_of_no_effect
from .operators import akg
from .operators.composite import CompositePath
from .operators.joint import JointOperatorsPath
from .operators.released import ReleasedCompositePath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mindspore import nn

    from .parts import Parts

# How each path of the table of capabilities is made. The composite path also takes AKG's kernels.
PATHS: dict[str, Callable[..., nn.Cell]] = {
    "CPU": lambda parts: FusedPath(parts, parts.slices) if parts.shares is None else ShardedStatesPath(parts),
    "GPU": lambda parts: FusedPath(parts, parts.slices),
    "Ascend": lambda parts: AscendMatricesPath(parts) if parts.rule.iterations else TensorByTensorPath(parts),
    "passes": MatrixPassesPath,
    "offload": CrossingPath,
    "host": HostPath,
    "composite": CompositePath,
}


class Choice(NamedTuple):
    """Which path runs.

    Attributes:
        path: A path of :data:`PATHS`.
        akg: AKG's kernels, if these run.
        reason: Why no fused kernel runs; "" if one does.
    """

    path: str
    akg: akg.AkgKernels | None = None
    reason: str = ""


def path_for(choice: Choice, parts: Parts) -> nn.Cell:
    """Make the path that was chosen."""
    make = PATHS[choice.path]
    return bind_once(make(parts) if choice.akg is None else make(parts, choice.akg))


def choose(parts: Parts) -> Choice:
    """Choose between kernels and MindSpore's operators, and warn once if no fused kernel runs.

    Raises:
        RuntimeError: If the requested backend has no kernel, or a requested feature needs another path.
    """
    name, wanted, device = parts.layout.optimizer, parts.options.backend, parts.settings.weights_on
    warn_of_no_effect(parts, stacklevel=6)
    if wanted in ("composite", "akg"):
        reason = f"backend='{wanted}' was asked for"
        check_composite(parts, reason)
    else:
        missing = kernels.why_not(parts.rule.name, parts.settings.device)
        path, why = capabilities.path_of(type(parts.statement), device, asked(parts), parts.rule.name, missing)
        if why is None:
            return Choice(str(path))
        if wanted == "aot":
            raise RuntimeError(f"For '{name}', backend='aot' has no fused kernel: {missing or why}.")
        if path is None:
            raise RuntimeError(f"For '{name}', {why}: {missing or f'the device target is {device!r}'}.")
        reason = why
    if wanted == "composite":
        return Choice("composite", None, reason)
    akg_kernels, fault = _akg_kernels(parts)
    if wanted == "akg":
        if fault is not None:
            raise RuntimeError(f"For '{name}', backend='akg' has no kernel: {fault}.")
        return Choice("composite", akg_kernels, reason)
    path = "in AKG's kernels" if fault is None else "on the slower composite path"
    # That AKG cannot run is no news; that it computes wrongly is.
    can_run = akg.why_not(parts.rule, parts.settings, parts.options) is None
    reason += f"; {fault}" if fault is not None and can_run else ""
    warn_once(f"ms_optim runs {path}: {reason}.", stacklevel=6)
    return Choice("composite", akg_kernels, reason)


def released_path(parts: Parts, choice: Choice, looks_first: bool) -> ReleasedPath | ReleasedCompositePath:
    """Make the path of steps whose gradients arrive one after the other.

    Args:
        parts: The parts that the optimizer's path is built from.
        choice: That path.
        looks_first: Whether a first backward pass measures the gradients before the pass that updates the weights.

    Raises:
        RuntimeError: If no path does this.
    """
    if choice.path in ("offload", "host"):
        name, device = parts.layout.optimizer, parts.settings.weights_on
        remedy = "offload=False" if parts.options.offload else f"optimizer.target = '{device}'"
        raise RuntimeError(f"For '{name}', attach() needs the arithmetic where the weights are: use {remedy}.")
    if choice.path == "composite" or capabilities.why_not(choice.path, ["attach"]) is not None:
        return ReleasedCompositePath(parts, choice.akg)
    return ReleasedPath(parts, looks_first)


# ---- Several rules in one step --------------------------------------------------------------------------------------

KERNELS, OPERATORS = ("CPU", "GPU", "passes"), ("Ascend", "composite")  # paths that take a step together


def joint_choice(name: str, alone: Sequence[tuple[Parts, Choice]]) -> tuple[Choice, list[Choice]]:
    """Choose how several rules take a step together: all by fused kernels, or all by operators.

    Args:
        name: Name of the class that holds the rules, for the warning.
        alone: For each rule its parts, and the path that was chosen for it alone.

    Returns:
        The choice for all, and that of each rule.
    """
    own = [choice for _, choice in alone]
    if any(choice.path in KERNELS for choice in own) and any(choice.path in OPERATORS for choice in own):
        parts, choice = next(each for each in alone if each[1].path in OPERATORS)
        reason = f"{parts.layout.optimizer} runs no fused kernel" + (f": {choice.reason}" if choice.reason else "")
        for parts, _ in alone:
            check_composite(parts, reason)
        warn_once(f"For '{name}', all optimizers run on the slower composite path, because {reason}.", stacklevel=4)
        own = [choice if choice.path == "composite" else Choice("composite", None, reason) for choice in own]
    return next((choice for choice in own if choice.path == "composite"), own[0]), own


def joint_path(choices: Sequence[Choice], parts: Parts) -> nn.Cell:
    """Make the path of several rules from the choice of each."""
    if choices[0].path in KERNELS:
        return JointFusedPath(parts)
    return JointOperatorsPath(parts, [path_for(choice, own) for choice, own in zip(choices, parts.members)])


def joint_released_path(choices: Sequence[Choice], parts: Parts, looks_first: bool) -> JointReleasedPath:
    """Make the path of several rules whose gradients arrive one after the other."""
    paths = [released_path(own, choice, looks_first) for choice, own in zip(choices, parts.members)]
    if any(isinstance(path, ReleasedCompositePath) for path in paths):
        paths = [ReleasedCompositePath(own, choice.akg) for choice, own in zip(choices, parts.members)]
    return JointReleasedPath(parts, paths)


def asked(parts: Parts) -> tuple[str, ...]:
    """Return the features that an optimizer requests from its path."""
    is_sharded, is_sliced = parts.shares is not None, parts.slices is not None
    each = [capabilities.asked(options, is_sharded, is_sliced) for options in dict.fromkeys(parts.layout.options)]
    return tuple(feature for feature in capabilities.FEATURES if any(feature in own for own in each))


def check_composite(parts: Parts, reason: str = "") -> None:
    """Check that MindSpore's operators support the requested features.

    Args:
        parts: The parts that the path would be built from.
        reason: Why no other path runs.

    Raises:
        RuntimeError: If they do not support one.
    """
    lacking = capabilities.why_not("composite", asked(parts))
    if lacking is not None:
        raise RuntimeError(f"For '{parts.layout.optimizer}', {lacking}{f': {reason}' if reason else ''}.")


def _akg_kernels(parts):
    """Return AKG's kernels of a rule, or None and what is wrong with them."""
    rule, settings, statement = parts.rule, parts.settings, parts.statement
    reason = akg.why_not(rule, settings, parts.options)
    if reason is not None:
        return None, reason
    akg_kernels = akg.AkgKernels(rule.name, len(rule.states), statement.akg_constants())
    reason = akg.tried(akg_kernels, statement, rule, settings.device, settings.step_dtype, parts.layout.sizes)
    return (akg_kernels, None) if reason is None else (None, reason)
