"""OptimizerMonitor: records the steps of an optimizer by layer, on the screen, in CSV files and in TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import pathlib
from typing import TYPE_CHECKING, Any

from mindspore import communication as comm
from mindspore.train import Callback

from ..arguments.checks import check_count, check_type, fail
from ..base.any_optimizer import AnyOptimizer, is_any_optimizer, optimizer_of
from .qk_clip import QKClip
from .readings import Reading, ReadingFiles, read, steps_of

if TYPE_CHECKING:
    from mindspore.train import RunContext

    from ..arguments.checks import FilePath
    from ..base.any_optimizer import AnyOptimizer

NAME = "OptimizerMonitor"


class OptimizerMonitor(Callback):
    """Prints and records the steps of an optimizer: norms, trust ratios, rates and skipped steps.

    It is a callback of ``Model.train``. In a training loop of your own, call :meth:`step` after each step. Each step
    computes its statistics anyway; the monitor reads them once per `every` steps and does nothing in between.

    A row of the CSV file has, for one step:

    - the number of skipped steps, and of gradients that are not finite;
    - the norms of gradient, weights and update, and the ratio of update norm to weight norm;
    - the smallest, median and largest trust ratio;
    - the learning rate and weight decay of each group of parameters that share them;
    - with DGCMomentum, the density, which is the fraction of all elements that a worker sends, and the norm of its
      residuals;
    - with `qk_clip`, the number of clipped heads.

    A second file next to it, `run.layers.csv` for `run.csv`, has a row for each parameter. A resumed run appends to its
    files. :func:`plot` plots them.

    If several processes train together, only the first one prints and records.

    Args:
        every (int): The number of steps between readings, including skipped steps. Default: ``100`` .
        csv (Union[str, PathLike, None]): The CSV file to write or append to. Default: ``None`` .
        tensorboard (Union[str, PathLike, None]): The folder for TensorBoard's files; this requires tensorboardX.
            Default: ``None`` .
        verbose (bool): Whether to print a line for each reading. Default: ``True`` .
        qk_clip (Union[QKClip, None]): The callback whose total number of clipped heads is recorded; it must come before
            the monitor in the list of callbacks. Default: ``None`` .

    Raises:
        TypeError: If an argument has the wrong type, or the model is not trained by an optimizer of this package.
        ValueError: If `every` is less than 1, `csv` belongs to another optimizer or other parameters, or the model has
            several optimizers of this package.
        ImportError: If `tensorboard` is given and tensorboardX is not installed.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Lamb, OptimizerMonitor
        >>> net = nn.Dense(4, 3, weight_init="ones", bias_init="zeros")
        >>> optimizer = Lamb(net.trainable_params(), learning_rate=0.01)
        >>> x, y = np.ones((64, 4), np.float32), np.zeros(64, np.int32)
        >>> data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(16)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
        >>> model.train(1, data, callbacks=[OptimizerMonitor(every=4)])
        Lamb step 4: learning rate 0.01; weight decay 0; gradient norm 1.66; weight norm 3.431; update/weight 0.01;
        trust ratio 0.01 to 1, median 0.5
    """

    every: int
    verbose: bool
    qk_clip: QKClip | None
    files: ReadingFiles | None
    folder: FilePath | None

    def __init__(
        self,
        every: int = 100,
        csv: FilePath | None = None,
        tensorboard: FilePath | None = None,
        verbose: bool = True,
        qk_clip: QKClip | None = None,
    ):
        super().__init__()
        check_count(NAME, "every", every, 1)
        check_type(NAME, "verbose", verbose, bool)
        if qk_clip is not None:
            check_type(NAME, "qk_clip", qk_clip, QKClip)
        for name, value in (("csv", csv), ("tensorboard", tensorboard)):
            if value is not None and not isinstance(value, (str, os.PathLike)):
                fail(TypeError, NAME, name, "a path or None", value)
        if tensorboard is not None and importlib.util.find_spec("tensorboardX") is None:
            raise ImportError(f"For '{NAME}', 'tensorboard' needs tensorboardX: pip install tensorboardX.")
        self.every, self.verbose, self.qk_clip = every, verbose, qk_clip
        self.files = None if csv is None else ReadingFiles(pathlib.Path(csv))
        self.folder = tensorboard
        self._writer = None
        self._optimizer: Any = None
        self._silent = False
        self._steps = self._read_at = self._cur_step_num = 0

    # ---- In a training loop ----

    def step(self, optimizer: AnyOptimizer) -> None:
        """Count a step of an optimizer, and read the optimizer every `every` steps.

        Args:
            optimizer: The optimizer.

        Raises:
            TypeError: If `optimizer` is not from this package.
            ValueError: If the CSV file belongs to another optimizer or other parameters.
        """
        if optimizer is not self._optimizer:
            if not is_any_optimizer(optimizer):
                fail(TypeError, NAME, "optimizer", "an optimizer of ms_optim", optimizer)
            self._begin(optimizer, 1)
        self._advance(1)

    def close(self) -> None:
        """Close TensorBoard's file; the end of a ``with`` statement also closes it."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._optimizer = None

    def __exit__(self, *err: Any) -> None:
        self.close()

    # ---- In Model.train ----

    def on_train_begin(self, run_context: RunContext) -> None:
        """Find the optimizer and check the CSV file before training starts."""
        arguments = run_context.original_args()
        self._begin(optimizer_of(NAME, arguments.get("optimizer"), arguments.get("train_network")))
        self._cur_step_num = arguments.cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Count the steps since the last call, which are several in sink mode, and read the optimizer if it is due."""
        now = run_context.original_args().cur_step_num
        self._advance(now - self._cur_step_num)
        self._cur_step_num = now

    def on_train_end(self, run_context: RunContext) -> None:
        """Close TensorBoard's file."""
        self.close()

    # ---- In both ----

    def _begin(self, optimizer, taken=0):
        """Begin with an optimizer; `taken` of its steps have not been counted yet."""
        self.close()
        self._optimizer = optimizer
        self._silent = comm.GlobalComm.INITED and comm.get_rank() != 0
        self._steps = self._read_at = steps_of(optimizer) - taken
        if self._silent:
            return
        if self.files is not None:
            self.files.prepare(self._read())
        if self.folder is not None:
            # If the run was resumed at an earlier step, later steps that it has already written are dropped.
            writer = importlib.import_module("tensorboardX").SummaryWriter
            self._writer = writer(str(self.folder), purge_step=self._steps + 1 if self._steps else None)

    def _read(self):
        reading = read(self._optimizer)
        if self.qk_clip is not None:
            reading.totals["clipped_heads"] = self.qk_clip.total
        return reading

    def _advance(self, steps):
        before = self._steps
        self._steps += steps
        if self._silent or self._steps // self.every == before // self.every:
            return
        reading = self._read()
        # A training step that finds an overflow may skip the optimizer.
        if reading.step == self._read_at:
            return
        self._read_at = reading.step
        if self.verbose:
            print(line(reading), flush=True)
        if self.files is not None:
            self.files.append(reading)
        if self._writer is not None:
            for tag, value in scalars(reading):
                self._writer.add_scalar(tag, value, reading.step)


