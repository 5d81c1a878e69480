"""Runs that go on with another optimizer: from MindFormers' own to this package's of the same rule, and back.

Its optimizers are those of the installed MindFormers. What they call on Ascend alone is stated here: the operator
AdamW, and the iterations of Muon in the PyNative trainer.
"""

import ast
import json
import sys
from types import SimpleNamespace

import hyper_parallel_stand_in  # noqa: F401 - must come before MindFormers
import mindspore as ms
import numpy as np
import pytest
import reference
from harness import check_close
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.ops import functional as F  # noqa: N812
from refusals import refused
from tolerances import ORTHOGONAL, TOLERANCE

pytest.importorskip("mindformers.pynative", reason="MindFormers 2 is not installed")

from mindformers.checkpoint.checkpoint import CommonInfo, load_checkpoint, save_checkpoint
from mindformers.core.optim import muon as static_muon
from mindformers.core.optim.adamw import AdamW
from mindformers.core.optim.came import Came
from mindformers.core.optim.fused_adamw import FusedAdamW
from mindformers.core.optim.fused_pma_adamw import FusedPmaAdamW
from mindformers.core.optim.pma_adamw import PmaAdamW
from mindformers.pynative.optimizer import adamw as trainer_adamw
from mindformers.pynative.optimizer import muon as trainer_muon

import ms_optim
from ms_optim import from_mindformers, to_mindformers
from ms_optim.__main__ import main
from ms_optim.checkpoints.mindformers import FUSED_PYNATIVE, kind_of, names_here
from ms_optim.checkpoints.mindformers_folder import convert
from ms_optim.cli.mindformers_checkpoint import TO

BEFORE, AFTER = 3, 3
RATE, DECAY, BETAS = 0.01, 0.1, (0.9, 0.95)
# The bias has one element, as placeholders have.
SHAPES = {"decoder.weight": (6, 4), "embedding.weight": (5, 3), "decoder.bias": (1,)}
# MindFormers takes 1 - beta2 in float32, which is off by 1.2e-6 for 0.95.
OF_STATES = TOLERANCE["state"] + 2e-6


def adamw_operator(w, m, v, largest, g, step, rate, beta1, beta2, decay, eps, amsgrad, maximize):
    """Do what Ascend's operator AdamW does to its inputs, by its documentation; it counts steps from 0.

    Without amsgrad, MindFormers gives it v for the largest one.
    """
    t = F.cast(step, ms.float32) + 1
    F.assign(m, beta1 * m + (1 - beta1) * g)
    F.assign(v, beta2 * v + (1 - beta2) * g * g)
    F.assign(largest, ops.maximum(largest, v))
    direction = (m / (1 - beta1**t)) / (F.sqrt(largest / (1 - beta2**t)) + eps)
    F.assign(w, w * (1 - rate * decay) - rate * direction)
    return True


def iterated(x, rows, columns, eps, steps, coefficients, product):
    return Tensor(reference.muon.orthogonalized(x.asnumpy().astype(np.float64), coefficients).astype(np.float32))


def is_matrix(parameter):
    return len(parameter.shape) == 2 and "embedding" not in parameter.name


def whole(name, x):
    return [x]


def joined(name, parts):
    return parts[0]


class Model:
    """What MindFormers' Muon asks a model with latent attention."""

    def get_gpt_transformer_config(self):
        return SimpleNamespace(multi_latent_attention=True, tensor_model_parallel_size=1, data_parallel_size=1)

    def make_model_muon_fns(self):
        return whole, joined

    def get_param_layer_indices(self, parameters):
        return (0,) * len(parameters)

    def get_muon_filter(self):
        return is_matrix

    def get_tp_dims(self, parameters):
        return (-1,) * len(parameters)

    def get_op_groups_info(self, parameters, size):
        return (1,) * len(parameters), ("",) * len(parameters)

    def apply_qk_clip_scaling(self, *_):
        return []


