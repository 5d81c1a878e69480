"""Writing numbers into the memory that a Parameter has."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, ops


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
