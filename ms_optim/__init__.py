"""Optimizers for training large models on MindSpore, each one fused kernel launch a step."""

from importlib.metadata import version

from ._shares import merge_states
from .adam_offload import AdamOffload
from .adamw import AdamW
from .dgc_momentum import DGCMomentum
from .groups import ParamGroups, layerwise_groups, no_decay_groups, pattern_groups
from .lamb import Lamb
from .lans import LANS
from .schedules import (
    ConstantWeightDecay,
    CosineWeightDecay,
    ExponentialWeightDecay,
    LinearWeightDecay,
    PiecewiseConstantWeightDecay,
    PolynomialWeightDecay,
    WarmUpHoldDecayLR,
    WarmUpWeightDecay,
    WeightDecaySchedule,
)

__all__ = [
    "LANS",
    "AdamOffload",
    "AdamW",
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "DGCMomentum",
    "ExponentialWeightDecay",
    "Lamb",
    "LinearWeightDecay",
    "ParamGroups",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
    "layerwise_groups",
    "merge_states",
    "no_decay_groups",
    "pattern_groups",
]
__version__ = version("ms_optim")
