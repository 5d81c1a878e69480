"""Two processes compress and exchange: their weights stay the same to the bit, and follow the reference of two."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import reference
from exchange import CONFIGURATIONS, HOSTS, POISONED, RUNS, SHAPES, STEPS, gradients, start
from harness import check_close, check_units, tensor
from mindspore import Parameter
from processes import free_port, launched
from sources import TESTS
from tolerances import TOLERANCE

from ms_optim import DGCMomentum

TOLERATED = {"w": TOLERANCE["weight"], "u": TOLERANCE["state with decay"], "r": TOLERANCE["state with decay"]}


def test_a_group_needs_communication():
    with pytest.raises(ValueError, match="'group' must be None before"):
        DGCMomentum([Parameter(tensor([1.0], "float32"), name="w")], 0.1, 0.9, 0, group="hccl_world_group")


def means(step, per_host, host, dtype):
    """Return the mean gradients of a host's processes."""
    drawn = [gradients(step, per_host * host + i, dtype) for i in range(per_host)]
    return [sum(gs) / per_host for gs in zip(*drawn)]


@pytest.mark.program("exchange")
@pytest.mark.parametrize("processes", [2, 4])
def test_workers_hold_the_same_weights_and_follow_the_reference(processes, records_of):
    """Two workers, which are processes or hosts of several."""
    recorded, _ = records_of(processes)
    per_host = processes // HOSTS
    records = [recorded[k : k + per_host] for k in range(0, processes, per_host)]
    for mode, name in RUNS[per_host]:
        check_weights_are_the_same_bits_after_every_step(f"{mode}/{name}", records)
        check_the_reference_is_followed(mode, name, records)


def check_weights_are_the_same_bits_after_every_step(run, records):
    processes = [record for host in records for record in host]
    for step in range(STEPS):
        for i in range(len(SHAPES)):
            key = f"{run}/{step}/w{i}"
            assert len({record[key].tobytes() for record in processes}) == 1, key
    key = f"{run}/{STEPS - 1}/r0"
    assert [len({record[key].tobytes() for record in host}) for host in records] == [1, 1]
    assert records[0][0][key].tobytes() != records[1][0][key].tobytes()


def check_the_reference_is_followed(mode, name, records):
    dtype, arguments = CONFIGURATIONS[name]
    known = {key: value for key, value in arguments.items() if key not in ("backend", "weight_decay")}
    n = len(SHAPES)
    expected = reference.DGCMomentum(
        start(dtype),
        [lambda k: 0.01] * n,
        [lambda k: arguments.get("weight_decay", 0.0)] * n,
        [False] * n,
        [dtype] * n,
        workers=HOSTS,
        **known,
    )
    for step in range(STEPS):
        given = [means(step, len(host), k, dtype) for k, host in enumerate(records)]
        if step == POISONED and arguments.get("skip_nonfinite"):
            given[0][2].reshape(-1)[-1] = np.nan
        held = [
            {key: host[0][f"{mode}/{name}/{step}/{key}"] for i in range(n) for key in (f"w{i}", f"u{i}", f"r{i}")}
            for host in records
        ]
        expected.sent = [[h[f"u{i}"] == 0 for i in range(n)] for h in held]
        expected.behind = [[h[f"r{i}"].astype(np.float64) for i in range(n)] for h in held]
        expected.step(given)
        for i in range(n):
            for worker, h in enumerate(held):
                for letter, state in (("u", "dgc_u"), ("r", "dgc_r")):
                    check_close(h[f"{letter}{i}"], expected.of_worker[worker][state][i], TOLERATED[letter],
                                np.maximum(expected.peak[state][i], 1.0), f"{letter}{i} of {worker}")  # fmt: skip
            peak = expected.peak["weight"][i]
            if dtype == "float32":
                check_close(held[0][f"w{i}"], expected.weights[i], TOLERATED["w"], np.maximum(peak, 1.0), f"w{i}")
            else:
                check_units(held[0][f"w{i}"], expected.weights[i], dtype, 1, peak, f"w{i}")
    for record in (record for host in records for record in host):
        assert record[f"{mode}/{name}/counts"].tolist() == [expected.step_count, expected.skipped]
    assert expected.skipped == bool(arguments.get("skip_nonfinite"))
    assert expected.count(SHAPES[0][0]) == 700


def test_workers_at_different_steps_or_with_residuals_of_others_change_nothing(tmp_path):
    """At steps 5, 6 and 7, whose sum is that of three at 6; before compression and with it, on both paths."""
    _, said = launched(3, tmp_path, "out_of_step_worker.py", tmp_path)
    paths = [tmp_path / f"{rank}.json" for rank in range(3)]
    assert all(path.exists() for path in paths), said
    records = [json.loads(path.read_text()) for path in paths]
    assert len(records[0]) == 10 + 4
    for name in records[0]:
        found = [record[name] for record in records]
        assert len({one["weights"] for one in found}) == 1, name
        refuses = not name.endswith("together")
        assert [bool(one["said"]) for one in found] == [refuses] * 3, (name, found[0]["said"])
        assert [one["changed"] for one in found] == [not refuses] * 3, name
        if refuses and "composite" in name:
            assert all("worker" in one["said"] for one in found), found[0]["said"]


def started(name, folder):
    """Start workers one by one, and what brings them together: msrun would end the others itself."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MS_WORKER_NUM": str(HOSTS),
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(free_port()),
    }
    command = [sys.executable, str(TESTS / "dying_worker.py"), name, str(folder)]
    roles = [{"MS_ROLE": "MS_SCHED"}, *({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(k)} for k in range(HOSTS))]
    for k, role in enumerate(roles):
        with (folder / f"{k}.log").open("w") as file:
            yield subprocess.Popen(command, env=environment | role, cwd=folder, stdout=file, stderr=file)


def test_a_worker_that_dies_gives_the_others_an_error(tmp_path):
    """Or the framework ends them; none goes on. Most of the time is MindSpore's time-out, so all run together."""
    processes = {}
    try:
        for name in ("DGCMomentum", "LocalSteps", "Muon"):
            (tmp_path / name).mkdir()
            processes[name] = list(started(name, tmp_path / name))
        ends = {name: [process.wait(240) for process in of_it[1:]] for name, of_it in processes.items()}
    finally:
        for process in itertools.chain(*processes.values()):
            process.kill()
    for name in processes:
        folder = tmp_path / name
        said = "".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
        assert all(end != 0 for end in ends[name]), said
        finished = [sorted(path.name for path in folder.glob(f"{rank} after *.npz")) for rank in range(HOSTS)]
        assert finished == [[f"{rank} after {step}.npz" for step in range(5)] for rank in range(HOSTS)], said
