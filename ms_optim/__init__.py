"""Optimizers for training large models on MindSpore, each one fused kernel launch a step."""

from importlib.metadata import version

from ._base import FusedOptimizer, Rule
from ._shares import merge_states
from .adam_offload import AdamOffload
from .adamw import AdamW
from .callbacks import OptimizerMonitor
from .checkpoints import CheckpointSaver, Loaded, SpoiledError, load, save
from .cli.plot import plot
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
    "CheckpointSaver",
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "DGCMomentum",
    "ExponentialWeightDecay",
    "FusedOptimizer",
    "Lamb",
    "LinearWeightDecay",
    "Loaded",
    "OptimizerMonitor",
    "ParamGroups",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "Rule",
    "SimulatedWorkers",
    "SpoiledError",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
    "fold_residuals",
    "layerwise_groups",
    "load",
    "merge_states",
    "no_decay_groups",
    "pattern_groups",
    "plot",
    "save",
]
# All optimizers, in the order in which commands, MindFormers and tests list them.
OPTIMIZERS: tuple[type[FusedOptimizer], ...] = (AdamW, Lamb, LANS, AdamOffload, DGCMomentum)
__version__ = version("ms_optim")
