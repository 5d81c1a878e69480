"""OptimizerMonitor: its figures are right, its files are gone on with, and are drawn."""

import csv
import math
import os
import pathlib
import re
import struct
import sys

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, RAMP, SCENARIOS, SHAPES, every_case, for_each
from harness import Pair, check_close, tensor
from mindspore import Parameter, nn
from mindspore.train import RunContext
from refusals import refused
from tolerances import TOLERANCE

from ms_optim import AdamW, DGCMomentum, Lamb, LinearWeightDecay, OptimizerMonitor, __main__, plot
from ms_optim.kernels.table import STATISTICS
from ms_optim.training import monitor as training_monitor
from ms_optim.training import plot as drawing
from ms_optim.training import readings as training_readings


def table(path):
    """Read a CSV file: rows as dicts of numbers, where they are."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return text

    with open(path, newline="") as file:
        return [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def column(rows, name):
    return np.array([row[name] for row in rows])


def total(norms):
    return math.sqrt(sum(norms**2))


# ---- Figures ----


@every_case(scenario=["grouped", "loss_scale"])
def test_figures_are_those_of_the_reference(case, scenario, tmp_path):
    """Each row, of norms and trust ratios in float64, and of the rates by their formulas."""
    pair = Pair(case, SCENARIOS[scenario])
    groups = SCENARIOS[scenario].groups(pair.params, case.learning_rate)
    rates, decays = groups[3], groups[4]
    every, steps = 7, 35
    with OptimizerMonitor(every=every, csv=tmp_path / "run.csv", verbose=False) as monitor:
        expected = []
        for _ in range(steps):
            pair.run("pynative", 1)
            monitor.step(pair.optimizer)
            expected.append(pair.reference.statistics.copy())
    totals, layers = table(tmp_path / "run.csv"), table(tmp_path / "run.layers.csv")
    assert list(column(totals, "step")) == list(range(every, steps + 1, every))
    assert {row["optimizer"] for row in totals} == {case.name}
    n = len(pair.params)
    assert len(layers) == n * len(totals)
    for row, begin in zip(totals, range(0, len(layers), n)):
        k = int(row["step"]) - 1
        held, found = expected[k], layers[begin : begin + n]
        assert {line["step"] for line in found} == {k + 1}
        assert list(column(found, "parameter")) == [p.name for p in pair.params]
        read = np.stack([column(found, name) for name in STATISTICS], axis=1)
        check_close(read, held, TOLERANCE["statistics"], pair.reference.peak["statistics"], f"step {k + 1}")
        gradient, weight, update, ratio, _ = held.T
        for name, norms, place in (("gradient", gradient, 0), ("weight", weight, 1), ("update", update, 2)):
            slack = TOLERANCE["statistics"] * total(pair.reference.peak["statistics"][:, place])
            assert abs(row[f"{name}_norm"] - total(norms)) <= slack
        near = {"rel": 1e-4}
        assert row["update_ratio"] == pytest.approx(total(update) / total(weight), **near)
        assert row["trust_ratio_min"] == pytest.approx(ratio.min(), **near)
        assert row["trust_ratio_median"] == pytest.approx(np.median(ratio), **near)
        assert row["trust_ratio_max"] == pytest.approx(ratio.max(), **near)
        assert row["skipped_steps"] == row["nonfinite_gradients"] == 0
        for i, line in enumerate(found):
            group = int(line["group"])
            assert row[f"learning_rate.{group}"] == pytest.approx(rates[i](k), rel=1e-6)
            assert row[f"weight_decay.{group}"] == pytest.approx(decays[i](k), rel=1e-6)
            if weight[i] > 0:
                assert line["update_ratio"] == pytest.approx(update[i] / weight[i], **near)
            else:
                assert math.isnan(line["update_ratio"])


def test_density_and_residuals_of_dgc(tmp_path):
    case = next(case for case in CASES if case.cls is DGCMomentum)
    pair = Pair(case, SCENARIOS["dynamic"])
    sizes = [int(np.prod(SHAPES[name])) for name in SCENARIOS["dynamic"].shapes]

    def part(step, size):
        stage = (step - RAMP["rampup_begin_step"]) // (RAMP["rampup_step"] // 2)
        if stage < 0 or size < RAMP["min_compress_numel"]:
            return 1.0
        return max(1, round((1 - RAMP["sparsity"][min(stage, 1)]) * size)) / size

    residuals = []
    with OptimizerMonitor(every=1, csv=tmp_path / "run.csv", verbose=False) as monitor:
        for _ in range(24):
            pair.run("pynative", 1)
            monitor.step(pair.optimizer)
            residuals.append([total(r.ravel()) for r in pair.reference.state["dgc_r"]])
    totals, layers = table(tmp_path / "run.csv"), table(tmp_path / "run.layers.csv")
    n = len(sizes)
    for k, row in enumerate(totals):
        found = layers[k * n : k * n + n]
        parts = [part(k, size) for size in sizes]
        np.testing.assert_allclose(column(found, "density"), parts, rtol=1e-6)
        assert row["density"] == pytest.approx(np.dot(parts, sizes) / sum(sizes), rel=1e-6)
        np.testing.assert_allclose(column(found, "residual_norm"), residuals[k], rtol=1e-5)
        assert row["residual_norm"] == pytest.approx(total(np.array(residuals[k])), rel=1e-5)
    assert totals[-1]["density"] < 0.11 < 0.5 < totals[15]["density"] < totals[9]["density"] == 1.0
    assert totals[9]["residual_norm"] == 0 < totals[10]["residual_norm"]


# ---- A small run ----

STEPS = 12
POISONED = 7  # the place of a step whose gradient is infinite


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.hidden = nn.Dense(6, 8, weight_init=tensor(rng.standard_normal((8, 6)) / 3, "float32"), bias_init="zeros")
        self.out = nn.Dense(8, 3, weight_init=tensor(rng.standard_normal((3, 8)) / 3, "float32"), bias_init="zeros")

    def construct(self, x):
        return self.out(ms.ops.relu(self.hidden(x)))


def data():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((STEPS, 16, 6)).astype(np.float32)
    return x, x[..., :3].argmax(-1).astype(np.int32)


def made(net, optimizer=Lamb, **arguments):
    arguments = {"weight_decay": LinearWeightDecay(0.1, 0.0, STEPS), "skip_nonfinite": True, **arguments}
    return optimizer(net.trainable_params(), [0.01 * (k + 1) for k in range(STEPS)], **arguments)


def through_model(path, poisoned=False, scale=None, wrapped=False, **monitored):
    net, loss = Net(), nn.CrossEntropyLoss()
    x, y = data()
    if poisoned:
        x[POISONED] = np.inf
    dataset = ms.dataset.NumpySlicesDataset((x.reshape(-1, 6), y.reshape(-1)), shuffle=False).batch(16)
    monitor = OptimizerMonitor(**{"csv": path, "every": 3, "verbose": False, **monitored})
    if wrapped:
        cell = nn.TrainOneStepCell(nn.WithLossCell(net, loss), made(net))
        ms.Model(cell).train(1, dataset, callbacks=[monitor], dataset_sink_mode=False)
    elif scale is not None:
        manager = ms.FixedLossScaleManager(scale, drop_overflow_update=False)
        model = ms.Model(net, loss, made(net, loss_scale=scale), loss_scale_manager=manager)
        model.train(1, dataset, callbacks=[monitor], dataset_sink_mode=False)
    else:
        model = ms.Model(net, loss, made(net))
        model.train(1, dataset, callbacks=[monitor], dataset_sink_mode=False)


def in_a_loop(path, begin=0, end=STEPS, state=None, poisoned=False, net=None, every=3, tensorboard=None, **arguments):
    """Train from one step to another; return the network and what the optimizer keeps."""
    net = net or Net()
    optimizer = made(net, **arguments)
    if state:
        optimizer.load_state_dict(state)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer)
    x, y = data()
    if poisoned:
        x[POISONED] = np.inf
    with OptimizerMonitor(every, path, tensorboard, verbose=False) as monitor:
        for k in range(begin, end):
            step(ms.Tensor(x[k]), ms.Tensor(y[k]))
            monitor.step(optimizer)
    return net, optimizer.state_dict()


def both(path):
    return path.read_text(), path.with_suffix(".layers.csv").read_text()


def test_model_and_a_loop_of_ones_own_write_the_same(mode, tmp_path):
    through_model(tmp_path / "model.csv")
    through_model(tmp_path / "cell.csv", wrapped=True)
    in_a_loop(tmp_path / "loop.csv")
    written = both(tmp_path / "model.csv")
    assert written[0].count("\n") == 1 + STEPS // 3
    assert both(tmp_path / "cell.csv") == both(tmp_path / "loop.csv") == written
    # Of a power of two nothing remains after unscaling.
    through_model(tmp_path / "scaled.csv", scale=1024.0)
    assert both(tmp_path / "scaled.csv") == written


@for_each([{"backend": "aot", "mode": "graph"}, {"backend": "composite", "mode": "pynative"}])
def test_skipped_steps_are_counted(mode, backend, tmp_path):
    in_a_loop(tmp_path / "run.csv", poisoned=True, every=1, backend=backend)
    totals, layers = table(tmp_path / "run.csv"), table(tmp_path / "run.layers.csv")
    assert list(column(totals, "step")) == list(range(1, STEPS + 1))
    assert list(column(totals, "skipped_steps")) == [0] * POISONED + [1] * (STEPS - POISONED)
    assert [k for k, row in enumerate(totals) if row["nonfinite_gradients"]] == [POISONED]
    # The step after has the rates of the one that was skipped.
    rates = [0.01 * (k + 1) for k in (*range(POISONED + 1), *range(POISONED, STEPS - 1))]
    np.testing.assert_allclose(column(totals, "learning_rate.0"), rates, rtol=1e-6)
    skipped = totals[POISONED]
    assert skipped["update_norm"] == 0
    assert all(math.isnan(skipped[name]) for name in ("weight_norm", "update_ratio", "trust_ratio_median"))
    assert all(math.isnan(row["trust_ratio"]) == (row["step"] == POISONED + 1) for row in layers)


# ---- Going on with files ----


def test_a_run_that_resumes_goes_on_with_its_file(tmp_path):
    in_a_loop(tmp_path / "whole.csv")
    net, state = in_a_loop(tmp_path / "parts.csv", end=5)
    in_a_loop(tmp_path / "parts.csv", begin=5, state=state, net=net)
    assert both(tmp_path / "parts.csv") == both(tmp_path / "whole.csv")


def test_a_line_that_was_torn_is_cut_off(tmp_path):
    in_a_loop(tmp_path / "whole.csv")
    net, state = in_a_loop(tmp_path / "parts.csv", end=5)
    for name in ("parts.csv", "parts.layers.csv"):
        with open(tmp_path / name, "a") as file:
            file.write("6,La")
    in_a_loop(tmp_path / "parts.csv", begin=5, state=state, net=net)
    assert both(tmp_path / "parts.csv") == both(tmp_path / "whole.csv")


def test_after_an_earlier_checkpoint_the_later_rows_count(tmp_path):
    in_a_loop(tmp_path / "whole.csv", every=1)
    net, state = in_a_loop(tmp_path / "parts.csv", end=5, every=1)
    kept = [p.asnumpy().copy() for p in net.trainable_params()]
    in_a_loop(tmp_path / "parts.csv", begin=5, end=8, state=state, net=net, poisoned=True, every=1)
    for p, w in zip(net.trainable_params(), kept):
        p.set_data(ms.Tensor(w))
    in_a_loop(tmp_path / "parts.csv", begin=5, state=state, net=net, every=1)
    assert len(table(tmp_path / "parts.csv")) == STEPS + 3
    whole, parts = (training_readings.load(tmp_path / name, ("trust_ratio",)) for name in ("whole.csv", "parts.csv"))
    assert whole.parameters == parts.parameters
    for name, series in whole.totals.items():
        np.testing.assert_array_equal(parts.totals[name], series)
    np.testing.assert_array_equal(parts.layers["trust_ratio"], whole.layers["trust_ratio"])


def renamed():
    net = Net()
    net.out.bias.name = "other.bias"
    return net


@pytest.mark.parametrize(
    "match, arguments",
    [
        ("it has 'Lamb' instead of 'AdamW'", {"optimizer": AdamW}),
        ("it has 'out.bias' instead of 'other.bias'", {"net": renamed}),
        ("only one of the two has the column 'density'", {"optimizer": DGCMomentum, **RAMP}),
    ],
)
def test_the_file_of_another_optimizer_is_refused(match, arguments, tmp_path):
    in_a_loop(tmp_path / "run.csv")
    written = both(tmp_path / "run.csv")
    net = arguments.get("net", Net)()
    arguments = {name: value for name, value in arguments.items() if name != "net"}
    message = refused(ValueError, match, lambda: in_a_loop(tmp_path / "run.csv", net=net, **arguments))
    assert "run." in message
    assert "Pass another file as 'csv'" in message
    assert both(tmp_path / "run.csv") == written


def test_some_other_file_is_refused(tmp_path):
    (tmp_path / "run.csv").write_text("epoch,loss\n1,2.0\n")
    refused(ValueError, "only one of the two has the column 'step'", lambda: through_model(tmp_path / "run.csv"))
    assert (tmp_path / "run.csv").read_text() == "epoch,loss\n1,2.0\n"


# ---- What is shown ----


def test_a_line_says_what_matters(capfd, tmp_path):
    through_model(tmp_path / "run.csv", poisoned=True, verbose=True, every=4)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Lamb step")]
    assert len(lines) == STEPS // 4
    number = r"[\d.e+-]+"
    moved = rf"gradient norm {number}; weight norm {number}; update/weight {number}; trust ratio {number} to {number}"
    moved += rf", median {number}"
    assert re.fullmatch(rf"Lamb step 4: learning rate 0\.04; weight decay 0\.075; {moved}", lines[0])
    skipped = r"gradient norm (nan|inf); SKIPPED; NOT FINITE: \d of 4 gradients; skipped so far: 1"
    assert re.fullmatch(rf"Lamb step 8: learning rate 0\.08; weight decay 0\.04167; {skipped}", lines[1])
    assert re.fullmatch(
        rf"Lamb step 12: learning rate 0\.11; weight decay 0\.01667; {moved}; skipped so far: 1", lines[2]
    )


def test_weights_that_are_spoiled_were_not_skipped(capfd):
    optimizer, monitor = Lamb([Parameter(tensor(np.ones(4), "float32"), name="w")], 0.1), OptimizerMonitor(every=1)
    for _ in range(2):
        optimizer((tensor([1, np.nan, 1, 1], "float32"),))
        monitor.step(optimizer)
    lines = capfd.readouterr().out.splitlines()
    assert "weight norm 2; " in lines[0]
    assert "weight norm nan; " in lines[1]
    assert not any("skipped" in line.lower() for line in lines)
    assert all("NOT FINITE: 1 of 1 gradients" in line for line in lines)


def test_a_line_spans_the_groups(capfd):
    params = [Parameter(tensor(np.ones(4), "float32"), name=f"w{i}") for i in range(3)]
    groups = [{"params": [p], "lr": 0.1 * (i + 1), "weight_decay": 0.01 * i} for i, p in enumerate(params)]
    optimizer = DGCMomentum(groups, 0.1, 0.9, 0, sparsity=(0.5,), min_compress_numel=1)
    optimizer((tensor([1, 2, 3, 4], "float32"),) * 3)
    OptimizerMonitor(every=1).step(optimizer)
    (line,) = capfd.readouterr().out.splitlines()
    assert "step 1: learning rate 0.1 to 0.3; weight decay 0 to 0.02; " in line
    assert "trust ratio" not in line
    # Of each, 1 and 2 wait, and of the second and third the decay besides.
    waiting = math.sqrt(sum((1 + decay) ** 2 + (2 + decay) ** 2 for decay in (0, 0.01, 0.02)))
    assert line.endswith(f"; density 0.5, residual norm {waiting:.3g}")


def events(folder):
    """Read TensorBoard's files in the order of writing."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.iterdir()):
        content, place = path.read_bytes(), 0
        while place < len(content):
            # A record: its length and a checksum of that, itself and its checksum.
            (length,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
            place += length + 16
            yield event


def test_tensorboard_has_the_figures_of_the_csv(tmp_path):
    through_model(tmp_path / "run.csv", poisoned=True, every=4, tensorboard=tmp_path / "board")
    found = {(x.tag, event.step): x.simple_value for event in events(tmp_path / "board") for x in event.summary.value}
    expected = {}
    for row in table(tmp_path / "run.csv"):
        for name, value in row.items():
            if name not in ("step", "optimizer"):
                expected[name.replace(".", "/") if "." in name else f"optimizer/{name}", int(row["step"])] = value
    for row in table(tmp_path / "run.layers.csv"):
        for name in ("trust_ratio", "update_ratio"):
            expected[f"{name}/{row['parameter']}", int(row["step"])] = row[name]
    expected = {key: value for key, value in expected.items() if not math.isnan(value)}
    assert found.keys() == expected.keys()
    assert {step for _, step in found} == {4, 8, 12}
    assert all(found[key] == np.float32(expected[key]) for key in found)


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path):
    net, state = in_a_loop(tmp_path / "run.csv", end=5)
    in_a_loop(tmp_path / "run.csv", begin=5, state=state, net=net, tensorboard=tmp_path / "board")
    held = list(events(tmp_path / "board"))
    begun = [event.step for event in held if event.session_log.status == event.session_log.START]
    assert begun == [6]
    assert {event.step for event in held if event.summary.value} == {6, 9, 12}


