"""SimulatedWorkers: several workers in one process, to test an exchange without a cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from ..arguments.checks import check_count, fail
from ..dgc.optimizer import CompressedStep
from ..local_steps.optimizer import LocalSteps
from ..states.in_place import write
from ..workers.transport import Workers


class SimulatedWorker(Workers):
    """One of several workers in a process, which have no collective communication."""

    run: str  # identifies the run in checkpoints, whose parts have no collective to agree on it

    def __init__(self, count: int, rank: int, run: str = ""):
        self.count = count
        self.rank = rank
        self.run = run

    def all_reduce(self) -> Callable[[Tensor], Tensor]:
        """Return a placeholder for a collective, which is never called."""
        return _refuse

    def exchange(self, compressed: bool, words: int) -> Callable[[Tensor], Tensor]:
        """Return a placeholder for the exchange, which is never called."""
        return _refuse


def _refuse(wire):
    raise RuntimeError(
        "A simulated worker's optimizer cannot take a step by itself: call the SimulatedWorkers instead."
    )


class SimulatedWorkers:
    """Several workers in one process that exchange data.

    Each worker is an optimizer with its own weights, states and residuals, and runs the kernels that it would run on a
    cluster. Only the exchange is not a collective: the data that workers would send is passed in memory. With
    DGCMomentum, weights are bitwise equal on all workers after every step, so the network of the first worker computes
    the gradients of all workers. With LocalSteps, they differ between exchanges: :meth:`weights_of` puts the weights of
    a worker into the network.

    Args:
        count (int): The number of workers, 1 or greater.
        params (list[Parameter]): The parameters of the first worker; the others get copies.
        make (Callable): Called as ``make(params, group)`` for each worker; it returns the worker's optimizer, a
            DGCMomentum or LocalSteps built with this group.

    Attributes:
        optimizers (list[Optimizer]): The workers' optimizers.
        bytes_sent (int): Number of bytes that each worker passed to the exchange in the last step.

    Inputs:
        - **gradients** (Sequence[tuple[Tensor]]) - For each worker, the gradients of its part of the batch.

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `count` is not an int, `params` is not a list of Parameters, or `make` is not callable or does not
            return a DGCMomentum or LocalSteps built with `group`.
        ValueError: If `count` is less than 1, or the number of gradients is not the number of workers.
        RuntimeError: If there is no fused kernel, because the simulation uses the kernel's exchange data.

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

    optimizers: list[Any]
    bytes_sent: int

    def __init__(self, count: int, params: list[Parameter], make: Callable[[list[Parameter], Workers], Any]):
        name = type(self).__name__
        check_count(name, "count", count, 1)
        if not isinstance(params, list) or not all(isinstance(p, Parameter) for p in params):
            fail(TypeError, name, "params", "a list of Parameters", params)
        if not callable(make):
            fail(TypeError, name, "make", "a function of params and group", make)
        self.optimizers, self.bytes_sent = [], 0
        self._own: list[tuple[Parameter, np.ndarray]] = []
        run = secrets.token_hex(8)
        for rank in range(count):
            worker = SimulatedWorker(count, rank, run)
            own = params if rank == 0 else [Parameter(Tensor(p.asnumpy(), p.dtype), name=p.name) for p in params]
            optimizer = make(own, worker)
            if not isinstance(optimizer, (CompressedStep, LocalSteps)) or optimizer.workers is not worker:
                what = "a function that returns a DGCMomentum or LocalSteps built with its group"
                fail(TypeError, name, "make", what, optimizer)
            if isinstance(optimizer, CompressedStep) and optimizer._path.addresses is None:
                raise RuntimeError(f"For '{name}', the fused kernel is needed: {optimizer.backend_reason}.")
            self.optimizers.append(optimizer)

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> tuple[bool, ...]:
        """Take one step on all workers."""
        name, count = type(self).__name__, len(self.optimizers)
        if not isinstance(gradients, (list, tuple)) or len(gradients) != count:
            fail(ValueError, name, "gradients", f"a list of the gradients of each of {count} workers", gradients)
        first = self.optimizers[0]
        self._restore()
        self.bytes_sent = type(first).step_together(self.optimizers, gradients)
        return (True,) * len(first.parameters)

    @contextlib.contextmanager
    def weights_of(self, worker: int) -> Iterator[None]:
        """Put the weights of a worker into the parameters of the first worker, to compute gradients or a loss there.

        Args:
            worker (int): The worker's number, from 0.
        """
        first, other = (self.optimizers[k].parameters for k in (0, worker))
        self._restore()
        try:
            self._own = [(p, p.asnumpy().copy()) for p in first] if worker else []
            for p, q in zip(first, other) if worker else ():
                write(p, q.asnumpy())
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        """Put the first worker's own weights back into its parameters, also if this was interrupted before."""
        for p, value in self._own:
            write(p, value)
        self._own = []
