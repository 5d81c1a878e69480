"""Wrong input is refused in words: which argument, what was expected, what came."""

import contextlib
import functools
import inspect
import math
import re
import warnings

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, MODES_IN_TURN, every_case_and_path
from harness import Step, tensor
from mindspore import Parameter, nn
from refusals import refused

import ms_optim
from ms_optim import (
    LANS,
    AdamOffload,
    AdamW,
    AdEMAMix,
    DGCMomentum,
    Lamb,
    Lion,
    ScheduleFreeAdamW,
    merge_states,
    to_mindformers,
)
from ms_optim.arguments import words as arguments_words

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def params(n=2, dtype="float32"):
    return [Parameter(tensor(np.ones((2, 3)), dtype), name=f"w{i}") for i in range(n)]


@every_case
@pytest.mark.parametrize(
    "error, match, value",
    [
        (TypeError, "'learning_rate' must be a number.*got '0.1' of type str", "0.1"),
        (TypeError, "'learning_rate' must be a number.*got '5' of type str", "5"),
        (TypeError, "'learning_rate'.*None", None),
        (TypeError, "'learning_rate'.*bool", True),
        (TypeError, "'learning_rate'.*list", ["a"]),
        (TypeError, "'learning_rate'.*list", []),
        (ValueError, "'learning_rate' must be equal to or greater than 0, but got -0.1", -0.1),
        (ValueError, "'learning_rate'", float("nan")),
        (ValueError, r"'learning_rate' must be a Tensor of 0 or 1 dim.*shape \(2, 2\)", ms.Tensor(np.ones((2, 2)))),
    ],
)
def test_learning_rate(case, error, match, value):
    text = refused(error, match, lambda: case.optimizer(params(), value))
    assert text.startswith(f"For '{case.name}'")
    group = [{"params": params(), "lr": value}]
    refused(error, match.replace("'learning_rate'", r"'params\[0\]\['lr'\]'"), lambda: case.optimizer(group, 0.1))


@every_case
@pytest.mark.parametrize(
    "error, match, value",
    [
        (TypeError, "'weight_decay' must be a float, an int or a Cell, but got '0' of type str", "0"),
        (TypeError, "'weight_decay'.*None", None),
        (TypeError, "'weight_decay'.*bool", True),
        (ValueError, "'weight_decay' must be equal to or greater than 0, but got -1", -1),
        (ValueError, "'weight_decay'.*inf", float("inf")),
    ],
)
def test_weight_decay(case, error, match, value):
    refused(error, match, lambda: case.optimizer(params(), 0.1, weight_decay=value))
    group = [{"params": params(), "weight_decay": value}]
    refused(
        error, match.replace("'weight_decay'", r"'params\[0\]\['weight_decay'\]'"), lambda: case.optimizer(group, 0.1)
    )


HAS_BETAS = [case for case in CASES if {"beta1", "betas"} & {*inspect.signature(case.cls).parameters}]
HAS_EPS = [case for case in CASES if "eps" in inspect.signature(case.cls).parameters]


@pytest.mark.parametrize("case", HAS_BETAS, ids=lambda case: case.name)
@pytest.mark.parametrize("bad, error", [(1, TypeError), ("0.9", TypeError), (0.0, ValueError), (1.0, ValueError)])
def test_betas(case, bad, error):
    if "betas" in inspect.signature(case.cls).parameters:
        names, make = (r"betas\[0\]", r"betas\[1\]"), lambda b1, b2: {"betas": (b1, b2)}
    else:
        names, make = ("beta1", "beta2"), lambda b1, b2: {"beta1": b1, "beta2": b2}
    if case.name == "AdEMAMix":
        make = lambda b1, b2: {"betas": (b1, b2, 0.9999)}  # noqa: E731 - as above
        refused(error, r"'betas\[2\]' must be", lambda: case.optimizer(params(), 0.1, betas=(0.9, 0.999, bad)))
    refused(error, f"'{names[0]}' must be", lambda: case.optimizer(params(), 0.1, **make(bad, 0.9)))
    refused(error, f"'{names[1]}' must be", lambda: case.optimizer(params(), 0.1, **make(0.9, bad)))


def test_a_decay_rate_of_a_state_is_less_than_1_in_float32():
    one, match = 1 - 1e-9, "must be less than 1 in float32"
    refused(ValueError, rf"'betas\[1\]' {match}", lambda: AdamW(params(), betas=(0.9, one)))
    refused(ValueError, f"'beta1' {match}", lambda: Lamb(params(), 0.1, beta1=one))
    refused(ValueError, f"'momentum' {match}", lambda: DGCMomentum(params(), 0.1, one, 0))
    AdamW(params(), betas=(1 - 2.0**-24, 1 - 2.0**-24))


@pytest.mark.parametrize("optimizer", [AdamW, Lion])
@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab", None])
def test_betas_are_two(optimizer, betas):
    refused(TypeError, "'betas' must be a list or tuple of two floats", lambda: optimizer(params(), betas=betas))


@pytest.mark.parametrize("case", HAS_EPS, ids=lambda case: case.name)
@pytest.mark.parametrize("bad, error", [(1, TypeError), ("1e-8", TypeError), (0.0, ValueError), (-1e-8, ValueError)])
def test_eps(case, bad, error):
    refused(error, "'eps' must be", lambda: case.optimizer(params(), 0.1, eps=bad))


@every_case
@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("loss_scale", 0.0, ValueError),
        ("loss_scale", -1.0, ValueError),
        ("loss_scale", "1", TypeError),
        ("grad_clip_norm", 0.0, ValueError),
        ("grad_clip_norm", "1", TypeError),
        ("state_dtype", "int4", ValueError),
        ("state_dtype", ms.float16, ValueError),
        ("state_dtype", np.float32, TypeError),
        ("master_weights", 1, TypeError),
        ("stochastic_rounding", "yes", TypeError),
        ("skip_nonfinite", None, TypeError),
        ("backend", "cuda", ValueError),
        ("backend", None, TypeError),
        ("bias_correction", 1, TypeError),
    ],
)
def test_keyword_arguments(case, name, bad, error):
    refused(error, f"'{name}'", lambda: case.optimizer(params(), 0.1, **{name: bad}))


@every_case
def test_an_unknown_keyword_argument_lists_the_known(case):
    refused(
        TypeError,
        "unknown keyword argument 'lose_scale'.*loss_scale",
        lambda: case.optimizer(params(), 0.1, lose_scale=2),
    )


@pytest.mark.parametrize(
    "make, name, hint",
    [
        (AdamW, "lr", "Did you mean 'learning_rate'?"),
        (AdamW, "epsilon", "Did you mean 'eps'?"),
        (AdamW, "beta1", "Did you mean 'betas'?"),
        (AdamW, "clip_gradient", "Did you mean 'grad_clip_norm'?"),
        (AdamW, "foreach", "Did you mean 'backend'?"),
        (AdamW, "weight_decy", "Did you mean 'weight_decay'?"),
        (AdamW, "use_nesterov", "Optimizers that take it: AdamOffload, DGCMomentum, Adam, Momentum."),
        (AdamW, "momentum", "Optimizers that take it: DGCMomentum, Muon, Sinkhorn, Momentum."),
        (Lion, "amsgrad", "Optimizers that take it: AdamW."),
        (AdamOffload, "betas", "Did you mean 'beta1' and 'beta2'?"),
        (Lamb, "betas", "Did you mean 'beta1' and 'beta2'?"),
        (ms_optim.Muon, "betas", "Did you mean 'adamw_betas'?"),
        (ms_optim.Muon, "use_nesterov", "Did you mean 'nesterov'?"),
        (AdamW, "xyzzy", ""),
    ],
)
def test_the_hint_for_an_unknown_argument_comes_before_the_list(make, name, hint):
    """What other frameworks call an argument is known; what only other optimizers take names them."""
    text = refused(TypeError, f"unknown keyword argument '{name}'", lambda: make(params(), 0.1, **{name: 0.1}))
    between = f" {hint}" if hint else ""
    assert text.startswith(f"For '{make.__name__}', unknown keyword argument '{name}'.{between} It takes ['a")


