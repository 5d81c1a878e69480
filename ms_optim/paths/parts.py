"""What every path is made from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspore import nn

    from .._arguments import Options
    from .._held import Held
    from .._layout import Layout, Settings
    from .._rates import Rates
    from .._rule import Rule, Statement
    from .._shares import Shares


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What every path is made from.

    Attributes:
        statement: The optimizer, which states its rule in MindSpore's operators.
        rule: What it says of its rule besides.
        options: Its shared arguments.
        layout: What is known of the parameters.
        held: What the optimizer holds.
        rates: The Cell that evaluates the rates of a step.
        settings: What all paths are told of a step.
        shares: Which part of the states each worker keeps; None: each keeps all.
        slices: What adds up sums of sliced tensors over processes; None: no tensor is sliced.
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