ADAMW = {"betas": BETAS}
MUON = {"model": Model(), "adamw_betas": BETAS}
FUSED_OPT = {**ADAMW, "enable_fused_opt": True}
TRAINER_MUON = {**MUON, "adamw_include": ["*embedding*"]}
# Its optimizer and its arguments; the kind that goes back, None if it is not taken back; ours.
THEIRS = {
    "AdamW": (AdamW, ADAMW, "AdamW", "AdamW", {}),
    "PmaAdamW": (PmaAdamW, ADAMW, None, "AdamW", {}),
    "FusedAdamW": (FusedAdamW, ADAMW, "FusedAdamW", "AdamW", {}),
    "FusedAdamW amsgrad": (FusedAdamW, {**ADAMW, "amsgrad": True}, "FusedAdamW", "AdamW", {"amsgrad": True}),
    "trainer AdamW": (trainer_adamw.AdamW, ADAMW, "AdamW", "AdamW", {}),
    "trainer fused AdamW": (trainer_adamw.AdamW, FUSED_OPT, FUSED_PYNATIVE, "AdamW", {}),
    "trainer fused AdamW amsgrad": (
        trainer_adamw.AdamW,
        {**FUSED_OPT, "amsgrad": True},
        FUSED_PYNATIVE,
        "AdamW",
        {"amsgrad": True},
    ),
    "Muon": (static_muon.Muon, MUON, "Muon", "Muon", {}),
    "trainer Muon": (trainer_muon.Muon, TRAINER_MUON, "Muon", "Muon", {}),
}
CASES = [(kind, "float32") for kind in THEIRS]
CASES += [(kind, "bfloat16") for kind in THEIRS if kind.startswith("trainer")]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(mint, "addcmul", lambda x, a, b, *, value=1: x + value * a * b)
    for module in (static_muon, trainer_muon):
        monkeypatch.setattr(module, "get_rank", lambda: 0)
    monkeypatch.setattr(static_muon, "is_legacy_model", lambda: False)
    monkeypatch.setattr(static_muon, "create_group", lambda name, ranks: None)
    # A CPU has no product of bfloat16 numbers.
    monkeypatch.setattr(static_muon, "mstype", SimpleNamespace(float32=ms.float32, bfloat16=ms.float32))
    monkeypatch.setattr(trainer_muon, "core_context", SimpleNamespace(is_legacy_model=lambda: False))
    monkeypatch.setattr(trainer_muon, "_enable_muon_cube_math_type", lambda: None)
    monkeypatch.setattr(trainer_muon, "newton_schulz", iterated)


def parameters(dtype="float32", values=None):
    drawn = np.random.default_rng(0)
    start = {name: drawn.standard_normal(shape) for name, shape in SHAPES.items()} if values is None else values
    return [Parameter(Tensor(np.float32(start[name])).astype(getattr(ms, dtype)), name=name) for name in SHAPES]


def theirs(kind, weights):
    cls, arguments, *_ = THEIRS[kind]
    ms.set_context(mode=ms.PYNATIVE_MODE if kind.startswith("trainer") else ms.GRAPH_MODE)
    made = cls(weights, learning_rate=RATE, weight_decay=DECAY, **arguments)
    if getattr(made, "fused_adamw_opt", None) is not None:
        made.fused_adamw_opt = adamw_operator
    return made


def ours(kind, weights, **more):
    *_, name, arguments = THEIRS[kind]
    betas = {"adamw_betas": BETAS} if name == "Muon" else {"betas": BETAS}
    return getattr(ms_optim, name)(weights, learning_rate=RATE, weight_decay=DECAY, **betas, **arguments, **more)


def expected(kind, dtype):
    """Return the float64 reference of a run that is not interrupted."""
    weights = [p.astype(ms.float32).asnumpy() for p in parameters(dtype)]
    constant = [lambda step: RATE] * 3, [lambda step: DECAY] * 3
    *_, name, arguments = THEIRS[kind]
    betas = {"adamw_betas": BETAS} if name == "Muon" else {"betas": BETAS}
    made = getattr(reference, name)(
        weights, *constant, [False] * 3, [dtype] * 3, names=list(SHAPES), **betas, **arguments
    )
    for g in gradients(BEFORE + AFTER):
        made.step(g)
    return made


def gradients(count):
    drawn = np.random.default_rng(1)
    return [[drawn.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()] for _ in range(count)]


def train(optimizer, steps):
    for g in steps:
        optimizer(tuple(Tensor(x) for x in g))


def as_saved(entries, path):
    """Return entries as a checkpoint's file gives them back."""
    ms.save_checkpoint([{"name": name, "data": Parameter(value)} for name, value in entries.items()], str(path))
    return ms.load_checkpoint(str(path))


def check_whole(kind, dtype, weights, found):
    """Compare weights, or their masters, and states with those of a run that is not interrupted."""
    run = expected(kind, dtype)
    for i, (name, w) in enumerate(zip(SHAPES, weights)):
        tolerance, peak = TOLERANCE["weight"], run.peak["weight"][i]
        # What an orthogonal move may be off.
        off = ORTHOGONAL * run.orthogonal_move[i]
        np.testing.assert_array_less(np.abs(w - run.masters[i]), tolerance * peak + off, err_msg=name)
        for state in run.states_of(i):
            check_close(found[f"{state}.{name}"], run.state[state][i], OF_STATES, run.peak[state][i], state)


