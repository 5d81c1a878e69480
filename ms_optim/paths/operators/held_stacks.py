"""Parameters and their states in stacks, read and written by MindSpore's operators."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.weight_norms import is_held
from ...kernels.interface import CODE_BLOCK
from ...rules.arithmetic import normal, rounded, selected, weights_of, write
from ...states import bits
from ...states.formats import FORMATS, Conversions
from ...states.split_masters import restored_bits, split_bits
from ...unregistered import unregistered
from .averages import averages_of
from .stacks import MOST_MIXED, Stacks, stacked, stacked_places, unstacked, width_of

if TYPE_CHECKING:
    from ..parts import Parts
FIRST_STATE = 4  # the first column with a state


class HeldStacks(Stacks):
    """Stacks of an optimizer's parameters.

    Args:
        parts: The parts that every path is built from.
        alone: Whether each parameter is a separate stack.
        mixes: Whether parameters of different shapes may share a stack; the rule must treat each element independently.
        kinds: Further properties that the parameters of a stack must share, each a tuple with an entry for each
            parameter.
    """

    def __init__(self, parts: Parts, alone: bool, *kinds: Sequence, mixes: bool = False):
        layout, held, options, n = parts.layout, parts.held, parts.options, parts.layout.count
        has_master = held.has_master()
        own_kind = range(n) if alone else (0,) * n
        forms = layout.form_places or (-1,) * n
        # The elements of each parameter that this process updates.
        ranges = [(0, size) for size in layout.sizes] if parts.shares is None else parts.shares.own.tolist()
        ranges = [tuple(own) if is_owned else (0, 0) for own, is_owned in zip(ranges, layout.owned)]
        # If processes exchange for each stack, all of them have the same stacks.
        sizes = [layout.stacking(i) for i in range(n)]
        shapes: list[Hashable] = list(layout.shapes)
        for i in _mixed(parts, forms) if mixes and not alone else ():
            width, holds = width_of(layout.sizes[i]), options.weight_norm is not None and is_held(layout.shapes[i])
            shapes[i], sizes[i], ranges[i] = ("rows", width, holds), (width, 1), (0, width)
        known = (shapes, layout.dtypes, layout.options, has_master, layout.centralized, ranges, forms)
        common = zip(own_kind, *known, *kinds)
        super().__init__(stacked_places(list(common), sizes, layout.most_stacked))
        first = [stack[0] for stack in self.places]
        self.owned = tuple(ranges[i] != (0, 0) or layout.sizes[i] == 0 for i in first)
        self.is_sharded = parts.shares is not None
        self.forms = tuple(forms[i] for i in first)
        self.centralized = tuple(layout.centralized[i] for i in first)
        # How states of fewer bits are stored.
        rows = [FORMATS[name] for name in dict.fromkeys(each.state_dtype for each in layout.options)]
        low = [row for row in rows if row.conversion is not None]
        self.conversions: Any = Conversions(low) if low else None
        self.rounds_weights = options.stochastic_rounding
        rounds_masters = any(p.dtype == mstype.int8 for p in held.masters)
        self.draws_noise = len(low) > 0 or self.rounds_weights or rounds_masters
        self.noise: Any = bits.Noise(parts.settings.seed, max(end for _, end in ranges)) if self.draws_noise else None
        self.averages = averages_of(options)
        columns = [self.by_stack(held.parameters), self.by_stack(held.masters_or_weights())]
        columns += [tuple(has_master[i] for i in first)]
        of_stack = [tuple(layout.rows[i] for i in stack) for stack in self.places]
        columns += [tuple((Tensor(own, mstype.int32), *ranges[stack[0]]) for own, stack in zip(of_stack, self.places))]
        columns += [self.by_stack(states) for states in held.states_of_each()]
        self.scale_column = len(columns) - FIRST_STATE
        self.has_scales = any(row.has_scales for row in low)
        columns += [self.by_stack(scales) for scales in held.scales_of_each()] if self.has_scales else []
        columns += [self.by_stack(held.averages_of_each())] if len(held.averages) > 0 else []
        # For Map: parameters, masters, whether there are masters, the parameters' indices and the elements that this
        # process updates, each state, the scales of each state if the format has any, and averages if there are any.
        unregistered(self, columns=tuple(columns), global_step=held.global_step)
        # The function of the same name would be compiled again for each tensor.
        self.assign = ops.Assign()

    def weights(self, parameters, masters, has_master, place):
        """Return the weights of a stack in float32: the elements that this process updates; see :meth:`own`."""
        weights = self.own(self.held(parameters), place)
        if has_master and F.dtype(masters[0]) != mstype.float32:
            rest = self.like(self.integers(masters), weights)
            return normal(restored_bits(weights, rest, F.dtype(masters[0]) == mstype.int8))
        known = self.like(self.held(masters), weights) if has_master else weights
        return weights_of(F.dtype(parameters[0]), weights, known, has_master)

    def integers(self, parameters):
        """Return the values of a stack's parameters in int32."""
        return stacked(self.each(_in_int32, parameters))

    def own(self, stack, place):
        """Return the elements of a stack of whole tensors that this process updates: flat, unless these are all.

        Args:
            stack: The stack.
            place: The column with the range of elements.
        """
        _, begin, end = place
        flat = stack.reshape((F.shape(stack)[0], -1))
        return flat[:, begin:end] if end - begin < F.shape(flat)[1] else stack

    def like(self, held, weights):
        """Return what is held for a stack in the shape of its weights; with sharded states, it is flat."""
        return held.reshape(F.shape(weights)) if self.is_sharded else held

    def noise_of(self, place):
        """Return 32 random bits for each element of a stack, in whole blocks; 0 if nothing is rounded by them.

        Args:
            place: The indices of its parameters among all, and the range of their elements.
        """
        if not self.draws_noise:
            return 0
        rows, begin, end = place
        return self.noise(self.global_step, rows, begin, begin + -(-(end - begin) // CODE_BLOCK) * CODE_BLOCK)

    def stored(self, parameters, masters, has_master, weights, noise):
        """Return what is written for new float32 weights: weights, masters, and the weights that a step then reads."""
        dtype = F.dtype(parameters[0])
        if has_master and F.dtype(masters[0]) != mstype.float32:
            is_8_bit = F.dtype(masters[0]) == mstype.int8
            random = cut_like(bits.noise_of_16_bits(noise, bits.WEIGHT), weights) if is_8_bit else 0
            return split_bits(weights, random, is_8_bit)
        if has_master or dtype == mstype.float32:
            return weights, weights, weights
        if self.rounds_weights:
            random = cut_like(bits.noise_of_16_bits(noise, bits.WEIGHT), weights)
            with_noise = bits.bfloat16_with_noise if dtype == mstype.bfloat16 else bits.float16_with_noise
            weights = with_noise(weights, random)
        else:
            weights = rounded(weights, dtype)
        return weights, weights, weights

    def write_stack(self, parameters, stack):
        """Write the tensors of a stack to parameters; a graph must depend on the result, or it may remove the write."""
        dtype = F.dtype(parameters[0])
        if self.is_sharded:
            stack = stack.reshape((F.shape(stack)[0], *F.shape(parameters[0])))
        if dtype == mstype.bfloat16:
            return self.each(write, parameters, unstacked(stack, parameters))
        return self.each(self.assign, parameters, unstacked(F.cast(stack, dtype), parameters))

    def write_weights(self, step, parameters, masters, has_master, noise, states):
        """Write the weights of a stack, with their masters and averages; a graph must also depend on the result.

        Args:
            step: Whether the step is applied, its count from 1, and the weights before and after it.
            parameters: The parameters of the stack.
            masters: Their masters.
            has_master: Whether they have masters.
            noise: What :meth:`noise_of` returned.
            states: The columns from the states on.

        Returns:
            The results of the writes; and with sharded states the new weights, in a tuple, which are not written but
            still to be gathered: of each tensor, the elements that this process updates.
        """
        applied, t, before, after = step
        weights, kept, read = self.stored(parameters, masters, has_master, after, noise)
        written = ()
        if self.averages is not None:
            average = self.like(self.held(states[-1]), before)
            new = selected(applied, self.averages(t, before, average, read), average)
            written += (self.write_stack(states[-1], new),)
        if has_master:
            written += (self.write_stack(masters, kept),)
        if self.is_sharded:
            return written, ops.unstack(weights, 0)
        return (*written, self.write_stack(parameters, weights)), ()

    # ---- States ------------------------------------------------------------------------------------------------------

    def states_of(self, count, rows_of, weights, held):
        """Return the states of a stack in float32, as many as its rule has.

        Args:
            count: The number of states.
            rows_of: The index of the state that has one number for each row; -1 if none has.
            weights: The stack of weights.
            held: The columns from the states on.
        """
        found = ()
        for k in range(count):
            found += (self.held(held[k]) if k == rows_of else self.state_of(k, weights, held),)
        return found

    def state_of(self, k, weights, held):
        """Return one state of a stack in float32."""
        dtype = F.dtype(held[k][0])
        if dtype == mstype.float32 or dtype == mstype.bfloat16:
            return self.like(self.held(held[k]), weights)
        words = self.integers(held[k])
        words = words.reshape((F.shape(words)[0], -1))
        return self.decoded_state(words, ops.stack(held[self.scale_column + k]), weights, dtype)

    def decoded_state(self, words, scales, weights, dtype):
        """Return a state in float32, of the shape of the weights, that is stored in a dtype."""
        numbers = self.conversions.decode(dtype, words, scales, _elements(weights), _is_signed(dtype))
        return normal(numbers.reshape(F.shape(weights)))

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
                random = self.conversions.noise(dtype, noise, k)
                found += (self.conversions.encode(dtype, flat, random, _is_signed(dtype)),)
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
            words = selected(applied, words.reshape(F.shape(before)), before)
            written += (self.write_stack(held[k], words),)
            if len(scales) > 0:
                of_blocks = held[self.scale_column + k]
                written += (self.write_stack(of_blocks, ops.where(applied, scales, ops.stack(of_blocks))),)
        return written


def _mixed(parts, forms):
    """Return the indices of parameters that share a stack with those of other shapes: few are of one shape.

    Matrices, codes and means of gradients depend on shapes; shares of states are no whole tensors.
    """
    layout, held = parts.layout, parts.held
    if parts.shares is not None or not all(layout.owned):
        return []
    count = collections.Counter(layout.shapes)
    few = [i for i in range(layout.count) if count[layout.shapes[i]] <= MOST_MIXED and layout.sizes[i] > 0]
    return [i for i in few if forms[i] < 0 and not layout.centralized[i] and not held.has_scales(i)]


def _in_int32(tensor):
    return F.cast(tensor, mstype.int32)


def _is_signed(dtype):
    return 1 if dtype == mstype.int8 or dtype == mstype.int16 else 0


def cut_like(numbers, stack):
    """Return as many of the first numbers as the tensors of a stack have, in their shape."""
    return numbers[:, : _elements(stack)].reshape(F.shape(stack))


def _elements(stack):
    """Return the number of elements of each tensor of a stack."""
    return F.shape(stack.reshape((F.shape(stack)[0], -1)))[1]
