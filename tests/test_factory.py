"""Optimizers by name: the class, its arguments and the groups that a name stands for, and the list of names."""

import inspect
import re

import numpy as np
import pytest
from cases import OF_ANY_SHAPE
from harness import numbers, tensor
from mindspore import Parameter, nn
from refusals import refused

import ms_optim
from ms_optim import Lion, create_optimizer, list_optimizers, muon_groups, no_decay_groups, pattern_groups
from ms_optim.optimizers import by_name

NAMES = {
    "AdamW": "adamw",
    "Lamb": "lamb",
    "LANS": "lans",
    "AdamOffload": "adam_offload",
    "DGCMomentum": "dgc_momentum",
    "Lion": "lion",
    "AdEMAMix": "ademamix",
    "ScheduleFreeAdamW": "schedule_free_adamw",
    "Muon": "muon",
}
every_optimizer = pytest.mark.parametrize("cls", OF_ANY_SHAPE, ids=lambda cls: cls.__name__)


class ScaleNorm(nn.Cell):
    """Of 2 dimensions, so that only its kind says that it normalizes."""

    def __init__(self):
        super().__init__()
        self.scale = Parameter(tensor(np.ones((2, 4)), "float32"), name="scale")


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.frozen = Parameter(tensor(np.ones((2, 2)), "float32"), name="frozen", requires_grad=False)
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm((4,))
        self.scale_norm = ScaleNorm()
        self.head = nn.Dense(4, 3)
        random = np.random.default_rng(0)
        for p in self.trainable_params():
            p.set_data(tensor(random.standard_normal(p.shape) + 2.0, "float32"))


DECAYED = {"embedding.embedding_table", "head.weight"}
SPARED = {"norm.gamma", "norm.beta", "scale_norm.scale", "head.bias"}
ORDER = [p.name for p in Net().trainable_params()]


def name_of(cls):
    return cls.rules[0].name


def gradients(optimizer, step):
    random = np.random.default_rng(step)
    return tuple(tensor(random.standard_normal(p.shape), "float32") for p in optimizer.parameters)


def decays(optimizer):
    """Return the weight decay of each parameter by name."""
    values = optimizer.weight_decay if optimizer.is_group else [optimizer.weight_decay] * optimizer.param_length
    assert [p.name for p in optimizer.parameters] == ORDER
    return {name: round(float(value), 6) for name, value in zip(ORDER, values)}


# ---- Names ----------------------------------------------------------------------------------------------------------


def test_names():
    """Those of classes that are added later follow the same pattern."""
    names = {cls.__name__: name_of(cls) for cls in ms_optim.OPTIMIZERS}
    assert names.items() >= NAMES.items()
    for cls, name in names.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert name.replace("_", "") == cls.lower()
    assert list_optimizers() == sorted(names.values())


def test_an_optimizer_that_is_added_has_a_name(monkeypatch):
    class Tiger(Lion):
        rules = (Lion.rules[0]._replace(name="tiger"),)

    refused(ValueError, "'name' must be one of", lambda: create_optimizer("tiger", Net()))
    monkeypatch.setattr(by_name, "OPTIMIZERS", (*ms_optim.OPTIMIZERS, Tiger))
    assert "tiger" in list_optimizers()
    assert type(create_optimizer("tiger", Net(), backend="composite")) is Tiger


@pytest.mark.parametrize(
    "patterns, expected",
    [
        ("lion", ["lion"]),
        ("la*", ["lamb", "lans"]),
        ("*_m?mentum", ["dgc_momentum"]),
        (["lio[m-o]", "*adamw"], ["adamw", "lion", "schedule_free_adamw"]),
        (("lan*", "la*"), ["lamb", "lans"]),
        ("lam", []),
        ("LION", []),
        ("", []),
        ([], []),
    ],
)
def test_patterns(patterns, expected):
    assert list_optimizers(patterns) == expected


@pytest.mark.parametrize("bad", [3, ["la*", 3], {"la*"}, b"la*"])
def test_what_is_no_pattern(bad):
    refused(
        TypeError,
        "For 'list_optimizers', the argument 'patterns' must be a str, a list or tuple of str, or None, but got",
        lambda: list_optimizers(bad),
    )


# ---- What is created ------------------------------------------------------------------------------------------------


@every_optimizer
def test_a_step_is_that_of_the_class_with_the_same_groups(cls):
    """Bit for bit, in the weights and in all else that the optimizer holds."""
    given = {"learning_rate": 0.05, **cls.required}
    made = create_optimizer(name_of(cls), Net(), weight_decay=0.1, **given)
    params = Net().trainable_params()
    groups = [
        {"params": [p for p in params if p.name in DECAYED], "weight_decay": 0.1},
        {"params": [p for p in params if p.name in SPARED], "weight_decay": 0.0},
        {"order_params": params},
    ]
    by_hand = cls(groups, **given)
    before = [numbers(p).copy() for p in made.parameters]
    for step in range(3):
        made(gradients(made, step))
        by_hand(gradients(by_hand, step))
    assert type(made) is cls
    assert not any(np.array_equal(numbers(p), was) for p, was in zip(made.parameters, before))
    entries, expected = made.state_dict(), by_hand.state_dict()
    assert entries.keys() == expected.keys() >= set(ORDER)
    for entry, value in entries.items():
        np.testing.assert_array_equal(value.asnumpy(), expected[entry].asnumpy(), err_msg=entry)


