"""Residuals: what compression has not sent yet, carried over to another number of workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ._arguments import check_count, fail

NAME = "fold_residuals"


def fold_residuals(state_dicts: Sequence[dict[str, Tensor]], workers: int) -> list[dict[str, Tensor]]:
    r"""Make the states of another number of workers from those of all workers of a DGCMomentum.

    Nothing is lost: the sum of the residuals :math:`r` stays the same. New worker :math:`j` of :math:`M` gets the sum
    of the residuals of old workers :math:`j, j + M, \ldots`, and the mean of their velocities; a worker that gets none
    starts with residuals of 0 and the mean of all velocities.

    Args:
        state_dicts (Sequence[dict[str, Tensor]]): What each worker's ``state_dict()`` returned, or ``load_checkpoint``
            read of its file, in any order.
        workers (int): The new number of workers, 1 or greater.

    Returns:
        list[dict[str, Tensor]], what each new worker gives to ``load_state_dict``.

    Raises:
        TypeError: If `state_dicts` is not a list of dicts of Tensors, or `workers` not an int.
        ValueError: If `workers` is less than 1, a worker's states are missing or stand twice, or workers differ in what
            is the same on all.

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
    old = _in_order(state_dicts)
    names = old[0].keys()
    for rank, entries in enumerate(old):
        if entries.keys() != names:
            name = sorted(entries.keys() ^ names)[0]
            raise ValueError(f"For '{NAME}', 'state_dicts' must hold the same names, but not all hold {name!r}.")
        for name in names:
            if not _is_own(name) and entries[name].asnumpy().tobytes() != old[0][name].asnumpy().tobytes():
                raise ValueError(
                    f"For '{NAME}', 'state_dicts' must be of workers of one step, but {name!r} is not the same on "
                    f"workers 0 and {rank}."
                )
    return [_of_worker(old, rank, workers) for rank in range(workers)]


def _of_worker(old: list[dict[str, Tensor]], rank: int, workers: int) -> dict[str, Tensor]:
    mine = old[rank::workers]
    entries = {}
    for name, first in old[0].items():
        if name == "dgc_worker":
            value = np.eye(workers, dtype=np.int32)[rank]
        elif name.startswith("dgc_r."):
            value = sum((o[name].asnumpy().astype(np.float64) for o in mine), np.zeros(first.shape)).astype(np.float32)
        elif name.startswith("dgc_u."):
            value = np.mean([o[name].asnumpy() for o in mine or old], 0, np.float64).astype(np.float32)
        else:
            value = first.asnumpy()
        entries[name] = Tensor(value, first.dtype)
    return entries


def _is_own(name: str) -> bool:
    """Tell whether an entry differs from worker to worker."""
    return name in ("dgc_worker", "statistics") or name.startswith(("dgc_r.", "dgc_u."))


def _in_order(state_dicts: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the workers' entries by rank, once all are known to be there."""
    if not isinstance(state_dicts, (list, tuple)) or not all(isinstance(d, dict) for d in state_dicts):
        fail(TypeError, NAME, "state_dicts", "a list of dicts of Tensors", state_dicts)
    ranks: dict[int, dict[str, Tensor]] = {}
    for entries in state_dicts:
        if not all(isinstance(value, Tensor) for value in entries.values()):
            fail(TypeError, NAME, "state_dicts", "a list of dicts of Tensors", entries)
        whose = entries["dgc_worker"].asnumpy() if "dgc_worker" in entries else np.zeros(0)
        if whose.size != len(state_dicts):
            what = f"of all workers, but one of the {len(state_dicts)} is of {whose.size} workers"
            raise ValueError(f"For '{NAME}', 'state_dicts' must be {what}.")
        ranks[int(whose.argmax())] = entries
    if len(ranks) != len(state_dicts) or not ranks:
        raise ValueError(f"For '{NAME}', 'state_dicts' must hold each worker once, but holds workers {sorted(ranks)}.")
    return [ranks[rank] for rank in sorted(ranks)]
