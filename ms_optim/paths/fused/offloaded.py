"""The step of any rule on the host, with weights on an accelerator: copies gradients to the host and weights back.

The host has a copy of each weight in addition to the states and masters. The CPU kernels update it in the same way as
weights of the device target "CPU", so all their features work here. A launch takes whole tensors, so the norms of
layer-wise rules do not depend on other launches.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...kernels import table as kernels
from ...rules.arithmetic import receive
from ...unregistered import unregistered
from ..operators.gathered_weights import SumOverWorkers, WeightsByAllReduce
from .sharded_states import GatheredWeights
from .step import FusedPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..parts import Parts
    from .launches import LaunchCell

# One bucket of tensors is transferred while the host updates another. Each bucket increases the compile time of a
# graph.
BUCKETS = 8


class HostPath(nn.Cell):
    """The step of an optimizer whose rule runs on the host while its weights are on an accelerator.

    Args:
        parts: The parts that every path is built from.

    Attributes:
        addresses: None, because the host's kernels cannot read the gradients directly.
        gathered: Gathers the weights of sharded states on the device, for averaged weights; None without.
    """

    addresses = None

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        held, count, shares = parts.held, parts.layout.count, parts.shares
        copies = ParameterTuple([on_host(p) for p in held.parameters])
        host = held.beside(copies, [on_host(p) for p in held.counters])
        self.gathered, self.gather_copies = None, None
        exchange, own = parts.slices, None
        if shares is not None:
            exchange, own = SumOverWorkers(shares.workers), shares.own
            self.gathered = WeightsByAllReduce(held.parameters, shares, parts.settings.weights_on)
            self.gather_copies = GatheredWeights(copies, shares)
        self.path = FusedPath(dataclasses.replace(parts, held=host), exchange, own, at_most=-(-count // BUCKETS))
        if shares is None:
            on_device = {id(copy): p for copy, p in zip(copies, held.parameters)}
            launches = [(one, [on_device[id(p)] for p in one.weights]) for one in self.path.launches]
            self.path.launches = nn.CellList([Returning(one, moved) if moved else one for one, moved in launches])
        self.marks_of = Marks(parts.layout.shapes)
        marks = Parameter(Tensor(np.full(count, np.nan, np.float32)), name="host_marks", requires_grad=False)
        self.each = C.Map()
        self.send_weights, self.send_counters = Send(copies), Send(host.counters)
        self.fetch_weights, self.fetch_counters = Fetch(copies), Fetch(host.counters)
        # The marks are not in checkpoints.
        unregistered(self, marks=marks, weights=held.parameters, counters=ParameterTuple(held.counters))

    def construct(self, rates, gradients):
        """Take a step; return the marks of the weights, once the step is done."""
        marks = self.marks_of(self.weights)
        if (marks != self.marks).any():
            self.send_weights(self.weights)
        self.send_counters(self.counters)
        done = self.path(rates, gradients)
        if self.gather_copies is not None:
            done = F.depend(self.gather_copies(), done)
            self.each(receive, self.weights, self.fetch_weights(done))
        self.each(receive, self.counters, self.fetch_counters(done))
        marks = self.marks_of(F.depend(self.weights, done))
        return F.assign(self.marks, marks)


class Send(nn.Cell):
    """Writes tensors of the device to tensors of the host.

    Args:
        tensors: Parameters of the host.
    """

    def __init__(self, tensors: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        n = len(tensors)
        self.copy = kernels.operator("copy", "CPU", (False,) * n + (True,) * n, [((1,), mstype.int32)])
        unregistered(self, tensors=ParameterTuple(tensors))

    def construct(self, sent):
        """Write the tensors; return a value that later operators can depend on."""
        return self.copy(*sent, *self.tensors)


class Fetch(nn.Cell):
    """Copies tensors of the host to new tensors, which MindSpore may transfer to the device.

    A Parameter that both sides use would have memory on both, which MindSpore would have to keep equal.

    Args:
        tensors: Parameters of the host.
    """

    def __init__(self, tensors: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        outputs = [(p.shape or (1,), p.dtype) for p in tensors]
        # Copying only reads the tensors; it is declared as a write so that it does not run before they are written.
        self.copy = kernels.operator("copy", "CPU", (True,) * len(tensors), outputs)
        unregistered(self, tensors=ParameterTuple(tensors))

    def construct(self, done):
        """Return copies of the tensors once a step is done; a 0-dimensional tensor is returned with one element."""
        copied = self.copy(*F.depend(self.tensors, done))
        return copied if isinstance(copied, tuple) else (copied,)


class Returning(nn.Cell):
    """A launch on the host, after which the updated weights are copied to the device.

    Args:
        launch: The launch.
        weights: The weights on the device whose copies it updates.
    """

    def __init__(self, launch: LaunchCell, weights: Sequence[Parameter]):
        super().__init__(auto_prefix=False)
        self.launch, self.fetch, self.each = launch, Fetch(launch.weights), C.Map()
        unregistered(self, weights=ParameterTuple(weights))

    def construct(self, constants, rates, sums, gradients):
        """Run the launch, and return its sums."""
        made = self.launch(constants, rates, sums, gradients)
        self.each(receive, self.weights, self.fetch(made))
        return made


class Marks(nn.Cell):
    """Computes a number for each tensor that shows whether it has changed: a sum with a different weight per element.

    The sum is float32, so a change that is too small goes unnoticed, such as in the last bits of one among millions of
    elements.

    Args:
        shapes: The tensors' shapes.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__(auto_prefix=False)
        self.sizes = tuple((shape[0] if shape else 1, int(np.prod(shape[1:]))) for shape in shapes)
        draw = np.random.default_rng(0).uniform
        # Rows and columns have different weights; otherwise a square matrix and its transpose would have the same sum.
        of_rows, of_columns = (
            {extent: Tensor(draw(0.5, 1.5, extent).astype(np.float32)) for extent in sorted(set(extents))}
            for extents in zip(*self.sizes)
        )
        self.ramps = tuple((of_rows[rows].reshape((rows, 1)), of_columns[columns]) for rows, columns in self.sizes)

    def construct(self, tensors):
        """Return the numbers of all tensors."""
        found = ()
        for k in range(len(self.sizes)):
            rows, columns = self.ramps[k]
            found += ((F.cast(tensors[k], mstype.float32).reshape(self.sizes[k]) * columns * rows).sum(),)
        return ops.stack(found)


def on_host(parameter: Parameter) -> Parameter:
    """Return a Parameter on the host for the copy of a Parameter on the device."""
    zeros = initializer("zeros", parameter.shape, parameter.dtype)
    return Parameter(zeros, name=f"host.{parameter.name}", requires_grad=False)
