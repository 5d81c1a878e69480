"""The step on Ascend as MindSpore runs it: the device is faked, and its operators run on the stand-in, on the CPU."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from ascend_stand_in import Host, needs_compiler
from builds import once, shared_folder
from cases import CASES, MUON_COEFFICIENTS, SCENARIOS
from harness import Pair, numbers, tensor
from mindspore import dtype as mstype
from mindspore import ops
from runtime import set_mode
from tolerances import STEPS

from ms_optim.kernels import table as kernels
from ms_optim.paths.ascend.matrices import AscendMatricesPath
from ms_optim.paths.ascend.tensor_by_tensor import TensorByTensorPath
from ms_optim.states import layout

pytestmark = needs_compiler
RULES = {case.name: case for case in CASES}
# The dtypes and lengths that there are, each operator has seen in tests/test_ascendc.py.
SHAPES = ("scalar", "tiles+1", "convolution", "zero", "convolution again")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return (
        once(shared_folder(tmp_path_factory), "ascend_library", Host.build(tmp_path_factory).library)
        / "libascend_on_cpu.so"
    )


@pytest.fixture
def ascend(library, monkeypatch):
    """An Ascend processor, as far as the package can tell."""

    def operator(function, written, shape):
        primitive = ops.Custom(f"{library}:{function}", shape, lambda *dtypes: ms.float32, func_type="aot")
        return kernels._writing(primitive, "CPU", written)

    monkeypatch.setattr(kernels, "device_target", lambda: "Ascend")
    monkeypatch.setattr(kernels, "why_not", lambda rule, device: None)
    monkeypatch.setattr(kernels, "ascend_operator", operator)
    # A CPU's expm1 needs the step's number in float64.
    monkeypatch.setattr(layout, "step_dtype", lambda device: mstype.float64)


def pair(case, scenario, variant=None, **shared):
    """Return a pair whose optimizer takes the operators."""
    made = Pair(case, scenario, variant, **shared)
    assert isinstance(made.optimizer._path, AscendMatricesPath if case.name == "Muon" else TensorByTensorPath)
    return made


@pytest.mark.parametrize(
    "rule, scenario",
    [
        ("AdamW", "clip"),
        ("Lamb", "bfloat16"),
        ("LANS", "float16_no_masters"),
        ("Muon", "bfloat16"),
    ],
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
        ("LANS", "loss_scale", {"clip_gradient": 0.05, "upper_bound": 10.0}),
        ("Lion", "float16", {"betas": [0.8, 0.95]}),
        ("AdEMAMix", "clip", {"warmup_steps": 3, "alpha": 2, "betas": [0.8, 0.95, 0.99]}),
        ("Muon", "clip", {"normalize_rows": True}),
        ("Muon", "float16_no_masters", {"splits": {"convolution*": (2, 4)}, "nesterov": False, "momentum": 0.8}),
        ("Muon", "float32_gradients", {"adjust_lr": "original", "adamw_betas": [0.8, 0.95]}),
        ("Muon", "grouped", {"ns_coefficients": MUON_COEFFICIENTS, "ns_dtype": "float32"}),
    ],
)
def test_variants_agree_with_float64(ascend, rule, scenario, variant):
    made = pair(RULES[rule], dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES), variant)
    made.run("pynative", 6)
    made.check()


@pytest.mark.parametrize("rule", ["AdamW", "Lamb", "Lion", "AdEMAMix", "Muon"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(ascend, rule):
    scenario = dataclasses.replace(SCENARIOS["plain"], shapes=("seven", "matrix"))
    made = pair(RULES[rule], scenario, RULES[rule].variants.get("warmup"), skip_nonfinite=True)
    made.run("pynative", 2)
    infinite = [np.full(w.shape, np.inf) for w in made.reference.weights]
    made.optimizer(tuple(tensor(g, "float32") for g in infinite))
    made.reference.step(infinite)
    skipped = made.optimizer.statistics.asnumpy()
    assert not skipped[:, 2:].any()
    made.run("pynative", 2)
    made.check()


@pytest.mark.parametrize(
    "asked",
    [{"state_dtype": "8bit"}, {"stochastic_rounding": True, "master_weights": False}, {"master_weights": "split"}],
)
def test_what_the_operators_do_not_know_runs_on_those_of_mindspore(ascend, asked):
    """With one warning, and without float64, which the device lacks: a first step moves by the rate."""
    w = ms.Parameter(tensor(np.zeros(5000), "bfloat16"), name="w")
    words = f"ms_optim runs .*{next(iter(asked))}.* is not supported by the operators for Ascend"
    with pytest.warns(UserWarning, match=words):
        optimizer = RULES["AdamW"].optimizer([w], 0.125, **asked)
    optimizer((tensor(np.ones(5000), "bfloat16"),))
    np.testing.assert_allclose(numbers(w), -0.125, rtol=2**-7)
    assert optimizer.states[0].dtype == (ms.int8 if "state_dtype" in asked else ms.float32)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("scenario", ["clip", "float16_no_masters"])
def test_adam_offload_adds_what_the_host_returns(ascend, monkeypatch, mode, scenario):
    launched = []
    operator = kernels.ascend_operator
    monkeypatch.setattr(
        kernels, "ascend_operator", lambda function, *how: launched.append(function) or operator(function, *how)
    )
    made = Pair(RULES["AdamOffload"], dataclasses.replace(SCENARIOS[scenario], shapes=SHAPES))
    assert launched == ["MsOptimDelta", "MsOptimSums"]
    set_mode(mode)
    made.run(mode, 6)
    made.check()


class PlatformAdamW:
    """What CANN documents of aclnnApplyAdamWV2, its step counted from 0 as MindSpore's own optimizer does."""

    def __call__(self, weight, m, v, _, gradient, step, rate, beta1, beta2, decay, eps, amsgrad, maximize):
        assert not amsgrad
        assert not maximize
        assert all(type(x) is float for x in (rate, beta1, beta2, decay, eps))
        t = float(step.asnumpy()[0]) + 1
        w, g = weight.asnumpy().astype(np.float64), gradient.asnumpy().astype(np.float64)
        first = beta1 * m.asnumpy().astype(np.float64) + (1 - beta1) * g
        second = beta2 * v.asnumpy().astype(np.float64) + (1 - beta2) * g**2
        moved = first / (1 - beta1**t) / (np.sqrt(second / (1 - beta2**t)) + eps)
        for parameter, value in ((weight, w * (1 - rate * decay) - rate * moved), (m, first), (v, second)):
            parameter.set_data(ms.Tensor(np.asarray(value, np.float32)))
        return weight, m, v
