"""The optimizers of matrices that are compared, as rows.py has the others.

Most authors round products to bfloat16, whose noise hides all else; so their code is run with float32 products.
"""

import functools
from typing import Any

from makers import DECAY, RATE, by_muon, from_checkout, mindformers_muon, of, ours, published
from rows import BETAS, EPS, ROUNDING, Row

import ms_optim

IN_BFLOAT16 = "rounds products to bfloat16; its row with float32 products is the same code without that"
KEEPS_NORM = "keeps the norm of the orthogonalized matrix, where the paper and this package set it; see match_rms"
MUON: dict[str, Any] = {"weight_decay": DECAY, "momentum": 0.95}
ORIGINAL: dict[str, Any] = {**MUON, "adjust_lr": "original"}
NORMUON: dict[str, Any] = {**MUON, "normalize_rows": True}
DION: dict[str, Any] = {"lr": RATE, "mu": 0.95, "weight_decay": DECAY, "nesterov": True}
DION |= {"adjust_lr": "rms_norm", "use_polar_express": False}
in_float32 = functools.partial(Row, on="matrices", in_float32=True)
torch_muon = functools.partial(of, "torch.optim", "Muon", lr=RATE, **MUON, adjust_lr_fn="match_rms_adamw")
ADAMW: dict[str, Any] = {"adamw_betas": BETAS, "adamw_eps": EPS}
pytorch_optimizer = functools.partial(by_muon, "pytorch_optimizer", lr=RATE, **MUON)
NVIDIA: dict[str, Any] = {"lr": RATE, **MUON, "nesterov": True, "fp32_matmul_prec": "highest"}
nvidia = functools.partial(of, "emerging_optimizers.orthogonalized_optimizers", "Muon", **NVIDIA)
nvidia_checkout = functools.partial(from_checkout, "Muon", **NVIDIA)
held = functools.partial(ours, "Muon", momentum=0.95, weight_decay=0.0, ns_coefficients="quintic")


def with_scales_of_wide(params):
    """Return Muon with the scale root(rows / columns), which is at least 1 otherwise, in the rates of wide matrices."""
    groups = []
    for p in params:
        scale = min(1.0, p.shape[0] / p.shape[1]) ** 0.5
        groups.append({"params": [p], "lr": RATE * scale, "weight_decay": DECAY / scale})
    return ms_optim.Muon(groups, RATE, momentum=0.95, adjust_lr="original", ns_coefficients="quintic")


MUON_ROWS = {}
for name, theirs, settings, file in (
    ("torch Muon", torch_muon(), MUON, ""),
    (
        "KellerJordan/Muon",
        published("SingleDeviceMuon", "muon_update", "zeropower_via_newtonschulz5", lr=RATE, **MUON),
        ORIGINAL,
        "muon.py",
    ),
    (
        "MoonshotAI/Moonlight Muon",
        published("Muon", "zeropower_via_newtonschulz5", keyword="muon_params", lr=RATE, wd=DECAY),
        MUON,
        "examples/toy_train.py",
    ),
):
    rounded = Row(
        theirs, ours("Muon", **settings, ns_dtype="bfloat16"), None, on="matrices", file=file, note=IN_BFLOAT16
    )
    MUON_ROWS[name] = rounded
    MUON_ROWS[f"{name}, float32 products"] = in_float32(theirs, ours("Muon", **settings), file=file)
