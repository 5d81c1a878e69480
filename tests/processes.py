"""Starts processes that train together."""

import contextlib
import fcntl
import functools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import IO

import numpy as np
import psutil
from builds import once, shared_folder
from sources import TESTS

LONGEST = 1000  # seconds that a script of the processes gets
HELD = "MS_OPTIM_IN_A_TEST"  # is in the environment of what a test starts


class Turns:
    """Lets processes that train together run while no test does.

    They wait for each other without sleep: beside tests, or other such processes, they take several times as long, and
    slow these down. A test that uses the processor holds one lock with others, and the processes hold it alone; who
    waits for it holds a second one, the gate, or tests would follow each other without end.
    """

    def __init__(self):
        locks = pathlib.Path(tempfile.gettempdir()) / f"ms_optim tests of user {os.getuid()}"
        self._gate, self._place = locks.with_suffix(".gate"), locks.with_suffix(".place")
        self._held: IO | None = None

    def _enter(self):
        with self._gate.open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
            self._held = self._place.open("w")
            fcntl.flock(self._held, fcntl.LOCK_SH)
        os.environ[HELD] = "1"

    def _leave(self):
        os.environ.pop(HELD, None)
        held, self._held = self._held, None
        if held is not None:
            held.close()
        return held is not None

    @contextlib.contextmanager
    def test(self):
        """Run a test beside others, or in a test."""
        if HELD in os.environ:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def wait(self):
        """Wait in a test for another test's processes."""
        was_held = self._leave()
        try:
            yield
        finally:
            if was_held:
                self._enter()

    @contextlib.contextmanager
    def alone(self):
        """Run processes while no test runs, but the one that waits for them."""
        with self.wait(), self._gate.open("w") as gate, self._place.open("w") as place:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(place, fcntl.LOCK_EX)
            yield


turns = Turns()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launched(count, folder, script, *arguments, longest=LONGEST):
    """Run a script in so many processes; return how they ended and the ends of what they said."""
    binaries = pathlib.Path(sys.executable).parent
    command = [str(binaries / "msrun"), f"--worker_num={count}", f"--local_worker_num={count}", "--join=True"]
    command += [f"--master_port={free_port()}", f"--log_dir={folder}", str(TESTS / script)]
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with turns.alone():
        run = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said = run.communicate(timeout=longest)[0]
        except subprocess.TimeoutExpired:
            end_all(run.pid)
            said = f"{run.communicate()[0]}\nIt was ended after {longest} s."
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("worker_*.log")))
    return run.returncode, f"msrun ended with {run.returncode}: {said[-2000:]}{logs}"


def end_all(pid):
    """End a process and all that it has started: processes that wait for others do so without sleep, and forever."""
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        each.kill()


def of_programs(request, factory):
    """Return what gives the records of a program's processes, and the folder that they are in.

    Starting processes takes longer than most of the programs: the same processes run all those, one after the other,
    whose tests were chosen. Those tests are marked with the program's name and take the number of `processes`.
    """

    def chosen(count):
        marked = ((item, item.get_closest_marker("program")) for item in request.session.items)
        return sorted({mark.args[0] for item, mark in marked if mark and item.callspec.params["processes"] == count})

    def start(count, folder):
        programs = chosen(count)
        longest = LONGEST * len(programs)
        (folder / "said").write_text(
            launched(count, folder, "worker_process.py", folder, *programs, longest=longest)[1]
        )

    def records(count):
        program = request.node.get_closest_marker("program").args[0]
        with turns.wait():
            folder = once(shared_folder(factory), f"{count} processes", functools.partial(start, count))
        paths = [folder / program / f"{rank}.npz" for rank in range(count)]
        assert all(path.exists() for path in paths), (folder / "said").read_text()
        return [dict(np.load(path)) for path in paths], folder / program

    return records
