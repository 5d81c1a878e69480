"""Checkpoints: a process that is killed leaves the old one or the new one, and a flipped bit is named.

A checkpoint is a file in the format safetensors, with checksums in its metadata. Weights, states and Tensors of one's
own are its tensors; numbers, strings and dicts are JSON in the metadata.
"""

# It reads optimizers from within the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import collections
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import Parameter, Tensor, nn
from mindspore.train import Callback

from ._arguments import check_count, check_type, fail
from ._base import FusedOptimizer
from ._checkpoint_file import DTYPES, NAMES, File, SpoiledError, write_file
from ._shares import ENTRY, merge_states, workers
from ._state import write
from .callbacks import optimizer_of
from .residuals import fold_residuals

if TYPE_CHECKING:
    from mindspore.train import RunContext

    from ._arguments import FilePath

# What a tensor of a checkpoint is.
WEIGHT, STATE, MORE = "weight", "state", "more"


class Loaded(NamedTuple):
    """What a checkpoint holds besides weights and states.

    Attributes:
        step: The optimizer's `global_step`, the steps taken without those skipped; None if no optimizer was saved.
        more: What was handed to :func:`save` by name. Tensors are new ones.
    """

    step: int | None
    more: dict[str, Any]


# ---- What is handed over besides -----------------------------------------------------------------------------------


def _packed(value: Any, place: str, tensors: list[tuple[str, Tensor]]) -> Any:
    """Return a value as JSON, and note the Tensors in it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append((place, value))
        return {"tensor": place}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(v, f"{place}.{k}", tensors) for k, v in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(v, f"{place}.{key}", tensors) for key, v in value.items()}}
    what = "a number, string, bool, None, Tensor, or a list, tuple or dict of these with strings as keys"
    return fail(TypeError, "save", place.removeprefix(f"{MORE}."), what, value)


def _unpacked(value: Any, file: File) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return Tensor(file.array(held), DTYPES[file.entries[held].dtype])
    if kind == "dict":
        return {key: _unpacked(v, file) for key, v in held.items()}
    values = [_unpacked(v, file) for v in held]
    return tuple(values) if kind == "tuple" else values


# ---- The files of a checkpoint -------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Which worker's part of a checkpoint this process saves and takes, of how many, and whether it is to save."""

    rank: int
    count: int
    saves: bool


def _place(optimizer: FusedOptimizer | None) -> Place:
    """Return the place among workers whose checkpoints differ; where they do not, the first process saves for all."""
    if optimizer is not None and getattr(optimizer, "workers", None) is not None:
        these = optimizer.workers
        return Place(these.rank, these.count, these.local_rank == 0)
    these = optimizer.shares.workers if optimizer is not None and optimizer.shares else workers()
    if optimizer is not None and (optimizer.shares or optimizer.is_sliced):
        return Place(these.rank, these.count, True)
    return Place(0, 1, these.rank == 0)


def _part(path: pathlib.Path, rank: int, count: int) -> pathlib.Path:
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}{path.suffix}")


PART = re.compile(r"(?P<stem>.*)\.(?P<rank>\d+)-of-(?P<count>\d+)")


def _sets(folder: pathlib.Path, name: re.Pattern) -> dict[tuple[str, int], dict[int, pathlib.Path]]:
    """Return the files in a folder by checkpoint and number of workers, then by rank."""
    found: dict[tuple[str, int], dict[int, pathlib.Path]] = collections.defaultdict(dict)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        part = PART.fullmatch(path.stem)
        stem, rank, count = (part["stem"], int(part["rank"]), int(part["count"])) if part else (path.stem, 0, 1)
        if name.fullmatch(stem + path.suffix):
            found[stem + path.suffix, count][rank] = path
    return found


