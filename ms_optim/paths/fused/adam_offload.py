"""The step with states in host memory and weights on an accelerator: what is transferred between them, and when.

A float32 weight is never transferred: its gradient, which already includes the decay, is copied to the host, and the
update is copied back. A weight of lower precision has its float32 master on the host: its gradient is copied to the
host in the gradient's dtype, and the new weight is copied back in the weight's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels import interface
from ...kernels import table as kernels
from ...kernels.interface import SharedFlag
from ...rules.arithmetic import norm, receive, rounded, shaped, summed, write
from ...unregistered import unregistered
from ..ascend.operators import OperatorCell, tile_sums, total_of_tiles
from ..operators.counting import Counting, RatesOfEach
from ..operators.selection import chosen, picked
from ..operators.stacks import Stacks, first_of
from ..operators.survey import Survey
from .launches import LaunchCell, no_sums

if TYPE_CHECKING:
    from ..parts import Parts


class CrossingPath(nn.Cell):
    """The step of an optimizer whose kernel runs on the host while its weights are on an accelerator.

    Args:
        parts: The parts that every path is built from; the optimizer also implements ``decayed``.

    Attributes:
        masters_taken: Parameter, whether the masters were initialized: 0 or 1.
    """

    addresses = None

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        layout, held, rule, options, settings = parts.layout, parts.held, parts.rule, parts.options, parts.settings
        unregistered(self, statement=parts.statement)
        self.take_master = ops.Assign()
        self.take_master.set_device("CPU")
        with_master = held.has_master()
        groups = [[i for i in range(layout.count) if with_master[i] == low] for low in (False, True)]
        groups = [tuple(group) for group in groups if group]
        self.group_count, self.group_places = len(groups), tuple(chosen(group) for group in groups)
        group_weights = tuple(ParameterTuple([held.parameters[i] for i in group]) for group in groups)
        self.is_decayed = tuple(tuple(layout.decay_places[i] >= 0 for i in group) for group in groups)
        self.order = Tensor(np.argsort([i for group in groups for i in group]).astype(np.int32))
        self.with_masters = tuple(with_master[group[0]] for group in groups)
        constants = interface.constants(0.0, settings.seed, rule.constants)
        self.constants = Tensor(constants[interface.Constant.CLIP_NORM :])
        self.no_sums, self.zero = no_sums(), Tensor(0.0, mstype.float32)
        cells = []
        for group, low in zip(groups, self.with_masters):
            n = len(group)
            # float32 weights are decayed and centralized on the device.
            decays = [layout.decay_places[i] if low else -1 for i in group]
            centralized = [low and layout.centralized[i] for i in group]
            columns = interface.layout([layout.rate_places[i] for i in group], decays, centralized)
            shared = SharedFlag.RETURNED + rule.shared_flags + SharedFlag.SKIP_NONFINITE * options.skip_nonfinite
            shared += SharedFlag.MASTERS * low + SharedFlag.CENTRALIZES * any(centralized)
            outputs = [((n, len(kernels.SUMS)), ms.float64), ((n, len(kernels.STATISTICS)), ms.float32)]
            # A graph treats a 0-dimensional output as a number, not as a tensor.
            outputs += [(layout.shapes[i] or (1,), layout.dtypes[i] if low else ms.float32) for i in group]
            states = held.tensors_for(group)
            written = interface.written(counters=2, gradients=n, held=len(states), returned=True)
            kernel = kernels.operator(rule.name, "CPU", written, outputs)
            flags = kernels.flags(kernels.ALL_STAGES - kernels.COMMIT_STAGE, shared, rule.flags)
            counters = (held.global_step, held.skipped_steps)
            cells.append(LaunchCell(kernel, flags, Tensor(columns), counters, held=states))
        self.launches = nn.CellList(cells)
        self.adds_at_once = settings.weights_on == "Ascend" and kernels.why_not("delta", "Ascend") is None
        if self.adds_at_once:
            kernel = kernels.ascend_operator("MsOptimDelta", (True, False), tile_sums(1, place=0))
            self.add_delta = OperatorCell(kernel, total_of_tiles())
        self.dtype, self.unscale, self.each = settings.step_dtype, settings.unscale, C.Map()
        stacks = Stacks([[i] for i in range(layout.count)])
        self.survey = Survey(stacks, layout.centralized, parts)
        self.counting, self.rates_of_each = Counting(parts), RatesOfEach(layout)
        columns = (held.parameters, held.masters_or_weights(), with_master)
        self.masters_taken = Parameter(Tensor([0], mstype.int32), name="masters_taken", requires_grad=False)
        unregistered(self, group_weights=group_weights, columns=columns)

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        stacks, norms, finite, all_finite, clip = self.survey(gradients)
        applied = self.counting.applies(all_finite)
        prepared = self.each(first_of, stacks)
        if self.masters_taken[0] == 0:
            self.take_masters()
        decay = ops.unstack(self.rates_of_each(rates)[1], 0)
        weight_norms = ()
        update_norms = ()
        for k in range(self.group_count):
            places, weights, low = self.group_places[k], self.group_weights[k], self.with_masters[k]
            here = self.zero
            if low:
                sent = picked(gradients, places)
                scale = F.cast(clip * self.unscale, mstype.float64)
            else:
                if not self.adds_at_once:
                    here = ops.stack(self.each(self.norm_of_weight, weights))
                decays, own = picked(decay, places), picked(prepared, places)
                sent = self.each(F.partial(self.decayed, clip), self.is_decayed[k], decays, weights, own)
                scale = F.cast(1.0, mstype.float64)
            # A step that is not applied here is skipped on the host.
            scale = ops.where(applied, scale, F.cast(float("nan"), mstype.float64)).reshape((1,))
            returned = self.launches[k](ops.concat((scale, self.constants)), rates, self.no_sums, sent)
            update_norms += (returned[1][:, 2],)
            if self.adds_at_once and not low:
                here = ops.stack(self.each(self.add_delta_to, weights, returned[2:]))
            else:
                self.each(receive if low else _receive_update, weights, returned[2:])
            weight_norms += (returned[1][:, 1] if low else here,)
        weight_norms = ops.gather(ops.concat(weight_norms), self.order, 0)
        update_norms = ops.gather(ops.concat(update_norms), self.order, 0)
        ratios = F.cast(applied, mstype.float32) * ops.ones_like(update_norms)
        all_finite = F.cast(ops.concat(finite), mstype.float32)
        columns = (ops.concat(norms), weight_norms, update_norms, ratios, all_finite)
        return self.counting(applied, ops.stack(columns, 1))

    def take_masters(self):
        """Initialize the masters once, after weights that are loaded after construction.

        A master that was loaded with its weight is kept, because it rounds to the weight.
        """
        self.each(self.take_master_of, *self.columns)
        F.assign(self.masters_taken, ops.ones_like(self.masters_taken))

    def take_master_of(self, parameter, master, has_master):
        """Set a master to its weight, unless the master rounds to the weight."""
        if has_master:
            weight = F.cast(parameter, mstype.float32)
            fits = rounded(master, parameter.dtype) == weight
            self.take_master(master, ops.where(fits, master, weight))
        return 0

    def decayed(self, clip, is_decayed, decay, parameter, gradient):
        """Return a gradient in the form that is sent to the host."""
        gradient = gradient * clip
        if not is_decayed:
            return gradient
        return self.statement.decayed(gradient, F.cast(parameter, mstype.float32), decay)

    def norm_of_weight(self, parameter):
        """Return the norm of a weight."""
        return norm(F.cast(parameter, mstype.float32), self.dtype)

    def add_delta_to(self, parameter, update):
        """Add the update from the host to a weight, and return the weight's norm before the step."""
        return self.add_delta(parameter, update)[0]


def _receive_update(parameter, update):
    write(parameter, summed(F.cast(parameter, mstype.float32), shaped(parameter, update)))
    return 0
