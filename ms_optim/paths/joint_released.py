"""The step of several rules whose gradients arrive one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, ops

from .fused.joint import seen_by
from .operators.released import ReleasedCompositePath

if TYPE_CHECKING:
    from .parts import Parts


class JointReleasedPath:
    """The paths of several rules, with one decision about clipping and skipping.

    It has the methods of :class:`ms_optim.paths.fused.released.ReleasedPath`, and of each rule such a path: all on
    fused kernels, or all on MindSpore's operators.

    Args:
        parts: The parts of all rules.
        paths: The path of each rule.
    """

    def __init__(self, parts: Parts, paths: Sequence[Any]):
        self.parts, self.paths = parts, paths
        in_operators = isinstance(paths[0], ReleasedCompositePath)
        has_one_norm = parts.options.grad_clip_norm is not None
        seen: Callable[[Parts, bool], Callable[[Tensor], Tensor]] = _own_norms if in_operators else seen_by
        self.seen = [seen(own, has_one_norm) for own in parts.members]
        self.in_operators = in_operators
        self._places = [(k, i) for k, own in enumerate(parts.members) for i in range(own.layout.count)]

    def begun(self, rates: Tensor) -> tuple[Any, ...]:
        """Return what the other methods take as `step`: what each rule makes of it."""
        return tuple(path.begun(rates) for path in self.paths)

    def measure(self, i: int, step: tuple[Any, ...], gradient: Tensor) -> Tensor:
        """Return the sums of a gradient, and change nothing."""
        rule, own = self._places[i]
        return self.paths[rule].measure(own, step[rule], gradient)

    def measured(self, sums: Tensor) -> tuple[Any, ...]:
        """Return what :meth:`move` takes as `measured`, from the sums of all gradients."""
        return tuple(path.measured(seen(sums)) for path, seen in zip(self.paths, self.seen))

    def move(self, i: int, step: tuple[Any, ...], measured: tuple[Any, ...] | None, gradient: Tensor) -> Tensor:
        """Update a parameter and return its sums; `measured` is None if gradients were not measured before."""
        rule, own = self._places[i]
        return self.paths[rule].move(own, step[rule], None if measured is None else measured[rule], gradient)

    def count(self, step: tuple[Any, ...], sums: Tensor) -> Tensor:
        """Count the step, or count it as skipped, after all rules."""
        for path, own in zip(self.paths[:-1], step) if self.in_operators else ():
            path.keep(own, sums)
        return self.paths[-1].count(step[-1], sums)

    def of_all(self, sums: dict[int, Tensor]) -> Tensor:
        """Return the sums of all tensors, in order, from the sums of each tensor."""
        rows = [sums[i] for i in range(len(self._places))]
        # Rules that hold norms have a column more, which only they read.
        columns = max(row.shape[1] for row in rows)
        return ops.concat([row if row.shape[1] == columns else ops.pad(row, (0, 1)) for row in rows])


def _own_norms(parts: Parts, has_one_norm: bool) -> Callable[[Tensor], Tensor]:
    """Return what gives a rule on MindSpore's operators the norms by which it clips, and which gradients are finite."""
    rows = np.arange(parts.held.statistics.shape[0])
    is_own = (rows >= parts.layout.rows.start) & (rows < parts.layout.rows.stop)
    counted = Tensor(np.stack((is_own | has_one_norm, np.ones_like(is_own)), 1).astype(np.float32))
    # A norm that is not finite stays in the rule's own row alone.
    return lambda measured: ops.where(counted > 0, measured, ops.zeros_like(measured))