@pytest.mark.parametrize(
    "name, bad, hint",
    [
        ("state_dtype", ms.int8, "Did you mean '8bit'?"),
        ("state_dtype", "int8", "Did you mean '8bit'?"),
        ("state_dtype", 8, "Did you mean '8bit'?"),
        ("state_dtype", "int4", "Did you mean '4bit'?"),
        ("state_dtype", "bf16", "Did you mean 'bfloat16'?"),
        ("state_dtype", "FP32", "Did you mean 'float32'?"),
        ("state_dtype", "fp16", ""),
        ("master_weights", "fp32", "Masters are float32 with True."),
        ("master_weights", ms.float32, "Masters are float32 with True."),
        ("master_weights", "none", ""),
        ("backend", "composit", "Did you mean 'composite'?"),
        ("backend", "native", "Did you mean 'auto'?"),
        ("decay", "Decoupled", "Did you mean 'decoupled'?"),
        ("weight_norm", "hyper_ball", "Did you mean 'hyperball'?"),
        ("weight_norm", 0.5, ""),
    ],
)
def test_the_hint_for_an_unknown_value(name, bad, hint):
    text = refused((TypeError, ValueError), f"'{name}' must be", lambda: AdamW(params(), **{name: bad}))
    assert text.endswith(hint or ".")


@pytest.mark.parametrize(
    "key, meant",
    [("learning_rate", "lr"), ("param", "params"), ("wd", "weight_decay"), ("Params", "params"), (3, None)],
)
def test_the_hint_for_an_unknown_key_of_a_group(key, meant):
    said = rf"must be among \[.*\], but got {key!r}\." + (rf" Did you mean '{meant}'\?" if meant else ".$")
    refused(KeyError, said, lambda: AdamW([{"params": params(), key: 1}]))
    if meant != "params":
        refused(KeyError, said, lambda: ms_optim.pattern_groups(network(), {"*": {key: 1}}))


def test_a_network_in_place_of_its_parameters():
    words = (
        r"'params' must be a list of Parameters .*net\.trainable_params\(\) returns, but got a Cell of type Dense\.$"
    )
    refused(TypeError, words, lambda: AdamW(nn.Dense(4, 3)))


def test_states_dtypes_by_name_or_as_they_are():
    for dtype in (ms.float32, ms.bfloat16):
        optimizer = AdamW(params(), state_dtype=dtype)
        assert {p.dtype for p in optimizer.states} == {dtype}
        assert optimizer.options.state_dtype == str(dtype).lower()


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "use_fused"])
def test_flags_of_adamw(name):
    refused(TypeError, f"'{name}' must be of type bool, but got 1", lambda: AdamW(params(), **{name: 1}))


@pytest.mark.parametrize("name", ["weight_norm_bounds", "trust_ratio_bounds"])
@pytest.mark.parametrize(
    "bad, error", [(1.0, TypeError), ((1.0,), TypeError), ((2.0, 1.0), ValueError), ((-1, 1), ValueError)]
)
def test_bounds_of_lamb(name, bad, error):
    refused(error, rf"'{name}(\[0\])?' must be", lambda: Lamb(params(), 0.1, **{name: bad}))


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("lower_bound", "0", TypeError),
        ("upper_bound", True, TypeError),
        ("lower_bound", -1.0, ValueError),
        ("upper_bound", float("nan"), ValueError),
        ("aggregate_num", 4.0, TypeError),
        ("aggregate_num", True, TypeError),
        ("aggregate_num", -1, ValueError),
        ("use_fused_step", 1, TypeError),
        ("clip_gradient", "1", TypeError),
        ("clip_gradient", 0.0, ValueError),
        ("clip_gradient", -1.0, ValueError),
        ("rescale_grad", None, TypeError),
        ("rescale_grad", 0, ValueError),
        ("bias_correction", False, TypeError),
    ],
)
def test_arguments_of_lans(name, bad, error):
    refused(
        error,
        f"'{name}'.*{re.escape(repr(bad)) if name != 'bias_correction' else ''}",
        lambda: LANS(params(), **{name: bad}),
    )


def test_bounds_of_lans_are_in_order():
    refused(
        ValueError,
        "'lower_bound' must be no greater than 'upper_bound'",
        lambda: LANS(params(), lower_bound=2, upper_bound=1),
    )


@pytest.mark.parametrize("optimizer, name", [(AdamW, "use_fused"), (LANS, "use_fused_step")])
def test_two_words_for_the_backend_must_not_contradict(optimizer, name):
    refused(
        ValueError,
        f"'backend' must be 'auto' or 'composite' with {name}=False",
        lambda: optimizer(params(), backend="aot", **{name: False}),
    )
    assert not optimizer(params(), backend="composite", **{name: False}).fused
    assert not optimizer(params(), **{name: False}).fused
    assert optimizer(params(), **{name: True}).fused


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("use_locking", 1, TypeError),
        ("use_nesterov", "yes", TypeError),
        ("loss_scale", 1, TypeError),
        ("loss_scale", float("inf"), ValueError),
        ("bias_correction", False, TypeError),
    ],
)
def test_arguments_of_adam_offload(name, bad, error):
    refused(error, f"'{name}'", lambda: AdamOffload(params(), **{name: bad}))


@pytest.mark.parametrize(
    "make, arguments, error, match",
    [
        (ms_optim.Adam, {"use_amsgrad": 1}, TypeError, "'use_amsgrad' must be of type bool"),
        (ms_optim.Adam, {"corrects_eps": None}, TypeError, "'corrects_eps' must be of type bool"),
        (ms_optim.Adam, {"corrects_eps": True, "eps": 3e-37}, ValueError, "'eps' must be at least 3.7e-37 with corr"),
        (ms_optim.Momentum, {"momentum": 1.0}, ValueError, "'momentum' must be"),
        (ms_optim.Momentum, {"dampening": -0.1}, ValueError, "'dampening' must be"),
        (ms_optim.Momentum, {"use_nesterov": True, "momentum": 0.0}, ValueError, "'use_nesterov' must be False unless"),
        (ms_optim.Momentum, {"use_nesterov": True, "dampening": 0.5}, ValueError, "and 'dampening' is 0, but got True"),
    ],
)
def test_arguments_of_adam_and_momentum(make, arguments, error, match):
    refused(error, match, lambda: make(params(), **arguments))