def values_of(entries):
    return {name: (ops.cast(p, ms.float32) if p.dtype == ms.bfloat16 else p).asnumpy() for name, p in entries.items()}


def masters(entries):
    found = values_of(entries)
    return [found.get(f"main_param.{name}", found[name]) for name in SHAPES]


@pytest.mark.parametrize("kind, dtype", CASES)
def test_a_run_of_mindformers_goes_on_here(kind, dtype, tmp_path):
    first = theirs(kind, parameters(dtype))
    train(first, gradients(BEFORE))
    saved = as_saved(first.parameters_dict(), tmp_path / "theirs.ckpt")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    second = ours(kind, parameters(dtype, values_of(saved)))
    # Only amsgrad's third state shows that the trainer's fused AdamW has counted one step less.
    steps = BEFORE if kind == "trainer fused AdamW" else None
    second.load_state_dict(from_mindformers(saved, second, steps), strict=False)
    assert int(second.global_step.asnumpy()[0]) == BEFORE
    train(second, gradients(BEFORE + AFTER)[BEFORE:])
    check_whole(kind, dtype, masters(to_mindformers(second)), values_of(second.state_dict()))


@pytest.mark.parametrize("kind, dtype", [case for case in CASES if THEIRS[case[0]][2] is not None])
def test_a_run_of_this_package_goes_on_there(kind, dtype, tmp_path):
    first = ours(kind, parameters(dtype))
    train(first, gradients(BEFORE))
    saved = as_saved(to_mindformers(first, THEIRS[kind][2]), tmp_path / "ours.ckpt")
    second = theirs(kind, parameters(dtype, values_of(saved)))
    left, unknown = ms.load_param_into_net(second, saved)
    assert unknown == []
    assert all(name == "learning_rate" or ".placeholder." in name for name in left)
    train(second, gradients(BEFORE + AFTER)[BEFORE:])
    last = second.parameters_dict()
    here = names_here({name: tuple(p.shape) for name, p in last.items()}, "test")
    check_whole(kind, dtype, masters(last), values_of({here[name]: p for name, p in last.items() if name in here}))
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize("state_dtype, masters", [("8bit", "split8"), ("bfloat16", "split")])
def test_other_formats_go_there_as_float32(state_dtype, masters):
    """The states and masters are those that the run has, not rounded again."""
    drawn = np.random.default_rng(0)
    names, shape = ("a", "b"), (64, 64)
    weights = [Parameter(Tensor(drawn.standard_normal(shape), ms.bfloat16), name=name) for name in names]
    optimizer = ms_optim.AdamW(weights, 0.01, state_dtype=state_dtype, master_weights=masters)
    optimizer(tuple(Tensor(drawn.standard_normal(shape), ms.float32) for _ in names))
    found = to_mindformers(optimizer)
    assert {name for name in found if "." in name} == {
        f"{x}.{n}" for x in ("adam_m", "adam_v", "main_param") for n in names
    }
    again = ms_optim.AdamW(weights, 0.01)
    again.load_state_dict(optimizer.state_dict(), strict=False)
    for name, p in again.state_dict().items():
        if "." in name:
            there = found[name.replace("master.", "main_param.")]
            assert there.dtype == ms.float32
            np.testing.assert_array_equal(there.asnumpy(), p.asnumpy(), err_msg=name)


def test_the_placeholders_of_version_1_have_the_names_of_parameters():
    names = {"muon_m.w": (6, 4), "adam_m.w": (1,), "adam_v.w": (1,)}
    names |= {"muon_m.b": (1,), "adam_m.b": (1,), "adam_v.b": (1,), "w": (6, 4), "b": (1,)}
    assert names_here(names, "test").keys() == {"muon_m.w", "adam_m.b", "adam_v.b", "w", "b"}


def test_an_average_of_pma_is_left_out():
    for cls in (PmaAdamW, FusedPmaAdamW):
        names = cls(parameters(), learning_rate=RATE, fused_algo="sma").parameters_dict()
        here = names_here({name: tuple(p.shape) for name, p in names.items()}, "test")
        assert {here[name].partition(".")[0] for name in here if not name.startswith(("decoder", "embedding"))} == {
            "global_step",
            "learning_rate",
            "adam_m",
            "adam_v",
        }
        assert kind_of(names) == ("AdamW" if cls is PmaAdamW else "FusedAdamW")


