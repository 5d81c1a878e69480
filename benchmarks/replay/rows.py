"""The optimizers that are compared: each as its authors or a package publish it, and the same rule of this package.

A row has the name, what it needs, both optimizers with their settings, and how far their weights may be apart after the
last step, in units of the largest move: what float32 and another order of operations explain. Where the rules differ by
design there is no bound, and a note says how.
"""

# Peers are measured where they are installed.
# pyright: reportMissingImports=false

import ast
import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import ms_optim

RATE, DECAY, BETAS, EPS = 1e-3, 0.1, (0.9, 0.95), 1e-8
# In a step a weight moves by the rate, 1e-3. Weights near 1 have a last place of 1.2e-7, and the order of operations
# decides about one or two of these.
ROUNDING = 3e-4
IN_BFLOAT16 = "rounds products to bfloat16; its row with float32 products is the same code without that"


@dataclasses.dataclass(frozen=True)
class Row:
    """A comparison.

    Attributes:
        theirs: From lists of parameters, of a torch module or of MindSpore, to the published optimizer.
        ours: From MindSpore's parameters to this package's.
        at_most: The largest difference that is not an error; None if the rules differ by design.
        needs: The module of the published optimizer, "torch" where that is enough.
        on: What it updates: "all" tensors, or the "matrices" alone.
        file: Of a repository that is not on the package index, the file that defines the optimizer.
        in_float32: Whether the published code computes in float32 what it would in bfloat16.
        note: What differs by design, or which setting makes both equal.
    """

    theirs: Callable[..., Any]
    ours: Callable[[list], Any]
    at_most: float | None = ROUNDING
    needs: str = "torch"
    on: str = "all"
    file: str = ""
    in_float32: bool = False
    note: str = ""


def of(module, name, **settings):
    """Return what makes an optimizer of another package, which is imported only then."""

    def make(params):
        return getattr(importlib.import_module(module), name)(params, **settings)

    return make


def published(name, *others, keyword=None, **settings):
    """Return what makes an optimizer from a file of its authors: only these definitions of the file are run."""

    def make(params, path):
        import torch

        found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in (name, *others)]
        scope: dict[str, Any] = {"torch": torch, "math": math}
        exec(compile(ast.Module(found, []), str(path), "exec"), scope)
        return scope[name](**{keyword: params}, **settings) if keyword else scope[name](params, **settings)

    return make


def ours(name, *, in_group=True, **settings):
    """Return what makes an optimizer of this package; parameters in a group are decayed whatever their names."""

    def make(params):
        return getattr(ms_optim, name)([{"params": params}] if in_group else params, RATE, **settings)

    return make


def adamw_without_correction(params):
    """Return AdamW as nn.AdamWeightDecay: no bias correction, and no decay of what normalizes."""
    spared = [p for p in params if "beta" in p.name or "gamma" in p.name]
    decayed = [p for p in params if "beta" not in p.name and "gamma" not in p.name]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    groups.append({"order_params": params})
    return ms_optim.AdamW(groups, RATE, eps=1e-6, weight_decay=DECAY, bias_correction=False)


MUON: dict[str, Any] = {"weight_decay": DECAY, "momentum": 0.95}

