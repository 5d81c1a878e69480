"""Checkpoints that are written atomically, so that they survive a killed process, and that detect flipped bits.

A checkpoint is a safetensors file with checksums in its metadata. Its tensors are weights, states and the user's own
Tensors. Numbers, strings and dicts are stored as JSON in the metadata.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import nn
from mindspore.train import Callback

from ._arguments import check_count, check_type, fail
from ._checkpoint_content import gathered, take
from ._checkpoint_file import SpoiledError, write_file
from ._checkpoint_parts import STEP, candidates, part_path, place_of, sets_in
from ._state import Stateful
from .callbacks import optimizer_of

if TYPE_CHECKING:
    from mindspore.train import RunContext

    from ._arguments import FilePath
    from .local_steps import AnyOptimizer


class Loaded(NamedTuple):
    """The content of a checkpoint other than weights and states.

    Attributes:
        step: The optimizer's `global_step`, which does not count skipped steps; None if no optimizer was saved.
        more: The further values that were passed to :func:`save`, by name. Its Tensors are new objects.
    """

    step: int | None
    more: dict[str, Any]


def save(path: FilePath, net: nn.Cell | None = None, optimizer: AnyOptimizer | None = None, **more: Any) -> None:
    """Save weights, states and all other values that a run needs to resume.

    The new file is written next to the old one and replaces it after all data is on disk. A process that is killed at
    any time leaves either the old or the new file. Every tensor and the header have a checksum. No data is copied in
    host memory. The file has the safetensors format, so ``mindspore.load_checkpoint(path, format="safetensors")`` can
    also read its tensors.

    Call it on all processes. If states differ between workers, each worker saves a part: `run.0-of-4.safetensors` for
    `run.safetensors`. States differ with ``shard_states=True``, with a `shard_group`, with DGCMomentum and with
    LocalSteps. Otherwise the first process saves for all. A killed run may leave old and new parts: give each step a
    unique file name, as :class:`CheckpointSaver` does, and :func:`load` ignores an incomplete checkpoint.

    Args:
        path (Union[str, PathLike]): The file; its folder must exist. Its name should end with `.safetensors`.
        net (Union[Cell, None]): The network, whose parameters are saved by name; it may be ``model.train_network``.
            Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Its states are saved by their names from
            construction, and so are its weights that are not in `net`. Default: ``None`` .
        more: Further values to save, by name: numbers, strings, bools, None, Tensors, and lists, tuples and dicts of
            these.

    Returns:
        None.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor has a dtype that the format lacks.
        ValueError: If two tensors have the same name.
        OSError: If the file cannot be written; the old file is kept.

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, load, save
        >>> net, folder = nn.Dense(4, 3), tempfile.TemporaryDirectory()
        >>> optimizer = AdamW(net.trainable_params())
        >>> save(folder.name + "/run.safetensors", net, optimizer, epoch=3, best={"accuracy": 0.5})
        >>> step, more = load(folder.name + "/run.safetensors", net, optimizer)
        >>> print(step, more)
        0 {'epoch': 3, 'best': {'accuracy': 0.5}}
    """
    _check_arguments("save", path, net, optimizer)
    packed, entries = gathered(net, optimizer, more)
    place = place_of(optimizer)
    if place.saves:
        write_file(part_path(pathlib.Path(path), place.rank, place.count), _step_of(optimizer), packed, entries)


def load(
    path: FilePath, net: nn.Cell | None = None, optimizer: AnyOptimizer | None = None, strict: bool = True
) -> Loaded:
    """Load what :func:`save` wrote.

    Everything is checked before anything is changed: the header, the checksum of every tensor, names, shapes and
    dtypes. If an error is raised, nothing is changed. Values are written in place, so that compiled graphs also use
    them.

    If the number of workers has changed, sharded states and DGCMomentum's residuals are merged and redistributed. If
    `state_dtype` has changed, states are converted.

    Args:
        path (Union[str, PathLike]): The file, or the folder of a :class:`CheckpointSaver`. From a folder, the last
            checkpoint that is neither corrupted nor incomplete is loaded, with a warning for each later one.
        net (Union[Cell, None]): The network. Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Its weights that are not in `net` are also
            loaded. Default: ``None`` .
        strict (bool): Whether it is an error if the checkpoint lacks a name, or has a name that neither `net` nor
            `optimizer` has; if ``False`` , such names are ignored. Default: ``True`` .

    Returns:
        Loaded, the step and the further values.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        SpoiledError: If it is truncated or corrupted, or a worker's part is missing or from another step. It is a
            ValueError.
        TypeError: If an argument has the wrong type, or a tensor another dtype.
        ValueError: If a tensor has another shape.
        KeyError: If `strict` and a name is missing or unknown.

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from ms_optim import LANS, load, save
        >>> net, folder = nn.Dense(4, 3), tempfile.TemporaryDirectory()
        >>> optimizer = LANS(net.trainable_params(), 0.1)
        >>> save(folder.name + "/run.safetensors", net, optimizer, seed=1)
        >>> step, more = load(folder.name + "/run.safetensors", net, optimizer)
        >>> print(step, more)
        0 {'seed': 1}
    """
    _check_arguments("load", path, net, optimizer)
    check_type("load", "strict", strict, bool)
    path = pathlib.Path(path)
    spoiled: list[SpoiledError] = []
    for one in candidates(path):
        try:
            if isinstance(one, SpoiledError):
                raise one
            # Every worker checks all parts, so that all workers resume from the same checkpoint.
            for part in one:
                part.check()
        except SpoiledError as error:
            spoiled.append(error)
            continue
        for error in spoiled:
            warnings.warn(f"{error} The run resumes from {one[0].path}.", stacklevel=2)
        return Loaded(*take(one, net, optimizer, strict))
    raise spoiled[0]


def _step_of(optimizer: AnyOptimizer | None) -> int | None:
    return None if optimizer is None else int(optimizer.global_step.asnumpy()[0])


def _check_arguments(function: str, path: Any, net: Any, optimizer: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        fail(TypeError, function, "path", "a path", path)
    if net is not None and not isinstance(net, nn.Cell):
        fail(TypeError, function, "net", "a Cell or None", net)
    if optimizer is not None and not isinstance(optimizer, Stateful):
        fail(TypeError, function, "optimizer", "an optimizer of ms_optim or None", optimizer)


# ---- In Model.train ------------------------------------------------------------------------------------------------


class CheckpointSaver(Callback):
    """A callback of ``Model.train`` that saves every `every` steps, keeps the last few checkpoints, and resumes.

    :func:`save` writes the training network and its optimizer to `step-0000001000.safetensors` in the folder, with the
    optimizer's `global_step` in the name. Older checkpoints are removed after a new one is on disk. A run resumes from
    the last checkpoint in the folder; a checkpoint that is corrupted, or that not all workers finished, is ignored with
    a warning. The attribute `loaded` is the result of :func:`load`, or None if there was no checkpoint. The callback
    does not restore the position in the data set, which ``Model.train`` decides.

    Args:
        folder (Union[str, PathLike]): The folder of this run, shared by all workers. It is created if it is missing.
        every (int): The number of steps between checkpoints; another one is saved at the end of training. Default:
            ``1000`` .
        keep (int): Number of checkpoints to keep; at least 2 are kept if workers save parts. Default: ``2`` .
        resume (bool): Whether to load the last checkpoint when training begins. Default: ``True`` .
        more (Union[Callable[[], dict[str, Any]], None]): Returns further values to save, by name. Default:
            ``None`` .

    Raises:
        TypeError: If an argument has the wrong type, or the model is not trained by an optimizer of this package.
        ValueError: If `every` or `keep` is less than 1.

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
        >>> model.train(1, data, callbacks=[saver])
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
        self.folder, self.every, self.keep, self.resume, self._more = pathlib.Path(folder), every, keep, resume, more
        self.loaded = None
        self._saved_at = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Load the last checkpoint in the folder."""
        arguments = run_context.original_args()
        optimizer = optimizer_of(type(self).__name__, arguments.get("optimizer"), arguments.get("train_network"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._saved_at = arguments.cur_step_num
        if self.resume and sets_in(self.folder, STEP):
            self.loaded = load(self.folder, arguments.train_network, optimizer)

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
        path = self.folder / f"step-{_step_of(optimizer):010d}.safetensors"
        save(path, arguments.train_network, optimizer, **(self._more() if self._more else {}))
        self._saved_at = arguments.cur_step_num
        self._remove_older(path, place_of(optimizer))

    def _remove_older(self, path, place):
        """Remove older checkpoints, each worker some of their parts, and unfinished files of killed processes."""
        if not place.saves:
            return
        found = sets_in(self.folder, STEP)
        # Other workers may not have finished their parts; until then, the previous checkpoint is the last complete one.
        keep = max(self.keep, 2 if place.count > 1 else 1)
        older = sorted({name for name, _ in found if name <= path.name})[:-keep]
        for (name, _), files in found.items():
            for rank, file in files.items():
                if name in older and rank % place.count == place.rank:
                    file.unlink(missing_ok=True)
        part = part_path(self.folder / "step-*.safetensors", place.rank, place.count).name
        for unfinished in self.folder.glob(f".{part}.tmp"):
            unfinished.unlink(missing_ok=True)
