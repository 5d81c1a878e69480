"""The plan's bytes are those that optimizers hold, once they are made."""

import itertools
import json
import math
import re

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, as_matrix
from command import refused, run
from mindspore import Parameter, Tensor, nn

from ms_optim import OPTIMIZERS, AdamOffload, AdamW, Lamb, LocalSteps, SparseTopK
from ms_optim.arguments import checks
from ms_optim.arguments.options import Options
from ms_optim.base import optimizer as base_optimizer
from ms_optim.cli.plan import NotPossibleError, plan
from ms_optim.cli.plan_arguments import UNITS, Weight, size
from ms_optim.kernels import capabilities, libraries
from ms_optim.kernels import table as kernels
from ms_optim.states import shares
from ms_optim.states.formats import FORMATS
from ms_optim.training.simulated_workers import SimulatedWorker

needs_kernel = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason="low-precision and split states need the kernel"
)

# On both sides of what is worth codes, with a last block that is full and ones that are not.
SHAPES = [(), (7,), (4095,), (4096,), (100, 50), (6, 4, 3, 3), (300, 301)]
DTYPES = ["float32", "float16", "bfloat16"]
OFFLOADED = [case for case in CASES if "offload" not in case.cls.refuses]


def shapes_for(cls):
    """Return the shapes that an optimizer takes."""
    return SHAPES if cls.dimensions is None else [as_matrix(shape) for shape in SHAPES]


def parameters(dtype, cls=AdamW):
    made = [Tensor(np.zeros(shape), getattr(ms, dtype)) for shape in shapes_for(cls)]
    return [Parameter(tensor, name=f"net.w{i}") for i, tensor in enumerate(made)]


def weights(dtype, cls=AdamW):
    return [Weight(shape, getattr(ms, dtype)) for shape in shapes_for(cls)]


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def compare(planned, optimizer):
    """Compare kind by kind, the names being those of the optimizer's attributes."""
    assert planned.weights == planned.gradients == nbytes(optimizer.parameters)
    kinds = ("states", "scales", "masters", "averages")
    for kind in kinds:
        assert getattr(planned, kind) == nbytes(getattr(optimizer, kind)), kind
    assert planned.total == planned.weights + planned.gradients + sum(getattr(planned, kind) for kind in kinds)


@needs_kernel
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_that_an_optimizer_holds(case, state_dtype, dtype, masters):
    options = Options(state_dtype=state_dtype, master_weights=masters)

    def made():
        return case.optimizer(parameters(dtype, case.cls), 0.01, state_dtype=state_dtype, master_weights=masters)

    if state_dtype != "float32" and not case.cls.rules[0].takes_low_states:
        with pytest.raises(NotPossibleError, match="float32"):
            plan(case.cls, weights(dtype, case.cls), options, "CPU")
        with pytest.raises(ValueError, match="state_dtype"):
            made()
        return
    optimizer = made()
    compare(plan(case.cls, weights(dtype, case.cls), options, "CPU"), optimizer)
    assert optimizer.fused


