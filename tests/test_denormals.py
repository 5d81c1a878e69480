"""A float32 number below 2^-126 counts as 0: on both paths, whatever the mode of the threads that a step runs in."""

import ctypes

import numpy as np
import pytest
import recording
from cases import CASES, Scenario, every_case_and_path, plain
from harness import Pair, digest, flushed, numbers, tensor
from mindspore import Parameter
from native import Launch, flushing, forced, instruction_sets

from ms_optim import AdamW
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels

needs_kernel = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))
)


def near(rng, shape, signed=True):
    """Draw numbers around the smallest that is not denormal, half of them denormal."""
    x = 2.0 ** rng.uniform(-149, -103, shape)
    return np.asarray(x * rng.choice([-1.0, 1.0], shape) if signed else x).astype(np.float32)


@needs_kernel
def test_kernels_give_the_same_bits_whatever_threads_do_with_denormal_numbers():
    cases = list(recording.denormal(np.random.default_rng(0)))
    library, openmp = libraries.library("libms_optim_cpu.so"), ctypes.CDLL("libgomp.so.1")
    best, most = library.ms_optim_instruction_set(), openmp.omp_get_max_threads()
    expected = [case.run() for case in cases]
    try:
        for name in instruction_sets():
            with forced(name):
                # Products of matrices have bits of their own in each instruction set.
                of_this_one = expected if name == best else [case.run() for case in cases]
                for case, result, wanted in zip(cases, of_this_one, expected):
                    case.check(result, wanted, same_code=name == best)
                for threads, flushes in ((1, False), (1, True), (2, False), (2, True)):
                    openmp.omp_set_num_threads(threads)
                    with flushing(flushes):
                        results = [case.run() for case in cases]
                    for case, result, wanted in zip(cases, results, of_this_one):
                        case.check(result, wanted)
    finally:
        openmp.omp_set_num_threads(most)


@needs_kernel
def test_matrices_are_orthogonalized_without_denormal_numbers():
    """Where all elements but one become such a number by being divided by the norm, that one alone moves a weight."""
    made = recording.launch("muon", np.random.default_rng(0), shapes=[(64, 48)])
    weight, gradient = made.arrays[made.first : made.first + 2]
    weight[...], gradient[...] = 0.0, 2.0**-123
    gradient[0, 0] = 16.0
    with flushing(False):
        assert made.run() == 0
    assert np.transpose(weight.nonzero()).tolist() == [[0, 0]]


@needs_kernel
def test_a_kernel_flushes_what_it_reads_and_each_result():
    """AdamW in NumPy, one rounding after the other."""
    rng = np.random.default_rng(1)
    n, beta1, beta2, rate, decay = 5000, 0.9, 0.99, np.float32(0.5), np.float32(0.25)
    constants = [np.float32(x) for x in (beta1, 1 - beta1, beta2, 1 - beta2, 1e-30)]
    w, g, m, v = near(rng, n), near(rng, n), near(rng, n), near(rng, n, signed=False)
    g[::3] *= np.float32(2**60)  # whose squares count
    made = [w.copy(), m.copy(), v.copy()]
    states = [[made[1]], [made[2]]]
    launch = Launch("ms_optim_adamw", [made[0]], [g], states, (beta1, beta2, 1e-30), 0, (rate, decay), [[0, 1, 0, 0]])
    assert launch.run() == 0

    def times(a, b):
        return flushed(a * b)

    def plus(a, b):
        return flushed(a + b)

    w, g, m, v = (flushed(x) for x in (w, g, m, v))
    m = plus(times(constants[0], m), times(constants[1], g))
    v = plus(times(constants[2], v), times(times(constants[3], g), g))
    d = plus(flushed(m / plus(np.sqrt(v), constants[4])), times(decay, w))
    w = plus(w, -times(rate, d))
    for actual, expected in zip(made, (w, m, v)):
        assert (expected == 0).any()
        np.testing.assert_array_equal(actual, expected)


