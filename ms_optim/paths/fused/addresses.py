"""The table of addresses that a CPU kernel takes instead of tensors, in a step that is called from Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ...kernels.interface import AddressColumn, DType, SharedAddressColumn
from ...kernels.libraries import addresses_of
from ...questions import dtypes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...states.storage import Held

DTYPES = {getattr(ms, dtype.name.lower()): dtype for dtype in DType if dtype != DType.OTHER}


class AddressTable:
    """The memory addresses of all that a step reads and writes, as CPU kernels take them in a step from Python.

    Passing 1,600 tensors to MindSpore takes 10 ms, asking for their addresses takes 0.4 ms. The table is filled again
    for each step, because a parameter that was loaded or set since then has another address. A graph would continue to
    write to the old address.
    """

    def __init__(self, held: Held):
        parameters, n = held.parameters, len(held.parameters)
        self._gradient_dtypes: list[Any] = []
        every = range(max(held.state_counts))
        states = [(i, k, state) for k in every for i in range(n) if (state := held.state_of(k, i)) is not None]
        masters = [(i, held.masters[place]) for i, place in enumerate(held.master_places) if place >= 0]
        scales = ((i, k, held.scale_places[place]) for (k, i), place in held.state_places.items())
        entries = [
            *((i, AddressColumn.WEIGHT_ADDRESS, p) for i, p in enumerate(parameters)),
            *((i, AddressColumn.STATE_ADDRESS + k, state) for i, k, state in states),
            *((i, AddressColumn.MASTER_ADDRESS, master) for i, master in masters),
            *((i, AddressColumn.SCALE_ADDRESS + k, held.scales[place]) for i, k, place in scales if place >= 0),
            *((i, AddressColumn.AVERAGE_ADDRESS, average) for i, average in enumerate(held.averages)),
            (n, SharedAddressColumn.GLOBAL_STEP_ADDRESS, held.global_step),
            (n, SharedAddressColumn.SKIPPED_STEPS_ADDRESS, held.skipped_steps),
            (n, SharedAddressColumn.STATISTICS_ADDRESS, held.statistics),
            *((n, SharedAddressColumn.STEP_WEIGHTS_ADDRESS, p) for p in held.step_weights),
            *((n, SharedAddressColumn.RADII_ADDRESS, p) for p in held.radii),
            *((n, SharedAddressColumn.BETA_POWER_ADDRESS + k, p) for k, p in enumerate(held.beta_powers)),
        ]
        rows, columns, self._tensors = zip(*entries)
        self._places = np.array(rows), np.array(columns)
        self._table = np.zeros((n + 1, AddressColumn.ADDRESS_COLUMNS), np.int64)
        self._table[:n, AddressColumn.ELEMENTS] = [p.size for p in parameters]
        self._table[:n, AddressColumn.FIRST_DIMENSION] = [p.shape[0] if p.ndim > 1 else 0 for p in parameters]
        self._table[:n, AddressColumn.WEIGHT_TYPE] = [DTYPES[p.dtype] for p in parameters]
        for i, master in masters:
            self._table[i, AddressColumn.MASTER_TYPE] = DTYPES[master.dtype]
        for i, k, state in states:
            self._table[i, AddressColumn.STATE_TYPE + k] = DTYPES[state.dtype]
        self._table[n, SharedAddressColumn.STATISTICS_ROWS] = held.statistics.shape[0]

    def fill(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the table for a step with these gradients; the caller has checked the tensors."""
        return Tensor(self.filled(gradients))

    def filled(self, gradients: Sequence[Tensor]) -> NDArray[np.int64]:
        """Return the table as an array, which the next step fills again."""
        table, n = self._table, len(gradients)
        table[self._places] = addresses_of(self._tensors)
        table[:n, AddressColumn.GRADIENT_ADDRESS] = addresses_of(gradients)
        dtypes = dtypes_of(gradients)
        if dtypes != self._gradient_dtypes:
            table[:n, AddressColumn.GRADIENT_TYPE] = [DTYPES[dtype] for dtype in dtypes]
            self._gradient_dtypes = dtypes
        return table
