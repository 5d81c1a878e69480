"""The step in MindSpore's own operators: for devices without a kernel, and for the tests to hold the kernels against.

It is a second statement of what the kernels do, made independently of them.
"""

# CompositeStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np
from mindspore import ParameterTuple, Tensor, no_inline, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

LARGEST_COUNT = 2**31 - 1
SMALLEST = 2.0**-126  # the least float32 number that is not denormal


def normal(x):
    """Return float32 numbers with 0 in place of those below 2^-126 in magnitude; a NaN stays.

    Some of MindSpore's threads take these for 0 and others do not: it is done here, so that bits do not depend on them.
    """
    return ops.where(ops.abs(x) < SMALLEST, ops.zeros_like(x), x)


def summed(first, *others):
    """Return a sum whose terms count as 0 below 2^-126, as the sum does."""
    total = normal(first)
    for x in others:
        total = normal(total + normal(x))
    return total


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
    """Return the L2 norm of a whole tensor.

    Numbers are taken relative to the largest: float32 does not hold the squares of very small and very large ones.
    """
    largest = ops.abs(x).max()
    unit = ops.where(ops.logical_and(largest > 0, ops.isfinite(largest)), largest, ops.ones_like(largest))
    return unit * ops.sqrt(ops.sum(ops.square(x / unit)))


def centralized(gradient):
    """Subtract from a gradient its mean over all but the first dimension."""
    axes = tuple(range(1, gradient.ndim))
    return summed(gradient, -ops.mean(gradient, axes, True))


def rounded(x, dtype):
    """Round float32 to a lower precision and back."""
    return F.cast(F.cast(x, dtype), mstype.float32)


dense = ops.MultitypeFuncGraph("dense")


@dense.register("Tensor")
def _dense_tensor(gradient):
    return gradient


@dense.register("RowTensor")
def _dense_rows(gradient):
    """Spread the sparse gradient of an embedding; rows that stand twice are added."""
    zeros = ops.zeros(gradient.dense_shape, gradient.values.dtype)
    return ops.tensor_scatter_add(zeros, gradient.indices.reshape((-1, 1)), gradient.values)


def write(parameter, value):
    """Assign, also where the CPU has no such operator for bfloat16."""
    value = F.cast(value, parameter.dtype)
    if parameter.dtype == mstype.bfloat16:
        return parameter.copy_(value)
    return F.assign(parameter, value)


def counted(count, more):
    """Return a count, an int32 tensor, and 0 or 1 more; at the largest number that it can hold it stays."""
    return count + more * F.cast(count < LARGEST_COUNT, mstype.int32)


def usable(gradient):
    """Tell whether all of a gradient is finite."""
    return ops.all(ops.isfinite(gradient))


def weight_of(parameter, master, has_master):
    """Return a weight in float32: its master, unless the weight was loaded or set since then."""
    weight = F.cast(parameter, mstype.float32)
    if not has_master:
        return normal(weight)
    return normal(ops.where(rounded(master, parameter.dtype) == weight, master, weight))


def write_weight(parameter, master, has_master, weight):
    """Write a new weight, and its master if it has one."""
    write(parameter, weight)
    if has_master:
        write(master, weight)


def _values(tensors):
    """Return tensors with the values of parameters, which a subgraph shall take.

    It is then compiled once for all of a shape. A subgraph that took the parameter itself would go on in its old memory
    after ``set_data``, which gives it other memory.
    """
    values = ()
    for tensor in tensors:
        values += (F.stop_gradient(tensor) if isinstance(tensor, Tensor) else tensor,)
    return values


def _first(found):
    return found[0]


def _second(found):
    return found[1]


def _third(found):
    return found[2]


