"""The optimizers in MindFormers' own trainer, from YAML files alone."""

import inspect
import json
import pathlib
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cases import OF_ANY_SHAPE
from harness import digest_of
from mindformers_runs import LARGEST_LOGIT, LATENT, QWEN3, merged, run_worker, write_tokens
from sources import ROOT

pytest.importorskip("mindformers", reason="MindFormers is not installed")

import mindspore as ms
import yaml
from mindformers.core.lr import build_lr
from mindformers.core.optim import build_optim
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import Parameter, Tensor, nn

import ms_optim
from ms_optim import AdamW, MultiOptimizer, Muon, Sinkhorn
from ms_optim.mindformers import registered

EXAMPLES = ROOT / "examples" / "mindformers"
# The example of an optimizer is named as its module. One of matrices alone takes no whole network.
OPTIMIZERS = {cls.__name__: cls.__module__.rpartition(".")[2] for cls in OF_ANY_SHAPE}
REGISTERED = [cls.__name__ for cls in ms_optim.OPTIMIZERS]
# Names that MindFormers and MindSpore have registered before.
TAKEN = ("AdamW", "Lamb", "AdamOffload", "Muon", "Adam", "Momentum")
FROM_YAML = pathlib.Path(ms_optim.__file__).parent / "mindformers" / "from_yaml"
OPTIMIZER = MindFormerModuleType.OPTIMIZER
STEPS, BATCH = 16, 4
LABELLED = ["input_ids", "labels"]
# What MindFormers' networks have to leave out on a CPU.
ON_CPU = {
    "context": {"device_target": "CPU"},
    "model": {"model_config": {"use_flash_attention": False, "fused_rms_norm": False, "use_rope_slice": True}},
}
ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


# ---- Runs ---------------------------------------------------------------------------------------------------------


def example(name, *changes):
    """Return an example as MindFormers reads it, to run on a CPU."""
    return merged({"base_config": str(EXAMPLES / f"{name}.yaml")}, ON_CPU, *changes)


def with_optimizer(optimizer, *changes):
    """Return the examples' network with another optimizer."""
    return example("llama", {"optimizer": optimizer}, *changes)


def train(folder, runs, columns=("input_ids",), apart=()):
    """Run configurations one after the other; return the record of each, and what was said.

    Some of what MindFormers can do it can do once in a process; those of these names are run apart.
    """
    write_tokens(folder / "tokens.mindrecord", columns, STEPS * BATCH)
    asked = {
        name: {"yaml": merged(config, {"output_dir": f"./{name}"}), "record": str(folder / f"{name}.npz")}
        for name, config in runs.items()
    }
    said = ""
    shared = [run for name, run in asked.items() if name not in apart]
    for together in filter(None, [shared, *([asked[name]] for name in apart)]):
        (folder / "runs.json").write_text(json.dumps(together))
        done = run_worker("mindformers_worker.py", folder, "runs.json")
        said += done.stdout + done.stderr
    records = {}
    for name in runs:
        assert (folder / f"{name}.npz").exists(), said[-3000:]
        records[name] = dict(np.load(folder / f"{name}.npz"))
        assert "error" not in records[name], f"{name}: {records[name]['error']}"
    return records, said


def check_same(one, other):
    """Check that two records hold the same losses at their end, and the same weights and states, to the bit."""
    last = min(len(one["losses"]), len(other["losses"]))
    np.testing.assert_array_equal(one["losses"][-last:], other["losses"][-last:])
    assert one.keys() == other.keys()
    for name in one.keys() - {"losses"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def check_near(ours, theirs):
    """Check that our AdamW went where MindFormers' went: two float32 arithmetics."""
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-6)
    compared = [name for name in theirs if name in ours and name not in ("losses", "optimizer")]
    assert len(compared) > 3 * 18, compared
    for name in compared:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-6, err_msg=name)


# Some in one process: importing MindFormers takes as long as a run.
@pytest.mark.parametrize("names", [list(OPTIMIZERS)[k::3] for k in range(3)], ids=lambda names: "-".join(names))
def test_examples_train_the_same_in_both_modes(names, tmp_path):
    runs = {}
    for name in names:
        runs[f"{name} graph"] = example(OPTIMIZERS[name])
        runs[f"{name} pynative"] = merged(example(OPTIMIZERS[name]), {"context": {"mode": 1}})
    records, said = train(tmp_path, runs)
    for name in names:
        one = records[f"{name} graph"]
        assert str(one["optimizer"]) == f"MsOptim{name}"
        assert len(one["losses"]) == STEPS
        assert one["global_step"] == STEPS
        assert one["losses"][-1] < 0.95 * one["losses"][0], name
        check_same(one, records[f"{name} pynative"])
        assert f"MsOptim{name} updates 21 parameters by the fused kernel" in said


