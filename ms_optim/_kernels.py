"""The kernel table: which operator runs a rule on a device, and why there may be none.

The only file that names ``ops.Custom``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib

import mindspore as ms
from mindspore import ops
from mindspore.ops.signature import make_sig, sig_rw

FOLDER = pathlib.Path(__file__).resolve().parent
WHITE_LIST = "MS_CUSTOM_AOT_WHITE_LIST"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        library: File name of the shared library, in the package's folder.
        function: Name of the operator in it.
        remedy: What to do where the library is missing.
    """

    library: str
    function: str
    remedy: str


def _cpu(function: str) -> Kernel:
    return Kernel(
        "libms_optim_cpu.so",
        function,
        "it is built at installation, which needs a C++17 compiler with OpenMP (Debian: apt install g++): install one, "
        "then install ms_optim again",
    )


KERNELS = {
    ("adamw", "CPU"): _cpu("ms_optim_adamw"),
    ("adamw_amsgrad", "CPU"): _cpu("ms_optim_adamw_amsgrad"),
    ("lamb", "CPU"): _cpu("ms_optim_lamb"),
}

# The order in which a launch reads and writes its numbers: see ops/include/step.h.
SUMS = ("gradient", "weight", "direction", "direction2", "directions_dot")
STATISTICS = ("gradient_norm", "weight_norm", "update_norm", "trust_ratio", "finite")
GRADIENT_STAGE, MOMENTS_STAGE, APPLY_STAGE, COMMIT_STAGE = 1, 2, 4, 8
ALL_STAGES = 15
SKIP_NONFINITE, MASTERS, STOCHASTIC_ROUNDING, CENTRALIZES = 1, 2, 4, 8


def why_not(rule: str, device: str) -> str | None:
    """Say why a rule has no fused kernel on a device.

    Args:
        rule: Name of the rule.
        device: Device target, "CPU", "GPU" or "Ascend".

    Returns:
        The reason with its remedy, or None where the kernel is there.
    """
    kernel = KERNELS.get((rule, device))
    if kernel is None:
        return f"ms_optim has no kernel for the rule '{rule}' on {device}"
    path = FOLDER / kernel.library
    if not path.exists():
        return f"{path} is missing: {kernel.remedy}"
    allowed = os.environ.get(WHITE_LIST)
    if allowed is not None and pathlib.Path(allowed).resolve() not in path.parents:
        return f"{WHITE_LIST} admits only libraries in {allowed}: set {WHITE_LIST}={FOLDER}"
    try:
        library(kernel.library)
    except OSError as error:
        return f"{path} does not load: {error}"
    return None


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Load one of the package's shared libraries, for what is asked of it besides running a step."""
    loaded = ctypes.CDLL(str(FOLDER / name))
    loaded.ms_optim_instruction_set.restype = ctypes.c_char_p
    return loaded


def operator(rule: str, device: str, written: tuple[bool, ...], tensors: int) -> ops.Custom:
    """Make the operator that runs one launch.

    Args:
        rule: Name of the rule.
        device: Device target.
        written: For each input in order, whether the kernel writes it.
        tensors: How many tensors the launch takes.

    Returns:
        A primitive that takes the inputs and returns the launch's sums, float64 of shape (tensors, len(SUMS)).
    """
    kernel = KERNELS[rule, device]
    primitive = ops.Custom(
        f"{FOLDER / kernel.library}:{kernel.function}",
        out_shape=(tensors, len(SUMS)),
        out_dtype=ms.float64,
        func_type="aot",
    )
    # Without this a graph drops the operator, whose output nobody needs, and the parameters never change.
    primitive.add_prim_attr("side_effect_mem", True)
    # Without this, reads of a parameter before and after the step may be taken for one.
    primitive.set_signatures(
        tuple(make_sig(f"x{i}", sig_rw.RW_WRITE if w else sig_rw.RW_READ) for i, w in enumerate(written))
    )
    return primitive
