"""The kernel table: which operator runs a rule on a device, and why there may be none.

The only file that names ``ops.Custom``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import AdamW
from mindspore.ops.signature import make_sig, sig_rw

from . import _abi
from ._abi import CODE_BLOCK as CODE_BLOCK
from ._abi import MAX_STATES as MAX_STATES
from ._abi import AddressColumn, DType, SharedAddressColumn, SharedFlag, Stage, Statistic, Sum

if TYPE_CHECKING:
    from ._held import Held

FOLDER = pathlib.Path(__file__).resolve().parent
WHITE_LIST = "MS_CUSTOM_AOT_WHITE_LIST"
OPP_PATH = "ASCEND_OPP_PATH"  # where CANN's operators are
CUSTOM_OPP_PATH = "ASCEND_CUSTOM_OPP_PATH"  # where others are, separated by colons


class Library(NamedTuple):
    """The shared library of a device.

    Attributes:
        file: Its name, in the package's folder.
        remedy: What to do where it is missing.
    """

    file: str
    remedy: str


LIBRARIES = {
    "CPU": Library(
        "libms_optim_cpu.so",
        "it is built at installation, which needs a C++17 compiler with OpenMP (Debian: apt install g++): install one, "
        "then install ms_optim again",
    ),
    "GPU": Library(
        "libms_optim_cuda.so",
        "it is built at installation where nvcc of CUDA 11.8 or later is on the PATH: put it there, then install "
        "ms_optim again",
    ),
    "Ascend": Library(
        "ascend/vendors/ms_optim/op_api/lib/libcust_opapi.so",
        "build it, where CANN is, with python -m ms_optim build-ascend --soc-version NAME",
    ),
}
# Types of operators. Of several launches a step the first; see ms_optim/paths/ascend.py.
ON_ASCEND = {
    "adamw": "MsOptimAdamw",
    "adamw_amsgrad": "MsOptimAdamwAmsgrad",
    "lamb": "MsOptimLambMoments",
    "lans": "MsOptimLansMoments",
    "delta": "MsOptimDelta",  # what AdamOffload does there with what its host returns
}


# Rules with kernels in AKG's DSL: file in ops/akg, function in it, and how many directions that returns.
AKG_KERNELS = {
    "adamw": ("adamw", "adamw", 1),
    "adamw_amsgrad": ("adamw", "adamw_amsgrad", 1),
    "lamb": ("adamw", "adamw", 1),
    "lans": ("lans", "lans", 2),
    "adam_offload": ("adam_offload", "adam_offload", 1),
}

# Names of the columns, without the number of these.
SUMS = tuple(column.name.lower() for column in Sum if column < Sum.SUMS)
STATISTICS = tuple(column.name.lower() for column in Statistic if column < Statistic.STATISTICS)
GRADIENT_STAGE, MOMENTS_STAGE, APPLY_STAGE, COMMIT_STAGE = tuple(Stage)
ALL_STAGES = sum(Stage)
SKIP_NONFINITE, MASTERS, STOCHASTIC_ROUNDING, CENTRALIZES, BY_ADDRESS = tuple(SharedFlag)[:5]
BETA_POWERS, LOCKS, RETURNED, SHARES, CLIPS = tuple(SharedFlag)[5:]
LEAST_CODED = 4096  # elements of the smallest tensor whose states are worth codes
DTYPES = {
    ms.float32: DType.FLOAT32,
    ms.float16: DType.FLOAT16,
    ms.bfloat16: DType.BFLOAT16,
    ms.int8: DType.INT8,
    ms.uint8: DType.UINT8,
}


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
    path = FOLDER / LIBRARIES[device].file
    no_kernel = f"ms_optim has no kernel for the rule '{rule}' on {device}"
    if device == "Ascend" and rule not in ON_ASCEND:
        return no_kernel
    if not path.exists():
        return f"{path} is missing: {LIBRARIES[device].remedy}"
    if device == "Ascend":
        return None if os.environ.get(OPP_PATH) else f"{OPP_PATH} is not set: source CANN's set_env.sh"
    allowed = os.environ.get(WHITE_LIST)
    if allowed is not None and pathlib.Path(allowed).resolve() not in path.parents:
        return f"{WHITE_LIST} admits only libraries in {allowed}: set {WHITE_LIST}={FOLDER}"
    try:
        return None if rule in rules(device) else no_kernel
    except (OSError, AttributeError) as error:
        return f"{path} does not load: {error}"


def rules(device: str) -> Collection[str]:
    """Return the rules that a device's library has kernels of; OSError or AttributeError: it does not load."""
    return ON_ASCEND if device == "Ascend" else described(device)


