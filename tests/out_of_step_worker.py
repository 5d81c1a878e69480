"""One of the processes of test_exchange.py whose exchange is refused: at different steps, or with others' residuals."""

import itertools
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mindspore as ms
import numpy as np
from harness import Step, tensor
from mindspore import Parameter, Tensor
from runtime import join, set_mode

from ms_optim import DGCMomentum

STEPS = {"together": (6, 6, 6), "apart": (5, 6, 7), "another's": (6, 6, 6)}
SHAPES = [(300,), (5,)]


def held(params, optimizer):
    kept = (*params, *optimizer.states, *optimizer.masters, optimizer.statistics)
    return [x.asnumpy().tobytes() for x in (*kept, optimizer.global_step, optimizer.skipped_steps)]


def drawn(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in SHAPES]


def attempted(mode, backend, begin, where, rank):
    """Take one step; return what was said, whether anything changed, and the weights."""
    set_mode(mode)
    ms.set_context(pynative_synchronize=backend == "composite")
    params = [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(drawn(0))]
    optimizer = DGCMomentum(
        params, 0.1, 0.9, begin, sparsity=[0.9], min_compress_numel=16, backend=backend, skip_nonfinite=True
    )
    states = optimizer.state_dict() | {"global_step": Tensor([STEPS[where][rank]], ms.int32)}
    for i, (u, r) in enumerate(zip(drawn(1), drawn([2, rank]))):
        states |= {f"dgc_u.w{i}": Tensor(u), f"dgc_r.w{i}": Tensor(r)}
    optimizer.load_state_dict(states)
    if where == "another's":
        optimizer.dgc_worker.set_data(Tensor(np.eye(3, dtype=np.int32)[(rank + 1) % 3]))
    call = Step(optimizer) if mode == "graph" else lambda *g: optimizer(g)
    before, said = held(params, optimizer), ""
    try:
        call(*(tensor(g, "float32") for g in drawn([3, rank])))
        changed = held(params, optimizer) != before
    except RuntimeError as error:
        changed, said = held(params, optimizer) != before, str(error)
    return {"said": said, "changed": changed, "weights": b"".join(p.asnumpy().tobytes() for p in params).hex()}


def main(folder):
    rank, _ = join()
    record = {}
    # First what is not refused: after an error raised in a graph MindSpore may fail to compile another.
    for mode, where, backend, begin in itertools.product(("pynative", "graph"), STEPS, ("aot", "composite"), (100, 0)):
        # A compiled step asks in the same way before it compresses; residuals are there once it does.
        compresses = begin == 0 or (mode == "pynative" and where != "another's")
        # MindSpore's operators take long to compile, and ask by the same operators as one by one.
        if compresses and (mode == "pynative" or backend == "aot" or where == "apart"):
            record[f"{mode}, {backend}, {begin}, {where}"] = attempted(mode, backend, begin, where, rank)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(record))
    # No process ends before its peers are done; what has failed in a graph may keep a collective from coming through.
    while len(list(pathlib.Path(folder).glob("*.json"))) < len(STEPS["apart"]):
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
