"""The operators of ops/ascendc, which run for each tensor on an Ascend processor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.checks import WEIGHT_DTYPES
from ...kernels import table as kernels
from ...kernels.interface import AdamWFlag
from ...unregistered import unregistered

if TYPE_CHECKING:
    from ..parts import Parts

TILE, LANES = 2048, 8  # see ops/ascendc/op_kernel/tiling.h


def tile_sums(kinds: int, place: int):
    """Return the function that infers the shape of an operator's sums from the shape of one of its inputs."""

    def shape(*shapes):
        return kinds, -(-math.prod(shapes[place]) // TILE) * LANES

    return shape


def total_of_tiles():
    """Make the operator that sums such partial sums over all axes but the last, in a fixed order."""
    return kernels.ascend_operator("MsOptimSums", (False,), lambda partial: (partial[0], LANES))


class OperatorCell(nn.Cell):
    """An operator that outputs sums of squares by tile, and the operator that sums these."""

    def __init__(self, kernel, total):
        super().__init__(auto_prefix=False)
        self.kernel, self.total = kernel, total

    def construct(self, *tensors):
        """Run the operator and return the norm of each kind."""
        return ops.sqrt(ops.sum(self.total(self.kernel(*tensors)), -1))


def maximizes(rule) -> bool:
    """Return whether a rule maximizes."""
    return rule.name.startswith("adamw") and bool(rule.flags & AdamWFlag.MAXIMIZE)


class AscendOperators(nn.Cell):
    """The operators of a rule.

    Args:
        parts: The parts that every path is built from.
    """

    def __init__(self, parts: Parts):
        super().__init__(auto_prefix=False)
        layout, held, rule = parts.layout, parts.held, parts.rule
        unregistered(self, statement=parts.statement)
        self.is_layerwise = rule.is_layerwise
        self.constants = Tensor(np.array(_constants(rule, parts.statement), np.float32))
        self.zero = Tensor(0.0, mstype.float32)
        absent = {dtype: Tensor(np.zeros(1, np.float32)).astype(dtype) for dtype in WEIGHT_DTYPES}
        launches, total = kernels.ON_ASCEND[rule.name], total_of_tiles()
        # A weight is updated from itself in float32, from its master, or from itself in lower precision. A tensor of
        # one element is passed in place of a weight or master that is not used.
        kinds = list(zip(layout.dtypes, held.has_master()))
        known = list(dict.fromkeys(kinds))
        self.kind_of_each = tuple(known.index(kind) for kind in kinds)
        self.absent = tuple(absent[dtype] for dtype, _ in known)
        self.weight_kinds = tuple((dtype == mstype.float32, has_master) for dtype, has_master in known)

        def cells(launch):
            for is_float32, has_master in self.weight_kinds:
                written = _written(launch, is_float32, has_master, len(rule.states))
                kernel = kernels.ascend_operator(launch.function, written, tile_sums(launch.kinds, place=2))
                yield OperatorCell(kernel, total)

        self.first_cells = nn.CellList(list(cells(launches[0])))
        self.last_cells = nn.CellList(list(cells(launches[-1])))
        self.last_takes_gradient = launches[-1].takes_gradient

    def shared(self, scalars, applied):
        """Return the inputs that all tensors share: those from kApplied on in ops/ascendc/op_kernel/rule.h."""
        numbers = (F.cast(applied, mstype.float32),)
        for x in scalars:
            numbers += (self.zero + x,)
        return numbers

    def weights_of(self, kind, parameter, master, has_master):
        """Return a tensor's inputs `weight` and `master`, of which one may be absent."""
        if self.weight_kinds[kind][0]:
            return self.absent[kind], parameter
        return (parameter, master) if has_master else (parameter, self.absent[kind])

    def move(self, shared, kind, rate, gradient, scale, decay, parameter, master, has_master, *states):
        """Update a tensor; return the norms of the weight before the step and of the update, and the trust ratio."""
        tensors = (*self.weights_of(kind, parameter, master, has_master), *states)
        norms = (self.zero, self.zero, self.zero)
        if self.is_layerwise:
            numbers = ops.stack((scale, decay, self.zero, self.zero, *shared))
            norms = self.first_cells[kind](*tensors, gradient, self.constants, numbers)
        coefficients, ratio = self.statement.coefficients(rate, decay, norms[0], norms[1:])
        second = coefficients[1] if len(coefficients) > 1 else self.zero
        numbers = ops.stack((scale, decay, coefficients[0], second, *shared))
        if self.last_takes_gradient:
            moved = self.last_cells[kind](*tensors, gradient, self.constants, numbers)
        else:
            moved = self.last_cells[kind](*tensors, self.constants, numbers)
        return (norms[0], moved[0], ratio) if self.is_layerwise else (moved[0], moved[1], ratio)


def _constants(rule, statement):
    """Return the constant inputs of the operators: see enum Constant of the rule in ops/ascendc/op_kernel."""
    bound = rule.constants[3:4] if rule.name == "lans" else ()
    return *statement.akg_constants(), *bound


def written_weights(is_float32: bool, has_master: bool) -> tuple[bool, bool]:
    """Return whether an operator that updates a weight writes its inputs `weight` and `master`."""
    return not is_float32, is_float32 or has_master


def _written(launch, is_float32, has_master, states):
    """Return for each input of an operator whether it is written: weight, master, states, then read-only inputs."""
    weights = written_weights(is_float32, has_master) if launch.writes_weight else (False, False)
    return (*weights, *(launch.writes_states,) * states, *(False,) * (2 + launch.takes_gradient))
