"""Scaling rows of a weight, and of all from which optimizers go on as if it were the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from ..states import split_masters
from ..states.in_place import as_float32, stored_as, write
from ..states.storage import Held, all_held

if TYPE_CHECKING:
    from numpy.typing import NDArray


def scale_rows(parameter: Parameter, factors: NDArray[np.float64]) -> None:
    """Multiply the rows of a weight, and of all from which optimizers go on as if it were the weight.

    These are masters, and first states that follow the weights. Several optimizers may hold the weight.

    Args:
        parameter: The weight.
        factors: The factor of each row; where it is 1, every bit stays.
    """
    holders = [(held, held.places[id(parameter)]) for held in all_held.values() if id(parameter) in held.places]
    of_all = np.repeat(factors, parameter.size // len(factors))
    scaled, masters = _times(as_float32(parameter), of_all), []
    for held, i in holders:
        begin, end = held.own_range(i)
        masters.append(_times(held.weights(i), of_all[begin:end]))
        if held.own_ranges is None:  # else other workers have this weight, and not its master
            scaled = masters[-1]
    stored = stored_as(scaled, parameter.dtype)
    for (held, i), master in zip(holders, masters):
        _write_states(held, i, of_all, stored, master)
    values = ops.cast(Tensor(stored.reshape(parameter.shape)), parameter.dtype).asnumpy()
    write(parameter, np.where(of_all.reshape(parameter.shape) != 1.0, values, parameter.asnumpy()))


def _write_states(
    held: Held,
    i: int,
    of_all: NDArray[np.float64],
    stored: NDArray[np.float32],
    masters: NDArray[np.float32],
) -> None:
    """Write the master of a weight, and scale its first state if that follows the weights.

    Args:
        held: What an optimizer holds.
        i: The parameter's index.
        of_all: The factor of each element.
        stored: The new weight, as it is stored.
        masters: The new master.
    """
    p, (begin, end) = held.parameters[i], held.own_range(i)
    of_own = of_all[begin:end]
    if held.master_places[i] >= 0:
        master = held.masters[held.master_places[i]]
        # A master that is not rounded to the weight is the weight, as in a step.
        masters = np.where(stored_as(masters, p.dtype) == stored[begin:end], masters, stored[begin:end])
        whole = master.dtype == mstype.float32
        bits = masters if whole else split_masters.remainders(masters, master.asnumpy().dtype)
        write(master, np.where(of_own != 1.0, bits, master.asnumpy().reshape(-1)).reshape(master.shape))
    first = held.state_of(0, i)
    if held.starts_at_weights and first is not None:
        write(first, _times(first.asnumpy().reshape(-1), of_own).reshape(first.shape))


def _times(values: NDArray[np.float32], factors: NDArray[np.float64]) -> NDArray[np.float32]:
    return (values.astype(np.float64) * factors).astype(np.float32)
