"""The parts that every path is built from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspore import nn

    from ..arguments.checks import Options
    from ..arguments.rates import Rates
    from ..rules.rule import Rule, Statement
    from ..states.layout import Layout, Settings
    from ..states.shares import Shares
    from ..states.storage import Held


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts that every path is built from.

    Attributes:
        statement: The optimizer, which implements its rule in MindSpore's operators.
        rule: The properties of its rule.
        options: Its shared arguments.
        layout: The properties of the parameters.
        held: What the optimizer holds.
        rates: The Cell that evaluates the rates of a step.
        settings: The settings of a step that all paths use.
        shares: Which part of the states each worker keeps; None if each keeps all.
        slices: Sums the sums of sliced tensors over processes; None if no tensor is sliced.
    """

    statement: Statement
    rule: Rule
    options: Options
    layout: Layout
    held: Held
    rates: Rates
    settings: Settings
    shares: Shares | None
    slices: nn.Cell | None
