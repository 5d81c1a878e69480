"""AKG's kernels follow the reference, are refused where they are wrong, and say what they lack."""

import dataclasses
import sys
import warnings

import mindspore as ms
import numpy as np
import pytest
import wrong_kernels
from cases import CASES, SCENARIOS, fewer_shapes, for_each, steps
from harness import Pair, numbers, tensor
from mindspore import Parameter, Tensor
from tolerances import MOST_ON_OTHER_PATH

from ms_optim import LANS, AdamW, DGCMomentum, Lamb
from ms_optim.akg import adamw
from ms_optim.kernels import table as kernels
from ms_optim.paths.operators import akg

AKG_CASES = [case for case in CASES if case.cls.rules[0].name in kernels.AKG_KERNELS]
# Around the kernels is the composite step, which tests/test_conformance.py puts into every scenario: one optimizer
# shows that they fit into it with all dtypes and in both modes, the others are in one. AKG takes a second for each
# kernel and size.
PATHS = [("clip", "graph"), ("plain", "pynative"), ("bfloat16", "pynative"), ("float16_no_masters", "pynative")]
SHAPES = {
    "graph": ("scalar", "tiles+1", "convolution", "zero"),
    "pynative": ("scalar", "one", "seven", "tiles+1", "convolution", "zero"),
}


@for_each(
    [
        {"mode": mode, "case": case, "scenario": scenario}
        for i, case in enumerate(AKG_CASES)
        for scenario, mode in (PATHS if i == 0 else PATHS[1:2])
    ]
)
def test_scenario(case, scenario, mode):
    situation = dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES[mode])
    pair = Pair(case, situation, backend="akg")
    assert pair.optimizer.akg
    pair.run(mode, steps(case, situation, "akg", mode))
    pair.check()


# "betas", which each rule has, changes all constants of a kernel; others choose between kernels, or numbers for one.
OTHERS = ("amsgrad", "maximize", "nesterov", "warmup", "clip_gradient")


@pytest.mark.parametrize(
    "case, variant",
    [pytest.param(c, v, id=f"{c.name}-{v}") for c in AKG_CASES for v in c.variants if v in ("betas", *OTHERS)],
)
def test_variant(case, variant):
    scenario = fewer_shapes(case, SCENARIOS["grouped"], "akg", "pynative")
    pair = Pair(case, scenario, case.variants[variant], backend="akg")
    pair.run("pynative", steps(case, scenario, "akg", "pynative"))
    pair.check()


def test_a_million_elements():
    pair = Pair(AKG_CASES[0], dataclasses.replace(SCENARIOS["plain"], shapes=("million", "zero")), backend="akg")
    pair.run("pynative", 2)
    pair.check()


@pytest.mark.parametrize("cls", [case.cls for case in AKG_CASES])
def test_sizes_on_either_side_of_what_compilers_round_to(cls):
    """Each is tried when the optimizer is made, in every element."""
    every = cls is AKG_CASES[0].cls
    sizes = (2, 63, 64, 65, 255, 256, 257, 32769, 100000) if every else (63, 257, 32769)
    assert cls([parameter(size) for size in sizes], 0.1, backend="akg").akg


def parameter(size):
    return Parameter(Tensor(np.linspace(-1, 1, size).astype(np.float32)), name=f"w{size}")


@pytest.fixture
def _no_fused_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "rules", lambda device: ())


@pytest.mark.parametrize("wrong", [wrong_kernels.mistaken, wrong_kernels.reducing], ids=lambda k: k.__name__)
def test_a_wrong_kernel_is_refused(wrong, monkeypatch):
    monkeypatch.setattr(adamw, "adamw", wrong)
    message = r"For 'AdamW', backend='akg' has no kernel: .* 'adamw' is wrong on CPU: of 64 elements, one has a rel"
    with pytest.raises(RuntimeError, match=message):
        AdamW([parameter(64)], 0.1, backend="akg")


def test_one_of_the_wrong_kernels_is_right_as_python():
    """So that what is refused above is AKG's own mistake."""
    rng = np.random.default_rng(0)
    constants = np.array([0.9, 0.1, 0.999, 0.001, 1e-8], np.float32)
    taken = (constants, np.array([0.5, 0.3, 0.1], np.float32), *rng.random((4, 64), np.float32))
    np.testing.assert_allclose(wrong_kernels.reducing(*taken), adamw.adamw(*taken), rtol=1e-6)


