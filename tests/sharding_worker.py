"""One of the processes of test_sharding.py: steps with slices of tensors, and a record of what they do."""

import mindspore as ms
import numpy as np
import pytest
from harness import Step, numbers, numbers_of, tensor
from mindspore import Parameter, communication, nn
from runtime import group_of, set_mode
from sharding import (
    ANOTHER_NUMBER,
    AXES,
    CENTRALIZED,
    RATE,
    ROUNDED,
    SPLIT_DECAY,
    STACKED,
    STEPS,
    WHOLE_DECAY,
    configurations,
    gradients,
    in_few_bits,
    own_part,
    start,
)

from ms_optim import LANS, Lamb, Muon, load, save
from ms_optim.paths.operators import stacks
from ms_optim.rules.sliced_matrices import of_all

MOST_ELEMENTS = stacks.MOST_ELEMENTS


def groups(params, shard_group, knows_axes):
    """Group parameters by how they are split and whether they are centralized, in the order of their names."""
    made = {}
    for name, p in params.items():
        settings = {"weight_decay": WHOLE_DECAY}
        if name.startswith("split"):
            settings = {"weight_decay": SPLIT_DECAY, "shard_group": shard_group}
            if knows_axes and name in AXES:
                settings["shard_axis"] = AXES[name]
        settings["grad_centralization"] = name in CENTRALIZED
        made.setdefault(str(settings), {**settings, "params": []})["params"].append(p)
    return [*made.values(), {"order_params": list(params.values())}]


def refused(match):
    with pytest.raises(ValueError, match=match):
        Lamb([{"params": [Parameter(tensor([1.0], "float32"), name="w")], "shard_group": "nobody"}], 0.1)


def check_refusals():
    refused(r"params\[0\]\['shard_group'\]' must be the name of a communication group that this process belongs to")
    world = communication.GlobalComm.WORLD_COMM_GROUP
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    with pytest.raises(ValueError, match=r"must be one of \['stand_alone', 'hybrid_parallel'\] .* 'data_parallel'"):
        Lamb([{"params": [Parameter(tensor([1.0], "float32"), name="w")], "shard_group": world}], 0.1)
    ms.reset_auto_parallel_context()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    sliced = Lamb([{"params": [Parameter(tensor([1.0], "float32"), name="w")], "shard_group": world}], 0.1)
    with pytest.raises(RuntimeError, match=r"attach\(\) is not supported by optimizers that exchange"):
        sliced.attach()
    check_slices_that_do_not_fit(world)
    check_other_arguments(world)


def check_other_arguments(world):
    """Every process raises the same error, and none waits for another."""
    rank = communication.get_rank()
    matrix = [{"params": [Parameter(tensor(np.ones((4, 3)), "float32"), name="w")], "shard_group": world}]
    for given, said in (
        ({"state_dtype": ("float32", "bfloat16")[rank % 2]}, "'state_dtype'"),
        ({"skip_nonfinite": rank > 0}, "'skip_nonfinite'"),
        ({"learning_rate": 0.1 + 0.1 * rank}, "learning rates and weight decays"),
        ({"learning_rate": [0.1, 0.2 + rank]}, "learning rates and weight decays"),
        ({"learning_rate": nn.ExponentialDecayLR(0.1, 0.9, 10 + rank)}, "learning rates and weight decays"),
        ({"weight_decay": 0.1 + 0.1 * rank}, "learning rates and weight decays"),
        ({"momentum": 0.9 + 0.01 * rank}, "arguments of the rule"),
        ({"ns_steps": 5 + rank % 2}, "arguments of the rule"),
        ({"splits": {"w": (2, 4 * communication.get_group_size() - 2) if rank else 2}}, "matrices of each parameter"),
    ):
        with pytest.raises(ValueError, match=f"must have the same {said}, but another process has another than"):
            Muon(matrix, **{"learning_rate": 0.1, "backend": "composite", **given})


def check_slices_that_do_not_fit(world):
    """On every process, as the others would wait for it."""
    rank = communication.get_rank()
    w = Parameter(tensor(np.ones((4, 3 + rank)), "float32"), name="w")
    with pytest.raises(ValueError, match=r"the parameter 'w' must differ only in the dimension 'shard_axis', but"):
        Muon([{"params": [w], "shard_group": world}], 0.1, backend="composite")
    with pytest.raises(
        ValueError, match=r"'shard_axis' of the parameter 'w' must be less than its number of dimensions, 2"
    ):
        Muon([{"params": [w], "shard_group": world, "shard_axis": 2}], 0.1, backend="composite")
    with pytest.raises(RuntimeError, match=r"no fused kernel: the group key 'shard_group' needs matrices that"):
        Muon([{"params": [w], "shard_group": world, "shard_axis": 1}], 0.1, backend="aot")