@every_optimizer
def test_what_is_decayed_moves_without_a_gradient(cls):
    made = create_optimizer(name_of(cls), Net(), 0.1, 0.1, **cls.required)
    before = {p.name: numbers(p).copy() for p in made.parameters}
    made(tuple(tensor(np.zeros(p.shape), "float32") for p in made.parameters))
    assert {p.name for p in made.parameters if not np.array_equal(numbers(p), before[p.name])} == DECAYED


@every_optimizer
def test_what_is_not_given_has_the_default_of_the_class(cls):
    own = inspect.signature(cls).parameters
    has_rate = own["learning_rate"].default is not inspect.Parameter.empty
    given = {} if has_rate else {"learning_rate": 0.3}
    made = create_optimizer(name_of(cls), Net(), learning_rate=given.get("learning_rate"), **cls.required)
    assert made.current_step_lr() == np.float32(own["learning_rate"].default if has_rate else 0.3)
    default = own["weight_decay"].default
    assert decays(made) == {**dict.fromkeys(DECAYED, default), **dict.fromkeys(SPARED, 0.0)}


@every_optimizer
def test_no_argument_of_an_optimizer_has_the_name_of_one_of_the_factory(cls):
    own = {name for name, p in inspect.signature(create_optimizer).parameters.items() if p.kind is not p.VAR_KEYWORD}
    assert own & set(cls.keywords()) == {"learning_rate", "weight_decay"}


def test_keyword_arguments_reach_the_class():
    made = create_optimizer("lion", Net(), betas=(0.8, 0.7), state_dtype="bfloat16", grad_clip_norm=2.0)
    assert (made.beta1, made.beta2) == (0.8, 0.7)
    assert (made.options.state_dtype, made.options.grad_clip_norm) == ("bfloat16", 2.0)
    assert create_optimizer("adamw", Net(), amsgrad=True).rule.name == "adamw_amsgrad"
    assert create_optimizer("adamw", Net(), 0.0).current_step_lr() == 0.0
    schedule = nn.ExponentialDecayLR(0.1, 0.5, 1)
    assert create_optimizer("adamw", Net(), schedule).current_step_lr() == np.float32(0.1)


# ---- Groups ---------------------------------------------------------------------------------------------------------


def test_biases_and_norms_are_not_decayed():
    made = create_optimizer("adamw", Net(), weight_decay=0.1)
    assert decays(made) == {**dict.fromkeys(DECAYED, 0.1), **dict.fromkeys(SPARED, 0.0)}


def test_of_a_list_only_dimensions_and_names_tell():
    made = create_optimizer("adamw", iter(Net().trainable_params()), weight_decay=0.1)
    spared = SPARED - {"scale_norm.scale"}
    assert {name for name, decay in decays(made).items() if decay == 0.0} == spared


def test_patterns_of_what_is_not_decayed():
    made = create_optimizer("adamw", Net(), weight_decay=0.1, no_decay=["*embedding_table"])
    assert {name for name, decay in decays(made).items() if decay} == {"head.weight"}


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_without_the_filter_all_are_decayed_but_what_is_named(name):
    """Whatever the optimizer would do without groups."""
    made = create_optimizer(name, Net(), 0.1, 0.1, filter_bias_and_norm=False)
    assert set(decays(made).values()) == {0.1}
    made = create_optimizer(name, Net(), 0.1, 0.1, filter_bias_and_norm=False, no_decay=["head.*"])
    assert {key for key, decay in decays(made).items() if decay == 0.0} == {"head.weight", "head.bias"}


def test_groups_are_used_as_they_are():
    net = Net()
    groups = pattern_groups(net, {"norm.*": {"weight_decay": 0.5, "lr": 0.25}})
    made = create_optimizer("adamw", groups, 0.125, 0.1)
    assert decays(made) == {name: 0.5 if name in ("norm.gamma", "norm.beta") else 0.1 for name in ORDER}
    assert made.current_step_lr() == tuple(0.25 if name in ("norm.gamma", "norm.beta") else 0.125 for name in ORDER)