def described(device: str) -> dict[str, _abi.DescribedRule]:
    """Return what the library for "CPU" or "GPU" says of its rules."""
    return _abi.rules(library(LIBRARIES[device].file))


def why_not_akg(rule: str) -> str | None:
    """Say why there are no AKG kernels of a rule to try, or return None."""
    if rule not in AKG_KERNELS:
        return f"ms_optim has no AKG kernel for the rule '{rule}', which is not elementwise"
    if importlib.util.find_spec("decorator") is None:
        return "AKG needs the Python package 'decorator', which MindSpore does not bring: pip install decorator"
    return None


def akg_kernels(rule: str) -> tuple[Callable, Callable, int]:
    """Return the functions in the DSL that find a rule's directions and move along them, and how many there are."""
    from .akg import move  # not before it is needed: MindSpore looks at the device target when it makes a kernel

    file, name, directions = AKG_KERNELS[rule]
    module = importlib.import_module(f".akg.{file}", __package__)
    return getattr(module, name), (move.along_one, move.along_two)[directions - 1], directions


def akg_operator(kernel: Callable, rows: int) -> ops.Custom:
    """Make the operator that AKG compiles from a kernel.

    Args:
        kernel: A function in the DSL.
        rows: How many rows it returns, each as long as its last tensor.
    """
    return ops.Custom(
        kernel,
        out_shape=lambda *shapes: [rows, shapes[-1][0]],
        out_dtype=lambda *dtypes: dtypes[-1],
        func_type="hybrid",
    )


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Load one of the package's shared libraries, for what is asked of it besides running a step."""
    loaded = ctypes.CDLL(str(FOLDER / name))
    if name == LIBRARIES["CPU"].file:
        loaded.ms_optim_instruction_set.restype = ctypes.c_char_p
    return loaded


class WithoutWorkspace(nn.Cell):
    """An operator whose last output is memory that it needed meanwhile."""

    def __init__(self, primitive, outputs):
        super().__init__(auto_prefix=False)
        self.primitive, self.alone = primitive, outputs == 1

    def construct(self, *inputs):
        """Run the operator, and return its other outputs."""
        outputs = self.primitive(*inputs)
        return outputs[0] if self.alone else outputs[:-1]


def operator(
    rule: str,
    device: str,
    written: tuple[bool, ...],
    outputs: list[tuple[tuple, ms.dtype.Type]],
    shapes: Sequence[tuple[int, ...]] = (),
    shared: int = 0,
) -> Callable:
    """Make the operator that runs one launch.

    Args:
        rule: Name of the rule; or "pack" or "unpack", which copy between tensors and what workers exchange.
        device: Device target whose kernel it is; the operator is placed there whatever the rest of a graph runs on.
        written: For each input in order, whether the kernel writes it.
        outputs: Shape and dtype of each output; one at least.
        shapes: Shapes of the tensors that the launch takes.
        shared: The launch's shared flags.

    Returns:
        A primitive or Cell that takes the inputs and returns the output, or a tuple of them.
    """
    if device == "GPU":
        exchanges, file = described(device)[rule].exchanges, LIBRARIES[device].file
        needed = workspace_bytes(library(file), shapes, bool(shared & CENTRALIZES), exchanges)
        return WithoutWorkspace(_primitive(rule, device, written, [*outputs, ((needed,), ms.uint8)]), len(outputs))
    return _primitive(rule, device, written, outputs)


