"""Warnings of arguments and group keys that reach no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspore import dtype as mstype

from ..arguments.checks import SPLIT_MASTERS
from ..arguments.weight_norms import is_held
from ..arguments.words import warn_once
from ..states.formats import FORMATS

if TYPE_CHECKING:
    from .parts import Parts


def warn_of_no_effect(parts: Parts, stacklevel: int) -> None:
    """Warn once of each argument, or key of groups, that reaches no tensor of an optimizer."""
    for text in without_effect(parts):
        warn_once(f"For '{parts.layout.optimizer}', {text}.", stacklevel=stacklevel + 1)


def without_effect(parts: Parts) -> Iterator[str]:
    """Yield what was asked for and reaches no tensor, and why."""
    layout, given = parts.layout, parts.options
    optimizer: Any = parts.statement
    low = [dtype != mstype.float32 for dtype in layout.dtypes]
    for key, usual in (("state_dtype", "float32"), ("master_weights", True)):
        value = getattr(given, key)
        if value != usual and all(getattr(own, key) != value for own in layout.options):
            yield f"{key}={value!r} has no effect: each group has its own '{key}'"
    for name in dict.fromkeys(own.state_dtype for own in layout.options):
        sizes = [size for size, own in zip(layout.sizes, layout.options) if own.state_dtype == name]
        least = FORMATS[name].least
        if max(sizes) < least:
            yield (
                f"state_dtype='{name}' has no effect: states of fewer than {least:,} elements stay float32, and all "
                "are smaller"
            )
    full = "has no effect: no parameter is float16 or bfloat16"
    for masters in dict.fromkeys(own.master_weights for own in layout.options):
        own_low = [is_low for is_low, own in zip(low, layout.options) if own.master_weights == masters]
        if masters in SPLIT_MASTERS and not any(own_low):
            yield f"master_weights={masters!r} {full}"
    if given.stochastic_rounding and not any(low):
        yield f"stochastic_rounding=True {full}"
    if optimizer.is_group and any(optimizer.grad_centralization_flags) and not any(layout.centralized):
        yield "'grad_centralization' has no effect: no gradient of its groups has 2 or more dimensions"
    if given.weight_norm is not None and not any(map(is_held, layout.shapes)):
        yield f"weight_norm={given.weight_norm!r} has no effect: no parameter has 2 or more dimensions"
    if given.decay == "cautious" and all(place < 0 for place in layout.decay_places):
        yield "decay='cautious' has no effect: no parameter is decayed"
