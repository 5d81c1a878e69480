"""The shared libraries of the kernels: their paths, and their functions other than running a step."""

from __future__ import annotations

import ctypes
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

from ..questions import data_pointers_of
from . import description
from .interface import Status

FOLDER = pathlib.Path(__file__).resolve().parents[1]  # the package's


class Library(NamedTuple):
    """The shared library of a device.

    Attributes:
        file: Its name, in the package's folder.
        remedy: What to do if it is missing.
    """

    file: str
    remedy: str


LIBRARIES = {
    "CPU": Library(
        "libms_optim_cpu.so",
        "a C++17 compiler with OpenMP builds it at installation. Install one (Debian: apt install g++), then install "
        "ms_optim again",
    ),
    "GPU": Library(
        "libms_optim_cuda.so",
        "it is built at installation if MS_OPTIM_CUDA=1 is set. Put nvcc of CUDA 11.8 or later on the PATH, then "
        "install ms_optim again with MS_OPTIM_CUDA=1",
    ),
    "Ascend": Library(
        "ascend/vendors/ms_optim/op_api/lib/libcust_opapi.so",
        "build it on a machine with CANN: python -m ms_optim build-ascend --soc-version NAME",
    ),
}


def path_of(device: str) -> pathlib.Path:
    """Return the path of a device's library; the file may be missing."""
    return FOLDER / LIBRARIES[device].file


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Load one of the package's shared libraries, for functions other than running a step."""
    loaded = ctypes.CDLL(str(FOLDER / name))
    if name == LIBRARIES["CPU"].file:
        loaded.ms_optim_instruction_set.restype = loaded.ms_optim_product_set.restype = ctypes.c_char_p
        loaded.ms_optim_local_words.restype = ctypes.c_int64
    return loaded


def described(device: str) -> dict[str, description.DescribedRule]:
    """Return the rules that the library for "CPU" or "GPU" describes."""
    return description.rules(library(LIBRARIES[device].file))


def why_missing(device: str) -> str | None:
    """Return why the library of a device is missing and the remedy, or None if it exists."""
    path = path_of(device)
    return None if path.exists() else f"{path} is missing: {LIBRARIES[device].remedy}"


def difference_of_marks(marks: np.ndarray) -> str | None:
    """Return how the marks of the workers, int32 of shape (workers, numbers), differ; None if they are equal."""
    marks = np.ascontiguousarray(marks, np.int32)
    text = ctypes.create_string_buffer(256)
    address = ctypes.c_void_p(marks.ctypes.data)
    differs = library(LIBRARIES["CPU"].file).ms_optim_local_difference
    return text.value.decode() if differs(address, ctypes.c_int64(len(marks)), text, ctypes.c_int64(256)) else None


def wire_words(size: int, chunk: int, density: float, bits: int) -> int:
    """Return how many 4-byte words a worker of local steps sends for a tensor, if differences are compressed.

    Args:
        size: Elements of the tensor.
        chunk: Elements among which the largest are chosen.
        density: The share of a chunk's elements that is sent.
        bits: Bits of a value.
    """
    words = library(LIBRARIES["CPU"].file).ms_optim_local_words
    return words(ctypes.c_int64(size), ctypes.c_int64(chunk), ctypes.c_double(density), ctypes.c_int(bits))


def call_of(
    library: ctypes.CDLL,
    function: str,
    tensors: Sequence[Tensor | np.ndarray],
    addresses: Sequence[int],
    stream: int | None = None,
) -> Callable[[], int]:
    """Return what calls an operator of a library as MindSpore does, and returns its status.

    Args:
        library: The library.
        function: The operator's name.
        tensors: Inputs and outputs in order; only their shapes and dtypes are read.
        addresses: The addresses of their data, which must stay alive until the call.
        stream: The stream of a GPU.
    """
    n = len(tensors)
    shapes = [(ctypes.c_int64 * max(1, x.ndim))(*x.shape) for x in tensors]
    return functools.partial(
        getattr(library, function),
        n,
        (ctypes.c_void_p * n)(*addresses),
        (ctypes.c_int * n)(*[x.ndim for x in tensors]),
        (ctypes.POINTER(ctypes.c_int64) * n)(*[ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes]),
        (ctypes.c_char_p * n)(*[str(x.dtype).lower().encode() for x in tensors]),
        stream,
        None,
    )


class Run(NamedTuple):
    """A run of an operator of the library for CPU on the current memory of its inputs, without MindSpore's queue.

    A graph would continue to use the memory that a parameter had when the graph first ran.

    Attributes:
        operator: Its name, without ``ms_optim_``.
        inputs: Tensors in host memory, and arrays.
        outputs: Arrays that it writes.
    """

    operator: str
    inputs: Sequence[Tensor | np.ndarray]
    outputs: Sequence[np.ndarray]


_call = methodcaller("__call__")


def run_here(*runs: Run) -> None:
    """Run operators of the library for CPU one after the other.

    Between them, Python executes no line of its own: an interrupt such as Ctrl-C comes before the first or after the
    last.

    Raises:
        RuntimeError: If one rejects its inputs; those after it do not run.
    """
    calls = []
    for run in runs:
        given = [*run.inputs, *run.outputs]
        addresses = [x.ctypes.data if isinstance(x, np.ndarray) else address_of(x) for x in given]
        calls.append(call_of(library(LIBRARIES["CPU"].file), f"ms_optim_{run.operator}", given, addresses))
    failed = next(filter(itemgetter(0), zip(map(_call, calls), runs)), None)
    if failed is not None:
        status, run = failed
        raise RuntimeError(f"The kernel '{run.operator}' failed: {Status(status).name}.")


def workspace_bytes(library: ctypes.CDLL, rule: str, shapes: Sequence[tuple[int, ...]], centralizes: bool) -> int:
    """Return the size in bytes of the workspace that a launch on a GPU needs.

    Args:
        library: The library of the operator.
        rule: Name of the rule.
        shapes: Shape of each tensor.
        centralizes: Whether any gradient is centralized.
    """
    numbers = ctypes.c_int64 * len(shapes)
    sizes = numbers(*(math.prod(shape) for shape in shapes))
    rows = numbers(*(shape[0] if len(shape) > 1 else 0 for shape in shapes))
    library.ms_optim_workspace.restype = ctypes.c_int64
    return library.ms_optim_workspace(rule.encode(), len(shapes), sizes, rows, int(centralizes))


def address_of(tensor) -> int:
    """Return the address of a tensor's data; this waits until its value is computed."""
    address = tensor.data_ptr()
    if address == 0 and isinstance(tensor, Parameter) and tensor.has_init:
        # Created under no_init_parameters() and not loaded since.
        tensor.init_data()
        address = tensor.data_ptr()
    if address == 0:
        raise RuntimeError(f"ms_optim: a tensor of shape {tensor.shape} has no data in host memory.")
    return address


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors' data; this waits until their values are computed."""
    addresses = data_pointers_of(tensors)
    return addresses if all(addresses) else [address_of(tensor) for tensor in tensors]
