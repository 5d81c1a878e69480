"""Measures Muon's step on matrices that the running processes hold slices of.

    OMP_NUM_THREADS=1 msrun --worker_num=2 --local_worker_num=2 --join=True benchmarks/sliced_muon.py

Each process prints a line. With one process, matrices are whole.
"""

import argparse

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, communication
from sharded_states import joined, leave, resident, timed

from ms_optim import Muon

# The matrices of a layer, and the dimension that tensor parallelism slices.
LAYERS = {
    "gpt2-small": (((2304, 768), 0), ((768, 768), 1), ((3072, 768), 0), ((768, 3072), 1)),
    "experts": (((16, 1024, 512), 1), ((16, 512, 1024), 2), ((512, 512), 1)),
}


def main():
    """Print one line for this process."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--network", choices=list(LAYERS), default="gpt2-small")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mode", choices=["graph", "pynative"], default="pynative")
    parser.add_argument("--backend", default="auto")
    given = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if given.mode == "graph" else ms.PYNATIVE_MODE)
    rank, count = joined()
    group = {"shard_group": communication.GlobalComm.WORLD_COMM_GROUP} if count > 1 else {}
    rng = np.random.default_rng(0)
    groups, gradients = [], []
    for layer in range(given.layers):
        for k, (shape, axis) in enumerate(LAYERS[given.network]):
            own = tuple(length // count if i == axis else length for i, length in enumerate(shape))
            p = Parameter(Tensor(rng.standard_normal(own).astype(np.float32)), name=f"w{layer}.{k}")
            groups.append({"params": [p], **group, **({"shard_axis": axis} if group else {})})
            gradients.append(Tensor(rng.standard_normal(own).astype(np.float32)))
    optimizer = Muon(groups, 1e-3, backend=given.backend)
    optimizer(tuple(gradients))
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    times = timed(optimizer, tuple(gradients), given.steps)
    print(
        f"process {rank} of {count}: {1e3 * np.median(times):.0f} ms a step ({1e3 * min(times):.0f} at least); "
        f"{resident('VmHWM') - before:.0f} MB more than between steps",
        flush=True,
    )
    leave(count)


if __name__ == "__main__":
    main()
