"""An optimizer around another one: it has the other's attributes, and entries of its own in the state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from ..states.in_place import fitted
from .attributes import fixed
from .entries import check_names, unwrapped, written_together

if TYPE_CHECKING:
    from .averaged import Swap


class AroundOptimizer(nn.Optimizer):
    """Base class of what takes an optimizer's place and calls it.

    A subclass calls ``nn.Cell.__init__``: the constructor of nn.Optimizer would add a second learning rate and step
    count to those of the optimizer.
    """

    # The names of the constructor's arguments, besides the optimizer.
    _arguments: tuple[str, ...] = ()
    # Since the last save or load, the run that its steps belong to: see checkpoints/header.py.
    _run: str | None = None
    optimizer: Any
    _entries: AroundEntries

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of that name from the inner optimizer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            cells = self.__dict__.get("_cells") or {}
            if "optimizer" not in cells:
                raise
            return getattr(cells["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless the step was built with its value."""
        if "_entries" in self.__dict__ and (name in self._arguments or name in self.optimizer._fixed):
            raise AttributeError(fixed(self.cls_name, name))
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return what :meth:`ms_optim.FusedOptimizer.state_dict` of the optimizer does, and what is kept around it.

        Args:
            args: Arguments of ``nn.Cell.state_dict``, which an outer Cell passes; its result is then returned.
            kwargs: Likewise.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return self._entries.copied()

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, learning_rate: str = "load") -> None:
        """Load what :meth:`state_dict` has returned, and continue from its step.

        Args:
            state_dict: Tensors or Parameters by name, as :meth:`state_dict` returns them.
            strict: As in :meth:`ms_optim.FusedOptimizer.load_state_dict`. Default: ``True`` .
            learning_rate: Likewise. Default: ``"load"`` .

        Errors are those of :meth:`ms_optim.FusedOptimizer.load_state_dict`; if one is raised, nothing is changed.
        """
        written_together(self._entries.fitting(state_dict, strict, learning_rate=learning_rate))


def steps_taken(optimizer: Any) -> int:
    """Return the number of steps that an optimizer has taken, including skipped ones."""
    return sum(int(count.asnumpy()[0]) for count in (optimizer.global_step, optimizer.skipped_steps))


class AroundEntries:
    """The entries of the state dict, as :class:`ms_optim.base.state_dict.StateEntries` for a single optimizer.

    Args:
        name: Name of the class, for the errors.
        inner: The entries of the inner optimizer.
        kept: The parameters that are kept besides.
        check: Raises an error if entries for these do not fit.
    """

    swap: Swap

    def __init__(
        self,
        name: str,
        inner: Any,
        kept: Iterable[Parameter],
        check: Callable[[dict[str, Tensor]], None] = lambda given: None,
    ):
        self.name, self.inner, self.swap, self.check = name, inner, inner.swap, check
        self.kept = {p.name: p for p in kept}

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
        self.check(given)
        own = [(self.kept[name], fitted(self.name, name, self.kept[name], value)) for name, value in given.items()]
        return self.inner.fitting(rest, strict, weights, learning_rate) + own