@pytest.mark.parametrize("cls, arguments", [(Came, {}), (nn.AdaFactor, {"relative_step": False})])
def test_an_optimizer_without_a_counterpart_is_refused_by_its_name(cls, arguments):
    """Its first moments have the name of the fused AdamW's, and are something else."""
    saved = cls(parameters(), learning_rate=RATE, **arguments).parameters_dict()
    optimizer = ms_optim.AdamW(parameters())
    assert "exp_avg.decoder.weight" in saved
    with pytest.raises(ValueError, match=rf"is of {cls.__name__}, by its entry 'exp_avg_.*Load the weights alone"):
        from_mindformers(saved, optimizer)


def of_muon(**more):
    """Return entries of Muon, which updates the embedding here."""
    found = {"muon_m.decoder.weight": ops.ones((6, 4)), "muon_m.embedding.weight": ops.ones((5, 3))}
    return found | {f"{word}.decoder.bias": ops.ones(1) for word in ("adam_m", "adam_v")} | more


def test_what_is_wrong_is_named():
    step = {"global_step": Tensor([3], ms.int32)}
    adamw, muon, lion = (cls(parameters()) for cls in (ms_optim.AdamW, ms_optim.Muon, ms_optim.Lion))
    normuon = ms_optim.Muon(parameters(), normalize_rows=True)
    before = values_of(muon.state_dict())
    for error, match, call in (
        (TypeError, "'saved' must be a dict of Tensors", lambda: from_mindformers({"a": 1}, adamw)),
        (TypeError, "'optimizer' must be an optimizer of this package", lambda: from_mindformers(step, None)),
        (TypeError, "'steps' must be an int", lambda: from_mindformers(step, adamw, 1.5)),
        (ValueError, "must have the state 'adam_m.decoder.weight'. Check", lambda: from_mindformers(step, adamw)),
        (
            ValueError,
            "state 'adam_m.embedding.weight': Muon updated 'embedding.weight' there, and AdamW does here.*adamw_names",
            lambda: from_mindformers(of_muon(**step), muon),
        ),
        (ValueError, "must have the entry 'global_step', or 'steps'", lambda: from_mindformers(given(adamw), adamw)),
        (ValueError, "MindFormers must have an optimizer of the same rule.*got Lion", lambda: to_mindformers(lion)),
        (
            ValueError,
            "without normalize_rows",
            lambda: to_mindformers(normuon),
        ),
        (ValueError, r"'kind' must be one of \['AdamW', 'Muon'\] for Muon", lambda: to_mindformers(muon, "FusedAdamW")),
    ):
        refused(error, match, call)
    after = values_of(muon.state_dict())
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert int(from_mindformers(given(adamw), adamw, 7)["global_step"].asnumpy()[0]) == 7


def given(optimizer):
    return {name: value for name, value in optimizer.state_dict().items() if name != "global_step"}


# ---- Folders that the trainers write ---------------------------------------------------------------------------------


