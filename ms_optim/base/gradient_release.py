"""Gradient release: each weight is updated inside the backward pass, and its gradient is freed immediately."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Tensor, ops

from ..arguments.checks import fail
from ..arguments.gradients import check_shapes
from .weight_readers import Readers

if TYPE_CHECKING:
    from mindspore import Parameter

    from ..paths.parts import Parts

# What updates parameters inside backward passes, until it is detached or its optimizer is dropped.
_attached: weakref.WeakSet[Release] = weakref.WeakSet()


def suspect(parameters: Iterable[Parameter]) -> None:
    """Have the next gradient of what updates these parameters look whether it was dropped for another optimizer.

    A dropped optimizer is part of cycles, and would go on until Python happens to collect them.
    """
    if _attached:
        held = {id(p) for p in parameters}
        for release in _attached:
            release.is_suspect |= any(id(p) in held for p in release.parameters)


def released_by_another(own: Release | None, parameters: Iterable[Parameter]) -> tuple[str, str] | None:
    """Return the name of a parameter that another optimizer updates inside the backward pass, and that optimizer's."""
    held = {id(p): p.name for p in parameters}

    def found():
        others = [other for other in _attached if other is not own]
        return [(held[id(p)], o.parts.layout.optimizer) for o in others for p in o.parameters if id(p) in held]

    if found():
        gc.collect()  # a dropped optimizer is part of cycles
    return next(iter(found()), None)


class Release:
    """Updates each parameter when its gradient has arrived and the backward pass has no reader of the weight left.

    The backward pass may still need a weight when its gradient is complete: where the forward pass also read it behind
    ``stop_gradient``. Its gradient is then kept until the last such reader is done.

    Args:
        parts: The parts that the optimizer's path is built from.
        path: The path of its steps.
        measures: Whether a step has two backward passes, the first of which only measures the gradients.
        check: Raises an error if no step may begin.
    """

    def __init__(self, parts: Parts, path: Any, measures: bool, check: Callable[[], None]):
        self.parts, self.path, self.measures, self.check = parts, path, measures, check
        self.is_suspect = False
        # What the path makes of the step that is under way, and of its gradients that were measured.
        self._step: Any = None
        self._measured: Any = None
        self._sums: dict[int, Tensor] = {}
        self._waiting: dict[int, tuple[Tensor, Callable[[], bool]]] = {}
        parts.held.check()
        on_host = parts.settings.weights_on == "CPU"
        self._readers = [Readers(p) for p in parts.held.parameters] if on_host else []
        for i, p in enumerate(parts.held.parameters):
            p.register_hook(_hook(weakref.ref(self), i))
        _attached.add(self)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that are updated inside the backward pass."""
        return tuple(self.parts.held.parameters)

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and is not finished."""
        return self._step is not None

    @property
    def _is_measuring(self) -> bool:
        return self.measures and self._measured is None

    def _take(self, i, gradient):
        """Take a parameter's gradient, update all parameters that can be, and return what is passed on instead."""
        layout = self.parts.layout
        name = layout.names[i]
        if i in self._sums or i in self._waiting:
            raise RuntimeError(
                f"For '{layout.optimizer}', a second gradient of '{name}' has arrived in one backward pass: call "
                "optimizer.finish() after each. Gradients cannot be accumulated, because the first has already updated "
                "the weight. After a backward pass that failed, call optimizer.abandon() first."
            )
        if self._step is None:
            self.check()
            self.parts.held.check()
            self._step = self.path.begun(self.parts.rates(self.parts.held.global_step))
        check_shapes(layout.optimizer, (name,), (layout.shapes[i],), (gradient.shape,), (gradient.dtype,))
        gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
        if self._is_measuring:
            self._sums[i] = self.path.measure(i, self._step, gradient)
        else:
            self._waiting[i] = gradient, self._readers[i].renew() if self._readers else lambda: True
            self._move(lambda is_read: not is_read())
        # This is passed on in place of the gradient; otherwise all gradients would stay alive until the pass ends. It
        # has one dimension more than the weight, so that nobody takes it for a gradient.
        return ops.zeros((1,) * (1 + len(layout.shapes[i])), gradient.dtype)

    def _move(self, may_move):
        """Update those waiting parameters that may move, by what tells whether a parameter is read."""
        for i, (gradient, is_read) in list(self._waiting.items()):
            if may_move(is_read):
                self._sums[i] = self.path.move(i, self._step, self._measured, gradient)
                del self._waiting[i]

    def finish(self) -> bool:
        """End a backward pass; see :meth:`ms_optim.FusedOptimizer.finish`."""
        layout = self.parts.layout
        arrived = self._sums.keys() | self._waiting.keys()
        missing = [name for i, name in enumerate(layout.names) if i not in arrived]
        if missing:
            moved = self.abandon()
            raise RuntimeError(
                f"For '{layout.optimizer}', gradients of all {layout.count} parameters must arrive before finish(), "
                f"but only {len(arrived)} did; the one of '{missing[0]}' is missing. Pass optimizer.parameters to "
                f"value_and_grad in PyNative mode, and do not use them in a function compiled with ms.jit. The step is "
                f"not counted, and {len(moved)} parameters were updated."
            )
        self._move(lambda is_read: True)  # the backward pass is over
        sums, self._sums = self.path.of_all(self._sums), {}
        if self._is_measuring:
            self._measured = self.path.measured(sums)
            return False
        # Should this be interrupted, the next backward pass begins a step of its own.
        step, self._step, self._measured = self._step, None, None
        self.path.count(step, sums)
        return True

    def abandon(self) -> list[str]:
        """Discard the current step; see :meth:`ms_optim.FusedOptimizer.abandon`."""
        moved = [] if self._is_measuring else [self.parts.layout.names[i] for i in sorted(self._sums)]
        self._step, self._measured, self._sums, self._waiting = None, None, {}, {}
        return moved

    def detach(self) -> None:
        """From now on, pass each gradient on unchanged."""
        _attached.discard(self)


