"""One of the processes of test_shares.py: steps with all states, with its share of them, and resumed with it."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from harness import Step, numbers
from mindspore import communication, nn
from runtime import set_mode, wait
from shares import RESUMED, RUNS, SAVED, STEPS, build, checkpoint, gradients

from ms_optim import AdamW, merge_states


def weights_after(name, params, optimizer, mode, steps):
    call = Step(optimizer) if mode == "graph" else lambda *g: optimizer(g)
    for step in steps:
        call(*gradients(name, step))
    return [numbers(p) for p in params]


def recorded(run, name, mode, folder, shard_states=False):
    """Take the steps of a configuration; save the optimizer, and return what came of it."""
    set_mode(mode)
    params, optimizer = build(name, shard_states=shard_states)
    weights = weights_after(name, params, optimizer, mode, range(STEPS))
    record = {f"{run}/w{i}": w for i, w in enumerate(weights)}
    record[f"{run}/statistics"] = optimizer.statistics.asnumpy()
    counts = (optimizer.global_step, optimizer.skipped_steps)
    record[f"{run}/counts"] = [int(count.asnumpy()[0]) for count in counts]
    if len(optimizer.averages) > 0 or optimizer.averages_iterates:
        with optimizer.averaged():
            record |= {f"{run}/average of w{i}": numbers(p) for i, p in enumerate(params)}
        assert all((numbers(p) == w).all() for p, w in zip(params, weights))
    held = (*optimizer.states, *optimizer.masters, *optimizer.averages, *optimizer.scales)
    record[f"{run}/bytes"] = sum(p.nbytes for p in held)
    ms.save_checkpoint(optimizer, str(checkpoint(folder, run)))
    return record


def resumed(name, folder, rank):
    """Run with shares, save them, merge them, and go on from the whole with shares again."""
    params, optimizer = build(name, shard_states=True)
    weights = weights_after(name, params, optimizer, "pynative", range(SAVED))
    ms.save_checkpoint(optimizer, str(folder / f"{name}.{rank}.ckpt"))
    wait()
    count = communication.get_group_size()
    full = merge_states([ms.load_checkpoint(str(folder / f"{name}.{k}.ckpt")) for k in range(count)])
    again, other = build(name, shard_states=True)
    other.load_state_dict(full)
    for p, w in zip(again, weights):
        p.set_data(ms.Tensor(w, p.dtype))
    weights = weights_after(name, again, other, "pynative", range(SAVED, STEPS))
    return {f"{name}/resumed/w{i}": w for i, w in enumerate(weights)}


def trained(shard_states, rank):
    """Train a network on data of this worker's own, in the parallel mode "data_parallel"."""
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(64, 128), nn.ReLU(), nn.Dense(128, 3))
    optimizer = AdamW(net.trainable_params(), 0.01, shard_states=shard_states)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer)
    rng = np.random.default_rng([2, rank])
    for _ in range(3):
        x = ms.Tensor(rng.standard_normal((16, 64)), ms.float32)
        step(x, ms.Tensor(rng.integers(0, 3, 16), ms.int32))
    return [numbers(p) for p in net.trainable_params()]


def main(folder, rank, count):
    record = {}
    names = list(dict.fromkeys(name for _, name in RUNS[count]))
    for name in names[rank::count]:  # needs no other process
        record |= recorded(f"{name}/whole", name, "pynative", folder)
    for mode, name in RUNS[count]:
        record |= recorded(f"{mode}/{name}/share", name, mode, folder / str(rank), shard_states=True)
    if count == 2:
        set_mode("pynative")
        for name in RESUMED:
            record |= resumed(name, folder, rank)
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        for mode, kind in itertools.product(("pynative", "graph"), ("whole", "share")):
            set_mode(mode)
            weights = trained(kind == "share", rank)
            record |= {f"{mode}/trained/{kind}/w{i}": w for i, w in enumerate(weights)}
    check_refusals()
    np.savez(folder / f"{rank}.npz", **record)


def check_refusals():
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    with pytest.raises(ValueError, match=r"got the parallel mode 'semi_auto_parallel'"):
        build("lamb", shard_states=True)
    ms.reset_auto_parallel_context()
