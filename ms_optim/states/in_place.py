"""Writing values into the existing memory of a Parameter, and detecting changes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_view(parameter: Parameter) -> bool:
    """Return whether a Parameter is a view, such as a transposed Tensor, into which nothing can be written."""
    # The check that MindSpore uses: operators copy a view before they write to it, even if it is contiguous.
    return not parameter.has_init and parameter._need_contiguous()


def own_memory(parameters: Iterable[Parameter]) -> None:
    """Give each parameter that is a view memory of its own."""
    for p in parameters:
        if is_view(p):
            p.set_data(Tensor(p.asnumpy(), p.dtype))


def write(parameter: Parameter, value: np.ndarray) -> None:
    """Write values of a Parameter's own dtype and shape into its existing memory.

    ``Parameter.set_data`` would replace its memory, but a compiled graph would continue to use the old memory.
    """
    if parameter.has_init:
        parameter.init_data()
    own_memory((parameter,))
    held = parameter.asnumpy()
    if held.ctypes.data == parameter.data_ptr():
        np.copyto(held, value, casting="no")
    else:
        # `held` is a copy: the parameter is on a device, or its memory is not contiguous.
        ops.assign(parameter, Tensor(value, parameter.dtype))


def checksum(parameter: Parameter) -> int:
    """Return a checksum of a Parameter's values."""
    if parameter.has_init:
        parameter.init_data()
    return zlib.crc32(parameter.asnumpy().tobytes())


def fitted(name: str, entry: str, p: Parameter, value: Tensor) -> NDArray[Any]:
    """Return the value of an entry for a parameter; it must have the parameter's shape and dtype.

    Args:
        name: Name of the class, for the errors.
        entry: The entry's name.
        p: The parameter.
        value: The entry.
    """
    if tuple(value.shape) != tuple(p.shape):
        raise ValueError(f"For '{name}', the entry {entry!r} must have the shape {p.shape}, but got {value.shape}.")
    if value.dtype != p.dtype:
        raise TypeError(f"For '{name}', the entry {entry!r} must be of dtype {p.dtype}, but got {value.dtype}.")
    return value.asnumpy()


def as_float32(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values of a Tensor in float32, flat."""
    return ops.cast(tensor, mstype.float32).asnumpy().reshape(-1)


def stored_as(values: NDArray[np.float32], dtype: Any) -> NDArray[np.float32]:
    """Return float32 values as a weight of a dtype holds them, flat."""
    return as_float32(ops.cast(Tensor(values), dtype))