ROWS = {
    "torch AdamW": Row(
        of("torch.optim", "AdamW", lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY),
        ours("AdamW", betas=BETAS, weight_decay=DECAY),
    ),
    "torch AdamW, amsgrad": Row(
        of("torch.optim", "AdamW", lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, amsgrad=True),
        ours("AdamW", betas=BETAS, weight_decay=DECAY, amsgrad=True),
    ),
    "torch Adam": Row(
        of("torch.optim", "Adam", lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.01),
        ours("Adam", beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.01, corrects_eps=True),
        note="equal with corrects_eps=True",
    ),
    "torch Adam, amsgrad": Row(
        of("torch.optim", "Adam", lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.01, amsgrad=True),
        ours("Adam", beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.01, corrects_eps=True, use_amsgrad=True),
        note="equal with corrects_eps=True",
    ),
    "torch SGD, Nesterov": Row(
        of("torch.optim", "SGD", lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
        ours("Momentum", momentum=0.9, use_nesterov=True, weight_decay=0.01),
    ),
    "torch SGD, dampening": Row(
        of("torch.optim", "SGD", lr=RATE, momentum=0.9, dampening=0.5, weight_decay=0.01),
        ours("Momentum", momentum=0.9, dampening=0.5, weight_decay=0.01),
    ),
    "torch Muon": Row(
        of("torch.optim", "Muon", lr=RATE, **MUON, adjust_lr_fn="match_rms_adamw"),
        ours("Muon", **MUON, ns_dtype="bfloat16"),
        None,
        on="matrices",
        note=IN_BFLOAT16,
    ),
    "schedulefree AdamWScheduleFree": Row(
        of("schedulefree", "AdamWScheduleFree", lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, warmup_steps=20),
        ours("ScheduleFreeAdamW", betas=BETAS, weight_decay=DECAY, warmup_steps=20),
        20 * ROUNDING,
        needs="schedulefree",
        note="the first of 20 steps of the warm-up moves weights by a 20th of the rate",
    ),
    "pytorch_optimizer Lion": Row(
        of("pytorch_optimizer", "Lion", lr=RATE, betas=(0.9, 0.99), weight_decay=DECAY, weight_decouple=True),
        ours("Lion", weight_decay=DECAY),
        2e-2,
        needs="pytorch_optimizer",
        note="where a momentum is 0 but for rounding, its sign decides about a whole step",
    ),
    "pytorch_optimizer AdEMAMix": Row(
        of(
            "pytorch_optimizer",
            "AdEMAMix",
            lr=RATE,
            betas=(*BETAS, 0.9999),
            alpha=5.0,
            eps=EPS,
            weight_decay=DECAY,
            weight_decouple=True,
        ),
        ours("AdEMAMix", betas=(*BETAS, 0.9999), alpha=5.0, weight_decay=DECAY),
        needs="pytorch_optimizer",
    ),
    "pytorch_optimizer Lamb": Row(
        of("pytorch_optimizer", "Lamb", lr=RATE, betas=BETAS, eps=1e-6, weight_decay=0.0, adam_debias=True),
        ours("Lamb", beta1=BETAS[0], beta2=BETAS[1], bias_correction=False, weight_norm_bounds=(None, 10.0)),
        needs="pytorch_optimizer",
        note="equal with adam_debias=True there, and without bias correction, bounds and decay as in the settings",
    ),
    "nn.Adam": Row(
        of("mindspore.nn", "Adam", learning_rate=RATE, weight_decay=0.01),
        ours("Adam", in_group=False, weight_decay=0.01),
        2e-4,
        needs="mindspore",
        note="MindSpore multiplies the powers of beta up in float32",
    ),
    "nn.Momentum": Row(
        of("mindspore.nn", "Momentum", learning_rate=RATE, momentum=0.9, weight_decay=0.01),
        ours("Momentum", in_group=False, weight_decay=0.01),
        needs="mindspore",
    ),
    "nn.AdamWeightDecay": Row(
        of("mindspore.nn", "AdamWeightDecay", learning_rate=RATE, weight_decay=DECAY),
        adamw_without_correction,
        needs="mindspore",
        note="equal with bias_correction=False, and names with beta and gamma in a group without decay",
    ),
    "KellerJordan/Muon": Row(
        published("SingleDeviceMuon", "muon_update", "zeropower_via_newtonschulz5", lr=RATE, **MUON),
        ours("Muon", **MUON, adjust_lr="original", ns_dtype="bfloat16"),
        None,
        on="matrices",
        file="muon.py",
        note=IN_BFLOAT16,
    ),
    "MoonshotAI/Moonlight Muon": Row(
        published("Muon", "zeropower_via_newtonschulz5", keyword="muon_params", lr=RATE, wd=DECAY),
        ours("Muon", **MUON, ns_dtype="bfloat16"),
        None,
        on="matrices",
        file="examples/toy_train.py",
        note=IN_BFLOAT16,
    ),
}
ROWS |= {
    f"{name}, float32 products": dataclasses.replace(
        row, at_most=ROUNDING, in_float32=True, ours=ours("Muon", **settings), note=""
    )
    for name, row, settings in (
        ("torch Muon", ROWS["torch Muon"], MUON),
        ("KellerJordan/Muon", ROWS["KellerJordan/Muon"], {**MUON, "adjust_lr": "original"}),
        ("MoonshotAI/Moonlight Muon", ROWS["MoonshotAI/Moonlight Muon"], MUON),
    )
}
