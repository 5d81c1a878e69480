"""The operators on other processors and under sanitizers: the same launches, the same bits.

tests/recording.py makes the launches; tests/replay.cc, linked with the operators, runs them outside of Python. Nothing
is let off: no sum depends on the width of registers, no product is contracted, and where libm's pow enters, in bias
corrections, two libms that differ in the last place of a float64 give the same float32 but once in 2^29. Only the sign
of a NaN is the processor's own.
"""

import concurrent.futures
import ctypes
import os
import pathlib
import platform
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import recording
from native import Launch
from sources import ROOT, TESTS
from test_kernels import instruction_sets

from ms_optim import _kernels

pytestmark = pytest.mark.skipif(
    _kernels.why_not("adamw", "CPU") is not None, reason=str(_kernels.why_not("adamw", "CPU"))
)
DEBIAN = "apt install g++-aarch64-linux-gnu qemu-user clang libomp-dev"
# With so little optimization, loops that are asked to be vectorized need not be.
SANITIZE = ["-Wno-pass-failed", "-O1", "-gline-tables-only", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def cases():
    return recording.cases()


@pytest.fixture(scope="module")
def expected(cases):
    """What the package's own library makes of the launches, in the best instruction set and as many threads as here."""
    results = [case.run() for case in cases]
    assert [status for status, _ in results] == [0] * len(cases)
    return results


def check(cases, results, expected):
    for case, result, wanted in zip(cases, results, expected):
        case.check(result, wanted)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_instruction_sets_and_threads_give_the_same_bits(cases, expected, name, threads):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    library, openmp = _kernels.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
    best, most = library.ms_optim_instruction_set(), openmp.omp_get_max_threads()
    try:
        assert library.ms_optim_force_instruction_set(name.encode()) == 0
        openmp.omp_set_num_threads(threads)
        check(cases, [case.run() for case in cases], expected)
    finally:
        library.ms_optim_force_instruction_set(best)
        openmp.omp_set_num_threads(most)


def needs(*programs):
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: {DEBIAN})")


def build(folder: pathlib.Path, compiler: str, machine: str, flags=(), link=()) -> pathlib.Path:
    """Compile tests/replay.cc and the operators for a machine, as setup.py does, with warnings for errors."""
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    sets = setup["INSTRUCTION_SETS"].get(machine, {"baseline": []})
    cpu = ROOT / "ops" / "cpu"
    units = [(TESTS / "replay.cc", "replay", []), (cpu / "entry.cc", "entry", [])]
    # The kernels take longest: they come first.
    units[:0] = [(cpu / "kernels.cc", name, [f"-DMS_OPTIM_ISA={name}", *options]) for name, options in sets.items()]
    common = [compiler, *setup["FLAGS"], "-fopenmp", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", *flags]
    common += [f"-I{cpu}", f"-I{ROOT / 'ops' / 'include'}"]

    def compile(unit):
        source, name, options = unit
        run([*common, *options, "-c", str(source), "-o", str(folder / f"{name}.o")])
        return str(folder / f"{name}.o")

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, units))
    program = folder / "replay"
    run([*common, *objects, *link, "-o", str(program)])
    return program


def run(command, **environment):
    """Run a command and return what it says; a failure shows that."""
    done = attempt(command, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def attempt(command, **environment):
    return subprocess.run(
        list(map(str, command)),
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
    check(cases, recording.read(folder / "results", cases), expected)
    return said.split()[0]


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    needs("aarch64-linux-gnu-g++", "qemu-aarch64")
    return build(tmp_path_factory.mktemp("aarch64"), "aarch64-linux-gnu-g++", "aarch64", link=["-static"])


@pytest.mark.parametrize("threads", [1, 3])
def test_aarch64_gives_the_same_bits(aarch64, tmp_path, cases, expected, threads):
    command = ["qemu-aarch64", aarch64]
    assert replay(tmp_path, command, cases, expected, OMP_NUM_THREADS=str(threads)) == "baseline"


needs_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sanitizers are tried on x86-64 Linux"
)


def sanitized(tmp_path_factory, kind):
    """Build with sanitizers; return the program, and where Archer is."""
    needs("clang++")
    llvm = pathlib.Path(run(["clang++", "-print-resource-dir"]).strip())
    for library in ("libomp.so", "libarcher.so"):
        if not (llvm.parents[1] / library).exists():
            pytest.skip(f"{llvm.parents[1] / library} is not installed (Debian: {DEBIAN})")
    if not list(llvm.glob("lib/**/libclang_rt.asan*")):
        pytest.skip(f"{llvm} has no sanitizers (Debian: {DEBIAN})")
    folder = tmp_path_factory.mktemp("sanitized")
    program = build(folder, "clang++", platform.machine(), [*SANITIZE, f"-fsanitize={kind}"])
    return program, llvm.parents[1] / "libarcher.so"


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """The operators under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return sanitized(tmp_path_factory, "address,undefined")[0]


@pytest.fixture(scope="module")
def races(tmp_path_factory):
    """The operators under ThreadSanitizer, and the environment that it needs.

    GCC's OpenMP library synchronizes in ways that ThreadSanitizer cannot follow, and every parallel loop would look
    like a race. LLVM's tells it what it does, through Archer, a tool that comes with it.
    """
    program, archer = sanitized(tmp_path_factory, "thread")
    options = {"OMP_TOOL_LIBRARIES": str(archer), "TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    return program, {**options, "OMP_NUM_THREADS": "3"}


@needs_linux_x86
@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_address_and_undefined_behavior_sanitizers(memory, tmp_path, cases, expected, name):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    assert replay(tmp_path, [memory], cases, expected, MS_OPTIM_INSTRUCTION_SET=name) == name


@needs_linux_x86
def test_thread_sanitizer(races, tmp_path, cases, expected):
    program, environment = races
    replay(tmp_path, [program], cases, expected, **environment)


# ---- What the sanitizers are there for is found -----------------------------------------------------------------


def small(**options):
    """A launch by address, whose pointers end with global_step, skipped_steps, statistics and two beta powers."""
    return recording.by_address(np.random.default_rng(0), recording.WEIGHTS[0], "float32", **options)


def said_of(tmp_path, program, case, **environment):
    recording.write(tmp_path / "recording", [case])
    done = attempt([program, tmp_path / "recording", tmp_path / "results"], **environment)
    assert done.returncode != 0
    return done.stdout


@needs_linux_x86
def test_an_array_too_short_is_noticed(memory, tmp_path):
    shapes = [(1000,)]
    states = [[np.zeros(s, np.float32) for s in shapes] for _ in range(2)]
    made = Launch("ms_optim_adamw", [np.ones(1000, np.float32)], [np.ones(1000, np.float32)], states, (0.9, 0.99, 0), 4)
    case = recording.Recorded("a gradient without its last byte", made.function, made.arrays, bytes={9: 3999})
    assert "heap-buffer-overflow" in said_of(tmp_path, memory, case)


@needs_linux_x86
def test_undefined_behavior_is_noticed(memory, tmp_path):
    case = small()
    table, place, target, _ = case.pointers[-5]
    case.pointers[-5] = (table, place, target, 2)  # the step count's address, were its numbers of two bytes
    assert "misaligned address" in said_of(tmp_path, memory, case)


@needs_linux_x86
def test_a_race_is_noticed(races, tmp_path):
    program, environment = races
    case = small(callers=2)
    case.arrays[0] = case.arrays[0][:, _kernels.LOCKS :]  # what a launch does is its flags' shape
    assert "data race" in said_of(tmp_path, program, case, **environment)
