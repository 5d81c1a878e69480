"""Times one optimizer step on the tensors of a model, compared with other installed packages.

Each row runs in a separate process, which first checks two steps against float64 arithmetic. Then it alternates with
the process of the first row, a few steps each, and ratios are computed within each turn. Therefore a machine whose
speed varies over time favours no row. The memory bandwidth is measured between rows.

    python benchmarks/step_cpu.py                      all rows that can run here
    python benchmarks/step_cpu.py --rows adamw torch   only rows whose name starts with one of these
    python benchmarks/step_cpu.py --tensors small      400 tensors of 1,000 elements instead of GPT-2 small
    python benchmarks/step_cpu.py --threads 1 2        each row on one thread and on two, alternately
    python benchmarks/step_cpu.py --json step.json     also writes the figures to a file, which bars.py draws
"""

# Peers are measured where they are installed.
# pyright: reportMissingImports=false

import argparse
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

LAYER = [
    (768,),
    (768,),
    (2304, 768),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (3072, 768),
    (3072,),
    (768, 3072),
    (768,),
]
# What there is to update, and which tensors of it are compared with float64.
TENSORS = {
    "gpt2-small": ([(50257, 768), (1024, 768), *LAYER * 12, (768,), (768,)], [1, 2, 6, 11]),
    "small": ([(1000,)] * 400, [0, 399]),
    "tiny": ([(100,)] * 10_000, [0, 9_999]),
    "matrices": ([(128, 128)] * 126, [0, 125]),
    "queries": ([(768, 768)] * 8, [0, 7]),
    "vocabulary": ([(50257, 768)], [0]),
    # The large one in float64 would take more memory than there is beside another row: its last neighbour is compared.
    "embedding": ([(250_000, 768), (1000,)], [1]),
}

RATE, DECAY, BETA1, BETA2, EPS = 1e-3, 0.01, 0.9, 0.999, 1e-8
BETA3, ALPHA, LION_BETA2 = 0.9999, 5.0, 0.99
MUON_MOMENTUM, MUON_COEFFICIENTS, MUON_STEPS = 0.95, (3.4445, -4.7750, 2.0315), 5
NORMALIZATIONS, SINKHORN_SCALE = 11, 0.18
HEADS = 12
EMBEDDINGS = [(50257, 768), (1024, 768)]  # which AdamW has where Muon has the matrices
CHECK_STEPS = 2
# Of the largest move: weights are some 1e-1 and Lamb moves them by 1e-5, so rounding alone is worth 1e-4 of a move.
ALLOWED = 1e-3
# Low-precision states carry the noise of their rounding: a unit at most, which of a very small element is a part of any
# size. There it is the root mean square of the error that is held, not the largest.
NOISE_ALLOWED = {"adamw 8bit": 0.05, "adamw bfloat16 states": 0.005, "muon 8bit": 0.05}
NOISE_ALLOWED |= {"bfloat16 weights, split8 masters": 0.005}
NOISE_ALLOWED |= {f"bfloat16 weights, {kind} masters, 8bit": 0.05 for kind in ("float32", "split", "split8")}
# Products of bfloat16 numbers: 15 of them follow each other, each rounded by up to 2^-9.
NOISE_ALLOWED |= dict.fromkeys(("muon bfloat16", "torch Muon + AdamW", "pytorch_optimizer Muon"), 0.05)


# ---- What the rows should compute, in float64 --------------------------------------------------------------------


def adam(w, g, t, m, v, bias_correction=True):
    """Update the moments and return Adam's direction."""
    m[...] = BETA1 * m + (1 - BETA1) * g
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    if not bias_correction:
        return m / (np.sqrt(v) + EPS)
    return m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + EPS)


def expect_adamw(w, g, t, m, v):
    """AdamW."""
    return w - RATE * (adam(w, g, t, m, v) + DECAY * w)


def expect_adam(w, g, t, m, v):
    """Adam with bias corrections folded into the rate, without decay; eps is negligible for gradients of this size."""
    m[...] = BETA1 * m + (1 - BETA1) * g
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    return w - RATE * np.sqrt(1 - BETA2**t) / (1 - BETA1**t) * m / (np.sqrt(v) + EPS)