def _candidates(path: pathlib.Path) -> Iterator[list[File] | SpoiledError]:
    """Yield what there is to load, the last step first: the files of a checkpoint, or why they cannot be read."""
    kept = path.is_dir()
    found = _sets(path, STEP) if kept else _sets(path.parent, re.compile(re.escape(path.name)))
    if not found:
        raise FileNotFoundError(f"ms_optim: there is no checkpoint {path}.")
    read: list[tuple[float, list[File] | SpoiledError]] = []
    for (name, count), files in found.items():
        try:
            one = _read_set(path / name if kept else path, count, files)
            step = one[0].step
        except SpoiledError as error:
            one, step = error, int(name[5:-12]) if kept else math.inf
        read.append((-1 if step is None else step, one))
    # Where a step stands twice, on other numbers of workers, what can be read goes first.
    read.sort(key=lambda each: (each[0], not isinstance(each[1], SpoiledError)), reverse=True)
    yield from (one for _, one in read)


def _read_set(path: pathlib.Path, count: int, files: dict[int, pathlib.Path]) -> list[File]:
    missing = sorted(set(range(count)) - files.keys())
    if missing:
        raise SpoiledError(f"ms_optim: the checkpoint {path} of {count} workers lacks the parts of workers {missing}.")
    parts = [File(files[rank]) for rank in range(count)]
    steps = [part.step for part in parts]
    if len(set(steps)) > 1:
        raise SpoiledError(f"ms_optim: the checkpoint {path} is not whole: its parts are of the steps {steps}.")
    return parts


# ---- Saving and loading --------------------------------------------------------------------------------------------


def save(path: FilePath, net: nn.Cell | None = None, optimizer: FusedOptimizer | None = None, **more: Any) -> None:
    """Save weights, states and what else a run needs to go on.

    The file is written beside the old one, reaches the disk, and then takes its place: a process that is killed at any
    moment leaves the old file or the new one. Every tensor and the header have a checksum. Nothing is copied in
    host memory. The file is in the format safetensors: ``mindspore.load_checkpoint(path, format="safetensors")`` reads
    its tensors, too.

    Several workers each save a part where their states differ, those of an optimizer with ``shard_states=True``, with a
    `shard_group`, or of DGCMomentum: `run.0-of-4.safetensors` for `run.safetensors`. Each part is the old or the new
    one; in one folder for each step, as :class:`CheckpointSaver` has it, a checkpoint that is not whole is passed over.
    Elsewhere the first process saves for all; call it on all of them.

    Args:
        path (Union[str, PathLike]): The file, whose folder must be there. Its name should end with `.safetensors`.
        net (Union[Cell, None]): The network, whose parameters are saved by name; ``model.train_network`` will do, too.
            Default: ``None`` .
        optimizer (Union[FusedOptimizer, None]): The optimizer, whose states are saved, by their names from
            construction, with those of its weights that are not in `net`. Default: ``None`` .
        more: What else to save, by name: numbers, strings, bools, None, Tensors, and lists, tuples and dicts of these.

    Returns:
        None.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor has a dtype that the format lacks.
        ValueError: If two tensors have the same name.
        OSError: If the file cannot be written; the old one is left then.

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
    found: list[tuple[str, Tensor]] = []
    packed = _packed(more, MORE, found)
    everything = [(WEIGHT, name, p) for name, p in _weights("save", net, optimizer).items()]
    if optimizer is not None:
        everything += [(STATE, name, p) for name, p in optimizer._own_parameters().items()]
    everything += [(MORE, name, tensor) for name, tensor in found]
    entries: dict[str, tuple[str, Tensor]] = {}
    for kind, name, tensor in everything:
        if name in entries or name == "__metadata__":
            raise ValueError(f"For 'save', each tensor must have a name of its own, but {name!r} stands twice.")
        if tensor.dtype not in NAMES:
            raise TypeError(f"For 'save', {name!r} must have one of the dtypes {list(NAMES)}, but has {tensor.dtype}.")
        if isinstance(tensor, Parameter) and tensor.has_init:
            tensor.init_data()
        entries[name] = kind, tensor
    place = _place(optimizer)
    if place.saves:
        write_file(_part(pathlib.Path(path), place.rank, place.count), _step_of(optimizer), packed, entries)


def load(
    path: FilePath, net: nn.Cell | None = None, optimizer: FusedOptimizer | None = None, strict: bool = True
) -> Loaded:
    """Go on from what :func:`save` wrote.

    Everything is checked before anything is changed: the header, the checksum of every tensor, names, shapes and
    dtypes. Where an error is raised, nothing is changed. Numbers are written into the memory that weights and states
    have, so that graphs that are compiled see them.

    Where the number of workers is another one, states that are split and DGCMomentum's residuals are put together and
    divided anew; where `state_dtype` is another one, states are converted.

    Args:
        path (Union[str, PathLike]): The file; or the folder of a :class:`CheckpointSaver`, of whose checkpoints the
            last one is taken that is neither spoiled nor incomplete, with a warning for each one that is.
        net (Union[Cell, None]): The network. Default: ``None`` .
        optimizer (Union[FusedOptimizer, None]): The optimizer; those of its weights that are not in `net` are loaded,
            too. Default: ``None`` .
        strict (bool): Whether names that are missing in the checkpoint or not known to `net` and `optimizer` are an
            error; if not, they are passed over. Default: ``True`` .

    Returns:
        Loaded, the step and what else was saved.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        SpoiledError: A ValueError, if it is cut off or spoiled, or a worker's part is missing or of another step.
        TypeError: If an argument has the wrong type, or a tensor another dtype.
        ValueError: If a tensor has another shape.
        KeyError: If `strict` and a name is missing or not known.

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
    for one in _candidates(path):
        try:
            if isinstance(one, SpoiledError):
                raise one
            # All parts on all workers: else some would go on from another checkpoint than others.
            for part in one:
                part.check()
        except SpoiledError as error:
            spoiled.append(error)
            continue
        for error in spoiled:
            warnings.warn(f"{error} The run goes on from {one[0].path}.", stacklevel=2)
        return _take(one, net, optimizer, strict)
    raise spoiled[0]