def check_replicas_that_do_not_fit(pair):
    """Two of four processes hold slices: no process waits for another."""
    w = Parameter(tensor(np.ones((4, 3)), "float32"), name="w")
    settings = {"shard_group": pair} if communication.get_rank() < 2 else {}
    with pytest.raises(ValueError, match=r"with shard_states=True all tensors must be sliced .* sizes \[2, 2, 1, 1\]"):
        Lamb([{"params": [w], **settings}], 0.1, backend="composite", shard_states=True)


def run(configuration, group, place, sharers, record):
    """Take the steps of a configuration, record weights and statistics after each, and return the optimizer."""
    c = configuration
    set_mode(c.mode)
    # Threads that hand operators to each other wait without rest, which takes long where processes share a core: one
    # optimizer shows that a step needs no order but that of its operators.
    ms.set_context(pynative_synchronize=c.backend != "aot" or c.optimizer is not LANS)
    stacks.MOST_ELEMENTS = STACKED if c.optimizer is Muon else MOST_ELEMENTS
    parts = {name: own_part(name, w, place, sharers) for name, w in start(c).items()}
    params, optimizer = made(c, parts, group)
    assert optimizer.fused == (c.backend == "aot")
    call = Step(optimizer) if c.mode == "graph" else lambda *g: optimizer(g)
    for step in range(STEPS):
        given = gradients(step, c)
        call(*(tensor(own_part(name, given[name], place, sharers), c.dtype) for name in c.tensors))
        for name, p in params.items():
            record[f"{c.name}/{step}/{name}"] = numbers(p).astype(np.float32)
        record[f"{c.name}/{step}/statistics"] = optimizer.statistics.asnumpy().copy()
    if optimizer.shares is None:
        record |= {f"{c.name}/{state.name}": numbers(state).astype(np.float32) for state in optimizer.states}
    else:
        record |= {f"{c.name}/share/{name}": value.asnumpy() for name, value in optimizer.state_dict().items()}
    record[f"{c.name}/counts"] = [int(optimizer.global_step.asnumpy()[0]), int(optimizer.skipped_steps.asnumpy()[0])]
    return optimizer


def made(c, values, group):
    """Return the parameters of a configuration with given values, and an optimizer of them."""
    params = {name: Parameter(tensor(w, c.dtype), name=name) for name, w in values.items()}
    return params, c.optimizer(groups(params, group, c.optimizer is Muon), RATE, backend=c.backend, **c.arguments)


def load_slices_of_four(c, folder, record):
    """Load what four processes saved as two slices, of which each pair holds both."""
    pair = communication.get_rank() // 2 * 2
    place = communication.get_rank() - pair
    params, optimizer = made(c, {n: 0 * own_part(n, w, place, 2) for n, w in start(c).items()}, group_of(pair, 2))
    load(folder / f"{c.name}.safetensors", optimizer=optimizer)
    record |= {f"{c.name}/loaded/{name}": numbers(p) for name, p in params.items()}
    record |= {f"{c.name}/loaded/{state.name}": numbers(state) for state in optimizer.states}


def main(folder, rank, processes):
    check_refusals()
    world, pair = communication.GlobalComm.WORLD_COMM_GROUP, rank // 2 * 2
    if processes == 4:
        check_replicas_that_do_not_fit(group_of(pair, 2))
    record = {}
    for c in configurations(processes):
        group, place = (world, rank) if c.group == "world" else (group_of(pair, 2), rank - pair)
        optimizer = run(c, group, place, c.sharers(processes), record)
        if c.name in ANOTHER_NUMBER:
            save(folder / f"{c.name}.safetensors", optimizer=optimizer)
            of_all(world, np.zeros(1, np.int64))  # all have saved
            if processes == 4 and c.group == "world":
                load_slices_of_four(c, folder, record)
    stacks.MOST_ELEMENTS = MOST_ELEMENTS
    for c in (ROUNDED, *in_few_bits("aot"), *in_few_bits("composite")) if processes == 2 else ():
        optimizer = run(c, world, rank, processes, record)
        record |= {f"{c.name}/held/{name}": x for name, x in numbers_of(optimizer)}
        if c.name in ANOTHER_NUMBER:
            save(folder / f"{c.name}.safetensors", optimizer=optimizer)
    np.savez(folder / f"{rank}.npz", **record)
