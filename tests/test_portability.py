"""The operators on other processors and under sanitizers: the same launches, the same bits.

tests/recording.py makes the launches; tests/replay.cc, linked with the operators, runs them outside of Python. Nothing
is let off: no sum depends on the width of registers, no product is contracted, and where libm's pow enters, in bias
corrections, two libms that differ in the last place of a float64 give the same float32 but once in 2^29. Only the sign
of a NaN is the processor's own. Products of matrices, Muon's, are let off: they are contracted, and compared to
rounding; of one instruction set they have the same bits for any number of threads.

A processor that lacks an instruction set is shown by an emulator, with the package's own library: to ask a wider
processor for less shows what is asked for, and not what else was left in the library.
"""

import ctypes
import functools
import platform
import signal
import sys

import instructions
import numpy as np
import pytest
import recording
from builds import (
    attempt,
    check,
    cross_emulator,
    needs,
    once,
    replay,
    replayer,
    run,
    sanitized,
    setup_script,
    shared_folder,
    wheel,
)
from native import LIBRARY, Launch, instruction_sets
from proofs import BUILT
from setuptools.errors import CompileError

from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import SharedFlag

pytestmark = [
    pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))),
    pytest.mark.proof(*BUILT),
]


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
def test_instruction_sets_and_threads_give_the_same_bits(cases, expected, name, threads, proves):
    if name.encode() not in instruction_sets():
        pytest.skip(f"this processor has no {name}")
    proves(f"kernels for {name}")
    library, openmp = libraries.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
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
    library, openmp = libraries.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
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


CROSS = instructions.COMPILER


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    """tests/replay.cc, linked to the library that a wheel for aarch64 brings; a cross compiler has built both."""
    needs(CROSS, "qemu-aarch64")
    folder = once(shared_folder(tmp_path_factory), "aarch64", lambda f: replayer(f, CROSS, wheel(f, CROSS)))
    return folder / "replay"


def test_a_wheel_for_aarch64_gives_the_same_bits(aarch64, tmp_path, cases, expected, proves):
    """In three threads, for how many there are changes no bit above."""
    command = [*cross_emulator(CROSS), aarch64]
    assert replay(tmp_path, command, cases, expected, OMP_NUM_THREADS="3") == "baseline"
    proves("kernels for aarch64 baseline", "qemu-aarch64")


needs_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the library is for another processor"
)
# Processors by the emulator's names, and the kernels that they run: the plainest of all, and one with AVX2. It emulates
# none with AVX-512, whose instructions end a program there as on those processors.
EMULATED = {"qemu64": "baseline", "Haswell": "avx2"}


def emulator(processor):
    return ["qemu-x86_64", "-cpu", processor]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """tests/replay.cc, linked to the package's own library."""
    needs("g++", "qemu-x86_64")
    return once(shared_folder(tmp_path_factory), "own", lambda f: replayer(f, "g++", LIBRARY)) / "replay"


@needs_linux_x86
@pytest.mark.parametrize("processor", EMULATED)
def test_the_library_runs_on_processors_that_lack_instructions(own, tmp_path, cases, expected, processor, proves):
    """Every launch, in the kernels that the library picks there."""
    command = [*emulator(processor), own]
    assert replay(tmp_path, command, cases, expected, OMP_NUM_THREADS="3") == EMULATED[processor]
    proves(f"kernels for {EMULATED[processor]}", f"qemu-x86_64 -cpu {processor}")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """What counts the instructions that an emulator executes."""
    needs("g++", "qemu-x86_64")
    built = once(shared_folder(tmp_path_factory), "plugin", instructions.plugin) / "count"
    said = attempt([*emulator("Haswell")[:1], "-plugin", built, "/bin/true"]).stdout
    if "executed" not in said:
        pytest.skip(f"the emulator takes no plugin: {said}")
    return built


@needs_linux_x86
@pytest.mark.parametrize("name", instructions.LAUNCHES)
def test_loops_are_vectorized_on_arm64_as_they_are_on_avx2(aarch64, own, plugin, tmp_path, name):
    """Nothing takes more than twice as many instructions for its width, and no rule works on single numbers."""
    case = instructions.LAUNCHES[name]()
    arm64 = instructions.count(cross_emulator(CROSS), plugin, aarch64, case, tmp_path)
    avx2 = instructions.count(instructions.AVX2, plugin, own, case, tmp_path)
    assert arm64.executed < 2 * instructions.WIDER * avx2.executed
    assert arm64.is_vectorized or name in instructions.SINGLE, arm64


def test_every_rule_is_counted():
    of_rules = [make for make in instructions.LAUNCHES.values() if isinstance(make, functools.partial)]
    assert {make.args[0] for make in of_rules} >= set(recording.RULES)


ROOTS = """
int main() {
  static float x[1 << 16];
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < 1 << 16; ++i) x[i] = __builtin_sqrtf(x[i]) / (x[i] + 1.0f);
    __asm__ volatile("" : : "r"(x) : "memory");
  }
}
"""


