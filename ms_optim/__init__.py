"""Optimizers for training large models on MindSpore, with one fused kernel launch per step."""

from importlib.metadata import version

import mindspore

from ._base import FusedOptimizer, Rule
from ._merge_states import merge_states
from ._versions import check_version
from .adam_offload import AdamOffload
from .adamw import AdamW
from .ademamix import AdEMAMix
from .averaged_weights import AveragedWeights
from .callbacks import OptimizerMonitor
from .checkpoints import CheckpointSaver, Loaded, SpoiledError, load, save
from .cli.plot import plot
from .dgc_momentum import DGCMomentum
from .factory import create_optimizer, list_optimizers
from .for_scheduler import for_scheduler
from .groups import ParamGroups, layerwise_groups, no_decay_groups, pattern_groups
from .lamb import Lamb
from .lans import LANS
from .lion import Lion
from .local_compression import Quantized, SparseTopK
from .local_steps import LocalSteps
from .muon import Muon
from .muon_groups import muon_groups
from .qk_clip import QKClip, qk_clip
from .released_train_step import ReleasedTrainStep
from .residuals import fold_residuals
from .schedule_free_adamw import ScheduleFreeAdamW
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
    "AdEMAMix",
    "AdamOffload",
    "AdamW",
    "AveragedWeights",
    "CheckpointSaver",
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "DGCMomentum",
    "ExponentialWeightDecay",
    "FusedOptimizer",
    "Lamb",
    "LinearWeightDecay",
    "Lion",
    "Loaded",
    "LocalSteps",
    "Muon",
    "OptimizerMonitor",
    "ParamGroups",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "QKClip",
    "Quantized",
    "ReleasedTrainStep",
    "Rule",
    "ScheduleFreeAdamW",
    "SimulatedWorkers",
    "SparseTopK",
    "SpoiledError",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
    "create_optimizer",
    "fold_residuals",
    "for_scheduler",
    "layerwise_groups",
    "list_optimizers",
    "load",
    "merge_states",
    "muon_groups",
    "no_decay_groups",
    "pattern_groups",
    "plot",
    "qk_clip",
    "save",
]
# All optimizers, in the order in which commands, MindFormers and tests list them; `create_optimizer` reads this list.
OPTIMIZERS: tuple[type[FusedOptimizer], ...] = (
    AdamW,
    Lamb,
    LANS,
    AdamOffload,
    DGCMomentum,
    Lion,
    AdEMAMix,
    ScheduleFreeAdamW,
    Muon,
)
__version__ = version("ms_optim")

check_version(mindspore.__version__)