# ---- When it reads ----


def test_it_reads_every_so_many_steps_and_no_more(monkeypatch):
    readings = []

    def counted(optimizer):
        readings.append(training_readings.read(optimizer))
        return readings[-1]

    monkeypatch.setattr(training_monitor, "read", counted)
    w = Parameter(tensor(np.ones(3), "float32"), name="w")
    optimizer = AdamW([w], 0.1)
    monitor = OptimizerMonitor(every=5, verbose=False)
    for _ in range(14):
        optimizer((tensor(np.ones(3), "float32"),))
        monitor.step(optimizer)
    assert [reading.step for reading in readings] == [5, 10]


class Arguments(dict):
    """What a run context carries."""

    __getattr__ = dict.__getitem__


def test_where_data_sinks_one_call_stands_for_many_steps(capfd):
    optimizer = AdamW([Parameter(tensor(np.ones(3), "float32"), name="w")], 0.1)
    arguments = Arguments(optimizer=optimizer, cur_step_num=0)
    monitor, context = OptimizerMonitor(every=10), RunContext(arguments)
    monitor.on_train_begin(context)
    for _ in range(6):
        for _ in range(4):
            optimizer((tensor(np.ones(3), "float32"),))
        arguments["cur_step_num"] += 4
        monitor.on_train_step_end(context)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("AdamW")] == ["AdamW step 12", "AdamW step 20"]


