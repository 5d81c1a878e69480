"""Recipes: that each is the optimizer with the numbers that its source states, and says what it does."""

import re

import numpy as np
import pytest
from harness import numbers, tensor
from mindspore import nn
from sources import ROOT

from ms_optim import AdEMAMix, MultiOptimizer, Muon, Sinkhorn, heads, no_decay_groups, recipe
from ms_optim.recipes import RECIPES


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8, embedding_table=tensor(np.sin(np.arange(160.0)).reshape(20, 8), "float32"))
        self.q_proj, self.k_proj, self.norm = nn.Dense(8, 8), nn.Dense(8, 4), nn.LayerNorm((8,))
        self.head = nn.Dense(8, 20, has_bias=False)
        for k, p in enumerate(self.get_parameters()):
            p.set_data(tensor(np.sin(k + np.arange(float(p.size))).reshape(p.shape), "float32"))


NAMES = {"embeddings": "table*", "head": "head.weight"}
# The numbers of the sources, once more.
OF_MUON = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
JORDAN = (3.4445, -4.7750, 2.0315)
EXPECTED = {
    "kimi-k2": {**OF_MUON, "matched_adamw_rms": 0.2, "adamw_betas": (0.95, 0.95), "adamw_eps": 1e-8},
    "glm-4.5": {**OF_MUON, "matched_adamw_rms": 0.2, "adamw_betas": (0.95, 0.95), "adamw_eps": 1e-8},
    "deepseek-v4": {
        **OF_MUON,
        "matched_adamw_rms": 0.18,
        "adamw_betas": (0.9, 0.95),
        "adamw_eps": 1e-20,
        "ns_coefficients": [JORDAN] * 8 + [(2.0, -1.5, 0.5)] * 2,
    },
}


def steps(optimizer, count=3):
    for k in range(count):
        optimizer(
            tuple(
                tensor(np.cos(k + np.arange(float(p.size))).reshape(p.shape), "float32") for p in optimizer.parameters
            )
        )
    return [numbers(p) for p in (*optimizer.parameters, *optimizer.states)]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_of_muon_is_muon_with_its_numbers(name):
    net = Net()
    decayed = no_decay_groups(net) if name != "deepseek-v4" else [{"params": net.trainable_params()}]
    decay = {p.name: group.get("weight_decay", 0.1) for group in decayed if "params" in group for p in group["params"]}
    groups = [{"params": [p], "weight_decay": decay[p.name]} for p in net.trainable_params()]
    expected = Muon(groups, 2e-2, adamw_names=("table*", "head*"), **EXPECTED[name])
    made = recipe(name, Net(), 2e-2, verbose=False, **NAMES)
    for ours, theirs in zip(steps(made), steps(expected)):
        np.testing.assert_array_equal(ours, theirs)


def test_deepseek_v4_1_is_three_rules_with_their_numbers():
    net = Net()
    named = {p.name: p for p in net.trainable_params()}
    tables = [named.pop("table.embedding_table"), named.pop("head.weight")]
    groups = [
        {
            "params": [p],
            "weight_decay": 0.0 if name.endswith(("bias", "beta")) else 0.1,
            "muon": name.endswith("proj.weight"),
            **({"split": heads(2 if name[0] == "q" else 1)} if name.endswith("proj.weight") else {}),
        }
        for name, p in named.items()
    ]
    muon = Muon(groups, 2e-2, state_dtype="bfloat16", **EXPECTED["deepseek-v4"])
    settings = {"momentum": 0.95, "normalizations": 11, "tau": 1e-3, "eps": 1e-20, "scale": 0.18, "weight_decay": 0.0}
    expected = MultiOptimizer([muon, Sinkhorn(tables, 2e-2, state_dtype="bfloat16", **settings)], grad_clip_norm=0.5)
    made = recipe(
        "DeepSeek-V4.1",
        Net(),
        2e-2,
        heads=2,
        key_heads=1,
        state_dtype="bfloat16",
        grad_clip_norm=0.5,
        verbose=False,
        **NAMES,
    )
    assert [type(each) for each in made.optimizers] == [Muon, Sinkhorn]
    ours, theirs = ({p.name: n for p, n in zip((*o.parameters, *o.states), steps(o))} for o in (made, expected))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_scales_are_not_decayed_and_settings_of_each_rule_reach_it(capsys):
    net = Net()
    net.norm.gamma.name, net.norm.beta.name = "mix.scale", "mix.upscale"
    of_rules = {"heads": heads(2), "key_heads": 1, "sinkhorn_tau": 0.5, "momentum": 0.9, "no_decay": ["k_proj.weight"]}
    made = recipe("deepseek-v4.1", net, 1e-2, embeddings="table*", head=(), **of_rules)
    decays = {p.name: float(decay) for each in made.optimizers for p, decay in zip(each.parameters, each.weight_decay)}
    not_decayed = {"q_proj.bias", "k_proj.bias", "k_proj.weight", "mix.scale"}
    assert {name for name, decay in decays.items() if decay == 0} == not_decayed | {"table.embedding_table"}
    muon, sinkhorn = made.optimizers
    assert (muon.momentum, sinkhorn.momentum, sinkhorn.tau) == (0.9, 0.95, 0.5)
    text = capsys.readouterr().out
    order = [text.index(word) for word in ("Muon:\n", "q_proj", "Sinkhorn:\n", "table.embedding_table")]
    assert order == sorted(order)
    assert "sinkhorn_tau = 0.5 (given; published: 0.001)" in text
    assert "adamw_betas = (0.9, 0.95) (our choice)" in text


