"""The step of the composite path for one tensor at a time, when its gradient arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .composite import CompositePath
from .stacks import alone, own_rows

if TYPE_CHECKING:
    from ..parts import Parts
    from .akg import AkgKernels


class ReleasedCompositePath:
    """The step in MindSpore's operators, for gradients that arrive one after the other.

    It has the methods of :class:`ms_optim.paths.fused.released.ReleasedPath`. What those pass on as sums is here a row
    for each tensor: of its gradient's norm and whether it is finite, or of its statistics.

    Args:
        parts: The parts that every path is built from.
        akg: AKG's kernels for the elementwise parts; None for MindSpore's operators.
    """

    def __init__(self, parts: Parts, akg: AkgKernels | None = None):
        self.path = CompositePath(parts, akg, alone=True)
        self.statement = parts.statement

    def measure(self, i: int, rates: Tensor, gradient: Tensor) -> Tensor:
        """Return the norm of a gradient and whether it is finite, and change nothing."""
        _, norms, finite = self._found(i, gradient)
        return ops.stack((norms, F.cast(finite, mstype.float32)), 1)

    def move(self, i: int, rates: Tensor, measured: Tensor | None, gradient: Tensor) -> Tensor:
        """Update a parameter and return its statistics; `measured` has the rows of all gradients, if there are any."""
        path, t = self.path, self.path.counting.number()
        prepared, norms, finite = self._found(i, gradient)
        clip = 1.0 if measured is None else path.survey.clip_factor(measured[:, 0])
        applied = self._applies(finite if measured is None else measured[:, 1] > 0)
        table = path.rates_of_each(rates)
        rate, decay = table[0][i : i + 1], table[1][i : i + 1]
        if path.weighs_steps:
            rate, _ = self.statement.weighed(t, rate, self._step_weights()[i : i + 1])
        shared = (self.statement.scalars(t), clip, t, applied)
        held = [column[i] for column in path.stacks.columns]
        rows, _ = path.updated(shared, True, path.stacks.forms[i], None, rate, decay, prepared, norms, finite, *held)
        return rows

    def count(self, rates: Tensor, sums: Tensor) -> Tensor:
        """Count the step, or count it as skipped, and write the statistics of all tensors."""
        self.weigh(rates, sums)
        return self.path.counting(self._applies(sums[:, 4] > 0), sums)

    def weigh(self, rates: Tensor, sums: Tensor) -> None:
        """Write what a rule keeps that weighs steps, before the step is counted."""
        path, applied = self.path, self._applies(sums[:, 4] > 0)
        if path.weighs_steps:
            t, of_each = path.counting.number(), path.rates_of_each(rates)[0]
            path.weigh(applied, self.statement.weighed(t, of_each, self._step_weights())[1])

    def of_all(self, sums: dict[int, Tensor]) -> Tensor:
        """Return the rows of all tensors, in order, from the rows of each tensor."""
        return ops.concat([sums[i] for i in range(len(self.path.stacks.places))])

    def _found(self, i, gradient):
        """Return a gradient, prepared, as a stack; its norm; and whether it is finite."""
        stack = alone(F.cast(gradient, mstype.float32))
        return self.path.survey.found(stack, self.path.stacks.centralized[i])

    def _step_weights(self):
        return own_rows(self.path.step_weights, self.path.rows)

    def _applies(self, finite):
        return self.path.counting.applies(ops.all(finite))