class CompositeStep:
    """The composite form of ``FusedOptimizer._step``; a mixin that reads the optimizer's attributes.

    What is done for each tensor is a function that ``Map`` applies to all: a loop would be unrolled by recursion when a
    graph is compiled, which MindSpore limits to some hundred tensors.
    """

    def _prepare_columns(self):
        """Lay out what differs from tensor to tensor, for Map."""
        has_master = tuple(place >= 0 for place in self._master_index)
        masters = [self.masters[k] if k >= 0 else p for k, p in zip(self._master_index, self._parameters)]
        # Cell would list the masters twice.
        object.__setattr__(self, "_master_columns", (ParameterTuple(masters), has_master))
        places = [self._rate_index, [k if k >= 0 else self._rates.count for k in self._decay_index]]
        self._rate_places = Tensor(np.array(places, np.int32))
        self._is_mine = tuple(bool(mine) for mine in self.optim_filter)

    def _state_columns(self):
        """Return for each state of the rule those of all tensors."""
        columns = ()
        for k in range(self._state_count):
            columns += (self.states[k * self.param_length : (k + 1) * self.param_length],)
        return columns

    def _rates_of_each(self, rates):
        """Return each tensor's learning rate and weight decay, 0 where it has none."""
        known = ops.concat((rates, self._zero.reshape((1,))))
        table = ops.gather(known, self._rate_places, 0)
        return ops.unstack(table[0], 0), ops.unstack(table[1], 0)

    def _scalars_now(self):
        return self.scalars(F.cast(self.global_step, self._step_dtype).reshape(()) + 1.0)

    def _composite_step(self, rates, gradients):
        gradients, norms, finite, applied, clip = self._surveyed(gradients)
        scalars = self._scalars_now()
        rate, decay = self._rates_of_each(rates)
        held = (self.parameters, *self._master_columns)
        states = self._state_columns()
        if not self._sharded:
            update = F.partial(self._updated, scalars, clip, applied)
            rows = ops.unstack(self.statistics, 0)
            columns = (self._is_mine, rows, rate, decay, gradients, norms, finite)
            self._count(applied, ops.stack(self.map_(update, *columns, *held, *states)))
            return applied
        direct = F.partial(self._directed_by_values, scalars, clip)
        directed = self.each(direct, decay, gradients, norms, *held, *states)
        found = self._whole_norms(ops.stack(self.each(self._norms_of, directed)))
        move = F.partial(self._written, applied)
        moved = ops.stack(self.each(move, rate, decay, directed, ops.unstack(found, 0), *held, *states))
        update_norms = self._whole_norms(moved[:, :1])[:, 0]
        all_finite = F.cast(ops.stack(finite), mstype.float32)
        self._count(applied, ops.stack((ops.stack(norms), found[:, 0], update_norms, moved[:, 1], all_finite), 1))
        return applied

    def _updated(self, scalars, clip, applied, is_mine, row, rate, decay, gradient, size, finite, *held):
        """Update one tensor, unless another process does; return its row of statistics."""
        if not is_mine:
            return row
        made = self._made(scalars, clip, applied, rate, decay, gradient, size, finite, *_values(held))
        self._write(made, *held)
        return made[-1]

    @no_inline
    def _made(self, scalars, clip, applied, rate, decay, gradient, size, finite, *held):
        """Return a tensor's new weight, its new states and its row of statistics."""
        directed = self._directed(scalars, clip, decay, gradient, size, *held)
        norms = self._norms_of(directed)
        made = self._moved(applied, rate, decay, directed, norms, held[3:])
        row = ops.concat((ops.stack((size, norms[0])), made[-1], F.cast(finite, mstype.float32).reshape((1,))))
        return (*made[:-1], row)

    def _directed_by_values(self, scalars, clip, decay, gradient, size, *held):
        return self._directed_one(scalars, clip, decay, gradient, size, *_values(held))

    @no_inline
    def _directed_one(self, *taken):
        return self._directed(*taken)

    def _written(self, applied, rate, decay, directed, norms, *held):
        """Write a tensor's new weight and states; return the norm of its update, and its trust ratio."""
        made = self._moved_one(applied, rate, decay, directed, norms, _values(held[3:]))
        self._write(made, *held)
        return made[-1]

    @no_inline
    def _moved_one(self, *taken):
        return self._moved(*taken)

    def _write(self, made, parameter, master, has_master, *states):
        write_weight(parameter, master, has_master, made[0])
        for k in range(len(states)):
            write(states[k], made[1 + k])

    def _surveyed(self, gradients):
        """Return what is to be known of all gradients before anything moves.

        Returns:
            The gradients in float32, unscaled and centralized; the norm of each; whether each is finite; whether the
            step is applied; and the factor that clipping scales all by.
        """
        # A subgraph takes the memory of a strided tensor as it is: an operator before it, here one that is exact, reads
        # the strides.
        found = self.each(self._found, self.map_(ops.neg, gradients), self._centralized)
        gradients, norms, finite = self.each(_first, found), self.each(_second, found), self.each(_third, found)
        if self._sharded:
            norms, finite = self._whole_survey(norms, finite)
        return gradients, norms, finite, self._applies(ops.all(ops.stack(finite))), self._clip_factor(ops.stack(norms))

    def _applies(self, finite):
        """Return whether a step is applied, from whether all gradients are finite; never from a count below 0."""
        return ops.logical_and(ops.logical_or(finite, self._never_skips), self.global_step[0] >= 0)

    def _count(self, applied, statistics):
        """Count the step, or count it as skipped."""
        write(self.statistics, statistics)
        taken = F.cast(applied, mstype.int32).reshape((1,))
        F.assign(self.skipped_steps, counted(self.skipped_steps, 1 - taken))
        F.assign(self.global_step, counted(self.global_step, taken))
        for k in range(len(self.beta_powers)):
            t = F.cast(self.global_step, self._step_dtype)
            F.assign(self.beta_powers[k], normal(F.cast(ops.exp(t * self.log_betas[k]), mstype.float32)))

    @no_inline
    def _found(self, negated, is_centralized):
        """Return a gradient, of which this is the negative, as :meth:`_prepared` does, its norm and if it is finite."""
        gradient = self._prepared(ops.neg(negated), is_centralized)
        return gradient, norm(gradient), usable(gradient)

    def _prepared(self, gradient, is_centralized):
        """Return a gradient in float32, unscaled and centralized."""
        gradient = normal(normal(F.cast(gradient, mstype.float32)) * self._unscale)
        return centralized(gradient) if is_centralized else gradient

    def _clip_factor(self, norms):
        if self._clip_norm is None:
            return 1.0
        total = norm(norms)
        return ops.where(total > self._clip_norm, self._clip_norm / total, ops.ones_like(total))

    def _directed(self, scalars, clip, decay, gradient, gradient_norm, parameter, master, has_master, *states):
        """Return a tensor's weight, the directions it moves along, and its new states."""
        weight = weight_of(parameter, master, has_master)
        if self.normalizes_gradient:
            # Which undoes clipping.
            gradient = gradient / ops.where(gradient_norm == 0, ops.ones_like(gradient_norm), gradient_norm)
        else:
            gradient = gradient * clip
        gradient = self.entering(normal(gradient))
        directions, new_states = self._stated(scalars, weight, gradient, decay, states)
        return weight, directions, new_states

    def _stated(self, *taken):
        """Return the directions and new states that the rule states."""
        return self._akg_stated(*taken) if self.akg else self.directions(*taken)

    def _norms_of(self, directed):
        """Return the norms of the weight and of the directions that :meth:`_directed` found."""
        norms = (norm(directed[0]),)
        for d in directed[1]:
            norms += (norm(d),)
        return ops.stack(norms)

    def _moved(self, applied, rate, decay, directed, norms, states):
        """Return a tensor's new weight, its new states, and the norm of its update with its trust ratio."""
        weight, directions, new_states = directed
        norms = ops.unstack(norms, 0)
        coefficients, ratio = self.coefficients(rate, decay, norms[0], norms[1:])
        update, new_weight = self._along(coefficients, weight, directions)
        made = (ops.where(applied, new_weight, weight),)
        for k in range(len(states)):
            state = F.cast(states[k], mstype.float32)
            made += (ops.where(applied, normal(new_states[k]), state),)
        moved = ops.stack((norm(update), ratio))
        return (*made, ops.where(applied, moved, ops.zeros_like(moved)))

    def _along(self, coefficients, weight, directions):
        """Return the update along some directions, and the weight that it leads to."""
        if self.akg:
            update, new_weight = self._akg_along(coefficients, weight, directions)
            return update, normal(new_weight)
        terms = ()
        for k in range(len(directions)):
            terms += (coefficients[k] * directions[k],)
        update = summed(*terms)
        return update, normal(weight - update)
