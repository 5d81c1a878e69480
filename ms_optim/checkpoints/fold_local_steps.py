"""Conversion of the states of local steps to another number of workers."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ..states import split_masters
from ..workers.residuals import LOCAL_ENTRY

START, RESIDUAL = "local_start.", "local_residual."


def is_own(name: str) -> bool:
    """Return whether an entry differs from worker to worker; only entries that an exchange makes equal do not."""
    return not name.startswith((START, "local_velocity.")) and name != "local_step"


def of_worker(old: list[dict[str, Tensor]], rank: int, workers: int) -> dict[str, Tensor]:
    """Return the entries of a new worker.

    The mean over the workers of all that is not yet sent stays the same, so its effect on the weights does, too. A new
    worker gets the sum of the changes of weights of workers `rank`, `rank + workers` and so on since the last exchange,
    and the sum of their residuals, both times the new number of workers divided by the old one. The states of the
    optimizer are those of one worker.

    Args:
        old: The entries of all old workers, in their order, without prefixes.
        rank: The new worker.
        workers: The new number of workers.
    """
    mine, part = old[rank::workers], workers / len(old)
    entries = dict(old[rank % len(old)])
    for name, first in entries.items():
        if name == LOCAL_ENTRY:
            entries[name] = Tensor(np.eye(workers, dtype=np.int32)[rank])
        elif name.startswith(RESIDUAL):
            entries[name] = Tensor((part * _total([_float64(o[name]) for o in mine], first.shape)).astype(np.float32))
    for name in [name.removeprefix(START) for name in entries if name.startswith(START)]:
        start = _float64(entries[START + name])
        moved = [start - _weight(o, name) for o in mine]
        weight = (start - part * _total(moved, start.shape)).astype(np.float32)
        entries |= _written(entries, name, weight)
    return entries


def _total(arrays, shape):
    return sum(arrays, np.zeros(shape))


def _float64(tensor):
    return ops.cast(tensor, mstype.float32).asnumpy().astype(np.float64)


def _weight(entries, name):
    """Return a weight in float64: from its master, if the master rounds to the weight."""
    weight = ops.cast(entries[name], mstype.float32).asnumpy()
    entry = split_masters.entry_of(entries, name)
    if entry is None:
        return weight.astype(np.float64)
    master = entries[entry]
    if master.dtype != mstype.float32:
        return split_masters.restored(weight, master.asnumpy().reshape(weight.shape)).astype(np.float64)
    rounded = ops.cast(ops.cast(master, entries[name].dtype), mstype.float32).asnumpy()
    return np.where(rounded == weight, master.asnumpy(), weight).astype(np.float64)


def _written(entries, name, weight):
    """Return the entries of a weight, in their dtypes."""
    written = {name: ops.cast(Tensor(weight), entries[name].dtype)}
    entry = split_masters.entry_of(entries, name)
    if entry is not None:
        master = entries[entry]
        own = weight if master.dtype == mstype.float32 else split_masters.remainders(weight, master.asnumpy().dtype)
        written[entry] = Tensor(own.reshape(master.shape))
    return written
