"""Every optimizer, on both paths and in both modes, follows its float64 reference."""

import pytest
from cases import CASES, OF_EACH_KIND, SCENARIOS, fewer_shapes, steps
from harness import Pair

# The base reads a whole number as a decay for all optimizers, and "clip" unscales as well: one optimizer shows these.
FOR_ONE = ("integer_decay", "loss_scale")
# What shows a rule in MindSpore's operators, in each dtype. What these do around any rule, one optimizer shows where
# they are compiled, one of each kind where they are called one by one.
THE_RULE = ("grouped", "float16", "bfloat16")


def shows(case, scenario, backend, mode):
    """Tell whether a scenario is put to an optimizer."""
    if "average" in scenario and not case.is_averaged:
        return False
    if case is CASES[0]:
        return True
    if backend == "composite" and scenario not in THE_RULE and (mode == "graph" or case.name not in OF_EACH_KIND):
        return False
    return scenario not in FOR_ONE


@pytest.mark.parametrize(
    "backend, mode, case, scenario",
    [
        pytest.param(backend, mode, case, scenario, id=f"{backend}-{mode}-{case.name}-{scenario}")
        for backend in ("aot", "composite")
        for mode in ("graph", "pynative")
        for case in CASES
        for scenario in SCENARIOS
        if shows(case, scenario, backend, mode)
    ],
    indirect=["backend", "mode"],
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
