"""One of the processes of test_local_steps.py: local steps with gradients of its own, and a record of what they do."""

import mindspore as ms
import numpy as np
from harness import Step, digest_of
from local import EVERY, RUNS, STEPS, gradients, made, parameters, tensors
from runtime import group_of, set_mode, wait

import ms_optim
from ms_optim.checkpoints.parts import checkpoints_in


def taken(optimizer, mode, rank, steps):
    call = Step(optimizer) if mode == "graph" else lambda *g: optimizer(g)
    for step in steps:
        call(*tensors(gradients(step, rank)))
    return {p.name: p.asnumpy() for p in (*optimizer.parameters, *optimizer._entries.kept.values())}


def main(folder, rank, count):
    record = {}
    host = {"local_group": group_of(rank // 2 * 2, 2)} if count == 4 else {}
    for mode in ("pynative", "graph"):
        set_mode(mode)
        for name, arguments in RUNS.items():
            held = taken(made(parameters(), EVERY, **arguments), mode, rank, range(STEPS))
            record |= {f"{mode}/{name}/{key}": value for key, value in held.items()}
        if host:
            held = taken(made(parameters(), EVERY, **RUNS["sparse"], **host), mode, rank, range(STEPS))
            record |= {f"{mode}/hosts/{key}": value for key, value in held.items()}
    ms.set_context(mode=ms.PYNATIVE_MODE)
    record["resumed"] = [resumes(folder, rank)]
    record["said"], record["changed"] = differs(rank)
    np.savez(folder / f"{rank}.npz", **record)


def resumes(folder, rank):
    """Tell whether a run that was saved between two exchanges goes on as one that was not stopped."""
    whole, first, second = (made(parameters(), EVERY, **RUNS["sparse"]) for _ in range(3))
    taken(whole, "pynative", rank, range(9))
    taken(first, "pynative", rank, range(6))
    saves = []
    for name in ("other.safetensors", "run.safetensors"):
        ms_optim.save(folder / name, None, first)
        wait()
        saves.append({part.origin.save for one in checkpoints_in(folder / name) for part in one.parts()})
    ms_optim.load(folder / "run.safetensors", None, second)
    taken(second, "pynative", rank, range(6, 9))
    # The parts of one save have one value in common, and two saves of a step do not.
    return digest_of(whole) == digest_of(second) and len(saves[0]) == len(saves[1]) == 1 and saves[0] != saves[1]


def differs(rank):
    """Return what is said where workers exchange every first and every second step, and whether a start has moved."""
    optimizer = made(parameters(), 1 if rank else 2, outer_momentum=0.0)
    try:
        taken(optimizer, "pynative", rank, range(2))
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    started = parameters()
    return said, [any(not np.array_equal(s.asnumpy(), w.asnumpy()) for s, w in zip(optimizer.local_start, started))]
