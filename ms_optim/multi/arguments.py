"""Checks of the optimizers that are put together, and of what they must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import nn

from ..arguments.checks import check_positive
from ..arguments.params import ordered
from ..arguments.words import fail
from ..base.optimizer import FusedOptimizer
from ..kernels.capabilities import FEATURES
from .members import is_taken

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "MultiOptimizer"


def check_optimizers(optimizers: Any) -> tuple[FusedOptimizer, ...]:
    """Check the optimizers, and return them.

    Raises:
        TypeError: If they are not optimizers of this package, or one wraps others.
        ValueError: If there are none, one is listed twice or cannot be part, two have a parameter in common, or they
            have different loss scales.
        RuntimeError: If one has taken steps, or its averaged weights are in the parameters.
    """
    found = ordered(optimizers)
    if found is None:
        fail(TypeError, NAME, "optimizers", "a list of optimizers of ms_optim", optimizers)
    if not found:
        fail(ValueError, NAME, "optimizers", "a list of at least one optimizer", optimizers)
    for i, optimizer in enumerate(found):
        _check_optimizer(f"optimizers[{i}]", optimizer)
        if any(optimizer is other for other in found[:i]):
            fail(ValueError, NAME, f"optimizers[{i}]", "another optimizer than those before it", optimizer)
    _check_disjoint(found)
    _check_equal("loss_scale", {each.loss_scale: each.cls_name for each in found})
    _check_equal("rescale_grad", {each.rule.rescale: each.cls_name for each in found})
    return tuple(found)


def _check_equal(argument: str, owners: dict[float, str]) -> None:
    """Check that all optimizers have one value of an argument, given an optimizer for each value."""
    if len(owners) > 1:
        (first, one), (second, other) = list(owners.items())[:2]
        raise ValueError(
            f"For '{NAME}', all optimizers must have the same {argument}, because one backward pass gives all "
            f"gradients, but {one} has {first:g} and {other} has {second:g}."
        )


def _check_optimizer(argument: str, optimizer: Any) -> None:
    """Check one of the optimizers."""
    if not isinstance(optimizer, FusedOptimizer):
        hint = " Make the MultiOptimizer first, and pass it to LocalSteps." if _wraps(optimizer) else ""
        fail(TypeError, NAME, argument, "an optimizer of ms_optim", optimizer, hint)
    name = optimizer.cls_name
    if optimizer._parts.members:
        fail(TypeError, NAME, argument, "a single optimizer", optimizer, " List those that it was made of.")
    if is_taken(optimizer):
        raise ValueError(f"For '{NAME}', '{argument}', {name}, is part of another MultiOptimizer already.")
    reason = optimizer.refuses.get("multi")
    features = [("shard_states", optimizer.shares is not None), ("shard_group", optimizer.is_sliced)]
    features += [("offload", optimizer._choice.path in ("offload", "host"))]
    lacking = next((FEATURES[feature] for feature, is_used in features if is_used), None)
    if reason is None and lacking is not None:
        reason = f"was made with {lacking}: its step exchanges data, which the steps of several rules cannot yet"
    if reason is None and optimizer.use_parallel:
        reason = "updates only some parameters in each process: set enable_parallel_optimizer=False"
    if reason is not None:
        raise ValueError(f"For '{NAME}', '{argument}' cannot be {name}, which {reason}.")
    optimizer._swap.check_outside(f"{NAME}(...)")
    optimizer._attachment.check_detached()
    if any(int(count.asnumpy()[0]) for count in (optimizer.global_step, optimizer.skipped_steps)):
        raise RuntimeError(
            f"For '{NAME}', '{argument}', {name}, has taken steps: make the MultiOptimizer of new optimizers, and "
            "load states into it."
        )


def _wraps(optimizer: Any) -> bool:
    return isinstance(optimizer, nn.Optimizer) and "optimizer" in optimizer._cells


def _check_disjoint(optimizers: Sequence[FusedOptimizer]) -> None:
    owners: dict[str, tuple[Any, str]] = {}
    for p, owner in _parameters(optimizers):
        known, other = owners.setdefault(p.name, (p, owner))
        if other != owner:
            how = "is in both" if known is p else "is the name of a parameter in both"
            raise ValueError(
                f"For '{NAME}', each parameter must belong to one optimizer, but '{p.name}' {how}: {other} and {owner}."
            )


def _parameters(optimizers: Sequence[FusedOptimizer]) -> Iterator[tuple[Any, str]]:
    """Return each parameter with the optimizer that has it, in words."""
    for i, optimizer in enumerate(optimizers):
        for p in optimizer.parameters:
            yield p, f"optimizers[{i}], {optimizer.cls_name}"


def check_clip(optimizers: Sequence[FusedOptimizer], grad_clip_norm: Any) -> float | None:
    """Check the bound of the norm of all gradients, and return it."""
    if grad_clip_norm is None:
        return None
    check_positive(NAME, "grad_clip_norm", grad_clip_norm)
    for i, optimizer in enumerate(optimizers):
        if optimizer.options.grad_clip_norm is not None:
            raise ValueError(
                f"For '{NAME}', 'grad_clip_norm' clips the gradients of all optimizers, but optimizers[{i}], "
                f"{optimizer.cls_name}, clips its own by grad_clip_norm={optimizer.options.grad_clip_norm:g}: pass it "
                "to the MultiOptimizer, or to some of the optimizers."
            )
    return float(grad_clip_norm)
