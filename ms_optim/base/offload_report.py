"""Bytes that an offloaded optimizer needs and transfers, and the method that reports them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mindspore import nn

from ..arguments.checks import check_choice
from ..kernels import table as kernels
from ..kernels.capabilities import DEVICES
from ..states import formats

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


class Offloadable(nn.Optimizer):
    """Reports what an optimizer holds on the device and on the host."""

    _parts: Parts
    runs_on_host: bool

    @property
    def target(self) -> str:
        """The device on which steps run, which :class:`ms_optim.AdamOffload` alone can change."""
        return self._target

    @target.setter
    def target(self, value: str) -> None:
        raise NotImplementedError(
            f"For '{self.cls_name}', 'target' cannot be set to {value!r}: steps run where the weights are. With "
            "offload=True, or by AdamOffload, they run on the host."
        )

    def offload_report(self, device: str | None = None) -> OffloadReport:
        """Return the bytes on device and host, and the bytes transferred in a step; no training is needed.

        Gradients are assumed to have the dtype of their parameter.

        Args:
            device: "CPU", "GPU" or "Ascend". Default: ``None`` , the current device target.

        Returns:
            A report of bytes, `device_bytes`, `host_bytes`, `to_host_bytes` and `to_device_bytes`, that prints as a
            table.

        Raises:
            ValueError: If there is no such device.
            RuntimeError: If the optimizer is not offloaded.
        """
        device = kernels.device_target() if device is None else device
        check_choice(self.cls_name, "device", device, DEVICES)
        held, options = self._parts.held, self._parts.options
        if not (self.runs_on_host or options.offload):
            raise RuntimeError(f"For '{self.cls_name}', offload_report() needs an optimizer made with offload=True.")
        weights, kept = (sum(p.nbytes for p in tensors) for tensors in (held.parameters, held.of_tensors))
        on_device, on_host = formats.placed(device, options, self.runs_on_host, weights, kept)
        if device == "CPU":
            return OffloadReport(device, on_device, on_host, 0, 0)
        in_own_dtype = [options.offload or has_master for has_master in held.has_master()]
        # Not counted: a constant number of bytes, of rates and the step to the host and of statistics to the device.
        crossing = sum(p.nbytes if own_dtype else 4 * p.size for p, own_dtype in zip(held.parameters, in_own_dtype))
        return OffloadReport(device, on_device, on_host, crossing, crossing)
