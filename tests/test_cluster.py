"""The hosts of benchmarks/dgc_cluster.py: their links are as slow as they should be, and nothing of them stays."""

import io
import os
import subprocess
import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
if not (ROOT / "benchmarks/dgc_cluster.py").exists():
    pytest.skip("the benchmarks are not here", allow_module_level=True)

import dgc_cluster

RATE, SIZE = 100, 4_000_000
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    start = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start)
"""


@pytest.fixture(scope="module")
def _hosts_can_be_made():
    reason = dgc_cluster.why_not()
    if reason:
        pytest.skip(reason)


def own():
    return [name for name in dgc_cluster.existing() if name.startswith(f"{dgc_cluster.PREFIX}-{os.getpid()}-")]


def test_left_over_namespaces_are_those_of_runs_no_longer_alive():
    names = ["dgc-7-0", "dgc-7-switch", "dgc-8-1", "dgc-x-1", "other", "dgc-7-0-mine", "my-dgc-7-0"]
    assert dgc_cluster.left_over(names, lambda pid: pid == 8) == ["dgc-7-0", "dgc-7-switch"]


def test_a_cluster_is_as_slow_as_its_slowest_worker():
    fast = {"DGC": {"rule": "DGC", "seconds": 0.1, "least": 0.1, "sent": 7.0, "received": 5.0}}
    slow = {"DGC": {"rule": "DGC", "seconds": 0.2, "least": 0.1, "sent": 5.0, "received": 6.0}}
    assert dgc_cluster.together([fast, slow]) == {
        "DGC": {"seconds": 0.2, "least": 0.1, "sent": 7.0, "received": 6.0},
    }


def test_results_and_last_words_are_read_from_the_same_output():
    output = io.StringIO('noise\nRESULT {"rule": "DGC", "seconds": 1.0}\n[INFO] no\n\nRuntimeError: it broke\n')
    assert dgc_cluster.results(output) == {"DGC": {"rule": "DGC", "seconds": 1.0}}
    assert dgc_cluster.last_words(output) == "noise\nRuntimeError: it broke"


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"^'cat nowhere' failed: cat: nowhere"):
        dgc_cluster.sh("cat", "nowhere")


def test_a_missing_command_is_why_hosts_cannot_be_made(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert dgc_cluster.why_not() == "the command ip and tc of iproute2 is missing"


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_a_link_has_its_rate():
    with dgc_cluster.hosts(2, RATE) as (a, b):
        at_b = ["ip", "netns", "exec", b, sys.executable, "-c", RECEIVE, dgc_cluster.address(1)]
        with subprocess.Popen(at_b, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            at_a = ["ip", "netns", "exec", a, sys.executable, "-c", SEND, dgc_cluster.address(1), str(SIZE)]
            seconds = float(subprocess.run(at_a, capture_output=True, text=True, timeout=60, check=True).stdout)
    # Headers take some; a busy machine may be slower, but none is faster.
    assert SIZE * 8 / seconds < RATE * 1e6
    assert SIZE * 8 / seconds > RATE * 1e6 / 4
    assert own() == []


def interrupted(running):
    with dgc_cluster.hosts(2, RATE) as names:
        assert len(own()) == 3
        running.append(subprocess.Popen(["ip", "netns", "exec", names[1], "sleep", "600"]))
        while str(running[0].pid) not in dgc_cluster.sh("ip", "netns", "pids", names[1]).split():
            assert running[0].poll() is None
        raise KeyboardInterrupt


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_nothing_stays_after_an_interrupt():
    outside, running = dgc_cluster.sh("ip", "-brief", "link"), []
    with pytest.raises(KeyboardInterrupt):
        interrupted(running)
    assert own() == []
    assert running[0].wait(10) < 0
    assert dgc_cluster.sh("ip", "-brief", "link") == outside


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_nothing_stays_of_hosts_that_could_not_be_made():
    with pytest.raises(RuntimeError, match=r"^'tc .* failed"), dgc_cluster.hosts(2, "no"):
        pass
    assert own() == []