def test_a_step_that_did_not_call_the_optimizer_is_no_row(tmp_path):
    optimizer = AdamW([Parameter(tensor(np.ones(3), "float32"), name="w")], 0.1)
    monitor = OptimizerMonitor(every=2, csv=tmp_path / "run.csv", verbose=False)
    for called in (True, True, False, False, True, True):
        if called:
            optimizer((tensor(np.ones(3), "float32"),))
        monitor.step(optimizer)
    assert list(column(table(tmp_path / "run.csv"), "step")) == [2, 4]


def test_of_several_processes_the_first_one_writes(monkeypatch, tmp_path, capfd):
    for rank in (0, 1):
        monkeypatch.setattr(training_monitor.comm.GlobalComm, "INITED", True)
        monkeypatch.setattr(training_monitor.comm, "get_rank", lambda rank=rank: rank)
        folder = tmp_path / str(rank)
        through_model(folder / "run.csv", verbose=True, tensorboard=folder / "board")
        assert (folder / "run.csv").exists() == (folder / "board").exists() == (rank == 0)
        assert ("Lamb step" in capfd.readouterr().out) == (rank == 0)


# ---- Errors ----


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (TypeError, "'every' must be an int, 1 or greater.*got 2.5", {"every": 2.5}),
        (ValueError, "'every' must be an int, 1 or greater.*got 0", {"every": 0}),
        (TypeError, "'csv' must be a path or None.*got 3", {"csv": 3}),
        (TypeError, "'tensorboard' must be a path or None.*got True", {"tensorboard": True}),
        (TypeError, "'verbose' must be of type bool.*got 1", {"verbose": 1}),
    ],
)
def test_bad_arguments(error, match, arguments):
    refused(error, f"For 'OptimizerMonitor', the argument {match}", lambda: OptimizerMonitor(**arguments))


