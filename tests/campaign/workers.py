"""Several workers in one process: compressed exchanges with random ramps, and states that are split over them."""

import numpy as np
import simulated
from harness import tensor
from hypothesis import strategies as st
from mindspore import Parameter
from native import Launch, call
from recording import RULES, kinds_of

import ms_optim
from ms_optim.kernels.interface import CODE_BLOCK, SharedFlag
from ms_optim.states.shares import Peers, Shares

sizes = st.lists(st.one_of(st.integers(1, 40), st.integers(41, 9000)), min_size=1, max_size=5)
ramp = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "rampup_begin_step": st.integers(0, 4),
        "rampup_step": st.integers(1, 6),
        "sparsity": st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999]), min_size=1, max_size=4),
        "min_compress_numel": st.sampled_from([1, 16, 1000, 10**6]),
        "wire_dtype": st.sampled_from(["float32", "float16"]),
        "use_nesterov": st.booleans(),
        "grad_clip_norm": st.sampled_from([None, 0.1, 3.0]),
        "skip_nonfinite": st.booleans(),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "decay_type": st.sampled_from(["l2", "l1"]),
    }
)
seed = st.integers(0, 2**32 - 1)
compressed = st.fixed_dictionaries(
    {
        "what": st.just("compressed"),
        "count": st.integers(1, 4),
        "sizes": sizes,
        "ramp": ramp,
        "steps": st.integers(1, 10),
        "poisoned": st.lists(st.integers(0, 9), max_size=2),
        "later": st.integers(1, 5),
        "seed": seed,
    }
)
split = st.fixed_dictionaries(
    {
        "what": st.just("split"),
        "count": st.integers(1, 6),
        "sizes": st.lists(st.integers(1, 12_000), min_size=1, max_size=6),
        "rule": st.sampled_from(["adamw", "adamw_amsgrad", "adam_offload"]),
        "states": st.sampled_from(["float32", "8bit", "4bit"]),
        "seed": seed,
    }
)
PROGRAM = st.one_of(compressed, split)


def attack(program):
    return (follows if program["what"] == "compressed" else splits)(**{k: v for k, v in program.items() if k != "what"})


def follows(count, sizes, ramp, steps, poisoned, later, seed):
    """They follow the reference of so many, and what they have not sent goes on with another number of workers."""
    workers = simulated.followed(count, [(size,) for size in sizes], ramp, steps, set(poisoned), seed)
    held = [sum(state(o, i) for o in workers.optimizers) for i in range(len(sizes))]

    def make(params, group):
        return ms_optim.DGCMomentum(params, 0.01, group=group, **ramp)

    params = [Parameter(tensor(np.zeros(size), "float32"), name=f"w{i}") for i, size in enumerate(sizes)]
    others = ms_optim.SimulatedWorkers(later, params, make)
    for o, entries in zip(
        others.optimizers, ms_optim.fold_residuals([o.state_dict() for o in workers.optimizers], later)
    ):
        o.load_state_dict(entries)
    for i, before in enumerate(held):
        after = sum(state(o, i) for o in others.optimizers)
        largest = np.max(np.abs(before), initial=1e-30)
        assert np.max(np.abs(after - before)) <= 8 * count * 2.0**-24 * largest, f"w{i}: residuals were lost"
    return {"exchanges": steps}


def state(optimizer, i):
    """Return what a worker has not sent yet of a tensor."""
    return optimizer.states[len(optimizer.parameters) + i].asnumpy().astype(np.float64)


def splits(count, sizes, rule, states, seed):
    """What workers make of their shares is, end to end, what one makes of everything, bit for bit."""
    rng = np.random.default_rng(seed)
    _, constants, flags = RULES[rule]
    kinds, each = kinds_of(rule, states), 4 if states == "4bit" else 1
    weights, gradients = ([rng.standard_normal(size).astype(np.float32) for size in sizes] for _ in range(2))
    names = [f"w{i}" for i in range(len(sizes))]

    def launched(lengths, ranges=None):
        blocks = [-(-n // CODE_BLOCK) for n in lengths]
        scales = [[np.zeros(n, np.float32) for n in blocks] for _ in kinds] if states != "float32" else []
        held, own = [[np.zeros(-(-n // each), kind) for n in lengths] for kind in kinds], [w.copy() for w in weights]
        shared = SharedFlag.SHARES if ranges is not None else 0
        launch = Launch(
            f"ms_optim_{rule}", own, gradients, held, constants, flags, scales=scales, seed=5, shared=shared
        )
        if ranges is not None:
            launch.arrays.insert(5, ranges)
        for _ in range(2):
            assert launch.run(call) == 0
        return own, held

    whole, whole_states = launched(sizes)
    moved = [w.copy() for w in weights]
    for rank in range(count):
        these, shapes = Peers(rank, count, None), [(size,) for size in sizes]
        shares = Shares(these, names, shapes, [8] * len(sizes), [False] * len(sizes), ("m",))
        own, held = launched([shape[0] for _, shape in shares.kept], shares.own)
        place = {i: k for k, (i, _) in enumerate(shares.kept)}
        for i, (begin, end) in enumerate(shares.own.tolist()):
            moved[i][begin:end] = own[i][begin:end]
            own[i][begin:end] = weights[i][begin:end]
            assert own[i].tobytes() == weights[i].tobytes(), f"Worker {rank} wrote outside of its share of w{i}."
            for part, full in zip(held, whole_states) if i in place else ():
                same = full[i][begin // each : -(-end // each)].tobytes()
                assert part[place[i]].tobytes() == same, f"Worker {rank}: states of w{i}"
    for a, b, name in zip(moved, whole, names):
        assert a.tobytes() == b.tobytes(), name
    return {"shares": count}
