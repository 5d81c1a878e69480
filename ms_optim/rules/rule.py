"""An optimizer's update rule: the properties that its kernel needs, and the rule in MindSpore's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mindspore import Tensor, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .arithmetic import summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..arguments.checks import Scalars, Tensors


class Rule(NamedTuple):
    """The properties of an optimizer's update rule; a rule without a kernel needs only a name and its states.

    Attributes:
        name: The rule's name, by which its kernel is found. Use the name of a rule of this package only for that same
            rule.
        states: Prefixes of the states' names, in the kernel's order.
        constants: For the kernel: the rule's constants, in the kernel's order.
        flags: For the kernel: the rule's options, as a bit mask; or a number that the host of a device knows by it.
        shared_flags: For the kernel: further options of its launches, as a bit mask.
        at_most: For the kernel: the largest number of tensors in one launch; 0 means no limit.
        rescale: The factor that gradients are multiplied by in addition to unscaling.
        is_layerwise: For the kernel: whether the update of a weight depends on norms of whole tensors.
        is_elementwise: Whether ``directions`` and ``entering`` treat each element independently. Several tensors
            are then updated together, which graphs compile faster: weight, gradient and states are tensors of one
            shape, stacked along a first dimension, or flat tensors with zeros behind their elements, of which nothing
            is kept; the weight decay has a shape that broadcasts over them, and ``coefficients`` takes and returns
            vectors with a number for each tensor.
        state_kinds: For the kernel: how each state may be held in fewer bits: "signed", "unsigned" where it is never
            negative, or "exact": always in float32. A state of the kind "rows" is float32, one number for each row.
        takes_low_states: For the kernel: whether its states may be held in fewer bits at all.
        starts_at_weights: Whether the first state starts as the weights, not as zeros.
        weighs_steps: Whether the rule implements :meth:`Statement.weighed`, which keeps two numbers for each tensor.
        has_matrices: Whether it is a rule of matrices: of tensors that hold matrices, it sees each of these as a whole.
        reads_stored_states: Only for a rule of matrices: whether directions follow from the new states as they are
            stored, which matters if these are in fewer bits. The rule then implements :meth:`Statement.matrix_states`.
        reads_between: How often a kernel reads float32 states between the pass that makes them and the one that moves
            the weights.
        others: Only for a rule of matrices: the rule of all other tensors; None if all tensors are matrices.
        iterations: Only for a rule that orthogonalizes matrices: the coefficients of each iteration.
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
    has_matrices: bool = False
    reads_stored_states: bool = False
    reads_between: int = 0
    others: Rule | None = None
    iterations: tuple[tuple[float, float, float], ...] = ()

    def of_tensor(self, is_matrix: bool) -> Rule:
        """Return the rule of a tensor, which depends on whether the tensor holds matrices."""
        return self if is_matrix or self.others is None else self.others

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all states, including the states of other tensors."""
        return self.states if self.others is None else (*self.states, *self.others.states)

    @property
    def row_prefixes(self) -> tuple[str, ...]:
        """The prefixes of states that have one number for each row."""
        return tuple(prefix for prefix, kind in self.kinds if kind == "rows")

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Each state's prefix and kind; a rule with more states than kernels take runs where kinds have no effect."""
        rest = ("exact",) * (len(self.states) - len(self.state_kinds))
        return tuple(zip(self.states, (*self.state_kinds, *rest)))


