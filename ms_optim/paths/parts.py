"""The parts that every path is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments.options import stage_reading_all
from ..arguments.weight_norms import check_decays
from ..kernels import table as kernels
from ..states import inventory
from ..states.layout import Settings
from ..states.shares import sharded
from ..states.storage import Held
from .operators.slices import SumOverProcesses, check_agreement, slices_of_all

if TYPE_CHECKING:
    from mindspore import Parameter, nn

    from ..arguments.options import Options
    from ..arguments.rates import Rates
    from ..rules.rule import Rule, Statement
    from ..states.layout import Layout
    from ..states.shares import Shares


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
        members: The parts of each rule, if several take a step together; empty for one rule.
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
    members: tuple[Parts, ...] = ()

    @property
    def of_rules(self) -> tuple[Parts, ...]:
        """The parts of each rule that takes the step, in the order of the parameters."""
        return self.members or (self,)

    def of_tensor(self, i: int) -> tuple[Parts, int]:
        """Return the parts of the rule that updates a parameter, and the parameter's index among that rule's."""
        own = next(parts for parts in self.of_rules if i < parts.layout.rows.stop)
        return own, i - own.layout.first_row

    @property
    def stage_reading_all(self) -> str | None:
        """The keyword of a stage that reads gradients before the first weight moves; None without one."""
        return next(filter(None, (stage_reading_all(parts.options) for parts in self.of_rules)), None)

    @classmethod
    def of(
        cls,
        optimizer: Any,
        rule: Rule,
        options: Options,
        layout: Layout,
        rates: Rates,
        shard_groups: Mapping[str, str],
        parameters: Sequence[Parameter],
        global_step: Parameter,
    ) -> Parts:
        """Create what an optimizer holds, and return its parts.

        Args:
            optimizer: The optimizer.
            rule: The properties of its rule.
            options: Its shared arguments.
            layout: The properties of the parameters.
            rates: The Cell that evaluates the rates of a step.
            shard_groups: The group of processes that share a sliced parameter, by the parameter's name.
            parameters: The parameters.
            global_step: The number of steps so far.

        Raises:
            ValueError: If the processes that share sliced parameters have other arguments.
        """
        name, is_parallel = layout.optimizer, optimizer.use_parallel
        shares = sharded(layout, rule, options, is_parallel, shard_groups)
        inventory.check(name, rule, layout.options, layout.names, layout.dtypes)
        check_decays(name, options.weight_norm, layout.names, layout.shapes, layout.decay_places)
        kept = shares.kept if shares else tuple(enumerate(layout.shapes))
        held = Held(layout, parameters, rule, options, kept, global_step, shares.own if shares else None)
        device = kernels.device_target()
        settings = Settings.of(name, rule, options, device, optimizer.runs_on_host, is_parallel)
        if shard_groups:
            check_agreement(name, shard_groups.values(), _agreed(rule, options, layout, rates))
            layout = dataclasses.replace(layout, slices=slices_of_all(layout, shard_groups))
        slices = SumOverProcesses([shard_groups.get(p) for p in layout.names]) if shard_groups else None
        return cls(optimizer, rule, options, layout, held, rates, settings, shares, slices)


def _agreed(rule: Rule, options: Options, layout: Layout, rates: Rates) -> dict[str, Any]:
    """Return what all processes with slices of the same tensors must have in common, by what a user calls it."""
    own = {"number of parameters": layout.count, "optimizer": layout.optimizer}
    own |= {f"'{name}'": value for name, value in vars(options).items()}
    own["arguments of the rule"] = (rule.constants, rule.flags, rule.iterations)
    own["formats by parameter"] = [(each.state_dtype, each.master_weights) for each in layout.options]
    own["number of dimensions of each parameter"] = [len(shape) for shape in layout.shapes]
    own["learning rates and weight decays"] = (rates.described(), layout.rate_places)
    own["weight decays and centralization by parameter"] = (layout.decay_places, layout.centralized)
    own["matrices of each parameter"] = ([form.whole for form in layout.forms], layout.form_places)
    return own
