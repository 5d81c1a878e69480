"""One of the processes of test_local_shards.py: parameters that are DTensors, beside the same in one piece."""

import numpy as np
from harness import numbers, tensor
from hyper_parallel_stand_in import DeviceMesh, DTensor, Replicate, Shard
from mindspore import Parameter, Tensor, communication
from refusals import refused

import ms_optim
from ms_optim.dtensors.in_trainer import InTrainer
from ms_optim.dtensors.local_shards import local

# What is divided along which dimension; None: every process holds the whole.
AXES = {"rows": 0, "columns": 1, "vector": 0, "whole": None, "convolution": 0, "experts": 0, "inner": 2}
SHAPES = {
    "rows": (6, 5),
    "columns": (5, 8),
    "vector": (10,),
    "whole": (7,),
    "convolution": (4, 3, 2, 2),
    "experts": (4, 3, 5),
    "inner": (3, 4, 6),
}
ROWS = {"rows": (6,), "columns": (5,), "convolution": (4,), "experts": (12,), "inner": (12,)}
STEPS, LOADED = 4, 2
RUNS = {
    "AdamW": ("AdamW", {}, "float32"),
    "AdamW, bfloat16": ("AdamW", {}, "bfloat16"),
    "AdamW, clipped": ("AdamW", {"grad_clip_norm": 0.5, "skip_nonfinite": True}, "float32"),
    "Lion": ("Lion", {}, "float32"),
    "Lamb": ("Lamb", {}, "float32"),
    "LANS": ("LANS", {}, "bfloat16"),
    "Muon": ("Muon", {}, "float32"),
    "Muon, rows normalized": ("Muon", {"normalize_rows": True}, "float32"),
}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def part_of(name, array, rank, count):
    axis = AXES[name]
    if array.ndim < len(SHAPES[name]) and axis:  # one number for each row, of which slices of columns have a part
        axis = None
    return array if axis is None else np.split(array, count, axis)[rank]


def in_trainer(name):
    return type(name, (InTrainer, getattr(ms_optim, name)), {})


def groups(params):
    return [
        {"params": [p for p in params if p.name != "vector"], "weight_decay": 0.1},
        {"params": [p for p in params if p.name == "vector"], "weight_decay": 0.0},
    ]


def compared(name, arguments, dtype, mesh, rank, count):
    """Take steps of shards and of whole tensors; return the largest difference of weights and of all that is held."""

    def distributed(name, array):
        placements = (Replicate() if AXES[name] is None else Shard(AXES[name]),)
        return DTensor.from_local(tensor(part_of(name, array, rank, count), dtype), mesh, placements)

    shards = [Parameter(distributed(key, w), name=key) for key, w in drawn(0).items()]
    whole = [Parameter(tensor(w, dtype), name=key) for key, w in drawn(0).items()]
    sharded = in_trainer(name)(groups(shards), learning_rate=0.01, **arguments)
    plain = getattr(ms_optim, name)(groups(whole), 0.01, **arguments)
    assert {id(p) for p in sharded.parameters} == {id(p) for p in shards}
    for step in range(STEPS):
        given = drawn([1, step])
        for p in shards:
            p.main_grad = distributed(p.name, given[p.name])
        sharded(tuple(p.main_grad for p in sharded.parameters))
        plain(tuple(tensor(given[p.name], dtype) for p in plain.parameters))
        if step == LOADED:
            check_checkpoint(sharded)
    held = {name.replace("main_param.", "master."): p for name, p in sharded.parameters_dict().items()}
    expected = {name: p for name, p in plain.parameters_dict().items() if name != "statistics"}
    assert held.keys() == {*expected, "statistics"}
    differences = []
    for name, p in expected.items():
        parameter = name.rpartition(".")[2]
        own = part_of(parameter, numbers(p), rank, count) if parameter in AXES else numbers(p)
        differences.append(np.abs(numbers(local(held[name])) - own).max())
    return max(differences)


def check_checkpoint(optimizer):
    """Check that states are DTensors as their parameters are, and go on from what a loader sets them to."""
    held = optimizer.parameters_dict()
    for name, p in held.items():
        parameter = name.rpartition(".")[2]
        if parameter in SHAPES:
            assert isinstance(p, DTensor), name
            assert tuple(p.shape) in (SHAPES[parameter], ROWS.get(parameter)), name
    saved = {name: Tensor(np.array(p.asnumpy()), p.dtype) for name, p in held.items()}
    for p in held.values():
        p.set_data(Tensor(np.zeros_like(p.asnumpy()), p.dtype))
    for name, p in held.items():
        p.set_data(saved[name])


def check_refusals(mesh):
    two = DeviceMesh((2, 1), (*mesh.groups, mesh.groups[0]))
    p = Parameter(DTensor.from_local(tensor(np.ones((2, 2)), "float32"), two, (Shard(0), Shard(1))), name="w")
    said = "'params' must be sharded by Shard along at most one dimension of the device mesh, for sums over 'w'"
    refused(ValueError, said, lambda: in_trainer("Lamb")([{"params": [p]}], learning_rate=0.1))
    in_trainer("AdamW")([{"params": [p]}], learning_rate=0.1)
    for name, key, value in (
        ("Lion", "state_dtype", "8bit"),
        ("AdamW", "shard_states", True),
        ("AdamW", "grad_centralization", True),
    ):
        given = {"learning_rate": 0.1, key: value}
        refused(ValueError, f"'{key}' must be none of", lambda n, a: in_trainer(n)([{"params": [p]}], **a), name, given)
    said = "'state_dtype' must be none of"
    refused(ValueError, said, lambda: in_trainer("Lion")([{"params": [p], "state_dtype": "8bit"}], learning_rate=0.1))
    one = DeviceMesh((2,), mesh.groups)
    batch = Parameter(DTensor.from_local(tensor(np.ones((2, 3, 4)), "float32"), one, (Shard(1),)), name="b")
    said = "'params' must be sharded along another dimension than 1 for a state of the rows of 'b', a batch of matrices"
    given = {"learning_rate": 0.1, "normalize_rows": True}
    refused(ValueError, said, lambda: in_trainer("Muon")([{"params": [batch]}], **given))
    dgc = {"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0}
    said = "the parameters must not be DTensors: "
    refused(ValueError, said, lambda: in_trainer("DGCMomentum")([{"params": [p]}], **dgc))


def main(folder, rank, count):
    mesh = DeviceMesh((count,), (communication.GlobalComm.WORLD_COMM_GROUP,))
    found = {name: compared(*run, mesh, rank, count) for name, run in RUNS.items()}
    check_refusals(mesh)
    np.savez(folder / f"{rank}.npz", **found)
