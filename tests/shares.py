"""What the processes of test_shares.py and the test itself agree on."""

from unittest import mock

import numpy as np
from cases import as_matrix
from harness import tensor
from mindspore import Parameter

import ms_optim
from ms_optim.kernels import table as kernels

# The first is most of it all and is cut; the last are not decayed and in a group of their own, centralized.
SHAPES = [(300, 256), (7,), (5, 2048), (), (13, 11), (40, 3, 5, 5)]
STEPS, SAVED, POISONED = 6, 3, 4
LOW = {"master_weights": False, "stochastic_rounding": True, "state_dtype": "8bit"}
ON_OPERATORS = {"backend": "composite"}
CONFIGURATIONS = {
    "adamw": (ms_optim.AdamW, "float32", {}),
    "adamw, clipped": (ms_optim.AdamW, "float32", {"grad_clip_norm": 3.0, "skip_nonfinite": True, "amsgrad": True}),
    "adamw, masters": (ms_optim.AdamW, "bfloat16", {"state_dtype": "bfloat16"}),
    "adamw, rounded": (ms_optim.AdamW, "bfloat16", LOW),
    "adamw, averaged": (ms_optim.AdamW, "bfloat16", {"average_decay": 0.9, "average_warmup": True}),
    "adamw, split": (ms_optim.AdamW, "bfloat16", {"master_weights": "split"}),
    "adamw, split8": (ms_optim.AdamW, "bfloat16", {"master_weights": "split8", "state_dtype": "8bit"}),
    "offload": (ms_optim.AdamOffload, "float16", {"use_nesterov": True, "skip_nonfinite": True}),
    "lamb": (ms_optim.Lamb, "float32", {}),
    "lamb, clipped": (ms_optim.Lamb, "bfloat16", {"grad_clip_norm": 3.0, "skip_nonfinite": True}),
    "lans": (ms_optim.LANS, "float32", {"skip_nonfinite": True}),
    "muon": (ms_optim.Muon, "float32", {"normalize_rows": True, "splits": {"w0": (ms_optim.heads(2, (30, 20)), 200)}}),
    "muon, 8bit": (ms_optim.Muon, "bfloat16", {"state_dtype": "8bit", "grad_clip_norm": 3.0}),
    "adamw, 4bit": (ms_optim.AdamW, "bfloat16", {**LOW, "state_dtype": "4bit", "amsgrad": True}),
    "muon, 4bit": (ms_optim.Muon, "float32", {"state_dtype": "4bit"}),
    "adamw, operators": (ms_optim.AdamW, "bfloat16", {**LOW, "grad_clip_norm": 3.0, **ON_OPERATORS}),
    "lamb, operators": (
        ms_optim.Lamb,
        "bfloat16",
        {
            "master_weights": "split8",
            "state_dtype": "4bit",
            "average_decay": 0.9,
            "skip_nonfinite": True,
            **ON_OPERATORS,
        },
    ),
    "adamw, on host": (ms_optim.AdamW, "bfloat16", {"state_dtype": "8bit", "offload": True}),
    "muon, operators": (ms_optim.Muon, "float32", {"normalize_rows": True, "state_dtype": "8bit", **ON_OPERATORS}),
    "adamw, hyperball": (
        ms_optim.AdamW,
        "bfloat16",
        {"weight_norm": "hyperball", "state_dtype": "8bit", "master_weights": "split", **ON_OPERATORS},
    ),
    "adamw, relative": (
        ms_optim.AdamW,
        "bfloat16",
        {"weight_norm": "relative", "state_dtype": "8bit", "master_weights": "split", "grad_clip_norm": 3.0},
    ),
    "lion, hyperball": (ms_optim.Lion, "float32", {"weight_norm": "hyperball"}),
    "muon, hyperball": (ms_optim.Muon, "float32", {"weight_norm": "hyperball", "weight_decay": 0.0}),
    "lans, 8bit": (ms_optim.LANS, "float32", {"grad_clip_norm": 3.0, "state_dtype": "8bit"}),
}
# Formats that the second group has in place of the optimizer's.
OF_SECOND_GROUP = {
    "adamw, split8": {"state_dtype": "float32", "master_weights": True},
    "lamb, operators": {"state_dtype": "8bit", "master_weights": "split"},
}
_LISTED = {optimizer for optimizer, *_ in CONFIGURATIONS.values()}
CONFIGURATIONS |= {
    cls.__name__: (cls, "float32", {})
    for cls in ms_optim.OPTIMIZERS
    if "shard_states" not in cls.refuses and cls not in _LISTED
}
# What so many workers run, and what two of them save and resume in between.
RUNS = {
    2: [
        *(("pynative", name) for name in CONFIGURATIONS),
        ("graph", "adamw, rounded"),
        ("graph", "lamb, clipped"),
    ],
    4: [
        ("pynative", "adamw, averaged"),
        ("pynative", "adamw, rounded"),
        ("graph", "ScheduleFreeAdamW"),
        ("pynative", "muon, 8bit"),
        ("graph", "muon"),
        ("graph", "adamw, operators"),
        ("pynative", "muon, operators"),
    ],
}
RESUMED = ("adamw, averaged", "adamw, rounded", "adamw, 4bit", "adamw, masters", "adamw, split8", "lamb", "muon")
RESUMED += ("ScheduleFreeAdamW", "lamb, operators", "adamw, hyperball", "lion, hyperball", "muon, hyperball")
ELEMENTWISE = [
    name
    for name, (optimizer, _, arguments) in CONFIGURATIONS.items()
    if not optimizer.rules[0].is_layerwise and "weight_norm" not in arguments
]


def drawn(seed, name):
    optimizer, dtype, _ = CONFIGURATIONS[name]
    rng = np.random.default_rng(seed)
    shapes = SHAPES if optimizer.dimensions is None else map(as_matrix, SHAPES)
    return [tensor(rng.standard_normal(shape), dtype) for shape in shapes]


def build(name, **shared):
    """Return the parameters and the optimizer of a configuration."""
    optimizer, _, arguments = CONFIGURATIONS[name]
    params = [Parameter(w, name=f"w{i}") for i, w in enumerate(drawn(0, name))]
    decay = 0.0 if arguments.get("weight_norm") == "hyperball" else 0.1
    groups = [{"params": params[:2], "weight_decay": decay}, {"params": params[2:], "grad_centralization": True}]
    groups[1] |= OF_SECOND_GROUP.get(name, {})
    # offload=True keeps copies of weights that are not in host memory.
    device = "GPU" if "offload" in arguments else kernels.device_target()
    with mock.patch.object(kernels, "device_target", return_value=device):
        return params, optimizer(groups, 0.01, **arguments, **shared)


def checkpoint(folder, run):
    """Return where what a run came to is saved."""
    folder.mkdir(exist_ok=True)
    return folder / f"{run.replace('/', '.')}.ckpt"


def gradients(name, step):
    _, dtype, arguments = CONFIGURATIONS[name]
    given = drawn([1, step], name)
    if step == POISONED and arguments.get("skip_nonfinite"):
        given[4] = tensor(np.full(SHAPES[4], np.nan), dtype)
    return given
