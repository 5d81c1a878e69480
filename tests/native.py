"""Calls the CPU operators through their C interface, as MindSpore does, with NumPy arrays."""

import ctypes

import numpy as np

from ms_optim import _kernels

LIBRARY = _kernels.FOLDER / "libms_optim_cpu.so"


def call(function, arrays):
    """Call an operator with inputs and outputs in order, and return its status."""
    library = _kernels.library(LIBRARY.name)
    n = len(arrays)
    shapes = [(ctypes.c_int64 * max(1, a.ndim))(*a.shape) for a in arrays]
    return getattr(library, function)(
        n,
        (ctypes.c_void_p * n)(*[a.ctypes.data for a in arrays]),
        (ctypes.c_int * n)(*[a.ndim for a in arrays]),
        (ctypes.POINTER(ctypes.c_int64) * n)(*[ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes]),
        (ctypes.c_char_p * n)(*[str(a.dtype).encode() for a in arrays]),
        None,
        None,
    )


class Launch:
    """The arguments of one launch; arrays that the operator writes are changed in place.

    Args:
        function: Name of the operator.
        weights, gradients: Arrays of the tensors.
        states: For each state its arrays.
        constants: The rule's constants; `rule_flags` its flags.
        rates: Learning rates and weight decays; `layout` as in ops/include/step.h, by default all tensors take the
            first rate and no decay.
    """

    def __init__(
        self,
        function,
        weights,
        gradients,
        states,
        constants,
        rule_flags,
        rates=(0.01,),
        layout=None,
        masters=(),
        loss_scale=1.0,
        clip=0.0,
        shared=0,
        stages=_kernels.ALL_STAGES,
    ):
        n = len(weights)
        if layout is None:
            layout = [[0, -1, 0, i] for i in range(n)]
        self.function = function
        self.global_step, self.skipped = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self.statistics = np.zeros((n, len(_kernels.STATISTICS)), np.float32)
        self.sums = np.zeros((n, len(_kernels.SUMS)))
        self.arrays = [
            np.zeros((1 + stages, 1 + shared, 1 + rule_flags), np.int8),
            np.array(layout, np.int32).reshape(n, 4),
            np.array([1 / loss_scale, clip, 0.0, *constants]),
            np.array(rates, np.float32),
            np.zeros((1, len(_kernels.SUMS))),
            self.global_step,
            self.skipped,
            self.statistics,
            *weights,
            *gradients,
            *[array for state in states for array in state],
            *masters,
            self.sums,
        ]

    def run(self):
        return call(self.function, self.arrays)