def test_local_steps_go_around_an_optimizer(tmp_path):
    """With rate 1 and no momentum one worker goes where the optimizer inside goes."""
    adamw = {**ADAMW, "type": "MsOptimAdamW", "auto_register": "optimizers.MsOptimAdamW"}
    outer = {"every": 4, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    inner = {key: value for key, value in adamw.items() if key not in ("auto_register", "weight_decay")}
    local = {"type": "MsOptimLocalSteps", "auto_register": "optimizers.MsOptimLocalSteps", **outer, "optimizer": inner}
    local["weight_decay"] = adamw["weight_decay"]
    runs = {"alone": with_optimizer(adamw), "local": with_optimizer(local)}
    records, _ = train(tmp_path, runs)
    np.testing.assert_array_equal(records["local"]["losses"], records["alone"]["losses"])
    weights = [name for name in records["alone"] if name.startswith(("model.", "lm_head"))]
    assert len(weights) == 21
    for name in weights:
        np.testing.assert_array_equal(records["local"][name], records["alone"][name], err_msg=name)


def test_what_is_wrong_in_the_section_of_local_steps():
    params = [Parameter(Tensor(np.ones(3, np.float32)), name="w")]
    inner = {"type": "MsOptimAdamW", "betas": [0.9, 0.95]}
    made = registered.MsOptimLocalSteps(params, inner, compress={"type": "SparseTopK", "bits": 8}, learning_rate=0.1)
    assert (made.outer.compress, made.optimizer.cls_name) == (ms_optim.SparseTopK(bits=8), "MsOptimAdamW")
    for error, match, arguments in (
        (ValueError, "'optimizer' must be a section with a 'type'", {"optimizer": {"type": "Adam"}}),
        (ValueError, "key 'weight_decay': .* the outer section", {"optimizer": {**inner, "weight_decay": 0.1}}),
        (ValueError, "key 'learning_rate': .* learning rate schedule", {"optimizer": {**inner, "learning_rate": 0.1}}),
        (ValueError, "key 'lr': .* learning rate schedule", {"optimizer": {**inner, "lr": 0.1}}),
        (ValueError, "'optimizer' must be a section with a 'type'", {"optimizer": {"type": ["MsOptimAdamW"]}}),
        (ValueError, "'compress' must be a section with a 'type'", {"compress": {"type": "TopK"}}),
        (TypeError, "'compress': .*unexpected keyword argument 'k'", {"compress": {"type": "Quantized", "k": 1}}),
        (
            TypeError,
            "'outer_learning_rate' must be a number, but got the string '1e-1'",
            {"outer_learning_rate": "1e-1"},
        ),
    ):
        with pytest.raises(error, match=match):
            registered.MsOptimLocalSteps(params, **{"optimizer": inner, "learning_rate": 0.1, **arguments})


MASTERS = {"model": {"model_config": {"param_init_type": "float16"}}}
CKPT = {
    "load_ckpt_format": "ckpt",
    "callbacks": [
        {"type": "CheckpointMonitor", "prefix": "llama", "save_checkpoint_steps": 8, "checkpoint_format": "ckpt"}
    ],
}
NEWER = {"use_legacy_format": False}
CODES = {"optimizer": {"state_dtype": "8bit", "amsgrad": True}}


def at_8(run, form):
    """Return what has a run go on from the eighth step of another."""
    folder = f"./{run}/checkpoint"
    if form is CKPT:
        return {"load_checkpoint": folder, "resume_training": "llama_rank_0-1_8.ckpt"}
    return {"load_checkpoint": f"{folder}/iteration_00000008", "resume_training": True}


# What is kept, and how it is named: the example, the form of its checkpoints, and what is changed of it.
RESUMED = {
    "ckpt": ("adamw", CKPT, {}),
    "masters": ("adamw", NEWER, MASTERS),
    "codes": ("adamw", NEWER, CODES),
    "offload": ("adam_offload", NEWER, MASTERS),
    "dgc": ("dgc_momentum", NEWER, {}),
}


@pytest.mark.parametrize("names", [["ckpt", "masters"], ["codes", "offload", "dgc"]], ids=lambda names: "-".join(names))
def test_runs_resume_bit_for_bit(names, tmp_path):
    runs = {}
    for name in names:
        example_of, form, changes = RESUMED[name]
        config = example(example_of, form, changes)
        runs |= {f"{name}_whole": config, f"{name}_resumed": merged(config, at_8(f"{name}_whole", form))}
    records, _ = train(tmp_path, runs)
    for name in names:
        whole, resumed = records[f"{name}_whole"], records[f"{name}_resumed"]
        assert len(whole["losses"]) == STEPS
        assert len(resumed["losses"]) == STEPS - 8
        check_same(whole, resumed)


def test_masters_and_states_start_from_weights_that_are_loaded(tmp_path):
    """MindFormers makes the optimizer before it loads the weights: nothing may keep the random ones."""
    config = example("adamw", NEWER, MASTERS)
    (tmp_path / "first").mkdir()
    first, _ = train(tmp_path / "first", {"whole": config})
    shutil.copytree(tmp_path / "first" / "whole" / "checkpoint", tmp_path / "only")
    for path in (tmp_path / "only").rglob("*-opt-*"):
        path.unlink()
    # Another seed makes other random weights; without a learning rate those that were loaded must stay.
    still = {"seed": 1, "load_checkpoint": "./only/iteration_00000016", "lr_schedule": {"learning_rate": 0.0}}
    offload = merged({"base_config": str(EXAMPLES / "adam_offload.yaml")}, ON_CPU, NEWER, MASTERS)
    records, _ = train(tmp_path, {"adamw": merged(config, still), "adam_offload": merged(offload, still)})
    for record in records.values():
        weights = [name for name in record if name.startswith(("model.", "lm_head"))]
        assert len(weights) == 21
        for name in weights:
            np.testing.assert_array_equal(record[name], first["whole"][name], err_msg=name)
        assert record["global_step"] == STEPS


def test_adamw_goes_where_that_of_mindformers_goes(tmp_path):
    """With the same YAML but for the type, and with learning rates for groups too."""
    group = {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_steps": 2, "total_steps": -1}
    grouped = {"grouped_lr_schedule": {"default": {**group, "learning_rate": 1e-3}}}
    grouped["grouped_lr_schedule"]["grouped"] = [{**group, "params": ["*lm_head*"]}]
    ours = {"type": "MsOptimAdamW", "auto_register": "optimizers.MsOptimAdamW", **ADAMW}
    theirs = {"type": "AdamW", **ADAMW}
    runs = {
        "theirs": with_optimizer(theirs),
        "ours": with_optimizer(ours),
        "theirs_grouped": with_optimizer(theirs, grouped),
        "ours_grouped": with_optimizer(ours, grouped),
    }
    records, _ = train(tmp_path, runs, apart=("ours_grouped",))
    assert str(records["theirs"]["optimizer"]) == "AdamW"
    check_near(records["ours"], records["theirs"])
    check_near(records["ours_grouped"], records["theirs_grouped"])
    assert records["ours_grouped"]["losses"][-1] < 0.5 * records["ours"]["losses"][-1]


def test_a_step_that_overflows_is_skipped(tmp_path):
    scale = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 3e38, "scale_factor": 1024, "scale_window": 99}
    # MindFormers does not lay a section over a number, so this is one file.
    base, adamw = (yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) for name in ("llama", "adamw"))
    config = merged(base, {"optimizer": adamw["optimizer"]}, ON_CPU, {"runner_wrapper": {"scale_sense": scale}})
    records, said = train(tmp_path, {"scaled": config})
    record = records["scaled"]
    assert "overflow cond: True" in said
    skipped = said.count("overflow cond: True")
    assert record["global_step"] == STEPS - skipped
    assert np.all(np.isfinite(record["losses"]))
    assert record["losses"][-1] < 0.95 * record["losses"][0]


