"""Averaged weights: what of them is for use is put into the parameters for a while, and taken out again."""

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
    """Puts averaged weights into the parameters, and what training holds back again, to the bit.

    Meanwhile the step count is negative, -1 minus itself: a kernel or a graph that is told of nothing else refuses such
    a step, and a checkpoint of MindSpore's that was saved by mistake is refused when it is loaded.

    Args:
        parts: What the optimizer's path is made from.
        gather: What gives all workers the weights of each one's share; None where each has all.
        check_between: Raises an error that names what was called if a step is under way.
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
        """Raise an error where a step would move averaged weights."""
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', the parameters hold the averaged weights: leave "
                "'with optimizer.averaged()', or call optimizer.train(), before the next step."
            )

    def check_outside(self, what: str) -> None:
        """Raise an error where something is asked for that needs what training holds in the parameters."""
        self.check_between(what)
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', {what} must be called while the parameters hold what training "
                "holds in them, but they hold the averaged weights: call optimizer.train() first."
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
        """Put back what training holds in the parameters, and warn of what was written to them meanwhile."""
        held = self.parts.held
        changed = [p.name for p, put in zip(held.parameters, self._put) if self.is_in and checksum(p) != put]
        if changed:
            warnings.warn(
                f"{self.parts.layout.optimizer}: {len(changed)} parameters, the first of which is '{changed[0]}', were "
                "changed while they held the averaged weights. The change is lost: load weights outside of "
                "'with optimizer.averaged()'.",
                stacklevel=3,
            )
        for p in (held.global_step, *held.parameters) if self.is_in else ():
            write(p, self._kept[id(p)])
        self._kept = {}

    def in_training(self, parameter: Parameter) -> NDArray[Any]:
        """Return the numbers that a parameter has in training."""
        kept = self._kept.get(id(parameter))
        return parameter.asnumpy() if kept is None else kept

    def weights_held(self, i: int) -> NDArray[Any]:
        """Return the weights that this process has states of, flat, in float32: from their master, if they have one."""
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
        """Return the averaged weight in the parameter's dtype; of another worker's share, the weight as it is."""
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
        """Return which elements of a parameter this process has states of."""
        shares = self.parts.shares
        return (0, self.parts.held.parameters[i].size) if shares is None else shares.own[i].tolist()


class Averaged(nn.Optimizer):
    """Puts averaged weights into the parameters, for evaluation and for use."""

    _swap: Swap

    def _keep_swap(self, parts: Parts, gather: Callable[[], Any] | None, check_between: Callable[[str], None]) -> Swap:
        """Make what puts averaged weights into the parameters.

        Raises:
            ValueError: If each process updates only some of the parameters, as MindSpore's parallel optimizer has it.
        """
        if parts.settings.is_parallel and (len(parts.held.averages) > 0 or parts.statement.averages_iterates):
            raise ValueError(
                f"For '{parts.layout.optimizer}', averaged weights need every process to update all parameters: set "
                "enable_parallel_optimizer=False; 'shard_states' splits states over processes, too."
            )
        object.__setattr__(self, "_swap", Swap(parts, gather, check_between))
        return self._swap

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the parameters; when the block ends, what they held returns, to the bit.

        The averaged weights are the average that `average_decay` keeps, or the average of the iterates of
        :class:`ms_optim.ScheduleFreeAdamW`. A step inside the block is an error. :meth:`state_dict` is the same inside
        and outside of it. A block inside of another changes nothing. What is written to the parameters inside the
        block, by loading a checkpoint of the network say, is lost when it ends, with a warning.

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
        """Put back what training holds in the parameters; before the first :meth:`eval` it changes nothing."""
        self._swap.take_out()
