"""States split over workers: each keeps and updates a share of them, then all gather the weights.

Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
<https://arxiv.org/abs/1910.02054>`_ (2020), stage 1. How tensors are cut into shares, and how shares become one
checkpoint and the other way; the step is in paths/sharded_states.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import communication as comm

from . import _kernels
from ._memory import bytes_each

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._layout import Layout

# Cuts are where the kernels' tiles end: the sums of a tile are then the same, whoever takes it.
GRAIN = 1024
# The entry of a state dict that says which part of each state the others are.
ENTRY = "state_shares"

# ---- The shares ---------------------------------------------------------------------------------------------------


class Workers(NamedTuple):
    """The processes that states are split over: this one's rank, how many there are, and their group's name."""

    rank: int
    count: int
    group: str | None

    def all_gather(self) -> ops.AllGather:
        """Return the operator that concatenates the workers' tensors."""
        return ops.AllGather(self.group)


def workers() -> Workers:
    """Return all processes, or this one alone before communication is initialized."""
    if not comm.GlobalComm.INITED:
        return Workers(0, 1, None)
    return Workers(comm.get_rank(), comm.get_group_size(), comm.GlobalComm.WORLD_COMM_GROUP)


def cut(sizes: Sequence[int], costs: Sequence[float], grains: Sequence[int], count: int) -> NDArray[np.int64]:
    """Cut tensors, laid end to end, into shares of equal cost.

    Args:
        sizes: The tensors' elements.
        costs: Bytes of states for each element of a tensor.
        grains: Of how many elements, or a multiple, a part of a tensor is.
        count: How many shares.

    Returns:
        An int64 array of shape (count, tensors, 2): the elements, from and to, of each tensor in each share; (0, 0)
        where there are none.
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
        costs: Bytes of states for each element of a tensor.
        centralized: Whether a tensor's gradient is centralized.
        prefixes: What the names of states begin with.

    Attributes:
        workers: The workers.
        ranges: As :func:`cut` returns them.
        own: This worker's among them, of shape (tensors, 2).
        kept: What :meth:`kept_by` returns for this worker.
    """

    workers: Workers
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    sizes: list[int]
    prefixes: Sequence[str]
    ranges: NDArray[np.int64]
    own: NDArray[np.int64]
    kept: tuple[tuple[int, tuple[int]], ...]

    def __init__(
        self,
        these: Workers,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        costs: Sequence[float],
        centralized: Sequence[bool],
        prefixes: Sequence[str],
    ):
        sizes = [math.prod(shape) for shape in shapes]
        # The mean of a row is taken by one worker.
        rows = [size // shape[0] if whole else 1 for size, shape, whole in zip(sizes, shapes, centralized)]
        grains = [math.lcm(GRAIN, row) for row in rows]
        self.workers, self.names, self.shapes, self.sizes, self.prefixes = these, names, shapes, sizes, prefixes
        self.ranges = cut(sizes, costs, grains, these.count)
        self.own = self.ranges[these.rank]
        self.kept = self.kept_by(these.rank)

    def kept_by(self, rank: int) -> tuple[tuple[int, tuple[int]], ...]:
        """Return the places of the tensors that a worker has a part of, and the shape of its part."""
        return tuple((i, (int(end - begin),)) for i, (begin, end) in enumerate(self.ranges[rank]) if begin < end)

    def parts(self) -> dict[str, tuple[list[int] | None, list[int]]]:
        """Return, for each entry of a full state dict that may be split, this worker's range, if any, and its shape."""
        found, block = {}, _kernels.CODE_BLOCK
        for prefix in self.prefixes:
            for name, shape, size, (begin, end) in zip(self.names, self.shapes, self.sizes, self.own.tolist()):
                blocks = [begin // block, -(-end // block)]
                found[f"{prefix}.{name}"] = ([begin, end] if begin < end else None, list(shape))
                found[f"{prefix}_scale.{name}"] = (blocks if begin < end else None, [-(-size // block)])
        return found

    def entry(self, held: Sequence[Parameter]) -> Parameter:
        """Return the entry of this worker's state dicts that says what its states are parts of: JSON, as bytes."""
        for p in held:
            # Else data parallelism would make all workers begin with the first one's.
            p.layerwise_parallel = True
        parts, these = self.parts(), self.workers
        text = {"worker": these.rank, "workers": these.count, "parts": {p.name: parts[p.name] for p in held}}
        data = np.frombuffer(json.dumps(text).encode(), np.uint8)
        return Parameter(Tensor(data), name=ENTRY, requires_grad=False, layerwise_parallel=True)

    def taken(self, optimizer: str, entry: Parameter, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this worker's part of a full state dict, or its own as it is.

        Raises:
            ValueError: If it is another worker's, or one of another number of workers, or has another shape.
        """
        if ENTRY in given:
            if given[ENTRY].asnumpy().tobytes() != entry.asnumpy().tobytes():
                refuse_share(optimizer, given, f"worker {self.workers.rank} of {self.workers.count}")
            return given
        own: dict[str, Tensor] = {**given, ENTRY: entry}
        for key, (part, shape) in self.parts().items():
            value = own.pop(key, None)
            if value is None or part is None:
                continue
            if tuple(value.shape) != tuple(shape):
                raise ValueError(
                    f"For '{optimizer}', the entry {key!r} must have the shape {tuple(shape)}, but got {value.shape}."
                )
            own[key] = Tensor(value.asnumpy().reshape(-1)[slice(*part)], value.dtype)
        return own


# ---- Checkpoints --------------------------------------------------------------------------------------------------


def _description(caller: str, state_dict: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the entry of a share says that its states are parts of."""
    try:
        told = json.loads(state_dict[ENTRY].asnumpy().tobytes())
    except ValueError:
        told = None
    match told:
        case {"worker": int(rank), "workers": int(count), "parts": dict(parts)} if 0 <= rank < count:
            if all(_is_part(part) for part in parts.values()):
                return told
    raise ValueError(
        f"For '{caller}', the entry '{ENTRY}' must say in JSON which worker's share it is of, but is spoiled."
    )


def _is_part(part: Any) -> bool:
    """Tell whether this is a range of elements and the shape of the whole."""
    match part:
        case [[int(begin), int(end)], [*shape]]:
            return 0 <= begin < end and all(isinstance(n, int) and n >= 0 for n in shape)
    return False


def refuse_share(optimizer: str, state_dict: dict[str, Tensor], this: str) -> None:
    """Raise the error for a share of states that is not this worker's."""
    told = _description(optimizer, state_dict)
    raise ValueError(
        f"For '{optimizer}', 'state_dict' is the share of worker {told['worker']} of {told['workers']}, but this is "
        f"{this}: make one of all {told['workers']} with ms_optim.merge_states, and load that."
    )


def merge_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make one full state dict from the shares of all workers.

    Any optimizer of the same rule loads it: one that keeps all states, or one that splits them over any number of
    workers, which takes its share.

    Args:
        states (list[dict[str, Tensor]]): What ``state_dict()`` returned on each worker of an optimizer with
            ``shard_states=True``, or what ``load_checkpoint`` read of it, in any order.

    Returns:
        dict[str, Tensor], the states by name in the shapes of the parameters; what is not split, from the first.

    Raises:
        TypeError: If `states` is not a list of dicts.
        ValueError: If it is empty, or one is not a share, or shares are missing, stand twice, are of different steps,
            or do not fit together.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, merge_states
        >>> net = nn.Dense(4, 3)
        >>> optimizer = AdamW(net.trainable_params(), shard_states=True)
        >>> full = optimizer.state_dict()  # of one process; of several, merge_states([...])
        >>> optimizer.load_state_dict(full)
    """
    if not isinstance(states, (list, tuple)) or not all(isinstance(state, dict) for state in states):
        raise TypeError(f"For 'merge_states', 'states' must be a list of dicts, but got {type(states).__name__}.")
    for key, value in (entry for state in states for entry in state.items()):
        if not isinstance(value, Tensor):
            raise TypeError(f"For 'merge_states', the entry {key!r} must be a Tensor, but got {type(value).__name__}.")
    if not states or not all(ENTRY in state for state in states):
        which = [k for k, state in enumerate(states) if ENTRY not in state]
        what = f"states[{which[0]}] has none" if which else "it is empty"
        raise ValueError(
            f"For 'merge_states', each of 'states' must have the entry '{ENTRY}', which optimizers with "
            f"shard_states=True on several workers write, but {what}."
        )
    told = [_description("merge_states", state) for state in states]
    count, found = told[0]["workers"], sorted(one["worker"] for one in told)
    if any(one["workers"] != count for one in told) or found != list(range(count)):
        raise ValueError(
            f"For 'merge_states', 'states' must be the shares of workers 0 to {count - 1} of {count}, but got those of "
            f"{[(one['worker'], one['workers']) for one in told]}."
        )
    steps = [int(state["global_step"].asnumpy().reshape(-1)[0]) for state in states if "global_step" in state]
    if len(set(steps)) > 1:
        raise ValueError(f"For 'merge_states', all shares must be of the same step, but got those of steps {steps}.")
    split = {key for one in told for key in one["parts"]} | {ENTRY}
    full = {key: Tensor(value.asnumpy(), value.dtype) for key, value in states[0].items() if key not in split}
    parts: dict[str, list] = {}
    for state, one in zip(states, told):
        for key, (ends, shape) in one["parts"].items():
            if key not in state or state[key].shape != (ends[1] - ends[0],):
                came = f"has the shape {state[key].shape}" if key in state else "is missing"
                raise ValueError(
                    f"For 'merge_states', the entry {key!r} of worker {one['worker']} must have the shape "
                    f"{(ends[1] - ends[0],)}, but {came}."
                )
            parts.setdefault(key, []).append((ends, shape, state[key]))
    for key, found in parts.items():
        found.sort(key=lambda part: part[0])
        ranges, shapes, tensors = zip(*found)
        begins, ends = zip(*ranges)
        agree = all(shape == shapes[0] for shape in shapes) and len({part.dtype for part in tensors}) == 1
        if not agree or begins != (0, *ends[:-1]) or ends[-1] != math.prod(shapes[0]):
            raise ValueError(
                f"For 'merge_states', the parts of the entry {key!r} must make a whole of shape {tuple(shapes[0])} and "
                f"of one dtype, but are the elements {list(ranges)}."
            )
        full[key] = Tensor(np.concatenate([part.asnumpy() for part in tensors]).reshape(shapes[0]), tensors[0].dtype)
    return full


def split_states(layout: Layout, prefixes: Sequence[str], options: Any, is_parallel: bool) -> Shares | None:
    """Return which part of the states this worker keeps; None: all.

    Raises:
        ValueError: If the parallel mode does not fit.
    """
    these = workers()
    if not options.shard_states or these.count == 1:
        return None
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in ("stand_alone", "data_parallel") or is_parallel:
        what = f"the parallel mode '{mode}'" + " with enable_parallel_optimizer" * is_parallel
        raise ValueError(
            f"For '{layout.optimizer}', shard_states=True is for the parallel modes 'stand_alone' and "
            f"'data_parallel', without enable_parallel_optimizer, but this is {what}."
        )
    costs = [bytes_each(prefixes, options, dtype, size) for dtype, size in zip(layout.dtypes, layout.sizes)]
    return Shares(these, layout.names, layout.shapes, costs, layout.centralized, (*prefixes, "master"))
