"""The optimizers in MindFormers 2's PyNative trainer, from its configuration alone."""

import json

import hyper_parallel_stand_in  # noqa: F401 - must come before MindFormers
import numpy as np
import pytest
from mindformers_runs import LARGEST_LOGIT, LATENT, QWEN3, merged, run_worker, write_tokens

pytest.importorskip("mindformers.pynative", reason="MindFormers 2 is not installed")

import mindspore as ms
from mindformers.pynative.config.config import OptimizerConfig
from mindformers.pynative.trainer import utils
from mindspore import Parameter, Tensor, nn

import ms_optim
from ms_optim.dtensors import in_trainer
from ms_optim.mindformers import registered

STEPS, SAVED = 6, 3
THEIRS = {
    "training": {"steps": STEPS, "local_batch_size": 4, "global_batch_size": 4, "max_norm": 0.5, "seed": 1},
    "optimizer": {"type": "AdamW", "weight_decay": 0.1},
    "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_steps": 2},
    "checkpoint": {"enable_save": False, "no_load_optim": True},
    "train_dataset": {
        "dataloader": {
            "type": "MindDataset",
            "dataset_files": ["tokens.mindrecord"],
            "column_names": ["input_ids", "labels"],
            "shuffle": False,
        },
        "num_parallel_workers": 1,
    },
    "model": {**QWEN3, "architectures": "Qwen3ForCausalLM", "hidden_act": "silu"},
}


# It brings the optimizers in from each section that MindFormers makes from its registry before the optimizer.
REGISTER = {"auto_register": "optimizers.WarmUpHoldDecayLR"}


def ours(name="MsOptimAdamW", **arguments):
    """Return a configuration with an optimizer of this package."""
    return merged(THEIRS, {"optimizer": {"type": name, **arguments}, "lr_scheduler": REGISTER})


def saving(folder):
    return {"checkpoint": {"enable_save": True, "save_path": folder, "save_interleaved_steps": SAVED, "save_max": 9}}


def loading(folder, weights_only=False):
    path = f"{folder}/iteration_{SAVED:08}"
    return {"checkpoint": {"load_path": path, "no_load_optim": weights_only}}


# How its model splits the projections.
SPLITS = {
    "*linear_qb.weight": [[8, 4], 4],
    "*linear_kvb.weight": [[8, 8], 4],
    "*linear_qkv.weight": [16, 8, 4],
    "*linear_fc1.weight": [[1, 1], 64],
}
MONITORED = {"callbacks": [{"type": "MaxLogitsMonitor"}]}


# Queries without a projection of their own. The model then splits in a way that there is not here, so that weights move
# by the clips alone.
DIRECT = {"model": {"q_lora_rank": None}, "lr_scheduler": {"learning_rate": 0.0}}


def muon(whose, *changes, **arguments):
    """Return a configuration with a Muon and latent attention."""
    splits = {} if whose == "Muon" or DIRECT in changes else {"splits": SPLITS}
    section = {"type": whose, "weight_decay": 0.1, **splits, **arguments}
    model = {**LATENT, "architectures": "DeepseekV3ForCausalLM", "hidden_act": "silu"}
    return merged({**THEIRS, "optimizer": section, "model": model}, {"lr_scheduler": REGISTER}, MONITORED, *changes)


BFLOAT16 = {"model": {"params_dtype": "bfloat16"}}
ACCUMULATED = {"training": {"global_batch_size": 8, "steps": 3}}
# Of those that take every parameter of a network.
REQUIRED = {cls.__name__: cls.required for cls in ms_optim.OPTIMIZERS if cls.dimensions is None}
LOCAL = {"every": 2, "optimizer": {"type": "MsOptimAdamW", "betas": [0.9, 0.95]}}
PAIRS = {"float32": {}, "bfloat16": BFLOAT16, "accumulated": ACCUMULATED}
RESUMED = {
    "float32": ours(),
    "bfloat16": merged(ours(), BFLOAT16),
    "8bit": merged(ours("MsOptimLion", state_dtype="8bit", master_weights="split"), BFLOAT16),
    "local steps": merged(ours("MsOptimLocalSteps", **LOCAL), BFLOAT16),
}


