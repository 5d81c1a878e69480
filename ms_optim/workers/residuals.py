"""Residuals belong to a worker: the entries of state dicts that name it, and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ..arguments.words import described

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Entries of state dicts that state which worker the states belong to: of compressed exchanges, and of local steps.
ENTRIES = DGC_ENTRY, LOCAL_ENTRY = "dgc_worker", "local_worker"


def worker_of(caller: str, value: Tensor, entry: str = DGC_ENTRY) -> tuple[int, int]:
    """Return the worker that an entry of a state dict names, and the number of workers."""
    places = value.asnumpy()
    if value.dtype != mstype.int32 or places.ndim != 1 or np.count_nonzero(places) != 1 or places.max() != 1:
        raise ValueError(
            f"For '{caller}', the entry {entry!r} must be 1-dimensional int32, 1 at the worker's index and 0 "
            f"elsewhere, but got {value.dtype}, {described(places.tolist())}."
        )
    return int(places.argmax()), places.size


def check_entry(caller: str, entry: str, value: Tensor, own: NDArray[np.int32]) -> None:
    """Raise an error if a state dict belongs to another worker.

    Args:
        caller: Name of the class, for the errors.
        entry: The name of the entry that states which worker the states belong to.
        value: The entry.
        own: The entry's value for this worker.
    """
    rank, count = worker_of(caller, value, entry)
    if (rank, count) != (own.argmax(), own.size):
        raise ValueError(
            f"For '{caller}', 'state_dict' must be that of worker {own.argmax()} of {own.size}, but got that of worker "
            f"{rank} of {count}: ms_optim.fold_residuals() converts the states of one number of workers to another."
        )


def check_residuals(caller: str, worker: Tensor, own: NDArray[np.int32]) -> None:
    """Raise an error before a step with the residuals of another worker, which MindSpore's own loading accepts.

    Args:
        caller: Name of the class, for the errors.
        worker: The entry that states which worker the residuals belong to.
        own: The entry's value for this worker.
    """
    whose = worker.asnumpy()
    if not np.array_equal(whose, own):
        raise RuntimeError(
            f"For '{caller}', the residuals must be those of worker {own.argmax()} of {own.size}, but are those of "
            f"worker {whose.argmax()} of {whose.size}, whose checkpoint was loaded. Load this worker's own "
            "with load_state_dict(), which rejects others, or the result of ms_optim.fold_residuals()."
        )
