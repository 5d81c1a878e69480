"""The step in MindSpore's own operators: for devices without a kernel, and for tests to check the kernels against.

It is a second implementation of what the kernels do, independent of them. ``Map`` applies a function to each stack of
tensors: a loop would be unrolled by recursion when a graph is compiled, which MindSpore limits to a few hundred
iterations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.weight_norms import is_held
from ...rules.arithmetic import moved_along, normal, norms, product_roots, quotient, selected
from ...states.formats import ROWS
from ...unregistered import unregistered
from .counting import Counting, RatesOfEach
from .gathered_weights import WeightsByAllReduce, norms_of_parts, told_ratios
from .held_stacks import HeldStacks
from .slices import WholeNorms
from .stacks import alone, column, own_rows, with_own_rows, without_others
from .survey import Survey
from .weight_norms import weight_norms_of

if TYPE_CHECKING:
    from ..parts import Parts
    from .akg import AkgKernels


class CompositePath(nn.Cell):
    """The step in MindSpore's operators.

    Args:
        parts: The parts that every path is built from.
        akg: AKG's kernels for the elementwise parts; None for MindSpore's operators.
        alone: Whether each tensor is a stack of its own.

    Attributes:
        gathered: Gathers the weights of sharded states; None without.
    """

    addresses = None

    def __init__(self, parts: Parts, akg: AkgKernels | None = None, alone: bool = False):
        super().__init__(auto_prefix=False)
        layout, held, settings, rule = parts.layout, parts.held, parts.settings, parts.rule
        unregistered(self, statement=parts.statement)
        self.normalizes, self.is_elementwise = parts.statement.normalizes_gradient, parts.rule.is_elementwise
        self.dtype, self.akg = settings.step_dtype, akg
        self.starts_at_weights = rule.starts_at_weights
        # Number of states of tensors of each form; the last entry is for tensors that hold no matrices.
        self.state_counts = (*(len(rule.states) for _ in layout.forms), len(rule.of_tensor(False).states))
        kinds = [kind for _, kind in rule.kinds]
        self.row_state = kinds.index(ROWS) if ROWS in kinds else -1
        self.weighs_steps, self.step_weights = rule.weighs_steps, ()
        self.stacks = HeldStacks(parts, alone or akg is not None or not self.is_elementwise, mixes=True)
        self.may_be_averaged = self.stacks.averages is not None or parts.statement.averages_iterates
        of_slices = None if parts.slices is None else WholeNorms(parts.slices, self.dtype)
        self.survey = Survey(self.stacks, self.stacks.centralized, parts, of_slices)
        # Norms of whole tensors, from those of the parts that processes update; each ratio is told by one process.
        self.whole: Any = norms_of_parts(parts, self.dtype)
        self.tells_ratio: Any = told_ratios(parts)
        self.gathered: Any = None
        if parts.shares is not None:
            self.gathered = WeightsByAllReduce(held.parameters, parts.shares, settings.weights_on)
        self.weight_norms: Any = weight_norms_of(parts.options, self.dtype)
        needs_norms = rule.is_layerwise or layout.exchanges_by_form or self.weight_norms is not None
        self.waits_for_norms = self.whole is not None and needs_norms
        self.norm_count = 1 + parts.statement.direction_count + (self.weight_norms is not None)
        # The norms of a layer-wise rule are those of the directions that follow from the states as they are stored.
        self.reads_again = rule.is_layerwise and self.stacks.conversions is not None
        self.reads_stored = rule.reads_stored_states
        self.counting = Counting(parts)
        self.rates_of_each = RatesOfEach(layout)
        self.each, self.takes_turns = C.Map(), layout.exchanges_by_form
        self.rows = (layout.rows.start, layout.rows.stop)
        unregistered(self, statistics=held.statistics)
        if rule.weighs_steps:
            unregistered(self, step_weights=held.step_weights[0])
        # The norms that are held; some kinds hold none, and leave these at 0.
        self.keeps_radii, self.no_radii = len(held.radii) > 0, Tensor(np.zeros(layout.count, np.float32))
        if self.keeps_radii:
            unregistered(self, held_radii=held.radii[0])

    def construct(self, rates, gradients):
        """Take a step; return whether it was applied."""
        if self.may_be_averaged:
            self.counting.check()
        found = self.survey(gradients)
        return self.counting(*self.update(rates, gradients, found, self.counting.applies(found[3]), found[4]))

    def update(self, rates, given, found, applied, clip):
        """Update all parameters, and do not count the step.

        Args:
            rates: The rates of the step.
            given: The gradients.
            found: What the survey returned for them.
            applied: Whether the step is applied.
            clip: The factor of clipping.

        Returns:
            Whether the step is applied, after all updates; and the rows of statistics.
        """
        stacks = self.stacks
        gradients, norms, finite = found[0], found[1], found[2]
        t = self.counting.number()
        scalars = self.statement.scalars(t)
        table = self.rates_of_each(rates)
        rate = stacks.spread(table[0], gradients)
        if self.weighs_steps:
            before = stacks.spread(own_rows(self.step_weights, self.rows), gradients)
            weighed = self.each(self.statement.weighed, (t,) * len(gradients), rate, before)
            rate, after = self.each(_first, weighed), stacks.in_order(self.each(_second, weighed))
            applied = F.depend(applied, self.weigh(applied, after))
        decay = stacks.spread(table[1], gradients)
        radii = stacks.spread(self.radii(), gradients)
        held = stacks.columns
        # With a partial function, Map replaces elements of nested tuples by 0 if several tuples have the same type.
        shared, weight_norms = ((scalars, clip, t, applied),) * len(gradients), ()
        if self.waits_for_norms:
            columns = (shared, stacks.owned, stacks.forms, decay, gradients, norms, *held)
            directed = self.in_turn(*columns) if self.takes_turns else self.each(self.directed, *columns)
            own_norms = stacks.in_order(self.each(self.norms_of, stacks.owned, directed, norms))
            found = self.whole(F.depend(own_norms, norms))
            of_each, weight_norms = stacks.spread(found, gradients), (found[:, 0],)
            columns = (shared, stacks.owned, rate, decay, radii, directed, of_each, gradients, norms, finite)
            moved = self.each(self.moved, *columns, *held)
        else:
            own = own_rows(self.statistics, self.rows)
            rows = stacks.spread(self.with_radii(own, self.radii()), gradients)
            columns = (shared, stacks.owned, stacks.forms, rows, rate, decay, radii, gradients, norms, finite)
            moved = self.each(self.updated, *columns, *held)
        rows = stacks.in_order(self.each(_first, moved))
        applied, rows = self.hold(applied, rows)
        if self.whole is not None:
            rows = self.of_whole(rows, weight_norms)
        if self.gathered is not None:
            applied = F.depend(
                applied, self.gathered.exchange(stacks.tensors_in_order(self.each(_second, moved)), rows)
            )
        return applied, rows

    def weigh(self, applied, after):
        """Write what a rule keeps that weighs steps."""
        before = F.depend(self.step_weights, applied)  # another rule may have written its rows
        return F.assign(self.step_weights, ops.where(applied, with_own_rows(before, after, self.rows), before))

    def radii(self):
        """Return the norms that are held, one for each parameter; 0 where none is."""
        return own_rows(self.held_radii, self.rows) if self.keeps_radii else self.no_radii

    def with_radii(self, rows, radii):
        """Return rows of statistics with the norms that are held as a last column, if there are any."""
        return ops.concat((rows, radii.expand_dims(1)), 1) if self.keeps_radii else rows

    def hold(self, applied, rows):
        """Write the norms that are held, if there are any; return `applied`, after the write, and the rows without."""
        if not self.keeps_radii:
            return applied, rows
        before = F.depend(self.held_radii, applied)  # another rule may have written its rows
        radii = with_own_rows(before, rows[:, -1], self.rows)
        written = F.assign(self.held_radii, ops.where(applied, radii, before))
        return F.depend(applied, written), rows[:, :-1]

    def of_whole(self, rows, weight_norms):
        """Return the rows of statistics of whole tensors from those of the parts that this process updated.

        Args:
            rows: The rows.
            weight_norms: The norms of whole weights, in a tuple; () if they are not known yet.
        """
        sums = (rows[:, 2],) if len(weight_norms) > 0 else (rows[:, 2], rows[:, 1])
        ratios = rows[:, 3]
        if self.tells_ratio is None:
            found = self.whole(ops.stack(sums, 1))
        else:
            found = self.whole(ops.stack((*sums, ratios * self.tells_ratio), 1))
            ratios = found[:, -1]
        norms = weight_norms[0] if len(weight_norms) > 0 else found[:, 1]
        return ops.stack((rows[:, 0], norms, found[:, 0], ratios, rows[:, 4]), 1)

    def updated(self, shared, is_owned, form, rows, rate, decay, radii, gradients, sizes, finite, *held):
        """Update the tensors of a stack, unless another process does.

        Returns:
            Their rows of statistics; and with sharded states, the weights that are still to be gathered.
        """
        if not is_owned and self.gathered is None:
            return rows, ()
        directed = self.directed(shared, is_owned, form, decay, gradients, sizes, *held)
        norms = self.norms_of(is_owned, directed, sizes)
        return self.moved(shared, is_owned, rate, decay, radii, directed, norms, gradients, sizes, finite, *held)

    def in_turn(self, shared, owned, forms, decay, gradients, norms, *held):
        """Return the result of :meth:`directed` for each stack, one after the other.

        Processes then exchange slices of matrices in the same order, and at most one stack is whole at a time.
        """
        found, before = (), norms
        for k in range(len(forms)):
            own = F.depend(gradients[k], before)
            columns = ()
            for column_of_each in held:
                columns += (column_of_each[k],)
            directed = self.directed(shared[k], owned[k], forms[k], decay[k], own, norms[k], *columns)
            found, before = (*found, directed), directed[1:]
        return found

    def directed(
        self, shared, is_owned, form, decay, gradients, sizes, parameters, masters, has_master, place, *states
    ) -> Any:
        """Return a stack's weights, directions, new and old states, and a factor of the trust ratio."""
        if not is_owned:
            return ()
        scalars, clip, t, _ = shared
        weights = self.stacks.weights(parameters, masters, has_master, place)
        gradients = self.stacks.own(gradients, place)
        if self.normalizes:
            # This cancels clipping.
            gradients = quotient(gradients, column(ops.where(sizes == 0, ops.ones_like(sizes), sizes), gradients))
        else:
            gradients = gradients * clip
        row_state = self.row_state if form >= 0 else -1
        old_states = self.stacks.states_of(self.state_counts[form], row_state, weights, states)
        known = self.started(t, weights, old_states)
        gradients = normal(gradients)
        if form >= 0:
            stored = ()
            if self.reads_stored:
                stored = self.stacks.encoded(
                    self.statement.matrix_states(gradients, known), self.stacks.noise_of(place), states
                )
                known = self.stacks.decoded(stored, weights, states)
            taken = (scalars, form, weights, gradients, column(decay, gradients), known)
            directions, new_states, ratio = self.statement.matrix_directions(*taken)
            return weights, directions, stored if self.reads_stored else new_states, old_states, ratio
        directions, new_states = self.stated(scalars, weights, gradients, decay, known)
        if self.reads_again:
            new_states = self.stacks.encoded(new_states, self.stacks.noise_of(place), states)
            read = self.stacks.decoded(new_states, weights, states)
            taken = (scalars, weights, self.statement.entering(gradients), column(decay, gradients), read)
            directions = self.statement.directions_of(*taken)
        return weights, without_others(directions, parameters), new_states, old_states, ops.ones_like(sizes)

    def started(self, t, weights, states):
        """Return the states of a stack before the step; the first state may start as the weights."""
        return (selected(t == 1, weights, states[0]), *states[1:]) if self.starts_at_weights else states

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

    def norms_of(self, is_owned, directed, sizes):
        """Return the norms of the weights and directions from :meth:`directed`: a row for each tensor."""
        if not is_owned:
            return ops.zeros((F.shape(sizes)[0], self.norm_count), mstype.float32)
        found = (norms(directed[0], self.dtype),)
        for d in directed[1]:
            found += (norms(d, self.dtype),)
        if self.weight_norms is not None:
            found += (product_roots(directed[0], directed[1][0], self.dtype),)
        return ops.stack(found, 1)

    def moved(self, shared, is_owned, rate, decay, radii, directed, norms_of_each, gradients, sizes, finite, *held):
        """Write the new weights and states of a stack; return what :meth:`updated` does."""
        parameters, masters, has_master, place, states = held[0], held[1], held[2], held[3], held[4:]
        if self.keeps_radii:
            radii = self.weight_norms.radii(radii, norms_of_each[:, 0])
        if not is_owned:
            none = ops.zeros_like(sizes)
            rows = ops.stack((sizes, none, none, none, F.cast(finite, mstype.float32)), 1)
            return self.with_radii(rows, radii), parameters
        _, _, t, applied = shared
        weights, directions, new_states, old_states, factor = directed
        found = ops.unstack(norms_of_each, 1)
        coefficients, ratio = self.coefficients_of(rate, decay, found[0], found[1 : 1 + len(directions)])
        if self.weight_norms is not None and is_held(F.shape(parameters[0])):
            along, along_weight, ratio = self.weight_norms(rate, coefficients[0], radii, norms_of_each)
            coefficients, directions = (along, along_weight), (*directions, weights)
        ratio = ratio * factor
        new_states = self.statement.followed(self.over(rate, weights), directions, new_states)
        update, new_weights = self.along(coefficients, weights, directions)
        new_weights = selected(applied, new_weights, weights)
        noise = self.stacks.noise_of(place)
        if not (self.reads_again or self.reads_stored):
            new_states = self.stacks.encoded(new_states, noise, states)
        written = self.stacks.write_states(applied, new_states, old_states, states)
        step = (applied, t, weights, new_weights)
        moved, sent = self.stacks.write_weights(step, parameters, masters, has_master, noise, states)
        none = ops.zeros_like(ratio)
        report = (ops.where(applied, norms(update, self.dtype), none), ops.where(applied, ratio, none))
        rows = ops.stack((sizes, found[0], *report, F.cast(finite, mstype.float32)), 1)
        return F.depend(self.with_radii(rows, radii), (written, moved)), sent

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
