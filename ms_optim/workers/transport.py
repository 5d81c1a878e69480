"""The collectives with which workers exchange data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import communication as comm

from ..arguments.checks import fail

MOST_PROCESSES = 4096  # float32 sums the squares of their limbs exactly


class Workers:
    """The workers that compress and exchange: the processes that train together, or their hosts.

    Attributes:
        count: Number of workers.
        rank: The index of the worker that this process is, or belongs to.
        group: The communication group's name; None if there is only one process.
        local_group: The name of the group of the processes on this host; None if each process is a worker.
        local: Number of processes of a host.
    """

    count: int
    rank: int
    group: str | None = None
    local_group: str | None = None
    local: int = 1
    local_rank: int = 0

    def __init__(self, optimizer: str, group: str | None, local_group: str | None):
        initialized = comm.GlobalComm.INITED
        for name, value in (("group", group), ("local_group", local_group)):
            if value is not None and not isinstance(value, str):
                fail(TypeError, optimizer, name, "the name of a communication group or None", value)
            if value is not None and not initialized:
                fail(ValueError, optimizer, name, "None before mindspore.communication.init() is called", value)
        self.group = group if group is not None else (comm.GlobalComm.WORLD_COMM_GROUP if initialized else None)
        processes = 1 if self.group is None else comm.get_group_size(self.group)
        if processes > MOST_PROCESSES:
            fail(ValueError, optimizer, "group", f"a group of at most {MOST_PROCESSES} processes", processes)
        mode = ms.get_auto_parallel_context("parallel_mode")
        if processes > 1 and mode != "stand_alone":
            raise ValueError(
                f"For '{optimizer}', the parallel mode must be 'stand_alone', but is '{mode}': the optimizer exchanges "
                "the gradients itself and must get them unaveraged. Set "
                "mindspore.set_auto_parallel_context(parallel_mode='stand_alone')."
            )
        place = 0 if self.group is None else comm.get_rank(self.group)
        self.local_group = local_group
        self.local = 1 if local_group is None else comm.get_group_size(local_group)
        self.local_rank = 0 if local_group is None else comm.get_rank(local_group)
        if processes % self.local or place % self.local != self.local_rank:
            what = "a group of this host's processes, the same number on each host, with consecutive ranks in 'group'"
            fail(ValueError, optimizer, "local_group", what, local_group)
        self.count, self.rank = processes // self.local, place // self.local

    def check_trainers(self, optimizer: str, num_trainers: int | None) -> None:
        """Check the number of processes, if it is given."""
        processes = self.count * self.local
        if num_trainers is not None and num_trainers != processes:
            where = f"the group '{self.group}' has {processes}" if self.group else f"there {_are(processes)}"
            what = f"the number of processes that train together ({where})"
            fail(ValueError, optimizer, "num_trainers", what, num_trainers)

    def all_reduce(self) -> Callable[[Tensor], Tensor]:
        """Return the operator that sums a tensor over all processes."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group)

    def exchange(self, compressed: bool, words: int) -> Callable[[Tensor], Tensor]:
        """Return a Cell that maps a worker's send buffer of 4-byte words to all workers' buffers, or to their sum."""
        return GatherWires(self, words) if compressed else AddWires(self, words)


def _are(processes: int) -> str:
    return "is one process" if processes == 1 else f"are {processes}"


class GatherWires(nn.Cell):
    """Gathers the send buffers of all workers, in the workers' order.

    The processes of one host hold the same buffer. Each sends a part of it, so that a host sends its buffer only once.
    """

    all_gather: ops.AllGather
    divided: bool
    words: int
    begin: int
    end: int
    padding: Tensor
    shape: tuple[int, int]

    def __init__(self, workers: Workers, words: int):
        super().__init__(auto_prefix=False)
        self.all_gather = ops.AllGather(workers.group)
        self.divided, self.words = workers.local > 1, words
        part = -(-words // workers.local)
        self.begin, self.end = workers.local_rank * part, (workers.local_rank + 1) * part
        self.padding = Tensor(np.zeros(workers.local, np.int32))
        self.shape = (workers.count, workers.local * part)

    def construct(self, wire: Tensor) -> Tensor:
        """Gather the buffers."""
        if not self.divided:
            return self.all_gather(wire).reshape(self.shape)
        part = ops.concat((wire, self.padding))[self.begin : self.end]
        return self.all_gather(part).reshape(self.shape)[:, : self.words]


class AddWires(nn.Cell):
    """Sums the send buffers, which hold gradients, over the workers."""

    all_reduce: Callable[[Tensor], Tensor]
    local: int
    shape: tuple[int, int]

    def __init__(self, workers: Workers, words: int):
        super().__init__(auto_prefix=False)
        self.all_reduce = workers.all_reduce()
        self.local, self.shape = workers.local, (1, words)

    def construct(self, wire: Tensor) -> Tensor:
        """Sum the buffers."""
        total = self.all_reduce(wire).reshape(self.shape)
        return total / self.local if self.local > 1 else total


def together(wires: Sequence[np.ndarray], compressed: bool) -> np.ndarray:
    """Return the result of an exchange of the send buffers of workers in one process."""
    return np.stack(wires) if compressed else ring_sum(wires).reshape(1, -1)


def ring_sum(wires: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of float32 arrays, bitwise equal to MindSpore's AllReduce on CPU.

    As in a ring all-reduce, each share of the elements passes all workers once and is summed in this order.
    """
    count, total = len(wires), np.empty_like(wires[0])
    ends = np.cumsum([len(share) for share in np.array_split(total, count)]).tolist()
    for first, (begin, end) in enumerate(zip((0, *ends), ends)):
        total[begin:end] = wires[first][begin:end]
        for k in range(1, count):
            total[begin:end] += wires[(first + k) % count][begin:end]
    return total
