"""The launches of a compressed step, and the exchange between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn

from ..kernels.interface import launch
from ..paths.fused.launches import as_tuple
from ..unregistered import unregistered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..arguments.checks import Tensors
    from ..workers.transport import Workers


class StageCell(nn.Cell):
    """One launch: its operator, what the operator does, and its inputs except gradients.

    Args:
        kernel: The operator.
        flags: What the operator does.
        before: Its inputs before the tensors: which worker the states belong to, and the counters.
        weights: The weights.
        held: Their states and masters.
    """

    kernel: Callable[..., Any]
    flags: Tensor
    no_wires: Tensor
    before: Tensors
    weights: Tensors
    held: Tensors

    def __init__(
        self,
        kernel: Callable[..., Any],
        flags: Tensor,
        before: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
        held: Sequence[Tensor] = (),
    ):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags = kernel, flags
        self.no_wires = Tensor(np.zeros((1, 1), np.float32))
        unregistered(self, before=as_tuple(before), weights=as_tuple(weights), held=as_tuple(held))

    def construct(
        self, layout: Tensor, numbers: Tensors, sums: Tensor, skipping: Tensor, wires: Tensor, gradients: Tensors
    ) -> Tensor | Tensors:
        """Run the launch."""
        parts = ((skipping, wires), self.before, self.weights, gradients, self.held)
        constants, rates = numbers
        return launch(self.kernel, self.flags, layout, constants, rates, sums, *parts)


class ExchangeCell(nn.Cell):
    """The step of a period of training among several workers: send, exchange, apply."""

    sender: StageCell
    receiver: StageCell
    layout: Tensor
    compressed: bool
    words: int
    exchange: Callable[[Tensor], Tensor]

    def __init__(self, sender: StageCell, receiver: StageCell, layout: NDArray[np.int32], words: int, workers: Workers):
        super().__init__(auto_prefix=False)
        self.sender, self.receiver, self.layout = sender, receiver, Tensor(layout)
        self.compressed, self.words = bool(layout[:, -1].any()), words
        self.exchange = workers.exchange(self.compressed, words)

    def construct(self, numbers: Tensors, sums: Tensor, skipping: Tensor, gradients: Tensors) -> Tensor:
        """Run the launches of the period and the exchange between them."""
        sums, wire = self.send(numbers, sums, skipping, gradients)
        return self.apply(numbers, sums, skipping, self.exchange(wire), gradients)

    def send(self, numbers: Tensors, sums: Tensor, skipping: Tensor, gradients: Tensors) -> Tensor | Tensors:
        """Return the sums and this worker's send buffer."""
        return self.sender(self.layout, numbers, sums, skipping, self.sender.no_wires, gradients)

    def apply(
        self, numbers: Tensors, sums: Tensor, skipping: Tensor, wires: Tensor, gradients: Tensors
    ) -> Tensor | Tensors:
        """Accumulate, and update the weights by the values that the workers sent."""
        return self.receiver(self.layout, numbers, sums, skipping, wires, gradients)
