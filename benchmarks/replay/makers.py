"""What makes the optimizers of both sides of a row, each from a list of parameters."""

# Peers are imported where they are installed.
# pyright: reportMissingImports=false

import __future__

import ast
import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

import ms_optim

RATE, DECAY = 1e-3, 0.1


def of(module, name, **settings):
    """Return what makes an optimizer of another package, which is imported only then."""

    def make(params):
        return getattr(importlib.import_module(module), name)(params, **settings)

    return make


def by_muon(module, name, **settings):
    """Return the same for an optimizer that asks of each group whether it has matrices."""

    def make(params):
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        return of(module, name, **settings)(groups if others else groups[:1])

    return make


def published(name, *others, keyword=None, **settings):
    """Return what makes an optimizer from a file of its authors.

    Only these definitions of the file are run, without their annotations, and classes without what registers them.
    """

    def make(params, folder, file):
        import torch

        if not torch.distributed.is_initialized():  # some ask for their group of processes: this one alone
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        body = ast.parse((folder / file).read_text()).body
        found = [node for node in body if getattr(node, "name", None) in (name, *others)]
        for node in found:
            if isinstance(node, ast.ClassDef):
                node.decorator_list = []
        scope: dict[str, Any] = {"torch": torch, "math": math, "dist": torch.distributed, "Tensor": torch.Tensor}
        scope |= {"Optimizer": torch.optim.Optimizer, "TYPE_CHECKING": False, "override": lambda method: method}
        exec(compile(ast.Module(found, []), file, "exec", __future__.annotations.compiler_flag), scope)
        return scope[name](**{keyword: params}, **settings) if keyword else scope[name](params, **settings)

    return make


def from_checkout(name, hook=None, **settings):
    """Return what makes an optimizer of a package that is not on the package index, or not in this version.

    Args:
        name: The name of its class.
        hook: The name of the class of its argument weight_update_hook, if it has one.
        settings: Its other arguments.
    """

    def make(params, folder, file):
        module = file.removesuffix(".py").replace("/", ".")
        root = module.split(".")[0]
        forget(root)
        sys.path.insert(0, str(folder))
        own = {}
        if hook is not None:
            own["weight_update_hook"] = getattr(importlib.import_module(f"{root}.weight_update_hooks"), hook)()
        optimizer = of(module, name, **settings, **own)(params)
        sys.path.remove(str(folder))
        forget(root)
        return optimizer

    return make


def forget(root):
    """Have a package imported anew: from a checkout, or as it is installed."""
    for known in [known for known in sys.modules if known.split(".")[0] == root]:
        del sys.modules[known]


def mindformers_muon(params):
    """Return the step that MindFormers' Muon takes with each tensor.

    Its class asks for a model with latent attention, and it multiplies bfloat16 numbers, which MindSpore cannot do on a
    CPU: products are float32 here.
    """
    module = importlib.import_module("mindformers.core.optim.muon")
    module.mstype = SimpleNamespace(float32=ms.float32, bfloat16=ms.float32)  # pyright: ignore[reportAttributeAccessIssue]
    momenta = [Parameter(Tensor(np.zeros(p.shape, np.float32)), name=f"momentum.{p.name}") for p in params]
    momentum, rate, rms = (Tensor([x], ms.float32) for x in (0.95, RATE, 0.2))
    alone = {"op": 1, "tp": 1, "tp_dim": -1, "rank_id": 0, "op_group": "", "tp_group": ""}
    alone |= {"muon_split_fn": lambda name, x: [x], "muon_merge_fn": lambda name, parts: parts[0]}

    def step(gradients):
        for p, m, g in zip(params, momenta, gradients):
            module._apply_muon_update(g, m, momentum, True, p, rate, DECAY, rms, param_name=p.name, **alone)

    return step


def mxnet_lans(**settings):
    """Return what makes MXNet's LANS; MXNet still has NumPy's former name of bool."""

    def make(weights):
        np.bool = np.bool_  # pyright: ignore[reportAttributeAccessIssue]
        mxnet = importlib.import_module("mxnet")
        optimizer = mxnet.optimizer.LANS(**settings)
        own = [mxnet.nd.array(w) for w in weights]
        states = [optimizer.create_state(i, w) for i, w in enumerate(own)]

        def step(gradients):
            optimizer.update(list(range(len(own))), own, [mxnet.nd.array(g) for g in gradients], states)
            for w, moved in zip(weights, own):
                w[...] = moved.asnumpy()

        return step

    return make


def paddle_dgc(sparsity, rampup_step, momentum=0.9, decay=0.0, use_nesterov=False):
    """Return the formula of Paddle's deep gradient compression on one process, as in phi/kernels/gpu/dgc_kernel.cu."""

    def make(weights):
        states = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
        taken = 0

        def step(gradients):
            nonlocal taken
            stage = min(taken * len(sparsity) // rampup_step, len(sparsity) - 1)
            ratio, taken = np.float32(1) - np.float32(sparsity[stage]), taken + 1
            for w, (u, v), g in zip(weights, states, gradients):
                decayed = g + np.float32(decay) * w
                if use_nesterov:
                    u[...] = np.float32(momentum) * (u + decayed)
                    v += u + g
                else:
                    u[...] = np.float32(momentum) * u + decayed
                    v += u
                sent = np.argsort(-np.abs(v), axis=None, kind="stable")[: int(g.size * ratio)]
                w.flat[sent] -= np.float32(RATE) * v.flat[sent]
                u.flat[sent] = v.flat[sent] = 0

        return step

    return make


def ours(name, *, in_group=True, rate=RATE, **settings):
    """Return what makes an optimizer of this package; parameters in a group are decayed whatever their names."""

    def make(params):
        return getattr(ms_optim, name)([{"params": params}] if in_group else params, rate, **settings)

    return make


def adamw_without_correction(params):
    """Return AdamW as nn.AdamWeightDecay: no bias correction, and no decay of what normalizes."""
    spared = [p for p in params if "beta" in p.name or "gamma" in p.name]
    decayed = [p for p in params if "beta" not in p.name and "gamma" not in p.name]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    groups.append({"order_params": params})
    return ms_optim.AdamW(groups, RATE, eps=1e-6, weight_decay=DECAY, bias_correction=False)