def test_apertus_is_ademamix_with_its_numbers():
    settings = {"betas": (0.9, 0.999, 0.9999), "alpha": 8.0, "warmup_steps": 100_000, "grad_clip_norm": 0.1}
    expected = AdEMAMix(no_decay_groups(Net()), 1e-2, weight_decay=0.1, eps=1e-8, **settings)
    for ours, theirs in zip(steps(recipe("Apertus", Net(), 1e-2, verbose=False)), steps(expected)):
        np.testing.assert_array_equal(ours, theirs)


def test_every_number_can_be_given_and_the_text_says_so(capsys):
    made = recipe(
        "Kimi_K2", Net(), 1e-2, momentum=0.9, weight_decay=0.2, heads=2, key_heads=1, state_dtype="bfloat16", **NAMES
    )
    assert (made.momentum, made.options.state_dtype) == (0.9, "bfloat16")
    text = capsys.readouterr().out
    for line in (
        "weight_decay = 0.2 (given; published: 0.1)",
        "momentum = 0.9 (given; our choice: 0.95)",
        "matched_adamw_rms = 0.2 (published)",
        "nesterov = True (our choice)",
        "state_dtype = 'bfloat16' (given)",
        "filter_bias_and_norm = True (our choice)",
        "QKClip with threshold=100.0",
        "https://arxiv.org/abs/2507.20534",
    ):
        assert line in text, line
    assert "heads(2)" in text
    assert {len(form.matrices) for form in made._layout.forms} == {1, 2}
    everything = recipe("kimi-k2", Net(), 1e-2, filter_bias_and_norm=False, verbose=False, **NAMES)
    assert {round(float(decay), 6) for decay in everything.weight_decay} == {0.1}
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"name": "kimi-k3"}, ValueError, "'name' must be one of .* Did you mean 'kimi-k2'"),
        ({"name": 3}, TypeError, "'name' must be of type str"),
        ({"embeddings": None}, TypeError, "'embeddings' must be given"),
        ({"head": None}, TypeError, "'head' must be given"),
        ({"head": "lm_head*"}, ValueError, r"the pattern 'lm_head\*' in 'head' must match"),
        ({"adamw_names": ["table*"]}, TypeError, "'adamw_names' must be stated as 'embeddings' and 'head'"),
        ({"heads": 3}, ValueError, "'heads' must be heads that cover exactly"),
        ({"name": "apertus"}, ValueError, "'embeddings' must be None for a recipe that updates all parameters alike"),
        ({"name": "apertus", "embeddings": None, "head": None, "heads": heads(2)}, ValueError, "'heads' must be None"),
        ({"name": "deepseek-v4.1", "key_heads": 1}, TypeError, "'heads' must be given"),
        ({"name": "deepseek-v4.1", "heads": 1}, TypeError, "'key_heads' must be given"),
        (
            {"name": "deepseek-v4.1", "heads": 1, "key_heads": 1, "embeddings": (), "head": ()},
            ValueError,
            "'embeddings' must be name patterns",
        ),
        ({"name": "deepseek-v4.1", "heads": 1, "key_heads": 1, "embeddings": "norm.beta"}, ValueError, "'norm.beta'"),
        ({"name": "deepseek-v4.1", "heads": 1, "key_heads": 1, "sinkhorn_t": 1}, TypeError, "unknown keyword .* 't'"),
        ({"moment": 0.9}, TypeError, "unknown keyword argument 'moment'"),
        ({"verbose": 1}, TypeError, "'verbose' must be of type bool"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, said):
    given = {"name": "kimi-k2", "network": Net(), "learning_rate": 1e-3, **NAMES, **arguments}
    with pytest.raises(error, match=said):
        recipe(**given)


def test_the_page_has_every_recipe_with_its_source_and_numbers():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for name, made in RECIPES.items():
        row = next(line for line in page.splitlines() if f'`"{name}"`' in line)
        for address in re.findall(r"https://\S+?(?=[,\s]|$)", made.source):
            assert address in row, (name, address)
        for key, value in made.stated.items():
            assert key == "filter_bias_and_norm" or f"{key} {value!r}".replace("100000", "100,000") in row.replace(
                "`", ""
            ), (name, key)
