"""What an optimizer says of its rule: what its kernel needs to know, and the rule in MindSpore's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mindspore import Tensor, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ._arithmetic import summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ._arguments import Scalars, Tensors


class Rule(NamedTuple):
    """What an optimizer says of itself; a rule without a kernel needs a name and its states.

    Attributes:
        name: The rule's name, by which its kernel is found: one of this package's own only for that very rule.
        states: Prefixes of the states' names, in the kernel's order.
        constants: For the kernel: the rule's numbers, in its order.
        flags: For the kernel: the rule's choices, as bits.
        shared_flags: For the kernel: what it asks of its launches besides, as bits.
        at_most: For the kernel: how many tensors one launch may take; 0: all.
        rescale: What gradients are multiplied by besides unscaling.
        is_layerwise: For the kernel: whether the weights move by norms of whole tensors.
        is_elementwise: Whether ``directions`` and ``entering`` treat each element by itself. Tensors of one shape are
            then updated together, which graphs compile faster: weight, gradient and states are several tensors stacked
            along a first dimension, the weight decay has a shape that broadcasts over them, and ``coefficients`` takes
            and returns vectors with a number for each tensor.
        state_kinds: For the kernel: how each state may be held in fewer bits: "signed", "unsigned" where it is never
            negative, or "exact": always in float32. A state of the kind "rows" is float32, one number for each row.
        takes_low_states: For the kernel: whether its states may be held in fewer bits at all.
        starts_at_weights: Whether the first state starts as the weights, not as zeros.
        weighs_steps: Whether the rule states :meth:`Statement.weighed`, for which two numbers are kept for each tensor.
        others: Of a rule of matrices alone: the rule of all other tensors.
        iterations: Of a rule that orthogonalizes matrices: the coefficients of each iteration.
    """

    name: str
    states: tuple[str, ...]
    constants: tuple[float, ...] = ()
    flags: int = 0
    shared_flags: int = 0
    at_most: int = 0
    rescale: float = 1.0
    is_layerwise: bool = False
    is_elementwise: bool = False
    state_kinds: tuple[str, ...] = ("signed", "unsigned", "unsigned")
    takes_low_states: bool = True
    starts_at_weights: bool = False
    weighs_steps: bool = False
    others: Rule | None = None
    iterations: tuple[tuple[float, float, float], ...] = ()

    def of_tensor(self, is_matrix: bool) -> Rule:
        """Return the rule of a tensor, from whether it holds matrices."""
        return self if is_matrix or self.others is None else self.others

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all states, those of other tensors among them."""
        return self.states if self.others is None else (*self.states, *self.others.states)

    @property
    def row_prefixes(self) -> tuple[str, ...]:
        """The prefixes of states that have one number for each row."""
        return tuple(prefix for prefix, kind in self.kinds if kind == "rows")

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Each state's prefix and kind; a rule of more states than a kernel has runs where the kinds say nothing."""
        rest = ("exact",) * (len(self.states) - len(self.state_kinds))
        return tuple(zip(self.states, (*self.state_kinds, *rest)))