@needs_kernel
@pytest.mark.parametrize("split", checks.SPLIT_MASTERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_of_split_masters_are_those_that_an_optimizer_holds(case, split):
    low = "8bit" if case.cls.rules[0].takes_low_states else "float32"
    for dtype in ("float32", "bfloat16"):
        options = {"state_dtype": low, "master_weights": split}
        optimizer = case.optimizer(parameters(dtype, case.cls), 0.01, **options)
        assert (len(optimizer.masters) > 0) == (dtype == "bfloat16")
        compare(plan(case.cls, weights(dtype, case.cls), Options(**options), "CPU"), optimizer)
    with pytest.raises(NotPossibleError, match="float16"):
        plan(case.cls, weights("float16", case.cls), Options(**options), "CPU")


@needs_kernel
@pytest.mark.parametrize("state_dtype", FORMATS)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_bytes_of_sharded_states_are_those_of_the_worker_that_holds_the_most(count, state_dtype, monkeypatch):
    # What would be exchanged needs workers; what is held does not.
    monkeypatch.setattr(base_optimizer, "path_for", lambda *_: nn.Cell())
    options = {"state_dtype": state_dtype, "shard_states": True}
    made = []
    for rank in range(count):
        monkeypatch.setattr(shares, "peers", lambda rank=rank: shares.Peers(rank, count, None))
        made.append(AdamW(parameters("bfloat16"), **options))
    most = max(made, key=lambda optimizer: nbytes((*optimizer.states, *optimizer.scales, *optimizer.masters)))
    compare(plan(AdamW, weights("bfloat16"), Options(**options), "CPU", count), most)


@pytest.mark.parametrize("device", ["CPU", "GPU", "Ascend"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_and_host_are_those_of_the_offload_report(dtype, device):
    report = AdamOffload(parameters(dtype)).offload_report(device)
    planned = plan(AdamOffload, weights(dtype), Options(), device)
    assert (planned.device, planned.host) == (report.device_bytes, report.host_bytes)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", OFFLOADED, ids=lambda case: case.name)
def test_any_optimizer_is_planned_offloaded(case, dtype):
    optimizer = case.optimizer(parameters(dtype, case.cls), 0.01, state_dtype="8bit", offload=True)
    for device in capabilities.DEVICES:
        report = optimizer.offload_report(device)
        planned = plan(case.cls, weights(dtype, case.cls), Options(state_dtype="8bit", offload=True), device)
        assert (planned.device, planned.host) == (report.device_bytes, report.host_bytes)


def test_the_command_plans_offloaded():
    asked = ("--parameters", 1e6, "--dtype", "bfloat16", "--device", "GPU", "--optimizer", "AdamW", "AdamOffload")
    told = plans(*asked, "--state-dtype", "bfloat16", "--offload")
    (one,) = told["plans"]
    # Weights and gradients there; here a copy of the weights, masters and two states.
    assert (one["device"], one["host"]) == (4e6, 10e6)
    assert [refusal["optimizer"] for refusal in told["not_possible"]] == ["AdamOffload"]


def test_only_offloaded_states_leave_the_device():
    planned = plan(Lamb, weights("bfloat16"), Options(), "GPU")
    assert (planned.device, planned.host) == (planned.total, 0)


# ---- The command --------------------------------------------------------------------------------------------------


def plans(*arguments):
    status, printed = run("plan", *arguments, "--json")
    assert status == 0, printed
    return json.loads(printed)


def test_billions_of_parameters():
    asked = ("--parameters", "7e9", "--dtype", "bfloat16", "--optimizer", "AdamW")
    told = plans(*asked, "--memory", "80GB", "--master-weights", "float32")
    by_dtype = {one["state_dtype"]: one for one in told["plans"]}
    n = 7 * 10**9
    assert {one["weights"] + one["gradients"] + one["masters"] for one in told["plans"]} == {(2 + 2 + 4) * n}
    assert [by_dtype[kind]["states"] for kind in FORMATS] == [8 * n, 4 * n, 2 * n, n]
    scales = 2 * 4 * math.ceil(n / 256)
    assert [by_dtype[kind]["scales"] for kind in FORMATS] == [0, 0, scales, scales]
    assert [by_dtype[kind]["fits"] for kind in FORMATS] == [False, False, True, True]
    bare = plans(*asked, "--master-weights", "none")
    assert {one["masters"] for one in bare["plans"]} == {0}
    assert {one["fits"] for one in bare["plans"]} == {None}
    for split, each in (("split", 2), ("split8", 1)):
        told = plans(*asked, "--master-weights", split)
        assert {one["masters"] for one in told["plans"]} == {each * n}


def test_the_smallest_formats_are_listed_where_they_can_be_had():
    """Seven bytes, beside float32 masters."""

    def formats(*arguments):
        listed = plans("--parameters", "7B", "--optimizer", "AdamW", *arguments)["plans"]
        return {(one["state_dtype"], one["master_weights"]): one["total"] for one in listed}

    assert round(formats("--dtype", "bf16")["8bit", "split8"] / 7e9, 2) == 7.03
    every = [(kind, "float32") for kind in FORMATS]
    assert list(formats("--dtype", "bf16")) == [*every, ("8bit", "split8")]
    assert list(formats("--dtype", "bf16", "--state-dtype", "4bit")) == [("4bit", "float32")]
    assert list(formats("--dtype", "fp32")) == list(formats("--dtype", "fp16")) == every
    assert list(formats("--dtype", "bf16", "--device", "ascend")) == [*every, ("8bit", "split8")]
    chosen = formats("--dtype", "bf16", "--state-dtype", "int8", "--master-weights", "SPLIT", "none")
    assert list(chosen) == [("8bit", "split"), ("8bit", "none")]


@pytest.mark.parametrize(
    "given, meant",
    [
        ("--parameters 350M", "--parameters 350000000"),
        ("--parameters 1.1b", "--parameters 1100000000"),
        ("--parameters 7e9 --optimizer adamw LION", "--parameters 7B --optimizer AdamW Lion"),
        ("--parameters 7K --optimizer adam_offload", "--parameters 7000 --optimizer AdamOffload"),
        ("--parameters 7 --dtype bf16", "--parameters 7 --dtype bfloat16"),
        ("--parameters 7 --dtype FP16", "--parameters 7 --dtype float16"),
        ("--parameters 7 --state-dtype bf16", "--parameters 7 --state-dtype bfloat16"),
        ("--parameters 7 --device gpu", "--parameters 7 --device GPU"),
    ],
)
def test_numbers_and_names_as_people_write_them(given, meant):
    assert plans(*given.split()) == plans(*meant.split())


def test_a_number_of_parameters_is_matrices_to_muon():
    """Of one state each, where AdamW has two; and one for each worker, since a matrix is not cut."""
    asked = ("--parameters", 1e6 + 1, "--optimizer", "AdamW", "Muon", "--state-dtype", "float32")
    adamw, muon = plans(*asked)["plans"]
    assert (adamw["states"], muon["states"]) == (8e6 + 8, 4e6 + 4)
    adamw, muon = plans(*asked, "--workers", 4, "--shard-states", "--device", "CPU")["plans"]
    assert muon["weights"] == 4e6 + 4
    assert muon["states"] == 4 * 250_001


def test_what_an_optimizer_refuses_is_listed_with_its_reason():
    told = plans("--parameters", 1e6, "--device", "Ascend", "--state-dtype", "8bit")
    assert [one["optimizer"] for one in told["not_possible"]] == ["DGCMomentum"]
    assert all(one["reason"] for one in told["not_possible"])
    others = {optimizer.__name__ for optimizer in OPTIMIZERS} - {"DGCMomentum"}
    assert {one["optimizer"] for one in told["plans"]} == others
    status, printed = run("plan", "--parameters", 1e6, "--device", "GPU", "--shard-states", "--workers", 2)
    assert status == 0
    (told,) = [line for line in printed.splitlines() if "has different states on each worker" in line]
    assert told.startswith("Not possible: DGCMomentum with state_dtype float32: it ")
    (told,) = [line for line in printed.splitlines() if "keeps its states in float32" in line]
    assert told == "Not possible: DGCMomentum with state_dtype bfloat16, 8bit, 4bit: it keeps its states in float32."


def test_plans_that_fit_come_first():
    fits = [one["fits"] for one in plans("--parameters", 7e9, "--memory", "90GB", "--device", "CPU")["plans"]]
    assert {True, False} == set(fits)
    assert fits == sorted(fits, reverse=True)


def hinted(*arguments):
    """Return the options that are said to make something fit, having tried each."""
    status, printed = run("plan", *arguments)
    assert status == 0
    _, found, lines = printed.partition(" would with one of these:\n")
    options = [line.strip().split(": ") for line in lines.splitlines()]
    for added, named in options:
        told = plans(*arguments, *added.split())["plans"]
        assert named.split(", ") == list(dict.fromkeys(one["optimizer"] for one in told if one["fits"]))
    return found, [added for added, _ in options]


def test_where_nothing_fits_it_says_what_would():
    lion = ("--parameters", 7e9, "--optimizer", "Lion", "--device", "CPU", "--memory")
    assert hinted(*lion, "64GB", "--state-dtype", "float32")[1] == [
        "--state-dtype 8bit",
        "--dtype bfloat16 --master-weights split8",
        "--shard-states --workers 4",
    ]
    assert hinted(*lion, "60GB")[1] == []  # something fits
    ascend = ("--parameters", 7e9, "--optimizer", "AdamW", "--device", "Ascend", "--memory", "60GB")
    assert hinted(*ascend)[1][0] == "--offload"
    only = ("--parameters", "7B", "--dtype", "bf16", "--device", "Ascend", "--memory", "60GB", "--host-memory", "256GB")
    only += ("--state-dtype", "bf16")
    assert "--offload" in hinted(*only, "--optimizer", "AdamW")[1]
    assert "Only AdamOffload fits. Others would" in run("plan", *only)[1]
    found, both = hinted("--parameters", 7e9, "--optimizer", "AdamW", "--device", "CPU", "--memory", "40GB")
    assert found
    assert both == ["--dtype bfloat16 --shard-states --workers 2"]
    assert not hinted("--parameters", 1e6)[0]  # no memory was given


def test_where_nothing_helps_it_says_why():
    _, printed = run("plan", "--parameters", 7e9, "--memory", "20GB", "--device", "CPU")
    assert "Nothing fits: weights and gradients alone take 28.00 GB in 16 bits." in printed
    host = ("--host-memory", "1GB", "--optimizer", "AdamOffload", "--device", "Ascend")
    _, printed = run("plan", "--parameters", 7e9, "--memory", "80GB", *host)
    tried = "--dtype bfloat16, --dtype bfloat16 --master-weights split8, --shard-states --workers 64."
    assert printed.endswith(f"Nothing fits. Nor would it with one or two of these: --offload, {tried}\n")


@pytest.mark.parametrize("named", [True, False])
def test_sizes_of_a_file_of_shapes_matter(named, tmp_path):
    shapes = [list(shape) for shape in SHAPES]
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({f"w{i}": shape for i, shape in enumerate(shapes)} if named else shapes))
    told = plans("--shapes", path, "--state-dtype", "8bit", "--optimizer", "Lamb")
    small = sum(math.prod(shape) for shape in SHAPES if math.prod(shape) < 4096)
    large = sum(math.prod(shape) for shape in SHAPES) - small
    assert told["parameters"] == small + large
    assert told["plans"][0]["states"] == 2 * (4 * small + large)
    assert told["plans"][0]["weights"] == 4 * (small + large)


@pytest.mark.parametrize("made", ["AdamW", "AdamOffload", "Momentum", None])
def test_of_a_checkpoint_the_weights_count(made, tmp_path):
    """Not the states, counters and buffers that are saved with them."""
    net = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dense(8, 600)).to_float(ms.float32)
    params = net.trainable_params()
    saved = net
    if made:
        optimizer = {"AdamW": AdamW, "AdamOffload": AdamOffload, "Momentum": nn.Momentum}[made]
        saved = optimizer(params, 0.1, **{"AdamW": {"amsgrad": True}, "Momentum": {"momentum": 0.9}}.get(made, {}))
    path = tmp_path / "net.ckpt"
    ms.save_checkpoint(saved, str(path))
    told = plans("--checkpoint", path, "--optimizer", "AdamW")
    # MindSpore's Momentum saves its one number under a name of its own.
    assert told["parameters"] == sum(p.size for p in params) + (made == "Momentum")
    assert plans("--checkpoint", path, "--dtype", "float16")["plans"][0]["weights"] == 2 * told["parameters"]


@needs_kernel
@pytest.mark.parametrize(
    "arguments", [{}, {"compress": SparseTopK(), "outer_momentum": 0.0}], ids=["DiLoCo", "SparseLoCo"]
)
def test_bytes_of_local_steps_are_those_that_they_hold(arguments):
    optimizer = LocalSteps(AdamW(parameters("bfloat16"), 0.01), group=SimulatedWorker(2, 0), **arguments)
    kept = nbytes((*optimizer.local_start, *optimizer.local_velocity, *optimizer.local_residual))
    planned = plan(AdamW, weights("bfloat16"), Options(), "CPU", local_steps=True)
    assert planned.local == kept
    without = plan(AdamW, weights("bfloat16"), Options(), "CPU")
    assert (without.local, planned.host - without.host) == (0, kept)
    on_gpu = plan(AdamW, weights("bfloat16"), Options(), "GPU", local_steps=True)
    assert on_gpu.host == on_gpu.local == kept + planned.weights + planned.masters


def test_what_local_steps_do_not_go_with_is_not_possible():
    arguments = ["--parameters", "1e6", "--local-steps", "--device", "CPU", "--state-dtype", "float32"]
    told = plans(*arguments)
    assert [one["optimizer"] for one in told["not_possible"]] == ["DGCMomentum"]
    assert all(one["local"] == 8_000_000 for one in told["plans"])
    _, printed = run("plan", *arguments)
    assert "local 8.00." in printed  # in all rows
    status, printed = run("plan", *arguments, "--shard-states", "--workers", "2")
    assert status == 1
    assert "LocalSteps rejects shard_states" in printed


def test_a_checkpoint_keeps_its_dtypes(tmp_path):
    net = nn.Dense(100, 60).to_float(ms.float32)
    net.weight.set_dtype(ms.bfloat16)
    ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
    first = plans("--checkpoint", tmp_path / "net.ckpt", "--optimizer", "AdamW")["plans"][0]
    assert first["weights"] == 2 * 6000 + 4 * 60
    assert first["masters"] == 4 * 6000


TABLES = [
    "--parameters 124.4e6 --dtype float16 --device GPU --memory 1.5GB --host-memory 1.5GiB",
    "--parameters 7B --dtype bfloat16 --memory 64GB --device CPU",
    "--parameters 7B --dtype bfloat16 --device Ascend --memory 64GB --host-memory 256GB",
    "--parameters 1T --memory 9TB --average --local-steps --workers 8",
    "--parameters 7e9 --dtype bfloat16 --optimizer AdamW --state-dtype 8bit --master-weights split8",
]


@pytest.mark.parametrize("asked", TABLES)
def test_the_table_has_every_figure_that_is_not_zero(asked, monkeypatch):
    """What all rows have in common stands above them, in a terminal of 80 columns no row is cut, nor longer."""
    monkeypatch.setenv("COLUMNS", "80")
    told, (status, printed) = plans(*asked.split()), run("plan", *asked.split())
    assert status == 0
    lines = printed.splitlines()
    above = dict(re.findall(r"(\w+) ([\d,.]+\d)", next((line for line in lines if line.startswith("Each has ")), "")))
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["optimizer"])
    headings = lines[head].split()[3:]
    unit = UNITS[lines[0][-2:]]
    rows = lines[head + 2 : head + 2 + len(told["plans"])]
    for line, one in zip(rows, told["plans"]):
        assert len(line) <= 80
        one = one | {"states": one["states"] + one["scales"]}
        expected = {name: f"{one[name] / unit:,.2f}" for name in headings if name != "fits"}
        first, _, figures = re.fullmatch(r" (\w+) +(\w+(, \w+)?) +(.*?)", line).group(1, 2, 4)
        assert first == one["optimizer"]
        assert figures.split()[: len(expected)] == list(expected.values())
        named = {*headings, *above}
        for name in ("weights", "gradients", "masters", "states", "averages", "local"):
            assert (name in named) == any(row[name] for row in told["plans"])
            assert name not in above or above[name] == f"{one[name] / unit:,.2f}"
        assert "total" in named or {"device", "host"} <= named
        if "fits" in headings:
            limits = {name: told[name] for name in ("memory", "host_memory") if told[name]}
            used = {"memory": one["host" if told["device"] == "CPU" else "device"], "host_memory": one["host"]}
            left = {name: limit - used[name] for name, limit in limits.items()}
            is_tight = any(left[name] < 0.1 * limit for name, limit in limits.items())
            word = "no" if min(left.values()) < 0 else "tight" if is_tight else "yes"
            assert figures.split()[len(expected) :] == [f"{word},", f"{min(left.values()) / unit:+,.2f}"]


