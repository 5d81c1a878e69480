"""What construction saw of the parameters and of their groups; nothing here changes afterwards."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters of an optimizer, in the order in which gradients are given.

    Attributes:
        optimizer: Name of the optimizer's class, for errors.
        names: The parameters' names.
        shapes: Their shapes.
        dtypes: Their dtypes.
        rate_places: For each the place of its learning rate among the step's rates.
        decay_places: For each the place of its weight decay, -1 where it is not decayed.
        rate_count: How many rates a step has.
        centralized: Whether its gradient is centralized.
        owned: Whether this process updates it; not all are where optimizers are parallel.
    """

    optimizer: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    rate_places: tuple[int, ...]
    decay_places: tuple[int, ...]
    rate_count: int
    centralized: tuple[bool, ...]
    owned: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parameters' elements."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all paths are told of a step.

    Attributes:
        device: The device that the rule's arithmetic runs on.
        step_dtype: The dtype in which what depends on the step alone is formed.
        unscale: What gradients are multiplied by.
        clip_norm: The largest norm of all gradients together; None: no limit.
        skips: Whether a step with a gradient that is not finite is skipped.
        seed: What noise is drawn from.
        is_parallel: Whether each process updates a part of the parameters.
    """

    device: str
    step_dtype: Any
    unscale: float
    clip_norm: float | None
    skips: bool
    seed: float
    is_parallel: bool
