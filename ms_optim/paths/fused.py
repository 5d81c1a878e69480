"""The step as launches of a fused kernel: one for all tensors, unless less is asked for in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from .._addresses import AddressTable
from .._kernels import GRADIENT_STAGE
from .launches import MOST_LAUNCHES, Maker, no_sums, phases_of, phases_of_parts

if TYPE_CHECKING:
    from .parts import Parts


class ByAddress(nn.Cell):
    """The step that is called from Python, compiled by itself.

    MindSpore notes on a Cell which of its methods it compiled last, and takes that for the Cell's ``construct`` when it
    compiles a graph with the Cell in it: so this is no method of the optimizer.
    """

    def __init__(self, launch_all):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "launch_all", launch_all)

    @ms.jit(backend="ms_backend")
    def run(self, step, addresses):
        """Run the step on what a table of addresses names."""
        return self.launch_all(step, addresses)


class FusedPath(nn.Cell):
    """The step as launches of a fused kernel.

    Where a process has parts of tensors, sums over these are exchanged between two phases:

        gradients | moments and weights | commit     a rule that looks at single elements
        gradients | moments | weights and commit     a layer-wise rule

    Gradients have a phase of their own only if all of them are looked at first, for clipping, say.

    Args:
        parts: What every path is made from.
        exchange: What adds up sums of parts of tensors over processes; None: this process has all of each tensor.
        ranges: Which elements of each tensor this process updates, int64 of shape (tensors, 2), where it has whole
            gradients all the same; None: all that it has.
        at_most: How many tensors a launch takes at most; None: as many as the rule's kernel can.

    Attributes:
        addresses: The table of addresses that steps called from Python fill; None where there is none.
    """

    addresses: AddressTable | None

    def __init__(
        self,
        parts: Parts,
        exchange: nn.Cell | None = None,
        ranges: np.ndarray | None = None,
        at_most: int | None = None,
    ):
        super().__init__(auto_prefix=False)
        layout, rule, options = parts.layout, parts.rule, parts.options
        object.__setattr__(self, "rates", parts.rates)
        self.exchange: Any
        self.exchange, self.has_whole_gradients, self.addresses = exchange, ranges is not None, None
        maker = Maker(parts, ranges)
        self.constants, self.no_sums = maker.constants, no_sums()
        count = layout.count
        own = tuple(i for i, mine in enumerate(layout.owned) if mine)
        looks_at_all = options.grad_clip_norm is not None or options.skip_nonfinite
        looks_first = looks_at_all or parts.statement.normalizes_gradient

        def planned(at_most):
            if exchange is not None:
                return phases_of_parts(count, at_most, rule.is_layerwise, looks_first)
            return phases_of(count, own, at_most, looks_at_all)

        at_most = max(at_most or rule.at_most or count, -(-count // MOST_LAUNCHES))
        phases = planned(count if ranges is not None else at_most)
        self.launches = nn.CellList([maker.made(launch) for phase in phases for launch in phase])
        self.is_exchanged = self.exchanged_after(phases)
        places = iter(range(len(self.launches)))
        self.phases = tuple(tuple(next(places) for _ in phase) for phase in phases)
        if parts.settings.weights_on == "CPU" and not parts.settings.is_parallel and ranges is None:
            self.launches_by_address = maker.made_by_address([stages for ((stages, _),) in planned(count)])
            self.phases_by_address = tuple((k,) for k in range(len(self.launches_by_address)))
            self.by_address = ByAddress(self.launch_by_address)
            self.addresses = AddressTable(parts.held)

    def exchanged_after(self, phases):
        """Tell of each phase whether its sums are exchanged: not those of the last, nor those of whole gradients."""
        if self.exchange is None:
            return (False,) * len(phases)
        known = [self.has_whole_gradients and phase[0].stages == GRADIENT_STAGE for phase in phases]
        return tuple(place + 1 < len(phases) and not is_known for place, is_known in enumerate(known))

    def construct(self, rates, gradients):
        """Take a step; return sums that nobody needs, once it is taken."""
        return self.launch_all(self.launches, self.phases, rates, gradients)

    def run_by_address(self, step, addresses):
        """Take a step, called from Python, on what a table of addresses names."""
        return self.by_address.run(step, addresses)

    def launch_by_address(self, step, addresses):
        """Take a step, one launch a phase whatever the number of tensors, on what a table of addresses names."""
        return self.launch_all(self.launches_by_address, self.phases_by_address, self.rates(step), (addresses,))

    def launch_all(self, launches, phases, rates, gradients):
        """Run the launches of all phases."""
        sums = self.no_sums
        for place, phase in enumerate(phases):
            found = ()
            for k in phase:
                found += (launches[k](self.constants, rates, sums, gradients),)
            made = found[0] if len(found) == 1 else ops.concat(found)
            sums = self.whole(place == 0, made, sums) if self.is_exchanged[place] else made
        return sums

    def whole(self, is_first, sums, known):
        """Return the sums of whole tensors from those of the parts that the processes have.

        The first phase settles the gradients' sums: a launch that skips the step only passes them on, and even where
        one sums them up anew, all launches shall clip alike.

        Args:
            is_first: Whether a phase of launches before this one knew no sums.
            sums: What the launches returned, float64 of shape (tensors, kinds of sums); gradients' sums are in front.
            known: The sums that they took.
        """
        whole = self.exchange(sums)
        return whole if is_first else ops.concat((known[:, :1], whole[:, 1:]), 1)
