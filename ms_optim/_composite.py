"""The step in MindSpore's own operators: for devices without a kernel, and for the tests to hold the kernels against.

It is a second statement of what the kernels do, made independently of them.
"""

# CompositeStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np
from mindspore import ParameterTuple, Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ._stacks import Stacks, alone, column, stacked_places

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


def norms(x, dtype):
    """Return the L2 norm of each tensor of a stack.

    Squares are added up in float64, which holds those of all float32 numbers. Where the device has float32 alone,
    numbers are taken relative to the largest.
    """
    flat = x.reshape((F.shape(x)[0], -1))
    if dtype == mstype.float64:
        return F.cast(ops.sqrt(ops.sum(ops.square(F.cast(flat, dtype)), 1)), mstype.float32)
    largest = ops.amax(ops.abs(flat), 1, True)
    unit = ops.where(ops.logical_and(largest > 0, ops.isfinite(largest)), largest, ops.ones_like(largest))
    squares = ops.square(flat / unit)
    # A sum over all elements is formed in parts, one over an axis may be formed one element after the other.
    total = ops.sum(squares).reshape((1,)) if F.shape(x)[0] == 1 else ops.sum(squares, 1)
    return unit[:, 0] * ops.sqrt(total)


def norm(x, dtype):
    """Return the L2 norm of a whole tensor."""
    return norms(x.reshape((1, -1)), dtype).reshape(())


def centralized(gradients):
    """Subtract from each gradient of a stack its mean over all but the first of its own dimensions."""
    axes = tuple(range(2, gradients.ndim))
    return summed(gradients, -ops.mean(gradients, axes, True))


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


def usable(gradients):
    """Tell of each gradient of a stack whether all of it is finite."""
    return ops.all(ops.isfinite(gradients.reshape((F.shape(gradients)[0], -1))), 1)


def weights_of(dtype, weights, masters, has_master):
    """Return weights of a dtype in float32: their masters, unless a weight was loaded or set since then.

    Args:
        dtype: What the weights are held in.
        weights: A stack of weights, in float32.
        masters: The stack of their masters.
        has_master: Whether they have masters.
    """
    if not has_master:
        return normal(weights)
    return normal(ops.where(rounded(masters, dtype) == weights, masters, weights))


def _first(found):
    return found[0]


def _second(found):
    return found[1]


def _third(found):
    return found[2]


def first_of(stack):
    """Return the first tensor of a stack, which is all where it has one alone."""
    return stack[0]


def cut(rows, like):
    """Return the first of some rows, as many as a stack has tensors."""
    return rows[: F.shape(like)[0]]


