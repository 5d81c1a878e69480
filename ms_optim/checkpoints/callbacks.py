"""Checkpoints that are written atomically, so that they survive a killed process, and that detect flipped bits.

:func:`save` and :func:`load` are in checkpoints/save_and_load.py; here is what saves and resumes in ``Model.train``.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspore.train import Callback

from ..arguments.checks import check_choice, check_count, check_type, fail
from ..base.any_optimizer import optimizer_of
from ..base.state_dict import LEARNING_RATE
from ..states.shares import peers
from .atomic_file import remove_unfinished
from .header import SpoiledError
from .parts import STEP, Checkpoint, Place, checkpoints_in, part_path, place_of, saved_at
from .save_and_load import Loaded, loaded_from, save

if TYPE_CHECKING:
    from mindspore.train import RunContext

    from ..arguments.checks import FilePath


class CheckpointSaver(Callback):
    """A callback of ``Model.train`` that saves every `every` steps, keeps the last few checkpoints, and resumes.

    :func:`save` writes the training network and its optimizer to `step-0000001000.safetensors` in the folder, with the
    optimizer's `global_step` in the name, or the `local_step` of LocalSteps. Older checkpoints are removed after a new
    one is on disk. A run resumes from the checkpoint in the folder that was saved last, and prints its name and step; a
    checkpoint that is corrupted, or that not all workers finished, is ignored with a warning. The attribute `loaded` is
    the result of :func:`load`, or None if there was no checkpoint.

    ``Model.train`` decides the number of epochs and the position in the data set, which are not restored: a restarted
    ``model.train(2, ...)`` trains 2 further epochs from the first batch.

    Args:
        folder (Union[str, PathLike]): The folder of this run, shared by all workers. It is created if it is missing.
        every (int): The number of steps between checkpoints; another one is saved at the end of training. Default:
            ``1000`` .
        keep (int): Number of checkpoints to keep; at least 2 are kept if workers save parts. Default: ``2`` .
        resume (bool): Whether to load the last checkpoint when training begins. If ``False`` , the folder must have
            no checkpoint of another run, because a later restart would resume from one of both. Default: ``True`` .
        more (Union[Callable[[], dict[str, Any]], None]): Returns further values to save, by name. Default:
            ``None`` .
        learning_rate (str): As :func:`load` takes it: ``"load"`` resumes with the learning rate of the checkpoint,
            ``"keep"`` with that of the optimizer. Default: ``"load"`` .

    Raises:
        TypeError: If an argument has the wrong type, or the model is not trained by an optimizer of this package.
        ValueError: If `every` or `keep` is less than 1, `learning_rate` is not one of these, or, when training begins,
            `resume` is ``False`` and the folder has a checkpoint of another run.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, CheckpointSaver
        >>> net, folder = nn.Dense(4, 3), tempfile.TemporaryDirectory()
        >>> x, y = np.ones((64, 4), np.float32), np.zeros(64, np.int32)
        >>> data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(16)
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), AdamW(net.trainable_params()))
        >>> model.train(1, data, callbacks=[CheckpointSaver(folder.name, every=2)])
        >>> saver = CheckpointSaver(folder.name)
        >>> model.train(1, data, callbacks=[saver])  # doctest: +ELLIPSIS
        ms_optim: resumed from ...step-0000000004.safetensors at step 4.
        >>> print(saver.loaded.step)
        4
    """

    folder: pathlib.Path
    every: int
    keep: int
    resume: bool
    loaded: Loaded | None

    def __init__(
        self,
        folder: FilePath,
        every: int = 1000,
        keep: int = 2,
        resume: bool = True,
        more: Callable[[], dict[str, Any]] | None = None,
        learning_rate: str = "load",
    ):
        super().__init__()
        name = type(self).__name__
        if not isinstance(folder, (str, os.PathLike)):
            fail(TypeError, name, "folder", "a path", folder)
        check_count(name, "every", every, 1)
        check_count(name, "keep", keep, 1)
        check_type(name, "resume", resume, bool)
        if more is not None and not callable(more):
            fail(TypeError, name, "more", "a function or None", more)
        check_choice(name, "learning_rate", learning_rate, LEARNING_RATE)
        self.folder, self.every, self.keep, self.resume, self._more = pathlib.Path(folder), every, keep, resume, more
        self._learning_rate = learning_rate
        self.loaded = None
        self._saved_at = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Load the last checkpoint in the folder."""
        arguments = run_context.original_args()
        optimizer = optimizer_of(type(self).__name__, arguments.get("optimizer"), arguments.get("train_network"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._saved_at = arguments.cur_step_num
        found = checkpoints_in(self.folder)
        if self.resume and found:
            network = arguments.train_network
            self.loaded, path = loaded_from(self.folder, network, optimizer, True, self._learning_rate)
            if peers().rank == 0:
                print(f"ms_optim: resumed from {path} at step {self.loaded.step}.", flush=True)
        elif found and place_of(optimizer).saves:
            last = found[0]
            if last.first is None or last.first.origin.run != optimizer._run:
                raise ValueError(
                    f"For '{type(self).__name__}', with resume=False the folder must have no checkpoint of another "
                    f"run, but has {last.path}: choose another folder, remove these checkpoints, or resume from them."
                )

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Save if `every` steps have passed; in sink mode, one call is made for several steps."""
        if run_context.original_args().cur_step_num - self._saved_at >= self.every:
            self._save(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        """Save if there were steps since the last checkpoint."""
        if run_context.original_args().cur_step_num > self._saved_at:
            self._save(run_context.original_args())

    def _save(self, arguments):
        optimizer = optimizer_of(type(self).__name__, arguments.get("optimizer"), arguments.get("train_network"))
        path = self.folder / f"step-{saved_at(optimizer):010d}.safetensors"
        save(path, arguments.train_network, optimizer, **(self._more() if self._more else {}))
        self._saved_at = arguments.cur_step_num
        place = place_of(optimizer)
        if place.saves:
            self._remove_older(path, place, optimizer._run)

    def _remove_older(self, path: pathlib.Path, place: Place, run: str | None) -> None:
        """Remove older checkpoints, each worker some of their parts, and unfinished files of killed processes."""
        found = checkpoints_in(self.folder)
        own = next((k for k, one in enumerate(found) if (one.path, one.count) == (path, place.count)), len(found))
        # Other workers may not have finished their parts; until then, the previous checkpoint is the last complete one.
        kept, keep = 1, max(self.keep, 2 if place.count > 1 else 1)
        for one in found[own + 1 :]:
            if kept < keep and _is_complete(one):
                kept += 1
            elif one.first is None or one.first.origin.run in ("", run):
                for rank, file in one.files.items():
                    if rank % place.count == place.rank:
                        file.unlink(missing_ok=True)
        part = part_path(pathlib.Path("STEP.safetensors"), place.rank, place.count).name
        remove_unfinished(self.folder, re.escape(part).replace("STEP", STEP, 1))


def _is_complete(one: Checkpoint) -> bool:
    try:
        one.parts()
    except SpoiledError:
        return False
    return True
