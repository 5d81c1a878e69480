"""The kernel table: which operator runs a rule on a device, and why there may be none.

The only file that names ``ops.Custom``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops.auto_generate import AdamW
from mindspore.ops.signature import make_sig, sig_rw

FOLDER = pathlib.Path(__file__).resolve().parent
WHITE_LIST = "MS_CUSTOM_AOT_WHITE_LIST"
OPP_PATH = "ASCEND_OPP_PATH"  # where CANN's operators are
CUSTOM_OPP_PATH = "ASCEND_CUSTOM_OPP_PATH"  # where others are, separated by colons


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


def _ascend(function: str) -> Kernel:
    return Kernel(
        "ascend/vendors/ms_optim/op_api/lib/libcust_opapi.so",
        function,
        "build it, where CANN is, with python -m ms_optim build-ascend --soc-version NAME",
    )


KERNELS = {
    ("adamw", "CPU"): _cpu("ms_optim_adamw"),
    ("adamw_amsgrad", "CPU"): _cpu("ms_optim_adamw_amsgrad"),
    ("lamb", "CPU"): _cpu("ms_optim_lamb"),
    ("lans", "CPU"): _cpu("ms_optim_lans"),
    ("adam_offload", "CPU"): _cpu("ms_optim_adam_offload"),
    ("dgc_momentum", "CPU"): _cpu("ms_optim_dgc_momentum"),
    # Of several launches the first; see ms_optim/_ascend.py.
    ("adamw", "Ascend"): _ascend("MsOptimAdamw"),
    ("adamw_amsgrad", "Ascend"): _ascend("MsOptimAdamwAmsgrad"),
    ("lamb", "Ascend"): _ascend("MsOptimLambMoments"),
    ("lans", "Ascend"): _ascend("MsOptimLansMoments"),
    # What AdamOffload does there with what its host returns.
    ("delta", "Ascend"): _ascend("MsOptimDelta"),
}

# Copies between tensors and what workers exchange.
COPIES = {
    ("pack", "CPU"): _cpu("ms_optim_pack"),
    ("unpack", "CPU"): _cpu("ms_optim_unpack"),
}

# The order in which a launch reads and writes its numbers: see ops/include/step.h.
SUMS = ("gradient", "weight", "direction", "direction2", "directions_dot")
STATISTICS = ("gradient_norm", "weight_norm", "update_norm", "trust_ratio", "finite")
GRADIENT_STAGE, MOMENTS_STAGE, APPLY_STAGE, COMMIT_STAGE = 1, 2, 4, 8
ALL_STAGES = 15
SKIP_NONFINITE, MASTERS, STOCHASTIC_ROUNDING, CENTRALIZES = 1, 2, 4, 8
BY_ADDRESS, BETA_POWERS, LOCKS, RETURNED, SHARES = 16, 32, 64, 128, 256
MAX_STATES = 3
CODE_BLOCK = 256  # 8-bit codes that share one scale
LEAST_CODED = 4096  # elements of the smallest tensor whose states are worth codes
DTYPES = {ms.float32: 0, ms.float16: 1, ms.bfloat16: 2, ms.int8: 3, ms.uint8: 4}


def state_dtype(kind: str, k: int, size: int) -> ms.dtype.Type:
    """Return the dtype of the k-th state of a tensor of some size, for the argument `state_dtype`."""
    if kind == "bfloat16":
        return ms.bfloat16
    if kind == "8bit" and size >= LEAST_CODED:
        return ms.int8 if k == 0 else ms.uint8
    return ms.float32


def device_target() -> str:
    """Return the device that MindSpore runs on: "CPU", "GPU" or "Ascend"."""
    return ms.get_context("device_target")


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
    if device == "Ascend":
        return None if os.environ.get(OPP_PATH) else f"{OPP_PATH} is not set: source CANN's set_env.sh"
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


def operator(
    rule: str, device: str, written: tuple[bool, ...], outputs: list[tuple[tuple, ms.dtype.Type]]
) -> ops.Custom:
    """Make the operator that runs one launch.

    Args:
        rule: Name of the rule, or of a copy.
        device: Device target whose kernel it is; the operator is placed there whatever the rest of a graph runs on.
        written: For each input in order, whether the kernel writes it.
        outputs: Shape and dtype of each output; one at least.

    Returns:
        A primitive that takes the inputs and returns the output, or a tuple of them.
    """
    kernel = (KERNELS | COPIES)[rule, device]
    shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
    primitive = ops.Custom(
        f"{FOLDER / kernel.library}:{kernel.function}",
        out_shape=tuple(shapes) if len(shapes) > 1 else shapes[0],
        out_dtype=tuple(dtypes) if len(dtypes) > 1 else dtypes[0],
        func_type="aot",
    )
    # In PyNative mode, operators of the same inputs and attributes are taken for one, whatever their outputs.
    primitive.add_prim_attr("shapes_out", str(shapes))
    return _writing(primitive, device, written)


def ascend_operator(function: str, written: tuple[bool, ...], shape: Callable[..., tuple]) -> ops.Custom:
    """Make an operator of ops/ascendc.

    Args:
        function: The operator's type.
        written: For each input in order, whether the operator writes it.
        shape: From the inputs' shapes to that of the output, which is float32.

    Returns:
        A primitive that takes the inputs and returns the output.
    """
    own = str(FOLDER / "ascend" / "vendors" / "ms_optim")
    others = os.environ.get(CUSTOM_OPP_PATH, "")
    if own not in others.split(":"):
        os.environ[CUSTOM_OPP_PATH] = f"{own}:{others}" if others else own
    primitive = ops.Custom(f"aclnn{function}", out_shape=shape, out_dtype=lambda *dtypes: ms.float32, func_type="aot")
    return _writing(primitive, "Ascend", written)


def platform_adamw() -> ops.Primitive:
    """Return MindSpore's own AdamW, aclnnApplyAdamWV2 of CANN: Ascend alone has it."""
    return AdamW()


