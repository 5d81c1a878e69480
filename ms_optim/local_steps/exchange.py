"""One exchange of a fragment: send the differences, check that workers agree, take the outer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..kernels import libraries
from ..kernels import table as kernels
from ..kernels.local_interface import LocalMark, LocalReport
from ..paths.fused.launches import as_tuple
from ..paths.fused.offloaded import Fetch, Send, on_host
from ..rules.arithmetic import receive
from ..states.in_place import write
from ..unregistered import unregistered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..states.storage import Held
    from ..workers.transport import Workers
    from .kept import Kept
    from .wire import Outer


# What no launch writes as the first number of its last output, be it a mark, a statistic or whether it is done.
NOT_YET = -(2**30)


class Launch(nn.Cell):
    """A launch of local steps: its operator, and its inputs except those of the call.

    Args:
        name: The operator's name, without ``local_``.
        numbers: Its inputs before those of the call.
        tensors: Its inputs after those of the call.
        written: Whether it writes these.
        given: Number of inputs of the call.
        outputs: Shape and dtype of each output.
    """

    def __init__(self, name, numbers, tensors, written, given, outputs):
        super().__init__(auto_prefix=False)
        writes = (False,) * (len(numbers) + given) + tuple(written)
        self.kernel, self.numbers = kernels.operator(f"local_{name}", "CPU", writes, outputs), numbers
        self.name, self.outputs = f"local_{name}", tuple((shape, str(dtype).lower()) for shape, dtype in outputs)
        self.made: list[np.ndarray] = []
        unregistered(self, tensors=as_tuple(tensors))

    def construct(self, *given):
        """Run the launch."""
        return self.kernel(*self.numbers, *given, *self.tensors)

    def prepare(self):
        """Make memory for the outputs, and mark the last one as not yet written."""
        if not self.made:
            self.made = [np.zeros(shape, dtype) for shape, dtype in self.outputs]
        self.made[-1].reshape(-1)[0] = NOT_YET

    @property
    def has_run(self):
        """Whether the launch has run since it was prepared: a caller may have been interrupted just after it."""
        return bool(self.made) and self.made[-1].reshape(-1)[0] != NOT_YET

    def here(self, *given):
        """Run the launch, called from Python, on the current memory of its tensors; return its outputs.

        The memory of the outputs is reused by the next call, because allocating it takes longer than writing it.
        """
        if not self.made:
            self.prepare()
        libraries.run_here(libraries.Run(self.name, [*self.numbers, *given, *self.tensors], self.made))
        return self.made


class Copies(nn.Cell):
    """Copies of weights and masters on the host, for the host's kernels.

    Args:
        parameters: The weights and masters on an accelerator.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        copies = ParameterTuple([on_host(p) for p in parameters])
        self.send, self.fetch, self.each = Send(copies), Fetch(copies), ops.Map()
        unregistered(self, parameters=ParameterTuple(parameters), copies=copies)

    def construct(self):
        """Write the copies; return a value that later operators can depend on."""
        return self.send(self.parameters)

    def back(self, done):
        """Write the weights and masters from their copies."""
        return self.each(receive, self.parameters, self.fetch(done))


