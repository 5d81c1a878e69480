"""Fixtures, and the order of running: both modes and both paths of everything."""

import gc
import os
import pathlib
import sys

import mindspore as ms
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import processes
import proofs
from runtime import SYNCHRONOUS, set_mode, spare_threads

spare_threads()
# MindSpore's compilers allocate small pieces by the million. Where glibc keeps freed ones at hand, a compile takes a
# tenth less time: in processes that are still to start, which are pytest's workers and what they start.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=60000")


def pytest_addoption(parser):
    """Offer to run what has passed before."""
    parser.addoption("--prove", action="store_true", help="also run tests of builds whose sources have not changed")
    parser.addoption("--record-proofs", action="store_true", help="write what has passed into tests/proofs.json")


def pytest_collection_modifyitems(config, items):
    """Put tests of processes first, and tests that compile graphs last.

    Processes run one program after the other for minutes: only one worker of a test run shall wait for them, and tests
    that stand together are given to one. Each graph makes every later operator of PyNative mode slower.
    """
    items.sort(key=lambda item: (item.get_closest_marker("program") is None, "graph" in item.name))
    if config.getoption("record_proofs"):
        proofs.record(items)
    if not config.getoption("prove"):
        proofs.skip_what_is_proved(items)
    # Python's collector would go through all that is imported and these thousands of tests again and again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Run a test while no processes of another one train together."""
    with processes.turns.test():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Remember which tests of builds pass."""
    report = yield
    if report.when == "call" and report.passed:
        proofs.note(item)
    return report


@pytest.fixture
def proves(record_property):
    """Return what notes for the closing lines that something for an instruction set runs, and where."""
    return lambda what, where="natively": record_property("proves", (where, what))


def pytest_terminal_summary(terminalreporter):
    """Say which instruction sets were tested, and where: machines differ from run to run."""
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("skipped", [])]
    # A file that is skipped as a whole has a report of its own kind.
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    proved = sorted({tuple(value) for key, value in properties if key == "proves"})
    if not proved:
        return
    terminalreporter.section("instruction sets that were tested")
    for where in dict(proved):
        terminalreporter.line(f"{where}: {', '.join(what for at, what in proved if at == where)}")


@pytest.fixture(params=["graph", "pynative"])
def mode(request):
    """Run the test in Graph mode and in PyNative mode."""
    set_mode(request.param)
    return request.param


@pytest.fixture(params=["aot", "composite"])
def backend(request):
    """Run the test on the fused kernel and on MindSpore's operators."""
    return request.param


@pytest.fixture
def records_of(request, tmp_path_factory):
    """Return what gives the records of so many processes that have run the test's program."""
    return processes.of_programs(request, tmp_path_factory)


@pytest.fixture(autouse=True)
def _as_if_alone():
    """Start every test with the same mode and seed, whatever the last one asked for."""
    ms.set_seed(0)  # of what networks start from, and of the noise that rounds
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=SYNCHRONOUS)
