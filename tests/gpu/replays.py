"""Launches that tests/replay.cc runs under sanitizers, of the CUDA operators as they are or with a planted mistake."""

import dataclasses
import shutil

import machines
import recording
from builds import attempt, needs, run
from sources import ROOT, TESTS

SANITIZERS = ["-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-fsanitize=address,undefined"]
BACKWARDS = {"MS_OPTIM_STANDIN_BACKWARDS": "1"}


def built(folder, ops, more=()):
    """Build tests/replay.cc with the CUDA operators."""
    needs("g++")
    program = folder / "replay"
    # Optimizing takes longer than it saves.
    flags = [*machines.FLAGS, "-O0", "-pthread", *more]
    include = [machines.INCLUDE[0], f"-I{ops / 'include'}", f"-I{ops / 'cuda'}"]
    run(["g++", *flags, *include, "-x", "c++", TESTS / "replay.cc", ops / "cuda" / "entry.cu", "-o", program])
    return program


def add_workspace(stand_in, case):
    """Let a launch find a workspace of just the size that it needs behind its arguments."""
    workspace = machines.workspace_of(stand_in.library, case.function, case.arrays)
    return dataclasses.replace(case, arrays=[*case.arrays, workspace], passed=len(case.arrays) + 1)


def replayed(folder, program, cases, **environment):
    """Replay launches; return what became of all arrays but the workspace, and what a sanitizer said if it did."""
    recording.write(folder / "recording", cases)
    done = attempt([program, folder / "recording", folder / "results"], **environment)
    if done.returncode != 0:
        return None, done.stdout
    results = recording.read(folder / "results", cases)
    return [(status, arrays[:-1]) for status, arrays in results], ""


def is_noticed(stand_in, folder, mistake, rules, cases, flags=SANITIZERS):
    """Whether launches show a mistake: what file of ops/cuda says, and what is planted in its place.

    `rules` stands in place of ops/include/rules.h: compiling all rules takes long.
    """
    name, right, wrong = mistake
    ops = shutil.copytree(ROOT / "ops", folder / "ops")
    (ops / "include" / "rules.h").write_text(rules)
    text = (ops / "cuda" / name).read_text()
    assert text.count(right) == 1
    (ops / "cuda" / name).write_text(text.replace(right, wrong))
    program = built(folder, ops, flags)
    expected = [case.run(stand_in.call)[1] for case in cases]

    def is_wrong(order):
        results, _ = replayed(folder, program, [add_workspace(stand_in, case) for case in cases], **order)
        if results is None:
            return True
        pairs = [pair for (_, arrays), right in zip(results, expected) for pair in zip(arrays, right)]
        return any(a.tobytes() != b.tobytes() for a, b in pairs)

    return any(is_wrong(order) for order in ({}, BACKWARDS))
