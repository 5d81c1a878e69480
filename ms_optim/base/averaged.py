"""Averaged weights: they are put into the parameters temporarily, for evaluation and use, and taken out again."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from ..arguments.checks import check_at_most
from ..states.in_place import checksum, own_memory, write

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..paths.parts import Parts


class _Block:
    """A block that needs the averaged weights."""


class Swap:
    """Puts averaged weights into the parameters, and later restores the training weights bit for bit.

    Meanwhile the step count is replaced by -1 minus itself, which is negative. A kernel or a graph then refuses a step,
    even if nothing else stops it. A MindSpore checkpoint that was saved by mistake is refused when it is loaded.

    Args:
        parts: The parts that the optimizer's path is built from.
        gather: Gathers the weights of all shares on all workers; None if each worker has all weights.
        check_between: Raises an error that names the called function if a step is in progress.

    Raises:
        ValueError: If each process updates only some of the parameters, as with MindSpore's parallel optimizer.
    """

    parts: Parts
    gather: Callable[[], Any] | None
    check_between: Callable[[str], None]

    def __init__(self, parts: Parts, gather: Callable[[], Any] | None, check_between: Callable[[str], None]):
        if parts.settings.is_parallel and (len(parts.held.averages) > 0 or parts.statement.averages_iterates):
            raise ValueError(
                f"For '{parts.layout.optimizer}', averaged weights require that every process updates all parameters: "
                "set enable_parallel_optimizer=False. 'shard_states' also shards states over processes."
            )
        self.parts, self.gather, self.check_between = parts, gather, check_between
        self._kept: dict[int, np.ndarray] = {}
        self._put: list[int] | None = None
        self._weight = 1.0
        # Blocks may overlap in several threads: the last one that ends takes the averaged weights out. One that was
        # interrupted at its very end is gone with its generator.
        self._lock, self._stays = threading.RLock(), False
        self._blocks: weakref.WeakSet[_Block] = weakref.WeakSet()

    @property
    def _is_needed(self) -> bool:
        """Whether a block, or eval(), needs the averaged weights in the parameters."""
        return self._stays or len(self._blocks) > 0

    @property
    def is_in(self) -> bool:
        """Whether the averaged weights are in the parameters, all of them."""
        return self._put is not None

    def check_step(self) -> None:
        """Raise an error if a step would update averaged weights."""
        self.repair()
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', the parameters hold the averaged weights: leave "
                "'with optimizer.averaged()', or call optimizer.train(), before the next step."
            )

    def check_outside(self, what: str) -> None:
        """Raise an error if the averaged weights are in the parameters; `what` needs the training weights."""
        self.check_between(what)
        self.repair()
        if self.is_in:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', {what} cannot be called while the parameters hold the "
                "averaged weights: call optimizer.train() first."
            )

    @contextlib.contextmanager
    def block(self, weight: float) -> Iterator[None]:
        """Put the averaged weights in, and take them out at the end, unless another block or eval() needs them."""
        own = _Block()
        try:
            with self._lock:
                self.repair()
                self._blocks.add(own)
                self.put_in(weight)
            yield
        finally:
            with self._lock:
                self._blocks.discard(own)
                if not self._is_needed:
                    self.take_out()

    def put_in(self, weight: float, stays: bool = False) -> None:
        """Put the averaged weights into the parameters; they stay beyond the end of all blocks if asked to.

        If this is interrupted anywhere, :meth:`repair` restores the training weights.

        Args:
            weight: The weight of the average; the rest is that of the training weights.
            stays: Whether they stay until :meth:`take_out`.
        """
        held, name = self.parts.held, self.parts.layout.optimizer
        weight = check_at_most(name, "weight", weight, 1.0)
        for own in self.parts.of_rules:
            if len(own.held.averages) == 0 and not own.statement.averages_iterates:
                whose = f" of '{own.layout.optimizer}'" if self.parts.members else ""
                raise RuntimeError(f"For '{name}', there is no average of the weights{whose}: pass 'average_decay'.")
        with self._lock:
            self.repair()
            if self.is_in and weight != self._weight:
                raise RuntimeError(
                    f"For '{name}', the parameters hold the averaged weights with the weight "
                    f"{self._weight:g}: leave that block, or call optimizer.train(), before the weight {weight:g}."
                )
            if not self.is_in:
                self.check_between("averaged() or eval()")
                own_memory(held.parameters)
                step = held.global_step.asnumpy().copy()
                averaged = [self._averaged(i, weight) for i in range(len(held.parameters))] if step[0] > 0 else []
                self._kept = {id(p): p.asnumpy().copy() for p in (held.global_step, *held.parameters)}
                write(held.global_step, -1 - step)
                for p, value in zip(held.parameters, averaged):
                    write(p, value)
                if averaged and self.gather is not None:
                    self.gather()
                self._weight = weight
                self._put = [checksum(p) for p in held.parameters]
            self._stays = self._stays or stays

    def take_out(self) -> None:
        """Restore the training weights, and warn if the parameters were changed meanwhile."""
        with self._lock:
            self._stays = False
            self._blocks.clear()
            put = zip(self.parts.held.parameters, self._put or ())
            changed = [p.name for p, before in put if checksum(p) != before]
            self._put = None
            for p in (self.parts.held.global_step, *self.parts.held.parameters) if self._kept else ():
                write(p, self._kept[id(p)])
            self._kept = {}
        if changed:
            warnings.warn(
                f"{self.parts.layout.optimizer}: {len(changed)} parameters, the first being '{changed[0]}', were "
                "changed while they held the averaged weights. The change is lost: load weights outside of "
                "'with optimizer.averaged()'.",
                stacklevel=3,
            )

    def repair(self) -> None:
        """Restore the training weights if putting averaged weights in, or taking them out, was interrupted."""
        if self._kept:
            with self._lock:
                if not (self.is_in and self._is_needed):
                    self.take_out()

    def in_training(self, parameter: Parameter) -> NDArray[Any]:
        """Return the values that a parameter has in training."""
        kept = self._kept.get(id(parameter))
        return parameter.asnumpy() if kept is None else kept

    def weights_held(self, i: int) -> NDArray[np.float32]:
        """Return the weights whose states this process has, in training."""
        return self.parts.held.weights(i)

    def _averaged(self, i, weight):
        """Return the averaged weight in the parameter's dtype; in another worker's share, the current weight."""
        parts, i = self.parts.of_tensor(i)
        held, statement = parts.held, parts.statement
        p = held.parameters[i]
        begin, end = held.own_range(i)
        if begin == end:
            return p.asnumpy()
        row = held.rows[i]
        if len(held.averages) > 0:
            averaged = held.averages[row].asnumpy().reshape(-1)
        else:
            averaged = statement.averaged_weight(held.weights(i), held.states[row].asnumpy().reshape(-1))
        if weight < 1.0:
            averaged = np.float32(1.0 - weight) * held.weights(i) + np.float32(weight) * averaged
        whole = ops.cast(p, mstype.float32).asnumpy().reshape(-1).copy()
        whole[begin:end] = averaged
        return ops.cast(Tensor(whole.reshape(p.shape)), p.dtype).asnumpy()
