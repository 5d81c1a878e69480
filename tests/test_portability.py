"""The operators on other processors and under sanitizers: the same launches, the same bits.

tests/recording.py makes the launches; tests/replay.cc, linked with the operators, runs them outside of Python. Nothing
is let off: no sum depends on the width of registers, no product is contracted, and where libm's pow enters, in bias
corrections, two libms that differ in the last place of a float64 give the same float32 but once in 2^29. Only the sign
of a NaN is the processor's own. Products of matrices, Muon's, are let off: they are contracted, and compared to
rounding; of one instruction set they have the same bits for any number of threads.
"""

import ctypes
import platform
import sys

import numpy as np
import pytest
import recording
from builds import attempt, build, check, needs, once, replay, sanitized, shared_folder
from native import Launch, instruction_sets

from ms_optim import _kernels, _libraries

pytestmark = pytest.mark.skipif(
    _kernels.why_not("adamw", "CPU") is not None, reason=str(_kernels.why_not("adamw", "CPU"))
)


@pytest.fixture(scope="module")
def cases():
    return recording.cases()


@pytest.fixture(scope="module")
def expected(cases):
    """What the package's own library makes of the launches, in the best instruction set and as many threads as here."""
    results = [case.run() for case in cases]
    assert [status for status, _ in results] == [0] * len(cases)
    return results


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_instruction_sets_and_threads_give_the_same_bits(cases, expected, name, threads):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    library, openmp = _libraries.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
    best, most = library.ms_optim_instruction_set(), openmp.omp_get_max_threads()
    try:
        assert library.ms_optim_force_instruction_set(name.encode()) == 0
        openmp.omp_set_num_threads(threads)
        check(cases, [case.run() for case in cases], expected, same_code=name.encode() == best)
    finally:
        library.ms_optim_force_instruction_set(best)
        openmp.omp_set_num_threads(most)


@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_products_of_matrices_have_the_same_bits_for_any_number_of_threads(cases, name):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    library, openmp = _libraries.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
    best, most = library.ms_optim_instruction_set(), openmp.omp_get_max_threads()
    of_matrices = [case for case in cases if case.function == "ms_optim_muon"]
    assert len(of_matrices) > 10
    results = []
    try:
        assert library.ms_optim_force_instruction_set(name.encode()) == 0
        for threads in (1, 2, 3):
            openmp.omp_set_num_threads(threads)
            results.append([case.run() for case in of_matrices])
    finally:
        library.ms_optim_force_instruction_set(best)
        openmp.omp_set_num_threads(most)
    for others in results[1:]:
        check(of_matrices, others, results[0])


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    needs("aarch64-linux-gnu-g++", "qemu-aarch64")
    shared = shared_folder(tmp_path_factory)
    return once(shared, "aarch64", lambda f: build(f, "aarch64-linux-gnu-g++", "aarch64", link=["-static"])) / "replay"


def fewest(cases):
    """Return which cases, the smaller first, show every operator each dtype that it takes and each flag by itself."""
    chosen, shown = [], set()
    for k in sorted(range(len(cases)), key=lambda k: sum(a.nbytes for a in cases[k].arrays)):
        case = cases[k]
        extents = [(axis, bit) for axis, n in enumerate(case.arrays[0].shape) for bit in range(20) if n - 1 >> bit & 1]
        shows = {(case.function, case.callers, what) for what in (*extents, *(str(a.dtype) for a in case.arrays))}
        if shows - shown:
            chosen.append(k)
            shown |= shows
    return sorted(chosen)


def test_aarch64_gives_the_same_bits(aarch64, tmp_path, cases, expected):
    """In three threads, for how many there are changes no bit above; few launches, as an emulator is slow."""
    chosen = fewest(cases)
    assert {cases[k].function for k in chosen} == {case.function for case in cases}
    cases, expected = zip(*((cases[k], expected[k]) for k in chosen))
    assert replay(tmp_path, ["qemu-aarch64", aarch64], cases, expected, OMP_NUM_THREADS="3") == "baseline"


needs_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sanitizers are tried on x86-64 Linux"
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """The operators under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return sanitized(shared_folder(tmp_path_factory), "address,undefined")[0]


@pytest.fixture(scope="module")
def races(tmp_path_factory):
    """The operators under ThreadSanitizer, and the environment that it needs.

    GCC's OpenMP library synchronizes in ways that ThreadSanitizer cannot follow, and every parallel loop would look
    like a race. LLVM's tells it what it does, through Archer, a tool that comes with it.
    """
    program, archer = sanitized(shared_folder(tmp_path_factory), "thread")
    options = {"OMP_TOOL_LIBRARIES": str(archer), "TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    return program, {**options, "OMP_NUM_THREADS": "3"}


@needs_linux_x86
@pytest.mark.parametrize("name", ["avx512", "avx2", "baseline"])
def test_address_and_undefined_behavior_sanitizers(memory, tmp_path, cases, expected, name):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    # The others are the same source with narrower registers: half of the launches each.
    part = {"avx512": slice(None), "avx2": slice(0, None, 2), "baseline": slice(1, None, 2)}[name]
    assert replay(tmp_path, [memory], cases[part], expected[part], MS_OPTIM_INSTRUCTION_SET=name) == name


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
