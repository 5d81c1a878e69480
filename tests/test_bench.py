"""The quick look checks before it times, and counts bytes by the optimizers' rules."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from command import refused, run
from mindspore import Parameter, Tensor

from ms_optim import OPTIMIZERS, AdamW
from ms_optim.cli import bench, checks
from ms_optim.dgc.optimizer import CompressedStep
from ms_optim.kernels import table as kernels

QUICK = ["bench", "--megabytes", 0.1, "--steps", 2]


@pytest.fixture
def quick(monkeypatch):
    """Measure no bandwidth, and check here in a few steps; tests/test_doctor.py has the checks' own."""
    monkeypatch.setattr(bench, "bandwidth", lambda threads, size: 1e9)
    monkeypatch.setattr(checks, "STEPS", 2)
    monkeypatch.setattr(checks, "in_child", lambda tasks: ((checks.checked(task), "") for task in tasks))


def test_json_has_a_row_for_each_optimizer(quick):
    status, printed = run(*QUICK, "--json")
    told = json.loads(printed)
    assert status == 0
    assert [row["optimizer"] for row in told["rows"]] == [x.__name__ for x in OPTIMIZERS]
    assert told["parameters"] == 25_000
    for row in told["rows"]:
        assert row["right"]
        assert row["path"] in ("fused", "akg", "composite")
        assert row["nanoseconds"] == pytest.approx(row["seconds"] / 25_000 * 1e9)
        assert row["share"] == pytest.approx(row["bytes"] * 25_000 / row["seconds"] / 1e9)


def test_the_table_shows_the_same(quick):
    status, printed = run(*QUICK, "--optimizer", "AdamW", "Lamb")
    assert status == 0
    assert "a += b on as many threads moves 1.0 GB/s" in printed
    assert [line.split()[:3] for line in printed.splitlines()[2:4]] == [
        ["AdamW", "fused", "agrees"],
        ["Lamb", "fused", "agrees"],
    ]


@pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there is no kernel to be wrong")
def test_what_is_wrong_is_not_timed(quick, monkeypatch):
    monkeypatch.setattr(AdamW, "adam_direction", lambda self, scalars, m, v: m / scalars[0] * 1.001)
    status, printed = run(*QUICK, "--json", "--optimizer", "AdamW")
    row = json.loads(printed)["rows"][0]
    assert status == 1
    assert not row["right"]
    assert row["seconds"] is None
    assert "AdamW              not timed: WRONG" in run(*QUICK, "--optimizer", "AdamW")[1]


def test_bytes_of_a_step():
    """Counted by hand for each kind of rule: which of weight, gradient and states a pass reads and writes."""
    weight = Parameter(Tensor(np.zeros((3, 1), np.float32)), name="w")
    counted = {}
    for optimizer in OPTIMIZERS:
        for trial in optimizer.trials:
            made = optimizer([weight], 0.1, **trial)
            kinds = {
                "layerwise": made.rule.is_layerwise,
                "normalized": made.normalizes_gradient,
                "compressed": isinstance(made, CompressedStep),
                "matrices": bool(made.rule.iterations),
                "balanced": made.rule.reads_stored_states,
            }
            states = sum(kind != "rows" for _, kind in made.rule.kinds)
            kind = (states, *(name for name, holds in kinds.items() if holds))
            counted.setdefault(kind, set()).add(bench.least_bytes(made))
    assert counted == {
        (1,): {4 * (3 + 2)},  # w g m; w m
        (2,): {4 * (4 + 3)},  # w g m v; w m v
        (3,): {4 * (5 + 4)},  # w g m v vhat; w m v vhat
        (2, "layerwise"): {4 * (4 + 2 + 3 + 1)},  # w g m v; m v, then w m v; w
        (2, "layerwise", "normalized"): {4 * (1 + 4 + 2 + 4 + 1)},  # g, then w g m v; m v, then w g m v; w
        (2, "compressed"): {4 * (4 + 2)},  # w g u r; u r
        (1, "balanced"): {4 * (2 + 1 + 4 + 3 + 2)},  # g m; m, then four times m, then w g m; w m
        (1, "matrices"): {4 * (2 + 2 + 2 + 2 + 1)},  # g m; m d, then d; d, then w d; w
    }


def test_tensors_are_of_the_size_that_is_asked_for():
    for elements in (1, 1000, 10_000_000):
        shapes = bench.tensors(elements)
        assert sum(int(np.prod(shape)) for shape in shapes) == elements


def test_bandwidth_counts_what_it_adds(monkeypatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert bench.bandwidth(threads=2, size=1000, repeats=5) == 2 * 5 * 1000 * 3 * 4 / 2.0


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "device_target", lambda: "GPU")
    status, printed = run("bench")
    assert status == 1
    assert "the device target is GPU" in printed


@pytest.mark.parametrize("argument", ["--steps", "--megabytes"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "some"])
def test_bad_numbers_are_refused(argument, value):
    refused(f"{argument}: expected a number greater than 0, but got '{value}'", "bench", argument, value)


def test_output_is_json_alone(tmp_path):
    """Whatever MindSpore says goes elsewhere."""
    command = [sys.executable, "-m", "ms_optim", *map(str, QUICK), "--optimizer", "AdamW", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]