@every_case
def test_params(case):
    p, q = params()
    make = case.optimizer
    refused(ValueError, "'params' must be a list", lambda: make(None, 0.1))
    refused(ValueError, "'params' must be a list of at least one Parameter or dict", lambda: make([], 0.1))
    refused(TypeError, "'params' must be a list", lambda: make(p, 0.1))
    refused(TypeError, "'params' must be a list.*got 3", lambda: make(3, 0.1))
    refused(TypeError, r"'params\[1\]' must be a Parameter", lambda: make([p, 1.0], 0.1))
    refused(TypeError, r"'params\[1\]' must be a dict", lambda: make([{"params": [p]}, q], 0.1))
    refused(TypeError, r"'params\[0\]' must be a Parameter or a dict", lambda: make(["w"], 0.1))
    refused(ValueError, "'w0' is listed twice", lambda: make([p, p], 0.1))
    refused(ValueError, "'w0' is listed twice", lambda: make([{"params": [p]}, {"params": [q, p]}], 0.1))
    twin = params(1)[0]
    refused(ValueError, "'w0' shares its name", lambda: make([p, twin], 0.1))
    integers = Parameter(ms.Tensor([1, 2], ms.int32), name="i", requires_grad=False)
    refused(TypeError, "'i' must be float32, float16 or bfloat16, but is Int32", lambda: make([integers], 0.1))


@every_case
def test_groups(case):
    p, q = params()
    make = case.optimizer
    refused(
        KeyError,
        r"'params\[0\]' must be among.*got 'learning_rate'",
        lambda: make([{"params": [p], "learning_rate": 1}], 0.1),
    )
    refused(KeyError, r"'params\[0\]' must have the key 'params'", lambda: make([{"lr": 0.1}], 0.1))
    refused(TypeError, r"params\[0\]\['params'\]' must be a list of Parameters", lambda: make([{"params": p}], 0.1))
    refused(TypeError, r"\['params'\]\[1\]' must be a Parameter", lambda: make([{"params": [p, 2]}], 0.1))
    refused(TypeError, "grad_centralization.*bool", lambda: make([{"params": [p], "grad_centralization": 1}], 0.1))
    refused(ValueError, "at least one Parameter", lambda: make([{"params": []}], 0.1))
    group = {"params": [p, q]}
    refused(ValueError, r"lacks \['w1'\]", lambda: make([group, {"order_params": [p]}], 0.1))
    other = Parameter(tensor([1.0], "float32"), name="other")
    refused(ValueError, r"also has \['other'\]", lambda: make([group, {"order_params": [p, q, other]}], 0.1))
    refused(ValueError, "'w0' is listed twice", lambda: make([group, {"order_params": [p, p]}], 0.1))
    refused(ValueError, "no other key.*'lr'", lambda: make([group, {"order_params": [p, q], "lr": 0.1}], 0.1))
    refused(ValueError, "at most one group, but is in 2", lambda: make([group, *[{"order_params": [p, q]}] * 2], 0.1))
    refused(TypeError, "order_params", lambda: make([group, {"order_params": 3}], 0.1))


@every_case_and_path(mode=MODES_IN_TURN)
def test_gradients(case, backend, mode):
    pair = params()
    before = [p.asnumpy().copy() for p in pair]
    optimizer = case.optimizer(pair, 0.1, backend=backend)
    call = Step(optimizer) if mode == "graph" else lambda *gradients: optimizer(gradients)
    right = tensor(np.ones((2, 3)), "float32")
    refused(ValueError, "'gradients' must hold 2 tensors.*got 1", lambda: call(right))
    refused(ValueError, "'gradients' must hold 2 tensors.*got 3", lambda: call(right, right, right))
    turned = tensor(np.ones((3, 2)), "float32")
    refused(ValueError, r"'w1' must have the parameter's shape \(2, 3\), but got \(3, 2\)", lambda: call(right, turned))
    whole = ms.Tensor(np.ones((2, 3)), ms.int32)
    refused(TypeError, "'w0' must be float32, float16 or bfloat16, but got Int32", lambda: call(whole, right))
    assert int(optimizer.global_step.asnumpy()[0]) == 0
    for p, b in zip(pair, before):
        np.testing.assert_array_equal(p.asnumpy(), b)


def rates_taken(optimizer, steps):
    """Return the learning rates of the first steps, as the optimizer tells them and as its weight moves by them."""
    told, moved = [], []
    for _ in range(steps):
        told.append(optimizer.current_step_lr())
        before = optimizer.parameters[0].asnumpy().copy()
        optimizer((ms.Tensor(np.ones((2, 3), np.float32)),))
        moved.append(np.max(before - optimizer.parameters[0].asnumpy()))
    return told, moved


