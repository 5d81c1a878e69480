"""The optimizers: one a file, with its document and its rule."""

from ..base.optimizer import FusedOptimizer
from .adam import Adam
from .adam_offload import AdamOffload
from .adamw import AdamW
from .ademamix import AdEMAMix
from .dgc_momentum import DGCMomentum
from .lamb import Lamb
from .lans import LANS
from .lion import Lion
from .momentum import Momentum
from .muon import Muon
from .schedule_free_adamw import ScheduleFreeAdamW
from .sinkhorn import Sinkhorn

__all__ = [
    "LANS",
    "AdEMAMix",
    "Adam",
    "AdamOffload",
    "AdamW",
    "DGCMomentum",
    "Lamb",
    "Lion",
    "Momentum",
    "Muon",
    "ScheduleFreeAdamW",
    "Sinkhorn",
]
# In the order in which commands, MindFormers and tests list them; `create_optimizer` reads this list.
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
    Sinkhorn,
    Adam,
    Momentum,
)
FusedOptimizer.all_optimizers = OPTIMIZERS