def snapshot(case, backend, flushes, **variant):
    """Run some steps on numbers of that size; return all that they leave."""
    scenario = Scenario(shapes=("scalar", "seven", "matrix", "tiles+1"), groups=plain)
    if case.name == "DGCMomentum":
        variant = {"rampup_begin_step": 0, "sparsity": (0.5,), "min_compress_numel": 16}
    pair = Pair(case, scenario, variant, backend=backend)
    later = {prefix for k, _, prefix in pair.held_states() if k > 0}
    for p in (*pair.params, *pair.optimizer.states):
        second = case.name != "DGCMomentum" and p.name.split(".")[0] in later
        p.set_data(tensor(near(pair.rng, p.shape, signed=not second), "float32"))
    # Drawn here: numbers become float32 in this thread.
    gradients = [tuple(tensor(near(pair.rng, p.shape), "float32") for p in pair.params) for _ in range(3)]
    with flushing(flushes):
        for of_step in gradients:
            pair.optimizer(of_step)
        held = [p.asnumpy() for p in (*pair.params, *pair.optimizer.states, pair.optimizer.statistics)]
    # What a step does not write stays as it is: weights that are not sent, and what only compression reads.
    if case.name != "DGCMomentum":
        for array in held:
            np.testing.assert_array_equal(array, flushed(array))
    return b"".join(array.tobytes() for array in held)


@every_case_and_path()
def test_threads_change_no_bit(case, backend):
    assert snapshot(case, backend, False) == snapshot(case, backend, True)


@pytest.mark.parametrize(
    "case, variant", [("AdamW", {"amsgrad": True}), ("AdamOffload", {"use_nesterov": True})], ids=str
)
def test_threads_change_no_bit_of_a_variant(case, variant):
    (case,) = (c for c in CASES if c.name == case)
    assert snapshot(case, "composite", False, **variant) == snapshot(case, "composite", True, **variant)


@every_case_and_path()
def test_a_run_that_resumes_elsewhere_goes_on_bit_for_bit(case, backend):
    """As a process whose threads have another mode."""
    scenario = Scenario(shapes=("tiles+1",), groups=plain)
    drawn = [near(np.random.default_rng(k), (4097,)) for k in range(4)]
    for k, g in enumerate(drawn):
        g[::2] *= 2.0**60 if k == 0 else 0.0  # moments that decay from here
    pair, resumed = (Pair(case, scenario, backend=backend) for _ in range(2))
    gradients = [(tensor(g.reshape(pair.params[0].shape), "float32"),) for g in drawn]
    with flushing(False):
        for k in range(2):
            pair.optimizer(gradients[k])
        resumed.params[0].set_data(tensor(pair.params[0].asnumpy(), "float32"))
        resumed.optimizer.load_state_dict(pair.optimizer.state_dict())
        for k in range(2, 4):
            pair.optimizer(gradients[k])
    with flushing(True):
        for k in range(2, 4):
            resumed.optimizer(gradients[k])
    assert digest(resumed) == digest(pair)


def test_a_moment_without_gradient_reaches_0(backend):
    w = Parameter(tensor(np.ones(3), "float32"), name="w")
    optimizer = AdamW([w], backend=backend)
    optimizer.states[0].set_data(tensor([1e-37, -1e-37, 5.6e-45], "float32"))
    for _ in range(25):
        optimizer((tensor(np.zeros(3), "float32"),))
    np.testing.assert_array_equal(optimizer.states[0].asnumpy(), 0)


def test_small_float16_numbers_are_exact(backend):
    """They are ordinary float32 numbers."""
    every = np.arange(1, 1024, dtype=np.uint16).view(np.float16)
    (w,) = params = [Parameter(tensor(every, "float16"), name="w")]
    optimizer = AdamW(params, 0.0, betas=(0.5, 0.5), backend=backend)
    for _ in range(2):
        optimizer((tensor(every, "float16"),))
    np.testing.assert_array_equal(numbers(w), every)
    np.testing.assert_array_equal(numbers(optimizer.masters[0]), every)
    np.testing.assert_array_equal(numbers(optimizer.states[0]), 0.75 * every.astype(np.float64))


@needs_kernel
def test_a_second_moment_in_8_bits_is_0_only_if_it_is_0():
    """Also where its quotient by the largest of its block counts as 0."""
    v, scale = np.zeros(256, np.float32), [np.zeros(1, np.float32) for _ in range(2)]
    g = np.full(256, 1e-15, np.float32)
    g[0], g[1] = 1e10, 0.0
    states = [[np.zeros(256, np.int8)], [np.zeros(256, np.uint8)]]
    launch = Launch("ms_optim_adamw", [v], [g], states, (0.5, 0.5, 1e-8), 4, masters=scale)
    assert launch.run() == 0
    assert states[1][0][1] == 0
    assert (np.delete(states[1][0], 1) > 0).all()