def _hook(of: weakref.ref[Release], i: int) -> Callable[[Tensor], Tensor]:
    """Return a parameter's hook, which MindSpore continues to call after its removal, or when the optimizer is gone."""

    def take(gradient: Tensor) -> Tensor:
        release = of()
        if release is not None and release.is_suspect:
            release.is_suspect, release = False, None
            gc.collect()
            release = of()
        return gradient if release is None or release not in _attached else release._take(i, gradient)

    return take


class Attachment:
    """Attaches an optimizer to backward passes, and detaches it.

    Args:
        parts: The parts that the optimizer's path is built from.
        path_for: Makes the path of such steps; it takes whether a first backward pass measures the gradients.
        check_begin: Raises an error if no step may begin.
    """

    def __init__(self, parts: Parts, path_for: Callable[[bool], Any], check_begin: Callable[[], None]):
        self.parts, self.path_for, self.check_begin = parts, path_for, check_begin
        self.release: Release | None = None

    def attach(self, passes: int) -> None:
        """Start to update parameters; see :meth:`ms_optim.FusedOptimizer.attach`."""
        name = self.parts.layout.optimizer
        if type(passes) is not int or passes not in (1, 2):
            fail(ValueError, name, "passes", "1 or 2", passes)
        asked = self.parts.stage_reading_all
        if passes == 1 and asked is not None:
            expected = f"2, because '{asked}' needs all gradients before a weight is updated"
            fail(ValueError, name, "passes", expected, passes)
        why = self._why_not()
        if why is not None:
            raise RuntimeError(f"For '{name}', {why}.")
        if self.release is not None:
            raise RuntimeError(f"For '{name}', gradients are released already: call detach() before attach().")
        self._check_no_other()
        self.release = Release(self.parts, self.path_for(passes == 2), passes == 2, self.check_begin)

    def attached(self, what: str) -> Release:
        """Return the object that updates the parameters."""
        if self.release is None:
            raise RuntimeError(f"For '{self.parts.layout.optimizer}', {what} must be called after attach().")
        return self.release

    def detach(self) -> None:
        """Return to ordinary steps."""
        self.check_between("detach()")
        self.attached("detach()").detach()
        self.release = None

    def check_detached(self) -> None:
        """Raise an error if parameters are updated inside the backward pass."""
        if self.release is not None:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', each parameter is updated inside the backward pass since "
                "attach(): call finish() after it instead of the optimizer, or call detach() for ordinary steps."
            )
        if _attached:
            self._check_no_other()

    def check_between(self, what: str) -> None:
        """Raise an error if some parameters have been updated and others have not."""
        if self.release is not None and self.release.is_under_way:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', {what} must be called between two steps, but gradients have "
                "arrived and finish() was not called: call it, or abandon() after a backward pass that failed."
            )

    def _why_not(self):
        """Return why gradients cannot be released, or None."""
        parts = self.parts
        for own in parts.of_rules:
            if (reason := type(own.statement).refuses.get("attach")) is not None:
                return f"it {reason}"
        if ms.get_context("mode") == ms.GRAPH_MODE:
            return "attach() needs PyNative mode: a graph passes all gradients to the optimizer at once"
        if parts.slices is not None or parts.shares is not None or parts.settings.is_parallel:
            return "attach() is not supported by optimizers that exchange data with other processes"
        if ms.get_auto_parallel_context("parallel_mode") != "stand_alone":
            return (
                "attach() needs the parallel mode 'stand_alone': other workers' gradients arrive after the backward "
                "pass"
            )
        return None

    def _check_no_other(self):
        """Raise an error if another optimizer updates one of the parameters inside the backward pass."""
        found = released_by_another(self.release, self.parts.held.parameters)
        if found is not None:
            raise RuntimeError(
                f"For '{self.parts.layout.optimizer}', the parameter '{found[0]}' is updated inside the backward pass "
                f"by another optimizer, of the class {found[1]}, since its attach(): call its detach() first."
            )
