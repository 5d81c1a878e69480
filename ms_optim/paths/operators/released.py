"""The step of the composite path for one tensor at a time, when its gradient arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels.table import STATISTICS
from .composite import CompositePath
from .stacks import alone, own_rows

if TYPE_CHECKING:
    from ...arguments.checks import Scalars
    from ..parts import Parts
    from .akg import AkgKernels


class Step(NamedTuple):
    """What is the same for all tensors of a step: its number, the rule's scalars, and the rates of each tensor."""

    t: Tensor
    scalars: Scalars
    rates: Tensor


class Measured(NamedTuple):
    """What all gradients of a step tell: the factor that clips them, and whether the step is applied."""

    clip: Tensor
    applied: Tensor


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

    def begun(self, rates: Tensor) -> Step:
        """Return what the other methods take as `step`."""
        t = self.path.counting.number()
        return Step(t, self.statement.scalars(t), self.path.rates_of_each(rates))

    def measure(self, i: int, step: Step, gradient: Tensor) -> Tensor:
        """Return the norm of a gradient and whether it is finite, and change nothing."""
        _, norms, finite = self._found(i, gradient)
        return ops.stack((norms, F.cast(finite, mstype.float32)), 1)

    def measured(self, sums: Tensor) -> Measured:
        """Return what :meth:`move` takes as `measured`, from the rows of all gradients."""
        return Measured(self.path.survey.clip_factor(sums[:, 0]), self._applies(sums[:, 1] > 0))

    def move(self, i: int, step: Step, measured: Measured | None, gradient: Tensor) -> Tensor:
        """Update a parameter and return its statistics; `measured` is None if gradients were not measured before."""
        path = self.path
        prepared, norms, finite = self._found(i, gradient)
        clip, applied = (1.0, self._applies(finite)) if measured is None else measured
        rate, decay = step.rates[0][i : i + 1], step.rates[1][i : i + 1]
        if path.weighs_steps:
            rate, _ = self.statement.weighed(step.t, rate, self._step_weights()[i : i + 1])
        shared = (step.scalars, clip, step.t, applied)
        held = [column[i] for column in path.stacks.columns]
        prepared = (path.radii()[i : i + 1], prepared, norms, finite)
        rows, _ = path.updated(shared, True, path.stacks.forms[i], None, rate, decay, *prepared, *held)
        return rows

    def count(self, step: Step, sums: Tensor) -> Tensor:
        """Count the step, or count it as skipped, and write the statistics of all tensors."""
        return self.path.counting(self.keep(step, sums), sums[:, : len(STATISTICS)])

    def keep(self, step: Step, sums: Tensor) -> Tensor:
        """Write what is kept of a rule's tensors before the step is counted; return whether the step is applied.

        Args:
            step: What :meth:`begun` returned.
            sums: The rows of the tensors of all rules; norms that are held may be a last column.
        """
        path, applied = self.path, self._applies(sums[:, 4] > 0)
        if path.weighs_steps:
            _, after = self.statement.weighed(step.t, step.rates[0], self._step_weights())
            path.weigh(applied, after)
        path.hold(applied, own_rows(sums, path.rows))
        return applied

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