def expect_adam_offload(w, g, t, m, v):
    """Adam with L2 decay."""
    return expect_adam(w, g + DECAY * w, t, m, v)


def expect_torch_adam(w, g, t, m, v):
    """Adam with L2 decay; eps is added after the bias correction."""
    return w - RATE * adam(w, g + DECAY * w, t, m, v)


def expect_momentum(w, g, t, v):
    """SGD with momentum and L2 decay."""
    v[...] = BETA1 * v + g + DECAY * w
    return w - RATE * v


def expect_nesterov(w, g, t, m, v):
    """Adam with L2 decay and Nesterov momentum."""
    g = g + DECAY * w
    m[...] = BETA1 * m + (1 - BETA1) * g
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    rate = RATE * np.sqrt(1 - BETA2**t) / (1 - BETA1**t)
    return w - rate * (BETA1 * m + (1 - BETA1) * g) / (np.sqrt(v) + EPS)


def expect_lans(w, g, t, m, v):
    """LANS."""
    g = g / np.linalg.norm(g)
    c = adam(w, g, t, m, v) + DECAY * w
    s = g / (np.sqrt(v / (1 - BETA2**t)) + EPS) + DECAY * w
    moved = BETA1 * c / np.linalg.norm(c) + (1 - BETA1) * s / np.linalg.norm(s)
    return w - RATE * np.linalg.norm(w) * moved


def expect_uncorrected(w, g, t, m, v):
    """What nn.AdamWeightDecay computes: AdamW without bias correction."""
    return w - RATE * (adam(w, g, t, m, v, bias_correction=False) + DECAY * w)


def expect_lamb(w, g, t, m, v):
    """Lamb."""
    u = adam(w, g, t, m, v) + DECAY * w
    return w - RATE * np.linalg.norm(w) / np.linalg.norm(u) * u


def expect_lamb_of_pytorch_optimizer(w, g, t, m, v):
    """Lamb as in pytorch_optimizer: bias correction only in the rate, and the weight's norm limited to 10."""
    u = adam(w, g, t, m, v, bias_correction=False) + DECAY * w
    return w - RATE / (1 - BETA1**t) * min(np.linalg.norm(w), 10.0) / np.linalg.norm(u) * u


def expect_cautious(w, g, t, m, v):
    """AdamW with cautious decay."""
    u = adam(w, g, t, m, v)
    return w - RATE * (u + DECAY * np.where(np.sign(u) * np.sign(w) < 0, 0.0, w))


def expect_braked(w, g, t, m, v):
    """AdamW which keeps half of a growth of matrices' norms."""
    moved = expect_adamw(w, g, t, m, v)
    if w.ndim < 2:
        return moved
    before, after = np.linalg.norm(w), np.linalg.norm(moved)
    return moved * ((before + after) / 2 / after if after > before else 1.0)


def expect_muon(w, g, t, m, v):
    """Muon for matrices, AdamW for the rest."""
    if w.ndim < 2 or w.shape in EMBEDDINGS:
        return expect_adamw(w, g, t, m, v)
    m[...] = MUON_MOMENTUM * m + g
    return w - RATE * (orthogonalized(g + MUON_MOMENTUM * m) + DECAY * w)


def expect_heads(w, g, t, m, v):
    """Muon which takes the rows of each head as a matrix."""
    m[...] = MUON_MOMENTUM * m + g
    u = np.concatenate([orthogonalized(head) for head in np.split(g + MUON_MOMENTUM * m, HEADS)])
    return w - RATE * (u + DECAY * w)


