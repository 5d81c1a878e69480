"""GradientAccumulation: one step of an optimizer for the mean of several gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Zero
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_choice, check_count, fail
from ..arguments.gradients import check_gradients, check_shapes_in_graph
from ..base.any_optimizer import is_any_optimizer
from ..base.around import AroundEntries, AroundOptimizer, steps_taken
from ..rules.arithmetic import write

NAME = "GradientAccumulation"
SUM_DTYPES = ("float32", "weight")


def _added(part, begins, total, gradient):
    """Add a part of a gradient to a sum in place; the first one replaces it, whatever it holds."""
    before = F.cast(total, mstype.float32)
    added = ops.where(begins, ops.zeros_like(before), before) + F.cast(gradient, mstype.float32) * part
    return write(total, F.cast(added, total.dtype))


class GradientAccumulation(AroundOptimizer):
    """Gradient accumulation: the optimizer takes one step for the mean of several gradients.

    It takes the optimizer's place: in `Model`, in a training cell, or in a loop. Each call adds the gradients to sums,
    in place, and every `steps` calls the optimizer receives their mean. So batches may be as small as memory demands.

    - Loss scale, clipping, centralization and skipped steps apply to the mean. With `skip_nonfinite`, one gradient that
      is not finite skips the whole step.
    - `global_step`, schedules and `statistics` are the optimizer's: they count its steps.
    - A checkpoint between two steps holds the sums. A run with the same `steps` continues from it bit for bit.
    - :meth:`FusedOptimizer.attach` is an error: a released gradient is used at once and not kept.

    Its attribute `accumulated_count`, int32 of shape (1,), counts the gradients in the sums, which are `accumulated`.

    Args:
        optimizer (Union[FusedOptimizer, LocalSteps]): The optimizer of this package that takes the steps.
        steps (int): Number of gradients for one step; with 1, the optimizer is called as it is. Default: ``4`` .
        sum_dtype (str): Dtype of the sums: "float32", or "weight" for the dtype of each weight. Default:
            ``"float32"`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The gradients of one batch, in the form that the optimizer takes; sparse
          gradients are not supported.

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `optimizer` is not an optimizer of this package, or is a GradientAccumulation; or `steps` is not
            an int.
        ValueError: If `steps` is less than 1, or `sum_dtype` is none of the above.
        RuntimeError: If the optimizer is attached to backward passes.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, GradientAccumulation
        >>> net = nn.Dense(4, 3)
        >>> optimizer = GradientAccumulation(AdamW(net.trainable_params(), 1e-3, grad_clip_norm=1.0), steps=4)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    # Each call needs every gradient as a whole.
    _support_parallel_optimizer = False
    _arguments = ("steps", "sum_dtype")
    optimizer: Any
    steps: int
    sum_dtype: str
    map_: ops.Map
    # The attributes that `nn.Cell` registers as parameters.
    accumulated: ParameterTuple
    accumulated_count: Parameter

    def __init__(self, optimizer: Any, steps: int = 4, *, sum_dtype: str = "float32"):
        nn.Cell.__init__(self, auto_prefix=False)
        if not is_any_optimizer(optimizer) or isinstance(optimizer, GradientAccumulation):
            fail(TypeError, NAME, "optimizer", "an optimizer of ms_optim, not a GradientAccumulation", optimizer)
        check_count(NAME, "steps", steps, 1)
        check_choice(NAME, "sum_dtype", sum_dtype, SUM_DTYPES)
        optimizer._attachment.check_detached()
        self.optimizer, self.steps, self.sum_dtype = optimizer, steps, sum_dtype
        layout = optimizer._layout
        self._names, self._shapes = layout.names, layout.shapes
        dtypes = [mstype.float32 if sum_dtype == "float32" else p.dtype for p in optimizer.parameters]
        self.accumulated = ParameterTuple(
            Parameter(Tensor(shape=shape, dtype=dtype, init=Zero()), name=f"accumulated.{name}", requires_grad=False)
            for name, shape, dtype in zip(layout.names, layout.shapes, dtypes)
            if steps > 1
        )
        for p in self.accumulated:
            p.init_data()
        self.accumulated_count = Parameter(Tensor([0], mstype.int32), name="accumulated_count", requires_grad=False)
        self.map_ = ops.Map()
        self._part = 1.0 / steps
        self._succeeded = (True,) * layout.count
        self._done = Tensor([1], mstype.int32)
        # The counts of gradients and of steps before a call that ends with a step; None if none is under way.
        self._under_way: tuple[int, int] | None = None
        swap = optimizer._entries.swap
        self._check_between, swap.check_between = swap.check_between, self._complete_for
        kept = (*self.accumulated, self.accumulated_count)
        self._entries = AroundEntries(NAME, optimizer._entries, kept, self._check_given)

    # ---- The step -------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...]:
        """Add gradients, called from Python; inside a graph, ``construct`` is compiled instead."""
        if self.steps == 1:
            return self.optimizer(gradients)
        gradients = tuple(check_gradients(NAME, self._names, self._shapes, gradients))
        self._complete()
        counted = self._counted()
        if counted + 1 < self.steps:
            self._add(gradients)
        else:
            self._under_way = counted, steps_taken(self.optimizer)
            self._add(gradients)
            self._complete()
        return self._succeeded

    @ms.jit(backend="ms_backend")
    def _add(self, gradients):
        return self.add(gradients)

    def construct(self, gradients: tuple[Tensor, ...]) -> tuple[bool, ...]:
        """Add gradients, and take a step if they are enough."""
        if self.steps == 1:
            return self.optimizer(gradients)
        shapes, dtypes = self.map_(F.shape, gradients), self.map_(F.dtype, gradients)
        check_shapes_in_graph(NAME, self._names, self._shapes, shapes, dtypes, False)
        done = self.add(gradients)
        if done == 0:  # noqa: SIM108 - a graph compiles branches, and leaves out what nothing waits for
            done = F.depend(self._done, self.optimizer(self.accumulated))
        else:
            done = F.depend(self._done, done)
        return (F.depend(True, done), *self._succeeded[1:])

    def add(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Add gradients to the sums, and return how many these hold; 0: a step is due."""
        begins = (self.accumulated_count == 0).reshape(())
        added = self.map_(F.partial(_added, self._part, begins), self.accumulated, gradients)
        return ops.assign(self.accumulated_count, (F.depend(self.accumulated_count, added) + 1) % self.steps)

    def _complete(self):
        """Take the step that is due, unless the optimizer has taken it; an interrupt may have left it open."""
        if self._under_way is not None:
            counted, taken = self._under_way
            if self._counted() != counted and steps_taken(self.optimizer) == taken:
                self.optimizer(self.accumulated)
        self._under_way = None

    def _check_given(self, given):
        """Raise an error if a state dict has the sums of more gradients than a step takes here."""
        entry = given.get("accumulated_count")
        if entry is not None and int(entry.asnumpy().max()) >= self.steps:
            raise ValueError(
                f"For '{NAME}', 'state_dict' must have sums of less than {self.steps} gradients, the number of a step, "
                f"but 'accumulated_count' is {int(entry.asnumpy().max())}: make it with the 'steps' of that run."
            )

    def _counted(self) -> int:
        return int(self.accumulated_count.asnumpy()[0])

    def _complete_for(self, what: str) -> None:
        """Complete an interrupted step before a function that is to find whole steps."""
        self._complete()
        self._check_between(what)

    def extend_repr(self) -> str:
        """Return the arguments and the memory of the sums, for ``print``."""
        held = sum(p.nbytes for p in self.accumulated)
        return f"steps={self.steps}, sums ({self.sum_dtype}) {held:,} bytes"

    def attach(self, passes: int = 1) -> None:
        """Raise an error: with gradient release, no gradient is kept.

        Args:
            passes: Ignored.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"For '{NAME}', gradients cannot be released: they are added up until a step is due.")
