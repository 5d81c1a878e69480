"""Keys of MindFormers' own optimizers: taken with the same meaning, or refused with what to write in their place."""

import ast
import functools
import importlib.util
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest
from harness import tensor
from mindspore import Parameter
from refusals import refused
from sources import ROOT

import ms_optim

pytest.importorskip("mindformers.tools.register", reason="MindFormers is not installed")

from mindformers.core.optim import build_optim
from mindspore import nn

import ms_optim.mindformers
from ms_optim.mindformers import attention_clip
from ms_optim.mindformers.their_keys import THEIR_KEYS

PACKAGE = pathlib.Path(importlib.util.find_spec("mindformers").origin).parent
FILES = {
    "AdamW": (
        "core/optim/adamw.py",
        "core/optim/fused_adamw.py",
        "core/optim/pma_adamw.py",
        "pynative/optimizer/adamw.py",
    ),
    "Muon": ("core/optim/muon.py", "pynative/optimizer/muon.py"),
}
FILES["AdamW"] += ("core/optim/fused_pma_adamw.py",)
MADE_BY_MINDFORMERS = {"self", "params", "learning_rate", "model"}
DEEPSEEK = [[[3.4445, -4.7750, 2.0315], 8], [[2, -1.5, 0.5], 2]]


def keys_of(path):
    """The arguments of the optimizers that a file of MindFormers defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any(
            "Optimizer" in ast.unparse(b) or "AdamW" in ast.unparse(b) for b in node.bases
        ):
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    yield from (argument.arg for argument in (*made.args.args, *made.args.kwonlyargs))


def build(name, **section):
    params = [Parameter(tensor(np.ones((4, 6)), "float32"), name=n) for n in ("embed.weight", "layer.weight")]
    cls = getattr(ms_optim.mindformers, f"MsOptim{name}")
    return cls([{"params": params, "weight_decay": 0.1}], learning_rate=0.1, **section)


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_theirs_is_known_and_on_the_page(name):
    page = (ROOT / "docs" / "mindformers.md").read_text()
    files = [PACKAGE / file for file in FILES[name] if (PACKAGE / file).exists()]
    found = {key for path in files for key in keys_of(path)} - MADE_BY_MINDFORMERS
    assert len(found) > 3
    own = set(getattr(ms_optim, name).keywords())
    for key in sorted(found):
        assert key in own or key in THEIR_KEYS[name], key
    for key in THEIR_KEYS[name]:
        assert f"`{key}`" in page, key


def test_keys_of_muon_have_their_meaning():
    optimizer = build(
        "Muon",
        ns_coefficients=DEEPSEEK,
        ns_steps=5,
        adamw_include=["*layer*"],
        ns_batch_memory_gb=0.5,
        phase0_batch_memory_gb=1,
        phase4_batch_memory_gb=4,
        comm_strategy="allgather",
        qk_clip_enabled=False,
        eps=1e-7,
    )
    expected = ms_optim.Muon([Parameter(tensor(np.ones((4, 6)), "float32"), name="a")], ns_coefficients="deepseek_v4")
    assert optimizer.rule.iterations == expected.rule.iterations
    assert optimizer.adamw_names == ("*layer*",)
    assert optimizer.max_temporary_bytes == 2**29
    plain = build("Muon", ns_coefficients=[3.4445, -4.7750, 2.0315], ns_steps=6)
    assert len(plain.rule.iterations) == 6


def test_keys_of_adamw_have_their_meaning():
    assert build("AdamW", swap=False, enable_cpu_offload=False, enable_fused_opt=True, use_fused=True).fused
    optimizer = build("AdamW", beta1=0.8, beta2=0.9)
    assert (optimizer.beta1, optimizer.beta2) == (0.8, 0.9)


@pytest.mark.parametrize(
    "name, key, value, remedy",
    [
        ("AdamW", "swap", True, "Write 'offload: True'"),
        ("AdamW", "fused_num", 10, "write 'average_decay'"),
        ("Muon", "eps", 1e-6, "remove the key"),
        ("Muon", "swap", True, "Write 'offload: True'"),
    ],
)
def test_what_is_not_available_says_what_to_write(name, key, value, remedy):
    refused(
        ValueError,
        f"'MsOptim{name}', MindFormers' key '{key}' is not available.*{remedy}",
        lambda: build(name, **{key: value}),
    )


# ---- QK-clip ---------------------------------------------------------------------------------------------------------

HEADS, NOPE, ROPE, VALUES = 2, 3, 2, 4


class Latent(nn.Cell):
    """Has the projections of latent attention, and what MindFormers' attention says of its logits."""

    def __init__(self, is_tracked=True):
        super().__init__()
        self.config = SimpleNamespace(qk_head_dim=NOPE, qk_pos_emb_head_dim=ROPE, v_head_dim=VALUES)
        self.linear_qkv = nn.Dense(6, HEADS * (NOPE + ROPE) + 7)  # queries, and what keys and values are made of
        self.linear_kvb = nn.Dense(5, HEADS * (NOPE + VALUES), has_bias=False)
        self.core_attention = nn.Cell()
        if is_tracked:
            self.core_attention.max_logits_val = Parameter(tensor(np.zeros(HEADS), "float32"), requires_grad=False)