def orthogonalized(u):
    """Return the update of a matrix by Muon."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / np.linalg.norm(x)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(MUON_STEPS):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    x = x.T if u.shape[0] > u.shape[1] else x
    return 0.2 * np.sqrt(max(u.shape)) * x


def expect_lion(w, g, t, m, v):
    """Lion, which needs no second state."""
    u = np.sign(BETA1 * m + (1 - BETA1) * g)
    m[...] = LION_BETA2 * m + (1 - LION_BETA2) * g
    return w - RATE * (u + DECAY * w)


def expect_sinkhorn(w, g, t, m):
    """Sinkhorn without decay, whose rows are all far from 0."""
    m[...] = MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g
    u = MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g
    for k in range(NORMALIZATIONS):
        u /= np.sqrt(np.square(u).sum(1 - k % 2, keepdims=True))
    return w - RATE * SINKHORN_SCALE * np.sqrt(u.shape[1]) * u


def expect_ademamix(w, g, t, m, v, slow):
    """AdEMAMix without warm-up."""
    slow[...] = BETA3 * slow + (1 - BETA3) * g
    m[...] = BETA1 * m + (1 - BETA1) * g
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    mixed = m / (1 - BETA1**t) + ALPHA * slow
    return w - RATE * (mixed / (np.sqrt(v / (1 - BETA2**t)) + EPS) + DECAY * w)


def expect_schedule_free(w, g, t, z, v):
    """Schedule-Free AdamW with a constant rate: c is 1/t."""
    if t == 1:
        z[...] = w
    v[...] = BETA2 * v + (1 - BETA2) * g * g
    n = g / (np.sqrt(v / (1 - BETA2**t)) + EPS) + DECAY * w
    w = w + (z - w) / t + RATE * (BETA1 * (1 - 1 / t) - 1) * n
    z[...] = z - RATE * n
    return w


def expect_authors_schedule_free(w, g, t, z, v):
    """Schedule-Free AdamW of its authors' package, which leaves the direction of z in the gradient."""
    before = w if t == 1 else z.copy()
    moved = expect_schedule_free(w, g, t, z, v)
    g[...] = (before - z) / RATE
    return moved


def expect_dgc(w, g, t, u, r):
    """DGCMomentum with one process, compressing from the start."""
    u[...] = BETA1 * u + g + DECAY * w
    if w.size < 16_384:
        return w - RATE * u
    r[...] = r + u
    k = round(0.001 * w.size)
    sent = np.abs(r) >= np.partition(np.abs(r), w.size - k, axis=None)[w.size - k]
    moved = w - RATE * np.where(sent, r, 0)
    u[sent] = r[sent] = 0
    return moved


# ---- Rows ---------------------------------------------------------------------------------------------------------


def tensors(name):
    """Return weights and gradients, which are about 1e-2 so that eps does not matter, and copies of those checked."""
    rng = np.random.default_rng(0)
    shapes, checked = TENSORS[name]
    weights = [rng.standard_normal(s, np.float32) * np.float32(0.02) for s in shapes]
    gradients = [rng.standard_normal(s, np.float32) * np.float32(0.01) for s in shapes]
    return weights, gradients, {i: (weights[i].copy(), gradients[i].copy()) for i in checked}


def mindspore_row(make, expect, mode="graph", weights_dtype="float32"):
    """Return a function that builds a MindSpore optimizer's step, of weights and gradients of a dtype."""

    def build(name, launch):
        import mindspore as ms

        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        before = peak_bytes()
        weights, gradients, checked = tensors(name)
        dtype = getattr(ms, weights_dtype)
        params = [ms.Parameter(ms.Tensor(w).astype(dtype), name=f"w{i}") for i, w in enumerate(weights)]
        given = tuple(ms.Tensor(g).astype(dtype) for g in gradients)
        del weights, gradients
        if dtype != ms.float32:
            held = {i: (params[i].float().asnumpy(), given[i].float().asnumpy()) for i in checked}
            checked = {i: (w.copy(), g.copy()) for i, (w, g) in held.items()}
        optimizer = make(params)

        def step():
            optimizer(given)
            params[-1].data_ptr()  # waits until all has been done, and calls no operator

        if launch:
            # The package's inside: a step is this, after it has checked its tensors. Addresses are of what stays alive.
            table = optimizer._path.addresses.filled(given)
            optimizer._path.addresses.filled = lambda gradients: table

            def step():
                optimizer._path.run_by_address(optimizer.global_step, given)

        def read(i):
            masters = len(getattr(optimizer, "masters", ())) > 0
            return optimizer._held.weights(i).reshape(params[i].shape) if masters else params[i].float().asnumpy()

        return step, read, checked, before

    return build, expect


