"""Calls the CPU operators through their C interface, as MindSpore does, with NumPy arrays."""

import contextlib
import ctypes
import platform
import resource
import sys

import numpy as np

from ms_optim.arguments.weight_norms import constants_of
from ms_optim.dgc.wire import wire_words
from ms_optim.kernels import interface, libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import SharedFlag

LIBRARY = libraries.FOLDER / "libms_optim_cpu.so"


def call(function, arrays):
    """Call an operator with inputs and outputs in order, and return its status."""
    return libraries.call_of(libraries.library(LIBRARY.name), function, arrays, [a.ctypes.data for a in arrays])()


def instruction_sets():
    """Return the names of those that this processor has, the best first."""
    library = libraries.library("libms_optim_cpu.so")
    best = library.ms_optim_instruction_set()
    names = [name for name in (b"avx512", b"avx2", b"baseline") if not library.ms_optim_force_instruction_set(name)]
    library.ms_optim_force_instruction_set(best)
    return names


@contextlib.contextmanager
def forced(name):
    """Have the kernels run in an instruction set that this processor has."""
    library = libraries.library(LIBRARY.name)
    best = library.ms_optim_instruction_set()
    assert library.ms_optim_force_instruction_set(name) == 0
    assert library.ms_optim_instruction_set() == name
    try:
        yield
    finally:
        library.ms_optim_force_instruction_set(best)


LIBC, LIBM = ctypes.CDLL("libc.so.6"), ctypes.CDLL("libm.so.6")
# Where an environment of floating-point arithmetic, as fegetenv() writes it, has the register, and its bits that flush.
MODE, FLUSHES = {"x86_64": (28, 1 << 15 | 1 << 6), "aarch64": (0, 1 << 24)}.get(platform.machine(), (0, 0))


def thread_mode(new=None):
    """Return whether this thread flushes denormal numbers to zero, each way; set it if told to."""
    environment = (ctypes.c_uint8 * 64)()
    LIBM.fegetenv(environment)
    register = ctypes.c_uint32.from_buffer(environment, MODE)
    before = register.value & FLUSHES
    if new is not None:
        register.value = register.value & ~FLUSHES | new
        LIBM.fesetenv(environment)
    return before


def pool_modes(new=None):
    """Return the same of all threads that a kernel runs in, this one among them."""
    openmp, seen = ctypes.CDLL("libgomp.so.1"), []
    each = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(thread_mode(new)))
    openmp.GOMP_parallel(each, None, 0, 0)
    return seen


@contextlib.contextmanager
def flushing(flushes):
    """Have all threads that a kernel runs in flush denormal numbers to zero, or keep them."""
    mode = FLUSHES if flushes else 0
    before = pool_modes(mode)
    try:
        yield
        assert pool_modes() == [mode] * len(before), "a kernel has left its mode behind"
    finally:
        pool_modes(before[0])


def forms_of(shapes):
    """Return for tensors of some shapes the matrices that they are: first row, run, runs, stride, columns."""
    found = []
    for shape in shapes:
        if len(shape) < 2:
            found.append(())
            continue
        count, rows = shape[:2] if len(shape) == 3 else (1, shape[0])
        columns = int(np.prod(shape[2:] if len(shape) == 3 else shape[1:]))
        found.append([(i * rows, rows, 1, rows, columns) for i in range(count)])
    return found