# On static graphs MindFormers asks for more than in PyNative mode.
ON_GRAPHS = {
    "hidden_act": "swiglu",
    "input_sliced_sig": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


def newer(name, model):
    """Return the configuration of a model of MindFormers' parallel core, which its `use_legacy: False` chooses."""
    config = merged(yaml.safe_load((EXAMPLES / "llama.yaml").read_text()), NEWER, {"use_legacy": False})
    config["model"] = {"model_config": {**model, **ON_GRAPHS, "architectures": [f"{name}ForCausalLM"]}}
    config["trainer"]["model_name"] = name
    config["context"]["device_target"] = "CPU"
    for section in (config["train_dataset"], config["train_dataset_task"]["dataset_config"]):
        section |= {"input_columns": LABELLED, "construct_args_key": LABELLED}
    return config


def test_newer_models_train_and_resume(tmp_path):
    config = newer("Qwen3", QWEN3)
    ours = merged(config, {"optimizer": yaml.safe_load((EXAMPLES / "adamw.yaml").read_text())["optimizer"]})
    plain = {"type": "MsOptimAdamW", "auto_register": "optimizers.MsOptimAdamW", **ADAMW}
    runs = {
        "whole": ours,
        "resumed": merged(ours, at_8("whole", NEWER)),
        "plain": merged(config, {"optimizer": plain}),
        "theirs": merged(config, {"optimizer": {"type": "AdamW", **ADAMW}}),
    }
    records, _ = train(tmp_path, runs, LABELLED, apart=runs)
    assert str(records["whole"]["optimizer"]) == "MsOptimAdamW"
    assert records["whole"]["losses"][-1] < records["whole"]["losses"][0]
    check_same(records["whole"], records["resumed"])
    check_near(records["plain"], records["theirs"])


def test_muon_clips_attention_as_that_of_mindformers(tmp_path):
    """By the type to which alone MindFormers gives the model; the clips alone move the weights."""
    config = newer("DeepseekV3", {**LATENT, "mla_qkv_concat": False})
    config["lr_schedule"]["learning_rate"] = 0.0
    section = {"type": "Muon", "weight_decay": 0.1, "qk_clip_threshold": LARGEST_LOGIT}
    runs = {"theirs": {**config, "optimizer": section}}
    runs["ours"] = merged(runs["theirs"], {"optimizer": {"auto_register": "optimizers.Muon"}})
    runs["going_on"] = merged(runs["ours"], at_8("theirs", NEWER))
    records, said = train(tmp_path, runs, LABELLED, apart=runs)
    ours, theirs = records["ours"], records["theirs"]
    assert "ms_optim: Muon updates 21 parameters by the fused kernel" in said
    assert not any(".placeholder." in name for name in ours)
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-6)
    weights = [name for name in ours if name.startswith(("decoder.", "embedding.", "output_layer."))]
    assert len(weights) == 21
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-9, err_msg=name)
    going_on = records["going_on"]
    np.testing.assert_allclose(going_on["losses"], theirs["losses"][8:], rtol=1e-6)
    states = [name for name in going_on if name.startswith(("muon_m.", "adam_"))]
    assert len(states) == 14 + 2 * 7
    for name in states:
        assert np.abs(going_on[name] - theirs[name]).max() < 1e-3 * np.abs(theirs[name]).max(), name
    # Both are drawn alike.
    clipped, free = (np.abs(ours[f"decoder.layers.0.self_attention.linear_q_{p}_proj.weight"]) for p in ("up", "down"))
    assert clipped.mean() < 0.7 * free.mean()


