"""What `auto_register: optimizers.MsOptimAdamW` finds; MindFormers runs a copy of this file."""

from ms_optim import WarmUpHoldDecayLR  # noqa: F401
from ms_optim.mindformers import CLASSES

globals().update(CLASSES)
