"""KeyboardInterrupt at a random moment: a step is whole or was not taken, and training goes on as if nothing was."""

import os
import signal
import threading

import mindspore as ms
from harness import tensor
from hypothesis import strategies as st
from worlds import World, settings

STEPS = 40
# MindSpore ends the process at SIGINT once a graph ran; other signals interrupt Python as SIGINT does elsewhere.
SIGNAL = signal.SIGUSR1
# Which paths are interrupted, by backend and mode; the composite path in PyNative mode runs operator by operator.
WAYS = [("aot", "graph"), ("aot", "pynative"), ("composite", "graph")]
PROGRAM = st.fixed_dictionaries(
    {
        "world": settings(st.lists(st.integers(1, 400), max_size=2)),
        "way": st.sampled_from(WAYS),
        # After so many parts of the time that the steps take without it.
        "moments": st.lists(st.floats(0.02, 0.5), min_size=2, max_size=5),
    }
)


def attack(program):
    signal.signal(SIGNAL, signal.default_int_handler)
    backend, mode = program["way"]
    drawn = {**program["world"], "backend": backend}
    plain, world = World(drawn), World(drawn)
    gradients = []
    for _ in range(STEPS):
        arrays, dtype = plain.scaled(1.0, 10)
        gradients.append(tuple(tensor(g, dtype) for g in arrays))
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    calls = [w.optimizer if mode == "pynative" else lambda g, w=w: w.cell(*g) for w in (plain, world)]
    expected = [plain.held()]
    for g in gradients:
        calls[0](g)
        expected.append(plain.held())
    # Both are compiled now, and the second is put back to where it began.
    calls[1](gradients[0])
    assert world.held() == expected[1]
    counts = {"interrupted": 0, "late": 0}
    for moment in program["moments"]:
        counts["interrupted" if interrupted(world, calls[1], gradients, moment) else "late"] += 1
        taken = int(world.optimizer.global_step.asnumpy()[0])
        differing = [a[0] for a, b in zip(world.held(), expected[taken]) if a != b]
        assert not differing, f"Interrupted after {taken} steps, {differing} are not what these steps make."
    while (taken := int(world.optimizer.global_step.asnumpy()[0])) < STEPS:
        calls[1](gradients[taken])
        assert world.held() == expected[taken + 1], f"After it was interrupted, step {taken} made other bits."
    return counts


def interrupted(world, call, gradients, moment):
    """Take steps until an interrupt comes; return whether it came before they were all taken."""
    timer = threading.Timer(moment * 0.01, os.kill, (os.getpid(), SIGNAL))
    try:
        timer.start()
        while (taken := int(world.optimizer.global_step.asnumpy()[0])) < STEPS:
            call(gradients[taken])
        timer.cancel()
        timer.join()
    except KeyboardInterrupt:
        return True
    return False