def test_without_tensorboardx_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    refused(ImportError, "needs tensorboardX: pip install tensorboardX", lambda: OptimizerMonitor(tensorboard=tmp_path))


def test_an_optimizer_of_others_is_refused():
    net = Net()
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.Adam(net.trainable_params()))
    dataset = ms.dataset.NumpySlicesDataset((data()[0][0], data()[1][0])).batch(16)
    match = "must be trained by an optimizer of ms_optim, but got nn.Adam"
    refused(TypeError, match, lambda: model.train(1, dataset, callbacks=[OptimizerMonitor()]))
    monitor = OptimizerMonitor()
    refused(
        TypeError, "'optimizer' must be an optimizer of ms_optim", lambda: monitor.step(nn.Adam(net.get_parameters()))
    )


def test_of_two_optimizers_it_takes_none():
    class Both(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.one, self.other = made(self.net), made(self.net, AdamW)

    context = RunContext(Arguments(optimizer=None, train_network=Both(), cur_step_num=0))
    refused(ValueError, r"has Lamb, AdamW: .*monitor\.step", lambda: OptimizerMonitor().on_train_begin(context))


# ---- The picture ----


def size(path):
    """Return width and height of a PNG."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def colours(path):
    import matplotlib.image

    return len(np.unique(matplotlib.image.imread(path).reshape(-1, 4), axis=0))


def wide(count, optimizer=Lamb, **arguments):
    rng = np.random.default_rng(count)
    params = [Parameter(tensor(rng.standard_normal(4), "float32"), name=f"cells.{i}.w") for i in range(count)]
    return optimizer(params, 0.01, **arguments)


@pytest.mark.parametrize("count, height", [(3, 9.2), (150, 17.6)])
def test_the_picture_grows_with_the_layers_as_far_as_it_may(count, height, tmp_path):
    optimizer, rng = wide(count), np.random.default_rng(0)
    with OptimizerMonitor(every=1, csv=tmp_path / "run.csv", verbose=False) as monitor:
        for _ in range(4):
            optimizer(tuple(tensor(rng.standard_normal(4), "float32") for _ in range(count)))
            monitor.step(optimizer)
    assert plot(tmp_path / "run.csv") == tmp_path / "run.png"
    assert size(tmp_path / "run.png") == (1200, round(160 * height))
    assert colours(tmp_path / "run.png") > 100


@pytest.mark.parametrize("optimizer, arguments", [(AdamW, {}), (DGCMomentum, RAMP)])
@pytest.mark.parametrize("steps, poisoned", [(1, False), (1, True), (3, True)])
def test_a_picture_of_little(optimizer, arguments, steps, poisoned, tmp_path):
    """One reading; none with figures; trust ratios that are all 1."""
    made = wide(2, optimizer, skip_nonfinite=True, **arguments)
    with OptimizerMonitor(every=1, csv=tmp_path / "run.csv", verbose=False) as monitor:
        for _ in range(steps):
            made(tuple(tensor(np.full(4, np.nan if poisoned else 1.0), "float32") for _ in range(2)))
            monitor.step(made)
    plot(str(tmp_path / "run.csv"), str(tmp_path / "other.png"))
    assert size(tmp_path / "other.png") == (1200, round(160 * (2.4 + 1.7 * (6 if optimizer is DGCMomentum else 4))))


@pytest.mark.parametrize("every, readings", [(1, 1), (1, 3), (4, 3), (1, 50)])
def test_all_panels_have_the_same_whole_steps(every, readings, tmp_path):
    made = wide(3)
    with OptimizerMonitor(every=every, csv=tmp_path / "run.csv", verbose=False) as monitor:
        for _ in range(every * readings):
            made(tuple(tensor(np.ones(4), "float32") for _ in range(3)))
            monitor.step(made)
    figure = drawing._draw(training_readings.load(tmp_path / "run.csv", ("trust_ratio", "update_ratio")))
    axes = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(axes) == 5
    for one in axes:
        assert one.get_xlim() == axes[0].get_xlim() == (0, every * readings)
        assert all(tick == round(tick) for tick in one.get_xticks())


def test_the_command_draws_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    in_a_loop(pathlib.Path("run.csv"))

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["ms_optim", "plot", *arguments])
        return __main__.main()

    assert command("run.csv", "--output", "picture.png") == 0
    assert "Picture in picture.png" in capsys.readouterr().out
    assert size(tmp_path / "picture.png")[0] == 1200
    missing = "'csv' must be a file that an OptimizerMonitor wrote, but there is none at 'missing.csv'"
    for name, complaint in (("missing.csv", missing), ("run.layers.csv", "has other columns")):
        assert command(name) == 2
        assert complaint in capsys.readouterr().err


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    refused(TypeError, "'csv' must be a path.*got 3", lambda: plot(3))
    refused(TypeError, "'output' must be a path.*got 3", lambda: plot("run.csv", 3))
    in_a_loop(tmp_path / "run.csv", end=2)
    refused(ValueError, "has no readings yet", lambda: plot(tmp_path / "run.csv"))
    (tmp_path / "empty.csv").write_text("")
    refused(ValueError, "has other columns", lambda: plot(tmp_path / "empty.csv"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(ImportError, "matplotlib is needed: pip install matplotlib", lambda: plot(os.fspath(tmp_path / "run.csv")))