@pytest.mark.parametrize(
    "rate, expected",
    [
        (0, [0.0, 0.0]),
        (0.0, [0.0, 0.0]),
        (1, [1.0, 1.0]),
        (np.float32(0.1), [0.1, 0.1]),
        (np.float16(0.5), [0.5, 0.5]),
        (ms.Tensor(0.1), [0.1, 0.1]),
        (ms.Tensor(1), [1.0, 1.0]),
        (ms.Tensor(0.5, ms.bfloat16), [0.5, 0.5]),
        (ms.Tensor([0.1, 0.2]), [0.1, 0.2]),
        (ms.Tensor([1, 2]), [1.0, 2.0]),
        ([0.1, 1], [0.1, 1.0]),
        ((x for x in (1, 2)), [1.0, 2.0]),
        (np.array([0.1, 0.2]), [0.1, 0.2]),
        ({1: 0.1, 2: 0.2}.values(), [0.1, 0.2]),
        (nn.ExponentialDecayLR(0.1, 0.5, 1), [0.1, 0.05]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_learning_rates_of_every_kind(rate, expected):
    # With betas this small, AdamW moves a weight by its learning rate.
    told, moved = rates_taken(AdamW(params(1), rate, betas=(1e-9, 1e-9)), 2)
    np.testing.assert_allclose(told, expected, rtol=1e-6)
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_equal_learning_rates_of_groups_are_one_each():
    """Each can be set; and one that MindSpore makes a schedule of, as another group has one, stays what it is."""
    p, q = params()
    optimizer = AdamW([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.1}], betas=(1e-9, 1e-9))
    optimizer.learning_rate[1].set_data(ms.Tensor(0.2, ms.float32))
    optimizer((tensor(np.ones((2, 3)), "float32"),) * 2)
    np.testing.assert_allclose([1.0 - x.asnumpy()[0, 0] for x in (p, q)], [0.1, 0.2], rtol=1e-6)
    groups = [{"params": [p], "lr": 1e-5}, {"params": [q], "lr": nn.ExponentialDecayLR(0.1, 0.5, 1)}]
    rates = AdamW(groups)._parts.rates(ms.Tensor([0], ms.int32)).asnumpy()
    np.testing.assert_array_equal(rates, np.array([1e-5, 0.1], np.float32))


def test_parameters_of_every_kind_of_list():
    p, q = params()
    assert [x.name for x in AdamW(iter([p, q])).parameters] == ["w0", "w1"]
    groups = [{"params": iter([p, q])}, {"params": []}, {"order_params": iter([q, p])}]
    assert [x.name for x in AdamW(groups).parameters] == ["w1", "w0"]


def with_own_decays(*decays):
    return [{"params": [p], "weight_decay": decay} for p, decay in zip(params(len(decays)), decays)]


SCHEDULED = ms_optim.LinearWeightDecay(0.1, 0.0, 9)
IN_VAIN = r"weight_decay=0\.2 has no effect: each group has its own"


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: AdamW(params(), state_dtype="8bit"), "'AdamW', state_dtype='8bit' has no effect: .* 4,096"),
        (lambda: Lamb(params(), 0.1, state_dtype="4bit"), "'Lamb', state_dtype='4bit' has no effect"),
        (lambda: AdamW(large(), state_dtype="8bit"), None),
        (lambda: AdamW(params(), state_dtype="bfloat16"), None),
        (lambda: AdamW(with_own_decays(0.1, 0.0), weight_decay=0.2), IN_VAIN),
        (lambda: Lion(with_own_decays(SCHEDULED, 0.0), weight_decay=0.2), IN_VAIN),
        (lambda: AdamW(with_own_decays(0.1, 0.0), weight_decay=SCHEDULED), "weight_decay=a Cell of type Linear"),
        (lambda: AdamW(with_own_decays(0.1, 0.0), weight_decay=0.1), None),
        (lambda: AdamW(with_own_decays(SCHEDULED, 0.0), weight_decay=SCHEDULED), None),
        (lambda: AdamW(with_own_decays(0.1, 0.0)), None),
        (lambda: ms_optim.Muon(with_own_decays(0.2, 0.0)), None),
        (lambda: AdamW([*with_own_decays(0.1), {"params": [large()[0]]}], weight_decay=0.2), None),
        (lambda: ms_optim.create_optimizer("adamw", network(), weight_decay=0.2), None),
        (
            lambda: ms_optim.Muon(params(), adamw_names=["*embed*", "head"]),
            "pattern 'head' of 'adamw_names' matches no",
        ),
        (lambda: ms_optim.muon_groups(network(), adamw_names=["head"]), "'muon_groups', the pattern 'head'"),
        (lambda: ms_optim.Muon(params(), adamw_names=["w0"]), None),
        (lambda: ms_optim.Muon(params()), None),
        (lambda: ms_optim.Muon(params(), adamw_names=["w*"]), "no parameter is a matrix"),
        (lambda: ms_optim.Muon([Parameter(tensor([1.0], "float32"), name="bias")]), "no parameter is a matrix"),
    ],
)
def test_an_option_without_effect_says_so_once(make, said, monkeypatch):
    monkeypatch.setattr(arguments_words, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            make()
    texts = [str(warning.message) for warning in caught if str(warning.message).startswith("For '")]
    assert len(texts) == (said is not None)
    assert said is None or re.search(said, texts[0]), texts


def large():
    return [Parameter(tensor(np.ones((64, 64)), "float32"), name="large")]


@every_case
def test_empty_groups_are_left_out(case):
    """With whatever keys they have: a network without biases has none that are not decayed."""
    settings = {"lr": 0.2, "weight_decay": 0.3, "grad_centralization": True}
    own = [{"muon": False}, {"muon": True, "weight_decay": 0.0}] if "muon" in case.cls.group_keys else []
    every = [{}, *({key: value} for key, value in settings.items()), settings, {"lr": [0.1, 0.2]}, *own]
    for keys in every:
        p, q = params()
        made = case.optimizer([{"params": [], **keys}, {"params": [q, p], "lr": 0.1}, {"params": (), **keys}], 0.1)
        made(tuple(tensor(np.ones((2, 3)), "float32") for _ in made.parameters))
        assert [x.name for x in made.parameters] == ["w1", "w0"]
        assert len(made.param_groups) == 1
    refused(ValueError, "groups with at least one Parameter", lambda: case.optimizer([{"params": [], **settings}], 0.1))


@every_case
@pytest.mark.parametrize(
    "error, match, value",
    [
        (ValueError, r"'learning_rate\[1\]' must be equal to or greater than 0, but got -1", [0.1, -1]),
        (ValueError, r"'learning_rate\[1\]'.*nan", (0.1, math.nan)),
        (ValueError, r"'learning_rate\[0\]' must be finite in float32.*1e\+39", [1e39, 0.1]),
        (ValueError, r"'learning_rate\[1\]'.*inf", np.array([0.1, np.inf])),
        (ValueError, r"'learning_rate\[2\]'.*-1", ms.Tensor([0.1, 0.2, -1.0])),
        (ValueError, r"'learning_rate' .*nan", ms.Tensor(math.nan)),
        (ValueError, r"'learning_rate' must be finite in float32.*inf", ms.Tensor(1e39, ms.float64)),
        (ValueError, r"'learning_rate' must be finite in float32", 10**400),
        (ValueError, r"'learning_rate' must be a Tensor of 1 or more numbers", ms.Tensor(np.zeros(0, np.float32))),
        (TypeError, r"'learning_rate' must be a Tensor of numbers", ms.Tensor(True)),
        (TypeError, r"'learning_rate'.*set", {0.1, 0.2}),
        (TypeError, r"'learning_rate'.*NumPy array of shape \(2, 2\)", np.ones((2, 2))),
        (TypeError, r"'learning_rate'.*bytes", b"0.1"),
    ],
)
def test_learning_rates_that_no_step_can_use(case, error, match, value):
    refused(error, match, lambda: case.optimizer(params(), value))


@every_case_and_path()
def test_a_step_past_the_last_learning_rate(case, backend):
    """Nothing has changed where it is refused."""
    p, q = params()
    optimizer = case.optimizer([{"params": [p], "lr": [0.1, 0.2]}, {"params": [q]}], (0.3, 0.4), backend=backend)
    gradients = (tensor(np.ones((2, 3)), "float32"),) * 2
    for _ in range(2):
        optimizer(gradients)
    before = {name: value.asnumpy() for name, value in optimizer.state_dict().items()}
    weights = [w.asnumpy().copy() for w in (p, q)]
    refused(RuntimeError, "'learning_rate' must .* but has 2, and this is step 2", lambda: optimizer(gradients))
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value.asnumpy(), before[name])
    np.testing.assert_array_equal([w.asnumpy() for w in (p, q)], weights)


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("momentum", "0.9", TypeError),
        ("momentum", True, TypeError),
        ("momentum", 1.0, ValueError),
        ("momentum", -0.1, ValueError),
        ("rampup_begin_step", 1.0, TypeError),
        ("rampup_begin_step", -1, ValueError),
        ("rampup_step", 1.0, TypeError),
        ("rampup_step", 0, ValueError),
        ("sparsity", 0.999, TypeError),
        ("sparsity", ("0.9",), TypeError),
        ("sparsity", (), ValueError),
        ("sparsity", (0.9, 1.0), ValueError),
        ("sparsity", [-0.1], ValueError),
        ("use_nesterov", 1, TypeError),
        ("num_trainers", 1.0, TypeError),
        ("num_trainers", 0, ValueError),
        ("num_trainers", 4, ValueError),
        ("decay_type", 2, TypeError),
        ("decay_type", "L2", ValueError),
        ("min_compress_numel", 1e4, TypeError),
        ("min_compress_numel", 0, ValueError),
        ("group", 0, TypeError),
        ("group", "workers", ValueError),
        ("local_group", 0, TypeError),
        ("local_group", "this host", ValueError),
        ("wire_dtype", 16, TypeError),
        ("wire_dtype", "bfloat16", ValueError),
    ],
)
def test_arguments_of_dgc_momentum(name, bad, error):
    arguments = {"momentum": 0.9, "rampup_begin_step": 10, name: bad}
    text = refused(error, f"'{name}' must be", lambda: DGCMomentum(params(), 0.1, **arguments))
    assert text.startswith("For 'DGCMomentum'")