def test_a_narrow_terminal_cuts_no_figure(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, printed = run("plan", "--parameters", "7e9", "--dtype", "bfloat16", "--memory", "64GB")
    assert "…" not in printed
    assert {"masters", "112.00", "-48.00"} <= set(printed.split())


def test_the_title_says_whose_memory_it_is():
    def title(*arguments):
        return run("plan", "--parameters", "7B", "--memory", "64GB", *arguments)[1].splitlines()[0]

    assert (
        title("--device", "CPU")
        == "7,000,000,000 parameters in float32, in the host's memory, as --device is CPU; in GB"
    )
    assert title("--device", "GPU", "--workers", 2).endswith("in float32, on GPU, on one of 2 workers; in GB")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "one of the arguments --parameters --shapes --checkpoint is required"),
        (["--parameters", "many"], "--parameters: expected a whole number.*'many'"),
        (["--parameters", "1.5"], "--parameters: expected a whole number.*'1.5'"),
        (["--parameters", "0"], "--parameters: expected a whole number.*'0'"),
        (["--parameters", "inf"], "--parameters: expected a whole number.*'inf'"),
        (["--parameters", "1e999"], "--parameters: expected a whole number.*'1e999'"),
        (["--parameters", "1e400T"], "--parameters: expected a whole number.*'1e400T'"),
        (["--parameters", "9e18"], "--parameters: expected a whole number from 1 to 1e18.*'9e18'"),
        (["--parameters", "7", "--workers", "1e999"], "--workers: expected a whole number"),
        (["--parameters", "7", "--memory", "1e999GB"], "--memory: expected bytes, at most 1e18.*'1e999GB'"),
        (["--parameters", "7", "--memory", "1e400"], "--memory: expected bytes, at most 1e18.*'1e400'"),
        (["--parameters", "7", "--host-memory", "9e99TiB"], "--host-memory: expected bytes, at most 1e18"),
        (["--parameters", "7", "--memory", "9" * 5000], r"--memory: expected bytes, at most 1e18.{0,20}, .{0,99}$"),
        (["--parameters", "7", "--workers", "0"], "--workers: expected a whole number"),
        (["--parameters", "7", "--memory", "7 apples"], "--memory: expected bytes.*'7 apples'"),
        (["--parameters", "7", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--parameters", "7", "--optimizer", "SGD"], "--optimizer: invalid choice: 'SGD'"),
        (["--shapes", "none.json"], "--shapes: cannot read none.json as JSON"),
        (["--shapes", "{}"], "--shapes: expected a list of shapes"),
        (["--shapes", '{"w": [3, -1]}'], "--shapes: expected a list of whole numbers greater than 0 for 'w'"),
        (["--shapes", '{"w": 3}'], "--shapes: expected a list of whole numbers greater than 0 for 'w'.*got 3"),
        (["--shapes", "[[3, 2.5]]"], "--shapes: expected a list of whole numbers greater than 0 for 0"),
        (["--checkpoint", "none.ckpt"], "--checkpoint: cannot read none.ckpt as a checkpoint"),
    ],
)
def test_errors_name_the_argument_what_was_expected_and_what_came(arguments, said, tmp_path):
    if arguments[:1] == ["--shapes"] and arguments[1][0] in "{[":
        path = tmp_path / "shapes.json"
        path.write_text(arguments[1])
        arguments = ["--shapes", path]
    refused(said, "plan", *arguments)


