"""The step on Ascend as MindSpore runs it: the device is faked, and its operators run on the stand-in, on the CPU."""

import dataclasses
import shutil

import mindspore as ms
import numpy as np
import pytest
from ascend_stand_in import Host
from cases import CASES, SCENARIOS
from harness import Pair, tensor
from mindspore import dtype as mstype
from mindspore import ops
from tolerances import STEPS

from ms_optim import _kernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed (Debian: apt install g++)")
RULES = {case.name: case for case in CASES}
# The dtypes and lengths that there are, each operator has seen in tests/test_ascendc.py.
SHAPES = ("scalar", "tiles+1", "convolution", "zero")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return Host.build(tmp_path_factory.mktemp("ascend")).library(tmp_path_factory.mktemp("ascend"))


@pytest.fixture
def ascend(library, monkeypatch):
    """An Ascend processor, as far as the package can tell."""

    def operator(function, written, shape):
        primitive = ops.Custom(f"{library}:{function}", shape, lambda *dtypes: ms.float32, func_type="aot")
        return _kernels._writing(primitive, "CPU", written)

    monkeypatch.setattr(_kernels, "device_target", lambda: "Ascend")
    monkeypatch.setattr(_kernels, "why_not", lambda rule, device: None)
    monkeypatch.setattr(_kernels, "ascend_operator", operator)


def pair(case, scenario, variant=None, **shared):
    """Return a pair whose optimizer takes the operators; its step count is in float64, which a CPU's expm1 needs."""
    made = Pair(case, scenario, variant, **shared)
    assert made.optimizer._on_ascend
    made.optimizer._step_dtype = mstype.float64
    return made


@pytest.mark.parametrize(
    "rule, scenario", [("AdamW", "clip"), ("Lamb", "bfloat16"), ("LANS", "loss_scale"), ("LANS", "float16_no_masters")]
)
def test_a_graph_agrees_with_float64(ascend, rule, scenario):
    made = pair(RULES[rule], dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES))
    ms.set_context(mode=ms.GRAPH_MODE)
    made.run("graph", STEPS)
    made.check()


@pytest.mark.parametrize(
    "rule, scenario, variant",
    [
        ("AdamW", "float16", {"amsgrad": True, "maximize": True}),
        ("AdamW", "float32_gradients", {"bias_correction": False}),
        ("AdamW", "dynamic", {}),
        ("Lamb", "grouped", {"always_adapt": False, "trust_ratio_bounds": (0.01, 2.0)}),
        ("LANS", "grouped", {"clip_gradient": 0.05, "upper_bound": 10.0}),
    ],
)
def test_variants_agree_with_float64(ascend, rule, scenario, variant):
    made = pair(RULES[rule], dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES), variant)
    made.run("pynative", 6)
    made.check()


@pytest.mark.parametrize("rule", ["AdamW", "Lamb"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(ascend, rule):
    made = pair(RULES[rule], dataclasses.replace(SCENARIOS["plain"], shapes=("seven", "matrix")), skip_nonfinite=True)
    made.run("pynative", 2)
    infinite = [np.full(w.shape, np.inf) for w in made.reference.weights]
    made.optimizer(tuple(tensor(g, "float32") for g in infinite))
    made.reference.step(infinite)
    skipped = made.optimizer.statistics.asnumpy()
    assert not skipped[:, 2:].any()
    made.run("pynative", 2)
    made.check()


@pytest.mark.parametrize("asked", [{"state_dtype": "8bit"}, {"stochastic_rounding": True, "master_weights": False}])
def test_what_the_operators_do_not_know_is_refused_in_words(ascend, asked):
    params = [ms.Parameter(tensor(np.zeros(5000), "float16"), name="w")]
    with pytest.raises(RuntimeError, match=f"{next(iter(asked))}.*Ascend"):
        RULES["AdamW"].optimizer(params, 0.1, **asked)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("scenario", ["clip", "float16_no_masters"])
def test_adam_offload_adds_what_the_host_returns(ascend, monkeypatch, mode, scenario):
    launched = []
    operator = _kernels.ascend_operator
    monkeypatch.setattr(
        _kernels, "ascend_operator", lambda function, *how: launched.append(function) or operator(function, *how)
    )
    made = Pair(RULES["AdamOffload"], dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES))
    made.optimizer._step_dtype = mstype.float64
    assert launched == ["MsOptimDelta", "MsOptimSums"]
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    made.run(mode, 6)
    made.check()