class Statement:
    """A rule in MindSpore's operators, which graphs compile. Paths call only these methods of an optimizer."""

    # Whether the gradient is divided by its norm before the rule sees it.
    normalizes_gradient = False
    # The number of directions that `directions` returns.
    direction_count = 1
    # Whether weights that move away from zero are not decayed; the constructor sets it.
    is_cautious: bool = False
    # Whether the weights during training differ from the weights to use, which `averaged_weight` computes.
    averages_iterates = False

    # The number of dimensions that each parameter must have; None: any.
    dimensions: int | None = None
    # Its rules, one for each kernel, without the constants that arguments set; the first is the default.
    rules: tuple[Rule, ...] = ()
    # Whether the arithmetic runs on the host for every device target.
    runs_on_host = False
    # The features that it does not support on any device, and why: see kernels/capabilities.py.
    refuses: ClassVar[dict[str, str]] = {}
    # The features that MindSpore's operators support but its kernels do not, and why.
    kernels_lack: ClassVar[dict[str, str]] = {}

    @classmethod
    def are_matrices(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return for each parameter, from its name and shape, whether its states are those of a rule of matrices."""
        return [False] * len(shapes)

    def scalars(self, t: Tensor) -> Scalars:
        """Return a tuple of the values that depend only on the step; they are computed once per step.

        Args:
            t: Step count from 1, a tensor of no dimensions: float64, float32 on Ascend.
        """
        return (t,)

    def entering(self, gradient: Tensor) -> Tensor:
        """Return the gradient as the rule receives it, by default unchanged.

        Args:
            gradient: A gradient, float32, unscaled, centralized, and clipped, or divided by its norm where
                `normalizes_gradient` is set.
        """
        return gradient

    def akg_constants(self) -> tuple[float, ...]:
        """Return the rule's constants in the order of its kernels for AKG and for Ascend, if it has any."""
        raise NotImplementedError

    def with_decay(self, direction: Tensor, weight: Tensor, weight_decay: Tensor) -> Tensor:
        """Return a direction with weight decay added, decoupled or cautious as set by `decay`, for `directions`.

        Args:
            direction: The direction without decay, float32.
            weight: The weight.
            weight_decay: This step's weight decay.
        """
        decay = weight_decay * weight
        if self.is_cautious:
            # The signs are compared, because a product that underflows loses its sign.
            opposed = ops.logical_or(
                ops.logical_and(direction > 0, weight < 0), ops.logical_and(direction < 0, weight > 0)
            )
            decay = ops.masked_fill(decay, opposed, 0.0)
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

    def directions_of(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> Tensors:
        """Return the directions alone, from the new states; only for a layer-wise rule whose states are in fewer bits.

        Its arguments are those of :meth:`directions`, but for `states`: what was made of the new states by rounding.
        """
        raise NotImplementedError

    def matrix_directions(
        self, scalars: Scalars, form: int, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return what :meth:`directions` does, for a stack of tensors that hold matrices; only for a rule of matrices.

        Args:
            scalars: What :meth:`scalars` returned.
            form: The index of these tensors' form among the forms of the layout.
            weight: The weights, float32, stacked along a first dimension.
            gradient: Their gradients, unscaled, centralized and clipped.
            weight_decay: Their weight decays, in a shape that broadcasts over the weights.
            states: The states of these weights; if the rule reads states as they are stored, the new ones.

        Returns:
            A tuple of directions, a tuple of new states, and what the statistics report as the trust ratio.
        """
        raise NotImplementedError

    def matrix_states(self, gradient: Tensor, states: Tensors) -> Tensors:
        """Return the new states of a stack of tensors that hold matrices, only if `reads_stored_states` is set.

        Args:
            gradient: Their gradients, unscaled, centralized and clipped.
            states: Their states before the step.
        """
        raise NotImplementedError

    def orthogonalized(self, form: int, u: Tensor, averages: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """Return the updates of a stack of tensors that hold matrices, without decay; only for a rule of matrices.

        Args:
            form: The index of these tensors' form among the forms of the layout.
            u: What is orthogonalized: the tensors, stacked along a first dimension.
            averages: Their second states, stacked, in a tuple; () if they have none.

        Returns:
            The updates; the new second states, in a tuple, or (); and for each tensor, the root mean square of its
            singular values.
        """
        raise NotImplementedError

    def weighed(self, t: Tensor, learning_rate: Tensor, before: Tensor) -> tuple[Tensors, Tensor]:
        """Return the rates of a step that is weighted against all earlier steps; only if `weighs_steps` is set.

        Args:
            t: Step count from 1.
            learning_rate: Learning rates, float32 of shape (n,), for n tensors.
            before: What is kept from earlier steps, of shape (n, 2), initially zeros.

        Returns:
            A tuple of rates, which :meth:`coefficients` and :meth:`followed` take as their learning rate, and what is
            kept, of shape (n, 2).
        """
        raise NotImplementedError

    def followed(self, learning_rate: Tensor | Tensors, directions: Tensors, states: Tensors) -> Tensors:
        """Return the new states, some of which may move along a direction, as the weights do.

        Args:
            learning_rate: This step's learning rate, in a shape that broadcasts over the directions.
            directions: What :meth:`directions` returned.
            states: The new states that it returned.
        """
        return states

    def averaged_weight(self, weight: NDArray[np.float32], first_state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the weight to use outside training; only if `averages_iterates` is set.

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
