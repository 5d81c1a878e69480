"""The compressed step in launches of the fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.options import stage_constants
from ..kernels import interface
from ..kernels import table as kernels
from ..kernels.interface import SharedFlag
from ..kernels.table import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from ..paths.fused.addresses import AddressTable
from ..paths.fused.launches import no_sums, shared_flags
from ..unregistered import unregistered
from ..workers.local_mean import LocalMean
from .launches import ExchangeCell, StageCell
from .schedule import Schedule, begins, place_of
from .wire import wire_words

if TYPE_CHECKING:
    from ..paths.parts import Parts


class CompressedByAddress(nn.Cell):
    """The parts of a step that is called from Python, compiled separately; see CompiledRates.

    The parts of several simulated workers are called one by one: see simulated_workers.py.
    """

    def __init__(self, path: CompressedPath):
        super().__init__(auto_prefix=False)
        unregistered(self, path=path)

    @ms.jit(backend="ms_backend")
    def mean(self, gradients):
        """Return the mean gradients of this host's processes."""
        return self.path.local_mean(gradients)

    @ms.jit(backend="ms_backend")
    def run(self, step, addresses, known):
        """Run the step on the tensors in a table of addresses, in a known period of training."""
        return self.path.period_by_address(step, addresses, known)

    @ms.jit(backend="ms_backend")
    def look(self, step, addresses):
        """Return sums of the gradients, and whether they are nonfinite if steps may be skipped."""
        return self.path.look_by_address(step, addresses)

    @ms.jit(backend="ms_backend")
    def send(self, step, addresses, sums, skipping, known):
        """Return the sums and this worker's send buffer."""
        return self.path.send_by_address(step, addresses, sums, skipping, known)

    @ms.jit(backend="ms_backend")
    def apply(self, step, addresses, sums, skipping, wires, known):
        """Accumulate, and update the weights by the values that the workers sent."""
        return self.path.apply_by_address(step, addresses, sums, skipping, wires, known)


