"""Averaged weights: they are put into the parameters temporarily, for evaluation and use, and taken out again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from . import _masters
from ._writing import checksum, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .paths.parts import Parts


class Swap:
    """Puts averaged weights into the parameters, and later restores the training weights bit for bit.

    Meanwhile the step count is replaced by -1 minus itself, which is negative. A kernel or a graph then refuses a step,
    even if nothing else stops it. A MindSpore checkpoint that was saved by mistake is refused when it is loaded.

    Args:
        parts: The parts that the optimizer's path is built from.
        gather: Gathers the weights of all shares on all workers; None if each worker has all weights.
        check_between: Raises an error that names the called function if a step is in progress.
    """

    parts: Parts
    gather: Callable[[], Any] | None
    check_between: Callable[[str], None]

    def __init__(self, parts: Parts, gather: Callable[[], Any] | None, check_between: Callable[[str], None]):
        self.parts, self.gather, self.check_between = parts, gather, check_between
        self._kept: dict[int, np.ndarray] = {}
        self._put: list[int] = []

    @property
    def is_in(self) -> bool:
        """Whether the averaged weights are in the parameters."""
        return bool(self._kept)

    def check_step(self) -> None:
        """Raise an error if a step would update averaged weights."""
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', the parameters hold the averaged weights: leave "
                "'with optimizer.averaged()', or call optimizer.train(), before the next step."
            )

    def check_outside(self, what: str) -> None:
        """Raise an error if the averaged weights are in the parameters; `what` needs the training weights."""
        self.check_between(what)
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', {what} cannot be called while the parameters hold the "
                "averaged weights: call optimizer.train() first."
            )

    def put_in(self) -> None:
        """Put the averaged weights into the parameters."""
        held, statement = self.parts.held, self.parts.statement
        if len(held.averages) == 0 and not statement.averages_iterates:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', there is no average of the weights: pass 'average_decay'."
            )
        if self.is_in:
            return
        self.check_between("averaged() or eval()")
        step = held.global_step.asnumpy().copy()
        averaged = [self._averaged(i) for i in range(len(held.parameters))] if step[0] > 0 else []
        self._kept = {id(p): p.asnumpy().copy() for p in (held.global_step, *held.parameters)}
        write(held.global_step, -1 - step)
        for p, value in zip(held.parameters, averaged):
            write(p, value)
        if averaged and self.gather is not None:
            self.gather()
        self._put = [checksum(p) for p in held.parameters]

    def take_out(self) -> None:
        """Restore the training weights, and warn if the parameters were changed meanwhile."""
        held = self.parts.held
        changed = [p.name for p, put in zip(held.parameters, self._put) if self.is_in and checksum(p) != put]
        if changed:
            warnings.warn(
                f"{self.parts.layout.optimizer}: {len(changed)} parameters, the first being '{changed[0]}', were "
                "changed while they held the averaged weights. The change is lost: load weights outside of "
                "'with optimizer.averaged()'.",
                stacklevel=3,
            )
        for p in (held.global_step, *held.parameters) if self.is_in else ():
            write(p, self._kept[id(p)])
        self._kept = {}

    def in_training(self, parameter: Parameter) -> NDArray[Any]:
        """Return the values that a parameter has in training."""
        kept = self._kept.get(id(parameter))
        return parameter.asnumpy() if kept is None else kept

    def weights_held(self, i: int) -> NDArray[Any]:
        """Return the weights whose states this process has, flat and in float32: from their master, if there is one."""
        held = self.parts.held
        p, (begin, end) = held.parameters[i], self._range(i)
        weights = ops.cast(p, mstype.float32).asnumpy().reshape(-1)[begin:end]
        if held.master_places[i] < 0:
            return weights
        master = held.masters[held.master_places[i]]
        if master.dtype != mstype.float32:
            return _masters.restored(weights, master.asnumpy().reshape(-1))
        rounded = ops.cast(ops.cast(master, p.dtype), mstype.float32).asnumpy().reshape(-1)
        return np.where(rounded == weights, master.asnumpy().reshape(-1), weights)

    def _averaged(self, i):
        """Return the averaged weight in the parameter's dtype; in another worker's share, the current weight."""
        held, statement = self.parts.held, self.parts.statement
        p = held.parameters[i]
        begin, end = self._range(i)
        if begin == end:
            return p.asnumpy()
        row = held.rows[i]
        if len(held.averages) > 0:
            averaged = held.averages[row].asnumpy().reshape(-1)
        else:
            averaged = statement.averaged_weight(self.weights_held(i), held.states[row].asnumpy().reshape(-1))
        whole = ops.cast(p, mstype.float32).asnumpy().reshape(-1).copy()
        whole[begin:end] = averaged
        return ops.cast(Tensor(whole.reshape(p.shape)), p.dtype).asnumpy()

    def _range(self, i):
        """Return the range of a parameter's elements whose states this process has."""
        shares = self.parts.shares
        return (0, self.parts.held.parameters[i].size) if shares is None else shares.own[i].tolist()


class Averaged(nn.Optimizer):
    """Puts averaged weights into the parameters, for evaluation and for use."""

    _swap: Swap

    def _keep_swap(self, parts: Parts, gather: Callable[[], Any] | None, check_between: Callable[[str], None]) -> Swap:
        """Create the object that puts averaged weights into the parameters.

        Raises:
            ValueError: If each process updates only some of the parameters, as with MindSpore's parallel optimizer.
        """
        if parts.settings.is_parallel and (len(parts.held.averages) > 0 or parts.statement.averages_iterates):
            raise ValueError(
                f"For '{parts.layout.optimizer}', averaged weights require that every process updates all parameters: "
                "set enable_parallel_optimizer=False. 'shard_states' also shards states over processes."
            )
        object.__setattr__(self, "_swap", Swap(parts, gather, check_between))
        return self._swap

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the parameters; the end of the block restores them bit for bit.

        The averaged weights are the average that `average_decay` keeps, or the average of the iterates of
        :class:`ms_optim.ScheduleFreeAdamW`. A step inside the block is an error. :meth:`state_dict` is the same inside
        and outside of it. A nested block has no effect. Changes to the parameters inside the block, such as loading a
        checkpoint of the network, are lost when it ends, with a warning.

        Raises:
            RuntimeError: If there is no average of the weights.
        """
        was_in = self._swap.is_in
        self._swap.put_in()
        try:
            yield
        finally:
            if not was_in:
                self._swap.take_out()

    def eval(self) -> None:
        """Put the averaged weights into the parameters, until :meth:`train` is called; see :meth:`averaged`.

        Raises:
            RuntimeError: If there is no average of the weights.
        """
        self._swap.put_in()

    def train(self) -> None:
        """Restore the training weights; before the first :meth:`eval` this has no effect."""
        self._swap.take_out()