def test_arguments_of_dgc_momentum_in_order():
    """Those that the document of PaddlePaddle's names stand where it has them."""
    optimizer = DGCMomentum(params(), 0.1, 0.9, 0, 100, [0.75, 0.999], True, 1, 0.1, "l1", 2.0, 1, 8.0, None)
    assert (optimizer.momentum, optimizer.use_nesterov, optimizer.decay_type) == (0.9, True, "l1")
    assert optimizer.compression == (0, 100, (0.75, 0.999), 1, "float32")
    assert (optimizer.options.grad_clip_norm, optimizer.options.loss_scale) == (2.0, 8.0)


def test_a_tensor_too_large_for_places_of_four_bytes_is_refused():
    with nn.utils.no_init_parameters():
        dense = nn.Dense(2**16, 2**15 + 1, has_bias=False)
    refused(ValueError, "must have at most 2147483648 elements", lambda: DGCMomentum([dense.weight], 0.1, 0.9, 0))


# ---- The count of steps, and gradients that unscaling makes infinite ------------------------------------------------

LAST = 2**31 - 1


def at_step(case, step, backend, **shared):
    """Return an optimizer at a step that it was put at, as MindSpore's own loading puts it."""
    optimizer = case.optimizer(params(1), 0.01, backend=backend, **shared)
    optimizer.global_step.set_data(ms.Tensor([step], ms.int32))
    return optimizer


def held(optimizer):
    return [p.asnumpy().copy() for p in (*optimizer.parameters, *optimizer.states)]


@every_case_and_path()
def test_no_step_from_a_count_below_0(case, backend):
    optimizer = at_step(case, -2, backend)
    before, gradient = held(optimizer), tensor(np.ones((2, 3)), "float32")
    refused(
        RuntimeError,
        f"For '{case.name}', 'global_step' must be 0 or greater, but is -2",
        lambda: optimizer((gradient,)),
    )
    assert int(optimizer.global_step.asnumpy()[0]) == -2
    for was, now in zip(before, held(optimizer)):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("case", [c for c in CASES if c.cls in (AdamW, DGCMomentum)], ids=lambda case: case.name)
def test_no_step_from_a_count_below_0_in_a_graph(case, backend):
    """The kernel refuses it, by a number; MindSpore's operators skip it."""
    optimizer = at_step(case, -2, backend)
    before = held(optimizer)
    with contextlib.nullcontext() if backend == "composite" else pytest.raises(RuntimeError):
        run_in_graph(optimizer)
    assert int(optimizer.global_step.asnumpy()[0]) == -2
    assert int(optimizer.skipped_steps.asnumpy()[0]) == (backend == "composite")
    for was, now in zip(before, held(optimizer)):
        np.testing.assert_array_equal(was, now)


def run_in_graph(optimizer):
    ms.jit(Step(optimizer))(tensor(np.ones((2, 3)), "float32"))
    optimizer.statistics.asnumpy()


@every_case_and_path()
def test_the_count_stays_at_the_largest_number(case, backend):
    optimizer = at_step(case, LAST - 1, backend, skip_nonfinite=True)
    optimizer.skipped_steps.set_data(ms.Tensor([LAST], ms.int32))
    gradient = tensor(np.ones((2, 3)), "float32")
    for _ in range(3):
        before = optimizer.parameters[0].asnumpy().copy()
        optimizer((gradient,))
        moved = before - optimizer.parameters[0].asnumpy()
        assert int(optimizer.global_step.asnumpy()[0]) == LAST
        assert np.isfinite(moved).all()
        assert (moved > 0).all()
    optimizer((gradient * math.inf,))
    assert (int(optimizer.global_step.asnumpy()[0]), int(optimizer.skipped_steps.asnumpy()[0])) == (LAST, LAST)


@every_case_and_path()
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_unscaling_makes_infinite_is_skipped(case, backend, clip):
    """3e38 is finite, and 3e38 / 0.5 is not in float32; 1e38 / 0.5 is."""
    shared = {"loss_scale": 0.5, "skip_nonfinite": True, "grad_clip_norm": clip}
    optimizer = case.optimizer(params(1), 0.01, backend=backend, **shared)
    before = held(optimizer)
    for largest, skipped in ((3e38, 1), (1e38, 0)):
        gradient = np.zeros((2, 3), np.float32)
        gradient[1, 1] = largest
        optimizer((tensor(gradient, "float32"),))
        assert int(optimizer.skipped_steps.asnumpy()[0]) == 1
        assert optimizer.statistics.asnumpy()[0, 4] == 1 - skipped
        if skipped:
            for was, now in zip(before, held(optimizer)):
                np.testing.assert_array_equal(was, now)
    assert int(optimizer.global_step.asnumpy()[0]) == 1


@pytest.mark.parametrize("rescale, scale", [(1e30, 1e-20), (1e-30, 1e20)])
def test_what_gradients_are_multiplied_by_is_a_number_in_float32(rescale, scale):
    refused(
        ValueError,
        "'loss_scale' must be such that the factor of the gradients",
        lambda: LANS(params(), rescale_grad=rescale, loss_scale=scale),
    )
    refused(ValueError, "'loss_scale' must be such", lambda: AdamW(params(), loss_scale=2.0**127))
    AdamW(params(), loss_scale=2.0**126)


# ---- Each argument of the package, with what is no number or none in float32 ---------------------------------------

VALUES = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "1e39": 1e39,
    "1e-46": 1e-46,
    "True": True,
    "'0.1'": "0.1",
    "None": None,
    "array": np.array(0.5),
    "float32": np.float32(0.1),
    "Tensor": ms.Tensor(0.1),
}
# For each kind of argument the values that it takes.
RATE = {"0", "1e-46", "float32", "Tensor"}
DECAY = {"0", "1e-46", "float32"}
POSITIVE = {"float32"}
LOW, HIGH = {"0", "float32", "None"}, {"0", "inf", "float32", "None"}
FLAG, TEXT, COUNT, NOTHING, NONE = {"True"}, {"'0.1'"}, {"0"}, set(), {"None"}
SHARED = {
    "params": NOTHING,
    "learning_rate": RATE,
    "weight_decay": DECAY,
    "grad_clip_norm": POSITIVE | NONE,
    "state_dtype": NOTHING,
    "master_weights": FLAG,
    "skip_nonfinite": FLAG,
    "backend": NOTHING,
}
MOMENTS = {"shard_states": FLAG, "eps": NOTHING}
BETAS = {"beta1": {"1e-46"}, "beta2": {"1e-46"}}
AVERAGED = {"average_decay": {"1e-46"} | NONE, "average_warmup": NOTHING}
HELD = {"weight_norm": NONE}
DECOUPLED = {"decay": NOTHING, "offload": FLAG, **AVERAGED}


HEADS = {
    "threshold": POSITIVE,
    "key_heads": NONE,
    "query_rope": COUNT,
    "key_values": COUNT,
    "query_rows": NONE,
    "key_rows": NONE,
}

BY_HEADS = {"heads": NONE, "key_heads": NONE, "query_names": NOTHING, "key_names": NOTHING}


