"""Tensors of which each process holds a slice: norms are computed over the whole tensor.

A parameter group states by `shard_group` which processes its tensors are sliced over. Each process sums squares over
its slices. If a step needs a norm, the sums of all sliced tensors are exchanged at once and summed in the same order on
every process, so that all processes get the same bits. All other parts of a step are local to the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import communication as comm
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.checks import fail
from ...arguments.words import described
from ...rules.arithmetic import signed_root
from ...rules.sliced_matrices import of_all
from ...states.layout import Slices
from ...unregistered import unregistered

if TYPE_CHECKING:
    from ...states.layout import Layout

KEY = "shard_group"
# In other modes MindSpore slices tensors itself, or averages gradients over processes that hold different slices.
PARALLEL_MODES = ("stand_alone", "hybrid_parallel")


def take_shard_groups(optimizer: str, params: list[Any], refused: str | None) -> tuple[list[Any], dict[str, str]]:
    """Remove the key `shard_group`, which nn.Optimizer does not know, from parameter groups.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        params: Parameters or parameter groups, checked.
        refused: Why the optimizer's tensors may not be sliced; None if they may.

    Returns:
        The groups without the key, and the communication group of each sliced parameter by name.

    Raises:
        ValueError: If the optimizer's tensors may not be sliced, communication is not initialized, a group is not
            known, or the parallel mode does not fit.
    """
    taken, found = [], {}
    for i, group in enumerate(params):
        if isinstance(group, dict) and KEY in group:
            argument = f"params[{i}][{KEY!r}]"
            if refused is not None:
                raise ValueError(f"For '{optimizer}', '{argument}' must be omitted: it {refused}.")
            _check_shard_group(optimizer, argument, group[KEY])
            if comm.get_group_size(group[KEY]) > 1:
                found |= {p.name: group[KEY] for p in group["params"]}
            group = {key: value for key, value in group.items() if key != KEY}
        taken.append(group)
    return taken, found


def _check_shard_group(optimizer: str, argument: str, group: str) -> None:
    if not comm.GlobalComm.INITED:
        fail(ValueError, optimizer, argument, "omitted before mindspore.communication.init() is called", group)
    try:
        known = comm.get_rank() in comm.get_process_group_ranks(group)
    except (RuntimeError, ValueError):
        known = False
    if not known:
        expected = "the name of a communication group that this process belongs to, made by create_group"
        fail(ValueError, optimizer, argument, f"{expected}, or '{comm.GlobalComm.WORLD_COMM_GROUP}'", group)
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in PARALLEL_MODES:
        raise ValueError(
            f"For '{optimizer}', the parallel mode must be one of {list(PARALLEL_MODES)} if '{argument}' is given, "
            f"but is '{mode}'."
        )


def check_agreement(optimizer: str, groups: Iterable[str], settings: Mapping[str, Any]) -> None:
    """Check that all processes that exchange have the same settings.

    Args:
        optimizer: Name of the optimizer's class, for the error.
        groups: The communication groups.
        settings: What must be the same, by what it is called in the error.

    Raises:
        ValueError: On every process of a group, if some differ.
    """
    own = np.array([zlib.crc32(repr(value).encode()) for value in settings.values()])
    for group in dict.fromkeys(groups):
        table = of_all(group, own)
        for name, differs in zip(settings, (table != table[0]).any(0)):
            if differs:
                raise ValueError(
                    f"For '{optimizer}', all processes of the group '{group}' must have the same {name}, but another "
                    f"process has another than {described(settings[name])}."
                )


def slices_of_all(layout: Layout, shard_groups: Mapping[str, str]) -> dict[str, Slices]:
    """Return the slices of each sliced tensor by name: processes exchange the shapes of theirs.

    Args:
        layout: The properties of the parameters.
        shard_groups: The communication group of each sliced tensor, by name.
    """
    found = {}
    for group in dict.fromkeys(shard_groups.values()):
        own = [(n, shape) for n, shape in zip(layout.names, layout.shapes) if shard_groups.get(n) == group]
        most = max(len(shape) for _, shape in own)
        table = of_all(group, np.array([(*shape, *[1] * (most - len(shape))) for _, shape in own]))
        for (name, shape), shapes in zip(own, table.swapaxes(0, 1).tolist()):
            found[name] = Slices(comm.get_rank(group), tuple(tuple(other[: len(shape)]) for other in shapes))
    return found


def packed(sums):
    """Return sums of squares in the form that is sent: their roots, each as two float32 numbers, high and low.

    On CPU, collectives do not accept float64, or treat it as float32. The roots stay in the range of float32.
    """
    roots = signed_root(sums)
    high = F.cast(roots, mstype.float32)
    low = F.cast(roots - F.cast(high, roots.dtype), mstype.float32)
    return ops.stack((high, ops.where(ops.isfinite(low), low, ops.zeros_like(low))))


def unpacked(high, low, dtype):
    """Return the sums from the form that was sent."""
    roots = F.cast(high, dtype) + F.cast(low, dtype)
    return roots * ops.abs(roots)


class _GroupSum(nn.Cell):
    """Sums some rows of a table over the processes of one communication group, in the same order on each process.

    Each process puts its rows into its own position in a tensor of zeros, and AllReduce distributes all rows; adding
    zeros rounds nothing. (On CPU, AllGather supports only the group of all processes.)
    """

    def __init__(self, group: str, rows: list[int]):
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)
        own, count = comm.get_rank(group), comm.get_group_size(group)
        self.is_own = Tensor([[[[place == own]]] for place in range(count)])
        self.rows, self.places = Tensor(rows, mstype.int32), Tensor([[row] for row in rows], mstype.int32)

    def construct(self, table):
        mine = ops.gather(table, self.rows, 0)
        pair = packed(mine)
        pairs = self.all_reduce(ops.where(self.is_own, pair, ops.zeros_like(pair)))
        parts = unpacked(pairs[:, 0], pairs[:, 1], table.dtype)
        return ops.tensor_scatter_update(table, self.places, parts.sum(0))


class SumOverProcesses(nn.Cell):
    """Sums the rows of sliced tensors in a table of sums, with one exchange for each communication group.

    Args:
        groups: For each row, the communication group of its tensor; None if the tensor is not sliced.

    Attributes:
        is_first: For each row, whether this process is the first of those that share the tensor.
    """

    def __init__(self, groups: list[str | None]):
        super().__init__(auto_prefix=False)
        rows: dict[str, list[int]] = {}
        for row, group in enumerate(groups):
            if group is not None:
                rows.setdefault(group, []).append(row)
        # All processes have the same tensors in the same order, and exchange over their groups in the same order.
        self.groups = nn.CellList([_GroupSum(group, places) for group, places in rows.items()])
        unregistered(self, is_first=np.array([group is None or comm.get_rank(group) == 0 for group in groups]))

    def construct(self, table):
        """Return the table, of any float dtype and of shape (tensors, sums), with sums of whole tensors."""
        for group in self.groups:
            table = group(table)
        return table


class WholeNorms(nn.Cell):
    """Computes norms of whole tensors from norms of slices.

    Args:
        sums: Sums over processes.
        dtype: The dtype in which squares are summed.
    """

    def __init__(self, sums: SumOverProcesses, dtype):
        super().__init__(auto_prefix=False)
        self.sums, self.dtype = sums, dtype

    def construct(self, norms):
        """Return the norms of whole tensors from a table of norms of slices, of shape (tensors, kinds of norms).

        A kind may also be the root of an inner product, with its sign.
        """
        # In float32 the squares of small norms would underflow.
        roots = F.cast(norms, self.dtype)
        return F.cast(signed_root(self.sums(roots * ops.abs(roots))), mstype.float32)
