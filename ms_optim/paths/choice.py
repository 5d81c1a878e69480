"""The choice of a path: fused kernels, AKG's kernels or MindSpore's operators, with the reason for no fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..arguments.words import warn_once
from ..kernels import capabilities
from ..kernels import table as kernels
from ..states.formats import CODED, LEAST_CODED
from .ascend import native, operators
from .ascend.matrices import AscendMatricesPath
from .ascend.tensor_by_tensor import TensorByTensorPath
from .fused.adam_offload import CrossingPath
from .fused.matrix_passes import MatrixPassesPath
from .fused.offloaded import HostPath
from .fused.sharded_states import ShardedStatesPath
from .fused.step import FusedPath
from .operators import akg
from .operators.composite import CompositePath

if TYPE_CHECKING:
    from mindspore import nn

    from .parts import Parts


class Choice(NamedTuple):
    """Which path runs.

    Attributes:
        is_fused: Whether a fused kernel runs.
        akg: AKG's kernels, if these run.
        reason: Why no fused kernel runs.
    """

    is_fused: bool
    akg: akg.AkgKernels | None
    reason: str


def choose(parts: Parts) -> Choice:
    """Choose between kernels and MindSpore's operators, and warn once if no fused kernel runs.

    Raises:
        RuntimeError: If the requested backend has no kernel, or a requested feature needs another path.
    """
    name, wanted, features = parts.layout.optimizer, parts.options.backend, asked(parts)
    if parts.options.state_dtype in CODED and not parts.held.scales and parts.shares is None:
        warn_once(
            f"For '{name}', state_dtype='{parts.options.state_dtype}' has no effect: states of fewer than "
            f"{LEAST_CODED:,} elements stay float32, and all are smaller.",
            stacklevel=6,
        )
    reason = f"backend='{wanted}' was asked for"
    if wanted not in ("composite", "akg"):
        reason = _why_not_fused(parts, features)
        if reason is None:
            return Choice(True, None, "")
        if wanted in ("aot", "native"):
            raise RuntimeError(f"For '{name}', backend='{wanted}' has no fused kernel: {reason}.")
    check("composite", parts, reason)
    if wanted == "composite":
        return Choice(False, None, reason)
    akg_kernels, fault = _akg_kernels(parts)
    if wanted == "akg":
        if fault is not None:
            raise RuntimeError(f"For '{name}', backend='akg' has no kernel: {fault}.")
        return Choice(False, akg_kernels, reason)
    path = "in AKG's kernels" if fault is None else "on the slower composite path"
    # That AKG cannot run is no news; that it computes wrongly is.
    reason += f"; {fault}" if fault is not None and akg.why_not(parts.rule, parts.settings) is None else ""
    warn_once(f"ms_optim runs {path}: {reason}.", stacklevel=6)
    return Choice(False, akg_kernels, reason)


def asked(parts: Parts) -> tuple[str, ...]:
    """Return the features that an optimizer requests from its path."""
    return capabilities.asked(parts.options, parts.shares is not None, parts.slices is not None)


def check(path: str, parts: Parts, reason: str = "") -> None:
    """Check that a path supports the requested features.

    Args:
        path: A path of the table of capabilities.
        parts: The parts that it would be built from.
        reason: Why no other path runs, or what the device is.

    Raises:
        RuntimeError: If it does not support one.
    """
    lacking = capabilities.why_not(path, asked(parts))
    if lacking is not None:
        raise RuntimeError(f"For '{parts.layout.optimizer}', {lacking}{f': {reason}' if reason else ''}.")


def fused_path(parts: Parts) -> nn.Cell:
    """Return the path that runs fused kernels."""
    settings, rule = parts.settings, parts.rule
    if settings.device != settings.weights_on:
        check("host", parts, f"the device target is '{settings.weights_on}'")
        return HostPath(parts)
    has_passes = settings.device == "GPU" and rule.name in kernels.GPU_PASSES
    check("passes" if has_passes else settings.device, parts, f"the device target is '{settings.device}'")
    if has_passes:
        return MatrixPassesPath(parts)
    if parts.shares is not None:
        return ShardedStatesPath(parts, parts.shares)
    if settings.device != "Ascend":
        return FusedPath(parts, parts.slices)
    if rule.iterations:
        return AscendMatricesPath(parts)
    if parts.options.backend == "native":
        return TensorByTensorPath(parts, operators.sign(rule), native.NativeAdamW(parts))
    return TensorByTensorPath(parts, operators.sign(rule), operators.AscendOperators(parts))


def composite_path(parts: Parts, akg_kernels: akg.AkgKernels | None) -> nn.Cell:
    """Return the path that runs MindSpore's operators, with AKG's kernels if there are any."""
    check("composite", parts)
    return CompositePath(parts, akg_kernels)


def crossing_path(parts: Parts) -> nn.Cell:
    """Return the path of :class:`ms_optim.AdamOffload`, which runs the host's kernels."""
    device = parts.settings.weights_on
    if device == "CPU":
        return fused_path(parts)
    check("offload", parts, f"the device target is '{device}'")
    return CrossingPath(parts, device)


def _why_not_fused(parts, features):
    """Return why no fused kernel runs, or None."""
    device = parts.settings.device
    if parts.options.backend == "native":
        reason, path = native.why_not(parts), "native"
    else:
        reason, path = kernels.why_not(parts.rule.name, device), device
    if reason is None:
        reason = capabilities.lacking(parts.statement.kernels_lack, features)
    if reason is None and device == "Ascend":
        reason = capabilities.why_not(path, features)
    return reason


def _akg_kernels(parts):
    """Return AKG's kernels of a rule, or None and what is wrong with them."""
    rule, settings, statement = parts.rule, parts.settings, parts.statement
    reason = akg.why_not(rule, settings)
    if reason is not None:
        return None, reason
    akg_kernels = akg.AkgKernels(rule.name, len(rule.states), statement.akg_constants())
    reason = akg.tried(akg_kernels, statement, rule, settings.device, settings.step_dtype, parts.layout.sizes)
    return (akg_kernels, None) if reason is None else (None, reason)