class Mean(nn.Cell):
    """The mean square of what a layer makes of a batch."""

    def __init__(self):
        super().__init__()
        weight = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
        self.layer = nn.Dense(8, 3, weight_init=Tensor(weight), bias_init="zeros")

    def construct(self, x):
        return (self.layer(x) ** 2).mean()


def unchecked(self, before, compute):
    return ms.ops.zeros((8,), ms.int32), compute


def never(self, status, gradients):
    return ms.ops.zeros((), ms.bool_)


@pytest.fixture
def train_cell(monkeypatch):
    """The cell that MindFormers' trainer trains, in Graph mode and without its checks of overflow."""
    monkeypatch.setattr(MFTrainOneStepCell, "start_overflow_check", unchecked)
    monkeypatch.setattr(MFTrainOneStepCell, "get_overflow_status", never)
    monkeypatch.setattr("mindformers.wrapper.wrapper.is_legacy_model", lambda: True)
    monkeypatch.setattr("mindformers.wrapper.wrapper.get_real_models", lambda network: network)
    ms.set_context(mode=ms.GRAPH_MODE)
    return MFTrainOneStepCell


def test_gradients_that_mindformers_accumulates(train_cell):
    """Its trainer accumulates in semi-auto-parallel mode alone; this is the cell that it then trains."""
    x = Tensor(np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32))
    weights = []
    for accumulate in (False, True):
        net = Mean()
        optimizer = registered.MsOptimAdamW(net.trainable_params(), learning_rate=0.1, weight_decay=0.1)
        loss = nn.GradAccumulationCell(net, 3) if accumulate else net
        step = train_cell(loss, optimizer, use_clip_grad=False)
        step.set_train()
        for _ in range(4):
            step(x)
        assert int(optimizer.global_step.asnumpy()[0]) == 4
        weights.append(net.layer.weight.asnumpy())
    # The sum of three means instead of one mean: Adam's direction is the same.
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)


class Read(nn.Cell):
    """The mean square of what a layer makes of words."""

    def __init__(self):
        super().__init__()
        table = np.random.default_rng(2).standard_normal((10, 8)).astype(np.float32)
        self.table, self.mean = nn.Embedding(10, 8, embedding_table=Tensor(table)), Mean()

    def construct(self, words):
        return self.mean(self.table(words))


