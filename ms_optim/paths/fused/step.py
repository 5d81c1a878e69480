"""The step as launches of a fused kernel: one launch for all tensors, unless a graph limits the tensors per launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
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


class PhasesByAddress(nn.Cell):
    """A step on parts of tensors that is called from Python: compiled, so that an interrupt finds no phase or all done.

    MindSpore records on a Cell which of its methods it compiled last, and uses that as the Cell's ``construct`` when it
    compiles a graph that contains the Cell. Therefore this is not a method of the path.
    """

    def __init__(self, path: FusedPath, launches: nn.CellList):
        super().__init__(auto_prefix=False)
        unregistered(self, path=path)
        self.launches, self.phases = launches, tuple((k,) for k in range(len(launches)))

    @ms.jit(backend="ms_backend")
    def run(self, step, addresses):
        """Run the step on the tensors in a table of addresses.

        With a variable number of tables, MindSpore would keep the optimizer alive for good.
        """
        return self.path.run_phases(self.launches, self.phases, self.path.rates(step), (addresses,))


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
            stages = [stages for ((stages, _),) in planned(count)]
            if exchange is None:
                unregistered(self, direct=maker.direct(*stages))
            else:
                self.by_address = PhasesByAddress(self, maker.made_by_address(stages))
            self.addresses = AddressTable(parts.held)

    def exchanged_after(self, phases):
        """Return for each phase whether its sums are exchanged: not for the last phase, nor for whole gradients."""
        if self.exchange is None:
            return (False,) * len(phases)
        known = [self.has_whole_gradients and phase[0].stages == GRADIENT_STAGE for phase in phases]
        return tuple(place + 1 < len(phases) and not is_known for place, is_known in enumerate(known))

    def construct(self, rates, gradients):
        """Take a step; return sums that are not needed, once the step is done."""
        return self.run_phases(self.launches, self.phases, rates, gradients)

    def run_phases(self, launches, phases, rates, gradients):
        """Run the launches of all phases."""
        sums = self.no_sums
        for place, phase in enumerate(phases):
            made = run_launches(launches, phase, self.constants, rates, sums, gradients)
            sums = self.whole(place == 0, made, sums) if self.is_exchanged[place] else made
        return sums

    def run_by_address(self, step, gradients):
        """Take a step, called from Python, with one launch per phase for any number of tensors."""
        if self.exchange is None:
            rates, table = self.rates.now(step), self.addresses.filled(gradients)
            run_here(self.direct.run(self.constants, rates, self.no_sums, table))
        else:
            # Wait for the operators: they may run later, when the gradients may have been freed.
            self.by_address.run(step, self.addresses.fill(gradients)).data_ptr()

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
