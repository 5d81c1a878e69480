"""Remembers which tests of builds have passed, so that they run again only when something that they depend on changes.

They compile for other processors, under sanitizers and with planted mistakes: a fifth of the suite's processor time.
A test is marked with the sources that it depends on: `pytest.mark.proof("ops", "setup.py")`. It is skipped, with the
day that it passed as the reason, if it has passed with the same sources, tests, libraries, compilers and processor.
What runs on a card is never skipped: it may run on another card now, or under another tool.
``pytest --prove`` runs all of them.
"""

import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from sources import ROOT, TESTS

# What tests of the native sources depend on besides: how they are built, and what Python passes to them.
BUILT = ("ops", "setup.py", "ms_optim/kernels", "ms_optim/dgc", "ms_optim/local_steps", "ms_optim/rules")
# None: nothing is remembered.
FOLDER = os.environ.get("MS_OPTIM_TEST_PROOFS", pathlib.Path.home() / ".cache" / "ms_optim" / "proofs") or None
COMPILERS = ("g++", "clang++", "aarch64-linux-gnu-g++", "qemu-x86_64", "qemu-aarch64", "nvcc", "ld")
# What changes what a test runs or compiles.
VARIABLES = ("MS_OPTIM_INSTRUCTION_SET", "OMP_NUM_THREADS", "ASCENDC_INCLUDE")
KINDS = {".py", ".h", ".cc", ".cpp", ".cu", ".cuh"}


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the sources of a file or folder."""
    return sorted(p for p in path.rglob("*") if p.suffix in KINDS) if path.is_dir() else [path]


@functools.cache
def digest_of(path: pathlib.Path) -> bytes:
    """Return a digest of the sources of a file or folder."""
    hashed = hashlib.sha256()
    for file in files_of(path):
        hashed.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes())
    return hashed.digest()


@functools.cache
def surroundings() -> bytes:
    """Return what is not a source: the processor, compilers, versions, and the libraries that were built."""
    said = [platform.machine(), sys.version, ms.__version__, np.__version__, str(os.cpu_count())]
    said += [os.environ.get(name, "") for name in VARIABLES]
    for command in COMPILERS:
        try:
            said.append(subprocess.run([command, "--version"], capture_output=True, text=True).stdout)
        except OSError:
            said.append(f"no {command}")
    info = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    said += next(([line] for line in info.splitlines() if line.startswith(("flags", "Features"))), [])
    import ms_optim

    built = [file.read_bytes() for file in sorted(pathlib.Path(ms_optim.__path__[0]).glob("*.so"))]
    return hashlib.sha256(json.dumps(said).encode() + b"".join(built)).digest()


def proof_of(item) -> pathlib.Path | None:
    """Return the file that tells that a test has passed with what it depends on now; None if it is not remembered."""
    marks = list(item.iter_markers("proof"))
    if not marks or FOLDER is None or "gpu" in item.fixturenames:
        return None
    # The helpers of all tests, and the test's own module.
    sources = [file for file in files_of(TESTS) if not file.name.startswith("test_")]
    sources += [item.path, *(ROOT / source for mark in marks for source in mark.args)]
    hashed = hashlib.sha256(surroundings() + item.nodeid.rpartition("/")[2].encode())
    for source in sources:
        hashed.update(source.name.encode() + digest_of(source))
    return pathlib.Path(FOLDER) / hashed.hexdigest()


def skip_what_is_proved(items) -> None:
    """Skip the tests that have passed with what they depend on, and keep what they said that they prove."""
    for item in items:
        proof = proof_of(item)
        if proof is not None and proof.exists():
            told = json.loads(proof.read_text())
            reason = f"passed on {told['day']} with the same sources, compilers and processor: pytest --prove"
            item.add_marker(pytest.mark.skip(reason=reason))
            item.user_properties += [(name, tuple(value)) for name, value in told["properties"]]


def note(item) -> None:
    """Remember that a test has passed."""
    proof = proof_of(item)
    if proof is not None:
        proof.parent.mkdir(parents=True, exist_ok=True)
        whole = proof.with_suffix(f".{os.getpid()}")
        told = {"day": str(datetime.date.today()), "test": item.nodeid, "properties": item.user_properties}
        whole.write_text(json.dumps(told))
        whole.replace(proof)
