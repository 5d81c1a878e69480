"""States sharded over workers: each worker keeps and updates its share, then all gather the weights.

Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
<https://arxiv.org/abs/1910.02054>`_ (2020), stage 1. This module cuts tensors into shares. Shares are merged into one
state dict in checkpoints/merge.py; the step is in paths/fused/sharded_states.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import communication as comm

from ..arguments.weight_norms import is_held
from ..kernels.interface import CODE_BLOCK
from ..kernels.table import device_target
from ..rules.orthogonalization import work
from ..rules.sliced_matrices import Whole, gathering, of_all
from .formats import FORMATS, OF_DTYPE
from .inventory import bytes_each, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..arguments.options import Options
    from ..rules.matrices import Matrix
    from ..rules.rule import Rule
    from .layout import Layout

# The parallel modes of states that are sharded, and of those of slices.
MODES, SLICED_MODES = ("stand_alone", "data_parallel"), ("stand_alone", "hybrid_parallel")
# Cuts are at the ends of the kernels' tiles, so that the sums of a tile do not depend on the worker.
GRAIN = 1024


class Peers(NamedTuple):
    """The processes that states are sharded over: the rank of this process, their number, and their group's name."""

    rank: int
    count: int
    group: str | None

    def all_gather(self) -> ops.AllGather | Whole:
        """Return what concatenates the workers' tensors, of which each has the first dimension 1 or is flat."""
        return gathering(str(self.group), self.rank, self.count, device_target())


def peers() -> Peers:
    """Return all processes, or only this one before communication is initialized."""
    if not comm.GlobalComm.INITED:
        return Peers(0, 1, None)
    return Peers(comm.get_rank(), comm.get_group_size(), comm.GlobalComm.WORLD_COMM_GROUP)


def replicas(optimizer: str, groups: Collection[str]) -> Peers:
    """Return the processes that hold the same slices as this one, which are at the same place in their groups.

    All processes call it, also those without slices, and exchange the ranks of their groups.

    Args:
        optimizer: Name of the optimizer's class, for the error.
        groups: The communication groups over which this process's tensors are sliced.

    Raises:
        ValueError: If a process slices tensors over several groups, or over a group of another size than others do.
    """
    if not comm.GlobalComm.INITED:
        return peers()
    own, world = comm.get_rank(), comm.GlobalComm.WORLD_COMM_GROUP
    sharers = {tuple(comm.get_process_group_ranks(group)) for group in groups} or {(own,)}
    ranks = next(iter(sharers)) if len(sharers) == 1 else ()
    sizes = of_all(world, np.array(len(ranks)))
    fit = sizes.min() == sizes.max() > 0
    if fit:
        table = of_all(world, np.array(ranks))
        is_own = table == np.arange(len(table))[:, None]
        fit = bool(is_own.any(1).all() and (table[table] == table[:, None]).all())
    if not fit:
        raise ValueError(
            f"For '{optimizer}', with shard_states=True all tensors must be sliced over one group of each process, and "
            f"all groups must have the same size, but processes have groups of the sizes {sizes.tolist()}."
        )
    places = is_own.argmax(1)
    mine = np.flatnonzero(places == places[own]).tolist()
    return Peers(mine.index(own), len(mine), _group_of(tuple(mine)) if len(mine) > 1 else None)


@functools.cache
def _group_of(ranks: tuple[int, ...]) -> str:
    """Return the communication group of these processes, all of which call this."""
    if len(ranks) == comm.get_group_size():
        return comm.GlobalComm.WORLD_COMM_GROUP
    name = f"ms_optim replicas {zlib.crc32(repr(ranks).encode()):08x}"
    comm.create_group(name, list(ranks))
    return name


def cut(sizes: Sequence[int], costs: Sequence[float], grains: Sequence[int], count: int) -> NDArray[np.int64]:
    """Cut tensors, laid end to end, into shares of equal cost.

    Args:
        sizes: The tensors' elements.
        costs: Bytes of states for each element of a tensor.
        grains: The granularity of a tensor's parts: each part is a multiple of this number of elements.
        count: Number of shares.

    Returns:
        An int64 array of shape (count, tensors, 2): the range of elements, begin and end, of each tensor in each share;
        (0, 0) if there are none.
    """
    n, ends = len(sizes), np.cumsum(np.multiply(sizes, costs, dtype=np.float64))
    cuts = [(0, 0)]
    for target in ends[-1] * np.arange(1, count) / count:
        i = int(np.searchsorted(ends, target))
        elements = sizes[i] - (ends[i] - target) / costs[i]
        cuts.append((i, min(sizes[i], round(elements / grains[i]) * grains[i])))
    cuts.append((n, 0))
    ranges = np.zeros((count, n, 2), np.int64)
    for share, ((first, begin), (last, end)) in enumerate(itertools.pairwise(cuts)):
        for i in range(first, min(last + 1, n)):
            low, high = begin if i == first else 0, end if i == last else sizes[i]
            if low < high:
                ranges[share, i] = low, high
    return ranges


