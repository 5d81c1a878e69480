"""Two processes compress and exchange: their weights stay the same to the bit, and follow the reference of two."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import reference
from exchange import CONFIGURATIONS, POISONED, SHAPES, STEPS, gradients, start
from harness import check_close, check_units
from sources import TESTS
from tolerances import TOLERANCE

WORKERS = 2
TOLERATED = {"w": TOLERANCE["weight"], "u": TOLERANCE["state with decay"], "r": TOLERANCE["state with decay"]}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module", params=["graph", "pynative"])
def records(request, tmp_path_factory):
    """Run the processes; return what each recorded."""
    folder = tmp_path_factory.mktemp(request.param)
    binaries = pathlib.Path(sys.executable).parent
    command = [str(binaries / "msrun"), f"--worker_num={WORKERS}", f"--local_worker_num={WORKERS}", "--join=True"]
    command += [f"--master_port={free_port()}", f"--log_dir={folder}", str(TESTS / "exchange_worker.py")]
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, request.param, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("worker_*.log")))
    said = f"msrun ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}{logs}"
    assert all((folder / f"{rank}.npz").exists() for rank in range(WORKERS)), said
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_weights_are_the_same_bits_on_all_workers_after_every_step(name, records):
    for step in range(STEPS):
        for i in range(len(SHAPES)):
            key = f"{name}/{step}/w{i}"
            assert records[0][key].tobytes() == records[1][key].tobytes(), key
    assert records[0][f"{name}/{STEPS - 1}/r0"].tobytes() != records[1][f"{name}/{STEPS - 1}/r0"].tobytes()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_workers_follow_the_reference_of_two(name, records):
    dtype, arguments = CONFIGURATIONS[name]
    known = {key: value for key, value in arguments.items() if key not in ("backend", "weight_decay")}
    n = len(SHAPES)
    expected = reference.DGCMomentum(
        start(dtype),
        [lambda k: 0.01] * n,
        [lambda k: arguments.get("weight_decay", 0.0)] * n,
        [False] * n,
        [dtype] * n,
        workers=WORKERS,
        **known,
    )
    for step in range(STEPS):
        given = [gradients(step, rank, dtype) for rank in range(WORKERS)]
        if step == POISONED and arguments.get("skip_nonfinite"):
            given[1][2].reshape(-1)[-1] = np.nan
        held = [
            {key: r[f"{name}/{step}/{key}"] for i in range(n) for key in (f"w{i}", f"u{i}", f"r{i}")} for r in records
        ]
        expected.sent = [[(h[f"u{i}"] == 0) & (h[f"r{i}"] == 0) for i in range(n)] for h in held]
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
    for record in records:
        assert record[f"{name}/counts"].tolist() == [expected.step_count, expected.skipped]
    assert expected.skipped == bool(arguments.get("skip_nonfinite"))
    assert expected.count(SHAPES[0][0]) == 700
