"""Gradient compression: the largest of what has accumulated travels, the rest waits.

How many elements travel (the ramp), how a worker's part lies in memory (the wire), how workers exchange it (the
transport), and the step made of these, in launches of the fused kernel and in MindSpore's operators.
"""

# CompressedStep reads attributes of the optimizer that it is a part of.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportOptionalCall=false

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import communication as comm
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from . import _abi, _kernels
from ._abi import LIMB_BITS, LIMBS, MARK_WORDS, launch
from ._abi import MOST_ELEMENTS as LARGEST
from ._arguments import check_gradients, fail, worker_of
from ._base import FusedOptimizer, Rule
from ._composite import cut, first_of, normal, norms, summed, usable
from ._fused import as_tuple, in_parts
from ._kernels import APPLY_STAGE, COMMIT_STAGE, GRADIENT_STAGE, MOMENTS_STAGE
from ._stacks import column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._arguments import LearningRate, Params, Tensors, WeightDecay

HALF = np.finfo(np.float16)
WIRE_DTYPES = ("float32", "float16")

# ---- The ramp -----------------------------------------------------------------------------------------------------


def ramp(begin: int, length: int, sparsity: Sequence[float]) -> list[tuple[int, float | None]]:
    """Return the phases of training: the step that each begins with, and its sparsity, None while all is sent.

    Args:
        begin: The first step with compression.
        length: Steps from there to the last sparsity.
        sparsity: The sparsities on the way, of equally many steps each.
    """
    phases: dict[int, float | None] = {0: None} if begin > 0 else {}
    for stage, part in enumerate(sparsity):
        phases[begin + math.ceil(stage * length / len(sparsity))] = part
    # Stages shorter than a step begin together: the last of them counts.
    return [next(same) for _, same in groupby(phases.items(), key=lambda phase: phase[1])]


def sent(sparsity: float | None, size: int, min_compress_numel: int) -> int:
    """Return how many elements of a tensor a worker sends; 0: all, uncompressed."""
    if sparsity is None or size < min_compress_numel:
        return 0
    return max(1, round((1.0 - sparsity) * size))


# ---- The wire -----------------------------------------------------------------------------------------------------

# The mark at a wire's end, in limbs of 6 bits, each with its square: see ops/include/dgc.h. The composite path, whose
# wires no kernel reads, has limbs of the step and of the settings apart: 6 and 4.
STEP_LIMBS = 6
LARGEST_LIMB = (1 << LIMB_BITS) - 1
MOST_PROCESSES = 4096  # whose limbs' squares float32 adds up exactly


