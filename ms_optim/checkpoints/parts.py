"""The files of a checkpoint: which workers save a part, how parts are named, which checkpoints are in a folder.

A save is identified by a random value that its workers agree on, because the step does not identify it: a run that is
killed between the parts of a step, and is then repeated, leaves parts of one step from two saves. Saves are ordered by
their time, because a later run may be at an earlier step.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Tensor, ops

from ..states.shares import peers
from .file import File
from .header import Origin, SpoiledError

if TYPE_CHECKING:
    from ..base.any_optimizer import AnyOptimizer

STEP = "step-[0-9]{10}"  # the names of checkpoints in a run's folder, without the suffix


class Place(NamedTuple):
    """The part of a checkpoint that this process loads, the number of parts, and whether this process saves it.

    `group` has the processes that save together.
    """

    rank: int
    count: int
    saves: bool
    group: Any


def place_of(optimizer: AnyOptimizer | None) -> Place:
    """Return the place among workers that each save a part; if all hold the same data, the first saves for all."""
    is_sliced = optimizer is not None and optimizer.is_sliced
    # A worker may be several processes, each with slices of its own.
    if optimizer is not None and not is_sliced and getattr(optimizer, "workers", None) is not None:
        group = optimizer.workers
        return Place(group.rank, group.count, group.local_rank == 0, group)
    # Replicas of slices share states, but weights differ between slices.
    group = optimizer.shares.workers if optimizer is not None and optimizer.shares and not is_sliced else peers()
    if is_sliced or (optimizer is not None and optimizer.shares):
        return Place(group.rank, group.count, True, group)
    return Place(0, 1, group.rank == 0, group)


def step_of(optimizer: AnyOptimizer | None) -> int | None:
    """Return the optimizer's step, which does not count skipped steps."""
    return None if optimizer is None else int(optimizer.global_step.asnumpy()[0])


def saved_at(optimizer: AnyOptimizer) -> int:
    """Return the step that all workers are at: with LocalSteps, each may have skipped others."""
    return int(getattr(optimizer, "local_step", optimizer.global_step).asnumpy()[0])


def origin_of(place: Place, optimizer: AnyOptimizer | None) -> Origin:
    """Return the origin of a save that begins now. All workers that save parts call it, and get the first one's."""
    own = Origin(secrets.token_hex(8), _run_of(optimizer) or secrets.token_hex(8), time.time_ns())
    if place.count > 1:
        own = _agreed(place.group, own, optimizer)
    return dataclasses.replace(own, rank=place.rank, count=place.count)


def _run_of(optimizer: AnyOptimizer | None) -> str | None:
    return None if optimizer is None else optimizer._run


def _agreed(group: Any, own: Origin, optimizer: Any) -> Origin:
    """Return the first worker's origin."""
    if group.group is None:
        # Simulated workers are in one process and save one after the other.
        run = getattr(group, "run", "")
        return Origin(f"{run}.{saved_at(optimizer)}" if run else "", run and (_run_of(optimizer) or run), own.time)
    sent = np.array([int(own.save, 16), int(own.run, 16), own.time], np.uint64).view(np.int32)
    first = ops.AllGather(group.group)(Tensor(sent)).asnumpy()[: sent.size].view(np.uint64).tolist()
    return Origin(f"{first[0]:016x}", f"{first[1]:016x}", first[2])


def part_path(path: pathlib.Path, rank: int, count: int) -> pathlib.Path:
    """Return the file of a worker's part; a checkpoint of one part is the file itself."""
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}{path.suffix}")


