"""The classes for `auto_register`, such as `optimizers.MsOptimAdamW`; MindFormers runs a copy of this file."""

from ms_optim import PowerCoolLR, WarmUpHoldDecayLR  # noqa: F401
from ms_optim.mindformers import CLASSES, MsOptimLocalSteps  # noqa: F401

globals().update(CLASSES)


class Muon(CLASSES["MsOptimMuon"]):
    """For `type: Muon`, to which alone MindFormers gives the model that reports its largest logits."""
