"""Writing numbers into the memory that a Parameter has, and telling whether they have changed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, ops

if TYPE_CHECKING:
    from numpy.typing import NDArray


def write(parameter: Parameter, value: np.ndarray) -> None:
    """Write numbers of a Parameter's own dtype and shape into the memory that it has.

    ``Parameter.set_data`` would give it other memory, while a compiled graph goes on with the old one.
    """
    if parameter.has_init:
        parameter.init_data()
    held = parameter.asnumpy()
    if held.ctypes.data == parameter.data_ptr():
        np.copyto(held, value, casting="no")
    else:
        # What was read is a copy: the parameter is on a device, or its memory is not contiguous.
        ops.assign(parameter, Tensor(value, parameter.dtype))


def checksum(parameter: Parameter) -> int:
    """Return a checksum of a Parameter's numbers."""
    if parameter.has_init:
        parameter.init_data()
    return zlib.crc32(parameter.asnumpy().tobytes())


def fitted(name: str, entry: str, p: Parameter, value: Tensor) -> NDArray[Any]:
    """Return the value of an entry for a parameter, whose shape and dtype it must have.

    Args:
        name: The class that errors name.
        entry: The entry's name.
        p: The parameter.
        value: The entry.
    """
    if tuple(value.shape) != tuple(p.shape):
        raise ValueError(f"For '{name}', the entry {entry!r} must have the shape {p.shape}, but got {value.shape}.")
    if value.dtype != p.dtype:
        raise TypeError(f"For '{name}', the entry {entry!r} must be of dtype {p.dtype}, but got {value.dtype}.")
    return value.asnumpy()
