"""Weight decays and learning rates of a step."""

from .learning_rates import PowerCoolLR, WarmUpHoldDecayLR
from .weight_decays import (
    ConstantWeightDecay,
    CosineWeightDecay,
    ExponentialWeightDecay,
    LinearWeightDecay,
    PiecewiseConstantWeightDecay,
    PolynomialWeightDecay,
    WarmUpWeightDecay,
    WeightDecaySchedule,
)

__all__ = [
    "ConstantWeightDecay",
    "CosineWeightDecay",
    "ExponentialWeightDecay",
    "LinearWeightDecay",
    "PiecewiseConstantWeightDecay",
    "PolynomialWeightDecay",
    "PowerCoolLR",
    "WarmUpHoldDecayLR",
    "WarmUpWeightDecay",
    "WeightDecaySchedule",
]
