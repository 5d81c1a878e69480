"""One of two processes that train together, the second of which dies in the middle of training."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
from exchange import RAMP, gradients, start
from harness import numbers, tensor
from mindspore import Parameter, communication

from ms_optim import DGCMomentum

LAST = 5


def main(folder):
    communication.init()
    rank = communication.get_rank()
    params = [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(start("float32"))]
    optimizer = DGCMomentum(params, 0.01, **RAMP)
    for step in range(LAST + 1):
        if step == LAST and rank == 1:
            os._exit(1)
        optimizer(tuple(tensor(g, "float32") for g in gradients(step, rank, "float32")))
        # Waits for the step, and for its error.
        weights = [numbers(p) for p in params]
        np.savez(pathlib.Path(folder) / f"{rank} after {step}.npz", *weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
