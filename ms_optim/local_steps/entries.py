"""The state dict of local steps: their own entries and those of their optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor

from ..base.entries import check_names, unwrapped
from ..states.in_place import fitted
from ..workers.residuals import check_entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..base.averaged import Swap
    from ..base.state_dict import StateEntries
    from .kept import Kept


class LocalEntries:
    """The entries of the state dict, as :class:`ms_optim.base.state_dict.StateEntries` for a single optimizer.

    Args:
        name: Name of the class, for the errors.
        inner: The entries of the inner optimizer.
        kept: What local steps keep.
    """

    swap: Swap

    def __init__(self, name: str, inner: StateEntries, kept: Kept):
        self.name, self.inner, self.swap = name, inner, inner.swap
        self.worker, self.own_worker = kept.worker.name, kept.worker.asnumpy()
        self.kept = {p.name: p for p in (*kept.of_tensors, kept.step, kept.worker)}

    def named(self) -> dict[str, Parameter]:
        """Return the weights and all that is kept, by their names from construction."""
        return {**self.inner.named(), **self.kept}

    def own(self) -> dict[str, Parameter]:
        """Return the same without the weights."""
        return {**self.inner.own(), **self.kept}

    def copied(self) -> dict[str, Tensor]:
        """Return copies of what :meth:`named` returns, with the weights that training uses."""
        return {**self.inner.copied(), **{name: Tensor(p.asnumpy().copy(), p.dtype) for name, p in self.kept.items()}}

    def fitting(
        self,
        state_dict: dict[str, Tensor],
        strict: bool,
        weights: Iterable[tuple[Parameter, np.ndarray]] = (),
        learning_rate: str = "load",
    ) -> list[tuple[Parameter, np.ndarray]]:
        """Check a whole state dict, and return the parameters to write with their values.

        Args:
            state_dict: The state dict.
            strict: Whether missing and unknown names are an error.
            weights: Weights that are loaded together with the state dict but are not in it.
            learning_rate: Whether learning rates are written: "load" or "keep".
        """
        if not isinstance(state_dict, dict) or not all(isinstance(value, Tensor) for value in state_dict.values()):
            return self.inner.fitting(state_dict, strict, weights, learning_rate)  # which raises the error
        entries = unwrapped(state_dict)
        given = {name: value for name, value in entries.items() if name in self.kept}
        rest = {name: value for name, value in entries.items() if name not in self.kept}
        if strict:
            check_names(self.name, self.kept, given, ())
        if self.worker in given:
            check_entry(self.name, self.worker, given[self.worker], self.own_worker)
        own = [(self.kept[name], fitted(self.name, name, self.kept[name], value)) for name, value in given.items()]
        return self.inner.fitting(rest, strict, weights, learning_rate) + own
