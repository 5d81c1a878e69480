"""Groups have formats of their own: each tensor is kept and updated as if all had its formats, to the bit.

And an argument or a key that reaches no tensor is warned of.
"""

import re
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_optim import AdamW, DGCMomentum, Lamb, Muon, load, pattern_groups, save
from ms_optim.arguments import words
from ms_optim.kernels import table as kernels
from ms_optim.paths import choice

# Two of one shape in different formats, one that is too small for codes, and others.
SHAPES = [(70, 64), (70, 64), (33,), (4097,)]
SHARED = {"state_dtype": "8bit", "master_weights": "split8"}
KEYS = [
    {"state_dtype": "float32", "master_weights": True},
    {"state_dtype": "4bit", "master_weights": "split"},
    {"state_dtype": ms.bfloat16, "master_weights": False},
    {},
]
ALL = range(len(SHAPES))
STEPS = 4
needs_kernel = pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there are no kernels")


def parameters(dtype=ms.bfloat16):
    rng = np.random.default_rng(0)
    return [Parameter(Tensor(rng.standard_normal(shape), dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)]


def gradients(step):
    rng = np.random.default_rng(1 + step)
    return tuple(Tensor(rng.standard_normal(shape), ms.bfloat16) for shape in SHAPES)


def made(optimizer, keys, backend, **shared):
    ms.set_seed(3)  # of the noise
    groups = [{"params": [p], **own} for p, own in zip(parameters(), keys)]
    return optimizer(groups, 0.01, weight_decay=0.1, backend=backend, grad_clip_norm=20.0, average_decay=0.9, **shared)


def numbers(tensor):
    return ops.cast(tensor, ms.float32).asnumpy() if tensor.dtype == ms.bfloat16 else tensor.asnumpy()


def of_tensor(optimizer, name):
    """Return what an optimizer holds for a parameter, and the parameter, by prefix."""
    held = optimizer._held
    found = [*held.parameters, *held.of_tensors]
    own = {p.name.removesuffix(name): p for p in found if p.name == name or p.name.endswith(f".{name}")}
    return {prefix: (str(p.dtype), numbers(p)) for prefix, p in own.items()}


@needs_kernel
@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
@pytest.mark.parametrize("optimizer", [AdamW, Lamb, Muon])
def test_each_tensor_is_as_if_all_had_its_formats(optimizer, mode):
    compare(optimizer, "aot", mode)


# Graphs of MindSpore's operators take long to compile.
@pytest.mark.parametrize(("optimizer", "mode", "places"), [(AdamW, ms.GRAPH_MODE, [1]), (Lamb, ms.PYNATIVE_MODE, ALL)])
def test_so_it_is_on_the_operators(optimizer, mode, places):
    compare(optimizer, "composite", mode, places)


def compare(optimizer, backend, mode, places=ALL):
    """Compare all that is held for each tensor with what an optimizer holds whose arguments are its group's keys."""
    ms.set_context(mode=mode)
    mixed = made(optimizer, KEYS, backend, **SHARED)
    for step in range(STEPS):
        mixed(gradients(step))
    for i, keys in ((i, KEYS[i]) for i in places):
        alone = made(optimizer, [{}] * len(SHAPES), backend, **{**SHARED, **keys})
        for step in range(STEPS):
            alone(gradients(step))
        expected, found = of_tensor(alone, f"w{i}"), of_tensor(mixed, f"w{i}")
        assert expected.keys() == found.keys(), i
        for prefix, (dtype, values) in expected.items():
            assert found[prefix][0] == dtype, (i, prefix)
            np.testing.assert_array_equal(found[prefix][1], values, err_msg=f"{prefix} of w{i}")


@pytest.mark.parametrize("backend", [pytest.param("aot", marks=needs_kernel), "composite"])
def test_gradients_that_are_released_follow_the_same_formats(backend):
    """The weights of a released step are those of a step of all gradients."""
    weights = []
    for is_released in (False, True):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(3)
        net = nn.SequentialCell(nn.Dense(90, 60), nn.Dense(60, 80), nn.Dense(80, 60))
        rng = np.random.default_rng(0)
        for p in net.get_parameters():
            p.set_data(Tensor(rng.standard_normal(p.shape), ms.float32))
        patterns = {"0.*": {"state_dtype": "float32"}, "1.weight": {"state_dtype": "4bit"}}
        optimizer = AdamW(pattern_groups(net, patterns), 0.01, backend=backend, state_dtype="8bit")
        grad = ms.value_and_grad(lambda x, net=net: net(x).sum(), None, optimizer.parameters)
        if is_released:
            optimizer.attach()
        for k in range(3):
            _, found = grad(Tensor(np.random.default_rng(k).standard_normal((2, 90)), ms.float32))
            optimizer.finish() if is_released else optimizer(found)
        if is_released:
            optimizer.detach()
        held = [*optimizer.parameters, *optimizer._held.of_tensors]
        weights.append([numbers(p) for p in held])
    for one, other in zip(*weights):
        np.testing.assert_array_equal(one, other)


def test_checkpoints_carry_over_to_other_formats(tmp_path):
    """With the same groups to the bit; with others, each state is converted."""
    first = made(AdamW, KEYS, "auto", **SHARED)
    for step in range(STEPS):
        first(gradients(step))
    save(tmp_path / "run.safetensors", optimizer=first)
    states = ("8bit", "float32", "4bit", "bfloat16")
    others = [{**keys, "state_dtype": own} for keys, own in zip(KEYS, states)]
    same, other = made(AdamW, KEYS, "auto", **SHARED), made(AdamW, others, "auto", **SHARED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for optimizer in (same, other):
            for weight, saved in zip(optimizer.parameters, first.parameters):
                weight.set_data(Tensor(numbers(saved), ms.bfloat16))
            load(tmp_path / "run.safetensors", optimizer=optimizer)
    for i in ALL:
        for (dtype, values), (found_dtype, found) in zip(
            of_tensor(first, f"w{i}").values(), of_tensor(same, f"w{i}").values(), strict=True
        ):
            assert dtype == found_dtype
            np.testing.assert_array_equal(values, found)
    fresh = made(AdamW, others, "auto", **SHARED)
    assert [p.dtype for p in other.states] == [p.dtype for p in fresh.states]
    for optimizer in (first, other):
        optimizer(gradients(STEPS))
    for a, b in zip(first.parameters, other.parameters):
        # One step later they differ by the rounding of moments, a part of the step of 0.01 and of a bfloat16's unit.
        np.testing.assert_allclose(numbers(a), numbers(b), atol=0.03, rtol=2**-7)


def test_values_of_the_keys_are_checked():
    def refuse(error, text, keys, cls=AdamW, **shared):
        with pytest.raises(error, match=re.escape(text)):
            cls([{"params": parameters()[1:]}, {**keys, "params": parameters()[:1]}], 0.01, **shared)

    refuse(ValueError, "'params[1]['state_dtype']' must be one of", {"state_dtype": "9bit"})
    refuse(TypeError, "'params[1]['state_dtype']' must be of type str, but got 3", {"state_dtype": 3})
    refuse(ValueError, "'params[1]['master_weights']' must be True, False or one of", {"master_weights": "spl"})
    rounds = {"master_weights": False, "stochastic_rounding": True}
    refuse(ValueError, "requires params[1]['master_weights']=False", {"master_weights": True}, **rounds)
    groups = [{"params": parameters(ms.float32), "state_dtype": "8bit"}]
    with pytest.raises(ValueError, match="'state_dtype' must be 'float32'"):
        DGCMomentum(groups, 0.01, momentum=0.9, rampup_begin_step=0)
    with pytest.raises(ValueError, match="'w0' is float16"):
        AdamW([{"params": parameters(ms.float16), "master_weights": "split"}], 0.01)


SMALL, VECTOR = [Parameter(Tensor(np.zeros((3, 2), np.float32)), name="small")], [(5,)]
WITHOUT_EFFECT = {
    "state_dtype='8bit' has no effect: states of fewer than 4,096": ([{"params": SMALL, "state_dtype": "8bit"}], {}),
    "state_dtype='4bit' has no effect: each group": (
        [{"params": SMALL, "state_dtype": "float32"}],
        {"state_dtype": "4bit"},
    ),
    "master_weights='split' has no effect: no parameter is float16": (SMALL, {"master_weights": "split"}),
    "master_weights='split8' has no effect: each group": (
        [{"params": SMALL, "master_weights": True}],
        {"master_weights": "split8"},
    ),
    "stochastic_rounding=True has no effect": (SMALL, {"master_weights": False, "stochastic_rounding": True}),
    "'grad_centralization' has no effect": ([{"params": VECTOR, "grad_centralization": True}], {}),
    "weight_norm='relative' has no effect": (VECTOR, {"weight_norm": "relative"}),
    "decay='cautious' has no effect": (SMALL, {"decay": "cautious", "weight_decay": 0.0}),
}


@pytest.mark.parametrize("text", WITHOUT_EFFECT)
def test_what_reaches_no_tensor_is_warned_of(text, monkeypatch):
    monkeypatch.setattr(words, "_warned", set())
    vector = [Parameter(Tensor(np.zeros(5, np.float32)), name="vector")]
    params, arguments = WITHOUT_EFFECT[text]
    params = (
        vector
        if params is VECTOR
        else [
            {**each, "params": vector} if isinstance(each, dict) and each["params"] is VECTOR else each
            for each in params
        ]
    )
    with pytest.warns(UserWarning, match=re.escape(f"For 'AdamW', {text}")) as caught:
        AdamW(params, 0.01, **arguments)
    assert caught[0].filename == __file__


def test_what_reaches_a_tensor_is_not_warned_of(monkeypatch):
    monkeypatch.setattr(words, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(AdamW, [{}] * len(SHAPES), "auto", **SHARED, decay="cautious", weight_norm="relative")
        made(AdamW, KEYS, "auto", **SHARED)


def test_the_path_is_one_that_has_the_formats_of_all_groups():
    """Operators for Ascend keep float32 states: one group with others takes MindSpore's operators."""
    plain, mixed = (AdamW([{"params": parameters(), **keys}]) for keys in ({}, {"state_dtype": "8bit"}))
    assert choice.asked(plain._parts) == ()
    assert choice.asked(mixed._parts) == ("state_dtype",)
