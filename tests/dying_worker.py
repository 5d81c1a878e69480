"""One of two processes that train together, the second of which dies in the middle of training."""

import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
from exchange import RAMP, gradients, start
from harness import numbers, tensor
from mindspore import Parameter, communication
from runtime import spare_operators

from ms_optim import AdamW, DGCMomentum, LocalSteps, Muon, SparseTopK

LAST = 5


def local_steps(params):
    """Return local steps that exchange after the last step, before which the second process dies."""
    return LocalSteps(AdamW(params, 0.01), 2, compress=SparseTopK(0.25), outer_momentum=0.0)


def slices(params):
    """Return an optimizer of slices, whose matrices have owners."""
    return Muon([{"params": params, "shard_group": communication.GlobalComm.WORLD_COMM_GROUP}], 0.01)


MAKERS = {
    "DGCMomentum": lambda params: DGCMomentum(params, 0.01, **RAMP),
    "LocalSteps": local_steps,
    "Muon": slices,
}


def die_after(file):
    """Die when the other has finished the step before: a message to it may still wait to be sent, and would be lost."""
    while not file.exists():
        time.sleep(0.01)
    os._exit(1)


def main(name, folder):
    communication.init()
    spare_operators()
    rank = communication.get_rank()
    params = [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(start("float32"))]
    optimizer = MAKERS[name](params)
    for step in range(LAST + 1):
        if step == LAST and rank == 1:
            die_after(pathlib.Path(folder) / f"0 after {LAST - 1}.npz")
        optimizer(tuple(tensor(g, "float32") for g in gradients(step, rank, "float32")))
        # Waits for the step, and for its error.
        weights = [numbers(p) for p in params]
        np.savez(pathlib.Path(folder) / f"{rank} after {step}.npz", *weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
