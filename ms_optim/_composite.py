"""The step in MindSpore's own operators: for devices without a kernel, and for the tests to hold the kernels against.

It is a second statement of what the kernels do, made independently of them.
"""

# CompositeStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it


def power_complement(log_beta: float, t):
    """Return 1 - beta^t in float32, from log(beta) and the step count.

    At small t, 1 - beta^t is a difference of nearly equal numbers: it is formed in float64. MindSpore's ``expm1`` would
    spare that, but on CPU it is exp(x) - 1 to the letter (``tanh`` and ``pow`` there are no better); it serves where
    there is no float64.
    """
    if t.dtype == mstype.float64:
        return F.cast(1.0 - ops.exp(t * log_beta), mstype.float32)
    return -ops.expm1(t * log_beta)


def trust_ratio(numerator, norm):
    """Return numerator / norm, 1 where either is 0 or the quotient is not a number."""
    usable = ops.logical_and(numerator > 0, norm > 0)
    ratio = numerator / ops.where(usable, norm, ops.ones_like(norm))
    return ops.where(ops.logical_and(usable, ratio > 0), ratio, ops.ones_like(ratio))


def bounded(x, bounds):
    """Limit x to a pair (low, high) of numbers, high possibly infinite."""
    return ops.minimum(ops.maximum(x, bounds[0]), bounds[1])


def norm(x):
    """Return the L2 norm of a whole tensor."""
    return ops.sqrt(ops.sum(ops.square(x)))


def centralized(gradient):
    """Subtract from a gradient its mean over all but the first dimension."""
    axes = tuple(range(1, gradient.ndim))
    return gradient - ops.mean(gradient, axes, True)


def rounded(x, dtype):
    """Round float32 to a lower precision and back."""
    return F.cast(F.cast(x, dtype), mstype.float32)


def write(parameter, value):
    """Assign, also where the CPU has no such operator for bfloat16."""
    value = F.cast(value, parameter.dtype)
    if parameter.dtype == mstype.bfloat16:
        return parameter.copy_(value)
    return F.assign(parameter, value)


class CompositeStep:
    """The composite form of ``FusedOptimizer._step``; a mixin that reads the optimizer's attributes."""

    def _composite_step(self, rates, gradients):
        gradients = self._prepared(gradients)
        norms = ()
        finite = ()
        for g in gradients:
            norms += (norm(g),)
            finite += (ops.all(ops.isfinite(g)),)
        all_finite = ops.all(ops.stack(finite))
        applied = ops.logical_or(all_finite, self._never_skips)
        clip = self._clip_factor(ops.stack(norms))

        scalars = self.scalars(F.cast(self.global_step, self._step_dtype).reshape(()) + 1.0)
        reports = ()
        for i in range(self.param_length):
            reports += (self._composite_update(i, scalars, rates, gradients[i] * clip, norms[i], finite[i], applied),)
        write(self.statistics, ops.stack(reports))
        counted = F.cast(applied, mstype.int32).reshape((1,))
        F.assign(self.skipped_steps, self.skipped_steps + 1 - counted)
        F.assign(self.global_step, self.global_step + counted)
        return applied

    def _prepared(self, gradients):
        """Return the gradients in float32, unscaled and centralized."""
        prepared = ()
        for i in range(self.param_length):
            g = F.cast(gradients[i], mstype.float32) * self._unscale
            if self._centralized[i]:
                g = centralized(g)
            prepared += (g,)
        return prepared

    def _clip_factor(self, norms):
        if self._clip_norm is None:
            return 1.0
        total = norm(norms)
        return ops.where(total > self._clip_norm, self._clip_norm / total, ops.ones_like(total))

    def _composite_update(self, i, scalars, rates, gradient, gradient_norm, finite, applied):
        parameter = self.parameters[i]
        weight = F.cast(parameter, mstype.float32)
        master = self._master_index[i]
        if master >= 0:
            kept = self.masters[master]
            weight = ops.where(rounded(kept, parameter.dtype) == weight, kept, weight)
        learning_rate = rates[self._rate_index[i]]
        weight_decay = rates[self._decay_index[i]] if self._decay_index[i] >= 0 else self._zero
        if self.normalizes_gradient:
            gradient = gradient / ops.where(gradient_norm > 0, gradient_norm, ops.ones_like(gradient_norm))
        states = ()
        for k in range(self._state_count):
            states += (self.states[k * self.param_length + i],)

        directions, new_states = self.directions(scalars, weight, gradient, weight_decay, states)
        weight_norm = norm(weight)
        direction_norms = ()
        for d in directions:
            direction_norms += (norm(d),)
        coefficients, ratio = self.coefficients(learning_rate, weight_decay, weight_norm, direction_norms)
        update = coefficients[0] * directions[0]
        for k in range(1, len(directions)):
            update = update + coefficients[k] * directions[k]

        new_weight = ops.where(applied, weight - update, weight)
        write(parameter, new_weight)
        if master >= 0:
            write(self.masters[master], new_weight)
        for k in range(self._state_count):
            write(states[k], ops.where(applied, new_states[k], states[k]))
        update_norm = ops.where(applied, norm(update), self._zero)
        ratio = ops.where(applied, ratio, self._zero)
        return ops.stack((gradient_norm, weight_norm, update_norm, ratio, F.cast(finite, mstype.float32)))