MUON_ROWS |= {
    "torch Muon, gradients times 1e-9": in_float32(
        torch_muon(),
        ours("Muon", **MUON),
        None,
        gradient_scale=1e-9,
        note="divides by 1e-7, its eps, if the norm is less",
    ),
    "torch Muon, gradients times 1e-9, eps=1e-38": in_float32(
        torch_muon(eps=1e-38), ours("Muon", **MUON), gradient_scale=1e-9
    ),
    "KellerJordan/modded-nanogpt Muon, float32 products": in_float32(
        published("Muon", "muon_update", "zeropower_via_newtonschulz5", lr=RATE, weight_decay=DECAY, mu=0.95),
        ours("Muon", **ORIGINAL, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=12),
        file="records/track_3_optimization/train_gpt_simple.py",
        note="equal with ns_coefficients=(2.0, -1.5, 0.5), ns_steps=12",
    ),
    "mindformers Muon, float32 products": in_float32(mindformers_muon, ours("Muon", **MUON), needs="mindformers"),
    "pytorch_optimizer Muon, float32 products": in_float32(
        pytorch_optimizer("Muon", use_adjusted_lr=True), ours("Muon", **MUON), needs="pytorch_optimizer"
    ),
    "pytorch_optimizer Muon and its AdamW, float32 products": Row(
        pytorch_optimizer(
            "Muon", use_adjusted_lr=True, adamw_lr=RATE, adamw_wd=DECAY, adamw_betas=BETAS, adamw_eps=EPS
        ),
        ours("Muon", **MUON, **ADAMW),
        needs="pytorch_optimizer",
        in_float32=True,
    ),
    "pytorch_optimizer NorMuon, match_rms, float32 products": in_float32(
        pytorch_optimizer("NorMuon", update_scale="match_rms", eps=1e-8),
        ours("Muon", **NORMUON),
        needs="pytorch_optimizer",
    ),
    "pytorch_optimizer NorMuon, preserve_norm, float32 products": in_float32(
        pytorch_optimizer("NorMuon", update_scale="preserve_norm", use_adjusted_lr=True, eps=1e-8),
        ours("Muon", **NORMUON),
        None,
        needs="pytorch_optimizer",
        note=KEEPS_NORM,
    ),
    "microsoft/dion Muon, float32 products": in_float32(
        from_checkout("Muon", **DION),
        ours("Muon", **MUON, ns_coefficients="quintic"),
        file="dion/muon.py",
    ),
    "microsoft/dion Muon, cautious_wd, float32 products": in_float32(
        from_checkout("Muon", **DION, cautious_wd=True),
        ours("Muon", **MUON, ns_coefficients="quintic", decay="cautious"),
        5 * ROUNDING,
        file="dion/muon.py",
        note='equal with decay="cautious"; where an update is 0 but for rounding, its sign decides about the decay',
    ),
    "microsoft/dion NorMuon, float32 products": in_float32(
        from_checkout("NorMuon", **DION),
        ours("Muon", **NORMUON, ns_coefficients="quintic"),
        None,
        file="dion/normuon.py",
        note=KEEPS_NORM,
    ),
    "emerging_optimizers Muon, shape_scaling": in_float32(
        nvidia(scale_mode="shape_scaling"),
        ours("Muon", **ORIGINAL, ns_coefficients="quintic"),
        needs="emerging_optimizers",
        note='equal with adjust_lr="original"',
    ),
    "emerging_optimizers Muon, unit_rms_norm": in_float32(
        nvidia(scale_mode="unit_rms_norm"),
        with_scales_of_wide,
        needs="emerging_optimizers",
        note='equal with adjust_lr="original" and wide matrices in groups with their own learning rate and decay',
    ),
    "emerging_optimizers MuonHyperball": in_float32(
        of("emerging_optimizers.orthogonalized_optimizers", "MuonHyperball", **NVIDIA | {"weight_decay": 0.0}),
        held(weight_norm="hyperball"),
        needs="emerging_optimizers",
        note='equal with weight_norm="hyperball"',
    ),
    "NVIDIA-NeMo/Emerging-Optimizers Muon, cubic5": in_float32(
        nvidia_checkout(coefficient_type="cubic5", extra_scale_factor=0.2),
        ours("Muon", **MUON, ns_coefficients="cubic5"),
        file="emerging_optimizers/orthogonalized_optimizers/muon.py",
    ),
    "NVIDIA-NeMo/Emerging-Optimizers Muon, RelativeUpdateHook": in_float32(
        nvidia_checkout(weight_decay=0.0, hook="RelativeUpdateHook"),
        held(weight_norm="relative"),
        file="emerging_optimizers/orthogonalized_optimizers/muon.py",
        note='equal with weight_norm="relative"',
    ),
    "NVIDIA-NeMo/Emerging-Optimizers Muon, RadialBrakeHook": in_float32(
        nvidia_checkout(weight_decay=0.0, extra_scale_factor=0.2, hook="RadialBrakeHook"),
        held(weight_norm="radial_brake"),
        file="emerging_optimizers/orthogonalized_optimizers/muon.py",
        note='equal with weight_norm="radial_brake"',
    ),
}
MUON_ROWS["NVIDIA-NeMo/Emerging-Optimizers Sinkhorn"] = Row(
    published("Sinkhorn", "_sinkhorn_balance", lr=RATE),
    ours("Sinkhorn"),
    on="tables",
    file="emerging_optimizers/embedding_optimizers/__init__.py",
)
MUON_ROWS |= {
    f"emerging_optimizers Muon, {theirs}": in_float32(
        nvidia(coefficient_type=theirs, num_ns_steps=steps, extra_scale_factor=0.2),
        ours("Muon", **MUON, ns_coefficients=name, ns_steps=steps),
        at_most,
        needs="emerging_optimizers",
    )
    for theirs, name, steps, at_most in (
        ("simple", "jordan", 5, ROUNDING),
        ("quintic", "quintic", 5, ROUNDING),
        ("polar_express", "polar_express", 8, ROUNDING),
        ("cans", "cans", 5, ROUNDING),
        # Ten iterations multiply the rounding of small singular values.
        ("deepseekv4", "deepseek_v4", 10, 3 * ROUNDING),
    )
}
