"""One of the processes of test_exchange.py: steps with gradients of its own, and a record of what they do."""

import mindspore as ms
import numpy as np
import pytest
from exchange import CONFIGURATIONS, HOSTS, POISONED, RESUMED, RESUMING, RUNS, SHAPES, STEPS, gradients, start
from harness import Step, numbers, tensor
from mindspore import Parameter
from runtime import group_of, set_mode

from ms_optim import DGCMomentum


def refused(match, **arguments):
    with pytest.raises(ValueError, match=match):
        DGCMomentum([Parameter(tensor([1.0], "float32"), name="w")], 0.1, 0.9, 0, **arguments)


def made(dtype, arguments):
    params = [Parameter(tensor(w, dtype), name=f"w{i}") for i, w in enumerate(start(dtype))]
    return params, DGCMomentum(params, 0.01, **arguments)


def main(folder, rank, processes):
    per_host = processes // HOSTS
    refused("'num_trainers' must be the number of processes that train together .the group", num_trainers=3)
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    refused("the parallel mode must be 'stand_alone', but is 'data_parallel'")
    ms.reset_auto_parallel_context()
    shared = {"num_trainers": processes}
    if per_host > 1:
        shared["local_group"] = group_of(rank // per_host * per_host, per_host)
    record = {}
    for mode, name in RUNS[per_host]:
        set_mode(mode)
        dtype, arguments = CONFIGURATIONS[name]
        # Threads that hand operators to each other wait without rest, which takes long where processes share a core.
        ms.set_context(pynative_synchronize=arguments["backend"] == "composite" or per_host > 1)
        params, optimizer = made(dtype, {**arguments, **shared})
        assert optimizer.fused == (arguments["backend"] == "aot")
        call = Step(optimizer) if mode == "graph" else lambda *g, optimizer=optimizer: optimizer(g)
        for step in range(STEPS):
            if step == RESUMED and (mode, name) in RESUMING:
                path = f"{folder}/{rank}.ckpt"
                ms.save_checkpoint(optimizer, path)
                params, optimizer = made(dtype, {**arguments, **shared})
                ms.load_param_into_net(optimizer, ms.load_checkpoint(path), strict_load=True)
                call = Step(optimizer) if mode == "graph" else lambda *g, optimizer=optimizer: optimizer(g)
            given = gradients(step, rank, dtype)
            if step == POISONED and rank == 1 and arguments.get("skip_nonfinite"):
                given[2].reshape(-1)[-1] = np.nan
            call(*(tensor(g, dtype) for g in given))
            for i in range(len(SHAPES)):
                record[f"{mode}/{name}/{step}/w{i}"] = numbers(params[i])
                record[f"{mode}/{name}/{step}/u{i}"] = numbers(optimizer.states[i])
                record[f"{mode}/{name}/{step}/r{i}"] = numbers(optimizer.states[len(SHAPES) + i])
        record[f"{mode}/{name}/statistics"] = optimizer.statistics.asnumpy()
        record[f"{mode}/{name}/counts"] = [
            int(optimizer.global_step.asnumpy()[0]),
            int(optimizer.skipped_steps.asnumpy()[0]),
        ]
    np.savez(folder / f"{rank}.npz", **record)
