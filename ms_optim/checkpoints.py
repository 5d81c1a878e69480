"""Checkpoints that survive a killed process, which leaves the old one or the new one, and that detect flipped bits.

A checkpoint is a file in the format safetensors, with checksums in its metadata. Its tensors are weights, states and
the user's own Tensors; numbers, strings and dicts are JSON in the metadata.
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
    """The content of a checkpoint besides weights and states.

    Attributes:
        step: The optimizer's `global_step`, which does not count skipped steps; None if no optimizer was saved.
        more: The further values that were passed to :func:`save`, by name. Tensors are new ones.
    """

    step: int | None
    more: dict[str, Any]


def save(path: FilePath, net: nn.Cell | None = None, optimizer: AnyOptimizer | None = None, **more: Any) -> None:
    """Save weights, states and whatever else a run needs to go on.

    The file is written beside the old one and replaces it once it is on the disk: a process that is killed at any
    moment leaves the old file or the new one. Every tensor and the header have a checksum. Nothing is copied in host
    memory. The file is in the format safetensors: ``mindspore.load_checkpoint(path, format="safetensors")`` reads its
    tensors, too.

    Call it on all processes. Workers whose states differ each save a part: `run.0-of-4.safetensors` for
    `run.safetensors`. Their states differ with ``shard_states=True``, with a `shard_group` and with DGCMomentum.
    Otherwise the first process saves for all. Each part is the old or the new one: give each step a name of its own, as
    :class:`CheckpointSaver` does, and :func:`load` ignores a checkpoint that is not whole.

    Args:
        path (Union[str, PathLike]): The file, whose folder must be there. Its name should end with `.safetensors`.
        net (Union[Cell, None]): The network, whose parameters are saved by name; it may be ``model.train_network``.
            Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Its states are saved by their names from
            construction, and so are those of its weights that are not in `net`. Default: ``None`` .
        more: Further values to save, by name: numbers, strings, bools, None, Tensors, and lists, tuples and dicts of
            these.

    Returns:
        None.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor has a dtype that the format lacks.
        ValueError: If two tensors have the same name.
        OSError: If the file cannot be written; the old one stays then.

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
    """Go on from what :func:`save` wrote.

    Everything is checked before anything is changed: the header, the checksum of every tensor, names, shapes and
    dtypes. Where an error is raised, nothing is changed. Numbers are written into the memory that weights and states
    have, so that compiled graphs see them.

    If the number of workers has changed, sharded states and DGCMomentum's residuals are merged and divided anew. If
    `state_dtype` has changed, states are converted.

    Args:
        path (Union[str, PathLike]): The file, or the folder of a :class:`CheckpointSaver`. Of a folder, the last
            checkpoint is loaded that is neither spoiled nor incomplete, with a warning for each later one.
        net (Union[Cell, None]): The network. Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Those of its weights that are not in `net`
            are loaded, too. Default: ``None`` .
        strict (bool): Whether names that the checkpoint lacks, or that neither `net` nor `optimizer` has, are an error;
            if not, they are ignored. Default: ``True`` .

    Returns:
        Loaded, the step and the further values.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        SpoiledError: If it is cut off or spoiled, or a worker's part is missing or of another step. It is a ValueError.
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
            # Every worker checks all parts, so that all workers go on from the same checkpoint.
            for part in one:
                part.check()
        except SpoiledError as error:
            spoiled.append(error)
            continue
        for error in spoiled:
            warnings.warn(f"{error} The run goes on from {one[0].path}.", stacklevel=2)
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
    optimizer's `global_step` in the name. Older checkpoints are removed once a new one is on the disk. The run begins
    where the last checkpoint in the folder ended; one that is spoiled, or that not all workers finished, is ignored
    with a warning. The attribute `loaded` is what :func:`load` returned, or None where there was no checkpoint. The
    callback does not move the data: ``Model.train`` decides where they begin.

    Args:
        folder (Union[str, PathLike]): The folder of this run, which all workers see. It is created if it is missing.
        every (int): The number of steps from one checkpoint to the next; there is one at the end of training, too.
            Default: ``1000`` .
        keep (int): How many checkpoints are kept; at least 2 where workers save parts. Default: ``2`` .
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
        """Save if `every` steps have passed; in sink mode, one call stands for several steps."""
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
        """Remove older checkpoints, each worker some parts of them, and unfinished files of killed processes."""
        if not place.saves:
            return
        found = sets_in(self.folder, STEP)
        # Other workers may not have finished their parts: until then, the checkpoint before is the last whole one.
        keep = max(self.keep, 2 if place.count > 1 else 1)
        older = sorted({name for name, _ in found if name <= path.name})[:-keep]
        for (name, _), files in found.items():
            for rank, file in files.items():
                if name in older and rank % place.count == place.rank:
                    file.unlink(missing_ok=True)
        part = part_path(self.folder / "step-*.safetensors", place.rank, place.count).name
        for unfinished in self.folder.glob(f".{part}.tmp"):
            unfinished.unlink(missing_ok=True)
