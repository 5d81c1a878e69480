"""Every optimizer, on both paths and in both modes, follows its float64 reference."""

from cases import CASES, MODES, OF_EACH_KIND, ONCE_AROUND, SCENARIOS, fewer_shapes, for_each, steps
from harness import NUMPY, Pair
from tolerances import STEPS

# The base reads a whole number as a decay for all optimizers, and "clip" unscales as well: one optimizer shows these.
FOR_ONE = ("integer_decay", "loss_scale")
# What shows a rule in MindSpore's operators, in each dtype.
THE_RULE = ("grouped", "float16", "bfloat16")
# What else their compiled step has branches for: any shape, rates of its own, a clip, the lack of masters, an average.
COMPILED = ("plain", "dynamic", "clip", "float16_no_masters", "bfloat16_average")
# Variants of Muon that take all steps: by heads, and by coefficients that have a name.
IN_FULL = ("heads", "named")


def scenarios_of(case):
    names = [name for name in SCENARIOS if case.is_averaged or "average" not in name]
    return [name for name in names if case is CASES[0] or name not in FOR_ONE]


def on_kernels():
    """Give every optimizer in every scenario called from Python, and a sixth of them compiled.

    A compiled step launches the same kernel. The sixths go round, so that each optimizer is compiled in some scenarios
    and each scenario with some optimizers; what one optimizer shows, it shows in both modes.
    """
    for i, case in enumerate(CASES):
        for j, scenario in enumerate(scenarios_of(case)):
            yield case, scenario, "pynative"
            if scenario in FOR_ONE or (i + j) % 6 == 0:
                yield case, scenario, "graph"


def on_operators():
    """Give every rule in each dtype, in one of them compiled, and the other scenarios with one of each kind in turn.

    These are about what is around a rule: one step for all rules but DGCMomentum's.
    """
    for i, case in enumerate(CASES):
        for j, scenario in enumerate(THE_RULE):
            yield case, scenario, "graph" if j == i % 3 else "pynative"
    for j, scenario in enumerate(name for name in SCENARIOS if name not in THE_RULE):
        kinds = {case.name: case for case in CASES if case.name in OF_EACH_KIND and scenario in scenarios_of(case)}
        if "DGCMomentum" in kinds:
            yield kinds.pop("DGCMomentum"), scenario, "pynative" if j % 3 else "graph"
        for k, mode in enumerate(MODES if scenario in COMPILED else ("pynative",)):
            yield list(kinds.values())[(j + k) % len(kinds)], scenario, mode


ROWS = [
    {"backend": backend, "mode": mode, "case": case, "scenario": scenario}
    for backend, chosen in (("aot", on_kernels()), ("composite", on_operators()))
    for case, scenario, mode in chosen
]


@for_each(ROWS)
def test_scenario(case, scenario, backend, mode):
    situation = fewer_shapes(case, SCENARIOS[scenario], backend, mode)
    pair = Pair(case, situation, backend=backend)
    pair.run(mode, steps(case, situation, backend, mode))
    pair.check()


def test_no_optimizer_is_spared_a_mode_or_a_dtype():
    """What goes round above leaves out combinations of three, but none of two."""
    for case in CASES:
        for backend in ("aot", "composite"):
            rows = [row for row in ROWS if row["case"] is case and row["backend"] == backend]
            assert {row["mode"] for row in rows} == set(MODES), (case.name, backend)
            assert {SCENARIOS[row["scenario"]].dtype for row in rows} == set(NUMPY), (case.name, backend)
    for backend in ("aot", "composite"):
        compiled = SCENARIOS if backend == "aot" else {*COMPILED, *THE_RULE}
        for mode, expected in (("pynative", SCENARIOS), ("graph", compiled)):
            met = {row["scenario"] for row in ROWS if (row["backend"], row["mode"]) == (backend, mode)}
            assert met >= set(expected), (backend, mode)


@for_each(
    [
        {"backend": backend, "case": case, "variant": variant}
        for backend in ("aot", "composite")
        for case in CASES
        for variant in case.variants
        if variant != "default"
    ]
)
def test_variant(case, variant, backend):
    scenario = fewer_shapes(case, SCENARIOS["grouped"], backend, "pynative")
    pair = Pair(case, scenario, case.variants[variant], backend=backend)
    most = STEPS if variant in IN_FULL else ONCE_AROUND
    pair.run("pynative", min(most, steps(case, scenario, backend, "pynative")))
    pair.check()


MUON = next(case for case in CASES if case.name == "Muon")


@for_each([{"backend": "composite", "mode": "graph", "case": MUON, "variant": variant} for variant in IN_FULL])
def test_compiled_variant_in_full(case, variant, backend, mode):
    scenario = fewer_shapes(case, SCENARIOS["grouped"], backend, "pynative")
    pair = Pair(case, scenario, case.variants[variant], backend=backend)
    pair.run(mode, STEPS)
    pair.check()