def test_groups_of_muon_are_muons_alone():
    made = create_optimizer("muon", pattern_groups(Net(), {"head.weight": {"muon": False}, "embed*": {"muon": True}}))
    held = {p.name for p in made.states}
    assert {"muon_m.embedding.embedding_table", "adam_m.head.weight", "adam_m.head.bias"} <= held
    assert made.current_step_lr() == np.float32(2e-2)
    match = r"For 'create_optimizer', the keys of 'network\[0\]' must be among .*, but got 'muon'"
    refused(KeyError, match, lambda: create_optimizer("adamw", muon_groups(Net())))
    wrong = [{"params": Net().trainable_params(), "muon": 1}]
    match = r"For 'create_optimizer', the argument 'network\[0\]\['muon'\]' must be of type bool, but got 1"
    refused(TypeError, match, lambda: create_optimizer("muon", wrong))


def test_the_table_is_printed_on_demand(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    groups = no_decay_groups(Net(), 0.1)
    create_optimizer("adamw", Net(), weight_decay=0.1)
    create_optimizer("adamw", groups)
    assert capsys.readouterr().out == ""
    create_optimizer("adamw", Net(), weight_decay=0.1, verbose=True)
    create_optimizer("adamw", groups, verbose=True)
    create_optimizer("adamw", [{**groups[0], "params": iter(groups[0]["params"])}, groups[1]], verbose=True)
    assert capsys.readouterr().out == f"{groups}\n" * 3


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, hint",
    [
        ("lambd", " Did you mean 'lamb'?"),
        ("schedulefree", " Did you mean 'schedule_free_adamw'?"),
        ("Adamax", ""),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_an_unknown_name_lists_the_names_and_the_closest(name, hint):
    text = refused(ValueError, "For 'create_optimizer'", lambda: create_optimizer(name, Net()))
    assert text.endswith(f"the argument 'name' must be one of {list_optimizers()}, but got {name!r} of type str.{hint}")


@every_optimizer
def test_a_name_has_any_case_and_hyphens(cls):
    for name in (cls.__name__, cls.__name__.lower(), name_of(cls).upper(), name_of(cls).replace("_", "-").title()):
        assert type(create_optimizer(name, Net(), 0.1, **cls.required)) is cls


def test_a_network_first_is_refused_without_printing_it():
    text = refused(TypeError, "'name' must be a str, one of", lambda: create_optimizer(Net(), "adamw"))
    assert text.endswith("but got a Cell of type Net.")


@pytest.mark.parametrize(
    "name, given, missing, got",
    [
        ("lamb", {}, ["learning_rate"], []),
        ("lamb", {"learning_rate": None, "weight_decay": 0.1}, ["learning_rate"], ["weight_decay"]),
        ("dgc_momentum", {"learning_rate": 0.1}, ["momentum", "rampup_begin_step"], ["learning_rate"]),
        ("dgc_momentum", {"momentum": 0.9}, ["learning_rate", "rampup_begin_step"], ["momentum"]),
    ],
)
def test_an_argument_without_a_default_must_be_given(name, given, missing, got):
    text = refused(TypeError, "For 'create_optimizer'", lambda: create_optimizer(name, Net(), **given))
    assert text.endswith(f"the optimizer '{name}' requires the arguments {missing}, but got {got}.")


def test_an_unknown_keyword_argument_lists_the_known_and_the_closest():
    make = create_optimizer
    refused(
        TypeError,
        r"For 'Lion', unknown keyword argument 'beta'\. Did you mean 'betas'\? It takes .*'betas'.*\]\.$",
        lambda: make("lion", Net(), beta=0.9),
    )
    refused(TypeError, r"'Lion', unknown keyword argument 'xyzzy'\. It takes .*\]\.$", lambda: Lion([], xyzzy=1))


def test_what_the_groups_are_made_of():
    make = create_optimizer
    match = "For 'create_optimizer', the argument 'network' must be a Cell or a list of Parameters, but got 'net'"
    refused(TypeError, match, lambda: make("lion", "net"))
    refused(TypeError, r"'create_optimizer', the argument 'network\[0\]' must be a Param", lambda: make("lion", [3]))
    refused(ValueError, "'network' must have trainable parameters", lambda: make("lion", []))
    refused(ValueError, "'create_optimizer', the pattern 'x'.*'no_decay'", lambda: make("lion", Net(), no_decay=["x"]))
    refused(TypeError, "'no_decay' must be a list or tuple of str", lambda: make("lion", Net(), no_decay="*.bias"))
    refused(ValueError, "'create_optimizer', the argument 'weight_decay'", lambda: make("lion", Net(), weight_decay=-1))
    groups = [{"params": Net().trainable_params()}]
    match = r"'no_decay' must be \(\) if 'network' is a list of groups, but got \['\*'\]"
    refused(ValueError, match, lambda: make("lion", groups, no_decay=["*"]))
    refused(KeyError, r"'create_optimizer', the keys of 'network\[0\]'", lambda: make("lion", [{"eps": 1}]))
    refused(TypeError, r"'create_optimizer'.*'network\[1\]' must be a dict", lambda: make("lion", [*groups, 3]))
    refused(ValueError, "'create_optimizer'.*'network' must be groups with", lambda: make("lion", [{"params": []}]))
    refused(ValueError, "listed twice in 'network'", lambda: make("lion", groups * 2))
