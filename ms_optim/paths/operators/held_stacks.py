"""Parameters and their states in stacks, read and written by MindSpore's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.checks import SPLIT_MASTERS
from ...kernels.interface import CODE_BLOCK
from ...rules.arithmetic import normal, rounded, weights_of, write
from ...states import bits
from ...states.formats import FORMATS
from ...states.split_masters import restored_bits, split_bits
from ...unregistered import unregistered
from .averages import averages_of
from .stacks import Stacks, stacked_places

if TYPE_CHECKING:
    from ..parts import Parts
FIRST_STATE = 4  # the first column with a state


class HeldStacks(Stacks):
    """Stacks of an optimizer's parameters.

    Args:
        parts: The parts that every path is built from.
        alone: Whether each parameter is a separate stack.
        kinds: Further properties that the parameters of a stack must share, each a tuple with an entry for each
            parameter.
    """

    def __init__(self, parts: Parts, alone: bool, *kinds: Sequence):
        layout, held, options, n = parts.layout, parts.held, parts.options, parts.layout.count
        has_master = held.has_master()
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
        self.rounds_weights, self.splits_masters = options.stochastic_rounding, options.master_weights in SPLIT_MASTERS
        # How states of fewer bits are stored; no other optimizer converts one.
        self.conversion: Any = FORMATS[options.state_dtype].conversion
        self.draws_noise = self.conversion is not None or self.rounds_weights or options.master_weights == "split8"
        self.noise: Any = bits.Noise(parts.settings.seed, max(layout.sizes)) if self.draws_noise else None
        self.averages = averages_of(options)
        columns = [self.by_stack(held.parameters), self.by_stack(held.masters_or_weights())]
        columns += [
            tuple(has_master[i] for i in first),
            tuple(Tensor(stack, mstype.int32) for stack in self.places),
        ]
        columns += [self.by_stack(states) for states in held.states_of_each()]
        self.scale_column = len(columns) - FIRST_STATE
        self.has_scales = FORMATS[options.state_dtype].has_scales
        columns += [self.by_stack(scales) for scales in held.scales_of_each()] if self.has_scales else []
        columns += [self.by_stack(held.averages)] if len(held.averages) > 0 else []
        # For Map: parameters, masters, whether there are masters, the parameters' indices, each state, the scales of
        # each state if the format has any, and averages if they are kept.
        unregistered(self, columns=tuple(columns), global_step=held.global_step)
        # The function of the same name would be compiled again for each tensor.
        self.assign = ops.Assign()

    def weights(self, parameters, masters, has_master):
        """Return the weights of a stack in float32."""
        weights = self.held(parameters)
        if has_master and self.splits_masters:
            return normal(restored_bits(weights, self.integers(masters), F.dtype(masters[0]) == mstype.int8))
        known = self.held(masters) if has_master else weights
        return weights_of(F.dtype(parameters[0]), weights, known, has_master)

    def integers(self, parameters):
        """Return the values of a stack's parameters in int32."""
        return ops.stack(self.each(_in_int32, parameters))

    def noise_of(self, parameters, rows):
        """Return 32 random bits for each element of a stack, in whole blocks; 0 if nothing is rounded by them.

        Args:
            parameters: The parameters of the stack.
            rows: Their indices among all.
        """
        if not self.draws_noise:
            return 0
        size = 1
        for extent in F.shape(parameters[0]):
            size *= extent
        return self.noise(self.global_step, rows, 0, -(-size // CODE_BLOCK) * CODE_BLOCK)

    def stored(self, parameters, masters, has_master, weights, noise):
        """Return what is written for new float32 weights: weights, masters, and the weights that a step then reads."""
        dtype = F.dtype(parameters[0])
        if has_master and self.splits_masters:
            is_8_bit = F.dtype(masters[0]) == mstype.int8
            random = like(bits.noise_of_16_bits(noise, bits.WEIGHT), weights) if is_8_bit else 0
            return split_bits(weights, random, is_8_bit)
        if has_master or dtype == mstype.float32:
            return weights, weights, weights
        if self.rounds_weights:
            random = like(bits.noise_of_16_bits(noise, bits.WEIGHT), weights)
            with_noise = bits.bfloat16_with_noise if dtype == mstype.bfloat16 else bits.float16_with_noise
            weights = with_noise(weights, random)
        else:
            weights = rounded(weights, dtype)
        return weights, weights, weights

    def write_stack(self, parameters, stack):
        """Write the tensors of a stack to parameters; a graph must depend on the result, or it may remove the write."""
        dtype = F.dtype(parameters[0])
        if dtype == mstype.bfloat16:
            return self.each(write, parameters, ops.unstack(stack, 0))
        return self.each(self.assign, parameters, ops.unstack(F.cast(stack, dtype), 0))

    def write_weights(self, step, parameters, masters, has_master, noise, states):
        """Write the weights of a stack, with their masters and averages; a graph must also depend on the result.

        Args:
            step: Whether the step is applied, its count from 1, and the weights before and after it.
            parameters: The parameters of the stack.
            masters: Their masters.
            has_master: Whether they have masters.
            noise: What :meth:`noise_of` returned.
            states: The columns from the states on.
        """
        applied, t, before, after = step
        weights, kept, read = self.stored(parameters, masters, has_master, after, noise)
        written = ()
        if self.averages is not None:
            average = self.held(states[-1])
            new = ops.where(applied, self.averages(t, before, average, read), average)
            written += (self.write_stack(states[-1], new),)
        written += (self.write_stack(parameters, weights),)
        return (*written, self.write_stack(masters, kept)) if has_master else written

    # ---- States ------------------------------------------------------------------------------------------------------

    def states_of(self, count, weights, held):
        """Return the states of a stack in float32, as many as its rule has.

        Args:
            count: The number of states.
            weights: The stack of weights.
            held: The columns from the states on.
        """
        found = ()
        for k in range(count):
            found += (self.state_of(k, weights, held),)
        return found

    def state_of(self, k, weights, held):
        """Return one state of a stack in float32."""
        dtype = F.dtype(held[k][0])
        if dtype == mstype.float32 or dtype == mstype.bfloat16:
            return self.held(held[k])
        words = self.integers(held[k])
        words = words.reshape((F.shape(words)[0], -1))
        return self.decoded_state(words, ops.stack(held[self.scale_column + k]), weights, dtype)

    def decoded_state(self, words, scales, weights, dtype):
        """Return a state in float32, of the shape of the weights, that is stored in a dtype."""
        size = F.shape(weights.reshape((F.shape(weights)[0], -1)))[1]
        return normal(self.conversion.decode(words, scales, size, _is_signed(dtype)).reshape(F.shape(weights)))

    def encoded(self, states, noise, held):
        """Return new states as they are stored: for each, its elements, in float32 or int32, and its scales or ().

        Args:
            states: The states in float32, in a tuple.
            noise: What :meth:`noise_of` returned.
            held: The columns from the states on.
        """
        found = ()
        for k in range(len(states)):
            dtype, numbers = F.dtype(held[k][0]), normal(states[k])
            if dtype == mstype.float32:
                found += ((numbers, ()),)
            else:
                flat = numbers.reshape((F.shape(numbers)[0], -1))
                found += (self.conversion.encode(flat, self.conversion.noise(noise, k), _is_signed(dtype)),)
        return found

    def decoded(self, encoded, weights, held):
        """Return the states in float32 of what :meth:`encoded` returned."""
        found = ()
        for k in range(len(encoded)):
            words, scales = encoded[k]
            dtype = F.dtype(held[k][0])
            found += (words if dtype == mstype.float32 else self.decoded_state(words, scales, weights, dtype),)
        return found

    def write_states(self, applied, encoded, old, held):
        """Write the states of a stack, from :meth:`encoded`; a graph must depend on the result.

        Args:
            applied: Whether the step is applied; if not, nothing changes.
            encoded: The new states.
            old: The states before the step, in float32.
            held: The columns from the states on.
        """
        written = ()
        for k in range(len(encoded)):
            words, scales = encoded[k]
            dtype = F.dtype(held[k][0])
            # Codes that are encoded again would change by the noise.
            before = old[k] if dtype == mstype.float32 or dtype == mstype.bfloat16 else self.integers(held[k])
            words = ops.where(applied, words.reshape(F.shape(before)), before)
            written += (self.write_stack(held[k], words),)
            if len(scales) > 0:
                of_blocks = held[self.scale_column + k]
                written += (self.write_stack(of_blocks, ops.where(applied, scales, ops.stack(of_blocks))),)
        return written


def _in_int32(tensor):
    return F.cast(tensor, mstype.int32)


def _is_signed(dtype):
    return 1 if dtype == mstype.int8 or dtype == mstype.int16 else 0


def like(numbers, stack):
    """Return as many of the first numbers as the tensors of a stack have, in their shape."""
    shape = F.shape(stack)
    return numbers[:, : F.shape(stack.reshape((shape[0], -1)))[1]].reshape(shape)