def projection():
    return params(1)[0]


def network():
    return nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2))


def in_group(params, lr, weight_decay, grad_centralization):
    group = {"params": params, "lr": lr, "weight_decay": weight_decay, "grad_centralization": grad_centralization}
    return AdamW([group])


def with_betas(first, second):
    return AdamW(params(), betas=(first, second))


def with_bounds(low, high, least, most):
    return Lamb(params(), 0.1, weight_norm_bounds=(low, high), trust_ratio_bounds=(least, most))


def piecewise(milestone, weight_decay):
    return ms_optim.PiecewiseConstantWeightDecay([milestone], [weight_decay])


def with_sparsity(sparsity):
    return DGCMomentum(params(), 0.1, 0.9, 0, sparsity=[sparsity])


def pattern_group(lr, weight_decay):
    return ms_optim.pattern_groups(network(), {"0.*": {"lr": lr, "weight_decay": weight_decay}})


def rule(rule):
    return ms_optim.FusedOptimizer(params(), 0.1, 0.0, rule)


# What is called with what, and for each argument the values that it takes.
LAYERWISE = {"learning_rate": DECAY, "decay": POSITIVE, "layers": NONE, "weight_decay": DECAY | NONE}


def released():
    return nn.Dense(2, 2)


TABLE = [
    (AdamW, {"params": params}, {**SHARED, **MOMENTS, **DECOUPLED, **HELD, "betas": NOTHING, "loss_scale": POSITIVE}),
    (AdamW, {"params": params}, dict.fromkeys(("amsgrad", "maximize", "use_fused", "bias_correction"), FLAG)),
    (AdamW, {"params": params, "master_weights": False}, {"stochastic_rounding": FLAG}),
    (with_betas, {"first": 0.9, "second": 0.9}, {"first": {"1e-46"}, "second": {"1e-46"}}),
    (in_group, {"params": params, "lr": 0.1, "weight_decay": 0.0, "grad_centralization": False},
     {"params": NOTHING, "lr": RATE, "weight_decay": DECAY, "grad_centralization": FLAG}),
    (Lamb, {"params": params, "learning_rate": 0.1},
     {**SHARED, **MOMENTS, **DECOUPLED, **BETAS, "loss_scale": POSITIVE}),
    (Lamb, {"params": params, "learning_rate": 0.1},
     {"bias_correction": FLAG, "always_adapt": FLAG, "weight_norm_bounds": NONE, "trust_ratio_bounds": NONE}),
    (with_bounds, {"low": 0.0, "high": None, "least": 0.0, "most": None},
     {"low": LOW, "high": HIGH, "least": LOW, "most": HIGH}),
    (LANS, {"params": params}, {**SHARED, **MOMENTS, **DECOUPLED, **BETAS, "loss_scale": POSITIVE}),
    (LANS, {"params": params},
     {"lower_bound": LOW, "upper_bound": HIGH, "aggregate_num": COUNT | NONE, "use_fused_step": FLAG,
      "clip_gradient": POSITIVE | NONE, "rescale_grad": POSITIVE}),
    (AdamOffload, {"params": params},
     {**SHARED, **MOMENTS, **AVERAGED, **HELD, **BETAS, "use_locking": FLAG, "use_nesterov": FLAG,
      "loss_scale": NOTHING}),
    (ms_optim.Adam, {"params": params},
     {**SHARED, **MOMENTS, **AVERAGED, **HELD, **BETAS, "offload": FLAG, "use_nesterov": FLAG, "use_amsgrad": FLAG,
      "corrects_eps": FLAG, "loss_scale": POSITIVE}),
    (ms_optim.Momentum, {"params": params},
     {**SHARED, **AVERAGED, **HELD, "offload": FLAG, "shard_states": FLAG, "momentum": DECAY, "use_nesterov": FLAG,
      "dampening": DECAY, "loss_scale": POSITIVE}),
    (Lion, {"params": params},
     {**SHARED, **DECOUPLED, **HELD, "betas": NOTHING, "shard_states": FLAG, "loss_scale": POSITIVE}),
    (AdEMAMix, {"params": params},
     {**SHARED, **MOMENTS, **DECOUPLED, **HELD, "betas": NOTHING, "loss_scale": POSITIVE, "alpha": DECAY,
      "warmup_steps": NONE}),
    (ScheduleFreeAdamW, {"params": params},
     {**SHARED, **MOMENTS, "betas": NOTHING, "offload": FLAG, "loss_scale": POSITIVE, "warmup_steps": COUNT, "r": DECAY,
      "weight_lr_power": DECAY}),
    (ms_optim.Muon, {"params": params},
     {**SHARED, **DECOUPLED, **HELD, "loss_scale": POSITIVE, "shard_states": FLAG, "matched_adamw_rms": POSITIVE,
      "momentum": DECAY, "nesterov": FLAG, "ns_steps": NONE, "adamw_betas": NOTHING, "adamw_eps": POSITIVE,
      "adjust_lr": NOTHING, "ns_coefficients": NOTHING, "ns_dtype": NOTHING, "normalize_rows": FLAG,
      "adamw_names": NOTHING, "splits": NONE, "max_temporary_bytes": NONE}),
    (ms_optim.Sinkhorn, {"params": params},
     {**SHARED, **DECOUPLED, **HELD, "loss_scale": POSITIVE, "shard_states": FLAG, "momentum": DECAY,
      "normalizations": NOTHING, "tau": DECAY, "eps": NOTHING, "scale": POSITIVE}),
    (DGCMomentum, {"params": params, "learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 0},
     {**SHARED, **AVERAGED, "loss_scale": POSITIVE, "momentum": DECAY, "rampup_begin_step": COUNT,
      "rampup_step": NOTHING, "sparsity": NOTHING, "use_nesterov": FLAG, "num_trainers": NONE, "decay_type": NOTHING,
      "min_compress_numel": NOTHING, "group": NONE, "local_group": NONE, "wire_dtype": NOTHING}),
    (with_sparsity, {"sparsity": 0.9}, {"sparsity": DECAY}),
    (rule, {"rule": ms_optim.Rule("mine", ("m",))}, {"rule": NOTHING}),
    (ms_optim.ConstantWeightDecay, {}, {"weight_decay": DECAY}),
    (ms_optim.LinearWeightDecay, {"weight_decay": 0.1, "end_weight_decay": 0.0, "decay_steps": 9},
     {"weight_decay": DECAY, "end_weight_decay": DECAY, "decay_steps": NOTHING}),
    (ms_optim.PolynomialWeightDecay, {"weight_decay": 0.1, "end_weight_decay": 0.0, "decay_steps": 9, "power": 1.0},
     {"weight_decay": DECAY, "end_weight_decay": DECAY, "decay_steps": NOTHING, "power": POSITIVE,
      "update_decay_steps": FLAG}),
    (ms_optim.CosineWeightDecay, {"min_weight_decay": 0.0, "max_weight_decay": 0.5, "decay_steps": 9},
     {"min_weight_decay": DECAY, "max_weight_decay": {"1e-46", "float32"}, "decay_steps": NOTHING}),
    (ms_optim.ExponentialWeightDecay, {"weight_decay": 0.1, "decay_rate": 0.9, "decay_steps": 9},
     {"weight_decay": DECAY, "decay_rate": POSITIVE, "decay_steps": NOTHING, "is_stair": FLAG}),
    (ms_optim.PiecewiseConstantWeightDecay, {"milestone": [1], "weight_decays": [0.1]},
     {"milestone": NOTHING, "weight_decays": NOTHING}),
    (piecewise, {"milestone": 1, "weight_decay": 0.1}, {"milestone": NOTHING, "weight_decay": DECAY}),
    (ms_optim.WarmUpWeightDecay, {"weight_decay": 0.1, "warmup_steps": 9},
     {"weight_decay": DECAY, "warmup_steps": NOTHING}),
    (ms_optim.WarmUpHoldDecayLR, {"learning_rate": 0.2, "warmup_steps": 1, "hold_steps": 1, "total_steps": 9},
     {"learning_rate": POSITIVE, "warmup_steps": COUNT, "hold_steps": COUNT, "total_steps": NOTHING,
      "end_learning_rate": DECAY, "power": POSITIVE, "decay": NOTHING, "start_learning_rate": DECAY}),
    (ms_optim.PowerCoolLR, {"learning_rate": 0.1, "coefficient": 0.1, "total_steps": 9},
     {"learning_rate": POSITIVE, "coefficient": POSITIVE, "total_steps": NOTHING, "warmup_steps": COUNT,
      "power": POSITIVE}),
    (ms_optim.no_decay_groups, {"network": network},
     {"network": NOTHING, "weight_decay": DECAY | NONE, "no_decay": NOTHING}),
    (ms_optim.pattern_groups, {"network": network, "patterns": dict},
     {"network": NOTHING, "patterns": NOTHING, "filter_bias_and_norm": FLAG}),
    (pattern_group, {"lr": 0.1, "weight_decay": 0.1}, {"lr": RATE, "weight_decay": DECAY}),
    (ms_optim.layerwise_groups, {"network": network, "learning_rate": 0.1, "decay": 0.5},
     {"network": NOTHING, **LAYERWISE, "no_decay": NOTHING}),
    (ms_optim.muon_groups, {"network": network},
     {"network": NOTHING, "adamw_names": NOTHING, "weight_decay": DECAY | NONE, "no_decay": NOTHING,
      "filter_bias_and_norm": FLAG, **BY_HEADS}),
    (ms_optim.heads, {"count": 2}, {"count": NOTHING, "rows": NONE}),
    (ms_optim.recipe, {"name": "glm-4.5", "network": network, "learning_rate": 0.1, "embeddings": "0.*", "head": ()},
     {"name": NOTHING, "network": NOTHING, "learning_rate": RATE, "embeddings": NOTHING, "head": NOTHING, **BY_HEADS,
      "query_names": NONE, "key_names": NONE, "no_decay": NOTHING, "filter_bias_and_norm": FLAG | NONE,
      "verbose": FLAG}),
    (ms_optim.qk_clip, {"query": projection, "key": projection, "max_logits": [1.0]},
     {"query": NOTHING, "key": NOTHING, "max_logits": NOTHING, **HEADS}),
    (ms_optim.QKClip, {"layers": lambda: [(projection(), projection())], "max_logits": lambda: list},
     {"layers": NOTHING, "max_logits": NOTHING, **HEADS}),
    (ms_optim.create_optimizer, {"name": "lion", "network": network},
     {"name": NOTHING, "network": NOTHING, "learning_rate": RATE | NONE, "weight_decay": DECAY | NONE,
      "no_decay": NOTHING, "filter_bias_and_norm": FLAG, "verbose": FLAG}),
    (ms_optim.list_optimizers, {}, {"patterns": TEXT | NONE}),
    (ms_optim.for_scheduler, {}, {"optimizer": NOTHING}),
    (ms_optim.OptimizerMonitor, {},
     {"every": NOTHING, "csv": TEXT | NONE, "tensorboard": TEXT | NONE, "verbose": FLAG, "qk_clip": NONE}),
    (ms_optim.ReleasedTrainStep, {"net": released, "loss_fn": None, "optimizer": lambda: AdamW(params())},
     {"net": NOTHING, "loss_fn": NONE, "optimizer": NOTHING, "passes": NOTHING}),
    (ms_optim.LocalSteps, {"optimizer": lambda: AdamW(params())},
     {"optimizer": NOTHING, "every": NOTHING, "outer_learning_rate": POSITIVE, "outer_momentum": DECAY,
      "nesterov": FLAG, "compress": NONE, "fragments": NOTHING, "group": NONE, "local_group": NONE}),
    (ms_optim.GradientAccumulation, {"optimizer": lambda: AdamW(params())},
     {"optimizer": NOTHING, "steps": NOTHING, "sum_dtype": NOTHING}),
    (ms_optim.MultiOptimizer, {"optimizers": lambda: [AdamW(params())]},
     {"optimizers": NOTHING, "grad_clip_norm": POSITIVE | NONE}),
    (ms_optim.SparseTopK, {}, {"density": POSITIVE, "bits": NOTHING, "chunk": NOTHING, "decay": DECAY}),
    (ms_optim.Quantized, {}, {"bits": NOTHING, "chunk": NOTHING}),
    (ms_optim.RadialBrake, {}, {"outward": DECAY, "inward": DECAY}),
    (ms_optim.AveragedWeights, {}, {"optimizer": NONE, "network": NONE, "path": NONE, "weight": DECAY}),
    (ms_optim.plot, {"csv": "none.csv"}, {"csv": TEXT, "output": TEXT | NONE}),
    (ms_optim.SimulatedWorkers, {"count": 1, "params": params, "make": None},
     {"count": NOTHING, "params": NOTHING, "make": NOTHING}),
    (ms_optim.fold_residuals, {"state_dicts": list, "workers": 1}, {"state_dicts": NOTHING, "workers": NOTHING}),
    (merge_states, {}, {"states": NOTHING}),
    (ms_optim.from_mindformers,
     {"saved": lambda: to_mindformers(AdamW(params())), "optimizer": lambda: AdamW(params())},
     {"saved": NOTHING, "optimizer": NOTHING, "steps": {"0"} | NONE}),
    (to_mindformers, {"optimizer": lambda: AdamW(params())}, {"optimizer": NOTHING, "kind": NOTHING}),
    (ms_optim.save, {"path": "none.safetensors", "net": network}, {"path": TEXT, "net": NONE, "optimizer": NONE}),
    (ms_optim.load, {"path": "none.safetensors", "net": network},
     {"path": TEXT, "net": NONE, "optimizer": NONE, "strict": FLAG, "learning_rate": NOTHING}),
    (ms_optim.CheckpointSaver, {"folder": "none"},
     {"folder": TEXT, "every": NOTHING, "keep": NOTHING, "resume": FLAG, "more": NONE, "learning_rate": NOTHING}),
]  # fmt: skip
# Arguments that have another name in errors.
IN_ERRORS = {
    ("with_betas", "first"): "betas[0]",
    ("with_betas", "second"): "betas[1]",
    ("in_group", "params"): "params[0]['params']",
    ("in_group", "lr"): "params[0]['lr']",
    ("in_group", "weight_decay"): "params[0]['weight_decay']",
    ("in_group", "grad_centralization"): "params[0]['grad_centralization']",
    ("with_bounds", "low"): "weight_norm_bounds[0]",
    ("with_bounds", "high"): "weight_norm_bounds[1]",
    ("with_bounds", "least"): "trust_ratio_bounds[0]",
    ("with_bounds", "most"): "trust_ratio_bounds[1]",
    ("piecewise", "milestone"): "milestone[0]",
    ("piecewise", "weight_decay"): "weight_decays[0]",
    ("pattern_group", "lr"): "patterns['0.*']['lr']",
    ("pattern_group", "weight_decay"): "patterns['0.*']['weight_decay']",
}
EVERY_ARGUMENT = [(call, given, name, taken) for call, given, arguments in TABLE for name, taken in arguments.items()]


@pytest.mark.parametrize(
    "call, given, name, taken", EVERY_ARGUMENT, ids=[f"{row[0].__name__}-{row[2]}" for row in EVERY_ARGUMENT]
)
def test_every_argument(call, given, name, taken, tmp_path, monkeypatch):
    """What an argument does not take is refused by the argument's name."""
    monkeypatch.chdir(tmp_path)
    shown = f"'{IN_ERRORS.get((call.__name__, name), name)}'"
    for key, value in VALUES.items():
        arguments = {k: v() if callable(v) else v for k, v in given.items()} | {name: value}
        if key in taken:
            with contextlib.suppress(FileNotFoundError):  # "0.1" is a path
                call(**arguments)
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            call(**arguments)
        text = str(caught.value)
        assert re.match(rf"For '.*{re.escape(shown)}", text), f"{key}: {text}"


def weights_by_name():
    return {f"layers.{i}.weight": Parameter(tensor(np.ones((2, 3)), "float32"), name=f"w{i}") for i in range(99)}


# ---- Whatever is accepted gives finite steps -------------------------------------------------------------------------

EXTREMES = (0, 1e-37, 1.0, 16, 2**31 - 1, 1e18, 1e30, 10**30)
# What says how far weights move, or divides gradients: with 1e30, infinite weights are what was asked for.
SCALES = {"learning_rate", "weight_decay", "loss_scale", "lr", "wd"}
SCHEDULES = [call for call, _, _ in TABLE if call.__module__ == "ms_optim.schedules"]
NUMERIC = [
    (call, given, name)
    for call, given, arguments in TABLE
    for name, taken in arguments.items()
    if {"float32", "0"} & taken and name not in SCALES and call in (*ms_optim.OPTIMIZERS, *SCHEDULES)
]


def accepted(call, given, name, value):
    arguments = {k: v() if callable(v) else v for k, v in given.items()} | {name: value}
    with contextlib.suppress(ValueError, TypeError):
        return call(**arguments)
    return None


@pytest.mark.parametrize("call, given, name", NUMERIC, ids=[f"{row[0].__name__}-{row[2]}" for row in NUMERIC])
def test_what_is_accepted_gives_finite_steps(call, given, name):
    """From the first step to the last one that is counted, and with large ints also on MindSpore's operators."""
    for value in EXTREMES:
        for backend in (None,) if call in SCHEDULES else ("aot", "composite"):
            if backend == "composite" and not (isinstance(value, int) and value > 2**63):
                continue
            made = accepted(call, given | ({"backend": backend} if backend else {}), name, value)
            for step in (0, 1, LAST - 1) if made is not None else ():
                if backend is None:
                    assert np.isfinite(made(ms.Tensor([step], ms.int32)).asnumpy()).all(), (value, step)
                    continue
                made.global_step.set_data(ms.Tensor([step], ms.int32))
                made(tuple(tensor(np.ones(p.shape), "float32") for p in made.parameters))
                for p in (*made.parameters, *made.states):
                    assert np.isfinite(p.asnumpy()).all(), (value, backend, step, p.name)


@pytest.mark.parametrize(
    "coefficients, steps",
    [((1e30, 0, 0), 5), ((3.0, 3.0, 3.0), 5), ((10**30, 0.0, 0.0), 1), ((1.0, 1e30, -1e30), 1), ((2.0, 0.0, 0.0), 100)],
)
def test_iterations_that_diverge_are_refused(coefficients, steps):
    make = lambda: ms_optim.Muon(params(), ns_steps=steps, ns_coefficients=coefficients)  # noqa: E731 - called later
    refused(ValueError, "'ns_coefficients' must be such that singular values .* stay below 1e\\+06", make)
    refused(ValueError, "'ns_steps' must be at most 100", lambda: ms_optim.Muon(params(), ns_steps=2**31 - 1))


class Talkative:
    def __repr__(self):
        return "word " * 10_000


@functools.cache
def long_values():
    weights = weights_by_name()
    return {
        "dict of parameters": weights,
        "its values": weights.values(),
        "parameters": list(weights.values()),
        "group of them": [weights],
        "group": [{"params": list(weights.values()), "lr": "fast"}],
        "parameter": projection(),
        "network": nn.SequentialCell(*[nn.Dense(3, 3) for _ in range(99)]),
        "arrays": [np.arange(999.0)] * 99,
        "array": np.arange(999.0).reshape(3, 333),
        "numbers": [1.5] * 999,
        "nested": [[[[[list(range(99))]]]]],
        "words": "word " * 9999,
        "large": 10**9999,
        "negative": -(10**9999),
        "object": Talkative(),
        "objects": [Talkative()] * 2,
    }


@pytest.mark.parametrize(
    "call, given, name, taken", EVERY_ARGUMENT, ids=[f"{row[0].__name__}-{row[2]}" for row in EVERY_ARGUMENT]
)
def test_no_error_prints_a_large_value(call, given, name, taken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key, value in long_values().items():
        if key == "words" and taken & TEXT:
            continue
        arguments = {k: v() if callable(v) else v for k, v in given.items()} | {name: value}
        said = ""
        try:
            call(**arguments)
        except (TypeError, ValueError, KeyError) as error:
            said = str(error)
        except FileNotFoundError:  # where a path is taken
            pass
        assert len(said) < 500, f"{key}: {said[:1000]}"
        assert "int_max_str_digits" not in said, f"{key}: Python does not print it"


def test_no_error_prints_large_gradients():
    optimizer = AdamW(params())
    for key, value in long_values().items():
        with pytest.raises((TypeError, ValueError)) as caught:
            optimizer(value)
        assert len(str(caught.value)) < 300, key


def test_a_dict_of_parameters_is_told_its_values():
    given, said = weights_by_name(), r"but got a dict of length 99\. Pass net\.trainable_params\(\)"
    for call in (AdamW, ms_optim.no_decay_groups, lambda given: AdamW([{"params": given}])):
        refused(TypeError, said, call, given)
    refused(TypeError, "dict of length 99. Pass its values, in the order", AdamW(params()), given)


def test_the_table_has_every_argument():
    """An argument that is added to the package is to be added to the table."""
    listed = {}
    for call, _, arguments in TABLE:
        listed.setdefault(call, set()).update(arguments)
    for name in ms_optim.__all__:
        public = getattr(ms_optim, name)
        if name in ("Rule", "ParamGroups", "WeightDecaySchedule", "FusedOptimizer", "Loaded", "SpoiledError"):
            continue
        own = [k for k, p in inspect.signature(public).parameters.items() if p.kind is not p.VAR_KEYWORD]
        own += public.keywords() if hasattr(public, "keywords") else []
        assert listed[public] >= set(own) - {"stochastic_rounding"}, name
