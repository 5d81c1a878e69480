"""What the processes of test_sharding.py and the test itself agree on."""

import dataclasses
from typing import Any

import numpy as np
from cases import CASES
from harness import NUMPY

import ms_optim

# Split along the first dimension, or the one that AXES says, but for the whole ones. A slice of the largest is more
# than one chunk.
SHAPES = {
    "split.matrix": (13, 11),
    "whole.vector": (17,),
    "split.convolution": (6, 4, 3, 3),
    "split.zero": (9, 5),
    "split.large": (3500, 20),
    "whole.matrix": (5, 3),
    "whole.scalar": (),
    "split.vector": (4097,),
    "split.columns": (6, 21),
    "split.experts": (10, 6, 7),
    "split.more experts": (10, 6, 7),
    "split.rows of experts": (2, 12, 5),
}
AXES = {"split.columns": 1, "split.rows of experts": 1}
# The most elements of one of Muon's stacks: one whole tensor of experts, but two of the parts that some processes have.
STACKED = 500
NAMES = list(SHAPES)
# MindSpore's operators take time to compile and to call one by one: they get one tensor of each kind, and for a rule
# without matrices, no shapes that only those tell apart.
OF_MATRICES = [name for name in NAMES if name not in ("split.zero", "split.large", "whole.matrix", "whole.scalar")]
FEW = ("split.matrix", "whole.vector", "split.convolution", "split.vector")
CENTRALIZED = ("split.matrix", "split.convolution", "whole.matrix")
RATE, SPLIT_DECAY, WHOLE_DECAY = 0.01, 0.1, 0.02
STEPS, POISONED, POISONED_TENSOR = 5, 3, "split.vector"
REFERENCES = {case.cls: case.reference for case in CASES if "shard_group" not in case.cls.refuses}
ALL = {"grad_clip_norm": 3.0, "skip_nonfinite": True, "loss_scale": 8.0}


@dataclasses.dataclass(frozen=True)
class Configuration:
    optimizer: Any
    backend: str
    mode: str
    arguments: dict[str, Any]
    dtype: str = "float32"
    group: str = "world"
    processes: tuple[int, ...] = (2,)
    only: tuple[str, ...] = ()

    @property
    def tensors(self):
        """Return the names of the tensors that it has."""
        if self.optimizer.dimensions is not None:
            return [name for name in NAMES if len(SHAPES[name]) == self.optimizer.dimensions and name not in AXES]
        if self.only:
            return self.only
        if self.backend == "aot":
            return NAMES
        return OF_MATRICES if self.optimizer is ms_optim.Muon else FEW

    @property
    def poisoned(self):
        """Return the name of the tensor whose gradient has a NaN in one step."""
        return POISONED_TENSOR if POISONED_TENSOR in self.tensors else self.tensors[0]

    @property
    def name(self):
        said = (*self.arguments, *([self.group] if self.group != "world" else []))
        return "-".join((self.optimizer.__name__, self.backend, self.mode, self.dtype, *said))

    def sharers(self, processes):
        """Return how many processes share a split tensor."""
        return processes if self.group == "world" else 2


# What slices store in few bits, by kernels and by MindSpore's operators; slices of the largest tensor have codes.
STORED = {"split": {"state_dtype": "8bit", "master_weights": "split", "grad_clip_norm": 3.0}}
STORED |= {"split8": {"state_dtype": "bfloat16", "master_weights": "split8"}}
IN_FEW_BITS = [(ms_optim.Lamb, "graph", "split"), (ms_optim.AdamW, "pynative", "split8")]
HAVE_FEW_BITS = ("split.matrix", "whole.vector", "split.large", "split.vector")


def in_few_bits(backend):
    """Return the configurations of slices in few bits."""
    return [
        Configuration(cls, backend, mode, STORED[masters], "bfloat16", only=HAVE_FEW_BITS)
        for cls, mode, masters in IN_FEW_BITS
    ]


# States, and what owners get of them, are rounded: it is compared with what they get of the other one.
SPLITS = {"splits": {"split.matrix": (6, 7), "split.rows of experts": ((2, 1), 4)}}
EXACT = Configuration(ms_optim.Muon, "auto", "graph", SPLITS)
IN_BFLOAT16 = {**SPLITS, "ns_dtype": "bfloat16", "state_dtype": "bfloat16"}
ROUNDED = dataclasses.replace(EXACT, mode="pynative", arguments=IN_BFLOAT16)


