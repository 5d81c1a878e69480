"""The step in MindSpore's own operators: for devices without a kernel, and for tests to check the kernels against.

It is a second implementation of what the kernels do, independent of them. ``Map`` applies a function to each stack of
tensors: a loop would be unrolled by recursion when a graph is compiled, which MindSpore limits to a few hundred
iterations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import moved_along, normal, norms
from ...unregistered import unregistered
from .counting import Counting, RatesOfEach
from .held_stacks import HeldStacks
from .slices import WholeNorms
from .stacks import alone, column
from .survey import Survey

if TYPE_CHECKING:
    from ..parts import Parts
    from .akg import AkgKernels


class CompositePath(nn.Cell):
    """The step in MindSpore's operators.

    Args:
        parts: The parts that every path is built from.
        akg: AKG's kernels for the elementwise parts; None for MindSpore's operators.
    """

    addresses = None

    def __init__(self, parts: Parts, akg: AkgKernels | None = None):
        super().__init__(auto_prefix=False)
        layout, held, settings = parts.layout, parts.held, parts.settings
        unregistered(self, statement=parts.statement)
        self.normalizes, self.is_elementwise = parts.statement.normalizes_gradient, parts.rule.is_elementwise
        self.dtype, self.akg = settings.step_dtype, akg
        rule = parts.rule
        self.starts_at_weights = rule.starts_at_weights
        # Number of states of tensors of each form; the last entry is for tensors that hold no matrices.
        self.state_counts = (*(len(rule.states) for _ in layout.forms), len(rule.of_tensor(False).states))
        self.weighs_steps, self.step_weights = rule.weighs_steps, ()
        self.whole = None if parts.slices is None else WholeNorms(parts.slices, self.dtype)
        self.stacks = HeldStacks(parts, akg is not None or not self.is_elementwise)
        self.may_be_averaged = self.stacks.averages is not None or parts.statement.averages_iterates
        self.survey = Survey(self.stacks, self.stacks.centralized, parts, self.whole)
        # The norms of a layer-wise rule are those of the directions that follow from the states as they are stored.
        self.reads_again = rule.is_layerwise and self.stacks.conversion is not None
        self.counting = Counting(parts)
        self.rates_of_each = RatesOfEach(layout)
        self.each, self.takes_turns = C.Map(), layout.exchanges_by_form
        unregistered(self, statistics=held.statistics)
        if rule.weighs_steps:
            unregistered(self, step_weights=held.step_weights[0])

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        stacks = self.stacks
        if self.may_be_averaged:
            self.counting.check()
        gradients, norms, finite, all_finite, clip = self.survey(gradients)
        applied = self.counting.applies(all_finite)
        t = self.counting.number()
        scalars = self.statement.scalars(t)
        table = self.rates_of_each(rates)
        rate = stacks.spread(table[0], gradients)
        if self.weighs_steps:
            before = stacks.spread(self.step_weights, gradients)
            weighed = self.each(self.statement.weighed, (t,) * len(gradients), rate, before)
            rate, after = self.each(_first, weighed), stacks.in_order(self.each(_second, weighed))
            applied = F.depend(applied, F.assign(self.step_weights, ops.where(applied, after, self.step_weights)))
        decay = stacks.spread(table[1], gradients)
        held = stacks.columns
        if self.whole is None:
            # With a partial function, Map replaces elements of nested tuples by 0 if several tuples have the same type.
            shared = ((scalars, clip, t, applied),) * len(gradients)
            rows = stacks.spread(self.statistics, gradients)
            columns = (shared, stacks.owned, stacks.forms, rows, rate, decay, gradients, norms, finite)
            return self.counting(applied, stacks.in_order(self.each(self.updated, *columns, *held)))
        shared = ((scalars, clip, t),) * len(gradients)
        columns = (shared, stacks.forms, decay, gradients, norms, *held)
        directed = self.in_turn(*columns) if self.takes_turns else self.each(self.directed, *columns)
        found = self.whole(stacks.in_order(self.each(self.norms_of, directed)))
        norms_of_each = stacks.spread(found, gradients)
        shared = ((applied, t),) * len(gradients)
        moved = stacks.in_order(self.each(self.moved, shared, rate, decay, directed, norms_of_each, *held))
        update_norms = self.whole(moved[:, :1])[:, 0]
        all_finite = F.cast(stacks.in_order(finite), mstype.float32)
        columns = (stacks.in_order(norms), found[:, 0], update_norms, moved[:, 1], all_finite)
        return self.counting(applied, ops.stack(columns, 1))

    def updated(self, shared, is_owned, form, rows, rate, decay, gradients, sizes, finite, *held):
        """Update the tensors of a stack, unless another process does; return their rows of statistics."""
        scalars, clip, t, applied = shared
        if not is_owned:
            return rows
        directed = self.directed((scalars, clip, t), form, decay, gradients, sizes, *held)
        norms = self.norms_of(directed)
        moved = self.moved((applied, t), rate, decay, directed, norms, *held)
        before = ops.stack((sizes, norms[:, 0]), 1)
        return ops.concat((before, moved, F.cast(finite, mstype.float32).reshape((-1, 1))), 1)

    def in_turn(self, shared, forms, decay, gradients, norms, *held):
        """Return the result of :meth:`directed` for each stack, one after the other.

        Processes then exchange slices of matrices in the same order, and at most one stack is whole at a time.
        """
        found, before = (), gradients
        for k in range(len(forms)):
            own = F.depend(gradients[k], before)
            columns = ()
            for column_of_each in held:
                columns += (column_of_each[k],)
            directed = self.directed(shared[k], forms[k], decay[k], own, norms[k], *columns)
            found, before = (*found, directed), directed[1]
        return found

    def directed(self, shared, form, decay, gradients, sizes, parameters, masters, has_master, rows, *states):
        """Return a stack's weights, directions, new and old states, and a factor of the trust ratio."""
        scalars, clip, t = shared
        weights = self.stacks.weights(parameters, masters, has_master)
        if self.normalizes:
            # This cancels clipping.
            gradients = gradients / column(ops.where(sizes == 0, ops.ones_like(sizes), sizes), gradients)
        else:
            gradients = gradients * clip
        old_states = self.stacks.states_of(self.state_counts[form], weights, states)
        known = self.started(t, weights, old_states)
        gradients = normal(gradients)
        if form >= 0:
            taken = (scalars, form, weights, gradients, column(decay, gradients), known)
            directions, new_states, ratio = self.statement.matrix_directions(*taken)
            return weights, directions, new_states, old_states, ratio
        directions, new_states = self.stated(scalars, weights, gradients, decay, known)
        if self.reads_again:
            new_states = self.stacks.encoded(new_states, self.stacks.noise_of(parameters, rows), states)
            read = self.stacks.decoded(new_states, weights, states)
            taken = (scalars, weights, self.statement.entering(gradients), column(decay, gradients), read)
            directions = self.statement.directions_of(*taken)
        return weights, directions, new_states, old_states, ops.ones_like(sizes)

    def started(self, t, weights, states):
        """Return the states of a stack before the step; the first state may start as the weights."""
        return (ops.where(t == 1, weights, states[0]), *states[1:]) if self.starts_at_weights else states

    def stated(self, scalars, weights, gradients, decay, states):
        """Return the directions and new states of the rule for a stack."""
        rule = self.statement
        if self.is_elementwise and self.akg is None:
            return rule.directions(scalars, weights, rule.entering(gradients), column(decay, gradients), states)
        # A stack of one tensor; the rule gets the tensor itself.
        old_states = ()
        for k in range(len(states)):
            old_states += (states[k][0],)
        taken = (scalars, weights[0], rule.entering(gradients[0]), decay[0], old_states)
        directions, new_states = rule.directions(*taken) if self.akg is None else self.akg.stated(*taken)
        return self.each(alone, directions), self.each(alone, new_states)

    def norms_of(self, directed):
        """Return the norms of the weights and directions from :meth:`directed`: a row for each tensor."""
        found = (norms(directed[0], self.dtype),)
        for d in directed[1]:
            found += (norms(d, self.dtype),)
        return ops.stack(found, 1)

    def moved(self, shared, rate, decay, directed, norms_of_each, parameters, masters, has_master, rows, *states):
        """Write the new weights and states of a stack; return the norms of the updates, and the trust ratios."""
        applied, t = shared
        weights, directions, new_states, old_states, factor = directed
        found = ops.unstack(norms_of_each, 1)
        coefficients, ratio = self.coefficients_of(rate, decay, found[0], found[1:])
        ratio = ratio * factor
        new_states = self.statement.followed(self.over(rate, weights), directions, new_states)
        update, new_weights = self.along(coefficients, weights, directions)
        new_weights = ops.where(applied, new_weights, weights)
        noise = self.stacks.noise_of(parameters, rows)
        if not self.reads_again:
            new_states = self.stacks.encoded(new_states, noise, states)
        written = self.stacks.write_states(applied, new_states, old_states, states)
        step = (applied, t, weights, new_weights)
        written += (self.stacks.write_weights(step, parameters, masters, has_master, noise, states),)
        moved = ops.stack((norms(update, self.dtype), ratio), 1)
        return F.depend(ops.where(applied, moved, ops.zeros_like(moved)), written)

    def over(self, rate, weights):
        """Return the learning rates of a stack, or the weighted rates, in a shape that broadcasts over the stack."""
        return self.each(column, rate, (weights,) * len(rate)) if self.weighs_steps else column(rate, weights)

    def coefficients_of(self, rate, decay, weight_norms, direction_norms):
        """Return the coefficients of the directions of a stack, and its trust ratios."""
        rule = self.statement
        if self.is_elementwise:
            return rule.coefficients(rate, decay, weight_norms, direction_norms)
        direction_norms = self.each(_only, direction_norms)
        coefficients, ratio = rule.coefficients(_only(rate), _only(decay), _only(weight_norms), direction_norms)
        return self.each(_as_row, coefficients), _as_row(ratio)

    def along(self, coefficients, weights, directions):
        """Return the updates of a stack along the directions, and the new weights."""
        if self.akg is not None:
            update, new_weight = self.akg.along(self.each(_only, coefficients), weights, directions)
            return update, normal(new_weight)
        terms = ()
        for k in range(len(directions)):
            terms += (column(coefficients[k], weights) * directions[k],)
        return moved_along(weights, terms)


def _first(pair):
    return pair[0]


def _second(pair):
    return pair[1]


def _only(numbers):
    """Return the number of the only tensor of a stack."""
    return numbers.reshape(())


def _as_row(number):
    return number.reshape((1,))
