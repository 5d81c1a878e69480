"""Every optimizer, on both paths and in both modes, follows its float64 reference."""

import pytest
from cases import CASES, SCENARIOS
from harness import Pair
from tolerances import STEPS


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scenario(case, scenario, backend, mode):
    pair = Pair(case, SCENARIOS[scenario], backend=backend)
    pair.run(mode, STEPS)
    pair.check()


@pytest.mark.parametrize(
    "case, variant", [pytest.param(c, v, id=f"{c.name}-{v}") for c in CASES for v in c.variants if v != "default"]
)
def test_variant(case, variant, backend):
    pair = Pair(case, SCENARIOS["grouped"], case.variants[variant], backend=backend)
    pair.run("pynative", STEPS)
    pair.check()