def test_several_optimizers_as_one(train_cell):
    """The cell takes the steps that calls by hand take, and tells the learning rate of the last parameter."""
    words, rate, held = Tensor([1, 7, 7, 3], ms.int32), nn.CosineDecayLR(0.01, 0.1, 10), []
    for is_cell in (False, True):
        net = Read()
        parts = [Muon([net.mean.layer.weight], 0.2), Sinkhorn(net.table.trainable_params(), rate)]
        optimizer = MultiOptimizer([*parts, AdamW([net.mean.layer.bias], rate)], grad_clip_norm=0.5)
        grad = ms.value_and_grad(net, None, optimizer.parameters)
        step = train_cell(net, optimizer, use_clip_grad=False)
        for k in range(2):
            if is_cell:
                assert float(step(words)[3].asnumpy()) == float(rate(Tensor(k, ms.int32)).asnumpy())
            else:
                optimizer(grad(words)[1])
        held.append(digest_of(optimizer))
    assert held[0] == held[1]


# ---- What a configuration says ------------------------------------------------------------------------------------


def params():
    weight = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return [Parameter(Tensor(weight), name="w"), Parameter(Tensor(weight[0]), name="b")]


def groups(weight_decay=0.1):
    """Return groups as MindFormers makes them."""
    w, b = params()
    return [{"params": [w], "weight_decay": weight_decay}, {"params": [b], "weight_decay": 0.0}]


def build(name="AdamW", given=None, **config):
    return build_optim(
        {"type": f"MsOptim{name}", **getattr(ms_optim, name).required, **config},
        default_args={"params": given or groups(), "learning_rate": nn.CosineDecayLR(0.0, 0.1, 10)},
    )


def test_all_are_registered_and_names_that_are_taken_stay():
    for name in REGISTERED:
        assert MindFormerRegister.get_cls(OPTIMIZER, f"MsOptim{name}") is getattr(registered, f"MsOptim{name}")
    for name in {*REGISTERED} - {*TAKEN}:
        assert MindFormerRegister.get_cls(OPTIMIZER, name) is getattr(registered, f"MsOptim{name}")
    for name in TAKEN:
        assert not MindFormerRegister.get_cls(OPTIMIZER, name).__module__.startswith("ms_optim")


def test_every_class_is_found_by_its_name():
    """In the module, by an import of everything, and in the file that MindFormers copies."""
    names = {f"MsOptim{name}" for name in (*REGISTERED, "LocalSteps")}
    assert set(ms_optim.mindformers.__all__) == {"register", *names}
    copied = runpy.run_path(str(FROM_YAML / "optimizers.py"))
    for name in names:
        cls = getattr(ms_optim.mindformers, name)
        assert copied[name] is cls
        assert (cls.__name__, cls.__module__) == (name, "ms_optim.mindformers")
    with pytest.raises(AttributeError, match=r"'ms_optim\.mindformers' has no attribute 'MsOptimSGD'"):
        _ = ms_optim.mindformers.MsOptimSGD


def test_registered_twice_nothing_changes():
    before = dict(MindFormerRegister.registry[OPTIMIZER])
    registered.register()
    assert MindFormerRegister.registry[OPTIMIZER] == before


@pytest.mark.parametrize("use_fused", [{}, {"use_fused": True}, {"use_fused": False}])
def test_override_takes_all_names(use_fused, monkeypatch):
    monkeypatch.setitem(MindFormerRegister.registry, OPTIMIZER, dict(MindFormerRegister.registry[OPTIMIZER]))
    registered.register(override=True)
    for name in OPTIMIZERS:
        assert MindFormerRegister.get_cls(OPTIMIZER, name) is getattr(registered, f"MsOptim{name}")
    arguments = {"params": groups(), "learning_rate": 0.1}
    assert isinstance(build_optim({"type": "AdamW", **use_fused}, arguments), registered.MsOptimAdamW)