def saved_folder(folder, made, steps, shards=1):
    """Write what the trainers write for an optimizer; with several processes, each has some of the states."""
    folder.mkdir()
    own = {name: p for name, p in made.parameters_dict().items() if name not in SHAPES}
    stored = {}
    for k in range(shards):
        part = {name: p for i, (name, p) in enumerate(own.items()) if i % shards == k}
        file = f"net-opt-{k:07}-{shards:07}.safetensors"
        entries = [{"name": name, "data": p} for name, p in part.items()]
        ms.save_checkpoint(entries, str(folder / file), format="safetensors")
        stored |= {str((name, (0,))): [{"file_name": file}] for name in part}
    (folder / "common.json").write_text(json.dumps({"global_step": steps}))
    if shards > 1:
        metadata = {"state_dict_metadata": {name: {} for name in own}, "storage_data": stored}
        (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def loaded(folder):
    found = {}
    for path in folder.glob("*-opt-*.safetensors"):
        found |= ms.load_checkpoint(str(path), format="safetensors")
    return {name: p.asnumpy() for name, p in found.items()}


@pytest.fixture
def command(monkeypatch, capsys):
    """Return what runs the command and returns what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ms_optim", "mindformers-checkpoint", *map(str, arguments)])
        assert main() == 0, capsys.readouterr().err
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.parametrize("kind, to", [("FusedAdamW amsgrad", "use_fused"), ("trainer fused AdamW", "enable_fused_opt")])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_is_converted_and_back(kind, to, shards, tmp_path, command):
    made = theirs(kind, parameters())
    train(made, gradients(BEFORE))
    source = saved_folder(tmp_path / "theirs", made, BEFORE, shards)
    said = command(source, tmp_path / "ours")
    assert said.endswith(f"{tmp_path / 'ours'}: for MsOptimAdamW, after {BEFORE} steps")
    found = loaded(tmp_path / "ours")
    assert found.pop("global_step")[0] == BEFORE
    for name, there in made.parameters_dict().items():
        if name.startswith(("exp", "max", "adam")):
            word, _, rest = name.partition(".")
            here = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "max_exp_avg_sq": "adam_vhat"}.get(word, word)
            np.testing.assert_array_equal(found[f"{here}.{rest}"], there.asnumpy(), err_msg=name)
    if shards > 1:
        metadata = json.loads((tmp_path / "ours" / "metadata.json").read_text())
        files = {ast.literal_eval(key)[0]: value[0]["file_name"] for key, value in metadata["storage_data"].items()}
        assert metadata["state_dict_metadata"].keys() == files.keys() == {*found, "global_step"}
        for name, file in files.items():
            assert name in ms.load_checkpoint(str(tmp_path / "ours" / file), format="safetensors")
    command(tmp_path / "ours", tmp_path / "back", "--to", to)
    before, after = loaded(source), loaded(tmp_path / "back")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
        assert after[name].dtype == before[name].dtype


class Net(nn.Cell):
    """Has the parameters, as a trainer's network."""

    def __init__(self, values=None):
        super().__init__()
        self.held = ParameterTuple(parameters(values=values))


def saved_by_mindformers(folder, net, optimizer):
    info = CommonInfo()
    info.global_step = info.step_num = BEFORE
    info.epoch_num, info.global_batch_size = 0, 1
    save_checkpoint(BEFORE, net, optimizer, common_info=info, user_prefix="net", save_checkpoint_path=str(folder))
    return folder / f"iteration_{BEFORE:08}"


@pytest.mark.parametrize("back", [False, True])
def test_mindformers_itself_reads_a_folder_that_is_converted(back, tmp_path, command):
    kind, before, after = "FusedAdamW amsgrad", theirs, ours
    if back:
        before, after = after, before
    net, other = Net(), Net({name: np.zeros(shape) for name, shape in SHAPES.items()})
    first = before(kind, list(net.held))
    train(first, gradients(BEFORE))
    source = saved_by_mindformers(tmp_path, net, first)
    command(source, tmp_path / "new", *(["--to", "use_fused"] if back else []))
    second = after(kind, list(other.held))
    load_checkpoint(str(tmp_path / "new"), other, second)
    train(second, gradients(BEFORE + AFTER)[BEFORE:])
    last = second.parameters_dict()
    here = names_here({name: tuple(p.shape) for name, p in last.items()}, "test")
    check_whole(kind, "float32", masters(last), values_of({here[name]: p for name, p in last.items() if name in here}))
    ms.set_context(mode=ms.PYNATIVE_MODE)


def test_a_folder_that_is_not_converted_says_why(tmp_path):
    folders = {kind: saved_folder(tmp_path / kind, theirs(kind, parameters()), 0) for kind in ("AdamW", "Muon")}
    folders["Came"] = saved_folder(tmp_path / "Came", Came(parameters(), learning_rate=RATE), 0)
    # The states of small tensors are float32.
    of_both = [Parameter(ops.ones(shape), name=name) for name, shape in {"a": 4, "w": (64, 64), "z": 4}.items()]
    coded = ms_optim.AdamW(of_both, state_dtype="8bit")
    folders["8bit"] = saved_folder(tmp_path / "8bit", coded, 0)
    folders["nothing"] = tmp_path
    for name, to, match in (
        ("AdamW", "MsOptimAdamW", "has the states of AdamW, .*load it as it is"),
        ("Muon", "MsOptimAdamW", "has the states of Muon, .*load it as it is"),
        ("Muon", "use_fused", "must have float32 states of MsOptimAdamW"),
        ("8bit", "use_fused", "must have float32 states of MsOptimAdamW"),
        ("Came", "MsOptimAdamW", "is of Came"),
        ("nothing", "MsOptimAdamW", "has no file"),
    ):
        refused(ValueError, match, lambda name=name, to=to: convert(folders[name], tmp_path / "new", TO[to]))
    refused(FileExistsError, "must not exist", lambda: convert(folders["AdamW"], tmp_path / "Muon", TO["use_fused"]))
    assert not list(tmp_path.glob("new*"))
