"""Every optimizer, on both paths and in both modes, follows its float64 reference."""

import dataclasses

import pytest
from cases import CASES, SCENARIOS, SMALL
from harness import Pair
from tolerances import STEPS


def fewer_shapes(case, scenario, backend, mode):
    """Spare MindSpore's operators, slow to compile or to call one by one, the shapes that differ only to a kernel."""
    if backend == "aot" or len(scenario.shapes) < 4:
        return scenario
    shapes = ("scalar", "zero", "tiles+1", "convolution")
    if case.name == "DGCMomentum":
        shapes = ("tiles+1", "seven", "convolution")  # what is compressed, and what is not
    if mode == "graph" and scenario is SCENARIOS["plain"]:
        shapes = tuple(SMALL)
    return dataclasses.replace(scenario, shapes=shapes)


def steps(backend, mode):
    """Likewise most of the steps; in Graph mode the same operators take them all."""
    return 12 if backend != "aot" and mode == "pynative" else STEPS


# The base reads a whole number as a decay for all optimizers, and "clip" unscales as well: one optimizer shows these.
FOR_ONE = ("integer_decay", "loss_scale")


@pytest.mark.parametrize(
    "case, scenario",
    [
        pytest.param(case, scenario, id=f"{case.name}-{scenario}")
        for case in CASES
        for scenario in SCENARIOS
        if scenario not in FOR_ONE or case is CASES[0]
    ],
)
def test_scenario(case, scenario, backend, mode):
    pair = Pair(case, fewer_shapes(case, SCENARIOS[scenario], backend, mode), backend=backend)
    pair.run(mode, steps(backend, mode))
    pair.check()


@pytest.mark.parametrize(
    "case, variant", [pytest.param(c, v, id=f"{c.name}-{v}") for c in CASES for v in c.variants if v != "default"]
)
def test_variant(case, variant, backend):
    scenario = fewer_shapes(case, SCENARIOS["grouped"], backend, "pynative")
    pair = Pair(case, scenario, case.variants[variant], backend=backend)
    pair.run("pynative", steps(backend, "pynative"))
    pair.check()