def _take(parts: list[File], net: nn.Cell | None, optimizer: FusedOptimizer | None, strict: bool) -> Loaded:
    """Load a checkpoint whose bytes are known to be right."""
    place = _place(optimizer)
    if len(parts) != place.count and optimizer is not None and optimizer.is_sliced:
        raise ValueError(
            f"For 'load', the optimizer's tensors are split over {place.count} processes, but the checkpoint "
            f"{parts[0].path} is of {len(parts)}."
        )
    own = parts[place.rank if len(parts) == place.count else 0]
    weights = _weights("load", net, optimizer)
    given = {name for name, entry in own.entries.items() if entry.kind == WEIGHT}
    missing, unknown = sorted(weights.keys() - given), sorted(given - weights.keys()) if net is not None else []
    if strict and (missing or unknown):
        what = f"lacks the weight {missing[0]!r}" if missing else f"has the weight {unknown[0]!r}, which is not known"
        raise KeyError(f"For 'load', the checkpoint {own.path} {what}; it is one of {len(missing or unknown)}.")
    written = []
    for name in weights.keys() & given:
        p, entry = weights[name], own.entries[name]
        if tuple(p.shape) != entry.shape:
            raise ValueError(
                f"For 'load', the weight {name!r} must have the shape {p.shape}, but has {entry.shape} in {own.path}."
            )
        if p.dtype != DTYPES[entry.dtype]:
            raise TypeError(
                f"For 'load', the weight {name!r} must be of dtype {p.dtype}, but is {DTYPES[entry.dtype]} in "
                f"{own.path}."
            )
        written.append((p, own.array(name)))
    if optimizer is not None:
        written += optimizer._fitting(_states(parts, own, optimizer, place), strict)
    more = _unpacked(own.more, own)
    for p, value in written:
        write(p, value)
    return Loaded(own.step, more)


def _states(parts: list[File], own: File, optimizer: FusedOptimizer, place: Place) -> dict[str, Tensor]:
    """Return the states that this worker takes."""
    given = own.tensors(STATE)
    if ENTRY in given:
        same = optimizer.shares and given[ENTRY].asnumpy().tobytes() == optimizer.state_shares.asnumpy().tobytes()
        return given if same else merge_states([part.tensors(STATE) for part in parts])
    if "dgc_worker" in given and len(parts) != place.count:
        return fold_residuals([part.tensors(STATE) for part in parts], place.count)[place.rank]
    return given