@pytest.mark.usefixtures("_no_fused_kernels")
def test_auto_takes_the_composite_path_where_the_kernel_is_wrong(monkeypatch):
    monkeypatch.setattr(adamw, "adamw", wrong_kernels.mistaken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = [AdamW([parameter(64)], 0.1, weight_decay=0.1) for _ in range(2)]
    said = [str(warning.message) for warning in caught if "ms_optim" in str(warning.message)]
    assert len(said) == 1
    assert "slower composite path: ms_optim has no kernel for the rule 'adamw' on CPU; AKG's kernel" in said[0]
    assert not any(optimizer.fused or optimizer.akg for optimizer in made)


@pytest.mark.usefixtures("_no_fused_kernels")
def test_auto_takes_akg_where_it_is_the_only_one():
    with pytest.warns(UserWarning, match="runs in AKG's kernels: ms_optim has no kernel for the rule 'lans' on CPU"):
        optimizer = LANS([parameter(7)], 0.1)
    assert optimizer.akg


def test_auto_takes_the_fused_kernel_first():
    if kernels.why_not("lans", "CPU") is not None:
        pytest.skip("there is no fused kernel")
    optimizer = LANS([parameter(7)], 0.1)
    assert optimizer.fused
    assert not optimizer.akg


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "decorator", None)
    with pytest.raises(RuntimeError, match=r"AKG needs the Python package 'decorator'.*: pip install decorator"):
        AdamW([parameter(7)], 0.1, backend="akg")


def test_what_akg_stumbles_over_is_said(monkeypatch):
    def stumbles(*_):
        raise RuntimeError("Response is empty.\n(a call stack)")

    monkeypatch.setattr(akg, "rows_of", stumbles)
    message = r"AKG cannot compile or run the rule 'lamb' on CPU: Response is empty\.\.$"
    with pytest.raises(RuntimeError, match=message):
        Lamb([parameter(5)], 0.1, backend="akg")


@pytest.mark.parametrize(
    "arguments",
    [{"state_dtype": "8bit"}, {"stochastic_rounding": True, "master_weights": False}],
    ids=["codes", "noise"],
)
def test_states_and_weights_of_fewer_bits_are_those_of_mindspores_operators(arguments):
    """AKG's kernels take and give float32; what is around them converts."""
    made = []
    for backend in ("akg", "composite"):
        p = Parameter(tensor(np.linspace(-1, 1, 4099), "bfloat16"), name="w")
        optimizer = AdamW([p], 0.1, backend=backend, **arguments)
        for k in range(3):
            optimizer((tensor(np.cos(np.arange(4099) + k), "bfloat16"),))
        made.append([numbers(x) for x in (p, *optimizer.masters, *optimizer.states) if x.dtype != ms.float32])
    for one, other in zip(*made):
        assert np.mean(one != other) <= MOST_ON_OTHER_PATH


def test_a_rule_without_a_kernel_is_refused():
    with pytest.raises(RuntimeError, match="no AKG kernel for the rule 'dgc_momentum', which is not elementwise"):
        DGCMomentum([parameter(7)], 0.1, 0.9, 0, backend="akg")


@pytest.mark.parametrize("case", AKG_CASES, ids=lambda case: case.name)
def test_gradients_that_are_not_finite(case):
    """They skip the step if asked to; else they end up where MindSpore's operators take them."""
    gradient = np.linspace(-1, 1, 7).astype(np.float32)
    gradient[[1, 5]] = np.nan, np.inf
    results = {}
    for backend in ("akg", "composite"):
        for skips in (True, False):
            optimizer = case.optimizer([parameter(7)], 0.1, backend=backend, skip_nonfinite=skips)
            optimizer((Tensor(gradient),))
            results[backend, skips] = [p.asnumpy() for p in (*optimizer.parameters, *optimizer.states)]
    np.testing.assert_array_equal(results["akg", True][0], parameter(7).asnumpy())
    for fast, composite in zip(results["akg", False], results["composite", False]):
        np.testing.assert_array_equal(np.isfinite(fast), np.isfinite(composite))
