"""Checks of the arguments of local steps and of the inner optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arguments.checks import check_count, check_momentum, check_positive, check_type, fail
from ..base.optimizer import FusedOptimizer
from ..kernels import libraries
from .compression import Quantized, SparseTopK

if TYPE_CHECKING:
    from .wire import Outer

# Arguments of LocalSteps besides the optimizer.
ARGUMENTS = ("every", "fragments", "outer_learning_rate", "outer_momentum", "nesterov", "compress")
ARGUMENTS += ("group", "local_group")


def check_local_steps(name: str, optimizer: Any, outer: Outer, group: Any) -> None:
    """Check the arguments of local steps.

    Args:
        name: Name of the class, for the errors.
        optimizer: The inner optimizer.
        outer: The outer step.
        group: The communication group.
    """
    if not isinstance(optimizer, FusedOptimizer):
        fail(TypeError, name, "optimizer", "an optimizer of ms_optim", optimizer)
    check_count(name, "every", outer.every, 1)
    check_count(name, "fragments", outer.fragments, 1)
    check_positive(name, "outer_learning_rate", outer.learning_rate)
    check_momentum(name, "outer_momentum", outer.momentum)
    check_type(name, "nesterov", outer.nesterov, bool)
    if outer.compress is not None and not isinstance(outer.compress, (SparseTopK, Quantized)):
        fail(TypeError, name, "compress", "a SparseTopK, a Quantized or None", outer.compress)
    if outer.every % outer.fragments or outer.fragments > optimizer._layout.count:
        what = f"a divisor of 'every', {outer.every}, and at most the number of parameters, {optimizer._layout.count}"
        fail(ValueError, name, "fragments", what, outer.fragments)
    if reason := optimizer.refuses.get("local_steps"):
        raise ValueError(f"For '{name}', the argument 'optimizer' cannot be {optimizer.cls_name}, which {reason}.")
    if optimizer.shares is not None:
        raise ValueError(
            f"For '{name}', the optimizer must not shard its states: that requires equal weights on all workers."
        )
    if optimizer.is_sliced and group is None:
        raise ValueError(
            f"For '{name}', the optimizer's tensors are sliced: 'group' must name the processes that hold the same "
            "slices."
        )
    if reason := libraries.why_missing("CPU"):
        raise RuntimeError(f"For '{name}', the library for CPU is required, but {reason}.")