class Shares:
    """Which elements of each tensor every worker holds the states of.

    Args:
        these: The workers.
        names: The tensors' names.
        shapes: Their shapes.
        costs: A worker's cost for each element of a tensor, in bytes of states or in another unit.
        centralized: Whether a tensor's gradient is centralized.
        prefixes: The prefixes of the states' names.
        whole: Whether a tensor belongs to one worker as a whole; empty if no tensor does.
        row_prefixes: The prefixes of states that have one number for each row of such a tensor.
        common: The sizes by which tensors are cut, if processes hold slices of other sizes than these.

    Attributes:
        workers: The workers.
        ranges: As :func:`cut` returns them.
        own: This worker's among them, of shape (tensors, 2).
        kept: What :meth:`kept_by` returns for this worker.
    """

    workers: Peers
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    sizes: list[int]
    prefixes: Sequence[str]
    row_prefixes: Sequence[str]
    ranges: NDArray[np.int64]
    own: NDArray[np.int64]
    kept: tuple[tuple[int, tuple[int]], ...]

    def __init__(
        self,
        these: Peers,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        costs: Sequence[float],
        centralized: Sequence[bool],
        prefixes: Sequence[str],
        whole: Sequence[bool] = (),
        row_prefixes: Sequence[str] = (),
        common: Sequence[int] | None = None,
    ):
        sizes = [math.prod(shape) for shape in shapes]
        # One worker computes the mean of a row.
        rows = [size // shape[0] if by_row else 1 for size, shape, by_row in zip(sizes, shapes, centralized)]
        grains = [math.lcm(GRAIN, row) for row in rows]
        cut_sizes = sizes if common is None else common
        alone = whole or [False] * len(sizes)
        grains = [size if is_alone else grain for size, is_alone, grain in zip(cut_sizes, alone, grains)]
        self.workers, self.names, self.shapes, self.sizes, self.prefixes = these, names, shapes, sizes, prefixes
        self.row_prefixes = row_prefixes
        self.ranges = np.minimum(cut(cut_sizes, costs, grains, these.count), np.array(sizes)[:, None])
        self.ranges[self.ranges[..., 0] >= self.ranges[..., 1]] = 0
        self.own = self.ranges[these.rank]
        self.kept = self.kept_by(these.rank)

    def kept_by(self, rank: int) -> tuple[tuple[int, tuple[int]], ...]:
        """Return the indices of the tensors that a worker has a part of, and the shape of its part."""
        return tuple((i, (int(end - begin),)) for i, (begin, end) in enumerate(self.ranges[rank]) if begin < end)

    def parts(self, dtypes: Mapping[str, Any]) -> dict[str, tuple[list[int] | None, list[int]]]:
        """Return this worker's range, if any, and the whole shape for each entry that may be sharded.

        Args:
            dtypes: The dtypes of the entries by name.
        """
        found, block = {}, CODE_BLOCK
        for prefix in self.prefixes:
            for name, shape, size, (begin, end) in zip(self.names, self.shapes, self.sizes, self.own.tolist()):
                blocks = [begin // block, -(-end // block)]
                key = f"{prefix}.{name}"
                # A 16-bit master is not a state in 4-bit codes.
                held = FORMATS["float32"] if prefix == "master" else OF_DTYPE.get(dtypes.get(key), FORMATS["float32"])
                found[key] = (list(held.part(begin, end)) if begin < end else None, list(held.stored(shape)))
                if prefix in self.row_prefixes and len(shape) > 1:
                    rows = rows_of(shape)
                    found[f"{prefix}.{name}"] = ([0, rows] if begin < end else None, [rows])
                found[f"{prefix}_scale.{name}"] = (blocks if begin < end else None, [-(-size // block)])
        return found

    def entry(self, held: Sequence[Parameter]) -> Parameter:
        """Return the entry of this worker's state dicts that tells which parts of the states it has, as JSON bytes."""
        for p in held:
            # Otherwise data parallelism would broadcast the first worker's states to all workers.
            p.layerwise_parallel = True
        parts, these = self.parts({p.name: p.dtype for p in held}), self.workers
        text = {"worker": these.rank, "workers": these.count, "parts": {p.name: parts[p.name] for p in held}}
        data = np.frombuffer(json.dumps(text).encode(), np.uint8)
        return Parameter(Tensor(data), name=ENTRY, requires_grad=False, layerwise_parallel=True)

    def taken(self, optimizer: str, entry: Parameter, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this worker's part of a full state dict, or its own share unchanged.

        Raises:
            ValueError: If it is another worker's share, or a share among another number of workers, or has another
                shape.
        """
        if ENTRY in given:
            if given[ENTRY].asnumpy().tobytes() != entry.asnumpy().tobytes():
                refuse_share(optimizer, given, f"worker {self.workers.rank} of {self.workers.count}")
            return given
        own: dict[str, Tensor] = {**given, ENTRY: entry}
        for key, (part, shape) in self.parts({key: value.dtype for key, value in given.items()}).items():
            value = own.pop(key, None)
            if value is None or part is None:
                continue
            if tuple(value.shape) != tuple(shape):
                raise ValueError(
                    f"For '{optimizer}', the entry {key!r} must have the shape {tuple(shape)}, but got {value.shape}."
                )
            own[key] = Tensor(value.asnumpy().reshape(-1)[slice(*part)], value.dtype)
        return own


# With matrices, work is balanced instead of bytes: the number of operations of a product that take as long as a byte.
OPERATIONS_EACH_BYTE = 5.0


def share_costs(
    rule: Rule,
    options_of: Sequence[Options],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    matrices: Sequence[Sequence[Matrix]],
) -> list[float]:
    """Return a worker's cost for each element of a tensor: bytes of states, and for a matrix the work of iterations.

    Args:
        rule: The optimizer's rule.
        options_of: The shared arguments as they hold for each tensor.
        shapes: The tensors' shapes.
        dtypes: Their dtypes.
        matrices: The matrices that each of them holds.
    """
    costs = []
    for options, shape, dtype, own in zip(options_of, shapes, dtypes, matrices):
        size = math.prod(shape)
        operations = sum(work(rule.iterations, matrix.rows, matrix.columns) for matrix in own)
        cost = float(bytes_each(rule.of_tensor(len(own) > 0), options, dtype, size))
        costs.append(cost + operations / max(1, size) / OPERATIONS_EACH_BYTE)
    return costs


def sharded(
    layout: Layout, rule: Rule, options: Any, is_parallel: bool, shard_groups: Mapping[str, str]
) -> Shares | None:
    """Return which part of the states this worker keeps; None if it keeps all.

    If tensors are sliced, the workers are those that hold the same slices.

    Raises:
        ValueError: If the parallel mode is not supported, or groups of slices do not fit.
    """
    if not options.shard_states or peers().count == 1:
        return None
    mode = ms.get_auto_parallel_context("parallel_mode")
    modes = SLICED_MODES if shard_groups else MODES
    if mode not in modes or is_parallel:
        what = f"the parallel mode '{mode}'" + " with enable_parallel_optimizer" * is_parallel
        raise ValueError(
            f"For '{layout.optimizer}', shard_states=True requires the parallel mode '{modes[0]}' or "
            f"'{modes[1]}', without enable_parallel_optimizer, but got {what}."
        )
    these = replicas(layout.optimizer, set(shard_groups.values()))
    if these.count == 1:
        return None
    common = common_sizes(layout, shard_groups) if shard_groups else layout.sizes
    forms = [layout.form_of(i) for i in range(layout.count)]
    # All processes of a group of slices find the same costs, those of equal slices, so that they cut alike.
    matrices = [form.whole if form is not None else () for form in forms]
    shapes = [
        form.slicing.whole(shape) if form is not None and form.slicing else (size,)
        for form, shape, size in zip(forms, layout.shapes, common)
    ]
    costs = share_costs(rule, layout.options, shapes, layout.dtypes, matrices)
    # A rule that is not elementwise needs whole tensors. So does one of matrices where norms are held: it moves tensors
    # before sums over workers are known.
    holds = rule.has_matrices and options.weight_norm is not None
    whole = [
        len(own) > 0 or not rule.is_elementwise or (holds and is_held(shape))
        for own, shape in zip(matrices, layout.shapes)
    ]
    prefixes = (*rule.prefixes, "master", "average")
    rows = rule.row_prefixes
    return Shares(these, layout.names, layout.shapes, costs, layout.centralized, prefixes, whole, rows, common)


def common_sizes(layout: Layout, shard_groups: Mapping[str, str]) -> list[int]:
    """Return the elements of each tensor, or of the largest of its slices; processes exchange those of their slices."""
    own = np.array(layout.sizes, np.int64)
    found = own
    for group in dict.fromkeys(shard_groups.values()):
        is_in = np.array([shard_groups.get(name) == group for name in layout.names])
        found = np.where(is_in, of_all(group, own).max(0), found)
    return found.tolist()


# The entry of a state dict that states which part of each state the other entries are.
ENTRY = "state_shares"


def _description(caller: str, state_dict: dict[str, Tensor]) -> dict[str, Any]:
    """Return which parts of the states a share has, from its entry."""
    try:
        told = json.loads(state_dict[ENTRY].asnumpy().tobytes())
    except ValueError:
        told = None
    match told:
        case {"worker": int(rank), "workers": int(count), "parts": dict(parts)} if 0 <= rank < count:
            if all(_is_part(part) for part in parts.values()):
                return told
    raise ValueError(
        f"For '{caller}', the entry '{ENTRY}' must state in JSON which worker's share it is, but is corrupted."
    )


def _is_part(part: Any) -> bool:
    """Return whether a value is a range of elements and the shape of the whole tensor."""
    match part:
        case [[int(begin), int(end)], [*shape]]:
            return 0 <= begin < end and all(isinstance(n, int) and n >= 0 for n in shape)
    return False


def refuse_share(optimizer: str, state_dict: dict[str, Tensor], this: str) -> None:
    """Raise the error for a share of states that is not this worker's."""
    told = _description(optimizer, state_dict)
    raise ValueError(
        f"For '{optimizer}', 'state_dict' is the share of worker {told['worker']} of {told['workers']}, but this is "
        f"{this}: merge the shares of all {told['workers']} with ms_optim.merge_states, and load the result."
    )
