"""Bytes that an offloaded optimizer needs and transfers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..arguments.checks import check_choice
from ..kernels import capabilities
from ..kernels import table as kernels
from ..paths.choice import asked
from ..states import inventory

if TYPE_CHECKING:
    from ..paths.parts import Parts


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """Bytes that an offloaded optimizer needs and transfers.

    Attributes:
        device: Device that holds the weights, "CPU", "GPU" or "Ascend".
        device_bytes: Weights and gradients on the device.
        host_bytes: States and masters in host memory, with `offload` also copies of the weights; on "CPU" also weights
            and gradients.
        to_host_bytes: Bytes copied from the device to the host in a step.
        to_device_bytes: Bytes copied back in a step.
    """

    device: str
    device_bytes: int
    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int

    def __str__(self) -> str:
        # Only what prints imports it: it takes longer than this package's own modules.
        from rich.console import Console
        from rich.table import Table

        table = Table("", "MB", title=f"Offloaded from {self.device}")
        for field in dataclasses.fields(self)[1:]:
            what = field.name.removesuffix("_bytes").replace("_", " ")
            table.add_row(
                what + (" a step" if what.startswith("to ") else ""), f"{getattr(self, field.name) / 1e6:,.1f}"
            )
        console = Console(width=60)
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip("\n")


def offload_report(parts: Parts, device: str | None) -> OffloadReport:
    """Return what :meth:`ms_optim.FusedOptimizer.offload_report` does.

    Args:
        parts: The parts that the optimizer's path is built from.
        device: The device; None for the current device target.
    """
    device = kernels.device_target() if device is None else device
    check_choice(parts.layout.optimizer, "device", device, capabilities.DEVICES)
    reports = [dataclasses.astuple(_report_of_rule(own, device))[1:] for own in parts.of_rules]
    return OffloadReport(device, *(sum(numbers) for numbers in zip(*reports)))


def _report_of_rule(parts: Parts, device: str) -> OffloadReport:
    """Return the report of one rule."""
    held, options, runs_on_host = parts.held, parts.options, parts.statement.runs_on_host
    if not (runs_on_host or options.offload):
        raise RuntimeError(
            f"For '{parts.layout.optimizer}', offload_report() needs an optimizer made with offload=True."
        )
    weights, kept = (sum(p.nbytes for p in tensors) for tensors in (held.parameters, held.of_tensors))
    copies = capabilities.copies_weights(parts.statement, asked(parts))
    on_device, on_host = inventory.placed(device, True, copies, weights, kept)
    if device == "CPU":
        return OffloadReport(device, on_device, on_host, 0, 0)
    in_own_dtype = [copies or has_master for has_master in held.has_master()]
    # Not counted: a constant number of bytes, of rates and the step to the host and of statistics to the device.
    crossing = sum(p.nbytes if own_dtype else 4 * p.size for p, own_dtype in zip(held.parameters, in_own_dtype))
    return OffloadReport(device, on_device, on_host, crossing, crossing)
