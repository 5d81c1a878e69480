"""Groups made from a network: who goes where, that optimizers take them, and that they print."""

import itertools
import re

import mindspore as ms
import numpy as np
import pytest
import reference
import rich
from harness import Step, numbers, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, mint, nn
from refusals import refused

from ms_optim import (
    AdamW,
    Lamb,
    LinearWeightDecay,
    Muon,
    ParamGroups,
    WarmUpHoldDecayLR,
    heads,
    layerwise_groups,
    muon_groups,
    no_decay_groups,
    pattern_groups,
)


class RMSNorm(nn.Cell):
    """Of 2 dimensions, so that only its kind says that it normalizes."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(tensor(np.ones((2, 4)), "float32"), name="weight")


class LlamaRMSNormFused(RMSNorm):
    """Found by the class that it is derived from."""


class PreNorm(nn.Cell):
    """Has a normalization, but is none: what it wraps is decayed."""

    def __init__(self, inner):
        super().__init__()
        self.norm = nn.LayerNorm((4,))
        self.inner = inner


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention_norm = LlamaRMSNormFused()
        self.mlp = PreNorm(nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 4)))


class Net(nn.Cell):
    """Named as MindFormers names: what precedes the blocks, the blocks, what follows them."""

    def __init__(self):
        super().__init__()
        self.position = Parameter(tensor(np.ones((5, 4)), "float32"), name="position")
        self.frozen = Parameter(tensor(np.ones((2, 2)), "float32"), name="frozen", requires_grad=False)
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.CellList([Block() for _ in range(2)])
        self.ln_f = nn.LayerNorm((4,))
        self.head = nn.Dense(4, 3)


BEFORE = ["position", "embedding.embedding_table"]
AFTER = ["ln_f.gamma", "ln_f.beta", "head.weight", "head.bias"]


def block(i):
    inner = ["attention_norm.weight", "mlp.norm.gamma", "mlp.norm.beta", "mlp.inner.0.weight", "mlp.inner.0.bias"]
    return [f"blocks.{i}.{name}" for name in [*inner, "mlp.inner.2.weight", "mlp.inner.2.bias"]]


NAMES = [*BEFORE, *block(0), *block(1), *AFTER]
DECAYED = [*BEFORE, *(f"blocks.{i}.mlp.inner.{j}.weight" for i in (0, 1) for j in (0, 2)), "head.weight"]


def where(groups):
    """Return the settings of each parameter by name, and check what holds of all groups."""
    assert isinstance(groups, ParamGroups)
    assert all(group["params"] for group in groups[:-1])
    found = {
        p.name: {k: v for k, v in group.items() if k != "params"} for group in groups[:-1] for p in group["params"]
    }
    assert len(found) == sum(len(group["params"]) for group in groups[:-1])
    assert list(groups[-1]) == ["order_params"]
    assert sorted(found) == sorted(p.name for p in groups[-1]["order_params"])
    return found


def names(groups):
    return [[p.name for p in group["params"]] for group in groups[:-1]]


# ---- No decay ----------------------------------------------------------------------------------------------------


def test_biases_and_normalization_are_not_decayed():
    net = Net()
    groups = no_decay_groups(net, 0.1)
    found = where(groups)
    assert found == {name: {"weight_decay": 0.1 if name in DECAYED else 0.0} for name in NAMES}
    assert groups[-1]["order_params"] == net.trainable_params()
    assert len(groups) == 3


def test_without_a_number_the_decay_is_the_optimizers():
    assert where(no_decay_groups(Net())) == {name: {} if name in DECAYED else {"weight_decay": 0.0} for name in NAMES}


def test_further_names_are_not_decayed():
    found = where(no_decay_groups(Net(), 0.1, no_decay=["*embedding*", "position"]))
    assert {name for name, setting in found.items() if setting["weight_decay"]} == set(DECAYED) - set(BEFORE)


def test_a_schedule_is_a_weight_decay():
    schedule = LinearWeightDecay(0.1, 0.0, 10)
    found = where(no_decay_groups(Net(), schedule))
    assert found["head.weight"]["weight_decay"] is schedule
    assert found["head.bias"]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    "cell",
    [
        nn.LayerNorm((3, 4)),
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.SyncBatchNorm(4),
        ms.mint.nn.LayerNorm((3, 4)),
        LlamaRMSNormFused(),
    ],
    ids=lambda cell: type(cell).__name__,
)
def test_every_kind_of_normalization(cell):
    found = where(no_decay_groups(nn.SequentialCell(cell, nn.Dense(4, 3)), 0.1))
    assert len(found) == 2 + len(cell.trainable_params())
    assert [name for name, setting in found.items() if setting["weight_decay"]] == ["1.weight"]


def test_a_list_of_parameters():
    """There are no Cells to look at: dimensions and names decide."""
    net = Net()
    found = where(no_decay_groups(net.trainable_params(), 0.1))
    two = {f"blocks.{i}.attention_norm.weight" for i in (0, 1)}
    assert {name for name, setting in found.items() if setting["weight_decay"]} == {*DECAYED, *two}
    wide = Parameter(tensor(np.ones((1, 3)), "float32"), name="dense.bias")
    scalar = Parameter(tensor(1.0, "float32"), name="temperature")
    groups = no_decay_groups(iter([net.head.weight, wide, scalar]), 0.1)
    assert names(groups) == [["head.weight"], ["dense.bias", "temperature"]]


def test_empty_groups_do_not_appear():
    assert names(no_decay_groups([Net().head.bias])) == [["head.bias"]]
    assert names(no_decay_groups([Net().head.weight])) == [["head.weight"]]


# ---- Patterns ----------------------------------------------------------------------------------------------------


def test_patterns():
    schedule = LinearWeightDecay(0.1, 0.0, 10)
    patterns = {
        "blocks.?.mlp.*.weight": {"grad_centralization": True, "lr": 0.01},
        "blocks.*": {"lr": [0.1, 0.2]},
        "[eh]*": {"weight_decay": schedule},
    }
    found = where(pattern_groups(Net(), patterns))
    for name in NAMES:
        if re.fullmatch(r"blocks\.\d\.mlp\..*weight", name):
            expected = patterns["blocks.?.mlp.*.weight"]
        elif name.startswith("blocks"):
            expected = patterns["blocks.*"]
        elif name.startswith(("embedding", "head")):
            expected = patterns["[eh]*"]
        else:
            expected = {}
        assert found[name] == expected, name


def test_a_pattern_is_of_the_whole_name_and_its_case():
    with pytest.raises(ValueError, match="'head' in 'patterns'"):
        pattern_groups(Net(), {"head": {}})
    with pytest.raises(ValueError, match=r"'Head\.\*' in 'patterns'"):
        pattern_groups(Net(), {"Head.*": {}})


def test_patterns_with_biases_and_normalization_spared():
    patterns = {"head.*": {"lr": 0.1}, "blocks.0.*": {"weight_decay": 0.3}}
    groups = pattern_groups(Net(), patterns, filter_bias_and_norm=True)
    found = where(groups)
    for name in NAMES:
        expected = {"lr": 0.1} if name.startswith("head") else {}
        if name.startswith("blocks.0"):
            expected = {"weight_decay": 0.3}
        elif name not in DECAYED:
            expected = {**expected, "weight_decay": 0.0}
        assert found[name] == expected, name
    # Where the decay is stated, being a bias makes no difference, and no group of its own.
    assert sorted(block(0)) in [sorted(group) for group in names(groups)]


def test_no_patterns_leave_all_to_the_optimizer():
    assert names(pattern_groups(Net(), {})) == [NAMES]


def test_the_settings_given_are_not_touched():
    patterns = {"head.*": {"lr": 0.1}}
    groups = pattern_groups(Net(), patterns, filter_bias_and_norm=True)
    groups[-2]["lr"] = 5.0
    assert patterns == {"head.*": {"lr": 0.1}}


# ---- Layers ------------------------------------------------------------------------------------------------------

LAYERS = [BEFORE, block(0), block(1), AFTER]


def test_layers_by_number():
    found = where(layerwise_groups(Net(), 0.1, 0.5, weight_decay=0.05))
    for k, layer in enumerate(LAYERS):
        for name in layer:
            assert found[name] == {"lr": 0.1 * 0.5 ** (3 - k), "weight_decay": 0.05 if name in DECAYED else 0.0}


def test_layers_by_pattern():
    patterns = ["position", "embedding*", "blocks.*", "*"]
    found = where(layerwise_groups(Net(), 0.1, 0.5, layers=patterns, no_decay=["position"]))
    scales = {name: 0.125 if name == "position" else 0.25 if "embedding" in name else 1.0 for name in NAMES}
    scales |= {name: 0.5 for name in NAMES if name.startswith("blocks")}
    for name in NAMES:
        spared = {} if name in DECAYED and name != "position" else {"weight_decay": 0.0}
        assert found[name] == {"lr": 0.1 * scales[name], **spared}


def named(*names):
    return [Parameter(tensor(np.ones((1, 1)), "float32"), name=name) for name in names]


@pytest.mark.parametrize(
    "layers",
    [
        [["conv1.weight"], ["layer1.0.a", "layer1.0.b.3.w"], ["layer1.1.a"], ["layer2.0.a"], ["fc.weight"]],
        [["encoder.blocks.0.w"], ["encoder.blocks.1.w"], ["encoder.norm.w"], ["decoder.blocks.0.w"]],
        [["0.weight", "0.bias"], ["2.weight"]],
        [["0.mlp.0.w", "0.mlp.1.w"], ["1.mlp.0.w"]],
        [["stem10.w"], ["blocks.9.w"], ["blocks.10.w"]],
    ],
)
def test_layers_of_other_networks(layers):
    found = where(layerwise_groups(named(*itertools.chain(*layers)), 1.0, 0.5))
    expected = {name: 0.5 ** (len(layers) - 1 - k) for k, layer in enumerate(layers) for name in layer}
    assert {name: setting["lr"] for name, setting in found.items()} == expected


def test_a_number_found_again_is_the_same_layer():
    found = where(layerwise_groups(named("a.0.w", "a.1.w", "a.0.v"), 1.0, 0.5))
    assert {name: setting["lr"] for name, setting in found.items()} == {"a.0.w": 0.5, "a.1.w": 1.0, "a.0.v": 0.5}


def test_layers_scale_a_schedule(mode):
    schedule = WarmUpHoldDecayLR(0.1, 2, 2, 8)
    found = where(layerwise_groups(Net(), schedule, 0.5))
    assert found["head.weight"]["lr"] is found["head.bias"]["lr"] is schedule
    assert found["position"]["lr"] is not found["blocks.0.mlp.inner.0.weight"]["lr"]
    for k, layer in enumerate(LAYERS):
        for t, rate in enumerate([0.0, 0.05, 0.1, 0.1, 0.1, 0.075]):
            value = float(found[layer[0]]["lr"](ms.Tensor([t], ms.int32)))
            assert value == pytest.approx(rate * 0.5 ** (3 - k), rel=1e-6)


def test_a_decay_of_1_changes_nothing():
    schedule = WarmUpHoldDecayLR(0.1, 2, 2, 8)
    assert all(setting["lr"] is schedule for setting in where(layerwise_groups(Net(), schedule, 1)).values())


# ---- Muon --------------------------------------------------------------------------------------------------------

MATRICES = {*DECAYED, *(f"blocks.{i}.attention_norm.weight" for i in (0, 1))} - {"embedding.embedding_table"}


def orthogonalized(optimizer):
    return {p.name.removeprefix("muon_m.") for p in optimizer.states if p.name.startswith("muon_m.")}


def test_muon_has_matrices_and_adamw_all_else():
    net = Net()
    groups = muon_groups(net)
    assert where(groups) == {name: {"muon": name in MATRICES} for name in NAMES}
    assert len(groups) == 3
    assert groups[-1]["order_params"] == net.trainable_params()


def test_the_groups_are_what_muon_does_without_groups():
    assert orthogonalized(Muon(Net().trainable_params())) == orthogonalized(Muon(muon_groups(Net()))) == MATRICES
    assert [p.name for p in Muon(muon_groups(Net())).parameters] == NAMES


def test_names_that_adamw_has():
    found = where(muon_groups(Net(), adamw_names=("head.*", "*lm_head*")))
    expected = {*MATRICES, "embedding.embedding_table"} - {"head.weight"}
    assert {name for name, setting in found.items() if setting["muon"]} == expected
    assert not any(setting["muon"] for setting in where(muon_groups(Net(), adamw_names=["*"])).values())


def test_the_weight_of_a_convolution_of_one_dimension_is_no_batch_of_matrices():
    class Experts(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(tensor(np.ones((2, 3, 4)), "float32"), name="weight")

    net = nn.SequentialCell(mint.nn.Conv1d(3, 5, 2), nn.Conv1d(3, 5, 2), mint.nn.Conv2d(3, 5, 2), Experts())
    found = {name: setting["muon"] for name, setting in where(muon_groups(net)).items() if name.endswith("weight")}
    assert found == {"0.weight": False, "1.weight": True, "2.weight": True, "3.weight": True}
    held = {p.name for p in Muon(muon_groups(net)).states}
    assert {"adam_m.0.weight", "muon_m.1.weight", "muon_m.2.weight", "muon_m.3.weight"} <= held


def test_muons_groups_with_decays():
    found = where(muon_groups(Net(), weight_decay=0.2))
    assert found == {name: {"muon": name in MATRICES, "weight_decay": 0.2} for name in NAMES}
    found = where(muon_groups(Net(), weight_decay=0.2, filter_bias_and_norm=True, no_decay=["position"]))
    decayed = set(DECAYED) - {"position"}
    assert found == {
        name: {"muon": name in MATRICES, "weight_decay": 0.2 if name in decayed else 0.0} for name in NAMES
    }


def test_a_pattern_says_who_has_a_matrix():
    patterns = {"head.weight": {"muon": False, "lr": 0.5}, "embedding*": {"muon": True}}
    groups = pattern_groups(Net(), patterns)
    assert where(groups)["head.weight"] == {"muon": False, "lr": 0.5}
    assert orthogonalized(Muon(groups)) == {*MATRICES, "embedding.embedding_table"} - {"head.weight"}


def test_the_table_says_who_has_a_matrix(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = str(muon_groups(Net(), weight_decay=0.1))
    assert re.search(r"Tensors\s+Elements\s+lr\s+weight_decay\s+muon\s+Parameters", text)
    assert [row[4] for row in rows(text)] == ["True", "False"]
    assert "muon" not in str(no_decay_groups(Net()))


@pytest.mark.parametrize("optimizer", [AdamW, Lamb, nn.Momentum], ids=lambda x: x.__name__)
def test_other_optimizers_refuse_the_key(optimizer):
    more = (0.9,) if optimizer is nn.Momentum else ()
    with pytest.raises(KeyError, match="'muon'"):
        optimizer(muon_groups(Net()), 0.1, *more)


# ---- In an optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [AdamW, Lamb], ids=lambda x: x.__name__)
def test_optimizers_take_the_groups(optimizer, mode):
    """Layer-wise decay of a schedule, with a weight decay that changes, against the float64 reference."""
    net = Net()
    rng = np.random.default_rng(0)
    starts = []
    for p in net.trainable_params():
        starts.append(rng.standard_normal(p.shape).astype(np.float32).astype(np.float64))
        p.set_data(tensor(starts[-1], "float32"))
    rate = WarmUpHoldDecayLR(0.1, 2, 2, 8)
    groups = layerwise_groups(net, rate, 0.5, weight_decay=LinearWeightDecay(0.3, 0.0, 4))
    made = optimizer(groups, rate)
    assert [p.name for p in made.parameters] == [p.name for p in net.trainable_params()] == NAMES

    def schedule(k):
        return lambda t: [0.0, 0.05, 0.1, 0.1, 0.1, 0.075][t] * 0.5 ** (3 - k)

    rates = [schedule(next(k for k, layer in enumerate(LAYERS) if name in layer)) for name in NAMES]
    decays = [(lambda t: 0.3 * max(0.0, 1 - t / 4)) if name in DECAYED else (lambda t: 0.0) for name in NAMES]
    n = len(NAMES)
    truth = getattr(reference, optimizer.__name__)(starts, rates, decays, [False] * n, ["float32"] * n)
    call = Step(made) if mode == "graph" else lambda *given: made(given)
    for _ in range(6):
        gradients = [np.asarray(rng.standard_normal(w.shape), np.float32).astype(np.float64) for w in starts]
        call(*(tensor(g, "float32") for g in gradients))
        truth.step(gradients)
    for p, w in zip(made.parameters, truth.weights):
        np.testing.assert_allclose(numbers(p), w, rtol=2e-5, atol=2e-5 * np.abs(w).max(), err_msg=p.name)


def test_centralization_reaches_the_optimizer():
    net = Net()
    made = Lamb(pattern_groups(net, {"head.weight": {"grad_centralization": True}}), 0.1)
    assert [p.name for p, flag in zip(made.parameters, made.grad_centralization_flags) if flag] == ["head.weight"]


def test_mindspores_own_optimizer_takes_the_groups():
    net = Net()
    before = {p.name: p.asnumpy().copy() for p in net.trainable_params()}
    made = nn.Momentum(no_decay_groups(net, 0.5), 0.1, 0.9)
    assert [p.name for p in made.parameters] == NAMES
    made(tuple(tensor(np.zeros(p.shape), "float32") for p in net.trainable_params()))
    for p in net.trainable_params():
        kept = 1 - 0.1 * 0.5 if p.name in DECAYED else 1.0
        np.testing.assert_allclose(p.asnumpy(), before[p.name] * kept, rtol=1e-6, err_msg=p.name)


# ---- The table ---------------------------------------------------------------------------------------------------


def rows(text):
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"\s*\d", line)]


def test_printing_shows_a_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    groups = no_decay_groups(Net(), 0.05)
    print(groups)
    text = capsys.readouterr().out
    assert re.search(r"Tensors\s+Elements\s+lr\s+weight_decay\s+Parameters", text)
    decayed = 20 + 40 + 4 * 32 + 12
    assert rows(text) == [
        ["7", str(decayed), "default", "0.05", "position … head.weight"],
        ["13", str(2 * (8 + 4 + 4 + 8 + 4) + 4 + 4 + 3), "default", "0", "blocks.0.attention_norm.weight … head.bias"],
    ]
    assert repr(groups) == str(groups)
    rich.print(groups)
    assert rows(capsys.readouterr().out) == rows(text)


def test_the_table_names_schedules_and_centralization(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = str(layerwise_groups(Net(), WarmUpHoldDecayLR(0.1, 2, 2, 8), 0.5, weight_decay=LinearWeightDecay(1, 0, 9)))
    assert "0.125 × WarmUpHoldDecayLR" in text
    assert "LinearWeightDecay" in text
    assert "centralized" not in text
    text = str(pattern_groups(Net(), {"head.*": {"grad_centralization": True, "lr": [0.1, 0.2]}}))
    assert re.search(r"2\s+15\s+list\s+default\s+True\s+head.weight head.bias", text)


def test_thousands_are_told_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    big = Parameter(tensor(np.zeros((1234, 1000)), "float32"), name="big[red].weight")
    assert rows(str(pattern_groups([big], {}))) == [["1", "1,234,000", "default", "default", "big[red].weight"]]


def test_the_table_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = str(no_decay_groups(Net(), 0.05))
    assert max(map(len, text.splitlines())) <= 60
    assert "weight_decay" in text


# ---- Any network -------------------------------------------------------------------------------------------------

part = st.sampled_from(["0", "1", "12", "blocks", "norm1", "weight", "bias"])
a_name = st.lists(part, min_size=1, max_size=4).map(".".join)


@settings(deadline=None, max_examples=50)
@given(given_names=st.lists(a_name, min_size=1, max_size=12, unique=True), pattern=a_name)
def test_nothing_is_lost_or_doubled(given_names, pattern):
    params = named(*given_names)
    made = [no_decay_groups(params, 0.1)]
    if pattern in given_names:
        made.append(pattern_groups(params, {pattern: {"lr": 0.1}, **({"*": {}} if len(params) > 1 else {})}))
    if any(re.search(r"(^|\.)\d+\.", name) for name in given_names):
        made.append(layerwise_groups(params, 0.1, 0.5))
    for groups in made:
        where(groups)
        assert groups[-1]["order_params"] == params
        AdamW(groups, 0.1, backend="composite")


# ---- Wrong arguments ---------------------------------------------------------------------------------------------

MAKERS = {
    "no_decay_groups": lambda network, **more: no_decay_groups(network, **more),
    "pattern_groups": lambda network, **more: pattern_groups(network, {}, **more),
    "layerwise_groups": lambda network, **more: layerwise_groups(
        network, **{"learning_rate": 0.1, "decay": 0.5, **more}
    ),
    "muon_groups": lambda network, **more: muon_groups(network, **more),
}


@pytest.mark.parametrize("name", MAKERS)
def test_network_is_checked(name):
    make = MAKERS[name]
    w, v = named("0.w", "0.v")
    start = f"For '{name}', "
    for wrong in (None, 3, "net", {"params": [w]}, w, ms.Tensor([1.0])):
        refused(
            TypeError, f"{start}.*'network' must be a Cell or a list of Parameters", lambda wrong=wrong: make(wrong)
        )
    refused(TypeError, rf"{start}.*'network\[1\]' must be a Parameter, but got 1 of", lambda: make([w, 1]))
    refused(TypeError, r"'network\[0\]' must be a Parameter", lambda: make([{"params": [w]}]))
    refused(ValueError, f"{start}.*'network' must have trainable parameters", lambda: make([]))
    refused(ValueError, "must have trainable parameters", lambda: make(nn.ReLU()))
    refused(ValueError, "once in 'network', but '0.w' is listed twice in 'network'", lambda: make([w, v, w]))
    refused(ValueError, "'0.w' shares its name", lambda: make([w, *named("0.w")]))
    empty = Parameter(tensor(np.ones((0, 3)), "float32"), name="empty")
    refused(ValueError, "'empty' must not be empty", lambda: make([empty]))
    integers = Parameter(ms.Tensor([1], ms.int32), name="i", requires_grad=False)
    refused(TypeError, "'i' must be float32, float16 or bfloat16, but is Int32", lambda: make([integers]))


@pytest.mark.parametrize("name", ["no_decay_groups", "layerwise_groups", "muon_groups"])
def test_weight_decay_and_no_decay_are_checked(name):
    net, make = Net(), MAKERS[name]
    refused(
        TypeError, f"For '{name}'.*'weight_decay' must be a float.*got '0.1'", lambda: make(net, weight_decay="0.1")
    )
    refused(ValueError, "'weight_decay' must be equal to or greater than 0", lambda: make(net, weight_decay=-0.1))
    for wrong in ("position", 3, [3], None, {"position": 0}):
        refused(TypeError, "'no_decay' must be a list or tuple of str", lambda wrong=wrong: make(net, no_decay=wrong))
    refused(
        ValueError,
        f"For '{name}', the pattern 'positions' in 'no_decay' must match .* such as 'position' or 'head.bias', but",
        lambda: make(net, no_decay=["head.*", "positions"]),
    )


@pytest.mark.parametrize(
    "error, match, patterns",
    [
        (TypeError, "'patterns' must be of type dict", ["head.*"]),
        (TypeError, "'patterns' must be of type str, but got 3", {3: {}}),
        (TypeError, r"'patterns\['head.\*'\]' must be of type dict, but got 0.1", {"head.*": 0.1}),
        (
            KeyError,
            r"the keys of 'patterns\['head.\*'\]' must be among .*'lr'.* but got 'rate'",
            {"head.*": {"rate": 1}},
        ),
        (KeyError, "must be among .* but got 'params'", {"head.*": {"params": []}}),
        (TypeError, r"'patterns\['head.\*'\]\['lr'\]' must be a number", {"head.*": {"lr": "0.1"}}),
        (ValueError, r"\['lr'\]' must be equal to or greater than 0", {"head.*": {"lr": -0.1}}),
        (TypeError, r"\['weight_decay'\]' must be a float", {"head.*": {"weight_decay": "0.1"}}),
        (ValueError, r"\['weight_decay'\]' must be equal to or", {"head.*": {"weight_decay": -1}}),
        (TypeError, "centralization'\\]' must be of type bool", {"head.*": {"grad_centralization": 1}}),
        (TypeError, "'muon'\\]' must be of type bool", {"head.*": {"muon": 1}}),
        (ValueError, r"the pattern 'tail\.\*' in 'patterns' must match the name of", {"head.*": {}, "tail.*": {}}),
        (
            ValueError,
            r"'head.bias' in 'patterns' must match a parameter that no earlier .*\['blocks\*', 'head\*'\]",
            {"blocks*": {}, "head*": {}, "head.bias": {}},
        ),
    ],
)
def test_patterns_are_checked(error, match, patterns):
    refused(error, match, lambda: pattern_groups(Net(), patterns))


def test_the_filter_is_checked():
    refused(TypeError, "'filter_bias_and_norm' must be", lambda: pattern_groups(Net(), {}, filter_bias_and_norm=1))
    refused(TypeError, "'filter_bias_and_norm' must be", lambda: muon_groups(Net(), filter_bias_and_norm=1))


@pytest.mark.parametrize("wrong", ["*embed*", 3, [3], None])
def test_the_names_that_adamw_has_are_checked(wrong):
    match = "For 'muon_groups', the argument 'adamw_names' must be a list or tuple of str"
    refused(TypeError, match, lambda: muon_groups(Net(), adamw_names=wrong))


@pytest.mark.parametrize(
    "error, match, more",
    [
        (TypeError, "'learning_rate' must be a number or a LearningRateSchedule", {"learning_rate": [0.1, 0.2]}),
        (TypeError, "'learning_rate' must be a number or a", {"learning_rate": None}),
        (ValueError, "'learning_rate' must be equal to or greater than 0", {"learning_rate": -0.1}),
        (TypeError, "'decay' must be a number", {"decay": "0.5"}),
        (ValueError, "'decay' must be a number greater than 0", {"decay": 0.0}),
        (ValueError, r"'decay' must be in the range \(0.0, 1.0\], but got 1.5", {"decay": 1.5}),
        (TypeError, "'layers' must be a list or tuple of str", {"layers": "head.*"}),
        (TypeError, "'layers' must be a list or tuple of str", {"layers": [["head.*"]]}),
        (ValueError, "'tail' in 'layers' must match", {"layers": ["tail", "*"]}),
        (ValueError, "'head.*' in 'layers' must match a parameter that no earlier", {"layers": ["*", "head.*"]}),
        (ValueError, r"must match every parameter, but do not match \['position'", {"layers": ["[!p]*"]}),
        (ValueError, "must match every parameter", {"layers": []}),
    ],
)
def test_layers_are_checked(error, match, more):
    refused(error, f"^For 'layerwise_groups'.*{match}", lambda: MAKERS["layerwise_groups"](Net(), **more))


def test_layers_must_be_named_where_there_are_no_numbers():
    match = "'layers' is required if the parameters' names have no numbers, such as 'weight'"
    refused(ValueError, match, lambda: layerwise_groups(nn.Dense(4, 3), 0.1, 0.5))


# ---- Attention heads ------------------------------------------------------------------------------------------------


class Attentions(nn.Cell):
    """Projections as several networks call them: grouped heads with biases, and latent attention."""

    def __init__(self):
        super().__init__()
        shapes = {"a.q_proj": 16, "a.k_proj": 8, "a.v_proj": 8, "b.q_b_proj": 24, "b.kv_b_proj": 40, "b.q_a_proj": 6}
        self.attention = nn.CellDict({name.replace(".", "_"): nn.Dense(5, rows) for name, rows in shapes.items()})


def split_of(groups):
    return {name: setting["split"] for name, setting in where(groups).items() if "split" in setting}


def test_muons_groups_of_heads_are_of_queries_and_keys():
    names = {"query_names": ["*a_q_proj*"], "key_names": ["*a_k_proj*"]}
    groups = muon_groups(Attentions(), heads=4, key_heads=2, **names)
    q, k = "attention.a_q_proj.weight", "attention.a_k_proj.weight"
    assert split_of(groups) == {q: heads(4), k: heads(2)}
    assert split_of(muon_groups(Attentions(), heads=4, **names)) == {q: heads(4), k: heads(4)}
    assert not split_of(muon_groups(Attentions()))
    latent = {"query_names": ["*q_b_proj*"], "key_names": ["*kv_b_proj*"]}
    groups = muon_groups(Attentions(), heads=heads(4, (4, 2)), key_heads=heads(4, (4, 6)), **latent)
    assert set(split_of(groups)) == {"attention.b_q_b_proj.weight", "attention.b_kv_b_proj.weight"}
    columns = [line for line in str(groups).splitlines() if "heads(4, (4, 6))" in line]
    assert len(columns) == 1
    # The usual names, of which each needs as many heads as it has; what Muon makes of the groups.
    matrices = {m.rows for form in Muon(groups)._layout.forms for m in form.matrices if m.rows < 8}
    assert matrices == {2, 4, 6}
    latent = {f"attention.b_{name}_proj.weight" for name in ("q_b", "kv_b")}
    assert set(split_of(muon_groups(Attentions(), heads=4))) == {q, k, *latent}


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"key_heads": 2}, ValueError, "'key_heads' must be None without 'heads'"),
        ({"heads": 0}, ValueError, "'heads' must be an int, 1 or greater"),
        ({"heads": "4"}, TypeError, "'heads' must be an int"),
        ({"heads": 5}, ValueError, "'heads' must be heads that cover exactly the 16 rows of 'attention.a_q_proj"),
        ({"heads": 4, "query_names": ["query*"]}, ValueError, "'heads' must be None if no matrix of .* name like one"),
        ({"heads": 4, "key_heads": 2, "key_names": []}, ValueError, "'key_heads' must be None if no matrix"),
        (
            {"heads": 4, "key_names": ["*q_proj*"]},
            ValueError,
            "both match 'attention.a_q_proj.weight'. State the split",
        ),
        ({"heads": 4, "key_names": "*k*"}, TypeError, "'key_names' must be a list or tuple of str"),
    ],
)
def test_heads_that_fit_no_projection_are_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        muon_groups(Attentions(), **arguments)


def test_a_pattern_states_heads():
    groups = pattern_groups(Attentions(), {"*a_q_proj*": {"split": {"heads": 4}}, "*a_v*": {"split": [4, 4]}})
    assert split_of(groups)["attention.a_q_proj.weight"] == heads(4)
    assert "(4, 4)" in str(groups)
    Muon(groups)
    with pytest.raises(TypeError, match=r"patterns\['\*a_q\*'\]\['split'\]"):
        pattern_groups(Attentions(), {"*a_q*": {"split": "four"}})
    with pytest.raises(KeyError, match="split"):
        Lamb(groups, 0.1)
