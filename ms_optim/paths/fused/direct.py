"""Launches that run at once on the memory of tensors, in a step that is called from Python."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...kernels import libraries
from ...kernels import table as kernels
from ...kernels.interface import inputs


class DirectLaunch:
    """A launch that calls the library of the CPU's kernels itself.

    To call a compiled function around one operator takes MindSpore half a millisecond, twice as long as the kernel
    takes for 400 small tensors. Callers must have asked for the addresses of the tensors: that waits until MindSpore
    has run all operators that it was given before, which may read or write them.

    Args:
        rule: Name of the rule.
        flags, layout: As for the launch's operator.
        matrices: For a rule of matrices, the table of matrices and the coefficients of its iterations.
    """

    def __init__(self, rule: str, flags: np.ndarray, layout: np.ndarray, matrices: tuple[Tensor, ...] = ()):
        self.rule, self.flags, self.layout, self.matrices = rule, flags, layout, matrices

    def run(self, constants: Tensor, rates: np.ndarray, sums: Tensor | np.ndarray, table: np.ndarray) -> libraries.Run:
        """Return what runs the kernel on the tensors of a table of addresses; its output is the sums."""
        given = inputs(self.flags, self.layout, constants, rates, sums, self.matrices, (), (), (table,), ())
        return libraries.Run(self.rule, given, [np.empty((len(self.layout), len(kernels.SUMS)))])