def place_bytes(size: int) -> int:
    """Return how many bytes hold any place in a tensor."""
    return max(1, ((size - 1).bit_length() + 7) // 8)


def wire_words(sizes: Sequence[int], counts: Sequence[int], wire_dtype: str = "float32") -> int:
    """Return how many 4-byte words a worker sends: see ops/include/dgc.h.

    Args:
        sizes: The tensors' sizes.
        counts: How many elements of each are sent; 0: all.
        wire_dtype: The dtype of what is sent of compressed tensors.
    """
    value = np.dtype(wire_dtype).itemsize
    sent = (count * (value + place_bytes(size)) if count else 4 * size for size, count in zip(sizes, counts))
    return (sum(sent) + 3) // 4 + MARK_WORDS


def settings_number(*settings: Any) -> int:
    """Return 28 bits that are the same on workers of the same settings, and hardly ever on others."""
    return zlib.crc32(repr(settings).encode()) >> 4


# ---- The transport ------------------------------------------------------------------------------------------------


class Workers:
    """The workers that compress and exchange: the processes that train together, or the hosts that these are on.

    Attributes:
        count: How many workers there are.
        rank: Which of them this process is, or belongs to.
        group: The communication group's name; None where there is but one process.
        local_group: The name of the group of the processes on this host; None where each process is a worker.
        local: How many processes a host has.
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
            fail(ValueError, optimizer, "group", f"of at most {MOST_PROCESSES} processes", processes)
        mode = ms.get_auto_parallel_context("parallel_mode")
        if processes > 1 and mode != "stand_alone":
            raise ValueError(
                f"For '{optimizer}', the parallel mode must be 'stand_alone', but is '{mode}': the optimizer exchanges "
                "the gradients itself, and would get means of them. Set "
                "mindspore.set_auto_parallel_context(parallel_mode='stand_alone')."
            )
        place = 0 if self.group is None else comm.get_rank(self.group)
        self.local_group = local_group
        self.local = 1 if local_group is None else comm.get_group_size(local_group)
        self.local_rank = 0 if local_group is None else comm.get_rank(local_group)
        if processes % self.local or place % self.local != self.local_rank:
            what = "a group of this host's processes: equally many on each host, and next to each other in 'group'"
            fail(ValueError, optimizer, "local_group", what, local_group)
        self.count, self.rank = processes // self.local, place // self.local

    def check_trainers(self, optimizer: str, num_trainers: int | None) -> None:
        """Check the number of processes, where it is given."""
        processes = self.count * self.local
        if num_trainers is not None and num_trainers != processes:
            where = f"the group '{self.group}' has {processes}" if self.group else f"there {_are(processes)}"
            what = f"the number of processes that train together ({where})"
            fail(ValueError, optimizer, "num_trainers", what, num_trainers)

    def all_reduce(self) -> Callable[[Tensor], Tensor]:
        """Return the operator that adds up a tensor over all processes."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group)

    def exchange(self, compressed: bool, words: int) -> Callable[[Tensor], Tensor]:
        """Return a Cell that takes a worker's wire of so many words to all workers' wires, or to their sum."""
        return GatherWires(self, words) if compressed else AddWires(self, words)


def _are(processes: int) -> str:
    return "is one process" if processes == 1 else f"are {processes}"


class GatherWires(nn.Cell):
    """From this worker's wire to those of all, in the workers' order.

    The processes of one host hold the same wire: each sends its part of it, and it leaves the host once.
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
        """Gather the wires."""
        if not self.divided:
            return self.all_gather(wire).reshape(self.shape)
        part = ops.concat((wire, self.padding))[self.begin : self.end]
        return self.all_gather(part).reshape(self.shape)[:, : self.words]


class AddWires(nn.Cell):
    """From this worker's wire, which holds gradients, to the sum over the workers."""

    all_reduce: Callable[[Tensor], Tensor]
    local: int
    shape: tuple[int, int]

    def __init__(self, workers: Workers, words: int):
        super().__init__(auto_prefix=False)
        self.all_reduce = workers.all_reduce()
        self.local, self.shape = workers.local, (1, words)

    def construct(self, wire: Tensor) -> Tensor:
        """Add up the wires."""
        total = self.all_reduce(wire).reshape(self.shape)
        return total / self.local if self.local > 1 else total


# ---- Top k with MindSpore's operators -----------------------------------------------------------------------------


def largest(x: Tensor, count: Tensor, at_most: int) -> Tensor:
    """Return a mask of the elements of each row that are largest in magnitude, NaN before all; of equals the first.

    Args:
        x: A float32 tensor of two dimensions.
        count: How many to choose of each row, an int32 tensor of no dimensions.
        at_most: The largest that count may be.
    """
    nan = ops.isnan(x)
    magnitude = ops.where(nan, ops.full_like(x, math.inf), ops.abs(x))
    values, _ = ops.topk(magnitude, at_most)
    last = ops.gather(values, count - 1, 1).reshape((-1, 1))
    above = ops.logical_or(magnitude > last, nan)
    equal = ops.logical_and(magnitude == last, ops.logical_not(nan))
    first = ops.logical_and(above, ops.cumsum(F.cast(above, mstype.int32), 1) <= count)
    left = count - F.cast(first, mstype.int32).sum(1).reshape((-1, 1))
    second = ops.logical_and(equal, ops.cumsum(F.cast(equal, mstype.int32), 1) <= left)
    return ops.logical_or(first, second)


def _norm_in_place(x: np.ndarray) -> float:
    """Return the L2 norm of a float32 array with no copy of it, which MindSpore's operators would make."""
    flat = x.reshape(-1)
    # In parts, as a dot product adds up in float32.
    parts = (flat[begin : begin + (1 << 16)] for begin in range(0, flat.size, 1 << 16))
    return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


# ---- The step -----------------------------------------------------------------------------------------------------


class StageCell(nn.Cell):
    """One launch: its operator, what that is to do, and what it takes besides gradients.

    Args:
        kernel: The operator.
        flags: What it is to do.
        before: What it takes before the tensors: whose states they are, and the counters.
        weights: The weights.
        held: Their states and masters.
    """

    kernel: Callable[..., Any]
    flags: Tensor
    no_wires: Tensor
    before: Tensors
    weights: Tensors
    held: Tensors

    def __init__(
        self,
        kernel: Callable[..., Any],
        flags: Tensor,
        before: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
        held: Sequence[Tensor] = (),
    ):
        super().__init__(auto_prefix=False)
        self.kernel, self.flags = kernel, flags
        self.no_wires = Tensor(np.zeros((1, 1), np.float32))
        # The optimizer holds these already, and Cell would list them twice.
        for name, tensors in (("before", before), ("weights", weights), ("held", held)):
            object.__setattr__(self, name, as_tuple(tensors))

    def construct(
        self, layout: Tensor, numbers: Tensors, sums: Tensor, skipping: Tensor, wires: Tensor, gradients: Tensors
    ) -> Tensor | Tensors:
        """Run the launch."""
        parts = ((skipping, wires), self.before, self.weights, gradients, self.held)
        return launch(self.kernel, self.flags, layout, *numbers, sums, *parts)


class ExchangeCell(nn.Cell):
    """The step of a phase of training among several workers: send, exchange, apply."""

    sender: StageCell
    receiver: StageCell
    layout: Tensor
    compressed: bool
    words: int
    exchange: Callable[[Tensor], Tensor]

    def __init__(self, sender: StageCell, receiver: StageCell, layout: NDArray[np.int32], words: int, workers: Workers):
        super().__init__(auto_prefix=False)
        self.sender, self.receiver, self.layout = sender, receiver, Tensor(layout)
        self.compressed, self.words = bool(layout[:, -1].any()), words
        self.exchange = workers.exchange(self.compressed, words)

    def construct(self, numbers: Tensors, sums: Tensor, skipping: Tensor, gradients: Tensors) -> Tensor:
        """Run the phase's launches and what is between them."""
        sums, wire = self.send(numbers, sums, skipping, gradients)
        return self.apply(numbers, sums, skipping, self.exchange(wire), gradients)

    def send(self, numbers: Tensors, sums: Tensor, skipping: Tensor, gradients: Tensors) -> Tensor | Tensors:
        """Return the sums and this worker's wire."""
        return self.sender(self.layout, numbers, sums, skipping, self.sender.no_wires, gradients)

    def apply(
        self, numbers: Tensors, sums: Tensor, skipping: Tensor, wires: Tensor, gradients: Tensors
    ) -> Tensor | Tensors:
        """Accumulate, and move the weights by what the workers sent."""
        return self.receiver(self.layout, numbers, sums, skipping, wires, gradients)


class CompressedByAddress(nn.Cell):
    """The parts of a step that is called from Python, compiled by themselves; see :class:`ms_optim._fused.ByAddress`.

    Those of several simulated workers are called one by one: see simulated_workers.py.
    """

    step: CompressedStep

    def __init__(self, step: CompressedStep):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "step", step)

    @ms.jit(backend="ms_backend")
    def mean(self, gradients: Tensors) -> Tensors:
        """Return the mean gradients of this host's processes."""
        return self.step._local_mean(gradients)

    @ms.jit(backend="ms_backend")
    def run(self, step: Tensor, addresses: Tensor, known: int) -> Tensor:
        """Run the step on what a table of addresses names, in a known phase of training."""
        return self.step._phase_by_address(step, addresses, known)

    @ms.jit(backend="ms_backend")
    def look(self, step: Tensor, addresses: Tensor) -> Tensors:
        """Return sums of the gradients, and whether they are not finite, if that matters."""
        return self.step._look_by_address(step, addresses)

    @ms.jit(backend="ms_backend")
    def send(self, step: Tensor, addresses: Tensor, sums: Tensor, skipping: Tensor, known: int) -> Tensor | Tensors:
        """Return the sums and this worker's wire."""
        return self.step._send_by_address(step, addresses, sums, skipping, known)

    @ms.jit(backend="ms_backend")
    def apply(
        self, step: Tensor, addresses: Tensor, sums: Tensor, skipping: Tensor, wires: Tensor, known: int
    ) -> Tensor:
        """Accumulate, and move the weights by what the workers sent."""
        return self.step._apply_by_address(step, addresses, sums, skipping, wires, known)


