"""Properties of all gradients that a step needs before it updates anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...rules.arithmetic import centralized, clipping, norm, normal, norms, usable
from .stacks import Stacks

if TYPE_CHECKING:
    from ..parts import Parts


class Prepare(nn.Cell):
    """Unscales and centralizes the gradients of a stack."""

    def __init__(self, unscale: float):
        super().__init__(auto_prefix=False)
        self.unscale = unscale

    def construct(self, gradients, is_centralized):
        """Return prepared float32 gradients from float32 gradients."""
        gradients = normal(normal(gradients) * self.unscale)
        return centralized(gradients) if is_centralized else gradients


def _first(found):
    return found[0]


def _second(found):
    return found[1]


def _third(found):
    return found[2]


class Survey(nn.Cell):
    """Prepares all gradients, and computes their norms, whether they are finite, and the factor of clipping.

    Args:
        stacks: The stacks of the gradients.
        is_centralized: For each stack, whether its gradients are centralized.
        parts: The parts that every path is built from.
        whole: The norms of sliced tensors, a :class:`ms_optim.paths.slices.WholeNorms`; None if no tensor is sliced.
    """

    def __init__(self, stacks: Stacks, is_centralized, parts: Parts, whole=None):
        super().__init__(auto_prefix=False)
        self.stacks, self.is_centralized, self.whole = stacks, tuple(is_centralized), whole
        self.prepare, self.dtype = Prepare(parts.settings.unscale), parts.settings.step_dtype
        self.clip_norm = parts.options.grad_clip_norm
        self.each = C.Map()

    def construct(self, gradients):
        """Prepare and measure the gradients of all parameters.

        Returns:
            For each stack, the prepared gradients, their norms and whether they are finite; then whether all gradients
            are finite; and the factor of clipping.
        """
        found = self.each(self.found, self.stacks(gradients), self.is_centralized)
        gradients, norms, finite = self.each(_first, found), self.each(_second, found), self.each(_third, found)
        if self.whole is not None:
            infinite = 1.0 - F.cast(self.stacks.in_order(finite), mstype.float32)
            whole = self.whole(ops.stack((self.stacks.in_order(norms), infinite), 1))
            norms = self.stacks.spread(whole[:, 0], gradients)
            finite = self.stacks.spread(whole[:, 1] == 0.0, gradients)
        clip = 1.0 if self.clip_norm is None else self.clip_factor(self.stacks.in_order(norms))
        return gradients, norms, finite, ops.all(ops.concat(finite)), clip

    def found(self, gradients, is_centralized):
        """Return the prepared gradients of a stack, their norms, and whether they are finite."""
        gradients = self.prepare(gradients, is_centralized)
        return gradients, norms(gradients, self.dtype), usable(gradients)

    def clip_factor(self, norms):
        """Return the factor of clipping for gradients of these norms."""
        if self.clip_norm is None:
            return 1.0
        return clipping(norm(norms, self.dtype), self.clip_norm)