def _writing(primitive: ops.Custom, device: str, written: tuple[bool, ...]) -> ops.Custom:
    """Place an operator, and tell the framework what it writes."""
    primitive.set_device(device)
    # Without this a graph drops the operator, whose output nobody needs, and the parameters never change.
    primitive.add_prim_attr("side_effect_mem", True)
    # Without this, reads of a parameter before and after the step may be taken for one.
    primitive.set_signatures(
        tuple(make_sig(f"x{i}", sig_rw.RW_WRITE if w else sig_rw.RW_READ) for i, w in enumerate(written))
    )
    return primitive


def flags(stages: int, shared: int, rule: int) -> Tensor:
    """Return what a launch shall do, as the shape of a tensor: see ops/include/step.h."""
    return Tensor(np.zeros((1 + stages, 1 + shared, 1 + rule), np.int8))


def _address(tensor) -> int:
    """Return where a tensor's data is; asking waits for its value to be computed."""
    address = tensor.data_ptr()
    if address == 0 and isinstance(tensor, Parameter) and tensor.has_init:
        # Made under no_init_parameters() and not loaded since.
        tensor.init_data()
        address = tensor.data_ptr()
    if address == 0:
        raise RuntimeError(f"ms_optim: a tensor of shape {tensor.shape} has no data in host memory.")
    return address


class AddressTable:
    """Where everything that a step writes is in memory, as a CPU kernel takes it when a step is called from Python.

    Handing 1,600 tensors to MindSpore takes 10 ms, a table of their addresses 1. It is made anew for each step: a
    parameter that was loaded or set since then lives elsewhere (and a graph would go on writing to where it was).
    """

    def __init__(self, parameters, states, masters, master_index, scales, scale_index, shared):
        n = len(parameters)
        self._parameters = parameters
        self._states = [states[k : k + n] for k in range(0, len(states), n)]
        self._masters = [(i, masters[place]) for i, place in enumerate(master_index) if place >= 0]
        self._scales = [(k % n, k // n, scales[place]) for k, place in enumerate(scale_index) if place >= 0]
        self._shared = shared
        # Columns: weight, gradient, master, states, scales, size, first dimension, dtypes; see ops/include/step.h.
        sizes = 3 + 2 * MAX_STATES
        self._types = sizes + 2
        self._table = np.zeros((n + 1, self._types + 2 + MAX_STATES), np.int64)
        self._table[:n, sizes] = [p.size for p in parameters]
        self._table[:n, sizes + 1] = [p.shape[0] if p.ndim > 1 else 0 for p in parameters]
        self._table[:n, self._types] = [DTYPES[p.dtype] for p in parameters]
        for k, group in enumerate(self._states):
            self._table[:n, self._types + 2 + k] = [DTYPES[s.dtype] for s in group]
        self._table[n, 3] = n

    def fill(self, gradients) -> Tensor:
        """Return the table for a step with these gradients."""
        table, n = self._table, len(self._parameters)
        table[:n, 0] = [_address(p) for p in self._parameters]
        table[:n, 1] = [_address(g) for g in gradients]
        for i, master in self._masters:
            table[i, 2] = _address(master)
        for k, group in enumerate(self._states):
            table[:n, 3 + k] = [_address(s) for s in group]
        for i, k, scale in self._scales:
            table[i, 3 + MAX_STATES + k] = _address(scale)
        table[:n, self._types + 1] = [DTYPES[g.dtype] for g in gradients]
        shared = [_address(p) for p in self._shared]
        table[n, :3], table[n, 4 : 1 + len(shared)] = shared[:3], shared[3:]
        return Tensor(table)