def _flattened(gradient):
    return normal(F.cast(gradient, mstype.float32)).reshape(-1)


def _flat(value):
    return value.reshape(-1)


def _like(tensor, parameter):
    return tensor.reshape(F.shape(parameter))


def _end_to_end(sizes):
    """Return where tensors of some sizes begin and end, each behind the one before."""
    ends = tuple(np.cumsum(sizes).tolist())
    return tuple(zip((0, *ends), ends))


def _value_of(accumulated):
    return accumulated[1]


class Compression(NamedTuple):
    """When compression begins, how it grows, which tensors it spares, and as what values travel."""

    rampup_begin_step: int
    rampup_step: int
    sparsity: tuple[float, ...]
    min_compress_numel: int
    wire_dtype: str


class CompressedStep(FusedOptimizer):
    """Base of optimizers that compress what they exchange: both forms of the step.

    The states are the velocity u and r, what has accumulated and was not sent yet. A subclass states :meth:`decayed`
    and :meth:`moved`.
    """

    # Each worker needs the whole of every gradient.
    _support_parallel_optimizer = False
    takes_shard_groups = False

    dgc_worker: Parameter

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate,
        weight_decay: WeightDecay,
        rule: Rule,
        workers: Workers,
        compression: Compression,
        **shared: Any,
    ):
        # Past Cell's bookkeeping, which begins in the constructor below.
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "compression", compression)
        super().__init__(params, learning_rate, weight_decay, rule, **shared)

    def _prepare_step(self, rule, options):
        sizes = tuple(p.size for p in self._parameters)
        for p in self._parameters:
            if p.size > LARGEST:
                raise ValueError(
                    f"For '{self.cls_name}', the parameter '{p.name}' must have at most {LARGEST} elements, "
                    f"but has {p.size}."
                )
        begin, length, sparsity, least, wire_dtype = self.compression
        phases = ramp(begin, length, sparsity)
        self._counts = np.array([[sent(part, size, least) for size in sizes] for _, part in phases], np.int32)
        self._ends = tuple(begin for begin, _ in phases[1:])
        self._begins = Tensor(np.array(self._ends or (0,), np.int32))
        self._sent = Tensor(self._counts)
        self._at_most = tuple(int(k) for k in self._counts.max(axis=0))
        self._no_worker = Tensor(np.zeros(1, np.float32))
        self._sizes = sizes
        self._ranges_in_parts = in_parts(_end_to_end(sizes))
        self._half_values = wire_dtype == "float16"
        workers = self._worker_count = self.workers.count
        self._per_host = self.workers.local
        self._local_sum = ops.AllReduce(ops.ReduceOp.SUM, self.workers.local_group) if self._per_host > 1 else None
        # Of the residuals each worker has its own: a checkpoint says whose it holds. Being of another shape among
        # another number of workers, it is refused there.
        whose = np.eye(workers, dtype=np.int32)[self.workers.rank]
        self.dgc_worker = Parameter(Tensor(whose), name="dgc_worker", requires_grad=False)
        self._own_worker = Tensor(whose)
        settings = (rule.name, rule.constants, rule.flags, options.grad_clip_norm, sizes, self._counts.tolist())
        self._settings = settings_number(*settings, self._ends)
        self._processes = workers * self._per_host
        self._limb_shifts = Tensor([LIMB_BITS * k for k in range(STEP_LIMBS)], mstype.int32)
        limbs = [self._settings >> LIMB_BITS * k & LARGEST_LIMB for k in range(LIMBS - STEP_LIMBS)]
        self._settings_limbs = Tensor(limbs, mstype.float32)
        self._no_mark = Tensor(np.full(MARK_WORDS, np.nan, np.float32))
        self._share = 1.0 / math.sqrt(workers)
        self._skips = options.skip_nonfinite
        self._all_reduce = self.workers.all_reduce() if workers * self._per_host > 1 else None
        super()._prepare_step(rule, options)

    def _prepare_stacks(self, alone, *kinds):
        super()._prepare_stacks(alone, self._at_most, *kinds)
        places = self._stacks.places
        self._stack_at_most = tuple(self._at_most[stack[0]] for stack in places)
        self._stack_ranges = in_parts(_end_to_end([sum(self._sizes[i] for i in stack) for stack in places]))

    def _checked_entries(self, name, state_dict):
        entries = super()._checked_entries(name, state_dict)
        entry = next(key for key, p in self._own_parameters().items() if p is self.dgc_worker)
        if entry in entries and worker_of(name, entries[entry]) != (self.workers.rank, self.workers.count):
            raise ValueError(
                f"For '{name}', 'state_dict' must be that of worker {self.workers.rank} of {self.workers.count}, "
                f"but got that of {self._other_worker(entries[entry])}: ms_optim.fold_residuals() makes the states of "
                "one number of workers from those of another."
            )
        return entries

    def _other_worker(self, entry: Tensor) -> str | None:
        """Say whose states an entry `dgc_worker` goes with, unless they are this worker's own."""
        whose = entry.asnumpy()
        if np.array_equal(whose, self._own_worker.asnumpy()):
            return None
        return f"worker {whose.argmax()} of {whose.size}"

    def check_states(self) -> None:
        """Refuse the residuals of another worker, which MindSpore's own loading takes."""
        if other := self._other_worker(self.dgc_worker):
            raise RuntimeError(
                f"For '{self.cls_name}', the residuals must be those of worker {self.workers.rank} of "
                f"{self.workers.count}, but are those of {other}, whose checkpoint was loaded. Load this worker's own "
                "with load_state_dict(), which refuses others, or what ms_optim.fold_residuals() makes of all."
            )

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...]:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        if self._reads_count:
            self.check_states()
        if self._addresses is not None and self._local_sum is not None:
            gradients = check_gradients(self.cls_name, self._names, self._shapes, gradients)
            gradients = self._by_address.mean(tuple(gradients))
        return super().__call__(gradients)

    def _local_mean(self, gradients):
        """Return the mean gradients of this host's processes: of these, one collective."""
        if self._local_sum is None:
            return gradients
        flat = ops.concat(self.each(_flattened, gradients))
        means = self._cut(self._local_sum(flat) / self._per_host, self._ranges_in_parts)
        return self.each(_like, means, self.parameters)

    def _cut(self, flat, ranges_in_parts):
        """Return the tensors that lie end to end, flat."""
        tensors = ()
        for ranges in ranges_in_parts:
            tensors += self._cut_part(flat, ranges)
        return tensors

    def _cut_part(self, flat, ranges):
        tensors = ()
        for begin, end in ranges:
            tensors += (flat[begin:end],)
        return tensors

    def _place_in_ramp(self, step):
        """Return which phase of training a step is in, an int32 tensor of no dimensions."""
        if len(self._ends) == 0:
            return F.cast(step, mstype.int32).reshape(()) * 0
        return F.cast(step >= self._begins, mstype.int32).sum()

    def decayed(self, weight: Tensor, gradient: Tensor, weight_decay: Tensor) -> Tensor:
        """Return a gradient with the decay in it."""
        raise NotImplementedError

    def moved(self, gradient: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new velocity, and the direction that momentum SGD moves along."""
        raise NotImplementedError

    # ---- Fused ----

    def _prepare_launches(self, rule, options, device):
        n, workers = self.param_length, self.workers
        columns = (self._rate_index, self._decay_index, self._centralized)
        layouts = np.array([_abi.layout(*columns, sent=counts) for counts in self._counts])
        own = (*rule.constants, self.workers.rank, self._settings)
        self._layouts = Tensor(layouts)
        self._constants = Tensor(_abi.constants(self._unscale, options.grad_clip_norm, self._seed, own))
        self._no_sums = Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))
        self._counters = ParameterTuple((self.global_step, self.skipped_steps, self.statistics))
        shared = self._shared_flags(rule, options)
        # For each form what comes before the tensors, weights, what is held for them, and the form's flag.
        held = (*self.states, *self.masters)
        forms = [((self.dgc_worker, *self._counters), tuple(self._parameters), held, 0)]
        if device == "CPU":
            forms.append(((self._own_worker,), (), (), _kernels.BY_ADDRESS))
            self._by_address = CompressedByAddress(self)
            self._addresses = _kernels.AddressTable(
                self._parameters,
                self.states,
                self.masters,
                self._master_index,
                (),
                (),
                self._counters,
            )
        sums = ((n, len(_kernels.SUMS)), ms.float64)
        local, look, exchanges = [], [], []
        for before, weights, held, flag in forms:

            def stage(stages, outputs, before=before, weights=weights, held=held, flag=flag):
                if stages == GRADIENT_STAGE:
                    weights, held = (), ()
                given = n if flag == 0 else 1
                counters = len(before) - 1  # before these, whose states they are
                written = _abi.written(counters, len(weights), given, len(held), exchanges=True)
                kernel = _kernels.operator(rule.name, device, written, outputs, self._shapes, shared)
                return StageCell(kernel, _kernels.flags(stages, shared + flag, rule.flags), before, weights, held)

            if workers.count == 1:
                local.append(stage(_kernels.ALL_STAGES, [sums]))
                continue
            look.append(stage(GRADIENT_STAGE, [sums]))
            cells = []
            for layout, counts in zip(layouts, self._counts.tolist()):
                words = wire_words(self._sizes, counts, self.compression.wire_dtype)
                wire = ((words,), ms.int32 if any(counts) else ms.float32)
                send, apply = stage(MOMENTS_STAGE, [sums, wire]), stage(APPLY_STAGE + COMMIT_STAGE, [sums])
                cells.append(ExchangeCell(send, apply, layout, words, workers))
            exchanges.append(nn.CellList(cells))
        self._local, self._look, self._exchanges = nn.CellList(local), nn.CellList(look), nn.CellList(exchanges)

    def _fused_step(self, rates, gradients):
        """Run the step in a graph."""
        gradients = self._local_mean(gradients)
        numbers = (self._constants, rates)
        phase = self._place_in_ramp(self.global_step)
        if self._worker_count == 1:
            return self._run_locally(0, phase, numbers, gradients)
        sums, skipping = self._looked_at(0, numbers, gradients)
        done = self._no_sums
        for k in range(len(self._ends) + 1):
            if phase == k:
                done = self._exchanges[0][k](numbers, sums, skipping, gradients)
        return done

    def _step_by_address(self, step, addresses):
        """Run the step on what a table of addresses names; Python knows the phase."""
        known = self._known_place(step) if self._worker_count > 1 else 0
        return self._by_address.run(step, addresses, known)

    def _known_place(self, step):
        at = int(step.asnumpy()[0])
        return sum(at >= end for end in self._ends)

    def densities(self, step: Tensor) -> NDArray[np.float64]:
        """Return which part of each tensor's elements a worker sends in a step, counted from 0."""
        counts = self._counts[self._known_place(step)]
        return np.where(counts > 0, counts / np.array(self._sizes), 1.0)

    def residual_norms(self) -> NDArray[np.float64]:
        """Return the L2 norm of what of each tensor this worker has not sent yet."""
        return np.array([_norm_in_place(r.asnumpy()) for r in self.states[self.param_length :]])

    def _numbers_at(self, step):
        return self._constants, self._rates(step)

    def _phase_by_address(self, step, addresses, known):
        numbers = self._numbers_at(step)
        if self._worker_count == 1:
            return self._run_locally(1, self._place_in_ramp(step), numbers, (addresses,))
        sums, skipping = self._looked_at(1, numbers, (addresses,))
        return self._exchanges[1][known](numbers, sums, skipping, (addresses,))

    # What a step of one of several simulated workers is made of; see simulated_workers.py.

    def _look_by_address(self, step, addresses):
        if not self._skips:
            return self._no_sums, self._no_worker
        return self._looked_here(1, self._numbers_at(step), (addresses,))

    def _send_by_address(self, step, addresses, sums, skipping, known):
        return self._exchanges[1][known].send(self._numbers_at(step), sums, skipping, (addresses,))

    def _apply_by_address(self, step, addresses, sums, skipping, wires, known):
        return self._exchanges[1][known].apply(self._numbers_at(step), sums, skipping, wires, (addresses,))

    def _run_locally(self, form, phase, numbers, gradients):
        layout, stage = ops.gather(self._layouts, phase, 0), self._local[form]
        return stage(layout, numbers, self._no_sums, self._no_worker, stage.no_wires, gradients)

    def _looked_at(self, form, numbers, gradients):
        """Return sums of the gradients, and of how many workers they are not finite, if that matters."""
        if not self._skips:
            return self._no_sums, self._no_worker
        sums, skipping = self._looked_here(form, numbers, gradients)
        return sums, self._all_reduce(skipping)

    def _looked_here(self, form, numbers, gradients):
        """Return sums of the gradients, and whether they are not finite, float32 of shape (1,)."""
        stage = self._look[form]
        sums = stage(self._layouts[0], numbers, self._no_sums, self._no_worker, stage.no_wires, gradients)
        norm = F.cast(ops.sqrt(sums[:, 0].sum()) * self._unscale, mstype.float32)
        return sums, 1.0 - F.cast(ops.isfinite(norm), mstype.float32).reshape((1,))

    # ---- In MindSpore's operators ----

    def _composite_step(self, rates, gradients):
        stacks = self._stacks
        gradients = self.each(self._prepared, stacks(self._local_mean(gradients)), self._stack_centralized)
        finite = self.each(usable, gradients)
        applied = self._applies(self._everywhere(ops.all(ops.concat(finite))))
        table = self._rate_table(rates)
        rate = self.each(cut, stacks.spread(table[0]), gradients)
        decay = self.each(cut, stacks.spread(table[1]), gradients)
        counts = ops.gather(self._sent, self._place_in_ramp(self.global_step), 0)
        counts = self.each(first_of, stacks.spread(counts))
        columns = (gradients, self._stack_at_most, counts, *self._stack_columns)
        accumulated = self.each(self._accumulated, decay, *columns)
        means = self._mean(self.each(_value_of, accumulated))
        # Nothing is written before what all sent is known to be of this step.
        applied = F.depend(applied, means)
        shared = (applied,) * len(gradients)
        reports = self.each(self._received, shared, finite, rate, accumulated, means, *columns)
        self._count(applied, stacks.in_order(reports))
        return applied

    def _accumulated(self, decay, gradients, at_most, count, weights, masters, has_master, u, r):
        """Return of a stack the weights, what is sent, the mask of it, and u and r with what is sent in them."""
        weights, u, r = self._weights_of(weights, masters, has_master), self._stacks.held(u), self._stacks.held(r)
        g = self.decayed(weights, gradients, column(decay, weights))
        if at_most == 0:
            return weights, g, u, u, r
        clipped = g
        if self._clip_norm is not None:
            total, bound = norms(g, self._step_dtype), self._clip_norm * self._share
            clipped = normal(g * column(ops.where(total > bound, bound / total, ops.ones_like(total)), g))
        new_u, direction = self.moved(clipped, u)
        new_r = summed(r, direction)
        rows = new_r.reshape((F.shape(new_r)[0], -1))
        mask = largest(rows, ops.maximum(count, ops.ones_like(count)), at_most).reshape(F.shape(new_r))
        value = ops.where(count > 0, ops.where(mask, self._travelled(new_r), ops.zeros_like(new_r)), g)
        return weights, value, mask, new_u, new_r

    def _received(
        self,
        applied,
        finite,
        rate,
        accumulated,
        mean,
        gradients,
        at_most,
        count,
        parameters,
        masters,
        has_master,
        *states,
    ):
        """Write the new weights and states of a stack; return their rows of statistics."""
        weights, value, mask, velocity, residual = accumulated
        u, r = self._stacks.held(states[0]), self._stacks.held(states[1])
        new_u, direction = self.moved(mean, u)
        written = ()
        if at_most > 0:
            compressed = count > 0
            kept = ops.where(mask, self._behind(residual, value), residual)
            new_u = ops.where(compressed, ops.where(mask, ops.zeros_like(u), velocity), new_u)
            direction = ops.where(compressed, mean, direction)
            written += (self._write_stack(states[1], ops.where(applied, ops.where(compressed, kept, r), r)),)
        written += (self._write_stack(states[0], ops.where(applied, new_u, u)),)
        update = normal(column(rate, direction) * direction)
        found = (norms(gradients, self._step_dtype), norms(weights, self._step_dtype))
        new_weights = ops.where(applied, normal(weights - update), weights)
        written += (self._write_weights(parameters, masters, has_master, new_weights),)
        size = norms(update, self._step_dtype)
        moved = (ops.where(applied, size, ops.zeros_like(size)), F.cast(applied, mstype.float32) * ops.ones_like(size))
        return F.depend(ops.stack((*found, *moved, F.cast(finite, mstype.float32)), 1), written)

    def _travelled(self, value):
        """Return a value as it arrives."""
        if not self._half_values:
            return value
        finite = ops.isfinite(value)
        clamped = ops.where(finite, ops.clamp(value, float(HALF.min), float(HALF.max)), value)
        return F.cast(F.cast(clamped, mstype.float16), mstype.float32)

    def _behind(self, value, travelled):
        """Return what rounding takes from a value that is sent: it is sent another time."""
        left = normal(value - travelled)
        return ops.where(ops.isnan(left), ops.zeros_like(left), left)

    def _mean(self, values):
        if self._worker_count == 1:
            return values
        mark = self._mark()
        flat = ops.concat(self.each(_flat, values))
        total = self._checked_total(self._all_reduce(ops.concat((flat, mark))), mark)
        means = self._cut(normal(total / self._processes), self._stack_ranges)
        return self.each(_like, means, values)

    def _mark(self):
        """Return the mark of this step, or NaN where the residuals are another worker's, so that no process goes on."""
        # Not by division, which is of floating-point numbers on a CPU.
        parts = ops.bitwise_and(ops.bitwise_right_shift(self.global_step, self._limb_shifts), LARGEST_LIMB)
        limbs = ops.concat((F.cast(parts, mstype.float32), self._settings_limbs))
        own = (self.dgc_worker == self._own_worker).all()
        return ops.where(own, ops.concat((limbs, limbs * limbs)), self._no_mark)

    def _checked_total(self, total, mark):
        """Return the sum of what all sent, if all marks are this process's own."""
        if ops.logical_not((total[-MARK_WORDS:] == mark * self._processes).all()):
            raise RuntimeError(
                "DGCMomentum received what belongs to another step or to other settings, or some worker holds another "
                "worker's residuals: nothing was changed."
            )
        return total

    def _everywhere(self, finite):
        if self._worker_count == 1:
            return finite
        return self._all_reduce(1.0 - F.cast(finite, mstype.float32).reshape((1,))).sum() == 0
