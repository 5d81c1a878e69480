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
from ._arguments import WEIGHT_DTYPES
from ._composite import norm, write

TILE, LANES = 2048, 8  # see ops/ascendc/op_kernel/tiling.h
MAXIMIZE, BIAS_CORRECTION = 2, 4  # AdamW's flags: see ops/include/adamw.h


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
            "it always corrects the bias": not rule.flags & BIAS_CORRECTION,
            "it takes learning rates and weight decays that are numbers": self.dynamic_lr or any(self._rate_is_cell),
            "it keeps no weights of lower precision than the states": len(self._low_without_masters()) > 0,
            "it cannot skip a step": options.skip_nonfinite,
        }
        found = [why for why, asked in beyond.items() if asked]
        return found[0] if found else None

    def _low_without_masters(self):
        return [p for p, m in zip(self._parameters, self._master_index) if p.dtype != mstype.float32 and m < 0]

    def _prepare_ascend(self, rule):
        """Make the operators, and what they always take."""
        self._sign = -1.0 if rule.name.startswith("adamw") and rule.flags & MAXIMIZE else 1.0
        if self._native:
            numbers = [float(rate.asnumpy()) for rate in self._rates]
            self._native_rates = tuple(numbers[k] for k in self._rate_index)
            self._native_decays = tuple(numbers[k] if k >= 0 else 0.0 for k in self._decay_index)
            self._native_constants = tuple(float(c) for c in rule.constants[:3])
            self._native_adamw = _kernels.platform_adamw()
            self._unknown = Tensor(math.nan, mstype.float32)
            return
        self._ascend_constants = Tensor(np.array(_constants(rule), np.float32))
        absent = {dtype: Tensor(np.zeros(1, np.float32)).astype(dtype) for dtype in WEIGHT_DTYPES}
        launches, total, made = LAUNCHES[rule.name], total_of_tiles(), {}

        def cells(launch):
            for i, p in enumerate(self._parameters):
                key = launch, p.dtype == mstype.float32, self._master_index[i] >= 0
                if key not in made:
                    written = _written(*key, self._state_count)
                    kernel = _kernels.ascend_operator(launch.function, written, tile_sums(launch.kinds, place=2))
                    made[key] = OperatorCell(kernel, total)
                yield made[key]

        # A weight is updated from itself in float32, from its master, or from itself in lower precision: of weight
        # and master, a tensor of one element stands for the one that there is not.
        self._absent_weights = tuple(absent[mstype.float32] for _ in self._parameters)
        self._absent_masters = tuple(absent[p.dtype] for p in self._parameters)
        self._first_cells = nn.CellList(list(cells(launches[0])))
        self._last_cells = nn.CellList(list(cells(launches[-1])))
        self._last_takes_gradient = launches[-1].takes_gradient

    def _ascend_step(self, rates, gradients):
        prepared, norms, finite, applied, clip = self._surveyed(gradients)
        scalars = self.scalars(F.cast(self.global_step, self._step_dtype).reshape(()) + 1.0)
        one = ops.ones_like(self._zero)
        shared = (one / scalars[0], one / scalars[1], F.cast(applied, mstype.float32))
        reports = ()
        for i in range(self.param_length):
            if self.optim_filter[i]:
                gradient, scale = self._scaled(i, gradients[i], prepared[i], norms[i], clip)
                if self._native:
                    weight_norm, update_norm, ratio = self._move_natively(i, gradient, scale)
                else:
                    weight_norm, update_norm, ratio = self._move_on_ascend(i, shared, rates, gradient, scale)
                moved = (ops.where(applied, update_norm, self._zero), ops.where(applied, ratio, self._zero))
                reports += (ops.stack((norms[i], weight_norm, *moved, F.cast(finite[i], mstype.float32))),)
            else:
                reports += (self.statistics[i],)
        self._count(applied, ops.stack(reports))
        return applied

    def _scaled(self, i, gradient, prepared, size, clip):
        """Return a gradient that an operator takes, and what it is to multiply it by."""
        scale = self._sign * clip * ops.ones_like(size)
        if self.normalizes_gradient:
            # Which undoes clipping.
            scale = 1.0 / ops.where(size == 0, ops.ones_like(size), size)
        if self._centralized[i]:
            return prepared, scale
        if F.dtype(gradient) not in (mstype.float32, self.parameters[i].dtype):
            gradient = F.cast(gradient, mstype.float32)
        return gradient, scale * self._unscale

    def _move_on_ascend(self, i, shared, rates, gradient, scale):
        """Update a tensor; return the norms of the weight from before and of the update, and the trust ratio."""
        learning_rate, weight_decay = rates[self._rate_index[i]], self._weight_decay(i, rates)
        before = (shared[0], shared[1], scale, weight_decay)
        tensors = self._touched(i)
        norms = (self._zero, self._zero, self._zero)
        if self._layerwise:
            numbers = ops.stack((*before, self._zero, self._zero, shared[2]))
            norms = self._first_cells[i](*tensors, gradient, self._ascend_constants, numbers)
        coefficients, ratio = self.coefficients(learning_rate, weight_decay, norms[0], norms[1:])
        second = coefficients[1] if len(coefficients) > 1 else self._zero
        numbers = ops.stack((*before, coefficients[0], second, shared[2]))
        if self._last_takes_gradient:
            moved = self._last_cells[i](*tensors, gradient, self._ascend_constants, numbers)
        else:
            moved = self._last_cells[i](*tensors, self._ascend_constants, numbers)
        return (norms[0], moved[0], ratio) if self._layerwise else (moved[0], moved[1], ratio)

    def _move_natively(self, i, gradient, scale):
        """Update a tensor by the platform's AdamW, which does not tell by how much."""
        weight = self._weight(i)
        parameter = self.masters[self._master_index[i]] if self._master_index[i] >= 0 else self.parameters[i]
        m, v = self.states[i], self.states[self.param_length + i]
        before = norm(weight)
        if self._master_index[i] >= 0:
            write(parameter, weight)
        step = F.depend(F.cast(self.global_step, mstype.float32), before)  # the operator adds 1
        beta1, beta2, eps = self._native_constants
        rate, decay = self._native_rates[i], self._native_decays[i]
        g = F.cast(gradient, mstype.float32) * scale
        moved = self._native_adamw(parameter, m, v, v, g, step, rate, beta1, beta2, decay, eps, False, False)
        if self._master_index[i] >= 0:
            write(self.parameters[i], F.depend(parameter, moved))
        return before, F.depend(self._unknown, moved), ops.ones_like(before)

    def _touched(self, i):
        """Return what an operator takes of a tensor besides its gradient: weight, master, states."""
        parameter = self.parameters[i]
        if parameter.dtype == mstype.float32:
            tensors = (self._absent_weights[i], parameter)
        elif self._master_index[i] >= 0:
            tensors = (parameter, self.masters[self._master_index[i]])
        else:
            tensors = (parameter, self._absent_masters[i])
        for k in range(self._state_count):
            tensors += (self.states[k * self.param_length + i],)
        return tensors


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
