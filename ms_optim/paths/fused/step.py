"""The step as launches of a fused kernel: one launch for all tensors, unless a graph limits the tensors per launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import nn, ops

from ...arguments.options import stage_reading_all
from ...kernels.libraries import run_here
from ...kernels.table import GRADIENT_STAGE
from ...unregistered import unregistered
from .addresses import AddressTable
from .launches import MOST_LAUNCHES, Maker, no_sums, phases_of, phases_of_parts, run_launches

if TYPE_CHECKING:
    from ..parts import Parts


class FusedPath(nn.Cell):
    """The step as launches of a fused kernel.

    If a process has parts of tensors, sums over these parts are exchanged between two phases:

        gradients | moments and weights | commit     a rule that looks at single elements
        gradients | moments | weights and commit     a layer-wise rule, or one of elements if norms are held

    Gradients have a separate phase only if all of them must be read first, for example for clipping.

    Args:
        parts: The parts that every path is built from.
        exchange: Sums the sums of parts of tensors over processes; None if this process has whole tensors.
        ranges: The elements of each tensor that this process updates, int64 of shape (tensors, 2), if it still has
            whole gradients; None if it updates all elements that it has.
        at_most: The maximum number of tensors in a launch; None for the maximum of the rule's kernel.

    Attributes:
        addresses: The table of addresses that steps called from Python fill; None if there is none.
    """

    addresses: Any

    def __init__(
        self,
        parts: Parts,
        exchange: nn.Cell | None = None,
        ranges: np.ndarray | None = None,
        at_most: int | None = None,
    ):
        super().__init__(auto_prefix=False)
        layout, rule, options = parts.layout, parts.rule, parts.options
        unregistered(self, rates=parts.rates)
        self.exchange: Any
        self.exchange, self.has_whole_gradients, self.addresses = exchange, ranges is not None, None
        maker = Maker(parts, ranges)
        self.constants, self.no_sums = maker.constants, no_sums()
        count = layout.count
        own = tuple(i for i, mine in enumerate(layout.owned) if mine)
        looks_at_all = stage_reading_all(options) is not None
        looks_first = looks_at_all or parts.statement.normalizes_gradient
        # A rule of matrices has each tensor whose norm is held as a whole.
        waits = rule.is_layerwise or (options.weight_norm is not None and not rule.has_matrices)

        def planned(at_most):
            if exchange is not None:
                return phases_of_parts(count, at_most, waits, looks_first)
            return phases_of(count, own, at_most, looks_at_all)

        at_most = max(at_most or rule.at_most or count, -(-count // MOST_LAUNCHES))
        phases = planned(count if ranges is not None else at_most)
        self.launches = nn.CellList([maker.made(launch) for phase in phases for launch in phase])
        self.is_exchanged = self.exchanged_after(phases)
        places = iter(range(len(self.launches)))
        self.phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        if parts.settings.weights_on == "CPU" and not parts.settings.is_parallel and ranges is None:
            (((stages, _),),) = planned(count)
            unregistered(self, direct=maker.direct(stages))
            self.addresses = AddressTable(parts.held)

    def exchanged_after(self, phases):
        """Return for each phase whether its sums are exchanged: not for the last phase, nor for whole gradients."""
        if self.exchange is None:
            return (False,) * len(phases)
        known = [self.has_whole_gradients and phase[0].stages == GRADIENT_STAGE for phase in phases]
        return tuple(place + 1 < len(phases) and not is_known for place, is_known in enumerate(known))

    def construct(self, rates, gradients):
        """Take a step; return sums that are not needed, once the step is done."""
        sums = self.no_sums
        for place, phase in enumerate(self.phases):
            made = run_launches(self.launches, phase, self.constants, rates, sums, gradients)
            sums = self.whole(place == 0, made, sums) if self.is_exchanged[place] else made
        return sums

    def run_by_address(self, step, gradients):
        """Take a step, called from Python, in one launch for any number of tensors."""
        rates = self.rates.now(step)
        run_here(self.direct.run(self.constants, rates, self.no_sums, self.addresses.filled(gradients)))

    def whole(self, is_first, sums, known):
        """Return the sums of whole tensors from the sums of the parts that the processes have.

        The first phase determines the sums of the gradients. A launch that skips the step only passes them on. Even if
        a launch sums them again, all launches must clip by the same sums.

        Args:
            is_first: Whether this is the first phase, which got no sums.
            sums: The sums that the launches returned, float64 of shape (tensors, kinds of sums); the gradients' sums
                come first.
            known: The sums that the launches got as input.
        """
        whole = self.exchange(sums)
        return whole if is_first else ops.concat((known[:, :1], whole[:, 1:]), 1)
