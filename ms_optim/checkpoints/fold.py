"""Residuals: the parts of updates that a worker has not sent yet, converted to another number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor

from ..arguments.checks import check_count
from ..arguments.words import fail, listed
from ..workers.residuals import DGC_ENTRY, ENTRIES, LOCAL_ENTRY, worker_of
from . import fold_local_steps

if TYPE_CHECKING:
    pass

NAME = "fold_residuals"


def fold_residuals(state_dicts: Sequence[dict[str, Tensor]], workers: int) -> list[dict[str, Tensor]]:
    r"""Convert the states of all workers of a DGCMomentum or of LocalSteps to another number of workers.

    No residual is lost. New worker :math:`j` of :math:`M` takes over from old workers :math:`j, j + M, \ldots`.

    With DGCMomentum, the sum of the residuals :math:`r` stays the same:

    - A new worker gets the sum of the residuals of its old workers, and the mean of their velocities.
    - A new worker without an old one starts with residuals of 0 and the mean of all velocities.

    With LocalSteps, the mean over the workers of all that is not yet sent stays the same: of the residuals, and of the
    changes of the weights since the last exchange.

    - A new worker gets the sums of both over its old workers, times :math:`M` divided by the old number of workers.
    - The states of the optimizer are those of old worker :math:`j`; if there are fewer old workers, these are used in
      turn.
    - The state dicts must therefore contain the weights, as ``state_dict()`` returns them, and the result contains
      weights to load into the network.

    Args:
        state_dicts (Sequence[dict[str, Tensor]]): What each worker's ``state_dict()`` returned, or ``load_checkpoint``
            read from its file, in any order. If a Cell holds the optimizer, names may begin with the Cell's name.
        workers (int): The new number of workers, 1 or greater.

    Returns:
        list[dict[str, Tensor]], the state dict for each new worker, for ``load_state_dict``.

    Raises:
        TypeError: If `state_dicts` is not a list of dicts of Tensors, or `workers` not an int.
        ValueError: If `workers` is less than 1, a worker's states are missing or appear more than once, an entry
            `dgc_worker` or `local_worker` does not name a worker, or workers differ in entries that must be equal.
        KeyError: If a weight of LocalSteps is missing.

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import DGCMomentum, fold_residuals
        >>> optimizer = DGCMomentum(nn.Dense(4, 2).trainable_params(), 0.1, 0.9, 0)
        >>> for_two = fold_residuals([optimizer.state_dict()], 2)
        >>> print(len(for_two))
        2
    """
    check_count(NAME, "workers", workers, 1)
    old, prefix = _in_order(state_dicts)
    names = old[0].keys()
    is_local = prefix + LOCAL_ENTRY in names
    is_own = fold_local_steps.is_own if is_local else _is_own
    for rank, entries in enumerate(old):
        if entries.keys() != names:
            name = sorted(entries.keys() ^ names)[0]
            raise ValueError(f"For '{NAME}', all 'state_dicts' must have the same entries, but not all have {name!r}.")
        for name in names:
            first, other = old[0][name], entries[name]
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise ValueError(
                    f"For '{NAME}', the entry {name!r} must be of one dtype and shape on all workers, but is "
                    f"{first.dtype} of shape {first.shape} on worker 0, and {other.dtype} of shape {other.shape} on "
                    f"worker {rank}."
                )
            if not is_own(name.removeprefix(prefix)) and other.asnumpy().tobytes() != first.asnumpy().tobytes():
                raise ValueError(
                    f"For '{NAME}', 'state_dicts' must be of workers at the same step, but {name!r} differs "
                    f"between workers 0 and {rank}."
                )
    if is_local:
        return _local(old, prefix, workers)
    return [_of_worker(old, prefix, rank, workers) for rank in range(workers)]


def _local(old, prefix, workers):
    # If a Cell holds the optimizer, weights may have its prefix or none.
    plain = [{name.removeprefix(prefix): value for name, value in entries.items()} for entries in old]
    for name in (
        name.removeprefix(fold_local_steps.START) for name in plain[0] if name.startswith(fold_local_steps.START)
    ):
        if name not in plain[0]:
            raise KeyError(f"For '{NAME}', 'state_dicts' must also have the weight {name!r}.")
    return [fold_local_steps.of_worker(plain, rank, workers) for rank in range(workers)]


def _of_worker(old: list[dict[str, Tensor]], prefix: str, rank: int, workers: int) -> dict[str, Tensor]:
    mine = old[rank::workers]
    entries = {}
    for name, first in old[0].items():
        plain = name.removeprefix(prefix)
        if plain == DGC_ENTRY:
            value = np.eye(workers, dtype=np.int32)[rank]
        elif plain.startswith("dgc_r."):
            value = sum((o[name].asnumpy().astype(np.float64) for o in mine), np.zeros(first.shape)).astype(np.float32)
        elif plain.startswith("dgc_u."):
            value = np.mean([o[name].asnumpy() for o in mine or old], 0, np.float64).astype(np.float32)
        else:
            value = first.asnumpy()
        entries[name] = Tensor(value, first.dtype)
    return entries


def _is_own(name: str) -> bool:
    """Return whether an entry differs from worker to worker."""
    return name in (DGC_ENTRY, "statistics") or name.startswith(("dgc_r.", "dgc_u."))


def _worker_entry(entries: dict[str, Tensor]) -> str | None:
    """Return the name of the entry that states which worker the states belong to, if there is one."""
    found = [name for name in entries if name.rpartition(".")[2] in ENTRIES]
    if len(found) > 1:
        raise ValueError(
            f"For '{NAME}', each of 'state_dicts' must be of one optimizer, but one has the entries {listed(found)}."
        )
    return found[0] if found else None


def _in_order(state_dicts: Sequence[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], str]:
    """Check that all workers are present, and return their entries by rank, and the prefix of the names.

    The prefix is the name of a Cell that holds the optimizer.
    """
    if not isinstance(state_dicts, (list, tuple)) or not all(isinstance(d, dict) for d in state_dicts):
        fail(TypeError, NAME, "state_dicts", "a list of dicts of Tensors", state_dicts)
    ranks: dict[int, dict[str, Tensor]] = {}
    prefix = ""
    for entries in state_dicts:
        if not all(isinstance(value, Tensor) for value in entries.values()):
            fail(TypeError, NAME, "state_dicts", "a list of dicts of Tensors", entries)
        entry = _worker_entry(entries)
        rank, count = worker_of(NAME, entries[entry], entry) if entry else (0, 0)
        prefix = entry[: entry.rfind(".") + 1] if entry else ""
        if count != len(state_dicts):
            got = f"{len(state_dicts)} state dicts, one of them of {count} workers"
            if not entry:
                got = f"one without the entry {' or '.join(map(repr, ENTRIES))}, which DGCMomentum and LocalSteps have"
            raise ValueError(f"For '{NAME}', 'state_dicts' must hold those of all workers, but got {got}.")
        ranks[rank] = entries
    if len(ranks) != len(state_dicts) or not ranks:
        workers = listed(sorted(ranks))
        raise ValueError(f"For '{NAME}', 'state_dicts' must hold each worker once, but holds workers {workers}.")
    return [ranks[rank] for rank in sorted(ranks)], prefix
