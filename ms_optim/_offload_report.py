"""Bytes that an offloaded optimizer needs and moves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from . import _memory

if TYPE_CHECKING:
    from ._held import Held


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """Bytes that an offloaded optimizer needs and moves.

    Attributes:
        device: Device that holds the weights, "CPU", "GPU" or "Ascend".
        device_bytes: Weights and gradients on the device.
        host_bytes: States and masters in host memory; on "CPU" weights and gradients too.
        to_host_bytes: What goes from the device to the host in a step.
        to_device_bytes: What comes back in a step.
    """

    device: str
    device_bytes: int
    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int

    def __str__(self) -> str:
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


def report(held: Held, device: str) -> OffloadReport:
    """Count on a device the bytes of an optimizer whose states are on the host.

    Gradients are taken to be of their parameter's dtype.
    """
    low = [p for p, has_master in zip(held.parameters, held.has_master()) if has_master]
    full = [p for p, has_master in zip(held.parameters, held.has_master()) if not has_master]
    kept = sum(p.nbytes for p in held.of_tensors)
    on_device, on_host = _memory.placed(device, True, 2 * sum(p.nbytes for p in (*low, *full)), kept)
    if device == "CPU":
        return OffloadReport(device, on_device, on_host, 0, 0)
    # Besides, either way, some bytes that do not grow with the weights: rates and the step there, statistics back.
    crossing = sum(p.nbytes for p in low) + sum(4 * p.size for p in full)
    return OffloadReport(device, on_device, on_host, crossing, crossing)