def _weights(function: str, net: nn.Cell | None, optimizer: FusedOptimizer | None) -> dict[str, Parameter]:
    """Return the parameters that are no states, each once: those of the network, then what else the optimizer moves."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    named: Iterable[tuple[str, Parameter]] = ()
    if optimizer is not None:
        own = optimizer._own_parameters()
        seen = {id(p) for p in (*own.values(), optimizer.statistics)}
        named = [(name, p) for name, p in optimizer._named_parameters().items() if name not in own]
    placed = [] if net is None else [(p.name, p) for p in net.get_parameters()]
    for name, p in (*placed, *named):
        if id(p) in seen:
            continue
        if name in found:
            raise ValueError(f"For '{function}', two parameters have the name {name!r}: give each a name of its own.")
        seen.add(id(p))
        found[name] = p
    return found


def _step_of(optimizer: FusedOptimizer | None) -> int | None:
    return None if optimizer is None else int(optimizer.global_step.asnumpy()[0])


def _check_arguments(function: str, path: Any, net: Any, optimizer: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        fail(TypeError, function, "path", "a path", path)
    if net is not None and not isinstance(net, nn.Cell):
        fail(TypeError, function, "net", "a Cell or None", net)
    if optimizer is not None and not isinstance(optimizer, FusedOptimizer):
        fail(TypeError, function, "optimizer", "an optimizer of ms_optim or None", optimizer)


# ---- In Model.train ------------------------------------------------------------------------------------------------

STEP = re.compile(r"step-\d{10}\.safetensors")


class CheckpointSaver(Callback):
    """A callback of ``Model.train`` that saves every so many steps, keeps the last few checkpoints, and resumes.

    A checkpoint is what :func:`save` writes of the training network and its optimizer: `step-0000001000.safetensors` in
    the folder, by the optimizer's `global_step`. Older ones are removed once a new one is on the disk. The run begins
    where the last checkpoint in the folder left off; one that is spoiled, or that not all workers finished, is passed
    over with a warning. What :func:`load` returned is the attribute `loaded`, None where there was no checkpoint. The
    data begins where ``Model.train`` is told to begin.

    Args:
        folder (Union[str, PathLike]): The folder of this run, which all workers see. It is made if need be.
        every (int): The number of steps from one checkpoint to the next; the end of training has one, too.
            Default: ``1000`` .
        keep (int): How many checkpoints are kept; 2 at least where several workers save parts. Default: ``2`` .
        resume (bool): Whether to load the last checkpoint when training begins. Default: ``True`` .
        more (Union[Callable[[], dict[str, Any]], None]): Returns what else to save, by name. Default: ``None`` .

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
        if self.resume and _sets(self.folder, STEP):
            self.loaded = load(self.folder, arguments.train_network, optimizer)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Save if it is time to; where data sinks, one call stands for many steps."""
        if run_context.original_args().cur_step_num - self._saved_at >= self.every:
            self._save(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        """Save what came since the last checkpoint."""
        if run_context.original_args().cur_step_num > self._saved_at:
            self._save(run_context.original_args())

    def _save(self, arguments):
        optimizer = optimizer_of(type(self).__name__, arguments.get("optimizer"), arguments.get("train_network"))
        path = self.folder / f"step-{_step_of(optimizer):010d}.safetensors"
        save(path, arguments.train_network, optimizer, **(self._more() if self._more else {}))
        self._saved_at = arguments.cur_step_num
        self._remove_older(path, _place(optimizer))

    def _remove_older(self, path, place):
        """Remove what is not kept, each worker some parts of it, and what a process that was killed left unfinished."""
        if not place.saves:
            return
        found = _sets(self.folder, STEP)
        # The others may not have finished theirs: with parts, the checkpoint before is the last one that is whole.
        keep = max(self.keep, 2 if place.count > 1 else 1)
        older = sorted({name for name, _ in found if name <= path.name})[:-keep]
        for (name, _), files in found.items():
            for rank, file in files.items():
                if name in older and rank % place.count == place.rank:
                    file.unlink(missing_ok=True)
        part = _part(self.folder / "step-*.safetensors", place.rank, place.count).name
        for unfinished in self.folder.glob(f".{part}.tmp"):
            unfinished.unlink(missing_ok=True)