class Checkpoint:
    """A checkpoint that is there: its path, its number of parts, and its files by rank.

    Attributes:
        first: The first part whose header can be read; None if there is none.
    """

    path: pathlib.Path
    count: int
    files: dict[int, pathlib.Path]
    first: File | None

    def __init__(self, path: pathlib.Path, count: int, files: dict[int, pathlib.Path]):
        self.path, self.count, self.files = path, count, dict(sorted(files.items()))
        self.first = next((part for rank in [*self.files] if (part := self._readable(rank)) is not None), None)

    def _readable(self, rank: int) -> File | None:
        """Return a part, or None; a file that only has the name of a part is left out."""
        try:
            part = File(self.files[rank])
        except (FileNotFoundError, SpoiledError):
            return None
        if self.count > 1 and part.origin.count and (part.origin.rank, part.origin.count) != (rank, self.count):
            del self.files[rank]
            return None
        return part

    def parts(self) -> list[File]:
        """Read the headers of all parts.

        Raises:
            SpoiledError: If a part is missing, truncated, corrupted or from another save.
        """
        lacking = self.count - len(self.files)
        if lacking:
            ranks = [rank for rank in range(len(self.files) + 8) if rank not in self.files and rank < self.count][:8]
            more = f" and {lacking - len(ranks)} more" if lacking > len(ranks) else ""
            raise SpoiledError(
                f"ms_optim: the checkpoint {self.path} of {self.count} workers lacks the parts of workers {ranks}"
                f"{more}."
            )
        try:
            parts = [File(file) for file in self.files.values()]
        except FileNotFoundError as error:
            raise SpoiledError(f"ms_optim: the file {error.filename} of a checkpoint has been removed.") from None
        origin = parts[0].origin
        if origin.count > self.count:
            raise SpoiledError(
                f"ms_optim: {self.path} is only the part of worker {origin.rank} of {origin.count}: pass the name of "
                "the checkpoint, without the part's number."
            )
        steps = sorted({part.step for part in parts if part.step is not None})
        if len({part.origin.save for part in parts}) > 1 or (not origin.save and len(steps) > 1):
            what = f"the steps {steps}" if len(steps) > 1 else f"different saves of step {steps[0]}"
            raise SpoiledError(
                f"ms_optim: the checkpoint {self.path} is inconsistent: its parts are of {what}, as after a kill "
                "between the parts."
            )
        return parts


def checkpoints_in(path: pathlib.Path) -> list[Checkpoint]:
    """Return the checkpoints of a name, or in the folder of a run, last one first."""
    if is_folder := path.is_dir():
        found = _found(path, STEP, ".safetensors")
    else:
        found = _found(path.parent, re.escape(path.stem), path.suffix)

    def named(one):
        return one.path.name if is_folder else ""

    # Files of version 1 are older; in a folder, they are ordered by their step.
    times = {one: (one.first.origin.time, one.first.step or 0) for one in found if one.first is not None}

    def order(one):
        if one in times:
            return times[one][0], named(one) or times[one][1], True
        if not is_folder:
            return math.inf, 0, False
        # A file that cannot be read comes after those of earlier steps.
        earlier = [when for other, (when, _) in times.items() if named(other) < named(one)]
        return max(earlier, default=-1), named(one), False

    return sorted(found, key=order, reverse=True)


def _found(folder: pathlib.Path, stem: str, suffix: str) -> list[Checkpoint]:
    """Return the checkpoints whose names are a stem, given as a regular expression, and a suffix."""
    part = re.compile(rf"({stem})(?:\.(0|[1-9][0-9]*)-of-([1-9][0-9]*))?{re.escape(suffix)}", re.DOTALL)
    files: dict[tuple[str, int], dict[int, pathlib.Path]] = collections.defaultdict(dict)
    for path in folder.iterdir() if folder.is_dir() else ():
        named = part.fullmatch(path.name)
        if named is None or not path.is_file():
            continue
        rank, count = (0, 1) if named[2] is None else (int(named[2]), int(named[3]))
        if rank < count and (count > 1 or named[2] is None):
            files[named[1], count][rank] = path
    found = [Checkpoint(folder / (name + suffix), count, those) for (name, count), those in files.items()]
    return [one for one in found if one.files]