class CompositeStep:
    """The composite form of ``FusedOptimizer._step``; a mixin that reads the optimizer's attributes.

    What is done for each stack of tensors is a function that ``Map`` applies to all: a loop would be unrolled by
    recursion when a graph is compiled, which MindSpore limits to some hundred turns.
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
        # The function of the same name would be compiled once more for each tensor.
        self._assign = ops.Assign()

    def _state_columns(self):
        """Return for each state of the rule those of all tensors."""
        columns = ()
        for k in range(self._state_count):
            columns += (self.states[k * self.param_length : (k + 1) * self.param_length],)
        return columns

    def _rates_of_each(self, rates):
        """Return each tensor's learning rate and weight decay, 0 where it has none."""
        table = self._rate_table(rates)
        return ops.unstack(table[0], 0), ops.unstack(table[1], 0)

    def _rate_table(self, rates):
        """Return the learning rates of all tensors and their weight decays, 0 where there is none."""
        known = ops.concat((rates, self._zero.reshape((1,))))
        return ops.gather(known, self._rate_places, 0)

    def _scalars_now(self):
        return self.scalars(F.cast(self.global_step, self._step_dtype).reshape(()) + 1.0)

    def _prepare_stacks(self, alone, *kinds):
        """Lay out the stacks.

        Args:
            alone: Whether each tensor is a stack of its own.
            kinds: What else tensors of one stack have in common, a tuple with an entry for each tensor.
        """
        n, has_master = self.param_length, self._master_columns[1]
        common = zip(
            range(n) if alone else (0,) * n,
            self._shapes,
            (p.dtype for p in self._parameters),
            has_master,
            self._centralized,
            self._is_mine,
            *kinds,
        )
        self._stacks = stacks = Stacks(stacked_places(list(common), [p.size for p in self._parameters]))
        first = [stack[0] for stack in stacks.places]
        self._stack_is_mine = tuple(self._is_mine[i] for i in first)
        self._stack_centralized = tuple(self._centralized[i] for i in first)
        held = [stacks.split(self._parameters), stacks.split(self._master_columns[0])]
        held.append(tuple(has_master[i] for i in first))
        states = [self.states[k * n : (k + 1) * n] for k in range(self._state_count)]
        # Cell would list the parameters once more for each stack.
        object.__setattr__(self, "_stack_columns", (*held, *(stacks.split(tensors) for tensors in states)))

    def _composite_step(self, rates, gradients):
        stacks = self._stacks
        gradients, norms, finite, applied, clip = self._surveyed(stacks, gradients, self._stack_centralized)
        scalars = self._scalars_now()
        table = self._rate_table(rates)
        rate = self.each(cut, stacks.spread(table[0]), gradients)
        decay = self.each(cut, stacks.spread(table[1]), gradients)
        held = self._stack_columns
        if not self._sharded:
            # Of a partial function, Map takes the elements of nested tuples for 0 where several tuples are of one type.
            shared = ((scalars, clip, applied),) * len(gradients)
            rows = self.each(cut, stacks.spread(self.statistics), gradients)
            columns = (shared, self._stack_is_mine, rows, rate, decay, gradients, norms, finite)
            self._count(applied, stacks.in_order(self.each(self._updated, *columns, *held)))
            return applied
        shared = ((scalars, clip),) * len(gradients)
        directed = self.each(self._directed, shared, decay, gradients, norms, *held)
        found = self._whole_norms(stacks.in_order(self.each(self._norms_of, directed)))
        norms_of_each = self.each(cut, stacks.spread(found), gradients)
        shared = (applied,) * len(gradients)
        moved = stacks.in_order(self.each(self._written, shared, rate, decay, directed, norms_of_each, *held))
        update_norms = self._whole_norms(moved[:, :1])[:, 0]
        all_finite = F.cast(stacks.in_order(finite), mstype.float32)
        columns = (stacks.in_order(norms), found[:, 0], update_norms, moved[:, 1], all_finite)
        self._count(applied, ops.stack(columns, 1))
        return applied

    def _updated(self, shared, is_mine, rows, rate, decay, gradients, sizes, finite, *held):
        """Update the tensors of a stack, unless another process does; return their rows of statistics."""
        scalars, clip, applied = shared
        if not is_mine:
            return rows
        directed = self._directed((scalars, clip), decay, gradients, sizes, *held)
        norms = self._norms_of(directed)
        moved = self._written(applied, rate, decay, directed, norms, *held)
        before = ops.stack((sizes, norms[:, 0]), 1)
        return ops.concat((before, moved, F.cast(finite, mstype.float32).reshape((-1, 1))), 1)

    def _surveyed(self, stacks, gradients, is_centralized):
        """Return what is to be known of all gradients before anything moves.

        Args:
            stacks: The stacks that gradients are taken in.
            gradients: The gradients of all tensors.
            is_centralized: For each stack whether gradients are centralized.

        Returns:
            Of each stack the gradients in float32, unscaled and centralized; their norms; whether they are finite; then
            whether the step is applied; and the factor that clipping scales all by.
        """
        found = self.each(self._found, stacks(gradients), is_centralized)
        gradients, norms, finite = self.each(_first, found), self.each(_second, found), self.each(_third, found)
        if self._sharded:
            whole = self._whole_survey(stacks.in_order(norms), stacks.in_order(finite))
            norms = self.each(cut, stacks.spread(whole[:, 0]), gradients)
            finite = self.each(cut, stacks.spread(whole[:, 1] == 0.0), gradients)
        return (
            gradients,
            norms,
            finite,
            self._applies(ops.all(ops.concat(finite))),
            self._clip_factor(ops.concat(norms)),
        )

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

    def _found(self, gradients, is_centralized):
        """Return the gradients of a stack as :meth:`_prepared` does, their norms and whether they are finite."""
        gradients = self._prepared(gradients, is_centralized)
        return gradients, norms(gradients, self._step_dtype), usable(gradients)

    def _prepared(self, gradients, is_centralized):
        """Return the gradients of a stack unscaled and centralized."""
        gradients = normal(normal(gradients) * self._unscale)
        return centralized(gradients) if is_centralized else gradients

    def _clip_factor(self, norms):
        if self._clip_norm is None:
            return 1.0
        total = norm(norms, self._step_dtype)
        return ops.where(total > self._clip_norm, self._clip_norm / total, ops.ones_like(total))

    def _weights_of(self, parameters, masters, has_master):
        """Return the weights of a stack in float32."""
        weights = self._stacks.held(parameters)
        known = self._stacks.held(masters) if has_master else weights
        return weights_of(F.dtype(parameters[0]), weights, known, has_master)

    def _write_stack(self, parameters, stack):
        """Write the tensors of a stack to parameters; what is returned must be waited for, or a graph may drop this."""
        dtype = F.dtype(parameters[0])
        if dtype == mstype.bfloat16:
            return self.each(write, parameters, ops.unstack(stack, 0))
        return self.each(self._assign, parameters, ops.unstack(F.cast(stack, dtype), 0))

    def _write_weights(self, parameters, masters, has_master, weights):
        """Write the weights of a stack, and their masters if they have any; to be waited for, too."""
        written = self._write_stack(parameters, weights)
        return (written, self._write_stack(masters, weights)) if has_master else written

    def _directed(self, shared, decay, gradients, sizes, parameters, masters, has_master, *states):
        """Return the weights of a stack, the directions they move along, and their new and old states."""
        scalars, clip = shared
        weights = self._weights_of(parameters, masters, has_master)
        if self.normalizes_gradient:
            # Which undoes clipping.
            gradients = gradients / column(ops.where(sizes == 0, ops.ones_like(sizes), sizes), gradients)
        else:
            gradients = gradients * clip
        old_states = ()
        for k in range(len(states)):
            old_states += (self._stacks.held(states[k]),)
        directions, new_states = self._stated(scalars, weights, normal(gradients), decay, old_states)
        return weights, directions, new_states, old_states

    def _stated(self, scalars, weights, gradients, decay, states):
        """Return the directions and new states that the rule states for a stack."""
        if self.rule.is_elementwise and not self.akg:
            return self.directions(scalars, weights, self.entering(gradients), column(decay, gradients), states)
        # A stack of one, of which the rule sees the tensor.
        old_states = ()
        for k in range(len(states)):
            old_states += (states[k][0],)
        taken = (scalars, weights[0], self.entering(gradients[0]), decay[0], old_states)
        directions, new_states = self._akg_stated(*taken) if self.akg else self.directions(*taken)
        return self.each(alone, directions), self.each(alone, new_states)

    def _norms_of(self, directed):
        """Return the norms of the weights and of the directions that :meth:`_directed` found: a row for each tensor."""
        found = (norms(directed[0], self._step_dtype),)
        for d in directed[1]:
            found += (norms(d, self._step_dtype),)
        return ops.stack(found, 1)

    def _written(self, applied, rate, decay, directed, norms_of_each, parameters, masters, has_master, *states):
        """Write the new weights and states of a stack; return the norms of the updates, and the trust ratios."""
        weights, directions, new_states, old_states = directed
        found = ops.unstack(norms_of_each, 1)
        coefficients, ratio = self._coefficients_of(rate, decay, found[0], found[1:])
        update, new_weights = self._along(coefficients, weights, directions)
        written = (self._write_weights(parameters, masters, has_master, ops.where(applied, new_weights, weights)),)
        for k in range(len(states)):
            written += (self._write_stack(states[k], ops.where(applied, normal(new_states[k]), old_states[k])),)
        moved = ops.stack((norms(update, self._step_dtype), ratio), 1)
        return F.depend(ops.where(applied, moved, ops.zeros_like(moved)), written)

    def _coefficients_of(self, rate, decay, weight_norms, direction_norms):
        if self.rule.is_elementwise:
            return self.coefficients(rate, decay, weight_norms, direction_norms)
        direction_norms = self.each(_only, direction_norms)
        coefficients, ratio = self.coefficients(_only(rate), _only(decay), _only(weight_norms), direction_norms)
        return self.each(_as_row, coefficients), _as_row(ratio)

    def _along(self, coefficients, weights, directions):
        """Return the updates of a stack along some directions, and the weights that these lead to."""
        if self.akg:
            update, new_weight = self._akg_along(self.each(_only, coefficients), weights, directions)
            return update, normal(new_weight)
        terms = ()
        for k in range(len(directions)):
            terms += (column(coefficients[k], weights) * directions[k],)
        update = summed(*terms)
        return update, normal(weights - update)


def _only(numbers):
    """Return the number that stands for the one tensor of a stack."""
    return numbers.reshape(())


def _as_row(number):
    return number.reshape((1,))