def _configurations():
    both = (2, 4)
    for optimizer in (ms_optim.Lamb, ms_optim.LANS):
        yield Configuration(optimizer, "aot", "graph", {}, processes=both)
        yield Configuration(optimizer, "aot", "pynative", ALL, processes=both)
    yield Configuration(ms_optim.LANS, "aot", "graph", ALL, group="pair", processes=(4,))
    yield Configuration(ms_optim.AdamW, "aot", "graph", ALL)
    yield Configuration(ms_optim.AdamW, "aot", "pynative", {}, "bfloat16", processes=both)
    yield Configuration(ms_optim.AdamOffload, "aot", "graph", {})
    yield Configuration(ms_optim.AdamOffload, "aot", "pynative", ALL)
    yield Configuration(ms_optim.Lamb, "aot", "pynative", {"skip_nonfinite": True}, "bfloat16")
    yield Configuration(ms_optim.Lamb, "composite", "pynative", {})
    yield Configuration(ms_optim.LANS, "composite", "graph", ALL)
    yield Configuration(ms_optim.AdamW, "composite", "pynative", {**ALL, "weight_norm": "relative"})
    yield Configuration(ms_optim.AdamW, "composite", "graph", {"weight_norm": ms_optim.RadialBrake(0.25, 0.5)})
    yield Configuration(ms_optim.AdamW, "aot", "pynative", {**ALL, "weight_norm": "relative"}, processes=both)
    yield Configuration(ms_optim.AdEMAMix, "aot", "graph", {"weight_norm": ms_optim.RadialBrake(0.25, 0.5)})
    yield Configuration(ms_optim.LANS, "akg", "pynative", ALL)
    above = (ms_optim.AdamW, ms_optim.Lamb, ms_optim.LANS, ms_optim.AdamOffload)
    # Muon puts matrices together by MindSpore's operators.
    yield Configuration(ms_optim.Muon, "composite", "graph", {**ALL, **SPLITS})
    yield Configuration(ms_optim.Muon, "composite", "pynative", {"normalize_rows": True, **SPLITS}, processes=both)
    yield Configuration(ms_optim.Muon, "composite", "pynative", {"normalize_rows": True}, group="pair", processes=(4,))
    # Owners run the kernel, which orthogonalizes what the operators have put together.
    yield EXACT
    yield Configuration(ms_optim.Muon, "auto", "pynative", {"normalize_rows": True, **SPLITS}, processes=both)
    yield Configuration(ms_optim.Muon, "auto", "pynative", {"master_weights": "split"}, "bfloat16")
    # Each process has whole heads, and puts nothing together.
    heads = {"split.convolution": ms_optim.heads(3), "split.rows of experts": ms_optim.heads(3)}
    of_four = {"split.convolution": ms_optim.heads(6), "split.rows of experts": (1, ms_optim.heads(2, 3), 5)}
    for processes, splits in ((2, heads), (4, of_four)):
        given = {"nesterov": False, "normalize_rows": True, "splits": splits}
        yield Configuration(ms_optim.Muon, "composite", "pynative", given, processes=(processes,))
    yield Configuration(ms_optim.Sinkhorn, "composite", "pynative", ALL, processes=both)
    # Both pairs hold the same slices, whose states they share.
    for optimizer, mode, given in (
        (ms_optim.Muon, "pynative", {"shard_states": True, **ALL}),
        (ms_optim.Muon, "pynative", {"shard_states": True, "normalize_rows": True}),
        (ms_optim.LANS, "pynative", {"shard_states": True, **ALL}),
        (ms_optim.AdamW, "pynative", {"shard_states": True, "weight_norm": "relative"}),
        (ms_optim.Sinkhorn, "graph", {"shard_states": True}),
    ):
        yield Configuration(optimizer, "composite", mode, given, group="pair", processes=(4,))
    for optimizer in REFERENCES:  # in one order, and no set's: every process runs the same at the same time
        if optimizer not in (*above, ms_optim.Muon, ms_optim.Sinkhorn):
            yield Configuration(optimizer, "aot", "pynative", ALL)


# Those whose checkpoints are loaded on another number of processes: of matrices with averages of rows, of replicas that
# share states, and of codes.
ANOTHER_NUMBER = (
    "Muon-auto-pynative-float32-normalize_rows-splits",
    "LANS-composite-pynative-float32-shard_states-grad_clip_norm-skip_nonfinite-loss_scale-pair",
    "Lamb-aot-graph-bfloat16-state_dtype-master_weights-grad_clip_norm",
)


def configurations(processes):
    return [c for c in _configurations() if processes in c.processes]


def own_part(name, array, place, sharers):
    """Return what one of the processes holds of a tensor: more the later it stands."""
    if name.startswith("whole"):
        return array
    axis = AXES.get(name, 0)
    cuts = [round(array.shape[axis] * k * (k + 1) / (sharers * (sharers + 1))) for k in range(sharers + 1)]
    return array.take(range(cuts[place], cuts[place + 1]), axis)


def _drawn(seed, c, scale=1.0):
    rng = np.random.default_rng(seed)
    drawn = {name: np.asarray(rng.standard_normal(SHAPES[name]) * scale) for name in c.tensors}
    return {name: x.astype(NUMPY[c.dtype]).astype(np.float64) for name, x in drawn.items()}


def start(configuration):
    drawn = _drawn(0, configuration)
    return {name: x * 0.0 if name == "split.zero" else x for name, x in drawn.items()}


def is_poisoned(step, configuration):
    return step == POISONED and bool(configuration.arguments.get("skip_nonfinite"))


def gradients(step, configuration):
    """Return the gradients of whole tensors; the last element of a split one is a NaN where that is skipped."""
    drawn = _drawn([1, step], configuration, configuration.arguments.get("loss_scale", 1.0))
    if is_poisoned(step, configuration):
        drawn[configuration.poisoned][-1] = np.nan
    return drawn
