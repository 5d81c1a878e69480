"""Times one optimizer step on a GPU, on the tensors of GPT-2 small, compared with torch's fused AdamW.

The operators are called through their C interface on PyTorch's buffers, without MindSpore, which need not have been
built for GPUs. Each row is first checked against float64 arithmetic. The bandwidth is that of a copy, measured
alternately with the rows; a row's bytes are those that it must read and write.

    python benchmarks/step_gpu.py
    python benchmarks/step_gpu.py --rows adamw lamb --turns 20

It requires a GPU, PyTorch (pip install "ms_optim[bench]"), and ms_optim installed with MS_OPTIM_CUDA=1.
"""

# PyTorch is measured where it is installed.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import argparse
import ctypes
import statistics
import sys

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_cpu import (
    ALLOWED,
    BETA1,
    BETA2,
    CHECK_STEPS,
    DECAY,
    EPS,
    NOISE_ALLOWED,
    RATE,
    TENSORS,
    expect_adamw,
    expect_lamb,
    expect_lans,
    off,
)

from ms_optim.kernels import interface, libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import CODE_BLOCK, SharedFlag
from ms_optim.states.formats import FORMATS

INF = float("inf")
# Rule, constants after the shared ones, flags; dtypes of weight, gradient and states; the bytes of an element.
ADAMW, LAMB, LANS = ("adamw", (), 4), ("lamb", (0.0, INF, 0.0, INF), 1), ("lans", (INF, 0.0, INF), 0)
ROWS = {
    "adamw": (ADAMW, "float32", "float32", "float32", {}, 28),
    "adamw clip": (ADAMW, "float32", "float32", "float32", {"clip": 1.0}, 32),
    "adamw bfloat16, masters": (ADAMW, "bfloat16", "bfloat16", "float32", {}, 30),
    "adamw 8bit": (ADAMW, "float32", "float32", "8bit", {}, 16),
    "adamw bfloat16 states": (ADAMW, "float32", "float32", "bfloat16", {}, 20),
    # A second pass waits for the norms of the first.
    "lamb": (LAMB, "float32", "float32", "float32", {}, 40),
    "lans": (LANS, "float32", "float32", "float32", {}, 48),
}
EXPECTED = {"adamw": expect_adamw, "lamb": expect_lamb, "lans": expect_lans}
SHAPES, CHECKED = TENSORS["gpt2-small"]