def _primitive(rule, device, written, outputs):
    shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
    primitive = ops.Custom(
        f"{FOLDER / LIBRARIES[device].file}:ms_optim_{rule}",
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


def workspace_bytes(library: ctypes.CDLL, shapes: Sequence[tuple[int, ...]], centralizes: bool, exchanges: bool) -> int:
    """Return how many bytes a launch on a GPU needs besides its tensors.

    Args:
        library: The library of the operator.
        shapes: Shape of each tensor.
        centralizes: Whether any gradient is centralized.
        exchanges: Whether the rule exchanges.
    """
    numbers = ctypes.c_int64 * len(shapes)
    sizes = numbers(*(math.prod(shape) for shape in shapes))
    rows = numbers(*(shape[0] if len(shape) > 1 else 0 for shape in shapes))
    library.ms_optim_workspace.restype = ctypes.c_int64
    return library.ms_optim_workspace(len(shapes), sizes, rows, int(centralizes), int(exchanges))


def flags(stages: int, shared: int, rule: int) -> Tensor:
    """Return what a launch shall do, as the shape of a tensor: see ops/include/step.h."""
    return Tensor(_abi.flags(stages, shared, rule))


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


# Of what a step counts and reports, in the order in which a launch takes it.
SHARED_COLUMNS = (
    SharedAddressColumn.GLOBAL_STEP_ADDRESS,
    SharedAddressColumn.SKIPPED_STEPS_ADDRESS,
    SharedAddressColumn.STATISTICS_ADDRESS,
    SharedAddressColumn.BETA_POWER_ADDRESS,
    SharedAddressColumn.BETA_POWER_ADDRESS + 1,
)


class AddressTable:
    """Where everything that a step writes is in memory, as a CPU kernel takes it when a step is called from Python.

    Handing 1,600 tensors to MindSpore takes 10 ms, a table of their addresses 1. It is made anew for each step: a
    parameter that was loaded or set since then lives elsewhere (and a graph would go on writing to where it was).
    """

    def __init__(self, held: Held):
        parameters, n = held.parameters, len(held.parameters)
        self._parameters = parameters
        self._states = held.states_of_each()
        self._masters = [(i, held.masters[place]) for i, place in enumerate(held.master_places) if place >= 0]
        scales = enumerate(held.scale_places)
        self._scales = [(k % n, k // n, held.scales[place]) for k, place in scales if place >= 0]
        self._shared = held.counters
        self._table = np.zeros((n + 1, AddressColumn.ADDRESS_COLUMNS), np.int64)
        self._table[:n, AddressColumn.ELEMENTS] = [p.size for p in parameters]
        self._table[:n, AddressColumn.FIRST_DIMENSION] = [p.shape[0] if p.ndim > 1 else 0 for p in parameters]
        self._table[:n, AddressColumn.WEIGHT_TYPE] = [DTYPES[p.dtype] for p in parameters]
        for k, group in enumerate(self._states):
            self._table[:n, AddressColumn.STATE_TYPE + k] = [DTYPES[s.dtype] for s in group]
        self._table[n, SharedAddressColumn.STATISTICS_ROWS] = n

    def fill(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the table for a step with these gradients; what it names was checked before."""
        table, n = self._table, len(self._parameters)
        table[:n, AddressColumn.WEIGHT_ADDRESS] = [_address(p) for p in self._parameters]
        table[:n, AddressColumn.GRADIENT_ADDRESS] = [_address(g) for g in gradients]
        for i, master in self._masters:
            table[i, AddressColumn.MASTER_ADDRESS] = _address(master)
        for k, group in enumerate(self._states):
            table[:n, AddressColumn.STATE_ADDRESS + k] = [_address(s) for s in group]
        for i, k, scale in self._scales:
            table[i, AddressColumn.SCALE_ADDRESS + k] = _address(scale)
        table[:n, AddressColumn.GRADIENT_TYPE] = [DTYPES[g.dtype] for g in gradients]
        for column, p in zip(SHARED_COLUMNS, self._shared):
            table[n, column] = _address(p)
        return Tensor(table)
