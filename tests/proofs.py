"""Remembers which tests of builds have passed, so that they run again only when something that they depend on changes.

They compile for other processors, under sanitizers and with planted mistakes: a quarter of the suite's processor time.
A test is marked with the sources that it depends on: `pytest.mark.proof("ops", "setup.py")`. It is skipped, with the
day that it passed as the reason, if it has passed with the same sources, helpers, libraries, compilers and processor.
What runs on a card is never skipped: it may run on another card now, or under another tool.
``pytest --prove`` runs all of them.

A machine knows what has passed on it, and tests/proofs.json what had passed where the sources were changed last: a new
clone on a processor of the same kind need not build all that again. What this machine knows is written into that file
by ``pytest --collect-only -n 0 --record-proofs``.
"""

import ast
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
RECORD = TESTS / "proofs.json"
COMPILERS = ("g++", "clang++", "aarch64-linux-gnu-g++", "qemu-x86_64", "qemu-aarch64", "nvcc", "ld")
# What changes what a test runs or compiles. Not OMP_NUM_THREADS, which MindSpore sets for the processes of a test run.
VARIABLES = ("MS_OPTIM_INSTRUCTION_SET", "ASCENDC_INCLUDE")
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
def helpers_of(module: pathlib.Path) -> list[pathlib.Path]:
    """Return a test's module and what it imports of tests/, directly or not; also all of a folder of its own.

    Native sources are not imported: all of them count.
    """
    found: set[pathlib.Path] = set()
    waiting = [module, *(file for file in files_of(TESTS) if file.suffix != ".py")]
    if TESTS in module.parent.parents:
        waiting += files_of(module.parent)
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text())) if file.suffix == ".py" else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            places = [TESTS / name.partition(".")[0] for name in names]
            waiting += [place.with_suffix(".py") for place in places if place.with_suffix(".py").exists()]
            waiting += [each for place in places if place.is_dir() for each in files_of(place)]
    return sorted(found)


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

    # That for GPUs is not the same to the byte in each build.
    library = pathlib.Path(ms_optim.__path__[0], "libms_optim_cpu.so")
    built = library.read_bytes() if library.exists() else b""
    return hashlib.sha256(json.dumps(said).encode() + built).digest()


def name_of(item) -> str | None:
    """Return what a proof of a test is called: by its sources, and by what surrounds them; None if it has none."""
    marks = list(item.iter_markers("proof"))
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if not marks or FOLDER is None or "gpu" in (*item.fixturenames, *parameters):
        return None
    sources = [*helpers_of(item.path), *(ROOT / source for mark in marks for source in mark.args)]
    hashed = hashlib.sha256(item.nodeid.rpartition("/")[2].encode())
    for source in sources:
        hashed.update(source.name.encode() + digest_of(source))
    return f"{hashed.hexdigest()[:32]} {surroundings().hex()[:32]}"


@functools.cache
def recorded() -> dict[str, dict]:
    """Return the proofs that came with the sources, by name."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def told_of(name: str) -> dict | None:
    """Return what a proof tells; None if there is none."""
    file = pathlib.Path(FOLDER, name)
    return json.loads(file.read_text()) if file.exists() else recorded().get(name)


def record(items) -> None:
    """Write the proofs of tests into the file that comes with the sources.

    Beside them stay those of other surroundings, and of tests that are not among these.
    """
    if FOLDER is None:
        raise pytest.UsageError("--record-proofs needs what this machine remembers: unset MS_OPTIM_TEST_PROOFS")
    names = [name for name in map(name_of, items) if name is not None]
    proved = {name: told for name in names if (told := told_of(name)) is not None}
    current, tests = {name.split()[0] for name in names}, {item.nodeid for item in items}
    others = {name: told for name, told in recorded().items() if told["test"] not in tests}
    proved |= {name: told for name, told in recorded().items() if name.split()[0] in current} | others
    lines = [f" {json.dumps(name)}: {json.dumps(proved[name])}" for name in sorted(proved)]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def skip_what_is_proved(items) -> None:
    """Skip the tests that have passed with what they depend on, and keep what they said that they prove."""
    for item in items:
        name = name_of(item)
        told = None if name is None else told_of(name)
        if told is not None:
            reason = f"passed on {told['day']} with the same sources, compilers and processor: pytest --prove"
            item.add_marker(pytest.mark.skip(reason=reason))
            item.user_properties += [(name, tuple(value)) for name, value in told["properties"]]


def note(item) -> None:
    """Remember that a test has passed."""
    name = name_of(item)
    if name is not None:
        proof = pathlib.Path(FOLDER, name)
        proof.parent.mkdir(parents=True, exist_ok=True)
        whole = proof.with_suffix(f".{os.getpid()}")
        told = {"day": str(datetime.date.today()), "test": item.nodeid, "properties": item.user_properties}
        whole.write_text(json.dumps(told))
        whole.replace(proof)
