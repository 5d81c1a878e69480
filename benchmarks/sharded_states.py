"""Measures memory and time of AdamW on GPT-2 small's shapes, with states sharded over the running workers.

    python benchmarks/sharded_states.py
    msrun --worker_num=2 --local_worker_num=2 --join=True benchmarks/sharded_states.py

Each worker prints a line.
"""

import os
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication, ops
from step_cpu import TENSORS

from ms_optim import AdamW

SHAPES, _ = TENSORS["gpt2-small"]
STEPS = 5


def resident(field):
    """Return this process's memory in MB: VmRSS is the current value, VmHWM the peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1e3


def joined():
    """Join the processes that msrun started; return this one's rank and their number."""
    if "MS_WORKER_NUM" not in os.environ:
        return 0, 1
    communication.init()
    return communication.get_rank(), communication.get_group_size()


def timed(optimizer, gradients, steps):
    """Take steps, and return the seconds of each."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer(gradients)
        optimizer.statistics.asnumpy()
        times.append(time.perf_counter() - begin)
    return times


def leave(count):
    """Wait for all processes: one that ends before its peers' last exchange makes that fail."""
    if count > 1:
        ops.AllReduce()(Tensor([1.0], ms.float32)).asnumpy()


def main():
    """Print one line for this worker."""
    rank, count = joined()
    params = [Parameter(Tensor(np.full(s, 0.01, np.float32)), name=f"w{i}") for i, s in enumerate(SHAPES)]
    gradients = tuple(Tensor(np.full(s, 0.001, np.float32)) for s in SHAPES)
    before = resident("VmRSS")
    optimizer = AdamW(params, 1e-3, shard_states=True)
    times = timed(optimizer, gradients, STEPS)
    states = sum(p.nbytes for p in optimizer.states) / 1e6
    print(
        f"worker {rank} of {count}: states {states:.0f} MB; process {before:.0f} MB before, {resident('VmRSS'):.0f} MB "
        f"after {STEPS} steps, {resident('VmHWM'):.0f} MB at most; {1e3 * min(times[1:]):.0f} ms a step",
        flush=True,
    )
    leave(count)


if __name__ == "__main__":
    main()