class Row:
    """One of this package's operators and its buffers on the GPU."""

    def __init__(self, torch, name):
        (rule, constants, rule_flags), weight, gradient, states, options, self.element_bytes = ROWS[name]
        self.torch, self.function = torch, f"ms_optim_{rule}"
        self.library = libraries.library(libraries.LIBRARIES["GPU"][0])
        shapes, n = SHAPES, len(SHAPES)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(scale, dtype):
            made = [torch.randn(s, generator=generator, device="cuda") * scale for s in shapes]
            return [x.to(getattr(torch, dtype)) for x in made]

        self.weights, self.gradients = normal(0.1, weight), normal(1.0, gradient)
        self.masters = [w.float() for w in self.weights] if weight != "float32" else []
        self.states, self.scales = self._states(shapes, states)
        clip = options.get("clip", 0.0)
        shared = SharedFlag.MASTERS * bool(self.masters) | SharedFlag.CLIPS * (clip > 0)
        room = libraries.workspace_bytes(self.library, rule, [tuple(s) for s in shapes], False)
        # Small arrays, in the order that the operator takes them.
        small = [
            interface.flags(kernels.ALL_STAGES, shared, rule_flags),
            interface.layout([0] * n, [1] * n, [False] * n),
            interface.constants(1.0, 0, (BETA1, BETA2, EPS, *constants), CLIP_NORM=clip),
            np.array([RATE, DECAY], np.float32),
            np.zeros((1, len(kernels.SUMS))),
        ]
        counters = [
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
            np.zeros((n, len(kernels.STATISTICS)), np.float32),
        ]
        outputs = [np.zeros((n, len(kernels.SUMS))), np.zeros(room, np.uint8)]
        small, counters, outputs = (
            [torch.from_numpy(a).cuda() for a in arrays] for arrays in (small, counters, outputs)
        )
        held = [*self.states, *self.masters, *self.scales]
        arguments = [*interface.inputs(*small, (), counters, self.weights, self.gradients, held), *outputs]
        self.kept = arguments
        self.call = self._prepared(arguments)
        self.bytes = self.element_bytes * sum(w.numel() for w in self.weights)

    def _states(self, shapes, kind):
        torch = self.torch
        if kind != "8bit":
            dtype = getattr(torch, kind)
            return [torch.zeros(s, dtype=dtype, device="cuda") for _ in range(2) for s in shapes], []
        sizes = [int(np.prod(s)) for s in shapes]
        states, scales = [], []
        for dtype in (torch.int8, torch.uint8):
            for shape, size in zip(shapes, sizes):
                coded = size >= FORMATS["8bit"].least
                states.append(torch.zeros(shape, dtype=dtype if coded else torch.float32, device="cuda"))
                if coded:
                    scales.append(torch.zeros(-(-size // CODE_BLOCK), device="cuda"))
        return states, scales

    def _prepared(self, arguments):
        """Return a call with all inputs that do not change from step to step."""
        n = len(arguments)
        shapes = [(ctypes.c_int64 * max(1, a.dim()))(*a.shape) for a in arguments]
        names = [str(a.dtype).removeprefix("torch.").encode() for a in arguments]
        taken = (
            n,
            (ctypes.c_void_p * n)(*[a.data_ptr() for a in arguments]),
            (ctypes.c_int * n)(*[a.dim() for a in arguments]),
            (ctypes.POINTER(ctypes.c_int64) * n)(*[ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes]),
            (ctypes.c_char_p * n)(*names),
        )
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        operator = getattr(self.library, self.function)
        return lambda: operator(*taken, stream, None)

    def step(self):
        """Run one step."""
        status = self.call()
        if status != 0:
            sys.exit(f"{self.function} returned {status}")

    def held(self, i):
        """Return a weight as float64."""
        tensor = self.masters[i] if self.masters else self.weights[i]
        return tensor.double().cpu().numpy()


class TorchRow:
    """torch.optim.AdamW(fused=True)."""

    element_bytes = 28

    def __init__(self, torch):
        ours = Row(torch, "adamw")
        self.weights = [torch.nn.Parameter(w.clone()) for w in ours.weights]
        self.gradients = ours.gradients
        for w, g in zip(self.weights, self.gradients):
            w.grad = g
        self.optimizer = torch.optim.AdamW(self.weights, RATE, (BETA1, BETA2), EPS, DECAY, fused=True)
        self.bytes = ours.bytes
        self.step = self.optimizer.step

    def held(self, i):
        """Return a weight as float64."""
        return self.weights[i].detach().double().cpu().numpy()


def check(name, row):
    """Check some steps of some tensors against float64; exit if they differ."""
    (rule, _, _), *_, options, _ = ROWS.get(name, ROWS["adamw"])
    before = {i: row.held(i) for i in CHECKED}
    factor = 1.0
    if "clip" in options:
        total = sum(float((g.double() ** 2).sum()) for g in row.gradients)
        factor = min(1.0, options["clip"] / total**0.5)
    for _ in range(CHECK_STEPS):
        row.step()
    for i in CHECKED:
        gradient = factor * row.gradients[i].double().cpu().numpy()
        error = off(name, EXPECTED[rule], before[i], gradient, row.held(i))
        if not error <= NOISE_ALLOWED.get(name, ALLOWED):
            sys.exit(f"{name}: tensor {i} is off by {error:.1e} of its move")


def milliseconds(torch, work, repeats=20):
    """Return the time of an operation on the GPU in milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def main():
    """Check, time and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="only rows whose name starts with one of these")
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is not installed: pip install 'ms_optim[bench]'")
    reason = kernels.why_not("adamw", "GPU")
    if reason is not None or not torch.cuda.is_available():
        sys.exit(f"Nothing to time: {reason or 'PyTorch finds no GPU'}")

    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    first = Row(torch, "adamw")
    table = Table("Row", "ms a step", "Of adamw", "GB moved", "Of a copy's bandwidth")
    chosen = [name for name in (*ROWS, "torch fused AdamW") if name.startswith(tuple(arguments.rows or ("",)))]
    for name in track(chosen, description="Rows"):
        row = Row(torch, name) if name in ROWS else TorchRow(torch)
        check(name, row)
        works = (row.step, first.step, lambda: target.copy_(source))
        turns = [[milliseconds(torch, work) for work in works] for _ in range(arguments.turns)]
        took = statistics.median(t for t, _, _ in turns)
        ratio = statistics.median(t / a for t, a, _ in turns)
        share = statistics.median(row.bytes / t * c / copied for t, _, c in turns)
        table.add_row(name, f"{took:.3f}", f"{ratio:.2f}", f"{row.bytes / 1e9:.2f}", f"{share:.0%}")
        del row
        torch.cuda.empty_cache()
    console = Console(width=max(100, Console().width))
    console.print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}")
    console.print(table)


if __name__ == "__main__":
    main()