def torch_row(make, expect, clip=None):
    """Return a function that builds a torch optimizer's step."""

    def build(name, launch):
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        before = peak_bytes()
        weights, gradients, checked = tensors(name)
        params = [torch.nn.Parameter(torch.from_numpy(w)) for w in weights]
        for p, g in zip(params, gradients):
            p.grad = torch.from_numpy(g)
        optimizer = make(params)

        def step():
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()

        return step, lambda i: params[i].detach().numpy(), checked, before

    return build, expect


def ours(name, **options):
    """Make one of the package's optimizers."""

    def make(params):
        import ms_optim

        return getattr(ms_optim, name)(params, RATE, weight_decay=DECAY, eps=EPS, backend="aot", **options)

    return make


def momentum(params):
    """Make Momentum; parameters in a group are decayed whatever their names."""
    import ms_optim

    return ms_optim.Momentum([{"params": params}], RATE, BETA1, DECAY, backend="aot")


def of_bfloat16(**options):
    """Return the row of AdamW with bfloat16 weights and gradients."""
    return mindspore_row(ours("AdamW", **options), expect_adamw, "pynative", "bfloat16")


def lion(**options):
    """Make Lion, which has no eps."""

    def make(params):
        from ms_optim import Lion

        return Lion(params, RATE, (BETA1, LION_BETA2), DECAY, backend="aot", **options)

    return make


def sinkhorn(params):
    """Make Sinkhorn, for matrices alone."""
    from ms_optim import Sinkhorn

    shared = {"normalizations": NORMALIZATIONS, "scale": SINKHORN_SCALE, "backend": "aot"}
    return Sinkhorn(params, RATE, momentum=MUON_MOMENTUM, **shared)


def split_for_muon(params):
    """Return the parameters that Muon updates, and those that AdamW does."""
    matrices = [p for p in params if p.ndim > 1 and tuple(p.shape) not in EMBEDDINGS]
    ids = {id(p) for p in matrices}
    return matrices, [p for p in params if id(p) not in ids]


def muon(**options):
    """Make Muon, with AdamW's betas and eps for the rest."""

    def make(params):
        from ms_optim import Muon

        matrices, others = split_for_muon(params)
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}, {"order_params": params}]
        groups = [group for group in groups if group.get("params") != []]
        backend = {"backend": "aot", **options}
        return Muon(groups, RATE, DECAY, momentum=MUON_MOMENTUM, adamw_betas=(BETA1, BETA2), adamw_eps=EPS, **backend)

    return make


def heads_of_muon(params):
    """Make Muon by heads."""
    from ms_optim import heads

    return muon(splits={"*": heads(HEADS)})(params)


def torch_muon(params):
    """Make torch's Muon, which uses bfloat16 products, and its fused AdamW for the rest."""
    import torch

    matrices, others = split_for_muon(params)
    nesterov = {"momentum": MUON_MOMENTUM, "nesterov": True, "ns_steps": MUON_STEPS}
    made = [torch.optim.Muon(matrices, RATE, DECAY, **nesterov, adjust_lr_fn="match_rms_adamw")]
    return Several([*made, torch_adamw(others)] if others else made)


def pytorch_muon(params):
    """Make pytorch_optimizer's Muon, which uses bfloat16 products, and torch's fused AdamW for the rest."""
    from pytorch_optimizer import Muon

    matrices, others = split_for_muon(params)
    groups = [{"params": matrices, "use_muon": True}]
    made = [Muon(groups, RATE, MUON_MOMENTUM, DECAY, use_adjusted_lr=True)]
    return Several([*made, torch_adamw(others)] if others else made)