class Launch:
    """The arguments of one launch; arrays that the operator writes are changed in place.

    Args:
        function: Name of the operator.
        weights, gradients: Arrays of the tensors.
        states: For each state its arrays.
        constants: The rule's constants; `rule_flags` its flags.
        rates: Learning rates and weight decays; `layout` as in ops/include/step.h, by default all tensors take the
            first rate and no decay.
        scales: For each state in codes its arrays of scales.
        averages: The arrays of averages of the weights; `average` is the rate they keep, and whether it rises.
        weighs_steps: Whether the rule keeps numbers to weigh steps by, `self.step_weights`.
        weight_norm: What holds the norms of tensors of two dimensions or more, with `self.radii` if it keeps them.
        forms: Of a rule of matrices: the matrices of each tensor, as ops/include/step.h states them, without it.
        iterations: Of such a rule: the coefficients of each iteration.

    Attributes:
        first: The place of the first weight among the arrays.
    """

    def __init__(
        self,
        function,
        weights,
        gradients,
        states,
        constants,
        rule_flags,
        rates=(0.01,),
        layout=None,
        masters=(),
        scales=(),
        loss_scale=1.0,
        clip=0.0,
        seed=0,
        shared=0,
        stages=kernels.ALL_STAGES,
        cautious=False,
        averages=(),
        average=(None, False),
        weighs_steps=False,
        weight_norm=None,
        forms=None,
        iterations=(),
    ):
        n = len(weights)
        keeps_radii = weight_norm == "hyperball"
        shared |= SharedFlag.HOLDS_NORMS * (weight_norm is not None) | SharedFlag.KEEPS_RADII * keeps_radii
        if layout is None:
            layout = [[0, -1, 0, i] for i in range(n)]
        columns = [list(column) for column in zip(*layout)] or [[]] * interface.LayoutColumn.LAYOUT_COLUMNS
        self.function, self.states = function, states
        self.global_step, self.skipped = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self.statistics = np.zeros((n, len(kernels.STATISTICS)), np.float32)
        self.sums = np.zeros((n, len(kernels.SUMS)))
        self.step_weights, self.radii = np.zeros((n, 2)), np.zeros(n, np.float32)
        held = [*(array for state in states for array in state), *masters, *averages]
        held += [array for state in scales for array in state]
        of_stages = {"CLIP_NORM": clip or 0.0, "CAUTIOUS": float(cautious)}
        of_stages |= constants_of(weight_norm)
        of_stages |= {"AVERAGE_DECAY": average[0] or 0.0, "AVERAGE_WARMUP": float(average[1])}
        counters = (self.global_step, self.skipped, self.statistics)
        taken = interface.inputs(
            interface.flags(stages, shared, rule_flags),
            interface.layout(*columns[:3], rows=columns[3], held=[g.ndim > 1 for g in gradients]),
            interface.constants(1 / loss_scale, seed, constants, **of_stages),
            np.array(rates, np.float32),
            np.zeros((1, len(kernels.SUMS))),
            () if forms is None else (interface.matrices(forms), np.array(iterations, np.float64)),
            (*counters, *[self.step_weights] * weighs_steps, *[self.radii] * keeps_radii),
            weights,
            gradients,
            held,
        )
        self.first = 8 + weighs_steps + keeps_radii + 2 * (forms is not None)
        self.arrays = [*taken, self.sums]

    def run(self, call=call):
        return call(self.function, self.arrays)


class CompressedLaunch:
    """The arguments of one launch of DGCMomentum's operator.

    Args:
        weights, gradients, u, r: Arrays of the tensors; all but the gradients are changed in place.
        sent: For each tensor how many elements are sent, 0 where it is not compressed.
        stages: What the launch does; a moments stage alone gives a wire, `self.wire`.
        wires: What the workers sent, for an apply stage alone.
        sums: What the moments stage returned, for an apply stage alone.
        whose: Whose states these are; by default this worker's own, that of `rank`.
    """

    def __init__(
        self,
        weights,
        gradients,
        u,
        r,
        sent,
        momentum=0.5,
        workers=1,
        rule_flags=0,
        rates=(0.125,),
        columns=None,
        masters=(),
        clip=0.0,
        shared=0,
        stages=kernels.ALL_STAGES,
        wires=None,
        skipping=0.0,
        sums=None,
        rank=0,
        settings=7,
        whose=None,
    ):
        n = len(weights)
        columns = columns or [[0, -1, 0]] * n
        columns = [list(column) for column in zip(*columns)] or [[]] * 3
        self.global_step, self.skipped = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self.statistics = np.zeros((n, len(kernels.STATISTICS)), np.float32)
        self.sums = np.zeros((n, len(kernels.SUMS)))
        words = wire_words([w.size for w in weights], sent, "float16" if rule_flags & 4 else "float32")
        self.wire = np.zeros(words, np.int32 if any(sent) else np.float32)
        moments, apply = bool(stages & kernels.MOMENTS_STAGE), bool(stages & kernels.APPLY_STAGE)
        wires = np.zeros((1, 1), np.float32) if wires is None else wires
        taken = interface.inputs(
            interface.flags(stages, shared, rule_flags),
            interface.layout(*columns, sent=sent),
            interface.constants(1.0, 0.0, (momentum, workers, rank, settings), CLIP_NORM=clip or 0.0),
            np.array(rates, np.float32),
            np.zeros((1, len(kernels.SUMS))) if sums is None else sums,
            (
                np.array([skipping], np.float32),
                wires,
                np.eye(workers, dtype=np.int32)[rank if whose is None else whose],
            ),
            (self.global_step, self.skipped, self.statistics),
            weights,
            gradients,
            (*u, *r, *masters),
        )
        self.arrays = [*taken, self.sums, *([self.wire] if moments and not apply else [])]

    def run(self, call=call):
        return call("ms_optim_dgc_momentum", self.arrays)


def peak():
    """Return the largest memory that this process has had, in bytes."""
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_from_now():
    """Let the peak start anew, and return it."""
    LIBC.malloc_trim(0)  # memory that was freed before counts once it is taken again
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()