def test_the_command_prints_the_folder_alone():
    command = [sys.executable, "-m", "ms_optim", "mindformers-path"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = said.splitlines()
    assert (pathlib.Path(line) / "optimizers.py").exists()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_unknown_key_lists_the_known_ones(name):
    with pytest.raises(
        TypeError, match=r"unknown keyword argument 'beta3'.*'grad_centralization'.*'weight_decay_schedule'"
    ) as error:
        build(name, beta3=0.9)
    own = [key for key in inspect.signature(getattr(ms_optim, name)).parameters if key not in ("params", "shared")]
    for key in (*own, "state_dtype"):
        assert f"'{key}'" in str(error.value)
    assert "'params'" not in str(error.value)


def test_every_key_that_is_listed_is_taken():
    with pytest.raises(TypeError) as error:
        build("AdamW", beta3=0.9)
    listed = str(error.value).split("It takes [")[1].split("]")[0].replace("'", "").split(", ")
    given = {
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "weight_decay_schedule": {"type": "ConstantWeightDecay"},
        "grad_centralization": True,
        "amsgrad": True,
        "maximize": True,
        "use_fused": True,
        "bias_correction": False,
        "loss_scale": 2.0,
        "grad_clip_norm": 1.0,
        "state_dtype": "float32",
        "master_weights": False,
        "stochastic_rounding": False,
        "skip_nonfinite": True,
        "backend": "aot",
        "shard_states": False,
        "offload": True,
        "decay": "cautious",
        "average_decay": 0.99,
        "weight_norm": None,
        "average_warmup": True,
    }
    assert set(listed) == {*given, "learning_rate"}
    optimizer = build("AdamW", **given)
    assert optimizer.amsgrad
    assert optimizer.maximize
    assert optimizer.options.skip_nonfinite
    assert optimizer.options.offload
    assert optimizer.loss_scale == 2.0
    assert optimizer.grad_centralization_flags == (True, True)


def test_muon_takes_the_keys_of_mindformers_own_and_splits():
    text = """
        weight_decay: 0.1
        matched_adamw_rms: 0.3
        momentum: 0.9
        nesterov: False
        ns_steps: 4
        adamw_betas: [0.9, 0.99]
        adamw_eps: 1.0e-7
        splits:
          "*w*": [[1, 1], 2]
    """
    matrix = Parameter(Tensor(np.ones((4, 3)), ms.float32), name="layer.wqkv.weight")
    bias = Parameter(Tensor(np.ones(4), ms.float32), name="layer.bias")
    optimizer = build(
        "Muon",
        [{"params": [matrix], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}],
        **yaml.safe_load(text),
    )
    assert {p.name.partition(".")[0] for p in optimizer.states} == {"muon_m", "adam_m", "adam_v"}
    assert (optimizer.matched_adamw_rms, optimizer.momentum, optimizer.nesterov) == (0.3, 0.9, False)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.99, 1e-7)
    assert len(optimizer.rule.iterations) == 4
    text = """
        ns_coefficients: deepseek_v4
        splits:
          "*w*": {heads: 2, rows: [1, 1]}
    """
    optimizer = build("Muon", [{"params": [matrix], "weight_decay": 0.1}], **yaml.safe_load(text))
    assert len(optimizer.rule.iterations) == 10
    assert [made.rows for made in optimizer._layout.matrices(0)] == [1, 1, 1, 1]
    with pytest.raises(
        ValueError, match=r"'qk_clip_threshold' needs the model.*'type: Muon' and 'auto_register: optimiz"
    ):
        build("Muon", qk_clip_threshold=100)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 8, 12)], ids=str)