class Exchange(nn.Cell):
    """The exchange of some tensors among the workers.

    Args:
        tensors: The indices of these tensors.
        held: What the optimizer holds.
        kept: What local steps keep.
        outer: The settings of the outer step and of what is sent.
        workers: The workers.
        mark: The numbers that workers compare, as :meth:`Outer.mark` returns them.
        report: Parameter that receives the statistics of the exchange.
        on_host: Whether weights and masters are in memory that the host's kernels can write.
    """

    def __init__(
        self,
        tensors: tuple[int, ...],
        held: Held,
        kept: Kept,
        outer: Outer,
        workers: Workers,
        mark: np.ndarray,
        report: Parameter,
        on_host: bool,
    ):
        super().__init__(auto_prefix=False)
        weights = [held.parameters[i] for i in tensors]
        places = [held.master_places[i] for i in tensors]
        masters = [held.masters[k] for k in places if k >= 0]
        found = np.cumsum([k >= 0 for k in places]) - 1
        numbers = (
            Tensor(outer.numbers(workers)),
            Tensor(np.where(np.array(places) >= 0, found, -1).astype(np.int32)),
        )
        self.copies = None if on_host else Copies([*weights, *masters])
        of_weights = [*weights, *masters] if self.copies is None else list(self.copies.copies)
        starts, velocities, residuals = (
            [these[i] for i in tensors] if len(these) > 0 else []
            for these in (kept.starts, kept.velocities, kept.residuals)
        )
        n, m = len(of_weights), len(tensors)
        self.words = outer.words([p.size for p in weights])
        wire = ((self.words,), ms.int32 if outer.compress else ms.float32)
        marks = ((LocalMark.LOCAL_MARKS,), ms.int32)
        reads = (False,) * (n + m)
        done = ((1,), ms.int32)
        self.starter = Launch("begin", numbers, [*of_weights, *starts], (False,) * n + (True,) * m, 0, [done])
        sent = [*of_weights, *starts, *residuals]
        self.sender = Launch("send", numbers, sent, (*reads, *(False,) * len(residuals)), 1, [wire, marks])
        moved = [*of_weights, *starts, *velocities, *residuals]
        report_of = ((LocalReport.LOCAL_REPORTS,), ms.float32)
        self.receiver = Launch("apply", numbers, moved, (True,) * len(moved), 1, [report_of])
        self.agree = Launch("agree", (), (), (), 1, [done])
        self.mark, self.worker_count = Tensor(mark), workers.count
        self.bytes_sent = 4 * (self.words + int(LocalMark.LOCAL_MARKS)) if workers.count > 1 else 0
        self.gather: Any = workers.exchange(True, int(LocalMark.LOCAL_MARKS)) if workers.count > 1 else None
        self.exchange: Any = workers.exchange(outer.compress is not None, self.words) if workers.count > 1 else None
        unregistered(self, step=kept.step, report=report)

    def construct(self):
        """Exchange, and take the outer step; return a value that later operators can depend on."""
        wire, mark = self.sent()
        if self.worker_count > 1:
            wire = self.exchange(F.depend(wire, self.agree(self.gather(mark))))
        return self.applied(wire)

    def begun(self):
        """Begin a round at the current weights; return a value that later operators can depend on."""
        return self.starter() if self.copies is None else F.depend(self.copies(), self.starter())

    def sent(self):
        """Return what this worker sends, and its mark."""
        mark = ops.concat((self.mark, self.step))
        if self.copies is not None:
            mark = F.depend(mark, self.copies())
        return self.sender(mark)

    def applied(self, wires):
        """Take the outer step with the values that all workers sent."""
        found = self.receiver(wires)
        done = F.assign(self.report, found)
        return done if self.copies is None else F.depend(done, self.copies.back(found))

    # The parts of an exchange that is called from Python, with weights and masters on the host.

    def begin_here(self):
        """Begin a round at the current weights."""
        self.starter.here()

    def send_here(self):
        """Return what this worker sends, and its mark."""
        return self.sender.here(np.concatenate((self.mark.asnumpy(), self.step.asnumpy())))

    def apply_here(self, wires):
        """Take the outer step with the values that all workers sent."""
        (found,) = self.receiver.here(np.ascontiguousarray(wires))
        write(self.report, found)

    def prepare(self):
        """Prepare for an exchange, which :meth:`complete` makes."""
        self.sender.prepare()
        self.receiver.prepare()
        self.is_exchanging = False

    def complete(self, check_alike: Callable[[np.ndarray], None]) -> None:
        """Exchange, or go on where this was interrupted.

        Args:
            check_alike: Raises an error if the marks of the workers differ.
        """
        if not self.receiver.has_run:
            if self.is_exchanging:
                raise RuntimeError(
                    "For 'LocalSteps', an exchange with the other workers was interrupted, and they have gone on: load "
                    "the last checkpoint on all workers."
                )
            wires, mark = self.sender.made if self.sender.has_run else self.send_here()
            if self.worker_count > 1:
                self.is_exchanging = True
                check_alike(self.gather(Tensor(mark)).asnumpy())
                wires = self.exchange(Tensor(wires)).asnumpy()
            self.apply_here(wires)
        write(self.report, self.receiver.made[0])
