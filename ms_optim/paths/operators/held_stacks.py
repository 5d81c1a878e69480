"""Parameters and their states in stacks, read and written by MindSpore's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import rounded, weights_of, write
from ...unregistered import unregistered
from .stacks import Stacks, stacked_places

if TYPE_CHECKING:
    from ...states.layout import Layout
    from ...states.storage import Held


class HeldStacks(Stacks):
    """Stacks of an optimizer's parameters.

    Args:
        layout: The properties of the parameters.
        held: What the optimizer holds.
        alone: Whether each parameter is a separate stack.
        kinds: Further properties that the parameters of a stack must share, each a tuple with an entry for each
            parameter.
    """

    def __init__(self, layout: Layout, held: Held, alone: bool, *kinds: Sequence):
        has_master, n = held.has_master(), layout.count
        own_kind = range(n) if alone else (0,) * n
        forms = layout.form_places or (-1,) * n
        known = (layout.shapes, layout.dtypes, has_master, layout.centralized, layout.owned, forms)
        common = zip(own_kind, *known, *kinds)
        # If processes exchange for each stack, all of them have the same stacks.
        super().__init__(stacked_places(list(common), layout.whole_sizes))
        first = [stack[0] for stack in self.places]
        self.owned = tuple(layout.owned[i] for i in first)
        self.forms = tuple(forms[i] for i in first)
        self.centralized = tuple(layout.centralized[i] for i in first)
        columns = [self.by_stack(held.parameters), self.by_stack(held.masters_or_weights())]
        columns.append(tuple(has_master[i] for i in first))
        columns += [self.by_stack(states) for states in held.states_of_each()]
        columns += [self.by_stack(held.averages)] if len(held.averages) > 0 else []
        # For Map: parameters, masters, whether there are masters, each state, and averages if they are kept.
        unregistered(self, columns=tuple(columns))
        # The function of the same name would be compiled again for each tensor.
        self.assign = ops.Assign()

    def weights(self, parameters, masters, has_master):
        """Return the weights of a stack in float32."""
        weights = self.held(parameters)
        known = self.held(masters) if has_master else weights
        return weights_of(F.dtype(parameters[0]), weights, known, has_master)

    def stored(self, parameters, has_master, weights):
        """Return float32 weights with the rounding that writing them causes."""
        dtype = F.dtype(parameters[0])
        return weights if has_master or dtype == mstype.float32 else rounded(weights, dtype)

    def write_stack(self, parameters, stack):
        """Write the tensors of a stack to parameters; a graph must depend on the result, or it may remove the write."""
        dtype = F.dtype(parameters[0])
        if dtype == mstype.bfloat16:
            return self.each(write, parameters, ops.unstack(stack, 0))
        return self.each(self.assign, parameters, ops.unstack(F.cast(stack, dtype), 0))

    def write_average(self, averages, parameters, has_master, applied, t, before, after, kept):
        """Write the new averages of a stack's weights; a graph must also depend on the result.

        Args:
            averages: The Cell that averages weights.
            parameters: The parameters of the stack.
            has_master: Whether they have masters.
            applied: Whether the step is applied.
            t: The step count, from 1.
            before: The weights before the step.
            after: The weights after the step.
            kept: The parameters that hold the averages.
        """
        old = self.held(kept)
        new = averages(t, before, old, self.stored(parameters, has_master, after))
        return self.write_stack(kept, ops.where(applied, new, old))

    def write_weights(self, parameters, masters, has_master, weights):
        """Write the weights of a stack, and their masters if any; a graph must also depend on the result."""
        written = self.write_stack(parameters, weights)
        return (written, self.write_stack(masters, weights)) if has_master else written