def test_muon_goes_where_that_of_mindformers_goes(shape, monkeypatch):
    """By the step of its Muon on one tensor; there is no product of bfloat16 numbers on a CPU, so in float32."""
    theirs = pytest.importorskip("mindformers.core.optim.muon")
    monkeypatch.setattr(theirs, "mstype", SimpleNamespace(float32=ms.float32, bfloat16=ms.float32))
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape).astype(np.float32)
    ours, other = (Parameter(Tensor(start), name="w") for _ in range(2))
    momentum = Parameter(Tensor(np.zeros_like(start)), name="muon_m.w")
    optimizer = ms_optim.Muon([ours], 0.02, weight_decay=0.1)
    for _ in range(5):
        g = Tensor(rng.standard_normal(shape).astype(np.float32))
        optimizer((g,))
        rate, rms, beta = (Tensor([x], ms.float32) for x in (0.02, 0.2, 0.95))
        whole = {"muon_split_fn": lambda name, x: [x], "muon_merge_fn": lambda name, parts: parts[0]}
        alone = {"op": 1, "tp": 1, "tp_dim": -1, "rank_id": 0, "op_group": "", "tp_group": ""}
        theirs._apply_muon_update(g, momentum, beta, True, other, rate, 0.1, rms, param_name="w", **whole, **alone)
    moved = np.linalg.norm(other.asnumpy() - start)
    # Five iterations multiply the rounding of a small singular value by 485.
    assert np.linalg.norm(ours.asnumpy() - other.asnumpy()) < 485 * 2.0**-24 * moved
    np.testing.assert_allclose(optimizer.states[0].asnumpy(), momentum.asnumpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key, value", [("eps", "1e-8"), ("betas", ["9e-1", 0.99]), ("eps", "0.1")])
def test_a_number_that_yaml_takes_for_a_string(key, value):
    with pytest.raises(TypeError, match=f"'{key}' must be a number.*unless it has a point"):
        build(**{key: value})


def test_the_log_says_why_no_kernel_runs(monkeypatch):
    said = []
    monkeypatch.setattr(registered.logger, "info", lambda text, *values: said.append(text % values))
    build("AdamW", use_fused=False)
    assert "by MindSpore's operators, because backend='composite' was asked for; its states (float32) take" in said[-1]


def test_learning_rates():
    config = {"type": "WarmUpHoldDecayLR", "learning_rate": 0.1, "warmup_steps": 2, "hold_steps": 3, "total_steps": 10}
    rate = build_lr(config)
    assert isinstance(rate, ms_optim.WarmUpHoldDecayLR)
    assert float(rate(Tensor(1, ms.int32)).asnumpy()) == pytest.approx(0.05)
    cooldown = build_lr({**config, "decay": "1-sqrt"})
    assert float(cooldown(Tensor(6, ms.int32)).asnumpy()) == pytest.approx(0.1 * (1 - 0.2**0.5))
    rate = build_lr({"type": "PowerCoolLR", "learning_rate": 0.1, "coefficient": 0.01, "total_steps": 10})
    assert float(rate(Tensor(8, ms.int32)).asnumpy()) == pytest.approx(0.01 * 2**1.2)
    files = runpy.run_path(str(FROM_YAML / "optimizers.py"))
    assert [inspect.isclass(files[name]) for name in ("WarmUpHoldDecayLR", "PowerCoolLR")] == [True, True]


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({"type": "CosineWithWarmUpLR", "lr_end": 0.01}, {"end_learning_rate": 0.01, "decay": "cosine"}),
        ({"type": "LinearWithWarmUpLR"}, {}),
        ({"type": "PolynomialWithWarmUpLR", "lr_end": 0.01, "power": 2.0}, {"end_learning_rate": 0.01, "power": 2.0}),
        ({"type": "ConstantWarmUpLR"}, {"decay": "constant"}),
        (
            {"type": "WarmUpStableDecayLR", "lr_end": 0.01, "decay_start_steps": 12},
            {"end_learning_rate": 0.01, "hold_steps": 7},
        ),
    ],
    ids=lambda config: config.get("type"),
)
def test_learning_rates_that_the_page_on_schedules_translates(theirs, ours):
    """The trainer adds `total_steps` to each of them."""
    shared = {"learning_rate": 0.1, "warmup_steps": 5, "total_steps": 20}
    their_rate = build_lr({**shared, "warmup_lr_init": 0.02, **theirs})
    our_rate = build_lr({**shared, "type": "WarmUpHoldDecayLR", "start_learning_rate": 0.02, **ours})
    for t in range(21):
        values = [float(rate(Tensor(t, ms.int32)).asnumpy()) for rate in (our_rate, their_rate)]
        # Theirs compute in float32, and a difference loses digits near the end.
        assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-8), t


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_starts_from_the_weight_decay(name):
    schedule = {"type": "LinearWeightDecay", "end_weight_decay": 0.0, "decay_steps": 10}
    optimizer = build(name, weight_decay=0.1, weight_decay_schedule=schedule)
    matrix, bias = optimizer.weight_decay
    assert isinstance(matrix, ms_optim.LinearWeightDecay)
    assert not isinstance(bias, nn.Cell)
    assert float(bias.asnumpy()) == 0.0
    assert float(matrix(Tensor(5, ms.int32)).asnumpy()) == pytest.approx(0.05)


def test_a_schedule_may_say_where_it_starts():
    schedule = {"type": "CosineWeightDecay", "min_weight_decay": 0.0, "max_weight_decay": 0.4, "decay_steps": 10}
    matrix, _ = build(weight_decay=0.1, weight_decay_schedule=schedule).weight_decay
    assert float(matrix(Tensor(0, ms.int32)).asnumpy()) == pytest.approx(0.4)
    schedule = {"type": "PiecewiseConstantWeightDecay", "milestone": [2, 4], "weight_decays": [0.3, 0.2]}
    matrix, _ = build(weight_decay=0.1, weight_decay_schedule=schedule).weight_decay
    assert float(matrix(Tensor(3, ms.int32)).asnumpy()) == pytest.approx(0.2)


def test_schedules_are_those_of_the_package():
    public = [getattr(ms_optim, name) for name in ms_optim.__all__ if name.endswith("WeightDecay")]
    assert {cls.__name__ for cls in public} == registered.SCHEDULES.keys()


