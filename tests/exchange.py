"""What the processes of test_exchange.py and the test itself agree on."""

import numpy as np
from harness import NUMPY

# The first is compressed with places of 4 bytes, the last is not compressed.
SHAPES = [(70_000,), (4097,), (13, 11), (), (7,)]
STEPS, POISONED = 8, 5
RAMP = {"momentum": 0.5, "rampup_begin_step": 2, "rampup_step": 4, "sparsity": (0.75, 0.99), "min_compress_numel": 16}
CLIPPED = {
    "use_nesterov": True,
    "grad_clip_norm": 3.0,
    "weight_decay": 0.1,
    "skip_nonfinite": True,
    "wire_dtype": "float16",
}
CONFIGURATIONS = {
    "aot": ("float32", {**RAMP, "backend": "aot"}),
    "aot, clipped": ("bfloat16", {**RAMP, **CLIPPED, "backend": "aot"}),
    "composite, clipped": ("float32", {**RAMP, **CLIPPED, "backend": "composite"}),
}
# In the middle of the ramp of these all is saved, and another optimizer goes on from it.
RESUMED, RESUMING = 3, (("pynative", "aot"), ("pynative", "composite, clipped"))
HOSTS = 2
# What hosts of so many processes run, one after the other. MindSpore's operators are called one by one on those of two.
RUNS = {
    1: [("pynative", "aot"), ("graph", "aot, clipped"), ("graph", "composite, clipped")],
    2: [("pynative", name) for name in ("aot, clipped", "composite, clipped")],
}


def drawn(seed, dtype):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(s)).astype(NUMPY[dtype]).astype(np.float64) for s in SHAPES]


def start(dtype):
    return drawn(0, dtype)


def gradients(step, rank, dtype):
    return drawn([1, step, rank], dtype)
