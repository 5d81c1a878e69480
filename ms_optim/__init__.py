"""Optimizers for training large models on MindSpore, with one fused kernel launch per step."""

from importlib.metadata import version

import mindspore

from . import optimizers
from .arguments.weight_norms import RadialBrake
from .base.learning_rates import for_scheduler
from .base.optimizer import FusedOptimizer, Rule
from .checkpoints import CheckpointSaver, Loaded, SpoiledError, load, save
from .checkpoints.fold import fold_residuals
from .checkpoints.merge import merge_states
from .checkpoints.mindformers import from_mindformers, to_mindformers
from .former_modules import keep
from .groups import ParamGroups, layerwise_groups, muon_groups, no_decay_groups, pattern_groups
from .local_steps import LocalSteps, Quantized, SparseTopK
from .multi import MultiOptimizer
from .optimizers import *  # noqa: F403 - each optimizer is public
from .optimizers import OPTIMIZERS as OPTIMIZERS
from .optimizers.by_name import create_optimizer, list_optimizers
from .recipes import recipe
from .rules.splits import heads
from .schedules import (
    ConstantWeightDecay,
    CosineWeightDecay,
    ExponentialWeightDecay,
    LinearWeightDecay,
    PiecewiseConstantWeightDecay,
    PolynomialWeightDecay,
    PowerCoolLR,
    WarmUpHoldDecayLR,
    WarmUpWeightDecay,
    WeightDecaySchedule,
)
from .training.accumulation import GradientAccumulation
from .training.averaged_weights import AveragedWeights
from .training.monitor import OptimizerMonitor
from .training.plot import plot
from .training.qk_clip import QKClip, qk_clip
from .training.released_train_step import ReleasedTrainStep
from .training.simulated_workers import SimulatedWorkers
from .versions import check_version

__all__ = [
    "AveragedWeights",
    "CheckpointSaver",
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "ExponentialWeightDecay",
    "FusedOptimizer",
    "GradientAccumulation",
    "LinearWeightDecay",
    "Loaded",
    "LocalSteps",
    "MultiOptimizer",
    "OptimizerMonitor",
    "ParamGroups",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "PowerCoolLR",
    "QKClip",
    "Quantized",
    "RadialBrake",
    "ReleasedTrainStep",
    "Rule",
    "SimulatedWorkers",
    "SparseTopK",
    "SpoiledError",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
    "create_optimizer",
    "fold_residuals",
    "for_scheduler",
    "from_mindformers",
    "heads",
    "layerwise_groups",
    "list_optimizers",
    "load",
    "merge_states",
    "muon_groups",
    "no_decay_groups",
    "pattern_groups",
    "plot",
    "qk_clip",
    "recipe",
    "save",
    "to_mindformers",
]
__all__ += optimizers.__all__
__version__ = version("ms_optim")

check_version(mindspore.__version__)
keep(__name__)
