"""The kernel table: which operator runs a rule on a device, and why there may be none.

The only file that names ``ops.Custom``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.signature import make_sig, sig_rw

from . import interface, libraries
from .interface import SharedFlag, Stage, Statistic, Sum

WHITE_LIST = "MS_CUSTOM_AOT_WHITE_LIST"
OPP_PATH = "ASCEND_OPP_PATH"  # the folder of CANN's operators
CUSTOM_OPP_PATH = "ASCEND_CUSTOM_OPP_PATH"  # the folders of custom operators, separated by colons


class AscendOperator(NamedTuple):
    """One launch of an operator for Ascend, for one tensor.

    Attributes:
        function: The operator's type.
        kinds: Number of sums of squares that it outputs.
        writes_states: Whether it updates the moments.
        writes_weight: Whether it updates the weight.
        takes_gradient: Whether it reads the gradient.
    """

    function: str
    kinds: int
    writes_states: bool = True
    writes_weight: bool = True
    takes_gradient: bool = True


# The launches of a step on Ascend. A second launch updates weights by norms of whole tensors from the first one.
ON_ASCEND = {
    "adamw": (AscendOperator("MsOptimAdamw", 2),),
    "adamw_amsgrad": (AscendOperator("MsOptimAdamwAmsgrad", 2),),
    "lamb": (
        AscendOperator("MsOptimLambMoments", 2, writes_weight=False),
        AscendOperator("MsOptimLambApply", 1, writes_states=False, takes_gradient=False),
    ),
    "lans": (
        AscendOperator("MsOptimLansMoments", 3, writes_weight=False),
        AscendOperator("MsOptimLansApply", 1, writes_states=False),
    ),
    "lion": (AscendOperator("MsOptimLion", 2),),
    "ademamix": (AscendOperator("MsOptimAdemamix", 2),),
    # Before and after the products of matrices; the first returns directions, no sums.
    "muon": (
        AscendOperator("MsOptimMuonMomentum", 0, writes_weight=False),
        AscendOperator("MsOptimMuonApply", 2, writes_states=False),
    ),
    # Applies on the device the update that AdamOffload computes on the host.
    "delta": (AscendOperator("MsOptimDelta", 1, writes_states=False, takes_gradient=False),),
}

# Rules of matrices have one kernel for CPU. On GPUs, MindSpore's operators multiply matrices, and three kernels do the
# rest: the rules of the launches for all other tensors, before the products, and after them.
GPU_PASSES = {"muon": ("adamw", "muon_before", "muon_after")}

# Rules with kernels in AKG's DSL: the file in ops/akg, the function in it, and the number of directions it returns.
AKG_KERNELS = {
    "adamw": ("adamw", "adamw", 1),
    "adamw_amsgrad": ("adamw", "adamw_amsgrad", 1),
    "lamb": ("adamw", "adamw", 1),
    "lans": ("lans", "lans", 2),
    "adam": ("adam", "adam", 1),
    "adam_amsgrad": ("adam", "adam_amsgrad", 1),
    "adam_offload": ("adam", "adam", 1),
    "lion": ("lion", "lion", 1),
    "ademamix": ("ademamix", "ademamix", 1),
}

# Names of the columns, without the entry that is their number.
SUMS = tuple(column.name.lower() for column in Sum if column < Sum.SUMS)
STATISTICS = tuple(column.name.lower() for column in Statistic if column < Statistic.STATISTICS)
GRADIENT_STAGE, MOMENTS_STAGE, APPLY_STAGE, COMMIT_STAGE = tuple(Stage)
ALL_STAGES = sum(Stage)


def device_target() -> str:
    """Return the device that MindSpore runs on: "CPU", "GPU" or "Ascend"."""
    return ms.get_context("device_target")


def why_not(rule: str, device: str) -> str | None:
    """Return why a rule has no fused kernel on a device.

    Args:
        rule: Name of the rule.
        device: Device target, "CPU", "GPU" or "Ascend".

    Returns:
        The reason and its remedy, or None if there is a kernel.
    """
    path = libraries.path_of(device)
    no_kernel = f"ms_optim has no kernel for the rule '{rule}' on {device}"
    if device == "Ascend" and rule not in ON_ASCEND:
        return no_kernel
    if reason := libraries.why_missing(device):
        return reason
    if device == "Ascend":
        return None if os.environ.get(OPP_PATH) else f"{OPP_PATH} is not set: source CANN's set_env.sh"
    allowed = os.environ.get(WHITE_LIST)
    if allowed is not None and pathlib.Path(allowed).resolve() not in path.parents:
        return f"{WHITE_LIST} allows only libraries in {allowed}: set {WHITE_LIST}={libraries.FOLDER}"
    try:
        needed = GPU_PASSES.get(rule, (rule,)) if device == "GPU" else (rule,)
        return None if set(needed) <= set(rules(device)) else no_kernel
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}"


def rules(device: str) -> Collection[str]:
    """Return the rules with kernels in a device's library; an OSError or AttributeError means that it fails to load."""
    return ON_ASCEND if device == "Ascend" else libraries.described(device)


