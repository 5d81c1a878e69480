"""Random gradients, shapes, groups and options against the float64 references, on both paths and in both modes."""

from harness import tensor
from hypothesis import strategies as st
from worlds import World, settings

# Gradients of one step: how large, and how many of ten elements are not 0.
steps = st.lists(
    st.tuples(st.sampled_from([1e-4, 1.0, 1.0, 1e2]), st.sampled_from([10, 10, 3, 0])), min_size=1, max_size=8
)
large = st.lists(st.integers(1, 300), max_size=2)
PROGRAM = st.fixed_dictionaries(
    {"world": settings(large), "mode": st.sampled_from(["graph", "pynative"]), "steps": steps}
)


def attack(program):
    world = World(program["world"])
    call = world.optimizer if program["mode"] == "pynative" else lambda tensors: world.cell(*tensors)
    for size, filled in program["steps"]:
        gradients, dtype = world.scaled(size, filled)
        call(tuple(tensor(g, dtype) for g in gradients))
        world.follow(gradients)
        world.check()
    return {"steps": len(program["steps"])}
