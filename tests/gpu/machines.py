"""What runs the CUDA operators: a GPU, with buffers from PyTorch; where there is none, their sources on the host.

Either takes NumPy arrays and changes those that an operator writes, as the CPU operators do.
"""

import ctypes
import os
import subprocess

import numpy as np
import reference
from sources import ROOT, TESTS
from tolerances import TOLERANCE

from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import CODE_BLOCK, SharedFlag
from ms_optim.kernels.libraries import call_of

SIZES = [(), (1,), (7,), (127,), (129,), (255,), (257,), (4097,), (13, 11), (6, 4, 3, 3), (3, 8193)]
# Operators that keep numbers to weigh steps by, which stand before the weights.
WEIGH_STEPS = tuple(name for name, (formula, *_) in reference.KERNELS.items() if formula.weighs_steps)
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
# Some distributions' compilers check that longjmp() returns to a caller; the stand-in's threads jump to each other.
FLAGS += ["-U_FORTIFY_SOURCE"]
INCLUDE = [f"-I{TESTS / 'gpu' / 'standin'}", f"-I{ROOT / 'ops' / 'include'}", f"-I{ROOT / 'ops' / 'cuda'}"]


def workspace_bytes(library, function, arrays):
    """Ask how large the workspace of a launch is."""
    stages, shared, _ = (extent - 1 for extent in arrays[0].shape)
    first = 11 if function.endswith("dgc_momentum") else 8
    first += 2 * bool(shared & SharedFlag.BETA_POWERS) + function.endswith(WEIGH_STEPS)
    n = arrays[1].shape[0]
    shapes = [t.shape for t in arrays[first : first + n]] if stages != kernels.COMMIT_STAGE else [(0,)] * n
    rule = function.removeprefix("ms_optim_")
    return libraries.workspace_bytes(library, rule, shapes, bool(shared & SharedFlag.CENTRALIZES))


def workspace_of(library, function, arrays):
    """Make the workspace of a launch, full of what nobody should read."""
    return np.full(workspace_bytes(library, function, arrays), 0xA5, np.uint8)


class StandIn:
    """The sources of ops/cuda, compiled for the host: see tests/gpu/standin."""

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "standin.so"))

    @staticmethod
    def build(folder, ops=ROOT / "ops"):
        include = [INCLUDE[0], f"-I{ops / 'include'}", f"-I{ops / 'cuda'}"]
        source = ["-x", "c++", ops / "cuda" / "entry.cu"]
        command = ["g++", *FLAGS, "-O2", "-fPIC", "-shared", *include, *source, "-o", folder / "standin.so"]
        subprocess.run(list(map(str, command)), check=True)

    def call(self, function, arrays):
        """Run an operator."""
        arrays = [*arrays, workspace_of(self.library, function, arrays)]
        return call_of(self.library, function, arrays, [a.ctypes.data for a in arrays])()


class Cuda:
    """A GPU and the library that was built for it."""

    def __init__(self):
        import torch

        self.torch = torch
        self.library = ctypes.CDLL(str(libraries.FOLDER / "libms_optim_cuda.so"))

    def call(self, function, arrays):
        """Run an operator on copies of the arrays on the GPU, and copy them back."""
        torch = self.torch
        arrays = [*arrays, workspace_of(self.library, function, arrays)]
        there = [torch.from_numpy(np.frombuffer(a.tobytes() or b"\0", np.uint8).copy()).cuda() for a in arrays]
        stream = torch.cuda.current_stream().cuda_stream
        status = call_of(self.library, function, arrays, [t.data_ptr() for t in there], stream)()
        torch.cuda.synchronize()
        for a, t in zip(arrays[:-1], there):
            a[...] = np.frombuffer(t.cpu().numpy().tobytes()[: a.nbytes], a.dtype).reshape(a.shape)
        return status


def why_no_gpu():
    """Say why the operators cannot run on a GPU here; None where they can."""
    if not (libraries.FOLDER / "libms_optim_cuda.so").exists():
        return "libms_optim_cuda.so was not built: that needs MS_OPTIM_CUDA=1 and nvcc"
    try:
        import torch
    except ImportError:
        return "PyTorch, whose buffers the operators are given, is not installed"
    return None if torch.cuda.is_available() else "there is no GPU"


def backwards(run):
    """Run something with threads and blocks of the stand-in in reverse order."""
    os.environ["MS_OPTIM_STANDIN_BACKWARDS"] = "1"
    try:
        return run()
    finally:
        del os.environ["MS_OPTIM_STANDIN_BACKWARDS"]


def meaningless(case, arrays):
    """Return, by the indices of arrays of codes, which codes lie in a block whose scale is not finite.

    All of them stand for NaN or infinity. They are bits of NaNs, which each device makes in its own way.
    """
    narrow = [i for i, a in enumerate(arrays) if i >= 8 and a.dtype.kind in "iu" and a.itemsize < 4]
    coded = [i for i in narrow if i not in case.remainders]
    sums = max(i for i, a in enumerate(arrays) if a.dtype == np.float64)
    scales = arrays[sums - len(coded) : sums]
    found = {}
    for i, scale in zip(coded, scales):
        block = CODE_BLOCK // (4 if arrays[i].itemsize == 2 else 1)
        assert (scale.dtype, scale.size) == (np.float32, -(-arrays[i].size // block)), case.name
        found[i] = np.repeat(~np.isfinite(scale), block)[: arrays[i].size].reshape(arrays[i].shape)
    return found


def compare(case, actual, expected, exactly):
    """Compare what two devices make of a launch: sums to rounding, all else to the bit or to rounding."""
    assert actual[0] == expected[0] == 0, case.name
    lost = meaningless(case, expected[1])
    for i, (a, b) in enumerate(zip(actual[1], expected[1])):
        sums = b.dtype == np.float64 or (b.ndim == 2 and b.shape[1] == len(kernels.STATISTICS))
        a, b = a.astype(np.float64), b.astype(np.float64)
        same = (a == b) | ((a != a) & (b != b)) | lost.get(i, False)
        if exactly and not sums:
            assert same.all(), f"{case.name}: array {i}: {np.flatnonzero(~same)[:5]}"
            continue
        # Of one NaN or infinity too many, or too few, nothing is close.
        largest = np.max(np.abs(b[np.isfinite(b)]), initial=1e-30)
        with np.errstate(invalid="ignore"):
            close = same | (np.abs(a - b) <= TOLERANCE["statistics"] * largest)
        assert close.all(), f"{case.name}: array {i}: {np.flatnonzero(~close)[:5]}"
