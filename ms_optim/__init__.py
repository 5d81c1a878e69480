"""Optimizers for training large models on MindSpore, each one fused kernel launch a step."""

from importlib.metadata import version

from ._base import FusedOptimizer, Rule
from ._plot import plot
from ._shares import merge_states
from .adam_offload import AdamOffload
from .adamw import AdamW
from .callbacks import OptimizerMonitor
from .dgc_momentum import DGCMomentum
from .groups import ParamGroups, layerwise_groups, no_decay_groups, pattern_groups
from .lamb import Lamb
from .lans import LANS
from .residuals import fold_residuals
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
from .simulated_workers import SimulatedWorkers

__all__ = [
    "LANS",
    "AdamOffload",
    "AdamW",
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "DGCMomentum",
    "ExponentialWeightDecay",
    "FusedOptimizer",
    "Lamb",
    "LinearWeightDecay",
    "OptimizerMonitor",
    "ParamGroups",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "Rule",
    "SimulatedWorkers",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
    "fold_residuals",
    "layerwise_groups",
    "merge_states",
    "no_decay_groups",
    "pattern_groups",
    "plot",
]
__version__ = version("ms_optim")
