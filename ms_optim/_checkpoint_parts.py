"""The files of a checkpoint: which workers save a part, how parts are named, which checkpoints are in a folder."""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ._checkpoint_file import File, SpoiledError
from ._shares import peers

if TYPE_CHECKING:
    from .local_steps import AnyOptimizer

# File names: of a checkpoint in a run's folder, and of a worker's part without the suffix.
STEP = re.compile(r"step-\d{10}\.safetensors")
PART = re.compile(r"(?P<stem>.*)\.(?P<rank>\d+)-of-(?P<count>\d+)")


class Place(NamedTuple):
    """The part of a checkpoint that this process loads, the number of parts, and whether this process saves it."""

    rank: int
    count: int
    saves: bool


def place_of(optimizer: AnyOptimizer | None) -> Place:
    """Return the place among workers that each save a part; if all hold the same data, the first saves for all."""
    if optimizer is not None and getattr(optimizer, "workers", None) is not None:
        group = optimizer.workers
        return Place(group.rank, group.count, group.local_rank == 0)
    group = optimizer.shares.workers if optimizer is not None and optimizer.shares else peers()
    if optimizer is not None and (optimizer.shares or optimizer.is_sliced):
        return Place(group.rank, group.count, True)
    return Place(0, 1, group.rank == 0)


def part_path(path: pathlib.Path, rank: int, count: int) -> pathlib.Path:
    """Return the file of a worker's part; a checkpoint of one part is the file itself."""
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}{path.suffix}")


def sets_in(folder: pathlib.Path, name: re.Pattern) -> dict[tuple[str, int], dict[int, pathlib.Path]]:
    """Return the files in a folder by checkpoint and number of workers, then by rank."""
    found: dict[tuple[str, int], dict[int, pathlib.Path]] = collections.defaultdict(dict)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        part = PART.fullmatch(path.stem)
        stem, rank, count = (part["stem"], int(part["rank"]), int(part["count"])) if part else (path.stem, 0, 1)
        if name.fullmatch(stem + path.suffix):
            found[stem + path.suffix, count][rank] = path
    return found


def candidates(path: pathlib.Path) -> Iterator[list[File] | SpoiledError]:
    """Yield each checkpoint, last step first: its files, or the error that reading them raises."""
    kept = path.is_dir()
    found = sets_in(path, STEP) if kept else sets_in(path.parent, re.compile(re.escape(path.name)))
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
    # If a step was saved by different numbers of workers, checkpoints that can be read come first.
    read.sort(key=lambda each: (each[0], not isinstance(each[1], SpoiledError)), reverse=True)
    yield from (one for _, one in read)


def _read_set(path: pathlib.Path, count: int, files: dict[int, pathlib.Path]) -> list[File]:
    missing = sorted(set(range(count)) - files.keys())
    if missing:
        raise SpoiledError(f"ms_optim: the checkpoint {path} of {count} workers lacks the parts of workers {missing}.")
    parts = [File(files[rank]) for rank in range(count)]
    steps = [part.step for part in parts]
    if len(set(steps)) > 1:
        raise SpoiledError(f"ms_optim: the checkpoint {path} is inconsistent: its parts are of the steps {steps}.")
    return parts
