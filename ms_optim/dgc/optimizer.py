"""Base class of optimizers with compressed exchange: the largest accumulated elements are sent, the rest is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Parameter, Tensor

from ..arguments.gradients import check_gradients
from ..base.optimizer import FusedOptimizer, Rule
from ..unregistered import bind_once
from ..workers.residuals import check_entry, check_residuals
from ..workers.transport import Workers, together
from .composite import CompressedCompositePath
from .path import CompressedPath
from .schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..arguments.checks import LearningRate, Params, WeightDecay
    from .wire import Compression


def _norm_in_place(x: np.ndarray) -> float:
    """Return the L2 norm of a float32 array without copying it, as MindSpore's operators would."""
    flat = x.reshape(-1)
    # In parts, because a dot product sums in float32.
    parts = (flat[begin : begin + (1 << 16)] for begin in range(0, flat.size, 1 << 16))
    return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


class CompressedStep(FusedOptimizer):
    """Base class of optimizers that compress what they exchange (gradient compression with error feedback).

    The states are the velocity u and the residual r, which has accumulated and has not been sent yet. A subclass
    implements :meth:`decayed` and :meth:`moved`.
    """

    # Each worker needs every gradient as a whole.
    _support_parallel_optimizer = False
    refuses: ClassVar[dict[str, str]] = {
        "attach": "exchanges gradients between two launches",
        "state_dtype": "keeps its states in float32",
        "shard_states": "has different states on each worker, computed from that worker's gradients",
        "offload": "exchanges gradients between two launches",
        "shard_group": "exchanges gradients of whole tensors itself",
        "weight_norm": "adds up gradients before they are exchanged, and its updates are of any norm",
        "decay": "adds the decay to the gradients before they are exchanged",
        "local_steps": "exchanges gradients itself",
        "multi": "exchanges gradients between two launches",
    }

    dgc_worker: Parameter

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate,
        weight_decay: WeightDecay,
        rule: Rule,
        workers: Workers,
        compression: Compression,
        **shared: Any,
    ):
        self.workers = workers
        self.compression = compression
        super().__init__(params, learning_rate, weight_decay, rule, **shared)

    def _hold_more(self, held):
        schedule = Schedule(self._layout, self.rule, self.options, self.workers, self.compression)
        self._schedule = schedule
        # Each worker has its own residuals. This entry states in a checkpoint whose residuals it holds. Its shape
        # depends on the number of workers, so another number of workers refuses the checkpoint.
        self.dgc_worker = Parameter(Tensor(schedule.own_worker), name="dgc_worker", requires_grad=False)

    def _path_for(self, choice, parts):
        make = CompressedCompositePath if choice.path == "composite" else CompressedPath
        return bind_once(make(parts, self._schedule, self.dgc_worker))

    def check_entries(self, entries: dict[str, Tensor]) -> None:
        """Raise an error if the entries are the residuals of another worker."""
        entry = self._entries.name_of(self.dgc_worker)
        if entry in entries:
            check_entry(self.cls_name, entry, entries[entry], self._schedule.own_worker)

    def check_states(self) -> None:
        """Raise an error for the residuals of another worker, which MindSpore's own loading accepts."""
        check_residuals(self.cls_name, self.dgc_worker, self._schedule.own_worker)

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...]:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        if self._reads_count:
            self.check_states()
        if self._path.addresses is not None and self.workers.local > 1:
            gradients = check_gradients(self.cls_name, self._layout.names, self._layout.shapes, gradients)
            gradients = self._path.by_address.mean(tuple(gradients))
        return super().__call__(gradients)

    @classmethod
    def step_together(cls, workers: Sequence[CompressedStep], gradients: Sequence[Sequence[Tensor]]) -> int:
        """Take a step of simulated workers, and return the number of bytes that each has sent."""
        first = workers[0]
        first._check_begin()
        for worker in workers:
            worker.check_states()
        kept = [check_gradients(w.cls_name, w._layout.names, w._layout.shapes, g) for w, g in zip(workers, gradients)]
        # The tables hold addresses, so the tensors are kept alive until the end of the step.
        tables = [w._path.addresses.fill(g) for w, g in zip(workers, kept)]
        if len(workers) == 1:
            first(kept[0])
            return 0
        step = first.global_step
        known = first._path.schedule.place(step)
        looks = [w._path.by_address.look(step, table) for w, table in zip(workers, tables)]
        skipping = Tensor(sum(np.asarray(found.asnumpy()) for _, found in looks))
        sent = [
            w._path.by_address.send(step, table, sums, skipping, known)
            for w, table, (sums, _) in zip(workers, tables, looks)
        ]
        cell = first._path.exchanges[1][known]
        wires = Tensor(together([wire.asnumpy() for _, wire in sent], cell.compressed))
        for w, table, (sums, _) in zip(workers, tables, sent):
            w._path.by_address.apply(step, table, sums, skipping, wires, known).data_ptr()
        return 4 * cell.words

    def decayed(self, gradient: Tensor, weight: Tensor, weight_decay: Tensor) -> Tensor:
        """Return a gradient plus the weight decay."""
        raise NotImplementedError

    def moved(self, gradient: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new velocity, and the direction of the momentum SGD update."""
        raise NotImplementedError

    def densities(self, step: Tensor) -> NDArray[np.float64]:
        """Return the fraction of each tensor's elements that a worker sends in a step, counted from 0."""
        counts = self._schedule.counts[self._schedule.place(step)]
        return np.where(counts > 0, counts / np.array(self._layout.sizes), 1.0)

    def residual_norms(self) -> NDArray[np.float64]:
        """Return the L2 norm of this worker's residual of each tensor."""
        return np.array([_norm_in_place(r.asnumpy()) for r in self.states[self.param_length :]])
