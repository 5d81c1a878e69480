"""The operators of ops/ascendc for each tensor, on an Ascend processor."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .. import _kernels
from .._abi import AdamWFlag
from .._arguments import WEIGHT_DTYPES

TILE, LANES = 2048, 8  # see ops/ascendc/op_kernel/tiling.h


class Operator(NamedTuple):
    """One launch for a tensor.

    Attributes:
        function: The operator's type.
        kinds: How many sums of squares it leaves.
        writes_states: Whether it advances the moments.
        writes_weight: Whether it moves the weight.
        takes_gradient: Whether it reads the gradient.
    """

    function: str
    kinds: int
    writes_states: bool = True
    writes_weight: bool = True
    takes_gradient: bool = True


# The launches of a step; a rule whose weights move by norms of whole tensors needs those of the first in the second.
LAUNCHES = {
    "adamw": (Operator("MsOptimAdamw", 2),),
    "adamw_amsgrad": (Operator("MsOptimAdamwAmsgrad", 2),),
    "lamb": (
        Operator("MsOptimLambMoments", 2, writes_weight=False),
        Operator("MsOptimLambApply", 1, writes_states=False, takes_gradient=False),
    ),
    "lans": (
        Operator("MsOptimLansMoments", 3, writes_weight=False),
        Operator("MsOptimLansApply", 1, writes_states=False),
    ),
}


def tile_sums(kinds: int, place: int):
    """Return what infers the shape of the sums that an operator leaves, of tensors of the shape of one input."""

    def shape(*shapes):
        return kinds, -(-math.prod(shapes[place]) // TILE) * LANES

    return shape


def total_of_tiles():
    """Make the operator that adds such sums up but for the last axis, in a fixed order."""
    return _kernels.ascend_operator("MsOptimSums", (False,), lambda partial: (partial[0], LANES))


class OperatorCell(nn.Cell):
    """An operator that leaves sums of squares by tiles, and the operator that adds them up."""

    def __init__(self, kernel, total):
        super().__init__(auto_prefix=False)
        self.kernel, self.total = kernel, total

    def construct(self, *tensors):
        """Run the operator and return the norm of each kind."""
        return ops.sqrt(ops.sum(self.total(self.kernel(*tensors)), -1))


def why_not(options, is_sliced: bool, is_sharded: bool) -> str | None:
    """Say what is asked for that the operators do not do, or return None.

    Args:
        options: The optimizer's shared arguments.
        is_sliced: Whether tensors are sliced.
        is_sharded: Whether states are sharded.
    """
    beyond = {
        "state_dtype": options.state_dtype != "float32",
        "stochastic_rounding": options.stochastic_rounding,
        "shard_states": is_sharded,
        "shard_group": is_sliced,
    }
    found = [argument for argument, asked in beyond.items() if asked]
    return f"the operators for Ascend do not know '{found[0]}'" if found else None


def sign(rule) -> float:
    """Return what the operators of a rule multiply gradients by, as they know of no direction."""
    return -1.0 if rule.name.startswith("adamw") and rule.flags & AdamWFlag.MAXIMIZE else 1.0


class AscendOperators(nn.Cell):
    """The operators of a rule.

    Args:
        layout: What is known of the parameters.
        held: What the optimizer holds.
        statement: The optimizer, which states its rule.
        rule: Its rule.
    """

    def __init__(self, layout, held, statement, rule):
        super().__init__(auto_prefix=False)
        # It holds this Cell.
        object.__setattr__(self, "statement", statement)
        self.is_layerwise = rule.is_layerwise
        self.constants, self.zero = Tensor(np.array(_constants(rule), np.float32)), Tensor(0.0, mstype.float32)
        absent = {dtype: Tensor(np.zeros(1, np.float32)).astype(dtype) for dtype in WEIGHT_DTYPES}
        launches, total = LAUNCHES[rule.name], total_of_tiles()
        # A weight is updated from itself in float32, from its master, or from itself in lower precision: of weight
        # and master, a tensor of one element stands for the one that there is not.
        kinds = list(zip(layout.dtypes, held.has_master()))
        known = list(dict.fromkeys(kinds))
        self.kind_of_each = tuple(known.index(kind) for kind in kinds)
        self.absent = tuple(absent[dtype] for dtype, _ in known)
        self.is_float32 = tuple(dtype == mstype.float32 for dtype, _ in known)

        def cells(launch):
            for dtype, has_master in known:
                written = _written(launch, dtype == mstype.float32, has_master, held.state_count)
                kernel = _kernels.ascend_operator(launch.function, written, tile_sums(launch.kinds, place=2))
                yield OperatorCell(kernel, total)

        self.first_cells = nn.CellList(list(cells(launches[0])))
        self.last_cells = nn.CellList(list(cells(launches[-1])))
        self.last_takes_gradient = launches[-1].takes_gradient

    def shared(self, scalars, applied):
        """Return what the operators take for all tensors."""
        one = ops.ones_like(self.zero)
        return one / scalars[0], one / scalars[1], F.cast(applied, mstype.float32)

    def columns(self, rate):
        """Return the place of each tensor's operators, and its learning rate."""
        return self.kind_of_each, rate

    def move(self, shared, kind, rate, gradient, scale, decay, parameter, master, has_master, *states):
        """Update a tensor; return the norms of the weight from before and of the update, and the trust ratio."""
        before = (shared[0], shared[1], scale, decay)
        if self.is_float32[kind]:
            tensors = (self.absent[kind], parameter, *states)
        elif has_master:
            tensors = (parameter, master, *states)
        else:
            tensors = (parameter, self.absent[kind], *states)
        norms = (self.zero, self.zero, self.zero)
        if self.is_layerwise:
            numbers = ops.stack((*before, self.zero, self.zero, shared[2]))
            norms = self.first_cells[kind](*tensors, gradient, self.constants, numbers)
        coefficients, ratio = self.statement.coefficients(rate, decay, norms[0], norms[1:])
        second = coefficients[1] if len(coefficients) > 1 else self.zero
        numbers = ops.stack((*before, coefficients[0], second, shared[2]))
        if self.last_takes_gradient:
            moved = self.last_cells[kind](*tensors, gradient, self.constants, numbers)
        else:
            moved = self.last_cells[kind](*tensors, self.constants, numbers)
        return (norms[0], moved[0], ratio) if self.is_layerwise else (moved[0], moved[1], ratio)


def _constants(rule):
    """Return what operators take that does not change: see enum Constant in ops/ascendc/op_kernel/adam.h."""
    beta1, beta2, eps = rule.constants[:3]
    bound = rule.constants[3] if rule.name == "lans" else math.inf
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, bound


def _written(launch, is_float32, has_master, states):
    """Return for each input of an operator whether it is written: weight, master, states, then what is only read."""
    moves = launch.writes_weight
    weights = (moves and not is_float32, moves and (is_float32 or has_master))
    return (*weights, *(launch.writes_states,) * states, *(False,) * (2 + launch.takes_gradient))
