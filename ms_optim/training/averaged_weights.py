"""AveragedWeights: puts averaged weights into the parameters around evaluation, and saves them for use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mindspore import nn
from mindspore.train import Callback

from ..arguments.checks import check_at_most, fail
from ..base.any_optimizer import AnyOptimizer, is_any_optimizer, optimizer_of
from ..checkpoints.save_and_load import save

if TYPE_CHECKING:
    from mindspore.train import RunContext

    from ..arguments.checks import FilePath
    from ..base.any_optimizer import AnyOptimizer

NAME = "AveragedWeights"


class AveragedWeights(Callback):
    """Puts averaged weights into the parameters for ``Model.eval`` and the validation of ``Model.fit``.

    They are the average that `average_decay` keeps, or that of :class:`ms_optim.ScheduleFreeAdamW`. When the evaluation
    ends, the training weights are restored bit for bit; see :meth:`FusedOptimizer.averaged`. Pass the callback to
    ``Model.fit`` or to ``Model.eval``. A model that only evaluates has no optimizer, so pass `optimizer` then.

    Args:
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer; ``None`` means the model's optimizer.
            Default: ``None`` .
        network (Union[Cell, None]): The network whose averaged weights are saved for use when training ends. Default:
            ``None`` .
        path (Union[str, PathLike, None]): The file to which :func:`ms_optim.save` writes them. Default: ``None`` .
        weight (Union[float, int]): The weight of the average, from 0 to 1; the rest is that of the training weights.
            Default: ``1.0`` .

    Raises:
        TypeError: If an argument has the wrong type, or the model is not trained by an optimizer of this package.
        ValueError: If only one of `network` and `path` is given, or `weight` is not in the range [0, 1].
        RuntimeError: If the optimizer keeps no average of the weights.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AveragedWeights, ScheduleFreeAdamW
        >>> net = nn.Dense(4, 3)
        >>> optimizer = ScheduleFreeAdamW(net.trainable_params())
        >>> x, y = np.ones((64, 4), np.float32), np.zeros(64, np.int32)
        >>> data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(16)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy"})
        >>> model.fit(1, data, data, callbacks=[AveragedWeights()])
        >>> found = model.eval(data, callbacks=[AveragedWeights(optimizer)])
        >>> print(list(found))
        ['accuracy']
    """

    optimizer: AnyOptimizer | None
    network: nn.Cell | None
    path: FilePath | None
    weight: float

    def __init__(
        self,
        optimizer: AnyOptimizer | None = None,
        network: nn.Cell | None = None,
        path: FilePath | None = None,
        weight: float = 1.0,
    ):
        super().__init__()
        if optimizer is not None and not is_any_optimizer(optimizer):
            fail(TypeError, NAME, "optimizer", "an optimizer of ms_optim or None", optimizer)
        if network is not None and not isinstance(network, nn.Cell):
            fail(TypeError, NAME, "network", "a Cell or None", network)
        if path is not None and not isinstance(path, (str, os.PathLike)):
            fail(TypeError, NAME, "path", "a path or None", path)
        if (network is None) != (path is None):
            fail(ValueError, NAME, "path", "given if and only if 'network' is given", path)
        self.optimizer, self.network, self.path = optimizer, network, path
        self.weight = check_at_most(NAME, "weight", weight, 1.0)
        self._found: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Find the optimizer."""
        self._found = self._optimizer_of(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        """Save the averaged weights, if a path was given."""
        if self.path is not None:
            with self._found.averaged(self.weight):
                save(self.path, self.network)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Put the averaged weights into the parameters."""
        self._found = self._optimizer_of(run_context.original_args())
        self._found.eval(self.weight)

    def on_eval_end(self, run_context: RunContext) -> None:
        """Restore the training weights."""
        self._found.train()

    def _optimizer_of(self, arguments):
        if self.optimizer is not None:
            return self.optimizer
        return optimizer_of(NAME, arguments.get("optimizer"), arguments.get("train_network"))
