"""SimulatedWorkers: several workers in one process, to try a sparsity before renting a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops

from ._arguments import check_count, fail
from ._gradients import check_gradients
from .compression import CompressedStep, Workers


class SimulatedWorker(Workers):
    """One of several workers in a process; between them there is no collective."""

    def __init__(self, count: int, rank: int):
        self.count = count
        self.rank = rank

    def all_reduce(self) -> Callable[[Tensor], Tensor]:
        """Return what stands in the place of a collective, and is never called."""
        return _refuse

    def exchange(self, compressed: bool, words: int) -> Callable[[Tensor], Tensor]:
        """Return what stands in the place of the exchange, and is never called."""
        return _refuse


def _refuse(wire):
    raise RuntimeError("A simulated worker's optimizer takes no step of its own: call the SimulatedWorkers instead.")


class SimulatedWorkers:
    """Several workers of a compressing optimizer in one process.

    Each worker is an optimizer with weights, velocity and residuals of its own, and runs the kernels that it would run
    on a cluster; only the exchange is no collective: what the workers would send is handed over in memory. Weights are
    the same bits on all workers after every step, so one network, that of the first worker, gives the gradients of
    all.

    Args:
        count (int): The number of workers, 1 or greater.
        params (list[Parameter]): The parameters of the first worker; the others get copies.
        make (Callable): Called as ``make(params, group)`` for each worker, returns its optimizer, a DGCMomentum that is
            given both.

    Attributes:
        optimizers (list[DGCMomentum]): The workers' optimizers.
        bytes_sent (int): What each worker handed to the exchange in the last step, in bytes.

    Inputs:
        - **gradients** (Sequence[tuple[Tensor]]) - For each worker the gradients of its part of the batch.

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `count` is not an int, `params` not a list of Parameters, or `make` not callable or returns
            something else than a DGCMomentum built with `group`.
        ValueError: If `count` is less than 1, or there are not as many gradients as workers.
        RuntimeError: If there is no fused kernel: what is simulated is what it would send.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import DGCMomentum, SimulatedWorkers
        >>> net = nn.Dense(256, 100)
        >>> workers = SimulatedWorkers(
        ...     4, net.trainable_params(), lambda params, group: DGCMomentum(params, 0.1, 0.9, 0, group=group)
        ... )
        >>> loss = nn.WithLossCell(net, nn.CrossEntropyLoss())
        >>> gradient = ms.value_and_grad(loss, None, net.trainable_params())
        >>> x, y = np.random.randn(4, 32, 256).astype(np.float32), np.random.randint(0, 100, (4, 32)).astype(np.int32)
        >>> done = workers([gradient(ms.Tensor(x[k]), ms.Tensor(y[k]))[1] for k in range(4)])
        >>> print(workers.bytes_sent)
        636
    """

    optimizers: list[CompressedStep]
    bytes_sent: int

    def __init__(self, count: int, params: list[Parameter], make: Callable[[list[Parameter], Workers], CompressedStep]):
        name = type(self).__name__
        check_count(name, "count", count, 1)
        if not isinstance(params, list) or not all(isinstance(p, Parameter) for p in params):
            fail(TypeError, name, "params", "a list of Parameters", params)
        if not callable(make):
            fail(TypeError, name, "make", "a function of params and group", make)
        self.optimizers, self.bytes_sent = [], 0
        for rank in range(count):
            worker = SimulatedWorker(count, rank)
            own = params if rank == 0 else [Parameter(Tensor(p.asnumpy(), p.dtype), name=p.name) for p in params]
            optimizer = make(own, worker)
            if not isinstance(optimizer, CompressedStep) or optimizer.workers is not worker:
                fail(TypeError, name, "make", "a function that returns a DGCMomentum built with its group", optimizer)
            if optimizer._path.addresses is None:
                raise RuntimeError(f"For '{name}', the fused kernel is needed: {optimizer.backend_reason}.")
            self.optimizers.append(optimizer)

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> tuple[bool, ...]:
        """Take one step on all workers."""
        name, count = type(self).__name__, len(self.optimizers)
        if not isinstance(gradients, (list, tuple)) or len(gradients) != count:
            fail(ValueError, name, "gradients", f"a list of the gradients of each of {count} workers", gradients)
        self.optimizers[0]._check_begin()
        for optimizer in self.optimizers:
            optimizer.check_states()
        kept = [check_gradients(name, o._layout.names, o._layout.shapes, g) for o, g in zip(self.optimizers, gradients)]
        # The tables are addresses: what they name is kept until the end of the step.
        tables = [o._path.addresses.fill(g) for o, g in zip(self.optimizers, kept)]
        if count == 1:
            (first,) = self.optimizers
            return first(kept[0])
        step = self.optimizers[0].global_step
        known = self.optimizers[0]._path.schedule.place(step)
        looks = [o._path.by_address.look(step, table) for o, table in zip(self.optimizers, tables)]
        skipping = Tensor(sum(np.asarray(found.asnumpy()) for _, found in looks))
        sent = [
            o._path.by_address.send(step, table, sums, skipping, known)
            for o, table, (sums, _) in zip(self.optimizers, tables, looks)
        ]
        wires = self._exchanged([wire for _, wire in sent], known)
        for o, table, (sums, _) in zip(self.optimizers, tables, sent):
            o._path.by_address.apply(step, table, sums, skipping, wires, known).data_ptr()
        return self.optimizers[0]._succeeded

    def _exchanged(self, wires: list[Any], known: int) -> Tensor:
        cell = self.optimizers[0]._path.exchanges[1][known]
        self.bytes_sent = 4 * cell.words
        if cell.compressed:
            return ops.stack(wires)
        total = wires[0]
        for wire in wires[1:]:
            total = total + wire
        return total.reshape((1, cell.words))
