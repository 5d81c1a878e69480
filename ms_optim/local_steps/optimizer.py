"""LocalSteps: local training with an exchange every few dozen steps, for any optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.gradients import check_gradients
from ..base.around import AroundEntries, AroundOptimizer
from ..base.optimizer import FusedOptimizer
from ..kernels import table as kernels
from ..states.in_place import write
from ..workers.local_mean import LocalMean
from ..workers.residuals import check_entry, check_residuals
from ..workers.transport import Workers, together
from .arguments import ARGUMENTS, check_local_steps
from .compression import Quantized, SparseTopK
from .exchange import Exchange
from .kept import Kept
from .progress import Progress, check_alike
from .wire import Outer, due, fragments_of

if TYPE_CHECKING:
    from ..arguments.checks import Tensors

NAME = "LocalSteps"


class LocalSteps(AroundOptimizer):
    r"""Local steps: workers train independently and exchange the differences of their weights every few dozen steps.

    Each worker takes `every` steps with its own optimizer. Then an outer step uses the differences of the weights since
    the last exchange, averaged over the workers, and all workers continue from its weights. Nothing is sent between
    exchanges. With the weights :math:`\theta_k` of worker :math:`k` of :math:`N`, the weights :math:`\theta^{(s)}` of
    the last exchange, outer rate :math:`\alpha` and momentum :math:`\mu`:

    .. math::
        \begin{aligned}
        \Delta_k &= \theta^{(s)} - \theta_k, \qquad
        \bar\Delta = \frac{1}{N} \sum_k \mathrm{sent}(\Delta_k), \qquad
        v \leftarrow \mu v + \bar\Delta \\
        \theta^{(s)} &\leftarrow \theta^{(s)} - \alpha (\bar\Delta + \mu v), \qquad
        \theta_k \leftarrow \theta^{(s)}
        \end{aligned}

    or :math:`\theta^{(s)} - \alpha v` without Nesterov. These methods have this form:

    - DiLoCo, if `compress` is ``None``: Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language
      Models <https://arxiv.org/abs/2311.08105>`_ (2023), algorithm 1.
    - SparseLoCo, with :class:`ms_optim.SparseTopK` and `outer_momentum` 0.
    - `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_ (2025), with `fragments`: these are exchanged in turn.

    Train in the parallel mode "stand_alone", after ``mindspore.communication.init()``, and start all workers from the
    same weights. After an exchange, the exchanged weights are bitwise equal on all workers; with `fragments`, those of
    that fragment. States are not exchanged, and each worker keeps its own average of `average_decay`.

    On every device, the outer step runs on the host's processor and keeps its data in host memory: 4 bytes per element,
    4 more with outer momentum, and 4 more with residuals.

    Its attribute `local_step`, int32 of shape (1,), counts all steps, including skipped ones. It also has all
    attributes and methods of the optimizer: `global_step`, `statistics`, :meth:`FusedOptimizer.averaged` and so on.

    Args:
        optimizer (FusedOptimizer): The optimizer of this package that takes the steps. DGCMomentum and optimizers with
            sharded states are not supported.
        every (int): Steps between exchanges. Default: ``30`` .
        outer_learning_rate (float): The outer rate :math:`\alpha`, greater than 0. Default: ``0.7`` .
        outer_momentum (float): The outer momentum :math:`\mu`, in the range [0.0, 1.0). Default: ``0.9`` .
        nesterov (bool): Whether the outer momentum is Nesterov momentum. Default: ``True`` .
        compress (Union[SparseTopK, Quantized, None]): How differences are compressed; ``None`` sends all in float32.
            Default: ``None`` .
        fragments (int): Number of parts of the parameters that are exchanged separately, evenly spread over `every`
            steps; it must divide `every`. Default: ``1`` .
        group (Union[str, None]): The communication group of the processes that train together; ``None`` means all
            processes if communication is initialized, else only this process. Default: ``None`` .
        local_group (Union[str, None]): The communication group of the processes on this host, if these average their
            gradients every step. Then each host acts as one worker. All hosts must have the same number of processes,
            with consecutive ranks in `group`. Default: ``None`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The gradients of this worker, in the form that the optimizer takes.

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range; `fragments` does not divide `every` or is greater than the
            number of parameters; the optimizer exchanges itself or shards its states; its tensors are sliced and
            `group` is not given; or `group` or `local_group` is one that :class:`ms_optim.DGCMomentum` rejects.
        RuntimeError: If the library for CPU is missing.
        RuntimeError: If workers differ in their step, settings, parameters or weights at the last exchange, or hold
            another worker's residuals; nothing is exchanged. In a graph, the message is on standard error.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, LocalSteps, SparseTopK
        >>> net = nn.Dense(256, 100)
        >>> optimizer = AdamW(net.trainable_params(), 1e-3, weight_decay=0.1)
        >>> diloco = LocalSteps(optimizer, every=30)
        >>> inner, outer = AdamW(net.trainable_params(), 1e-3), {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
        >>> sparseloco = LocalSteps(inner, every=30, compress=SparseTopK(), **outer)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), diloco)
    """

    # Each worker needs every gradient as a whole.
    _support_parallel_optimizer = False
    _arguments = ARGUMENTS
    optimizer: FusedOptimizer
    every: int
    fragments: int
    workers: Workers
    outer: Outer
    kept: Kept
    progress: Progress
    own_worker: Tensor
    due: tuple[int, ...]
    all_fragments: tuple[int, ...]
    exchanges: nn.CellList
    local_mean: nn.Cell
    # The attributes that `nn.Cell` registers as parameters.
    local_start: ParameterTuple
    local_velocity: ParameterTuple
    local_residual: ParameterTuple
    local_step: Parameter
    local_worker: Parameter

    def __init__(
        self,
        optimizer: FusedOptimizer,
        every: int = 30,
        *,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        compress: SparseTopK | Quantized | None = None,
        fragments: int = 1,
        group: str | Workers | None = None,
        local_group: str | None = None,
    ):
        nn.Cell.__init__(self, auto_prefix=False)
        outer = Outer(every, fragments, outer_learning_rate, outer_momentum, nesterov, compress)
        check_local_steps(NAME, optimizer, outer, group)
        workers = group if isinstance(group, Workers) else Workers(NAME, group, local_group)
        layout, held = optimizer._layout, optimizer._held
        self.optimizer, self.every, self.fragments = optimizer, every, fragments
        self.workers = workers
        self.outer = outer
        kept = Kept(held.parameters, layout.names, outer, np.eye(workers.count, dtype=np.int32)[workers.rank])
        self.local_start, self.local_velocity, self.local_residual = kept.starts, kept.velocities, kept.residuals
        self.local_step, self.local_worker = kept.step, kept.worker
        self.kept = kept
        self.own_worker = Tensor(kept.worker.asnumpy())
        self.due, self.all_fragments = due(every, fragments), tuple(range(fragments))
        rule = (optimizer.rule.name, optimizer.rule.constants, optimizer.rule.flags)
        mark = outer.mark(rule, [*zip(layout.names, layout.shapes)])
        self._on_host = kernels.device_target() == "CPU"
        self.exchanges = nn.CellList(
            [
                Exchange(tensors, held, kept, outer, workers, mark, report, self._on_host)
                for tensors, report in zip(fragments_of(layout.sizes, fragments), kept.reports)
            ]
        )
        self.local_mean = LocalMean(workers, layout.sizes, held.parameters)
        self.progress = Progress(optimizer, kept, self.exchanges, optimizer._entries.swap)
        worker, own = kept.worker.name, kept.worker.asnumpy()

        def check(given):
            if worker in given:
                check_entry(NAME, worker, given[worker], own)

        self._entries = AroundEntries(NAME, optimizer._entries, (*kept.of_tensors, kept.step, kept.worker), check)

    # ---- The step -------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...] | Tensor:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        if not self._on_host:
            return super().__call__(gradients)
        self.progress.complete()
        exchanged = self._begin()
        if self.workers.local > 1:
            gradients = self._mean(tuple(self._checked(gradients)))
        self.progress.begin(exchanged)
        done = self.optimizer(gradients)
        self.progress.complete()
        return done

    @ms.jit(backend="ms_backend")
    def _mean(self, gradients):
        return self.local_mean(gradients)

    def construct(self, gradients: Tensors) -> tuple[bool, ...] | Tensor:
        """Take a step, and exchange the fragments that are due."""
        if (self.local_worker != self.own_worker).any():
            raise RuntimeError("For 'LocalSteps', the residuals are of another worker: load this worker's own.")
        if self.local_step == 0:
            for k in self.all_fragments:
                self.exchanges[k].begun()
        done = self.optimizer(self.local_mean(gradients))
        place = ops.assign_add(F.depend(self.local_step, done), 1) % self.every
        for k in self.all_fragments:
            if place == self.due[k]:
                self.exchanges[k]()
        return done

    def _checked(self, gradients):
        """Return gradients that are passed from Python, checked."""
        layout = self.optimizer._layout
        return check_gradients(NAME, layout.names, layout.shapes, gradients)

    def _begin(self) -> list[int]:
        """Begin a step, and return the fragments to exchange after it.

        All data that an exchange reads and writes is checked before the optimizer changes anything.
        """
        self.kept.check_counts(NAME)
        check_residuals(NAME, self.local_worker, self.own_worker.asnumpy())
        step = int(self.local_step.asnumpy()[0])
        exchanged = [k for k in self.all_fragments if (step + 1) % self.every == self.due[k]]
        if exchanged or step == 0:
            self.optimizer._held.check()
            self.kept.check(NAME)
        if step == 0:  # the first round begins with the current weights, which may have been loaded
            for exchange in self.exchanges:
                exchange.begin_here()
        return exchanged

    @classmethod
    def step_together(cls, workers: Sequence[LocalSteps], gradients: Sequence[Tensors]) -> int:
        """Take a step of simulated workers, and return the number of bytes that each has sent."""
        checked = [worker._checked(own) for worker, own in zip(workers, gradients)]
        exchanged, *_ = [worker._begin() for worker in workers]
        for worker, own in zip(workers, checked):
            worker.optimizer(own)
            write(worker.local_step, worker.local_step.asnumpy() + np.int32(1))
        for k in exchanged:
            sent = [worker.exchanges[k].send_here() for worker in workers]
            check_alike(np.stack([mark for _, mark in sent]))
            wires = together([wire for wire, _ in sent], workers[0].outer.compress is not None)
            for worker in workers:
                worker.exchanges[k].apply_here(wires)
        return sum(workers[0].exchanges[k].bytes_sent for k in exchanged)

    # ---- What it keeps --------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, learning_rate: str = "load") -> None:
        """Load the states of other local steps with as many workers, and continue from their step.

        Args:
            state_dict: Tensors or Parameters by name, as :meth:`state_dict` returns them on this worker.
            strict: As in :meth:`ms_optim.FusedOptimizer.load_state_dict`. Default: ``True`` .
            learning_rate: Likewise. Default: ``"load"`` .

        Raises:
            ValueError: If the residuals are those of another worker: :func:`ms_optim.fold_residuals` converts them.

        All other errors are those of :meth:`ms_optim.FusedOptimizer.load_state_dict`; if one is raised, nothing is
        changed.
        """
        super().load_state_dict(state_dict, strict, learning_rate)

    def exchange_report(self) -> dict[str, float]:
        """Return statistics of the last exchange, combined over all fragments.

        Returns:
            dict[str, float]: ``difference_norm``, the L2 norm of the change of this worker's weights since the previous
            exchange; ``residual_norm``, the norm of what it has not sent; ``mean_norm``, the norm of the mean over all
            workers of what they sent; ``agreement``, the mean cosine between what two workers sent, weighted by their
            norms: 1 if all sent the same, 0 if they are orthogonal.
        """
        rows = np.array([report.asnumpy() for report in self.kept.reports], np.float64)
        difference, residual, mean = np.sqrt(np.sum(rows[:, :3] ** 2, axis=0)).tolist()
        weight = rows[:, 2] ** 2
        agreement = float(rows[:, 3] @ weight / weight.sum()) if weight.sum() > 0 else float(rows[:, 3].mean())
        names = ("difference_norm", "residual_norm", "mean_norm", "agreement")
        return dict(zip(names, (difference, residual, mean, agreement)))

    def attach(self, passes: int = 1) -> None:
        """Raise an error: with gradient release, the optimizer is not called.

        Args:
            passes: Ignored.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"For '{NAME}', gradients cannot be released: exchanges follow calls of the optimizer.")
