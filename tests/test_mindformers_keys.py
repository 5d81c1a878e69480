"""Keys of MindFormers' own optimizers: taken with the same meaning, or refused with what to write in their place."""

import ast
import importlib.util
import pathlib

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
        ("Muon", "qk_clip_threshold", 100, "QKClip"),
        ("Muon", "qk_clip_enabled", True, "QKClip"),
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
