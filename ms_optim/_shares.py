"""States split over workers: each keeps and updates a share of them, then all gather the weights.

Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
<https://arxiv.org/abs/1910.02054>`_ (2020), stage 1. How tensors are cut (the shares), how weights travel (the
windows), the step made of these, and how shares become one checkpoint and the other way.
"""

# SplitStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import communication as comm

from . import _abi, _kernels
from ._fused import LaunchCell
from ._kernels import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from ._memory import bytes_each
from ._sharding import packed, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Cuts are where the kernels' tiles end: the sums of a tile are then the same, whoever takes it.
GRAIN = 1024
# What a worker sends at once. It bounds the memory that a step needs besides: as much for each worker.
WINDOW_BYTES = 16 << 20
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


# ---- The windows --------------------------------------------------------------------------------------------------


def pieces(
    ranges: NDArray[np.int64], bytes_each: Sequence[int], begin: int, end: int
) -> list[tuple[int, int, int, int]]:
    """Return the pieces of weights in a window of a worker's wire, which is its ranges laid end to end.

    Args:
        ranges: The worker's ranges, of shape (tensors, 2).
        bytes_each: Bytes of an element of each tensor.
        begin: Where the window begins in the wire, in bytes.
        end: Where it ends.

    Returns:
        For each piece its tensor, the first byte in that, the number of bytes and the place in the window.
    """
    found, place = [], 0
    for i, ((first, last), size) in enumerate(zip(ranges.tolist(), bytes_each)):
        low, high = max(begin, place), min(end, place + (last - first) * size)
        if low < high:
            found.append((i, first * size + low - place, high - low, low - begin))
        place += (last - first) * size
    return found


class Window(nn.Cell):
    """Sends a window of this worker's weights, and writes those of the others where they belong."""

    def __init__(self, shares: Shares, bytes_each, begin, end):
        super().__init__(auto_prefix=False)
        n, these, words = len(bytes_each), shares.workers, -(-(end - begin) // 4)
        sent = pieces(shares.own, bytes_each, begin, end)
        received = [
            (i, first, size, 4 * words * rank + place)
            for rank in range(these.count)
            if rank != these.rank
            for i, first, size, place in pieces(shares.ranges[rank], bytes_each, begin, end)
        ]
        self.sent, self.received = (
            Tensor(np.array(x, np.int64).reshape(-1, 4)) for x in (sent or [(0,) * 4], received)
        )
        # Packing only reads the weights, but no earlier than they are written: as if it wrote them.
        self.pack = _kernels.operator("pack", "CPU", (False,) + (True,) * n, [((words,), ms.int32)])
        self.unpack = _kernels.operator("unpack", "CPU", (False,) * 2 + (True,) * n, [((1,), ms.int32)])
        self.all_gather = these.all_gather()

    def construct(self, weights):
        """Gather the weights of the window."""
        return self.unpack(self.received, self.all_gather(self.pack(self.sent, *weights)), *weights)


def windows(shares: Shares, bytes_each: Sequence[int]) -> nn.CellList:
    """Return the windows, as few as may be, in which the weights travel."""
    longest = int(((shares.ranges[:, :, 1] - shares.ranges[:, :, 0]) * np.array(bytes_each)).sum(axis=1).max())
    begins = range(0, longest, WINDOW_BYTES)
    return nn.CellList([Window(shares, bytes_each, k, min(longest, k + WINDOW_BYTES)) for k in begins])


# ---- The step -----------------------------------------------------------------------------------------------------


class SplitStep:
    """The step with states split over workers; a mixin that reads the optimizer's attributes.

    1. Norms of whole gradients, which every worker has, if anything depends on them.
    2. New states of this worker's share; where each element is for itself, its new weights too.
    3. What was summed up is added up over the workers, in their order.
    4. New weights of this worker's share, unless made in 2; statistics of all tensors; the step is counted.
    5. The new weights are gathered.
    """

    def _split_states(self, rule, options):
        """Return which part of the states this worker keeps; None: all."""
        these = workers()
        self._splits = options.shard_states and these.count > 1
        if not self._splits:
            return None
        mode = ms.get_auto_parallel_context("parallel_mode")
        if mode not in ("stand_alone", "data_parallel") or self.use_parallel:
            what = f"the parallel mode '{mode}'" + " with enable_parallel_optimizer" * self.use_parallel
            raise ValueError(
                f"For '{self.cls_name}', shard_states=True is for the parallel modes 'stand_alone' and "
                f"'data_parallel', without enable_parallel_optimizer, but this is {what}."
            )
        costs = [bytes_each(rule.states, options, p.dtype, p.size) for p in self._parameters]
        return Shares(these, self._names, self._shapes, costs, self._centralized, (*rule.states, "master"))

    def _prepare_split(self, rule, options, device):
        """Lay out the launches."""
        if device != "CPU":
            raise RuntimeError(f"For '{self.cls_name}', 'shard_states' needs weights in host memory, not on {device}.")
        n, shares, layout = self.param_length, self.shares, self._lay_out(rule, options)
        self._worker_count = shares.workers.count
        self._gather = shares.workers.all_gather()
        self._surveys = self.normalizes_gradient or options.grad_clip_norm is not None or options.skip_nonfinite
        flags = self._shared_flags(rule, options)

        def launch(stages, ranges, weights, held):
            """Make a launch that takes all gradients; ranges, weights and states make it one of this worker's share."""
            counts = (len(self._counters), len(weights), n, len(held))
            written = _abi.written(*counts, ranges=len(ranges) > 0)
            kernel = _kernels.operator(rule.name, device, written, [((n, len(_kernels.SUMS)), ms.float64)])
            asked = _kernels.flags(stages, flags + _kernels.SHARES * len(ranges), rule.flags)
            return LaunchCell(kernel, asked, layout, (*ranges, *self._counters), weights, held)

        ranges, weights = Tensor(shares.own), self._parameters
        held = (*self.states, *self.masters, *self.scales)
        self._survey = launch(GRADIENT_STAGE, (), (), ())
        # In one launch with the moments, the gradient stage does nothing more; without, sums would be asked for.
        moments = MOMENTS_STAGE + (0 if self._surveys else GRADIENT_STAGE)
        moments += 0 if self._layerwise else APPLY_STAGE
        self._move = launch(moments, (ranges,), weights, held)
        # Where the weights have moved already, it reports and counts.
        ranges, held = (ranges, held) if self._layerwise else (Tensor(shares.own * 0), ())
        self._finish = launch(APPLY_STAGE + COMMIT_STAGE, (ranges,), weights, held)
        self._windows = windows(shares, [p.itemsize for p in self._parameters])

    def _split_step(self, rates, gradients):
        sums = self._no_sums
        if self._surveys:
            sums = self._survey(self._constants, rates, sums, gradients)
        # All gradients, in this order on all workers: in a graph, what reduced them would else not be.
        parts = self._move(self._constants, rates, sums, gradients)
        total = self._added_up(parts)
        if self._surveys:
            # All workers have these sums already, to the bit as without shares.
            total = ops.concat((sums[:, :1], total[:, 1:]), 1)
        done = self._finish(self._constants, rates, total, gradients)
        for window in self._windows:
            done = window(self.parameters)
        return done

    def _added_up(self, parts):
        """Add up a table of sums over the workers, in their order."""
        pairs = self._gather(packed(parts))
        total = unpacked(pairs[0], pairs[1], parts.dtype)
        for k in range(1, self._worker_count):
            total = total + unpacked(pairs[2 * k], pairs[2 * k + 1], parts.dtype)
        return total