def test_a_checkpoint_without_weights_is_refused(tmp_path):
    ms.save_checkpoint([{"name": "seen", "data": Tensor([3], ms.int32)}], str(tmp_path / "seen.ckpt"))
    refused("--checkpoint: expected a network's parameters", "plan", "--checkpoint", tmp_path / "seen.ckpt")


def test_units():
    sizes = {"12": 12, "1.5KB": 1500, "64 GB": 64 * 10**9, "64gib": 64 * 2**30, "2e3MB": 2 * 10**9, "1TiB": 2**40}
    for text, expected in sizes.items():
        assert size(text) == expected
    assert len(set(itertools.chain(UNITS.values()))) == len(UNITS)


def test_each_row_says_what_takes_the_step():
    """A kernel, MindSpore's operators or the host; it is what construction chooses, where kernels are built."""
    asked = ("--parameters", 1e6, "--dtype", "bf16", "--optimizer", "AdamW", "AdamOffload", "Sinkhorn", "Muon")
    formats = ("--state-dtype", "float32", "8bit")
    told = plans(*asked, *formats, "--device", "Ascend")["plans"]
    steps = {(one["optimizer"], one["state_dtype"], one["master_weights"]): one["step"] for one in told}
    by_hand = {("AdamW", "float32"): "kernel", ("Muon", "float32"): "kernel"}
    for optimizer in ("AdamW", "AdamOffload", "Sinkhorn", "Muon"):
        for state_dtype in ("float32", "8bit"):
            expected = by_hand.get((optimizer, state_dtype), "host" if optimizer == "AdamOffload" else "operators")
            assert steps[optimizer, state_dtype, "float32"] == expected, (optimizer, state_dtype)
    assert {one["step"] for one in plans(*asked, *formats, "--device", "CPU")["plans"]} == {"kernel"}
    offloaded = plans(*asked, *formats, "--device", "GPU", "--offload")["plans"]
    assert {one["step"] for one in offloaded} == {"host"}


def test_a_plan_says_which_kernels_are_not_built(monkeypatch):
    asked = ("--parameters", 1e6, "--optimizer", "AdamW", "Sinkhorn", "--device", "Ascend")
    monkeypatch.setattr(libraries, "why_missing", lambda device: f"what {device} needs is missing")
    text = run("plan", *asked)[1]
    assert "what Ascend needs is missing" in text
    line = next(line for line in text.splitlines() if line.startswith("Steps by MindSpore's operators"))
    assert line.endswith(
        ": AdamW with states in bfloat16, 8bit, 4bit; Sinkhorn with states in float32, bfloat16, 8bit, 4bit."
    )
    monkeypatch.setattr(libraries, "why_missing", lambda device: None)
    assert "not built" not in run("plan", *asked)[1]
    # Where every step is a kernel's, nothing is said of it.
    assert "Steps" not in run("plan", "--parameters", 1e6, "--device", "CPU")[1]