def line(reading: Reading) -> str:
    """Return one line with the main numbers of a reading."""
    totals = reading.totals

    def span(name):
        values = [value for key, value in totals.items() if key.startswith(name)]
        return " to ".join(f"{value:.4g}" for value in dict.fromkeys((min(values), max(values))))

    parts = [
        f"learning rate {span('learning_rate.')}",
        f"weight decay {span('weight_decay.')}",
        f"gradient norm {totals['gradient_norm']:.3g}",
    ]
    if math.isnan(totals["weight_norm"]) and totals["update_norm"] == 0:
        parts.append("SKIPPED")
    else:
        parts.append(f"weight norm {totals['weight_norm']:.4g}")
        parts.append(f"update/weight {totals['update_ratio']:.2g}")
        if is_layerwise(reading):
            low, middle, high = (totals[f"trust_ratio_{name}"] for name in ("min", "median", "max"))
            parts.append(f"trust ratio {low:.2g} to {high:.2g}, median {middle:.2g}")
    if "density" in totals:
        parts.append(f"density {totals['density']:.3g}, residual norm {totals['residual_norm']:.3g}")
    if totals.get("clipped_heads"):
        parts.append(f"heads clipped so far: {totals['clipped_heads']}")
    if totals["nonfinite_gradients"]:
        parts.append(f"NOT FINITE: {totals['nonfinite_gradients']} of {len(reading.parameters)} gradients")
    if totals["skipped_steps"]:
        parts.append(f"skipped so far: {totals['skipped_steps']}")
    return f"{reading.optimizer} step {reading.step}: " + "; ".join(parts)


def is_layerwise(reading: Reading) -> bool:
    """Return whether a reading is of a rule with trust ratios; for other rules all of them are 1."""
    return not reading.totals["trust_ratio_min"] == reading.totals["trust_ratio_max"] == 1.0


def scalars(reading: Reading) -> list[tuple[str, float]]:
    """Return the numbers of a reading for TensorBoard, as pairs of tag and number."""
    totals, layers = reading.totals, {"update_ratio": reading.layers["update_ratio"]}
    if is_layerwise(reading):
        layers["trust_ratio"] = reading.layers["trust_ratio"]
    found = [(name.replace(".", "/") if "." in name else f"optimizer/{name}", x) for name, x in totals.items()]
    for name, column in layers.items():
        found += [(f"{name}/{parameter}", x) for parameter, x in zip(reading.parameters, column)]
    return [(tag, float(x)) for tag, x in found if not math.isnan(x)]
