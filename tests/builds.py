"""Builds the operators outside of Python, and replays recorded launches with what was built."""

import concurrent.futures
import fcntl
import os
import pathlib
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import pytest
import recording
from sources import ROOT, TESTS

DEBIAN = "apt install g++-aarch64-linux-gnu qemu-user clang libomp-dev"
# Optimizing takes longer than it saves. Without it, loops that are asked to be vectorized need not be.
SANITIZE = ["-Wno-pass-failed", "-O0", "-gline-tables-only", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def shared_folder(factory) -> pathlib.Path:
    """Return a folder that the processes of a test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(base: pathlib.Path, name: str, build) -> pathlib.Path:
    """Build something in a folder of that name, unless another process has; return the folder."""
    folder = base / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            build(folder)
            (folder / "built").touch()
    return folder


def needs(*programs):
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: {DEBIAN})")


def build(folder: pathlib.Path, compiler: str, machine: str, flags=(), link=()) -> pathlib.Path:
    """Compile tests/replay.cc and the operators for a machine; return the program."""
    return linked(folder / "replay", compiler, machine, flags, link, [(TESTS / "replay.cc", "replay", [])])


def wheel(folder: pathlib.Path, compiler: str, ops=ROOT / "ops") -> pathlib.Path:
    """Build a wheel with a cross compiler, and return the library that it brings."""
    machine = run([compiler, "-dumpmachine"]).split("-")[0]
    sources = folder / "sources"
    # From sources in a folder of their own: a library for this machine may lie among them.
    shutil.copytree(ROOT / "ms_optim", sources / "ms_optim", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ops, sources / "ops")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "setup.py", "bdist_wheel", "--plat-name", f"linux_{machine}"]
    said = run(command, cwd=sources, CXX=compiler, CXXFLAGS="-Wall -Wextra -Werror")
    (built,) = (sources / "dist").glob(f"*-linux_{machine}.whl")
    with zipfile.ZipFile(built) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert libraries == ["ms_optim/libms_optim_cpu.so"], said[-8000:]
        return pathlib.Path(archive.extract(libraries[0], folder))


def replayer(folder: pathlib.Path, compiler: str, library: pathlib.Path) -> None:
    """Compile tests/replay.cc, linked to a library, as `replay` in a folder."""
    include = [f"-I{ROOT / 'ops' / name}" for name in ("include", "cpu")]
    link = [library, f"-Wl,-rpath,{library.parent}", "-pthread"]
    run([compiler, "-std=c++17", *include, TESTS / "replay.cc", *link, "-o", folder / "replay"])


def cross_emulator(compiler: str) -> list:
    """Return the command that runs what a cross compiler has made, with the libraries that came with it."""
    machine = run([compiler, "-dumpmachine"]).split("-")[0]
    libc = pathlib.Path(run([compiler, "-print-file-name=libc.so.6"]).strip()).resolve()
    return [f"qemu-{machine}", "-L", libc.parents[1]]


def setup_script() -> dict:
    """Return what setup.py defines."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def linked(result: pathlib.Path, compiler: str, machine: str, flags, link, others=(), ops=ROOT / "ops") -> pathlib.Path:
    """Compile the CPU's operators for a machine, as setup.py does, with warnings for errors, and link them to others.

    Args:
        result: The file to make; objects are left beside it.
        compiler: The compiler's command.
        machine: The machine, as platform.machine() names it.
        flags: Flags besides setup.py's.
        link: Flags for the linker.
        others: Other sources: file, name of the object, flags.
        ops: Where the native sources are.
    """
    folder, setup = result.parent, setup_script()
    units = [(*other, None) for other in others]
    # The kernels take longest: they come first.
    units[:0] = [
        (
            ops.parent / source,
            f"{table}_{name}",
            [f"-DMS_OPTIM_ISA={name}", *own, *options],
            setup["symbol_of"](name, table),
        )
        for source, sets, own, table in setup["CPU_UNITS"]
        for name, options in sets.get(machine, {"baseline": []}).items()
    ]
    units.append((ops / "cpu/entry.cc", "entry", [], None))
    common = [compiler, *setup["FLAGS"], "-fopenmp", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", *flags]
    common += [f"-I{ops / 'cpu'}", f"-I{ops / 'include'}"]

    def compile(unit):
        source, name, options, symbol = unit
        compiled = str(folder / f"{name}.o")
        run([*common, *options, "-c", str(source), "-o", compiled])
        return compiled if symbol is None else setup["isolate"]([compiler], compiled, symbol)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, units))
    run([*common, *objects, *link, "-o", str(result)])
    return result


def run(command, cwd=None, **environment):
    """Run a command and return what it says; a failure shows that."""
    done = attempt(command, cwd, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def attempt(command, cwd=None, **environment):
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )


def replay(folder, program, cases, expected, **environment):
    """Replay launches, expect what the package's library gives, and return the instruction set that was used."""
    recording.write(folder / "recording", cases)
    said = run([*program, folder / "recording", folder / "results"], **environment)
    check(cases, recording.read(folder / "results", cases), expected, same_code=False)
    return said.split()[-1]  # an emulator may have said before that it lacks something


def needs_sanitizers() -> pathlib.Path:
    """Skip where there are none; return the folder of LLVM's libraries."""
    needs("clang++")
    llvm = pathlib.Path(run(["clang++", "-print-resource-dir"]).strip())
    for library in ("libomp.so", "libarcher.so"):
        if not (llvm.parents[1] / library).exists():
            pytest.skip(f"{llvm.parents[1] / library} is not installed (Debian: {DEBIAN})")
    if not list(llvm.glob("lib/**/libclang_rt.asan*")):
        pytest.skip(f"{llvm} has no sanitizers (Debian: {DEBIAN})")
    return llvm.parents[1]


def sanitized(base: pathlib.Path, kind: str):
    """Build with sanitizers in a folder, unless it was; return the program, and where Archer is."""
    libraries = needs_sanitizers()
    flags = [*SANITIZE, f"-fsanitize={kind}"]
    folder = once(base, f"sanitized_{kind}", lambda folder: build(folder, "clang++", platform.machine(), flags))
    return folder / "replay", libraries / "libarcher.so"


def check(cases, results, expected, same_code=True):
    for case, result, wanted in zip(cases, results, expected):
        case.check(result, wanted, same_code)
