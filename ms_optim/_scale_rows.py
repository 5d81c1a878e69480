"""Scaling rows of a weight, and of all from which optimizers go on as if it were the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from . import _masters
from ._held import Held, all_held
from ._writing import as_float32, stored_as, write

if TYPE_CHECKING:
    from numpy.typing import NDArray


def scale_rows(parameter: Parameter, factors: NDArray[np.float64]) -> None:
    """Multiply the rows of a weight, and of all from which optimizers go on as if it were the weight.

    Args:
        parameter: The weight.
        factors: The factor of each row; where it is 1, every bit stays.
    """
    holders = [(held, held.places[id(parameter)]) for held in all_held.values() if id(parameter) in held.places]
    for held, i in holders:
        _scale(held, i, factors)
    if not holders:
        of_all = np.repeat(factors, parameter.size // len(factors))
        scaled = ops.cast(Tensor(_times(as_float32(parameter), of_all).reshape(parameter.shape)), parameter.dtype)
        write(parameter, np.where(of_all.reshape(parameter.shape) != 1.0, scaled.asnumpy(), parameter.asnumpy()))


def _scale(held: Held, i: int, factors: NDArray[np.float64]) -> None:
    """Multiply the rows of a weight, of its master, and of its first state if that follows the weights.

    Args:
        held: What an optimizer holds.
        i: The parameter's index.
        factors: The factor of each row; where it is 1, every bit stays.
    """
    p, (begin, end) = held.parameters[i], held.own_range(i)
    of_all = np.repeat(factors, p.size // len(factors))
    of_own = of_all[begin:end]
    masters = _times(held.weights(i), of_own)
    scaled = _times(as_float32(p), of_all)
    if held.own_ranges is None:  # else other workers have this weight, and not its master
        scaled = np.where(of_all != 1.0, masters, scaled)
    stored = stored_as(scaled, p.dtype)
    if held.master_places[i] >= 0:
        master = held.masters[held.master_places[i]]
        # A master that is not rounded to the weight is the weight, as in a step.
        masters = np.where(stored_as(masters, p.dtype) == stored[begin:end], masters, stored[begin:end])
        whole = master.dtype == mstype.float32
        bits = masters if whole else _masters.remainders(masters, master.asnumpy().dtype)
        write(master, np.where(of_own != 1.0, bits, master.asnumpy().reshape(-1)).reshape(master.shape))
    first = held.state_of(0, i)
    if held.starts_at_weights and first is not None:
        write(first, _times(first.asnumpy().reshape(-1), of_own).reshape(first.shape))
    values = ops.cast(Tensor(stored.reshape(p.shape)), p.dtype).asnumpy()
    write(p, np.where(of_all.reshape(p.shape) != 1.0, values, p.asnumpy()))


def _times(values: NDArray[np.float32], factors: NDArray[np.float64]) -> NDArray[np.float32]:
    return (values.astype(np.float64) * factors).astype(np.float32)
