"""One of two processes that train together, the second of which dies in the middle of training."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
from exchange import RAMP, SHAPES, gradients, start
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
        before = [numbers(p) for p in params]
        try:
            optimizer(tuple(tensor(g, "float32") for g in gradients(step, rank, "float32")))
        except RuntimeError as error:
            after = [numbers(p) for p in params]
            same = all((a == b).all() for a, b in zip(before, after))
            (pathlib.Path(folder) / "error").write_text(f"{step} {len(SHAPES)} {same}\n{error}")
            os._exit(1)
    np.savez(pathlib.Path(folder) / "went_on.npz", *before)


if __name__ == "__main__":
    main(*sys.argv[1:])