class CompressedPath(nn.Cell):
    """The compressed step in launches of the fused kernel.

    Args:
        parts: The parts that every path is built from.
        schedule: How many elements workers send in each step.
        dgc_worker: Parameter that states which worker the residuals belong to.

    Attributes:
        addresses: The table of addresses that steps called from Python fill; None if there is none.
    """

    def __init__(self, parts: Parts, schedule: Schedule, dgc_worker: Any):
        super().__init__(auto_prefix=False)
        layout, held, rule, options, settings = parts.layout, parts.held, parts.rule, parts.options, parts.settings
        unregistered(self, rates=parts.rates)
        self.schedule = schedule
        n, workers = layout.count, schedule.workers
        self.worker_count, self.unscale, self.skips = workers.count, settings.unscale, options.skip_nonfinite
        self.local_mean = LocalMean(workers, layout.sizes, held.parameters)
        self.period_count, self.begins = len(schedule.ends) + 1, begins(schedule)
        self.all_reduce: Any = workers.all_reduce() if workers.count * workers.local > 1 else None
        columns = (layout.rate_places, layout.decay_places, layout.centralized)
        layouts = np.array([interface.layout(*columns, sent=counts) for counts in schedule.counts])
        own = (*rule.constants, workers.rank, schedule.settings)
        self.layouts = Tensor(layouts)
        constants = interface.constants(settings.unscale, settings.seed, own, **stage_constants(options))
        self.constants, self.no_sums = Tensor(constants), no_sums()
        self.no_worker = Tensor(np.zeros(1, np.float32))
        shared = shared_flags(parts)
        # For each form: the inputs before the tensors, the weights, what is held for them, and the form's flag.
        tensors = (*held.states, *held.masters, *held.averages)
        forms = [((dgc_worker, *held.counters), tuple(held.parameters), tensors, 0)]
        self.addresses: Any = None
        if settings.device == "CPU":
            forms.append(((Tensor(schedule.own_worker),), (), (), SharedFlag.BY_ADDRESS))
            self.by_address = CompressedByAddress(self)
            self.addresses = AddressTable(held)
        sums = ((n, len(kernels.SUMS)), ms.float64)
        local, look, exchanges = [], [], []
        for before, weights, states, flag in forms:

            def stage(stages, outputs, before=before, weights=weights, states=states, flag=flag):
                if stages == GRADIENT_STAGE:
                    weights, states = (), ()
                given = n if flag == 0 else 1
                counters = len(before) - 1  # the first input states which worker the states belong to
                written = interface.written(counters, len(weights), given, len(states), exchanges=True)
                kernel = kernels.operator(rule.name, settings.device, written, outputs, layout.shapes, shared)
                return StageCell(kernel, kernels.flags(stages, shared + flag, rule.flags), before, weights, states)

            if workers.count == 1:
                local.append(stage(kernels.ALL_STAGES, [sums]))
                continue
            look.append(stage(GRADIENT_STAGE, [sums]))
            cells = []
            for columns, counts in zip(layouts, schedule.counts.tolist()):
                words = wire_words(layout.sizes, counts, schedule.wire_dtype)
                wire = ((words,), ms.int32 if any(counts) else ms.float32)
                send, apply = stage(MOMENTS_STAGE, [sums, wire]), stage(APPLY_STAGE + COMMIT_STAGE, [sums])
                cells.append(ExchangeCell(send, apply, columns, words, workers))
            exchanges.append(nn.CellList(cells))
        self.local, self.look, self.exchanges = nn.CellList(local), nn.CellList(look), nn.CellList(exchanges)
        unregistered(self, global_step=held.global_step)

    def construct(self, rates, gradients):
        """Take a step; return sums that are not needed, once the step is done."""
        gradients = self.local_mean(gradients)
        numbers = (self.constants, rates)
        period = place_of(self.global_step, self.begins, self.period_count > 1)
        if self.worker_count == 1:
            return self.run_locally(0, period, numbers, gradients)
        sums, skipping = self.looked_at(0, numbers, gradients)
        done = self.no_sums
        for k in range(self.period_count):
            if period == k:
                done = self.exchanges[0][k](numbers, sums, skipping, gradients)
        return done

    def run_by_address(self, step, gradients):
        """Take a step, called from Python, which knows the period of training."""
        known = self.schedule.place(step) if self.worker_count > 1 else 0
        # Wait for the operators: they may run later, when the gradients may have been freed.
        self.by_address.run(step, self.addresses.fill(gradients), known).data_ptr()

    def numbers_at(self, step):
        """Return the constants and the rates of a step."""
        return self.constants, self.rates(step)

    def period_by_address(self, step, addresses, known):
        """Take a step of a known period of training."""
        numbers = self.numbers_at(step)
        if self.worker_count == 1:
            period = place_of(step, self.begins, self.period_count > 1)
            return self.run_locally(1, period, numbers, (addresses,))
        sums, skipping = self.looked_at(1, numbers, (addresses,))
        return self.exchanges[1][known](numbers, sums, skipping, (addresses,))

    # The parts of a step of one of several simulated workers; see simulated_workers.py.

    def look_by_address(self, step, addresses):
        """Return sums of the gradients, and whether they are nonfinite if steps may be skipped."""
        if not self.skips:
            return self.no_sums, self.no_worker
        return self.looked_here(1, self.numbers_at(step), (addresses,))

    def send_by_address(self, step, addresses, sums, skipping, known):
        """Return the sums and this worker's send buffer."""
        return self.exchanges[1][known].send(self.numbers_at(step), sums, skipping, (addresses,))

    def apply_by_address(self, step, addresses, sums, skipping, wires, known):
        """Accumulate, and update the weights by the values that the workers sent."""
        return self.exchanges[1][known].apply(self.numbers_at(step), sums, skipping, wires, (addresses,))

    def run_locally(self, form, period, numbers, gradients):
        """Take the step of a single worker."""
        layout, stage = ops.gather(self.layouts, period, 0), self.local[form]
        return stage(layout, numbers, self.no_sums, self.no_worker, stage.no_wires, gradients)

    def looked_at(self, form, numbers, gradients):
        """Return sums of the gradients, and the number of workers with nonfinite gradients if steps may be skipped."""
        if not self.skips:
            return self.no_sums, self.no_worker
        sums, skipping = self.looked_here(form, numbers, gradients)
        return sums, self.all_reduce(skipping)

    def looked_here(self, form, numbers, gradients):
        """Return sums of the gradients, and 1 if they are not finite or else 0, float32 of shape (1,)."""
        stage = self.look[form]
        sums = stage(self.layouts[0], numbers, self.no_sums, self.no_worker, stage.no_wires, gradients)
        norm = F.cast(ops.sqrt(sums[:, 0].sum()) * self.unscale, mstype.float32)
        return sums, 1.0 - F.cast(ops.isfinite(norm), mstype.float32).reshape((1,))
