"""One of the processes of test_shares.py: steps with all states, with its share of them, and resumed with it."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mindspore as ms
import numpy as np
import pytest
from harness import Step, numbers
from mindspore import communication, nn
from shares import CONFIGURATIONS, SAVED, STEPS, build, gradients

from ms_optim import AdamW, merge_states


def wait():
    ms.ops.AllReduce()(ms.Tensor([1.0], ms.float32)).asnumpy()


def run(name, params, optimizer, mode, steps):
    call = Step(optimizer) if mode == "graph" else lambda *g: optimizer(g)
    for step in steps:
        call(*gradients(name, step))
    return [numbers(p) for p in params]


def resumed(name, mode, folder, rank):
    """Run with shares, save them, merge them, and go on from the whole with shares again."""
    params, optimizer = build(name, shard_states=True)
    assert optimizer.shares is not None
    weights = run(name, params, optimizer, mode, range(SAVED))
    ms.save_checkpoint(optimizer, str(folder / f"{name}.{rank}.ckpt"))
    wait()
    full = merge_states([ms.load_checkpoint(str(folder / f"{name}.{k}.ckpt")) for k in range(2)])
    again, other = build(name, shard_states=True)
    other.load_state_dict(full)
    for p, w in zip(again, weights):
        p.set_data(ms.Tensor(w, p.dtype))
    return run(name, again, other, mode, range(SAVED, STEPS))


def trained(shard_states):
    """Train a network on data of this worker's own, in the parallel mode "data_parallel"."""
    ms.set_seed(1)
    rank = communication.get_rank()
    net = nn.SequentialCell(nn.Dense(64, 128), nn.ReLU(), nn.Dense(128, 3))
    optimizer = AdamW(net.trainable_params(), 0.01, shard_states=shard_states)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer)
    rng = np.random.default_rng([2, rank])
    for _ in range(3):
        x = ms.Tensor(rng.standard_normal((16, 64)), ms.float32)
        step(x, ms.Tensor(rng.integers(0, 3, 16), ms.int32))
    return [numbers(p) for p in net.trainable_params()]


def main(mode, folder):
    folder = pathlib.Path(folder)
    communication.init()
    rank = communication.get_rank()
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    record = {}
    for name in CONFIGURATIONS:
        whole_params, whole = build(name)
        params, optimizer = build(name, shard_states=True)
        record |= {f"{name}/w{i}": w for i, w in enumerate(run(name, whole_params, whole, mode, range(STEPS)))}
        record |= {f"{name}/s{i}": w for i, w in enumerate(run(name, params, optimizer, mode, range(STEPS)))}
        record |= {f"{name}/r{i}": w for i, w in enumerate(resumed(name, mode, folder, rank))}
        for letter, one in (("w", whole), ("s", optimizer)):
            record[f"{name}/{letter}/statistics"] = one.statistics.asnumpy()
            record[f"{name}/{letter}/counts"] = [int(c.asnumpy()[0]) for c in (one.global_step, one.skipped_steps)]
            record[f"{name}/{letter}/bytes"] = sum(p.nbytes for p in (*one.states, *one.masters, *one.scales))
        ms.save_checkpoint(optimizer, str(folder / f"{name}.end.{rank}.ckpt"))
        ms.save_checkpoint(whole, str(folder / f"{name}.whole.{rank}.ckpt"))
    with pytest.raises(RuntimeError, match=r"'shard_states' needs the fused kernel: backend='composite' was asked"):
        build("lamb", shard_states=True, backend="composite")
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    record |= {f"trained/w{i}": w for i, w in enumerate(trained(False))}
    record |= {f"trained/s{i}": w for i, w in enumerate(trained(True))}
    np.savez(folder / f"{rank}.npz", **record)
    # A process that ends before its peers' last exchange makes that fail.
    wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