class Statement:
    """A rule in MindSpore's operators, which graphs compile: of an optimizer, paths call these methods alone."""

    # Whether the gradient is divided by its norm before the rule sees it.
    normalizes_gradient = False
    # Whether the decay spares weights that move away from zero, which the constructor sets.
    is_cautious: bool = False
    # Whether training holds something else in the weights than what is for use, which `averaged_weight` states.
    averages_iterates = False

    # What its kernels cannot do where MindSpore's operators can, and why: see _capabilities.py.
    kernels_lack: ClassVar[dict[str, str]] = {}

    @classmethod
    def are_matrices(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Tell of each parameter whether its states are those of a rule of matrices, by its name and shape."""
        return [False] * len(shapes)

    def scalars(self, t: Tensor) -> Scalars:
        """Return a tuple of what depends on the step alone, computed once a step.

        Args:
            t: Step count from 1, a tensor of no dimensions: float64, float32 on Ascend.
        """
        return (t,)

    def entering(self, gradient: Tensor) -> Tensor:
        """Return what enters the rule, by default the gradient as it is.

        Args:
            gradient: A gradient, float32, unscaled, centralized, and clipped, or divided by its norm where
                `normalizes_gradient` is set.
        """
        return gradient

    def akg_constants(self) -> tuple[float, ...]:
        """Return the rule's numbers in the order of its kernels for AKG and for Ascend, if it has such."""
        raise NotImplementedError

    def with_decay(self, direction: Tensor, weight: Tensor, weight_decay: Tensor) -> Tensor:
        """Return a direction with the decay, decoupled or cautious as the argument `decay` says, for `directions`.

        Args:
            direction: The direction without decay, float32.
            weight: The weight.
            weight_decay: This step's weight decay.
        """
        decay = weight_decay * weight
        if self.is_cautious:
            # Of a product, the sign is lost where that underflows.
            opposed = ops.logical_or(
                ops.logical_and(direction > 0, weight < 0), ops.logical_and(direction < 0, weight > 0)
            )
            decay = ops.where(opposed, ops.zeros_like(decay), decay)
        return summed(direction, decay)

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return the directions that a weight moves along, and the new states.

        Args:
            scalars: What :meth:`scalars` returned.
            weight: The weight, float32.
            gradient: What :meth:`entering` returned.
            weight_decay: This step's weight decay, a float32 tensor of no dimensions, unless the rule is elementwise.
            states: The states of this weight, in the order of the rule.

        Returns:
            A tuple of directions and a tuple of new states, each of the weight's shape.
        """
        raise NotImplementedError

    def matrix_directions(
        self, scalars: Scalars, form: int, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return what :meth:`directions` does, for a stack of tensors that hold matrices; only of a rule of matrices.

        Args:
            scalars: What :meth:`scalars` returned.
            form: The place of these tensors' form among those that the layout has.
            weight: The weights, float32, stacked along a first dimension.
            gradient: Their gradients, unscaled, centralized and clipped.
            weight_decay: Their weight decays, in a shape that broadcasts over the weights.
            states: The states of these weights.

        Returns:
            A tuple of directions, a tuple of new states, and what the statistics report as the trust ratio.
        """
        raise NotImplementedError

    def weighed(self, t: Tensor, learning_rate: Tensor, before: Tensor) -> tuple[Tensors, Tensor]:
        """Return the rates of a step that is weighed among all before, and what is kept; only if `weighs_steps` is set.

        Args:
            t: Step count from 1.
            learning_rate: Learning rates, float32 of shape (n,), for n tensors.
            before: What is kept of the steps before, of shape (n, 2), zeros at first.

        Returns:
            A tuple of rates, which :meth:`coefficients` and :meth:`followed` take as their learning rate, and what is
            kept, of shape (n, 2).
        """
        raise NotImplementedError

    def followed(self, learning_rate: Tensor | Tensors, directions: Tensors, states: Tensors) -> Tensors:
        """Return the new states, of which some may move along a direction, as the weights do.

        Args:
            learning_rate: This step's learning rate, in a shape that broadcasts over the directions.
            directions: What :meth:`directions` returned.
            states: The new states that it returned.
        """
        return states

    def averaged_weight(self, weight: NDArray[np.float32], first_state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what a weight is to be for use; only if `averages_iterates` is set.

        Args:
            weight: The weight in float32, as training holds it.
            first_state: Its first state, float32.
        """
        raise NotImplementedError

    def coefficients(
        self, learning_rate: Tensor, weight_decay: Tensor, weight_norm: Tensor, direction_norms: Tensors
    ) -> tuple[Tensors, Tensor]:
        """Return how far the weight moves along each direction, and the trust ratio to report.

        Args:
            learning_rate: This step's learning rate, a float32 tensor of no dimensions, unless the rule is elementwise.
            weight_decay: This step's weight decay.
            weight_norm: L2 norm of the weight.
            direction_norms: L2 norms of the directions.

        Returns:
            A tuple of coefficients c, for the weight w - sum(c * directions), and a trust ratio.
        """
        return (learning_rate,), F.ones_like(learning_rate)