def why_not_akg(rule: str) -> str | None:
    """Return why a rule has no AKG kernels, or None if it has."""
    if rule not in AKG_KERNELS:
        return f"ms_optim has no AKG kernel for the rule '{rule}', which is not elementwise"
    if importlib.util.find_spec("decorator") is None:
        return "AKG needs the Python package 'decorator', which MindSpore does not install: pip install decorator"
    return None


def akg_kernels(rule: str) -> tuple[Callable, Callable, int]:
    """Return the DSL functions that compute a rule's directions and apply them, and the number of directions."""
    from ..akg import move

    file, name, directions = AKG_KERNELS[rule]
    module = importlib.import_module(f"..akg.{file}", __package__)
    return getattr(module, name), (move.along_one, move.along_two)[directions - 1], directions


def akg_operator(kernel: Callable, rows: int) -> ops.Custom:
    """Make the operator that AKG compiles from a kernel.

    Args:
        kernel: A function in the DSL.
        rows: Number of rows that it returns, each as long as its last tensor.
    """
    return ops.Custom(
        kernel,
        out_shape=lambda *shapes: [rows, shapes[-1][0]],
        out_dtype=lambda *dtypes: dtypes[-1],
        func_type="hybrid",
    )


class WithoutWorkspace(nn.Cell):
    """An operator whose last output is its workspace memory."""

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
        rule: Name of the rule; or "pack" or "unpack", which copy between tensors and exchange buffers; or "copy".
        device: Device target of the kernel; the operator is placed there, even if the rest of a graph runs elsewhere.
        written: For each input in order, whether the kernel writes it.
        outputs: Shape and dtype of each output; at least one output.
        shapes: Shapes of the tensors that the launch takes.
        shared: The launch's shared flags.

    Returns:
        A primitive or Cell that takes the inputs and returns the output, or a tuple of outputs.
    """
    if device == "GPU":
        library = libraries.library(libraries.LIBRARIES[device].file)
        needed = libraries.workspace_bytes(library, rule, shapes, bool(shared & SharedFlag.CENTRALIZES))
        return WithoutWorkspace(_primitive(rule, device, written, [*outputs, ((needed,), ms.uint8)]), len(outputs))
    return _primitive(rule, device, written, outputs)


def _primitive(rule, device, written, outputs):
    shapes, dtypes = [shape for shape, _ in outputs], [dtype for _, dtype in outputs]
    primitive = ops.Custom(
        f"{libraries.path_of(device)}:ms_optim_{rule}",
        out_shape=tuple(shapes) if len(shapes) > 1 else shapes[0],
        out_dtype=tuple(dtypes) if len(dtypes) > 1 else dtypes[0],
        func_type="aot",
    )
    # PyNative mode treats operators with the same inputs and attributes as one, even if their outputs differ.
    primitive.add_prim_attr("shapes_out", str(shapes))
    return _writing(primitive, device, written)


def orthogonalizer(rule: str) -> ops.Custom | None:
    """Make the operator that orthogonalizes a stack of tensors on CPU; None if the kernel of the rule cannot run here.

    It takes flags, constants, matrices, coefficients, tensors and averages of rows, and returns updates, new averages
    and sums of squares: see ops/cpu/stack_arguments.h.
    """
    if why_not(rule, "CPU") is not None:
        return None
    primitive = ops.Custom(
        f"{libraries.path_of('CPU')}:ms_optim_orthogonalize",
        out_shape=lambda *shapes: (shapes[4], shapes[5], (shapes[4][0],)),
        out_dtype=lambda *dtypes: (ms.float32, ms.float32, ms.float64),
        func_type="aot",
    )
    primitive.set_device("CPU")
    return primitive


def ascend_operator(function: str, written: tuple[bool, ...], shape: Callable[..., tuple]) -> ops.Custom:
    """Make an operator of ops/ascendc.

    Args:
        function: The operator's type.
        written: For each input in order, whether the operator writes it.
        shape: Returns the shape of the output, which is float32, from the shapes of the inputs.

    Returns:
        A primitive that takes the inputs and returns the output.
    """
    own = str(libraries.FOLDER / "ascend" / "vendors" / "ms_optim")
    others = os.environ.get(CUSTOM_OPP_PATH, "")
    if own not in others.split(":"):
        os.environ[CUSTOM_OPP_PATH] = f"{own}:{others}" if others else own
    primitive = ops.Custom(f"aclnn{function}", out_shape=shape, out_dtype=lambda *dtypes: ms.float32, func_type="aot")
    return _writing(primitive, "Ascend", written)


def _writing(primitive: ops.Custom, device: str, written: tuple[bool, ...]) -> ops.Custom:
    """Place an operator on a device, and declare its writes to the framework."""
    primitive.set_device(device)
    # Without this, a graph removes the operator, because its output is unused, and the parameters never change.
    primitive.add_prim_attr("side_effect_mem", True)
    # Without this, a graph may merge the reads of a parameter before and after the step.
    primitive.set_signatures(
        tuple(make_sig(f"x{i}", sig_rw.RW_WRITE if w else sig_rw.RW_READ) for i, w in enumerate(written))
    )
    return primitive


def flags(stages: int, shared: int, rule: int) -> Tensor:
    """Return what a launch does, encoded in the shape of a tensor: see ops/include/step.h."""
    return Tensor(interface.flags(stages, shared, rule))
