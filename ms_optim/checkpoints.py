"""Checkpoints that survive: a process killed at any moment leaves the old one or the new one, and a flipped bit is named.

A checkpoint is a file in the format safetensors, with checksums in its metadata. Weights, states and Tensors of one's
own are its tensors; numbers, strings and dicts are JSON in the metadata.
"""

# It reads optimizers from within the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from mindspore.train import Callback

from ._arguments import check_count, check_type, fail
from ._base import FusedOptimizer
from ._shares import ENTRY, merge_states, workers
from ._state import write
from .callbacks import optimizer_of
from .residuals import fold_residuals

if TYPE_CHECKING:
    from mindspore.train import RunContext
    from numpy.typing import NDArray

    from ._arguments import FilePath

DTYPES = {
    "BOOL": mstype.bool_,
    "U8": mstype.uint8,
    "I8": mstype.int8,
    "U16": mstype.uint16,
    "I16": mstype.int16,
    "F16": mstype.float16,
    "BF16": mstype.bfloat16,
    "U32": mstype.uint32,
    "I32": mstype.int32,
    "F32": mstype.float32,
    "U64": mstype.uint64,
    "I64": mstype.int64,
    "F64": mstype.float64,
}
NUMPY = {name: np.dtype(mstype.dtype_to_nptype(dtype)) for name, dtype in DTYPES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What a tensor of the file is.
WEIGHT, STATE, MORE = "weight", "state", "more"
HEADER_CHECKSUM = '"header_crc32": "'
NO_CHECKSUM = "0" * 8
VERSION = 1  # of what the metadata hold
PAGE = 4096  # bytes that are added up for a checksum
CHUNK = 256 * PAGE  # bytes that are looked at and written at once: while they are in a cache


class SpoiledError(ValueError):
    """A checkpoint is cut off, or bits of it are not those that were written."""


class Loaded(NamedTuple):
    """What a checkpoint holds besides weights and states.

    Attributes:
        step: The optimizer's `global_step`, the steps taken without those skipped; None if no optimizer was saved.
        more: What was handed to :func:`save` by name. Tensors are new ones.
    """

    step: int | None
    more: dict[str, Any]


# ---- One file -----------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A tensor of a file: what it is, the format's name of its dtype, its shape, its bytes from and to, its checksum."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


class File:
    """A file that was read: its entries by name, the numbers of each, and what else it says.

    Args:
        path: The file.

    Raises:
        SpoiledError: If the header is not the one that was written, or the file is shorter or longer than it says.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            raw = file.read(min(length, size))
            header = _checked_header(path, length, raw)
            told = json.loads(header["__metadata__"]["ms_optim"])
            if told["version"] > VERSION:
                raise ValueError(f"ms_optim: the checkpoint {path} is of a later version of ms_optim.")
            sums = header.pop("__metadata__")["checksums"]
            self.step: int | None = told["step"]
            self.more: Any = told["more"]
            self.entries: dict[str, Entry] = {}
            begin = 8 + length
            for k, (name, tensor) in enumerate(header.items()):
                low, high = tensor["data_offsets"]
                place = (begin + low, begin + high, sums[8 * k : 8 * k + 8])
                self.entries[name] = Entry(told["kinds"][k], tensor["dtype"], tuple(tensor["shape"]), *place)
            end = max((entry.end for entry in self.entries.values()), default=begin)
            if size != end:
                what = "cut off" if size < end else "longer than it was"
                raise SpoiledError(f"ms_optim: the checkpoint {path} is {what}: it has {size} bytes, not {end}.")
            # Pages of the file, not a copy of it; what is written to them stays in this process.
            self._data = np.memmap(file, np.uint8, "c")

    def array(self, name: str) -> NDArray[Any]:
        """Return the numbers of an entry."""
        _, dtype, shape, begin, end, _ = self.entries[name]
        data = np.asarray(self._data[begin:end])
        if begin % NUMPY[dtype].itemsize:
            data = data.copy()
        return data.view(NUMPY[dtype]).reshape(shape)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the entries of a kind as Tensors, which share the file's pages."""
        return {n: Tensor.from_numpy(self.array(n)) for n, entry in self.entries.items() if entry.kind == kind}

    def check(self) -> None:
        """Compare the checksums of all entries.

        Raises:
            SpoiledError: If one differs.
        """
        spoiled = [n for n, e in self.entries.items() if _checksum(self._data[e.begin : e.end]) != e.checksum]
        if spoiled:
            others = f", and those of {len(spoiled) - 1} others" if spoiled[1:] else ""
            raise SpoiledError(
                f"ms_optim: the checkpoint {self.path} is spoiled: the bytes of {spoiled[0]!r}{others} are not those "
                "that were written."
            )


def _checksum(data: NDArray[np.uint8], then: Callable[[NDArray[np.uint8]], object] | None = None) -> str:
    """Return the checksum of bytes: the CRC-32 of the sums of their pages, as 64-bit words, and of what is left over.

    Adding up is ten times as fast as CRC-32. A flipped bit changes the sum of its page by a power of 2, which CRC-32
    never misses: it turns over a run of at most 64 bits.

    Args:
        data: The bytes.
        then: Called with each chunk once it was looked at.
    """
    checksum = 0
    for begin in range(0, data.size, CHUNK):
        chunk = data[begin : begin + CHUNK]
        whole = chunk.size - chunk.size % PAGE
        pages = chunk[:whole].view("<u8").reshape(-1, PAGE // 8)
        checksum = zlib.crc32(chunk[whole:].data, zlib.crc32(pages.sum(axis=1, dtype="<u8").data, checksum))
        if then is not None:
            then(chunk)
    return f"{checksum:08x}"


def _header_text(tensors: dict[str, dict[str, Any]], told: str, sums: str, checksum: str) -> bytes:
    """Return the length and the header; equally long whatever the checksums are."""
    metadata = {"format": "ms", "ms_optim": told, "checksums": sums, "header_crc32": checksum}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_checksum(header: bytes) -> bytes:
    return f"{zlib.crc32(header):08x}".encode()


def _checked_header(path: pathlib.Path, length: int, raw: bytes) -> dict[str, Any]:
    before, key, after = raw.partition(HEADER_CHECKSUM.encode())
    blank = length.to_bytes(8, "little") + before + key + NO_CHECKSUM.encode() + after[8:]
    if len(raw) < length or not key or after[:8] != _header_checksum(blank):
        raise SpoiledError(
            f"ms_optim: {path} is no checkpoint that ms_optim.save wrote, or its header is cut off or spoiled."
        )
    return json.loads(raw)


def _write_file(path: pathlib.Path, step: int | None, more: Any, entries: dict[str, tuple[str, Tensor]]) -> None:
    """Write a file beside the old one, and put it in that one's place once all of it is on the disk."""
    tensors, kinds, end = {}, [], 0
    # Large dtypes first, so that all begin at multiples of their size.
    for name, (kind, tensor) in sorted(entries.items(), key=lambda entry: -entry[1][1].itemsize):
        begin, end = end, end + tensor.nbytes
        tensors[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        kinds.append(kind)
    told = json.dumps({"version": VERSION, "step": step, "more": more, "kinds": kinds})
    # A link stays a link, to the new file.
    path = pathlib.Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb", buffering=0) as file:
            file.seek(len(_header_text(tensors, told, NO_CHECKSUM * len(tensors), NO_CHECKSUM)))
            sums = ""
            for name in tensors:
                # In host memory this is no copy.
                data = np.ascontiguousarray(entries[name][1].asnumpy()).reshape(-1).view(np.uint8)
                sums += _checksum(data, lambda chunk: _write_all(file, chunk))
            checksum = _header_checksum(_header_text(tensors, told, sums, NO_CHECKSUM)).decode()
            file.seek(0)
            _write_all(file, _header_text(tensors, told, sums, checksum))
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write_all(file, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    if optimizer is not None and (optimizer.shares or optimizer._sharded):
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

    Raises:
        TypeError: If an argument has the wrong type, or a tensor a dtype that the format lacks.
        ValueError: If two tensors have the same name.
        OSError: If the file cannot be written; the old one is left then.

    Examples:
        >>> import tempfile
        >>> import ms_optim
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 3)
        >>> optimizer = ms_optim.AdamW(net.trainable_params())
        >>> folder = tempfile.TemporaryDirectory()
        >>> ms_optim.save(folder.name + "/run.safetensors", net, optimizer, epoch=3, best={"accuracy": 0.5})
        >>> step, more = ms_optim.load(folder.name + "/run.safetensors", net, optimizer)
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
        _write_file(_part(pathlib.Path(path), place.rank, place.count), _step_of(optimizer), packed, entries)


def load(
    path: FilePath, net: nn.Cell | None = None, optimizer: FusedOptimizer | None = None, strict: bool = True
) -> Loaded:
    """Go on from what :func:`save` wrote.

    Everything is checked before anything is changed: the header, the checksum of every tensor, names, shapes and
    dtypes. Numbers are written into the memory that weights and states have, so that graphs that are compiled see them.

    Where the number of workers is another one, states that are split and DGCMomentum's residuals are put together and
    divided anew; where `state_dtype` is another one, states are converted.

    Args:
        path (Union[str, PathLike]): The file; or the folder of a :class:`CheckpointSaver`, of whose checkpoints it takes
            the last one that is neither spoiled nor incomplete, with a warning for each one that is.
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

    Nothing is changed where an error is raised.
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
    if len(parts) != place.count and optimizer is not None and optimizer._sharded:
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
    over with a warning. The data begins where ``Model.train`` is told to begin.

    Args:
        folder (Union[str, PathLike]): The folder of this run, which is made if need be.
        every (int): The number of steps from one checkpoint to the next; the end of training has one, too.
            Default: ``1000`` .
        keep (int): How many checkpoints are kept. Default: ``2`` .
        resume (bool): Whether to load the last checkpoint when training begins. Default: ``True`` .
        more (Union[Callable[[], dict[str, Any]], None]): Returns what else to save, by name. Default: ``None`` .

    Attributes:
        loaded: Loaded, what :func:`load` returned when training began; None if there was no checkpoint.

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
        """Remove what is not kept, of which each worker removes some parts, and what a process that was killed left unfinished."""
        if not place.saves:
            return
        found = _sets(self.folder, STEP)
        older = sorted({name for name, _ in found if name <= path.name})[: -self.keep]
        for (name, _), files in found.items():
            for rank, file in files.items():
                if name in older and rank % place.count == place.rank:
                    file.unlink(missing_ok=True)
        part = _part(self.folder / "step-*.safetensors", place.rank, place.count).name
        for unfinished in self.folder.glob(f".{part}.tmp"):
            unfinished.unlink(missing_ok=True)