def asked():
    """Yield the runs, in an order in which a checkpoint is there before it is loaded."""
    for kind, changes in PAIRS.items():
        yield f"theirs {kind}", merged(THEIRS, changes, saving(f"theirs {kind}"))
    for kind, changes in PAIRS.items():
        yield f"ours {kind}", merged(ours(), changes)
    for kind, config in RESUMED.items():
        yield f"whole {kind}", merged(config, saving(f"whole {kind}"))
        yield f"resumed {kind}", merged(config, loading(f"whole {kind}"))
    for kind in ("float32", "bfloat16"):
        going_on = merged(ours(), PAIRS[kind], loading(f"theirs {kind}"))
        yield f"going on {kind}", going_on
        yield f"loaded {kind}", merged(going_on, {"training": {"steps": SAVED}})
        yield f"back {kind}", merged(THEIRS, PAIRS[kind], loading(f"whole {kind}"))
    for who, config in (("theirs", THEIRS), ("ours", ours())):
        yield f"weights to {who}", merged(config, BFLOAT16, loading("theirs bfloat16", True))
    for name, required in REQUIRED.items():
        yield name, merged(ours(f"MsOptim{name}", **required), {"training": {"steps": 3}})
    clipping = {"qk_clip_threshold": LARGEST_LOGIT}
    for whose in ("Muon", "MsOptimMuon"):
        yield f"{whose} clipping", muon(whose, saving(f"{whose} clipping"), **clipping)
        yield f"{whose} direct", muon(whose, DIRECT, **clipping)
    for other, whose in (("Muon", "MsOptimMuon"), ("MsOptimMuon", "Muon")):
        yield f"{whose} going on", muon(whose, loading(f"{other} clipping"), **clipping)
    yield "not clipped", muon("MsOptimMuon", qk_clip_enabled=False, **clipping)
    yield "not reported", {**muon("MsOptimMuon", qk_clip_enabled=True), "callbacks": []}
    yield "unknown", ours("MsOptimAdagrad")


def train(folder, configs):
    """Run configurations one after the other in one process; return the record of each."""
    write_tokens(folder / "tokens.mindrecord", ("input_ids", "labels"), 8 * STEPS)
    runs = [{"yaml": config, "record": f"{name}.npz"} for name, config in configs.items()]
    (folder / "runs.json").write_text(json.dumps(runs))
    done = run_worker("pynative_trainer_worker.py", folder, "runs.json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return {name: dict(np.load(folder / f"{name}.npz")) for name in configs}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    records = train(folder, dict(asked()))
    records["checkpoints"] = {kind: checkpoint(folder / f"theirs {kind}") for kind in ("float32", "bfloat16")}
    return records


def checkpoint(folder):
    """Return what its optimizer has saved."""
    (path,) = (folder / f"iteration_{SAVED:08}").glob("*-opt-*.safetensors")
    return {name: p.asnumpy() for name, p in ms.load_checkpoint(str(path), format="safetensors").items()}


def of(records, name):
    """Return a record without an error."""
    assert "error" not in records[name], f"{name}: {records[name]['error']}"
    return records[name]


@pytest.mark.parametrize("kind", PAIRS)
def test_losses_are_those_of_its_own_adamw(kind, records):
    one, other = of(records, f"ours {kind}"), of(records, f"theirs {kind}")
    assert (str(one["optimizer"]), str(other["optimizer"])) == ("MsOptimAdamW", "AdamW")
    assert one["losses"][-1] < 0.99 * one["losses"][0]
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=6e-6)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_resumes_to_the_bit(kind, records):
    whole, resumed = of(records, f"whole {kind}"), of(records, f"resumed {kind}")
    np.testing.assert_array_equal(resumed["losses"], whole["losses"][SAVED:])
    assert resumed.keys() == whole.keys()
    for name in whole.keys() - {"losses"}:
        np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_its_own_checkpoint_goes_on(kind, records):
    one, other = of(records, f"going on {kind}"), of(records, f"theirs {kind}")
    np.testing.assert_allclose(one["losses"], other["losses"][SAVED:], rtol=2e-6)
    assert one["global_step"] == other["global_step"] == STEPS


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_its_own_adamw_goes_on_from_here(kind, records):
    back, whole = of(records, f"back {kind}"), of(records, f"whole {kind}")
    assert str(back["optimizer"]) == "AdamW"
    np.testing.assert_allclose(back["losses"], whole["losses"][SAVED:], rtol=2e-6)
    assert back["global_step"] == STEPS
    # Moments and masters; NumPy cannot compare bfloat16 weights.
    compared = [name for name in back if name.startswith(("adam_", "main_param."))]
    assert len(compared) >= 2 * 19
    for name in compared:
        # A step moves by up to 1e-2. Some numbers are rounded to another bfloat16 one, and gradients with them.
        atol = {"float32": 2e-6, "bfloat16": 1e-4}[kind]
        np.testing.assert_allclose(back[name], whole[name], rtol=2e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_all_of_its_own_checkpoint_is_loaded(kind, records):
    """Moments, masters and the step, to the bit: nothing follows them here."""
    loaded, saved = of(records, f"loaded {kind}"), records["checkpoints"][kind]
    masters = [name for name in saved if name.startswith("main_param.")]
    assert (len(masters) > 3) == (kind == "bfloat16")
    assert len(saved) == 2 * 19 + len(masters) + 1
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


def test_weights_alone_are_loaded(records):
    one, other = of(records, "weights to ours"), of(records, "weights to theirs")
    assert one["losses"][0] == other["losses"][0] != of(records, "theirs bfloat16")["losses"][0]
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=2e-5)


