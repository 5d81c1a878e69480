"""The summary of several optimizers as one, as printed: which has which parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.summary import arguments, groups, holds, path_of, shown

if TYPE_CHECKING:
    from ..paths.parts import Parts


def summary(parts: Parts, no_kernel: str | None) -> str:
    """Return a description of the optimizers.

    Args:
        parts: The parts of all.
        no_kernel: Why they run no fused kernels; None if they do.
    """
    options = {name: value for name in ("grad_clip_norm", "skip_nonfinite") if (value := getattr(parts.options, name))}
    lines = [shown(options)] if options else []
    lines += [f"step: {int(parts.held.global_step.asnumpy()[0])}, by {path_of(parts, no_kernel)}"]
    for own in parts.members:
        told = arguments(own, without=options)
        lines += [f"{own.layout.optimizer}(", *(f"  {line}" for line in ([shown(told)] if told else []))]
        lines += [f"  {line}" for line in (named(own.layout.names), *groups(own), f"holds: {holds(own.held)}")]
        lines += [")"]
    return f"{parts.layout.optimizer}(\n" + "".join(f"  {line}\n" for line in lines) + ")"


def named(names: Sequence[str]) -> str:
    """Return the names of an optimizer's parameters, the first and the last of them."""
    return f"parameters: {names[0]}" + (f" … {names[-1]}" if len(names) > 1 else "")
