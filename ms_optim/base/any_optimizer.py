"""Any optimizer of the package: one that runs fused kernels, or local steps around one; and where a Model has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from mindspore import Parameter, nn

if TYPE_CHECKING:
    from ..arguments.rates import Rates
    from ..states.layout import Layout
    from ..states.shares import Shares


class AnyOptimizer(Protocol):
    """What checkpoints and callbacks ask of an optimizer: FusedOptimizer, or LocalSteps, which wraps one."""

    cls_name: str
    parameters: Sequence[Parameter]
    global_step: Parameter
    skipped_steps: Parameter
    statistics: Parameter
    is_sliced: bool
    shares: Shares | None
    state_shares: Parameter  # only with `shares`
    workers: Any  # only of those that exchange
    _entries: Any
    _attachment: Any
    _layout: Layout
    _rates: Rates
    _run: str | None

    def cells_and_names(self) -> Iterable[tuple[str, nn.Cell]]:
        """Return all Cells of it by name."""
        ...


def is_any_optimizer(value: Any) -> TypeGuard[AnyOptimizer]:
    """Return whether a value is an optimizer of this package, which has entries of a state dict."""
    return isinstance(value, nn.Optimizer) and "_entries" in vars(value)


def optimizer_of(callback: str, optimizer: Any, network: Any) -> AnyOptimizer:
    """Find the optimizer that a Model trains with; a Cell may wrap it."""
    cells = [c for outer in (optimizer, network) if isinstance(outer, nn.Cell) for _, c in outer.cells_and_names()]
    found = {id(cell): cell for cell in cells if is_any_optimizer(cell)}
    for cell in list(found.values()):  # an optimizer inside another one does not count
        for _, inner in cell.cells_and_names():
            if inner is not cell:
                found.pop(id(inner), None)
    if not found:
        others = {type(cell).__name__: cell for cell in cells if isinstance(cell, nn.Optimizer)}
        came = f"nn.{next(iter(others))}" if others else "one without an optimizer"
        raise TypeError(f"For '{callback}', the model must be trained by an optimizer of ms_optim, but got {came}.")
    if len(found) > 1:
        names = ", ".join(type(cell).__name__ for cell in found.values())
        raise ValueError(
            f"For '{callback}', the model must have one optimizer of ms_optim, but has {names}: write a training "
            "loop of your own, and call monitor.step(optimizer) with one monitor for each, or ms_optim.save."
        )
    return next(iter(found.values()))