@pytest.mark.parametrize(
    "schedule, error, match",
    [
        (0.1, ValueError, "'weight_decay_schedule' must be a dict with a 'type' of"),
        ({"type": "Linear"}, ValueError, "'LinearWeightDecay'.*but got 'Linear'"),
        ({"type": "LinearWeightDecay"}, TypeError, "'weight_decay_schedule': .*'decay_steps'"),
        ({"type": "LinearWeightDecay", "steps": 3}, TypeError, "unexpected keyword argument 'steps'"),
        ({"type": "ConstantWeightDecay", "weight_decay": "1e-2"}, TypeError, "must be a number"),
        ({"type": "ConstantWeightDecay", "weight_decay": -1.0}, ValueError, "weight_decay"),
    ],
)
def test_a_wrong_schedule(schedule, error, match):
    with pytest.raises(error, match=match):
        build(weight_decay=0.1, weight_decay_schedule=schedule)


@pytest.mark.parametrize("weight_decay", [{}, {"weight_decay": 0.0}, {"weight_decay": None}])
def test_a_schedule_beside_no_weight_decay(weight_decay):
    schedule = {"type": "LinearWeightDecay", "end_weight_decay": 0.0, "decay_steps": 10}
    with pytest.raises(ValueError, match="'weight_decay' must be greater than 0 with 'weight_decay_schedule'"):
        build(given=groups(0.0), weight_decay_schedule=schedule, **weight_decay)


def test_no_weight_decay_is_none():
    optimizer = build(given=groups(0.0), weight_decay=None)
    assert [float(decay.asnumpy()) for decay in optimizer.weight_decay] == [0.0, 0.0]


# ---- MindFormers' own test of its AdamW ---------------------------------------------------------------------------

# Its weights before the first step, and the moments that its test expects after 20: all rows of fc1 are constant.
FC1 = [
    [0.72346634, 0.95608497, 0.4084163, 0.18627149, 0.6942514, 0.39767185, 0.24918061, 0.4548748],
    [0.7203382, 0.19086994, 0.76286614, 0.87920564, 0.3169892, 0.9462494, 0.62827677, 0.27504718],
    [0.3544535, 0.2524781, 0.5370583, 0.8313121, 0.6670143, 0.0488653, 0.62225235, 0.7546456],
    [0.17985944, 0.05106374, 0.31064633, 0.4863033, 0.848814, 0.5523157, 0.20295663, 0.7213356],
]
FC1_BIAS = [0.79708564, 0.13728078, 0.66322654, 0.88128525]
FC2, FC2_BIAS = [[0.8473515, 0.50923985, 0.42287776, 0.29769543]], [0.09996348]
FIRST_MOMENTS = [[0.75276935], [0.28740492], [0.12561864], [-0.06905057]], [[6.978479, 7.470356, 5.508465, 5.176325]]
SECOND_MOMENTS = (
    [[0.28913346], [0.01420226], [0.00199351], [0.04521008]],
    [[35.217834, 42.283375, 26.52298, 21.510029]],
)


class TwoLayers(nn.Cell):
    def __init__(self):
        super().__init__()
        (self.fc1, self.fc2), self.relu = (nn.Dense(8, 4), nn.Dense(4, 1)), nn.ReLU()
        for layer, weight, bias in ((self.fc1, FC1, FC1_BIAS), (self.fc2, FC2, FC2_BIAS)):
            layer.weight.set_data(Tensor(weight, ms.float32))
            layer.bias.set_data(Tensor(bias, ms.float32))

    def construct(self, x):
        return self.fc2(self.relu(self.fc1(x)))


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_published_values_of_adamw(mode):
    ms.set_context(mode=mode)
    loss = nn.WithLossCell(TwoLayers(), nn.L1Loss())
    first = [p for p in loss.trainable_params() if "fc1" in p.name]
    others = [p for p in loss.trainable_params() if "fc1" not in p.name]
    given = [{"params": first, "weight_decay": 0.01, "lr": 0.01}, {"params": others, "lr": 0.1}]
    optimizer = build_optim({"type": "MsOptimAdamW", "weight_decay": 0.1, "params": given})
    step = nn.TrainOneStepCell(loss, optimizer)
    for i in range(20):
        step(Tensor(np.full((2, 8), i, np.float32)), Tensor(np.full((2, 1), i + 1, np.float32)))
    m, v = optimizer.states[:4], optimizer.states[4:]
    # What it computes with for 1 - beta2, in float32, is off by 1.3e-5, and its second moments with it; ours are not.
    rounded = float(np.float32(1) - np.float32(0.999))
    for place, layer in ((0, 0), (2, 1)):
        expected = np.array(FIRST_MOMENTS[layer]), np.array(SECOND_MOMENTS[layer]) * (0.001 / rounded)
        for state, value in zip((m[place], v[place]), expected):
            assert np.allclose(state.asnumpy(), value, atol=1e-4), (state.asnumpy(), value)
