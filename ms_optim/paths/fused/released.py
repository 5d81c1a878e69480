"""The step as one launch for each tensor, when its gradient arrives, and one launch that counts the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor, ops

from ...kernels.interface import SharedFlag
from ...kernels.table import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from .launches import Launch, LaunchCell, Maker, no_sums

if TYPE_CHECKING:
    from ..parts import Parts


@ms.jit(backend="ms_backend")
def _through_a_graph(x):
    """Run a compiled graph of one operator; afterwards, MindSpore's threads sleep until there is work.

    Threads that have run single operators keep polling for more, and slow down the next backward pass: on two cores it
    took up to twice as long. A graph without an operator, to which ``x * 1`` would be simplified, does not help.
    """
    return x + 1


class ReleasedPath:
    """The launches of a step whose gradients arrive one after the other.

        gradient (measured) | moments and weight | commit     if all gradients are looked at before a weight moves
        gradient, moments and weight | commit                 if not

    Args:
        parts: The parts that every path is built from.
        looks_first: Whether a first backward pass measures the gradients before the pass that updates the weights.
    """

    def __init__(self, parts: Parts, looks_first: bool):
        maker, every = Maker(parts, more_flags=SharedFlag.BESIDE), range(parts.layout.count)

        def each(stages: int) -> list[LaunchCell]:
            return [maker.made(Launch(stages, (i,)), picks=False) for i in every]

        self.constants, self.no_sums = maker.constants, no_sums()
        self.measuring = each(GRADIENT_STAGE) if looks_first else []
        self.moving = each(MOMENTS_STAGE + APPLY_STAGE + (0 if looks_first else GRADIENT_STAGE))
        self.commit = maker.made(Launch(COMMIT_STAGE, tuple(every)))

    def begun(self, rates: Tensor) -> Tensor:
        """Return what the other methods take as `step`: what is the same for all tensors of a step."""
        return rates

    def measure(self, i: int, step: Tensor, gradient: Tensor) -> Tensor:
        """Return the sums of a gradient, and change nothing."""
        return self.measuring[i](self.constants, step, self.no_sums, (gradient,))

    def measured(self, sums: Tensor) -> Tensor:
        """Return what :meth:`move` takes as `measured`, from the sums of all gradients."""
        return sums

    def move(self, i: int, step: Tensor, measured: Tensor | None, gradient: Tensor) -> Tensor:
        """Update a parameter and return its sums; `measured` is None if gradients were not measured before."""
        return self.moving[i](self.constants, step, self.no_sums if measured is None else measured, (gradient,))

    def count(self, step: Tensor, sums: Tensor) -> Tensor:
        """Count the step, or count it as skipped, and write the statistics from the sums of all tensors."""
        _through_a_graph(self.no_sums)
        return self.commit(self.constants, step, sums, ())

    def of_all(self, sums: dict[int, Tensor]) -> Tensor:
        """Return the sums of all tensors, in order, from the sums of each tensor."""
        return ops.concat([sums[i] for i in range(len(self.moving))])