@pytest.mark.parametrize("flags, is_vectorized", [(["-O3"], True), (["-O2", "-fno-tree-vectorize"], False)])
def test_a_loop_that_is_not_vectorized_is_noticed(plugin, tmp_path, flags, is_vectorized):
    needs(CROSS, "qemu-aarch64")
    (tmp_path / "roots.cc").write_text(ROOTS)
    counts = []
    for steps in (1, 2):
        run([CROSS, *flags, "-fno-math-errno", f"-DSTEPS={steps}", tmp_path / "roots.cc", "-o", tmp_path / "roots"])
        counts.append(instructions.counted(cross_emulator(CROSS), plugin, tmp_path / "roots"))
    assert instructions.Count(*((counts[1] - counts[0]) / (1 << 16))).is_vectorized == is_vectorized


WIDE = """
#include <stdio.h>
typedef float Vector __attribute__((vector_size(64)));
int main(int count, char **) {
  Vector x = {}, y = x + (float)count;
  __asm__ volatile("" : "+m"(y));
  return y[3] == 1.0f ? 0 : 2;
}
"""


@needs_linux_x86
@pytest.mark.parametrize("processor", EMULATED)
def test_the_emulator_ends_a_program_at_an_instruction_that_the_processor_lacks(tmp_path, processor):
    needs("g++", "qemu-x86_64")
    (tmp_path / "wide.cc").write_text(WIDE)
    sets = setup_script()["INSTRUCTION_SETS"]["x86_64"]
    ends = {}
    for name, options in sets.items():
        run(["g++", "-O2", "-Wno-psabi", *options, tmp_path / "wide.cc", "-o", tmp_path / name])
        ends[name] = attempt([*emulator(processor), tmp_path / name]).returncode
    runs = list(sets)[list(sets).index(EMULATED[processor]) :]
    assert ends == {name: 0 if name in runs else -signal.SIGILL for name in sets}


# What a linker would share, or run on loading: each becomes part of what is compiled for an instruction set.
SHARED = {
    "a template of the standard library": "void f(std::vector<double> &x) { x.assign(x.size() + 9, 1.5); }",
    "an inline function": "inline __attribute__((noinline)) int g() { return 1; } int (*f())() { return g; }",
    "a function that is not in the table": "int f() { return 1; }",
}
# Which the GNU compiler makes unique in the whole process, beyond a linker's choice.
UNIQUE = "inline int &f() { static int x; return x; } int *g() { return &f(); }"
ON_LOADING = 'struct A { A(); } a; A::A() { puts(""); }'


@pytest.mark.parametrize("compiler", ["g++", "clang++", "aarch64-linux-gnu-g++"])
def test_what_is_compiled_for_an_instruction_set_is_shared_with_no_other(tmp_path, compiler):
    """The build refuses an object that shares, and isolating makes it one that does not."""
    needs(compiler)
    setup, compiled = setup_script(), str(tmp_path / "unit.o")
    symbol = setup["symbol_of"]("baseline", "kernels")

    def refusal(name):
        try:
            setup["check_isolation"]([compiler], name, symbol)
        except RuntimeError as error:
            return str(error)
        return None

    def compile(body):
        source = (
            "#include <cstdio>\n#include <vector>\nnamespace ms_optim::baseline { extern const int kernels = 1; }\n"
        )
        (tmp_path / "unit.cc").write_text(source + body)
        run([compiler, *setup["FLAGS"], "-fPIC", "-c", tmp_path / "unit.cc", "-o", compiled])

    for what, body in SHARED.items():
        compile(body)
        assert "must define _ZN8ms_optim8baseline7kernelsE alone" in (refusal(compiled) or ""), what
        assert refusal(setup["isolate"]([compiler], compiled, symbol)) is None, what
    if compiler != "clang++":
        compile(UNIQUE)
        assert "_ZZ1fvE1x" in refusal(setup["isolate"]([compiler], compiled, symbol))
    compile(ON_LOADING)
    assert ".init_array" in refusal(setup["isolate"]([compiler], compiled, symbol))
    assert "alone" in refusal(setup["isolate"]([compiler], compiled, "no_such_symbol"))


def test_without_binutils_the_build_says_what_it_lacks(tmp_path):
    with pytest.raises(CompileError, match="GNU binutils, and objcopy cannot be run"):
        setup_script()["run_binutil"](["/bin/echo", "/nowhere"], "objcopy")


@pytest.mark.parametrize("device", [d for d in ("CPU", "GPU") if libraries.path_of(d).exists()])
def test_a_library_offers_its_operators_alone(device):
    """Copies of inline functions that it offered would take the place of other libraries', or theirs of its own."""
    needs("nm")
    lines = run(["nm", "-D", "--defined-only", "--format=posix", libraries.path_of(device)]).splitlines()
    names = [line.split()[0] for line in lines]
    assert len(names) > 10
    assert [name for name in names if not name.startswith("ms_optim_")] == []


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
    case.arrays[0] = case.arrays[0][:, SharedFlag.LOCKS :]  # what a launch does is its flags' shape
    assert "data race" in said_of(tmp_path, program, case, **environment)
