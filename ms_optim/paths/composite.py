"""The step in MindSpore's own operators: for devices without a kernel, and for the tests to hold the kernels against.

It is a second statement of what the kernels do, made independently of them. What is done for each stack of tensors is
a function that ``Map`` applies to all: a loop would be unrolled by recursion when a graph is compiled, which MindSpore
limits to some hundred turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .._arithmetic import normal, norms, summed
from .counting import Counting, RatesOfEach
from .held_stacks import HeldStacks
from .stacks import alone, column, cut
from .survey import Survey

if TYPE_CHECKING:
    from .._held import Held
    from .._layout import Layout
    from .akg import AkgKernels
    from .slices import WholeNorms


class CompositePath(nn.Cell):
    """The step in MindSpore's operators.

    Args:
        layout: What is known of the parameters.
        held: What the optimizer holds.
        statement: The optimizer, which states its rule: ``scalars``, ``entering``, ``directions``, ``coefficients`` and
            ``normalizes_gradient``.
        is_elementwise: Whether the rule treats each element by itself.
        settings: What all paths are told: see :class:`ms_optim._layout.Settings`.
        whole: The norms of sliced tensors; None: no tensor is sliced.
        akg: AKG's kernels of the elementwise phases; None: MindSpore's operators.
    """

    addresses = None

    def __init__(
        self,
        layout: Layout,
        held: Held,
        statement: Any,
        is_elementwise: bool,
        settings: Any,
        whole: WholeNorms | None,
        akg: AkgKernels | None,
    ):
        super().__init__(auto_prefix=False)
        # It holds this Cell.
        object.__setattr__(self, "statement", statement)
        self.normalizes, self.is_elementwise = statement.normalizes_gradient, is_elementwise
        self.dtype, self.akg, self.whole = settings.step_dtype, akg, whole
        self.stacks = HeldStacks(layout, held, akg is not None or not is_elementwise)
        survey = (settings.unscale, settings.clip_norm, self.dtype, whole)
        self.survey = Survey(self.stacks, self.stacks.centralized, *survey)
        self.counting = Counting(held, self.dtype, settings.skips)
        self.rates_of_each = RatesOfEach(layout)
        self.each = C.Map()
        object.__setattr__(self, "statistics", held.statistics)

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        stacks = self.stacks
        gradients, norms, finite, all_finite, clip = self.survey(gradients)
        applied = self.counting.applies(all_finite)
        scalars = self.statement.scalars(self.counting.number())
        table = self.rates_of_each(rates)
        rate = self.each(cut, stacks.spread(table[0]), gradients)
        decay = self.each(cut, stacks.spread(table[1]), gradients)
        held = stacks.columns
        if self.whole is None:
            # Of a partial function, Map takes the elements of nested tuples for 0 where several tuples are of one type.
            shared = ((scalars, clip, applied),) * len(gradients)
            rows = self.each(cut, stacks.spread(self.statistics), gradients)
            columns = (shared, stacks.owned, rows, rate, decay, gradients, norms, finite)
            return self.counting(applied, stacks.in_order(self.each(self.updated, *columns, *held)))
        shared = ((scalars, clip),) * len(gradients)
        directed = self.each(self.directed, shared, decay, gradients, norms, *held)
        found = self.whole(stacks.in_order(self.each(self.norms_of, directed)))
        norms_of_each = self.each(cut, stacks.spread(found), gradients)
        shared = (applied,) * len(gradients)
        moved = stacks.in_order(self.each(self.moved, shared, rate, decay, directed, norms_of_each, *held))
        update_norms = self.whole(moved[:, :1])[:, 0]
        all_finite = F.cast(stacks.in_order(finite), mstype.float32)
        columns = (stacks.in_order(norms), found[:, 0], update_norms, moved[:, 1], all_finite)
        return self.counting(applied, ops.stack(columns, 1))

    def updated(self, shared, is_owned, rows, rate, decay, gradients, sizes, finite, *held):
        """Update the tensors of a stack, unless another process does; return their rows of statistics."""
        scalars, clip, applied = shared
        if not is_owned:
            return rows
        directed = self.directed((scalars, clip), decay, gradients, sizes, *held)
        norms = self.norms_of(directed)
        moved = self.moved(applied, rate, decay, directed, norms, *held)
        before = ops.stack((sizes, norms[:, 0]), 1)
        return ops.concat((before, moved, F.cast(finite, mstype.float32).reshape((-1, 1))), 1)

    def directed(self, shared, decay, gradients, sizes, parameters, masters, has_master, *states):
        """Return the weights of a stack, the directions they move along, and their new and old states."""
        scalars, clip = shared
        weights = self.stacks.weights(parameters, masters, has_master)
        if self.normalizes:
            # Which undoes clipping.
            gradients = gradients / column(ops.where(sizes == 0, ops.ones_like(sizes), sizes), gradients)
        else:
            gradients = gradients * clip
        old_states = ()
        for k in range(len(states)):
            old_states += (self.stacks.held(states[k]),)
        directions, new_states = self.stated(scalars, weights, normal(gradients), decay, old_states)
        return weights, directions, new_states, old_states

    def stated(self, scalars, weights, gradients, decay, states):
        """Return the directions and new states that the rule states for a stack."""
        rule = self.statement
        if self.is_elementwise and self.akg is None:
            return rule.directions(scalars, weights, rule.entering(gradients), column(decay, gradients), states)
        # A stack of one, of which the rule sees the tensor.
        old_states = ()
        for k in range(len(states)):
            old_states += (states[k][0],)
        taken = (scalars, weights[0], rule.entering(gradients[0]), decay[0], old_states)
        directions, new_states = rule.directions(*taken) if self.akg is None else self.akg.stated(*taken)
        return self.each(alone, directions), self.each(alone, new_states)

    def norms_of(self, directed):
        """Return the norms of the weights and of the directions that :meth:`directed` found: a row for each tensor."""
        found = (norms(directed[0], self.dtype),)
        for d in directed[1]:
            found += (norms(d, self.dtype),)
        return ops.stack(found, 1)

    def moved(self, applied, rate, decay, directed, norms_of_each, parameters, masters, has_master, *states):
        """Write the new weights and states of a stack; return the norms of the updates, and the trust ratios."""
        weights, directions, new_states, old_states = directed
        found = ops.unstack(norms_of_each, 1)
        coefficients, ratio = self.coefficients_of(rate, decay, found[0], found[1:])
        update, new_weights = self.along(coefficients, weights, directions)
        new_weights = ops.where(applied, new_weights, weights)
        written = (self.stacks.write_weights(parameters, masters, has_master, new_weights),)
        for k in range(len(states)):
            written += (self.stacks.write_stack(states[k], ops.where(applied, normal(new_states[k]), old_states[k])),)
        moved = ops.stack((norms(update, self.dtype), ratio), 1)
        return F.depend(ops.where(applied, moved, ops.zeros_like(moved)), written)

    def coefficients_of(self, rate, decay, weight_norms, direction_norms):
        """Return the coefficients of the directions of a stack, and its trust ratios."""
        rule = self.statement
        if self.is_elementwise:
            return rule.coefficients(rate, decay, weight_norms, direction_norms)
        direction_norms = self.each(_only, direction_norms)
        coefficients, ratio = rule.coefficients(_only(rate), _only(decay), _only(weight_norms), direction_norms)
        return self.each(_as_row, coefficients), _as_row(ratio)

    def along(self, coefficients, weights, directions):
        """Return the updates of a stack along some directions, and the weights that these lead to."""
        if self.akg is not None:
            update, new_weight = self.akg.along(self.each(_only, coefficients), weights, directions)
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
