"""Draws programs from a seed, has a child process run them, and says how to repeat one that fails."""

import collections
import importlib
import json
import math
import os
import pathlib
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import hypothesis

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(path) for path in (HERE, HERE.parent) if str(path) not in sys.path]

# A campaign is a module here. It states PROGRAM, a strategy of Hypothesis whose values json can write, and
# attack(program), which runs in the child process: it raises AssertionError with what it found, or returns what it did
# as a dict of counts. It may state prepare(), which does what takes long before the first program, such as a build. The
# numbers are of programs: how many CI runs, and how many a round of a long run draws.
CAMPAIGNS = {
    "programs": (4, 30),
    "references": (3, 20),
    "constructions": (20, 100),
    "interrupts": (1, 5),
    "saves": (10, 100),
    "launches": (1, 2),
    "notebooks": (3, 30),
    "workers": (2, 10),
}
# No program takes longer than this, in seconds, unless it has stopped for good.
PATIENCE = 180
# A child takes a new process after so many programs: graphs that were compiled stay in memory.
PROGRAMS_A_CHILD = 150


class Finding(AssertionError):  # noqa: N818 - the package is wrong, not the search
    """A program that fails, and what it fails with."""


class Child:
    """A process that runs programs, started when it is needed."""

    def __init__(self):
        self.process = None
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
        self.said.close()

    def start(self):
        reads, writes = os.pipe()
        self.said.seek(0)
        self.said.truncate()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), str(writes)],
            pass_fds=(writes,),
            stdin=subprocess.PIPE,
            stdout=self.said,
            stderr=self.said,
            text=True,
            start_new_session=True,
        )
        os.close(writes)
        self.answers, self.count = os.fdopen(reads), 0

    def stop(self):
        if self.process is None:
            return
        if self.process.poll() is None:
            # With all that it started itself, which is in its session.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.answers.close()
        self.process = None

    def run(self, campaign, program):
        """Run a program; return its counts, or raise a Finding."""
        getattr(importlib.import_module(campaign), "prepare", lambda: None)()
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps({"campaign": campaign, "program": program}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.answers], [], [], PATIENCE)
        line = self.answers.readline() if ready else ""
        if not line:
            how = f"did not end within {PATIENCE} s" if not ready else f"ended with status {self.process.wait()}"
            self.stop()
            self.said.seek(max(0, self.said.seek(0, os.SEEK_END) - 4000))
            raise Finding(f"The process {how}. The end of what it said:\n{self.said.read().decode(errors='replace')}")
        self.count += 1
        answer = json.loads(line)
        if "found" in answer or self.count == PROGRAMS_A_CHILD:
            self.stop()
        if "found" in answer:
            raise Finding(answer["found"])
        return answer["counts"]


def hunt(campaign, seed, examples, end=math.inf):
    """Run programs that a seed draws; return what they counted, or raise a Finding with the smallest that fails.

    None is begun after `end`, of time.monotonic().
    """
    counts, found = collections.Counter(), []

    with Child() as child:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        )
        @hypothesis.given(importlib.import_module(campaign).PROGRAM)
        def attacked(program):
            if time.monotonic() > end and not found:
                return
            try:
                counts.update({"programs": 1, **child.run(campaign, program)})
            except Finding as finding:
                found.append((finding, program))
                raise

        try:
            attacked()
        except (Finding, hypothesis.errors.Flaky):
            finding, program = found[-1]
            how = f"python tests/campaign/run.py {campaign} --program {shlex.quote(json.dumps(program))}"
            drawn = f"It was drawn with --seed {seed} as one of {examples}."
            raise Finding(f"{finding}\n\n{drawn} This program repeats it:\n{how}") from None
    return counts
