"""A step of local steps that is called from Python, which may be interrupted anywhere and is completed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..base.around import steps_taken
from ..kernels import libraries
from ..states.in_place import write

if TYPE_CHECKING:
    from ..base.averaged import Swap
    from .kept import Kept


def check_alike(marks: np.ndarray) -> None:
    """Raise an error that states how workers differ."""
    if difference := libraries.difference_of_marks(marks):
        raise RuntimeError(f"For 'LocalSteps', {difference}")


class UnderWay(NamedTuple):
    """A step called from Python, until it is counted and exchanged: it may be interrupted anywhere.

    Attributes:
        taken: The optimizer's steps before it.
        counted: The count of local steps before it.
        exchanged: The fragments to exchange after it.
    """

    taken: int
    counted: int
    exchanged: list[int]


class Progress:
    """Counts steps and makes the exchanges that are due after them, each once.

    Args:
        optimizer: The inner optimizer.
        kept: What local steps keep.
        exchanges: The exchange of each fragment.
        swap: The optimizer's object for averaged weights. What it is asked for finds whole steps.
    """

    def __init__(self, optimizer: Any, kept: Kept, exchanges: Sequence[Any], swap: Swap):
        self.optimizer, self.kept, self.exchanges = optimizer, kept, exchanges
        self.under_way: UnderWay | None = None
        self._check_between, swap.check_between = swap.check_between, self._complete_for

    def begin(self, exchanged: list[int]) -> None:
        """Note that the optimizer is about to take a step, and the fragments to exchange after it."""
        for k in exchanged:
            self.exchanges[k].prepare()
        self.under_way = UnderWay(steps_taken(self.optimizer), self._counted(), exchanged)

    def complete(self) -> None:
        """Count the step that the optimizer has taken and exchange, also if this was interrupted before."""
        step = self.under_way
        if step is not None and steps_taken(self.optimizer) == step.taken + 1:
            if self._counted() == step.counted:
                write(self.kept.step, np.array([step.counted + 1], np.int32))
            try:
                for k in step.exchanged:
                    self.exchanges[k].complete(check_alike)
            except Exception:  # which an interrupt is not
                self.under_way = None
                raise
        self.under_way = None

    def _complete_for(self, what: str) -> None:
        """Complete an interrupted step before a function that is to find whole steps."""
        self.complete()
        self._check_between(what)

    def _counted(self) -> int:
        return int(self.kept.step.asnumpy()[0])
