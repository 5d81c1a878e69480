"""The compressed step in MindSpore's operators: a second implementation, independent of the kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..kernels.interface import LIMB_BITS, LIMBS, MARK_WORDS
from ..paths.operators.counting import Counting, RatesOfEach
from ..paths.operators.held_stacks import HeldStacks
from ..paths.operators.stacks import column, first_of
from ..paths.operators.survey import Prepare
from ..rules.arithmetic import clipping, normal, norms, quotient, selected, summed, usable
from ..unregistered import unregistered
from ..workers.local_mean import LocalMean, cut_up, like, ranges_of
from .schedule import Schedule, begins, place_of
from .wire import LARGEST_LIMB, STEP_LIMBS

if TYPE_CHECKING:
    from ..paths.parts import Parts

HALF = np.finfo(np.float16)


def largest(x: Tensor, count: Tensor, at_most: int) -> Tensor:
    """Return a mask of the largest elements of each row by magnitude, NaN first; among equal elements, the first ones.

    Args:
        x: A 2-dimensional float32 tensor.
        count: The number of elements to select in each row, a 0-dimensional int32 tensor.
        at_most: The largest value that count may have.
    """
    nan = ops.isnan(x)
    magnitude = ops.masked_fill(ops.abs(x), nan, math.inf)
    values, _ = ops.topk(magnitude, at_most)
    last = ops.gather(values, count - 1, 1).reshape((-1, 1))
    above = ops.logical_or(magnitude > last, nan)
    equal = ops.logical_and(magnitude == last, ops.logical_not(nan))
    first = ops.logical_and(above, ops.cumsum(F.cast(above, mstype.int32), 1) <= count)
    left = count - F.cast(first, mstype.int32).sum(1).reshape((-1, 1))
    second = ops.logical_and(equal, ops.cumsum(F.cast(equal, mstype.int32), 1) <= left)
    return ops.logical_or(first, second)


def _flat(value):
    return value.reshape(-1)


def _value_of(accumulated):
    return accumulated[1]


class CompressedCompositePath(nn.Cell):
    """The compressed step in MindSpore's operators.

    Args:
        parts: The parts that every path is built from; the optimizer implements ``decayed`` for gradients and ``moved``
            for the velocity.
        schedule: How many elements workers send in each step.
        dgc_worker: Parameter that states which worker the residuals belong to.
    """

    addresses = None

    def __init__(self, parts: Parts, schedule: Schedule, dgc_worker: Any):
        super().__init__(auto_prefix=False)
        layout, held, settings = parts.layout, parts.held, parts.settings
        unregistered(self, statement=parts.statement)
        at_most = tuple(int(k) for k in schedule.counts.max(axis=0))
        self.stacks = stacks = HeldStacks(parts, False, at_most)
        self.stack_at_most = tuple(at_most[stack[0]] for stack in stacks.places)
        self.ranges = ranges_of([sum(layout.sizes[i] for i in stack) for stack in stacks.places])
        self.dtype, self.clip_norm, self.each = settings.step_dtype, parts.options.grad_clip_norm, C.Map()
        self.prepare, self.rates_of_each = Prepare(settings.unscale), RatesOfEach(layout)
        self.counting = Counting(parts)
        workers = schedule.workers
        self.local_mean = LocalMean(workers, layout.sizes, held.parameters)
        self.has_periods, self.begins, self.sent = len(schedule.ends) > 0, begins(schedule), Tensor(schedule.counts)
        self.half_values = schedule.wire_dtype == "float16"
        self.worker_count, self.processes = workers.count, workers.count * workers.local
        self.share = 1.0 / math.sqrt(workers.count)
        self.all_reduce: Any = workers.all_reduce() if self.processes > 1 else None
        self.own_worker = Tensor(schedule.own_worker)
        self.limb_shifts = Tensor([LIMB_BITS * k for k in range(STEP_LIMBS)], mstype.int32)
        limbs = [schedule.settings >> LIMB_BITS * k & LARGEST_LIMB for k in range(LIMBS - STEP_LIMBS)]
        self.settings_limbs = Tensor(limbs, mstype.float32)
        self.no_mark = Tensor(np.full(MARK_WORDS, np.nan, np.float32))
        unregistered(self, global_step=held.global_step, dgc_worker=dgc_worker)

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        stacks = self.stacks
        if stacks.averages is not None:
            self.counting.check()
        gradients = self.each(self.prepare, stacks(self.local_mean(gradients)), stacks.centralized)
        finite = self.each(usable, gradients)
        applied = self.counting.applies(self.everywhere(ops.all(ops.concat(finite))))
        table = self.rates_of_each(rates)
        rate = stacks.spread(table[0], gradients)
        decay = stacks.spread(table[1], gradients)
        counts = ops.gather(self.sent, place_of(self.global_step, self.begins, self.has_periods), 0)
        counts = self.each(first_of, stacks.spread(counts, gradients))
        columns = (gradients, self.stack_at_most, counts, *stacks.columns)
        accumulated = self.each(self.accumulated, decay, *columns)
        means = self.mean(self.each(_value_of, accumulated))
        # Nothing is written before all received data is known to belong to this step.
        applied = F.depend(applied, means)
        shared = ((applied, self.counting.number()),) * len(gradients)
        reports = self.each(self.received, shared, finite, rate, accumulated, means, *columns)
        return self.counting(applied, stacks.in_order(reports))

    def accumulated(self, decay, gradients, at_most, count, weights, masters, has_master, place, *states):
        """Return a stack's weights, the sent values, their mask, and u and r before the sent values are removed."""
        weights = self.stacks.weights(weights, masters, has_master, place)
        u, r = self.stacks.held(states[0]), self.stacks.held(states[1])
        g = self.statement.decayed(gradients, weights, column(decay, weights))
        if at_most == 0:
            return weights, g, u, u, r
        clipped = g
        if self.clip_norm is not None:
            clip = clipping(norms(g, self.dtype), self.clip_norm * self.share)
            clipped = normal(g * column(clip, g))
        new_u, direction = self.statement.moved(clipped, u)
        new_r = summed(r, direction)
        rows = new_r.reshape((F.shape(new_r)[0], -1))
        mask = largest(rows, ops.maximum(count, ops.ones_like(count)), at_most).reshape(F.shape(new_r))
        sent = ops.masked_fill(self.travelled(new_r), ops.logical_not(mask), 0.0)
        value = selected(count > 0, sent, g)
        return weights, value, mask, new_u, new_r

    def received(
        self,
        shared,
        finite,
        rate,
        accumulated,
        mean,
        gradients,
        at_most,
        count,
        parameters,
        masters,
        has_master,
        place,
        *states,
    ):
        """Write the new weights and states of a stack; return their rows of statistics."""
        applied, t = shared
        weights, value, mask, velocity, residual = accumulated
        u, r = self.stacks.held(states[0]), self.stacks.held(states[1])
        new_u, direction = self.statement.moved(mean, u)
        written = ()
        if at_most > 0:
            compressed = count > 0
            kept = ops.where(mask, self.behind(residual, value), residual)
            new_u = selected(compressed, ops.masked_fill(velocity, mask, 0.0), new_u)
            direction = selected(compressed, mean, direction)
            written += (self.stacks.write_stack(states[1], selected(applied, selected(compressed, kept, r), r)),)
        written += (self.stacks.write_stack(states[0], selected(applied, new_u, u)),)
        update = normal(column(rate, direction) * direction)
        found = (norms(gradients, self.dtype), norms(weights, self.dtype))
        new_weights = selected(applied, normal(weights - update), weights)
        step, noise = (applied, t, weights, new_weights), self.stacks.noise_of(place)
        moved, _ = self.stacks.write_weights(step, parameters, masters, has_master, noise, states)
        written += (moved,)
        size = norms(update, self.dtype)
        moved = (ops.where(applied, size, ops.zeros_like(size)), F.cast(applied, mstype.float32) * ops.ones_like(size))
        return F.depend(ops.stack((*found, *moved, F.cast(finite, mstype.float32)), 1), written)

    def travelled(self, value):
        """Return a value as the receiver gets it."""
        if not self.half_values:
            return value
        finite = ops.isfinite(value)
        clamped = ops.where(finite, ops.clamp(value, float(HALF.min), float(HALF.max)), value)
        return F.cast(F.cast(clamped, mstype.float16), mstype.float32)

    def behind(self, value, travelled):
        """Return the rounding error of a sent value, which stays in the residual."""
        left = normal(value - travelled)
        return ops.masked_fill(left, ops.isnan(left), 0.0)

    def mean(self, values):
        """Return the means over all workers of the sent values."""
        if self.worker_count == 1:
            return values
        mark = self.mark()
        flat = ops.concat(self.each(_flat, values))
        total = self.checked_total(self.all_reduce(ops.concat((flat, mark))), mark)
        means = cut_up(normal(quotient(total, 1.0 * self.processes)), self.ranges)
        return self.each(like, means, values)

    def mark(self):
        """Return the mark of this step, or NaN if the residuals are another worker's, so that all processes stop."""
        # Division is not used, because it is a floating-point operation on CPU.
        parts = ops.bitwise_and(ops.bitwise_right_shift(self.global_step, self.limb_shifts), LARGEST_LIMB)
        limbs = ops.concat((F.cast(parts, mstype.float32), self.settings_limbs))
        own = (self.dgc_worker == self.own_worker).all()
        return ops.where(own, ops.concat((limbs, limbs * limbs)), self.no_mark)

    def checked_total(self, total, mark):
        """Return the sum of all sent values, if all marks equal this process's mark."""
        if ops.logical_not((total[-MARK_WORDS:] == mark * self.processes).all()):
            raise RuntimeError(
                "DGCMomentum received data of another step or of other settings, or a worker holds another "
                "worker's residuals: nothing was changed."
            )
        return total

    def everywhere(self, finite):
        """Return whether the gradients of all workers are finite."""
        if self.worker_count == 1:
            return finite
        return self.all_reduce(1.0 - F.cast(finite, mstype.float32).reshape((1,))).sum() == 0
