"""The step on an Ascend processor: operators of ops/ascendc for each tensor, and MindSpore's for what joins tensors."""

# AscendStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from . import _kernels
from ._abi import AdamWFlag
from ._arguments import WEIGHT_DTYPES
from ._composite import first_of, norm, weights_of, write
from ._stacks import Stacks

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


class AscendStep:
    """The step in a few operators a tensor; a mixin that reads the optimizer's attributes."""

    def _why_not_on_ascend(self, options) -> str | None:
        """Say what is asked for that the operators do not do."""
        beyond = {
            "state_dtype": options.state_dtype != "float32",
            "stochastic_rounding": options.stochastic_rounding,
            "shard_states": self._splits,
            "shard_group": self._sharded,
        }
        found = [argument for argument, asked in beyond.items() if asked]
        return f"the operators for Ascend do not know '{found[0]}'" if found else None

    def _why_not_native(self, rule, options, device) -> str | None:
        """Say why the platform's own AdamW cannot do what is asked for."""
        beyond = {
            "there is one for AdamW on Ascend alone": device != "Ascend" or rule.name != "adamw",
            "it always corrects the bias": not rule.flags & AdamWFlag.BIAS_CORRECTION,
            "it takes learning rates and weight decays that are numbers": self.dynamic_lr
            or len(self._rates.schedules) > 0,
            "it keeps no weights of lower precision than the states": len(self._low_without_masters()) > 0,
            "it cannot skip a step": options.skip_nonfinite,
        }
        found = [why for why, asked in beyond.items() if asked]
        return found[0] if found else None

    def _low_without_masters(self):
        return [p for p, m in zip(self._parameters, self._master_index) if p.dtype != mstype.float32 and m < 0]

    def _prepare_ascend(self, rule):
        """Make the operators, and what they always take."""
        self._each_alone = Stacks([[i] for i in range(self.param_length)])
        self._sign = -1.0 if rule.name.startswith("adamw") and rule.flags & AdamWFlag.MAXIMIZE else 1.0
        if self._native:
            numbers = [float(rate.asnumpy()) for rate in self._rates.fixed]
            self._native_rates = tuple(numbers[k] for k in self._rate_index)
            self._native_decays = tuple(numbers[k] if k >= 0 else 0.0 for k in self._decay_index)
            self._native_constants = tuple(float(c) for c in rule.constants[:3])
            self._native_adamw = _kernels.platform_adamw()
            self._unknown = Tensor(math.nan, mstype.float32)
            return
        self._ascend_constants = Tensor(np.array(_constants(rule), np.float32))
        absent = {dtype: Tensor(np.zeros(1, np.float32)).astype(dtype) for dtype in WEIGHT_DTYPES}
        launches, total = LAUNCHES[rule.name], total_of_tiles()
        # A weight is updated from itself in float32, from its master, or from itself in lower precision: of weight
        # and master, a tensor of one element stands for the one that there is not.
        kinds = [(p.dtype, place >= 0) for p, place in zip(self._parameters, self._master_index)]
        known = list(dict.fromkeys(kinds))
        self._kind_of_each = tuple(known.index(kind) for kind in kinds)
        self._absent = tuple(absent[dtype] for dtype, _ in known)
        self._is_float32 = tuple(dtype == mstype.float32 for dtype, _ in known)

        def cells(launch):
            for dtype, has_master in known:
                written = _written(launch, dtype == mstype.float32, has_master, self._state_count)
                kernel = _kernels.ascend_operator(launch.function, written, tile_sums(launch.kinds, place=2))
                yield OperatorCell(kernel, total)

        self._first_cells = nn.CellList(list(cells(launches[0])))
        self._last_cells = nn.CellList(list(cells(launches[-1])))
        self._last_takes_gradient = launches[-1].takes_gradient

    def _ascend_step(self, rates, gradients):
        stacks, norms, finite, applied, clip = self._surveyed(self._each_alone, gradients, self._centralized)
        prepared = self.each(first_of, stacks)
        scalars = self._scalars_now()
        one = ops.ones_like(self._zero)
        shared = (one / scalars[0], one / scalars[1], F.cast(applied, mstype.float32))
        rate, decay = self._rates_of_each(rates)
        if self._native:
            update, chosen = self._move_natively, (self._native_rates, self._native_decays)
        else:
            update, chosen = F.partial(self._move_on_ascend, shared), (self._kind_of_each, rate)
        reports = self.each(
            F.partial(self._updated_on_ascend, update, clip, applied),
            self._is_mine,
            ops.unstack(self.statistics, 0),
            *chosen,
            gradients,
            prepared,
            self._centralized,
            self.each(first_of, norms),
            self.each(first_of, finite),
            decay,
            self.parameters,
            *self._master_columns,
            *self._state_columns(),
        )
        self._count(applied, ops.stack(reports))
        return applied

    def _updated_on_ascend(
        self,
        update,
        clip,
        applied,
        is_mine,
        reported,
        chosen,
        rate,
        gradient,
        prepared,
        is_centralized,
        size,
        finite,
        *own,
    ):
        """Update one tensor, unless another process does; return its row of statistics."""
        if not is_mine:
            return reported
        gradient, scale = self._scaled(own[1], gradient, prepared, is_centralized, size, clip)
        weight_norm, update_norm, ratio = update(chosen, rate, gradient, scale, *own)
        moved = (ops.where(applied, update_norm, self._zero), ops.where(applied, ratio, self._zero))
        return ops.stack((size, weight_norm, *moved, F.cast(finite, mstype.float32)))

    def _scaled(self, parameter, gradient, prepared, is_centralized, size, clip):
        """Return a gradient that an operator takes, and what it is to multiply it by."""
        scale = self._sign * clip * ops.ones_like(size)
        if self.normalizes_gradient:
            # Which undoes clipping.
            scale = 1.0 / ops.where(size == 0, ops.ones_like(size), size)
        if is_centralized:
            return prepared, scale
        if F.dtype(gradient) not in (mstype.float32, parameter.dtype):
            gradient = F.cast(gradient, mstype.float32)
        return gradient, scale * self._unscale

    def _move_on_ascend(self, shared, kind, rate, gradient, scale, decay, parameter, master, has_master, *states):
        """Update a tensor; return the norms of the weight from before and of the update, and the trust ratio."""
        before = (shared[0], shared[1], scale, decay)
        if self._is_float32[kind]:
            tensors = (self._absent[kind], parameter, *states)
        elif has_master:
            tensors = (parameter, master, *states)
        else:
            tensors = (parameter, self._absent[kind], *states)
        norms = (self._zero, self._zero, self._zero)
        if self._layerwise:
            numbers = ops.stack((*before, self._zero, self._zero, shared[2]))
            norms = self._first_cells[kind](*tensors, gradient, self._ascend_constants, numbers)
        coefficients, ratio = self.coefficients(rate, decay, norms[0], norms[1:])
        second = coefficients[1] if len(coefficients) > 1 else self._zero
        numbers = ops.stack((*before, coefficients[0], second, shared[2]))
        if self._last_takes_gradient:
            moved = self._last_cells[kind](*tensors, gradient, self._ascend_constants, numbers)
        else:
            moved = self._last_cells[kind](*tensors, self._ascend_constants, numbers)
        return (norms[0], moved[0], ratio) if self._layerwise else (moved[0], moved[1], ratio)

    def _move_natively(self, rate, decay, gradient, scale, _, parameter, master, has_master, *states):
        """Update a tensor by the platform's AdamW, which does not tell by how much."""
        weight = F.cast(parameter, mstype.float32)
        weight = weights_of(F.dtype(parameter), weight, master, has_master)
        held = master if has_master else parameter
        before = norm(weight, self._step_dtype)
        if has_master:
            write(held, weight)
        step = F.depend(F.cast(self.global_step, mstype.float32), before)  # the operator adds 1
        beta1, beta2, eps = self._native_constants
        m, v = states
        g = F.cast(gradient, mstype.float32) * scale
        moved = self._native_adamw(held, m, v, v, g, step, rate, beta1, beta2, decay, eps, False, False)
        if has_master:
            write(parameter, F.depend(held, moved))
        return before, F.depend(self._unknown, moved), ops.ones_like(before)


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
