"""A graph of MindSpore's operators keeps few bytes an element: MindSpore's CPU kernels keep no index tables for it."""

import json
import subprocess
import sys

import pytest

# Prints by how many bytes an element of the weights the process has grown after two steps.
PROGRAM = """
import json
import pathlib
import sys

import mindspore as ms
import numpy as np

import ms_optim

name, arguments = sys.argv[1], json.loads(sys.argv[2])
ms.set_context(mode=ms.GRAPH_MODE)
rows = np.random.default_rng(0).standard_normal((16, 256, 1024)).astype(np.float32)
dtype = ms.bfloat16 if "master_weights" in arguments else ms.float32
weights = [ms.Parameter(ms.Tensor(x, dtype), name=f"w{i}") for i, x in enumerate(rows)]
gradients = tuple(ms.Tensor(x, dtype) for x in rows)
optimizer = getattr(ms_optim, name)(weights, backend="composite", **arguments)


def resident(kind):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


before = resident("VmRSS")
for _ in range(2):
    optimizer(gradients)
ms.runtime.synchronize()
print((resident("VmHWM") - before) / rows.size)
"""


DGC = {"momentum": 0.9, "rampup_begin_step": 0, "sparsity": [0.99]}


@pytest.mark.parametrize(
    ("name", "arguments", "most"),
    [
        # Each limit is 12 bytes above what was measured; one index table has 16 bytes an element, or more.
        ("AdamW", {"grad_clip_norm": 1.0, "average_decay": 0.9}, 97),
        ("AdamW", {"state_dtype": "8bit", "master_weights": "split8"}, 150),
        ("Lamb", {"state_dtype": "4bit", "decay": "cautious"}, 137),
        ("Sinkhorn", {}, 91),
        ("DGCMomentum", DGC, 111),
    ],
    ids=["average", "split8", "cautious", "Sinkhorn", "DGC"],
)
def test_a_graph_keeps_few_bytes_an_element(name, arguments, most):
    command = [sys.executable, "-c", PROGRAM, name, json.dumps({"learning_rate": 1e-3, **arguments})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < most