@pytest.mark.parametrize("name", REQUIRED)
def test_every_optimizer_trains(name, records):
    record = of(records, name)
    assert str(record["optimizer"]) == f"MsOptim{name}"
    assert record["global_step"] == 3
    assert np.all(np.isfinite(record["losses"]))
    assert record["losses"][-1] < record["losses"][0]


def test_the_section_model_brings_the_optimizers_in_too(tmp_path):
    config = merged(THEIRS, {"optimizer": {"type": "MsOptimLion"}, "model": REGISTER, "training": {"steps": 1}})
    record = of(train(tmp_path, {"model": config}), "model")
    assert (str(record["optimizer"]), record["global_step"]) == ("MsOptimLion", 1)


def check_muons(one, other):
    """Compare two runs of Muon: losses, weights and states, each relative to its largest element."""
    np.testing.assert_allclose(one["losses"], other["losses"][-len(one["losses"]) :], rtol=2e-6)
    compared = [name for name in one if "." in name and name in other]
    assert len(compared) > 40
    for name in compared:
        assert np.abs(one[name] - other[name]).max() < 1e-4 * np.abs(other[name]).max(), name


@pytest.mark.parametrize("kind", ["clipping", "direct"])
def test_muon_clips_attention_as_that_of_the_trainer(kind, records):
    one, other = (of(records, f"{whose} {kind}") for whose in ("MsOptimMuon", "Muon"))
    assert [str(each["optimizer"]) for each in (one, other)] == ["MsOptimMuon", "Muon"]
    check_muons(one, other)


def test_a_clip_is_seen_in_the_weights(records):
    clipped, free = of(records, "MsOptimMuon clipping"), of(records, "not clipped")
    for layer in (0, 1):
        for projection in ("linear_qb", "linear_kvb"):
            name = f"decoder.layers.{layer}.self_attention.{projection}.weight"
            assert np.abs(clipped[name]).sum() < 0.9 * np.abs(free[name]).sum(), name


def test_a_model_that_reports_no_logits_is_refused_with_what_to_write(records):
    error = str(records["not reported"]["error"])
    assert "'qk_clip_threshold' needs a model that reports its largest logits" in error
    assert "'type: MaxLogitsMonitor' in the section 'callbacks'" in error


def test_muons_of_both_go_on_from_each_other(records):
    for one, other in (("Muon", "MsOptimMuon"), ("MsOptimMuon", "Muon")):
        going_on = of(records, f"{one} going on")
        assert len(going_on["losses"]) == STEPS - SAVED
        check_muons(going_on, of(records, f"{other} clipping"))


def test_an_unknown_type_is_still_an_error_of_mindformers(records):
    assert "Optimizer type MsOptimAdagrad is not implemented yet" in str(records["unknown"]["error"])


# ---- What the trainer calls, one by one -----------------------------------------------------------------------------


class Net(nn.Cell):
    """Two layers."""

    def __init__(self, dtype=ms.float32):
        super().__init__()
        self.first, self.second = nn.Dense(3, 4, dtype=dtype), nn.Dense(4, 2, dtype=dtype)


def built(net, **section):
    return utils._build_optimizer(OptimizerConfig.from_dict({"weight_decay": 0.1, **section}), [net], 0.01)


def test_groups_are_those_of_the_trainer():
    rules = {"weight_decay_include": ["second.bias"], "weight_decay_exclude": ["first.*"]}
    optimizer = built(Net(), type="MsOptimLion", **rules)
    decayed = {p.name for p, decay in zip(optimizer.parameters, optimizer.weight_decay) if float(decay.asnumpy()) > 0}
    assert decayed == {"second.weight", "second.bias"}
    assert len(optimizer.parameters) == 4


