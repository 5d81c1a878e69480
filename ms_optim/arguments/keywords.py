"""Types of the keyword arguments that optimizers share."""

from __future__ import annotations

from typing import TypedDict

from mindspore import dtype as mstype


class Common(TypedDict, total=False):
    """Shared keyword arguments that every optimizer takes and that no optimizer defines itself."""

    state_dtype: str | mstype.Type
    master_weights: bool | str
    stochastic_rounding: bool
    skip_nonfinite: bool
    backend: str


class CommonAndAverage(Common, total=False):
    """The same, and the arguments of the average of the weights."""

    average_decay: float | None
    average_warmup: bool


class SharedButLossScale(CommonAndAverage, total=False):
    """Shared keyword arguments of an optimizer that defines `loss_scale` itself and has no decoupled decay."""

    grad_clip_norm: float | None
    shard_states: bool


class Shared(SharedButLossScale, total=False):
    """Keyword arguments that the optimizers share; each takes them after its own."""

    offload: bool
    loss_scale: float
    decay: str


class SharedButSkipping(TypedDict, total=False):
    """Shared keyword arguments of an optimizer that defines `skip_nonfinite` itself, with another default."""

    state_dtype: str | mstype.Type
    master_weights: bool | str
    stochastic_rounding: bool
    backend: str
    average_decay: float | None
    average_warmup: bool
    grad_clip_norm: float | None
    shard_states: bool
    offload: bool
    loss_scale: float
    decay: str


class SharedButAverage(Common, total=False):
    """Shared keyword arguments of an optimizer that averages its iterates itself."""

    grad_clip_norm: float | None
    shard_states: bool
    offload: bool
    loss_scale: float
