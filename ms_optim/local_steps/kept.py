"""What local steps keep in addition to the optimizer: the weights at the last exchange, outer velocity, residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor
from mindspore import dtype as mstype

from ..kernels.local_interface import LocalReport
from ..states.storage import check_noted, noted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .wire import Outer


class Kept:
    """What local steps keep from step to step.

    Args:
        parameters: The parameters.
        names: Their names from construction.
        outer: The outer step.
        own_worker: Which worker this is: int32 of shape (workers,), 1 at its index.

    Attributes:
        starts: The weights at the last exchange, in float32.
        velocities: The outer velocities; empty without momentum.
        residuals: What has accumulated and has not been sent; empty if it is not kept.
        step: The count of steps, including skipped ones, so that it is equal on all workers.
        worker: Which worker the residuals belong to.
        reports: Statistics of the last exchange of each fragment.
    """

    starts: ParameterTuple
    velocities: ParameterTuple
    residuals: ParameterTuple
    step: Parameter
    worker: Parameter
    reports: tuple[Parameter, ...]

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], outer: Outer, own_worker: np.ndarray):
        def zeros(prefix, kept):
            return ParameterTuple(
                [
                    Parameter(Tensor(np.zeros(p.shape, np.float32)), name=f"{prefix}.{name}", requires_grad=False)
                    for p, name in (zip(parameters, names) if kept else ())
                ]
            )

        self.starts = zeros("local_start", True)
        self.velocities = zeros("local_velocity", outer.momentum > 0.0)
        self.residuals = zeros("local_residual", outer.has_residuals)
        self.step = Parameter(Tensor([0], mstype.int32), name="local_step", requires_grad=False)
        self.worker = Parameter(Tensor(own_worker), name="local_worker", requires_grad=False)
        empty = np.zeros(LocalReport.LOCAL_REPORTS, np.float32)
        self.reports = tuple(
            Parameter(Tensor(empty), name=f"local_report.{k}", requires_grad=False) for k in range(outer.fragments)
        )
        self._seen, self._seen_counts = noted(self.of_tensors), noted((self.step, self.worker))

    @property
    def of_tensors(self) -> tuple[Parameter, ...]:
        """What is kept for each parameter."""
        return (*self.starts, *self.velocities, *self.residuals)

    def check_counts(self, name: str) -> None:
        """Raise an error if the count or the worker has changed since construction; every step reads them.

        Args:
            name: The class that errors name.
        """
        check_noted(name, self._seen_counts)

    def check(self, name: str) -> None:
        """Raise an error that names a tensor that has changed since construction; copy each view to memory of its own.

        Args:
            name: The class that errors name.
        """
        check_noted(name, self._seen)