def test_what_the_trainer_always_gives_is_dropped_where_a_rule_has_none():
    assert built(Net(), type="MsOptimAdamW").rule.constants[0] == 0.9
    assert built(Net(), type="MsOptimAdEMAMix").rule.name == "ademamix"
    assert built(Net(), type="MsOptimMuon").rule.name == "muon"
    with pytest.raises(TypeError, match="'betas'"):
        built(Net(), type="MsOptimMuon", betas=[0.8, 0.9])


@pytest.mark.parametrize(
    "key, source",
    [("learning_rate", "the section 'lr_scheduler'"), ("lr", "learning rate schedule"), ("params", "network")],
)
def test_what_the_trainer_sets_itself_is_refused(key, source):
    for name in ("MsOptimAdamW", "MsOptimLocalSteps"):
        inner = {"optimizer": {"type": "MsOptimAdamW"}} if name == "MsOptimLocalSteps" else {}
        with pytest.raises(ValueError, match=f"must not have the key '{key}': MindFormers sets it, from .*{source}"):
            built(Net(), type=name, **inner, **{key: 1e-3})


def test_a_gradient_that_has_not_arrived_is_named():
    optimizer = built(Net(), type="MsOptimAdamW")
    before = [p.asnumpy().copy() for p in optimizer.parameters]
    given = [p for p in optimizer.parameters if p.name != "first.bias"]
    for p in given:
        p.grad = Tensor(np.ones(p.shape, np.float32))
    with pytest.raises(
        ValueError, match=r"every parameter must have a gradient, but 1 of 4 have none: first\.bias\. Set"
    ):
        optimizer(tuple(p.grad for p in given))
    for p, value in zip(optimizer.parameters, before):
        np.testing.assert_array_equal(p.asnumpy(), value)
    assert int(optimizer.global_step.asnumpy()[0]) == 0


@pytest.mark.parametrize("masters", [True, "split", "split8"])
def test_masters_that_a_checkpoint_has_not_changed_follow_their_weights(masters):
    weights = [Parameter(Tensor(np.ones(3), ms.bfloat16), name=name) for name in ("a", "b")]
    cls = registered.IN_TRAINER["MsOptimAdamW"]
    optimizer = cls([{"params": weights}], learning_rate=1e-3, master_weights=masters)
    optimizer(tuple(Tensor(np.ones(3), ms.float32) for _ in weights))
    names = [p.name for p in optimizer.masters]
    assert names == ([f"main_param.{p.name}" for p in weights] if masters is True else ["master.a", "master.b"])
    held = [optimizer._held.weights(i).copy() for i in range(2)]
    np.testing.assert_allclose(held[0], 0.999, rtol=1e-4)
    optimizer.save_main_params_snapshot()
    optimizer.masters[0].set_data(optimizer.masters[0] + Tensor([1], optimizer.masters[0].dtype))
    kept = optimizer.masters[0].asnumpy().copy()
    optimizer.reload_main_params_from_model()
    np.testing.assert_array_equal(optimizer.masters[0].asnumpy(), kept)
    rounded = ms.ops.cast(weights[1], ms.float32).asnumpy()
    np.testing.assert_array_equal(optimizer._held.weights(1), rounded)
    assert not np.array_equal(rounded, held[1])
    # Without a snapshot, all follow.
    weights[0].set_data(Tensor(np.full(3, 5.0), ms.bfloat16))
    optimizer.reload_main_params_from_model()
    np.testing.assert_array_equal(optimizer._held.weights(0), 5.0)


def test_a_trainer_that_has_changed_is_told_in_words(monkeypatch):
    said = []
    monkeypatch.setattr(utils, "_build_optimizer", lambda config, model: None)
    in_trainer.install({"MsOptimAdamW": object}, said.append)
    assert said == [
        "ms_optim: MindFormers' PyNative trainer does not know MsOptimAdamW, because mindformers.pynative.trainer."
        "utils._build_optimizer takes ('config', 'model') instead of ('config', 'model', 'learning_rate')."
    ]


def test_importing_twice_wraps_once():
    from mindformers.pynative.trainer import trainer

    before = utils._build_optimizer
    registered.register()
    assert utils._build_optimizer is trainer._build_optimizer is before