class Model(nn.Cell):
    """Has two layers, and resets their logits as MindFormers' models do."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.CellList([Latent(**options), Latent(**options)])

    def report(self, logits):
        for layer in self.layers:
            layer.core_attention.max_logits_val.set_data(tensor(logits, "float32"))

    def reset_max_attention_logit(self):
        self.report(np.zeros(HEADS))

    def projections(self):
        found = [(layer.linear_qkv.weight, layer.linear_qkv.bias, layer.linear_kvb.weight) for layer in self.layers]
        return [[p.asnumpy().astype(np.float64) for p in of_layer] for of_layer in found]


def clipping(model, **section):
    groups = [{"params": model.trainable_params(), "weight_decay": 0.0}]
    return ms_optim.mindformers.MsOptimMuon(groups, learning_rate=0.0, model=model, **section)


def gradients(model, value):
    return tuple(tensor(np.full(p.shape, value), "float32") for p in model.trainable_params())


@pytest.mark.parametrize("section", [{"qk_clip_enabled": True}, {"qk_clip_threshold": 100}])
def test_the_attention_is_clipped_before_the_logits_are_reset(section):
    model = Model()
    optimizer, before = clipping(model, **section), model.projections()
    gamma = np.array([100 / 400, 1.0])
    of_query = np.concatenate([np.repeat([[g**0.5, g]], [NOPE, ROPE], axis=1)[0] for g in gamma])
    of_key = np.concatenate([np.repeat([[g**0.5, 1.0]], [NOPE, VALUES], axis=1)[0] for g in gamma])
    for step in range(2):
        model.report([400.0, 100.0])
        optimizer(gradients(model, 1.0))
        model.reset_max_attention_logit()
        assert model.layers[1].core_attention.max_logits_val.asnumpy().tolist() == [0, 0]
        for found, start in zip(model.projections(), before):
            rows = np.concatenate([of_query, np.ones(7)]) ** (step + 1)
            np.testing.assert_allclose(found[0], start[0] * rows[:, None], rtol=1e-6)
            np.testing.assert_allclose(found[1], start[1] * rows, rtol=1e-6)
            np.testing.assert_allclose(found[2], start[2] * of_key[:, None] ** (step + 1), rtol=1e-6)
    assert optimizer.attention_clip.callback.total == 4


def test_a_step_that_is_skipped_clips_nothing():
    model = Model()
    optimizer, before = clipping(model, qk_clip_threshold=100), model.projections()
    model.report([np.inf, 400.0])
    optimizer(gradients(model, np.inf))
    model.reset_max_attention_logit()
    for found, start in zip(model.projections(), before):
        for one, other in zip(found, start):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "section",
    [{}, {"qk_clip_threshold": None}, {"qk_clip_enabled": False, "qk_clip_threshold": 100}, {"qk_clip_enabled": None}],
    ids=str,
)
def test_without_a_threshold_nothing_is_clipped(section):
    assert clipping(Model(is_tracked=False), **section).attention_clip is None


def test_what_cannot_be_clipped_says_why(monkeypatch):
    other = Model()
    other.layers[0].linear_kvb = None
    sparse = Model()
    sparse.layers[1].use_dsa = True
    for error, match, model, section in (
        (ValueError, "needs the model, .*'auto_register: optimizers.Muon'", None, {"qk_clip_threshold": 100}),
        (ValueError, "needs a model that reports", Model(is_tracked=False), {"qk_clip_enabled": True}),
        (ValueError, "needs multi-head latent attention, but a layer is Latent", other, {"qk_clip_threshold": 100}),
        (ValueError, "needs multi-head latent attention", sparse, {"qk_clip_threshold": 100}),
        (ValueError, "'qk_clip_threshold' must be a number greater than 0", Model(), {"qk_clip_threshold": -1}),
        (TypeError, "'qk_clip_enabled' must be of type bool", Model(), {"qk_clip_enabled": 1}),
    ):
        params = [Parameter(tensor(np.ones((4, 6)), "float32"), name="w")]
        made = functools.partial(ms_optim.mindformers.MsOptimMuon, params, learning_rate=0.1, model=model)
        refused(error, match, functools.partial(made, **section))
    monkeypatch.setattr(attention_clip, "peers", lambda: SimpleNamespace(count=2))
    refused(ValueError, "needs a single process", lambda: clipping(Model(), qk_clip_threshold=100))
    refused(TypeError, "unknown keyword argument 'qk_clip_threshold'", lambda: build("AdamW", qk_clip_threshold=100))


# ---- The sections of its repository ----------------------------------------------------------------------------------

# All sections `optimizer` of the YAML files in MindFormers' repository at commit fd4deebc, of July 2025, and in how
# many files each stands; tools/mindformers_sections.py reads them.
ADAMW = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8}
OLDER = {"type": "FP32StateAdamWeightDecay", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
SECTIONS = (
    (4, ADAMW),
    (7, {**ADAMW, "weight_decay": 0.1}),
    (1, {**ADAMW, "weight_decay": 0.05}),
    (1, {**ADAMW, "weight_decay": 0.0}),
    (2, {**ADAMW, "betas": [0.9, 0.999]}),
    (6, {**ADAMW, "learning_rate": 1e-6, "weight_decay": 0.01}),
    (2, {**ADAMW, "learning_rate": 1e-6, "weight_decay": 0.1}),
    (1, {**ADAMW, "betas": [0.9, 0.999], "learning_rate": 1e-6, "weight_decay": 0.01}),
    (3, {**OLDER, "learning_rate": 5e-5}),
    (1, {**OLDER, "learning_rate": 3e-4}),
)
# Of files for its tests, which define these classes.
OF_ITS_TESTS = (
    (1, {"type": "TestAdamWeightDecay", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.05}),
    (1, {"type": "TestCommonAPI", "auto_register": "register_module_file.TestCommonAPI"}),
)
OURS = {"AdamW": "MsOptimAdamW", "FP32StateAdamWeightDecay": "MsOptimAdamW"}


@pytest.mark.parametrize(
    "section", [section for _, section in SECTIONS], ids=lambda section: str(list(section.values()))
)
def test_a_section_of_its_repository_works_with_its_type_changed(section):
    """As on static graphs: the trainer makes the groups and the learning rate."""
    decay = section.get("weight_decay", 0.0)
    groups = [
        {"params": [Parameter(tensor(np.ones((4, 6)), "float32"), name="layer.weight")], "weight_decay": decay},
        {"params": [Parameter(tensor(np.ones(4), "float32"), name="layer.bias")], "weight_decay": 0.0},
    ]
    rate = nn.CosineDecayLR(0.0, 0.1, 10)
    made = build_optim({**section, "type": OURS[section["type"]]}, {"params": groups, "learning_rate": rate})
    betas = section.get("betas") or [section["beta1"], section["beta2"]]
    assert ([made.beta1, made.beta2], made.eps) == (betas, section["eps"])
    assert [float(each.asnumpy()) for each in made.weight_decay] == [pytest.approx(decay), 0.0]
    assert made.fused


def test_the_page_says_how_many_sections_work():
    works, others = (sum(count for count, _ in part) for part in (SECTIONS, OF_ITS_TESTS))
    page = (ROOT / "docs" / "mindformers.md").read_text()
    assert f"{works} of {works + others} sections" in page
