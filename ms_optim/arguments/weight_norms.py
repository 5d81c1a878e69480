"""What holds the norm of weights: the argument `weight_norm`, and RadialBrake."""

from __future__ import annotations

import dataclasses
from typing import Any

from .checks import check_at_most, check_choice
from .words import fail

HYPERBALL, RELATIVE, BRAKE = "hyperball", "relative", "radial_brake"
WEIGHT_NORMS = (HYPERBALL, RELATIVE, BRAKE)


@dataclasses.dataclass(frozen=True)
class RadialBrake:
    r"""Keep only a part of a step's change of the weights' norm, for the argument `weight_norm` of optimizers.

    A step that would change the norm of a tensor from :math:`\left\lVert W \right\rVert` to
    :math:`\left\lVert W' \right\rVert` ends at the norm
    :math:`\left\lVert W \right\rVert + s (\left\lVert W' \right\rVert - \left\lVert W \right\rVert)`, where :math:`s`
    is `outward` if the norm grows and `inward` if it shrinks. The direction of :math:`W'` is kept. The source is
    `NVIDIA's Emerging-Optimizers <https://github.com/NVIDIA-NeMo/Emerging-Optimizers>`_ (2026), with these defaults.

    Args:
        outward (Union[float, int]): The part of a growth that is kept, from 0 to 1. Default: ``0.5`` .
        inward (Union[float, int]): The part of a decline that is kept, from 0 to 1. Default: ``1.0`` .

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is not in the range [0, 1].

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, RadialBrake
        >>> optimizer = AdamW(nn.Dense(4, 3).trainable_params(), 1e-3, weight_norm=RadialBrake(outward=0.25))
    """

    outward: float = 0.5
    inward: float = 1.0

    def __post_init__(self) -> None:
        for name in ("outward", "inward"):
            object.__setattr__(self, name, check_at_most("RadialBrake", name, getattr(self, name), 1.0))


def check_weight_norm(optimizer: str, value: Any) -> None:
    """Check the argument `weight_norm`."""
    if value is None or isinstance(value, RadialBrake):
        return
    if not isinstance(value, str):
        fail(TypeError, optimizer, "weight_norm", f"None, one of {list(WEIGHT_NORMS)} or a RadialBrake", value)
    check_choice(optimizer, "weight_norm", value, WEIGHT_NORMS)


def constants_of(value: str | RadialBrake | None) -> dict[str, float]:
    """Return the constants of the argument `weight_norm` for kernels, by their names in Constant."""
    if value is None:
        return {}
    brake = value if isinstance(value, RadialBrake) else RadialBrake()
    kind = BRAKE if isinstance(value, RadialBrake) else value
    held_by = 1.0 + WEIGHT_NORMS.index(kind)
    return {"HELD_BY": held_by, "OUTWARD_KEPT": brake.outward, "INWARD_KEPT": brake.inward}


def is_held(shape: tuple[int, ...]) -> bool:
    """Return whether the norm of a tensor is held: vectors and scalars, such as biases, move freely."""
    return len(shape) > 1


def check_decays(optimizer: str, weight_norm: Any, names: Any, shapes: Any, decay_places: Any) -> None:
    """Raise an error if a weight whose norm is fixed is decayed.

    Args:
        optimizer: Name of the optimizer's class, for the error.
        weight_norm: The argument, checked.
        names: The names of the parameters.
        shapes: Their shapes.
        decay_places: For each parameter the index of its weight decay; -1 if it is not decayed.
    """
    for name, shape, place in zip(names, shapes, decay_places):
        if weight_norm == HYPERBALL and is_held(shape) and place >= 0:
            raise ValueError(
                f"For '{optimizer}', the weight decay of '{name}' must be 0 with weight_norm='hyperball', which keeps "
                "the norm that a decay would change: pass weight_decay=0.0, or groups that only decay vectors."
            )