def authors_schedule_free(params):
    """Make AdamWScheduleFree of the method's authors."""
    import schedulefree

    made = schedulefree.AdamWScheduleFree(params, lr=RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    made.train()
    return made


class Several:
    """Several torch optimizers, stepped one after the other."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def step(self):
        """Run a step of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()


def muon_of_operators(params):
    """Make a straightforward Muon in MindSpore's operators, one parameter after the other."""
    from mindspore import Tensor, ops

    matrices, _ = split_for_muon(params)
    states = {id(p): (ops.zeros_like(p), ops.zeros_like(p)) for p in params}
    is_matrix, a_b_c = {id(p) for p in matrices}, [Tensor(x) for x in MUON_COEFFICIENTS]
    count = [0]

    def step(gradients):
        count[0] += 1
        for p, g in zip(params, gradients):
            m, v = states[id(p)]
            if id(p) in is_matrix:
                m = MUON_MOMENTUM * m + g
                u = g + MUON_MOMENTUM * m
                x = u.T if u.shape[0] > u.shape[1] else u
                x = x / ops.norm(x)
                a, b, c = a_b_c
                for _ in range(MUON_STEPS):
                    s = ops.matmul(x, x.T)
                    x = a * x + ops.matmul(b * s + c * ops.matmul(s, s), x)
                direction = 0.2 * max(u.shape) ** 0.5 * (x.T if u.shape[0] > u.shape[1] else x)
            else:
                m = BETA1 * m + (1 - BETA1) * g
                v = BETA2 * v + (1 - BETA2) * g * g
                direction = m / (1 - BETA1 ** count[0]) / (ops.sqrt(v / (1 - BETA2 ** count[0])) + EPS)
            states[id(p)] = (m, v)
            ops.assign_sub(p, RATE * (direction + DECAY * p))

    return step


def dgc(params):
    """Make DGCMomentum, compressing from the start."""
    from ms_optim import DGCMomentum

    return DGCMomentum(params, RATE, BETA1, 0, weight_decay=DECAY, backend="aot")


def upstream(name, **options):
    """Make one of MindSpore's optimizers."""

    def make(params):
        from mindspore import nn

        return getattr(nn, name)(params, RATE, **options)

    return make


def mindformers(params):
    """Make MindFormers' AdamW."""
    from mindformers.core.optim import AdamW

    return AdamW.get_actual_adamw_cls(False)(params, RATE, (BETA1, BETA2), EPS, DECAY)


def torch_adamw(params):
    """Make torch's fused AdamW."""
    import torch

    return torch.optim.AdamW(params, RATE, (BETA1, BETA2), EPS, DECAY, fused=True)


def torch_fused(name, **options):
    """Make another fused optimizer of torch, with L2 decay."""

    def make(params):
        import torch

        return getattr(torch.optim, name)(params, RATE, weight_decay=DECAY, fused=True, **options)

    return make


def deepspeed(params):
    """Make DeepSpeed's CPUAdam; it compiles itself on first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, adamw_mode=True)


def pytorch_lamb(params):
    """Make pytorch_optimizer's Lamb."""
    from pytorch_optimizer import Lamb

    return Lamb(params, RATE, (BETA1, BETA2), DECAY, weight_decouple=False, eps=EPS)


def of_pytorch_optimizer(name, **options):
    """Make one of pytorch_optimizer's optimizers, with foreach if it supports it."""

    def make(params):
        import inspect

        import pytorch_optimizer

        cls = getattr(pytorch_optimizer, name)
        foreach = {"foreach": True} if "foreach" in inspect.signature(cls).parameters else {}
        return cls(params, RATE, weight_decay=DECAY, **foreach, **options)

    return make


# Name: what it needs, its row, the bytes that a parameter's update moves at least.
ROWS = {
    "adamw graph": ("mindspore", mindspore_row(ours("AdamW", loss_scale=1.0), expect_adamw), 28),
    "adamw pynative": ("mindspore", mindspore_row(ours("AdamW"), expect_adamw, "pynative"), 28),
    # The bound is wide, so that what is expected is the same; the work is, too.
    "adamw clip": ("mindspore", mindspore_row(ours("AdamW", grad_clip_norm=1000.0), expect_adamw), 32),
    "adamw bfloat16 states": ("mindspore", mindspore_row(ours("AdamW", state_dtype="bfloat16"), expect_adamw), 20),
    "adamw 8bit": ("mindspore", mindspore_row(ours("AdamW", state_dtype="8bit"), expect_adamw), 16),
    "bfloat16 weights, float32 masters": ("mindspore", of_bfloat16(), 30),
    "bfloat16 weights, split masters": ("mindspore", of_bfloat16(master_weights="split"), 26),
    "bfloat16 weights, split8 masters": ("mindspore", of_bfloat16(master_weights="split8"), 24),
    "bfloat16 weights, float32 masters, 8bit": ("mindspore", of_bfloat16(state_dtype="8bit"), 18),
    "bfloat16 weights, split masters, 8bit": (
        "mindspore",
        of_bfloat16(master_weights="split", state_dtype="8bit"),
        14,
    ),
    "bfloat16 weights, split8 masters, 8bit": (
        "mindspore",
        of_bfloat16(master_weights="split8", state_dtype="8bit"),
        12,
    ),
    "coupled adam": ("mindspore", mindspore_row(ours("Adam"), expect_adam_offload), 28),
    "momentum": ("mindspore", mindspore_row(momentum, expect_momentum), 20),
    "adam_offload": ("mindspore", mindspore_row(ours("AdamOffload"), expect_adam_offload), 28),
    "adam_offload nesterov": (
        "mindspore",
        mindspore_row(ours("AdamOffload", use_nesterov=True), expect_nesterov),
        28,
    ),
    "lans": ("mindspore", mindspore_row(ours("LANS"), expect_lans), 48),
    "lamb graph": ("mindspore", mindspore_row(ours("Lamb"), expect_lamb), 40),
    "lamb pynative": ("mindspore", mindspore_row(ours("Lamb"), expect_lamb, "pynative"), 40),
    "adamw cautious": ("mindspore", mindspore_row(ours("AdamW", decay="cautious"), expect_cautious), 28),
    "adamw radial brake": (
        "mindspore",
        mindspore_row(ours("AdamW", weight_norm="radial_brake"), expect_braked, "pynative"),
        40,
    ),
    "adamw average": ("mindspore", mindspore_row(ours("AdamW", average_decay=0.999), expect_adamw), 36),
    "lion": ("mindspore", mindspore_row(lion(), expect_lion), 20),
    "lion 8bit": ("mindspore", mindspore_row(lion(state_dtype="8bit"), expect_lion), 14),
    "ademamix": ("mindspore", mindspore_row(ours("AdEMAMix"), expect_ademamix), 36),
    "sinkhorn": ("mindspore", mindspore_row(sinkhorn, expect_sinkhorn), 48),
    "schedule_free": ("mindspore", mindspore_row(ours("ScheduleFreeAdamW"), expect_schedule_free), 28),
    "muon": ("mindspore", mindspore_row(muon(), expect_muon), 20),
    "muon bfloat16": ("mindspore", mindspore_row(muon(ns_dtype="bfloat16"), expect_muon), 20),
    "heads of muon": ("mindspore", mindspore_row(heads_of_muon, expect_heads), 20),
    "muon 8bit": ("mindspore", mindspore_row(muon(state_dtype="8bit"), expect_muon), 14),
    "muon of operators": ("mindspore", mindspore_row(muon_of_operators, expect_muon, "pynative"), 20),
    "dgc graph": ("mindspore", mindspore_row(dgc, expect_dgc), 24),
    "nn.Adam": ("mindspore", mindspore_row(upstream("Adam", eps=EPS), expect_adam), 28),
    "nn.AdamOffload": ("mindspore", mindspore_row(upstream("AdamOffload", eps=EPS), expect_adam), 28),
    "nn.AdamWeightDecay": (
        "mindspore",
        mindspore_row(upstream("AdamWeightDecay", eps=EPS, weight_decay=DECAY), expect_uncorrected),
        28,
    ),
    "mindformers graph": ("mindformers", mindspore_row(mindformers, expect_adamw), 28),
    "mindformers pynative": ("mindformers", mindspore_row(mindformers, expect_adamw, "pynative"), 28),
    "torch fused AdamW": ("torch", torch_row(torch_adamw, expect_adamw), 28),
    "torch fused Adam": ("torch", torch_row(torch_fused("Adam", betas=(BETA1, BETA2), eps=EPS), expect_torch_adam), 28),
    "torch fused SGD": ("torch", torch_row(torch_fused("SGD", momentum=BETA1), expect_momentum), 20),
    "torch clip + fused": ("torch", torch_row(torch_adamw, expect_adamw, clip=1000.0), 40),
    "deepspeed CPUAdam": ("deepspeed", torch_row(deepspeed, expect_adamw), 28),
    "pytorch_optimizer Lion": (
        "pytorch_optimizer",
        torch_row(of_pytorch_optimizer("Lion", betas=(BETA1, LION_BETA2), weight_decouple=True), expect_lion),
        20,
    ),
    "pytorch_optimizer AdEMAMix": (
        "pytorch_optimizer",
        torch_row(
            of_pytorch_optimizer("AdEMAMix", betas=(BETA1, BETA2, BETA3), alpha=ALPHA, eps=EPS, weight_decouple=True),
            expect_ademamix,
        ),
        36,
    ),
    "schedulefree AdamWScheduleFree": (
        "schedulefree",
        torch_row(authors_schedule_free, expect_authors_schedule_free),
        28,
    ),
    "torch Muon + AdamW": ("torch", torch_row(torch_muon, expect_muon), 20),
    "pytorch_optimizer Muon": ("pytorch_optimizer", torch_row(pytorch_muon, expect_muon), 20),
    "pytorch_optimizer Lamb": ("pytorch_optimizer", torch_row(pytorch_lamb, expect_lamb_of_pytorch_optimizer), 40),
}


# ---- Measuring ----------------------------------------------------------------------------------------------------


def peak_bytes():
    """Return the process's peak resident memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def off(name, expect, start, gradient, reached):
    """Return the error of a weight after the checked steps, relative to its largest update."""
    w, g = start.astype(np.float64), gradient.astype(np.float64)
    states = [np.zeros_like(w) for _ in range(expect.__code__.co_argcount - 3)]
    for t in range(1, CHECK_STEPS + 1):
        w = expect(w, g, t, *states)
    error = np.abs(reached - w)
    error = np.sqrt(np.mean(error**2)) if name in NOISE_ALLOWED else np.max(error)
    return float(error / np.max(np.abs(w - start)))


def work(name, tensors_name, launch):
    """Check one row, and time steps on requests from standard input; print results as JSON."""
    build, expect = ROWS[name][1]
    step, read, checked, before = build(tensors_name, launch)
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: building the row is not a step
    first = time.perf_counter()
    step()
    first = time.perf_counter() - first
    for _ in range(CHECK_STEPS - 1):
        step()
    worst = max(off(name, expect, w, g, read(i)) for i, (w, g) in checked.items())
    answer({"first": first, "error": worst, "peak": peak_bytes() - before})
    for line in sys.stdin:
        step()
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        answer({"seconds": statistics.median(times)})


def answer(result):
    """Send a result to the requesting process."""
    print("RESULT", json.dumps(result), flush=True)


class Row:
    """A row in a separate process, which is stopped between its turns, because some packages' threads never sleep.

    Attributes:
        first: Seconds of the first step.
        error: The error of the checked steps, relative to the largest update.
        peak: Peak memory of the process in bytes.
    """

    def __init__(self, name, tensors_name, threads, launch):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", name, "--tensors", tensors_name, *["--launch"] * launch],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = self._answered()
        self.first, self.error, self.peak = found["first"], found["error"], found["peak"]
        allowed = NOISE_ALLOWED.get(name, ALLOWED)
        if not self.error <= allowed:
            self.close()
            raise RuntimeError(f"wrong: off by {self.error:.1e} of the largest move, {allowed} allowed")
        self.process.send_signal(signal.SIGSTOP)

    def turn(self, steps):
        """Return the median seconds of some steps."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        seconds = self._answered()["seconds"]
        self.process.send_signal(signal.SIGSTOP)
        return seconds

    def _answered(self):
        said = "it ended without output"
        for line in self.process.stdout or ():
            if line.startswith("RESULT "):
                return json.loads(line[7:])
            said = line.strip() or said
        self.close()
        raise RuntimeError(said)

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.wait()


def figures_of(name, threads, row, pairs, moved, parameters, speed):
    """Return a row's figures by name.

    Args:
        name: What the row is.
        threads: How many threads it ran on.
        row: The row.
        pairs: For each turn its seconds, and those of the first row.
        moved: Bytes that an update moves at least, for each parameter.
        parameters: How many parameters there are.
        speed: Bytes that `a += b` moves in a second.
    """
    seconds = statistics.median(own for own, _ in pairs)
    return {
        "name": name,
        "threads": threads,
        "seconds": seconds,
        "ratio": statistics.median(own / first for own, first in pairs),
        "moved": moved,
        "share": moved * parameters / seconds / speed,
        "first": row.first,
        "peak": row.peak,
        "error": row.error,
    }


def main():
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="only rows whose name starts with one of these")
    parser.add_argument("--tensors", choices=TENSORS, default="gpt2-small", help="tensors to update")
    parser.add_argument("--turns", type=int, default=15, help="number of turns of a row and the first row")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[os.cpu_count()],
        help="numbers of threads; ratios are relative to the first",
    )
    parser.add_argument("--json", help="file for the figures, which bars.py draws")
    parser.add_argument(
        "--launch", action="store_true", help="read addresses once instead of each step; only for this package's rows"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.tensors, arguments.launch)
        return

    from rich.console import Console
    from rich.table import Table

    from ms_optim.cli.bench import bandwidth

    console = Console(width=max(120, Console().width))
    wanted = tuple(name.lower() for name in arguments.rows or [""])
    chosen = {n: row for n, row in ROWS.items() if n.lower().startswith(wanted)}
    if arguments.launch:
        chosen = {n: row for n, row in chosen.items() if row[0] == "mindspore" and not n.startswith("nn.")}
    shapes = TENSORS[arguments.tensors][0]
    parameters = sum(int(np.prod(shape)) for shape in shapes)
    rows, speeds, failed, base = {}, [], {}, None
    most = max(arguments.threads)
    try:
        for (name, (needs, _, _)), threads in itertools.product(chosen.items(), arguments.threads):
            if importlib.util.find_spec(needs) is None:
                failed[name] = f"{needs} is not installed"
                continue
            if name == "sinkhorn" and any(len(shape) < 2 for shape in shapes):
                failed[name] = "it is for matrices: --tensors vocabulary"
                continue
            speeds.append(bandwidth(most))
            if len(arguments.threads) > 1 and threads == arguments.threads[0] and base is not None:
                base.close()
                base = None
            try:
                row = Row(name, arguments.tensors, threads, arguments.launch)
            except RuntimeError as error:
                failed[name] = str(error)
                continue
            base = base or row
            pairs = []
            for _ in range(arguments.turns):
                first = base.turn(arguments.steps)
                pairs.append((first if row is base else row.turn(arguments.steps), first))
            rows[name, threads] = row, pairs
            nanoseconds = statistics.median(seconds for seconds, _ in pairs) / parameters * 1e9
            console.print(f"{name}, {threads} threads: {nanoseconds:.3f} ns a parameter", highlight=False)
            if row is not base:
                row.close()
    finally:
        if base is not None:
            base.close()
    if base is None:
        sys.exit(f"nothing ran: {failed}")

    speed = statistics.median(speeds)
    title = (
        f"{arguments.tensors}: {len(shapes)} tensors, {parameters / 1e6:.1f}M parameters; on {most} "
        f"threads a += b moves {speed / 1e9:.1f} GB/s ({min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f})"
    )
    table = Table(title=title, title_justify="left")
    for heading in (
        "step",
        "threads",
        "ms",
        "ns/param",
        "÷ first",
        "B/param",
        "of a += b",
        "first step",
        "memory",
        "error",
    ):
        table.add_column(heading, justify="left" if heading == "step" else "right", no_wrap=True)
    figures = [
        figures_of(name, threads, row, pairs, chosen[name][2], parameters, speed)
        for (name, threads), (row, pairs) in rows.items()
    ]
    for row in figures:
        table.add_row(
            row["name"],
            str(row["threads"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['seconds'] / parameters * 1e9:.3f}",
            f"{row['ratio']:.2f}",
            str(row["moved"]),
            f"{row['share']:.0%}",
            f"{row['first']:.2f} s",
            f"{row['peak'] / 1e9:.2f} GB",
            f"{row['error']:.0e}",
        )
    console.print(table)
    for name, reason in failed.items():
        console.print(f"not run: {name}: {reason}", highlight=False, soft_wrap=True)
    if arguments.json:
        found = {"tensors": arguments.tensors, "parameters": parameters, "bandwidths": speeds, "rows": figures}
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
