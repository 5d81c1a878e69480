"""The modules of version 0.1.0 that have moved to a folder; their old names go on working in imports."""

import importlib
import sys

FORMER = {
    **{
        name: f"optimizers.{name}"
        for name in (
            "adam_offload",
            "adamw",
            "ademamix",
            "dgc_momentum",
            "lamb",
            "lans",
            "lion",
            "muon",
            "schedule_free_adamw",
        )
    },
    "averaged_weights": "training.averaged_weights",
    "callbacks": "training.monitor",
    "compression": "dgc.optimizer",
    "factory": "optimizers.by_name",
    "for_scheduler": "base.learning_rates",
    "local_compression": "local_steps.compression",
    "muon_groups": "groups.muon",
    "qk_clip": "training.qk_clip",
    "released_train_step": "training.released_train_step",
    "residuals": "checkpoints.fold",
    "simulated_workers": "training.simulated_workers",
}


def keep(package: str) -> None:
    """Let each former name import the module of today; where a public function has the name, it stays the function."""
    for former, today in FORMER.items():
        module = importlib.import_module(f".{today}", package)
        sys.modules[f"{package}.{former}"] = module
        vars(sys.modules[package]).setdefault(former, module)
