"""The optimizers that are compared: each as its authors or a package publish it, and the same rule of this package.

A row has the name, what it needs, both optimizers with their settings, and how far their weights may be apart after the
last step, in units of the largest move: what float32 and another order of operations explain. Where the rules differ by
design there is no bound, and a note says how. Rows of Muon, which updates matrices alone, are in muon_rows.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from makers import DECAY, RATE, adamw_without_correction, mxnet_lans, of, ours, paddle_dgc

BETAS, EPS = (0.9, 0.95), 1e-8
# In a step a weight moves by the rate, 1e-3. Weights near 1 have a last place of 1.2e-7, and the order of operations
# decides about one or two of these.
ROUNDING = 3e-4


@dataclasses.dataclass(frozen=True)
class Row:
    """A comparison.

    Attributes:
        theirs: From lists of parameters, of a torch module or of MindSpore, to the published optimizer, or of arrays to
            a published formula.
        ours: From MindSpore's parameters to this package's.
        at_most: The largest difference that is not an error; None if the rules differ by design.
        needs: The module of the published optimizer; "torch" where that is enough, "numpy" for a formula.
        on: What it updates: "all" tensors, the "matrices" of the layers alone, or the "tables" of characters.
        file: Of a repository that is not on the package index, the file that defines the optimizer.
        in_float32: Whether the published code computes in float32 what it would in bfloat16.
        gradient_scale: The factor of all recorded gradients.
        note: What differs by design, or which setting makes both equal.
    """

    theirs: Callable[..., Any]
    ours: Callable[[list], Any]
    at_most: float | None = ROUNDING
    needs: str = "torch"
    on: str = "all"
    file: str = ""
    in_float32: bool = False
    gradient_scale: float = 1.0
    note: str = ""


MOMENTS: dict[str, Any] = {"beta1": BETAS[0], "beta2": BETAS[1]}
TORCH: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS}
timm_lamb = functools.partial(of, "timm.optim", "Lamb", lr=RATE, betas=BETAS, eps=1e-6)
ademamix = functools.partial(
    of, "pytorch_optimizer", "AdEMAMix", lr=RATE, betas=(*BETAS, 0.9999), weight_decay=DECAY, weight_decouple=True
)
deepspeed = functools.partial(of, "deepspeed.ops.adam", "DeepSpeedCPUAdam", **TORCH)
# With these, the number of elements to send is the same rounded down, as in Paddle, and rounded to the nearest.
SPARSITY, RAMPUP = [0.8125, 0.9375], 100
dgc = functools.partial(
    ours, "DGCMomentum", momentum=0.9, rampup_begin_step=0, rampup_step=RAMPUP, min_compress_numel=1
)

ROWS = {
    "torch AdamW": Row(
        of("torch.optim", "AdamW", **TORCH, weight_decay=DECAY),
        ours("AdamW", betas=BETAS, weight_decay=DECAY),
    ),
    "torch AdamW, amsgrad": Row(
        of("torch.optim", "AdamW", **TORCH, weight_decay=DECAY, amsgrad=True),
        ours("AdamW", betas=BETAS, weight_decay=DECAY, amsgrad=True),
    ),
    "torch Adam": Row(
        of("torch.optim", "Adam", **TORCH, weight_decay=0.01),
        ours("Adam", **MOMENTS, weight_decay=0.01, corrects_eps=True),
        note="equal with corrects_eps=True",
    ),
    "torch Adam, amsgrad": Row(
        of("torch.optim", "Adam", **TORCH, weight_decay=0.01, amsgrad=True),
        ours("Adam", **MOMENTS, weight_decay=0.01, corrects_eps=True, use_amsgrad=True),
        note="equal with corrects_eps=True",
    ),
    "torch NAdam": Row(
        of("torch.optim", "NAdam", **TORCH, momentum_decay=1e6),
        ours("Adam", **MOMENTS, use_nesterov=True, corrects_eps=True),
        None,
        note="divides the momentum by 1 - beta1^(t+1), where MindSpore's nn.Adam and this package have 1 - beta1^t",
    ),
    "torch SGD, Nesterov": Row(
        of("torch.optim", "SGD", lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
        ours("Momentum", momentum=0.9, use_nesterov=True, weight_decay=0.01),
    ),
    "torch SGD, dampening": Row(
        of("torch.optim", "SGD", lr=RATE, momentum=0.9, dampening=0.5, weight_decay=0.01),
        ours("Momentum", momentum=0.9, dampening=0.5, weight_decay=0.01),
    ),
    "schedulefree AdamWScheduleFree": Row(
        of("schedulefree", "AdamWScheduleFree", **TORCH, weight_decay=DECAY, warmup_steps=20),
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
        ademamix(),
        ours("AdEMAMix", betas=(*BETAS, 0.9999), weight_decay=DECAY),
        needs="pytorch_optimizer",
    ),
    "pytorch_optimizer AdEMAMix, t_alpha_beta3=100": Row(
        ademamix(t_alpha_beta3=100),
        ours("AdEMAMix", betas=(*BETAS, 0.9999), weight_decay=DECAY, warmup_steps=100),
        needs="pytorch_optimizer",
        note="equal with warmup_steps=100",
    ),
    "pytorch_optimizer Lamb": Row(
        of("pytorch_optimizer", "Lamb", lr=RATE, betas=BETAS, eps=1e-6, weight_decay=0.0, adam_debias=True),
        ours("Lamb", **MOMENTS, bias_correction=False, weight_norm_bounds=(None, 10.0)),
        needs="pytorch_optimizer",
        note="equal with adam_debias=True there, and without bias correction, bounds and decay as in the settings",
    ),
    "deepspeed CPUAdam": Row(
        deepspeed(weight_decay=DECAY),
        ours("AdamW", betas=BETAS, weight_decay=DECAY),
        needs="deepspeed",
    ),
    "deepspeed CPUAdam, adamw_mode=False": Row(
        deepspeed(weight_decay=0.01, adamw_mode=False),
        ours("Adam", **MOMENTS, weight_decay=0.01, corrects_eps=True),
        needs="deepspeed",
        note="equal with corrects_eps=True",
    ),
    "timm Lamb": Row(
        timm_lamb(weight_decay=DECAY, max_grad_norm=0.5),
        ours("Lamb", **MOMENTS, weight_decay=DECAY, grad_clip_norm=0.5),
        needs="timm",
    ),
    "timm Lamb, no decay": Row(
        timm_lamb(weight_decay=0.0, max_grad_norm=None),
        ours("Lamb", **MOMENTS, always_adapt=False),
        needs="timm",
        note="equal with always_adapt=False",
    ),
    "timm Lamb, trust_clip": Row(
        timm_lamb(weight_decay=DECAY, max_grad_norm=None, trust_clip=True),
        ours("Lamb", **MOMENTS, weight_decay=DECAY, trust_ratio_bounds=(None, 1.0)),
        needs="timm",
        note="equal with trust_ratio_bounds=(None, 1.0)",
    ),
    "mxnet LANS": Row(
        mxnet_lans(learning_rate=RATE, **MOMENTS, epsilon=1e-6, wd=DECAY),
        ours("LANS", **MOMENTS, weight_decay=DECAY),
        needs="mxnet",
    ),
    "Paddle DGC": Row(
        paddle_dgc(SPARSITY, RAMPUP, decay=0.01),
        dgc(sparsity=SPARSITY, weight_decay=0.01),
        needs="numpy",
        note="equal with min_compress_numel=1, as the formula has no such limit",
    ),
    "Paddle DGC, Nesterov": Row(
        paddle_dgc(SPARSITY, RAMPUP, use_nesterov=True),
        dgc(sparsity=SPARSITY, use_nesterov=True),
        needs="numpy",
    ),
    "Paddle DGC, Nesterov and decay": Row(
        paddle_dgc(SPARSITY, RAMPUP, decay=0.01, use_nesterov=True),
        dgc(sparsity=SPARSITY, weight_decay=0.01, use_nesterov=True),
        None,
        needs="numpy",
        note="its second addend of the residual is the gradient without the decay",
    ),
    "Paddle DGC, sparsity 0.999": Row(
        paddle_dgc([0.999], RAMPUP),
        dgc(sparsity=[0.999]),
        None,
        needs="numpy",
        note="it rounds the number of elements to send down, and sends none of a tensor of less than 1,000",
    ),
    "mindformers AdamW": Row(
        of("mindformers.core.optim.adamw", "AdamW", learning_rate=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY),
        ours("AdamW", betas=BETAS, weight_decay=DECAY),
        needs="mindformers",
    ),
    "nn.Adam": Row(
        of("mindspore.nn", "Adam", learning_rate=RATE, weight_decay=0.01),
        ours("Adam", in_group=False, weight_decay=0.01),
        2e-4,
        needs="mindspore",
        note="MindSpore multiplies the powers of beta up in float32",
    ),
    "nn.Adam, Nesterov": Row(
        of("mindspore.nn", "Adam", learning_rate=RATE, weight_decay=0.01, use_nesterov=True),
        ours("Adam", in_group=False, weight_decay=0.01, use_nesterov=True),
        2e-4,
        needs="mindspore",
        note="as nn.Adam",
    ),
    "nn.AdamOffload": Row(
        of("mindspore.nn", "AdamOffload", learning_rate=RATE, weight_decay=0.01),
        ours("AdamOffload", in_group=False, weight_decay=0.01),
        2e-4,
        needs="mindspore",
        note="as nn.Adam",
    ),
    "nn.SGD, dampening": Row(
        of("mindspore.nn", "SGD", learning_rate=RATE, momentum=0.9, dampening=0.5, weight_decay=0.01),
        ours("Momentum", in_group=False, dampening=0.5, weight_decay=0.01),
        needs="mindspore",
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
}
