"""A training step that frees each gradient immediately after its use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from ..arguments.checks import check_type, fail
from ..base.optimizer import FusedOptimizer


class ReleasedTrainStep(nn.Cell):
    """Runs forward, backward and update; each weight is updated inside the backward pass.

    The loss is multiplied by the optimizer's `loss_scale`, and the optimizer divides the gradients by it. If a pass
    fails, or is interrupted, the step is discarded and not counted; the error states how many parameters were updated.

    Args:
        net (Cell): The network; it returns the loss if `loss_fn` is None.
        loss_fn (Union[Callable, None]): Takes the network's output and the last input, and returns the loss.
        optimizer (FusedOptimizer): The optimizer; :meth:`FusedOptimizer.attach` is called for it.
        passes (int): See :meth:`FusedOptimizer.attach`. Default: ``1`` .

    Inputs:
        inputs (Tensor): The inputs of the network; with `loss_fn`, the last input is the label.

    Outputs:
        Tensor, the loss.

    Raises:
        TypeError: If `net` is not a Cell, `loss_fn` is not a function, or `optimizer` is not from this package.
        RuntimeError: If :meth:`FusedOptimizer.attach` raises it.

    Supported Platforms:
        ``CPU`` ``GPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn, ops
        >>> from ms_optim import AdamW, ReleasedTrainStep
        >>> net = nn.Dense(4, 1)
        >>> step = ReleasedTrainStep(net, nn.MSELoss(), AdamW(net.trainable_params(), 1e-2))
        >>> loss = step(ops.ones((8, 4)), ops.zeros((8, 1)))
    """

    net: nn.Cell
    loss_fn: Callable[..., Tensor] | None
    optimizer: FusedOptimizer
    forward_and_backward: Callable[..., Any]

    def __init__(self, net: nn.Cell, loss_fn: Callable[..., Tensor] | None, optimizer: FusedOptimizer, passes: int = 1):
        super().__init__(auto_prefix=False)
        name = type(self).__name__
        check_type(name, "net", net, nn.Cell)
        if loss_fn is not None and not callable(loss_fn):
            fail(TypeError, name, "loss_fn", "a function or None", loss_fn)
        if not isinstance(optimizer, FusedOptimizer):
            fail(TypeError, name, "optimizer", "an optimizer of ms_optim", optimizer)
        self.net, self.loss_fn, self.optimizer = net, loss_fn, optimizer
        optimizer.attach(passes)
        self.forward_and_backward = ms.value_and_grad(self._loss, None, optimizer.parameters)

    def _loss(self, *inputs):
        """Return the loss, multiplied by the loss scale."""
        if self.loss_fn is None:
            return self.net(*inputs) * self.optimizer.loss_scale
        return self.loss_fn(self.net(*inputs[:-1]), inputs[-1]) * self.optimizer.loss_scale

    def construct(self, *inputs: Any) -> Tensor:
        """Take a step, and return the loss."""
        while True:
            try:
                loss, _ = self.forward_and_backward(*inputs)
            except BaseException as error:
                moved = self.optimizer.abandon()
                if not isinstance(error, Exception):
                    raise  # an interrupt is not an error
                raise RuntimeError(
                    f"For '{self.optimizer.cls_name}', a backward pass failed. The step is not counted, and "
                    f"{len(moved)} parameters were updated. Training can go on with the next batch."
                ) from error
            if self.optimizer.finish():
                return loss / self.optimizer.loss_scale
