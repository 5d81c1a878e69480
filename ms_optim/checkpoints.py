"""Checkpoints that survive a killed process, which leaves the old one or the new one, and that detect flipped bits.

A checkpoint is a file in the format safetensors, with checksums in its metadata. Its tensors are weights, states and
the user's own Tensors; numbers, strings and dicts are JSON in the metadata.
"""

# It reads private attributes of optimizers.
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

# The kinds of tensors in a checkpoint.
WEIGHT, STATE, MORE = "weight", "state", "more"


class Loaded(NamedTuple):
    """The content of a checkpoint besides weights and states.

    Attributes:
        step: The optimizer's `global_step`, which does not count skipped steps; None if no optimizer was saved.
        more: The further values that were passed to :func:`save`, by name. Tensors are new ones.
    """

    step: int | None
    more: dict[str, Any]


# ---- The user's own values ------------------------------------------------------------------------------------------


def _packed(value: Any, place: str, tensors: list[tuple[str, Tensor]]) -> Any:
    """Return a value as JSON, and append the Tensors in it to a list."""
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
    """The part of a checkpoint that this process loads, the number of parts, and whether this process saves it."""

    rank: int
    count: int
    saves: bool


def _place(optimizer: FusedOptimizer | None) -> Place:
    """Return the place among workers that each save a part; where all hold the same, the first saves for all."""
    if optimizer is not None and getattr(optimizer, "workers", None) is not None:
        group = optimizer.workers
        return Place(group.rank, group.count, group.local_rank == 0)
    group = optimizer.shares.workers if optimizer is not None and optimizer.shares else workers()
    if optimizer is not None and (optimizer.shares or optimizer.is_sliced):
        return Place(group.rank, group.count, True)
    return Place(0, 1, group.rank == 0)


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
    """Yield each checkpoint, the last step first: its files, or the error that they cannot be read with."""
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
    # Where a step was saved twice, by other numbers of workers, checkpoints that can be read come first.
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
        optimizer (Union[FusedOptimizer, None]): The optimizer. Its states are saved by their names from construction,
            and so are those of its weights that are not in `net`. Default: ``None`` .
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
    found: list[tuple[str, Tensor]] = []
    packed = _packed(more, MORE, found)
    everything = [(WEIGHT, name, p) for name, p in _weights("save", net, optimizer).items()]
    if optimizer is not None:
        everything += [(STATE, name, p) for name, p in optimizer._own_parameters().items()]
    everything += [(MORE, name, tensor) for name, tensor in found]
    entries: dict[str, tuple[str, Tensor]] = {}
    for kind, name, tensor in everything:
        if name in entries or name == "__metadata__":
            raise ValueError(f"For 'save', each tensor must have a name of its own, but two have the name {name!r}.")
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
    have, so that compiled graphs see them.

    If the number of workers has changed, sharded states and DGCMomentum's residuals are merged and divided anew. If
    `state_dtype` has changed, states are converted.

    Args:
        path (Union[str, PathLike]): The file, or the folder of a :class:`CheckpointSaver`. Of a folder, the last
            checkpoint is loaded that is neither spoiled nor incomplete, with a warning for each later one.
        net (Union[Cell, None]): The network. Default: ``None`` .
        optimizer (Union[FusedOptimizer, None]): The optimizer. Those of its weights that are not in `net` are loaded,
            too. Default: ``None`` .
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
    for one in _candidates(path):
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
        return _take(one, net, optimizer, strict)
    raise spoiled[0]


def _take(parts: list[File], net: nn.Cell | None, optimizer: FusedOptimizer | None, strict: bool) -> Loaded:
    """Load a checkpoint whose checksums are right."""
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
    """Return the weights, each once: the parameters of the network, then further ones that the optimizer updates."""
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
        if self.resume and _sets(self.folder, STEP):
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
        self._remove_older(path, _place(optimizer))

    def _remove_older(self, path, place):
        """Remove older checkpoints, each worker some parts of them, and unfinished files of killed processes."""
        if not place.saves:
            return
        found = _sets(self.folder, STEP)
        # Other workers may not have finished their parts: until then, the checkpoint before is the last whole one.
        keep = max(self.keep, 2 if place.count > 1 else 1)
        older = sorted({name for name, _ in found if name <= path.name})[:-keep]
        for (name, _), files in found.items():
            for rank, file in files.items():
                if name in older and rank % place.count == place.rank:
                    file.unlink(missing_ok=True)
        part = _part(self.folder / "step-*.safetensors", place.rank, place.count).name
        for unfinished in self.folder.glob(f".{part}.tmp"):
            unfinished.unlink(missing_ok=True)
