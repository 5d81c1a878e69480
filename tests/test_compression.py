"""DGCMomentum's operator through its C interface, against NumPy: exact numbers, exact choices, the same bits."""

import ctypes

import mindspore as ms
import numpy as np
import pytest
from harness import NUMPY, flushed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native import CompressedLaunch, forced, instruction_sets

from ms_optim import DGCMomentum
from ms_optim.dgc.composite import largest
from ms_optim.dgc.wire import place_bytes, ramp, sent, settings_number, wire_words
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import MARK_WORDS, LayoutColumn, SharedFlag

SEND = kernels.MOMENTS_STAGE
APPLY = kernels.APPLY_STAGE + kernels.COMMIT_STAGE
SHAPES = [(), (1,), (7,), (15,), (17,), (63,), (65,), (4097,), (300, 301), (6, 4, 3, 3), (100_000,)]
needs_kernel = pytest.mark.skipif(
    kernels.why_not("dgc_momentum", "CPU") is not None, reason=str(kernels.why_not("dgc_momentum", "CPU"))
)


def top(r, k):
    """Return the mask of the k elements largest in magnitude: NaN before infinity, of equals the first."""
    flat = np.abs(r.reshape(-1)).astype(np.float64)
    order = np.lexsort((np.arange(r.size), np.where(np.isnan(flat), 0, -flat), ~np.isnan(flat)))
    mask = np.zeros(r.size, bool)
    mask[order[:k]] = True
    return mask.reshape(r.shape)


def copies(arrays):
    return [a.copy() for a in arrays]


def zeros(shapes, dtype=np.float32):
    return [np.zeros(s, dtype) for s in shapes]


def whole(rng, shape):
    """Small whole numbers: sums and halves of them are exact, and many are equal."""
    return np.asarray(rng.integers(-4, 5, shape)).astype(np.float32)


VALUES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "ties": lambda rng, n: rng.integers(-3, 4, n),
    "equal": lambda rng, n: np.full(n, -2.0),
    "zeros": lambda rng, n: np.zeros(n),
    "mostly zeros": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.01),
    "clustered": lambda rng, n: np.where(np.arange(n) // 64 % 50 == 0, rng.standard_normal(n), 1e-3),
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-37,
    "huge": lambda rng, n: rng.standard_normal(n) * 1e37,
    "infinite": lambda rng, n: np.where(rng.random(n) < 0.2, np.inf * np.sign(rng.standard_normal(n)), 1.0),
    "nan": lambda rng, n: np.where(rng.random(n) < 0.2, np.nan, np.where(rng.random(n) < 0.3, np.inf, 1.0)),
}


def unpacked(wire, size, k, dtype=np.float32):
    """Return the values and the places that one compressed tensor sends."""
    raw = wire.view(np.uint8)
    values, width = k * np.dtype(dtype).itemsize, place_bytes(size)
    digits = raw[values : values + k * width].reshape(k, width).astype(np.int64)
    return raw[:values].view(dtype), digits @ 256 ** np.arange(width)


def exchanged(w, g, u, r, k, **options):
    """Run a step of one worker that sends to itself, in two launches; return the wire."""
    tensors, before = ([w], [g], [u], [r], [k]), [x.tobytes() for x in (w, u, r)]
    send = CompressedLaunch(*tensors, momentum=0.0, stages=SEND, **options)
    assert send.run() == 0
    assert [x.tobytes() for x in (w, u, r)] == before
    wires = send.wire.reshape(1, -1)
    assert CompressedLaunch(*tensors, momentum=0.0, stages=APPLY, wires=wires, sums=send.sums, **options).run() == 0
    return send.wire


@needs_kernel
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", [1, 2, 15, 17, 64, 256, 257, 4097, 70_000])
def test_exactly_the_largest_are_sent(values, size):
    rng = np.random.default_rng(size)
    with np.errstate(all="ignore"):
        g = VALUES[values](rng, size).astype(np.float32)
    for k in sorted({1, 2, max(1, size // 1000), max(1, size // 50), max(1, size // 3), size - 1, size} - {0}):
        if k > size:
            continue
        w, u, r = zeros([size, size, size])
        wire = exchanged(w, g, u, r, k)
        g = flushed(g)
        mask = top(g, k)
        wanted = np.flatnonzero(mask)
        values_sent, places = unpacked(wire, size, k)
        np.testing.assert_array_equal(places, wanted)
        np.testing.assert_array_equal(values_sent, g[wanted])
        np.testing.assert_array_equal(r, np.where(mask, 0, g))
        np.testing.assert_array_equal(u, np.where(mask, 0, g))
        np.testing.assert_array_equal(w, np.where(mask, flushed(-np.float32(0.125) * g), 0))


@needs_kernel
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", [300, 70_000])
def test_what_rounding_takes_from_a_value_stays_behind(values, size):
    """As float16, and of numbers beyond its range as its largest; of infinity and NaN nothing stays."""
    rng = np.random.default_rng(size)
    with np.errstate(all="ignore"):
        g = flushed(VALUES[values](rng, size).astype(np.float32))
        k = size // 3
        mask = top(g, k)
        travelled = np.where(np.isfinite(g), np.clip(g, -65504, 65504), g).astype(np.float16)
        behind = np.where(np.isfinite(g), g - travelled.astype(np.float32), 0)
    w, u, r = zeros([size, size, size])
    values_sent, places = unpacked(exchanged(w, g, u, r, k, rule_flags=4), size, k, np.float16)
    np.testing.assert_array_equal(places, np.flatnonzero(mask))
    np.testing.assert_array_equal(values_sent, travelled[mask])
    np.testing.assert_array_equal(r, np.where(mask, behind, g))
    np.testing.assert_array_equal(u, np.where(mask, 0, g))
    # In one launch the same moves the weight.
    w, u, r = zeros([size, size, size])
    assert CompressedLaunch([w], [g], [u], [r], [k], momentum=0.0, rule_flags=4).run() == 0
    np.testing.assert_array_equal(w, -np.float32(0.125) * np.where(mask, travelled, 0).astype(np.float32))
    np.testing.assert_array_equal(r, np.where(mask, behind, g))


@pytest.mark.parametrize("values", VALUES)
def test_the_composite_form_chooses_the_same(values):
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        g = flushed(VALUES[values](rng, 500).astype(np.float32)).reshape(20, 25)
    for k in (1, 3, 50, 499, 500):
        mask = largest(ms.Tensor(g.reshape(1, -1)), ms.Tensor(k, ms.int32), 500).asnumpy().reshape(g.shape)
        np.testing.assert_array_equal(mask, top(g, k))


@needs_kernel
def test_what_rounding_takes_stays_behind_on_both_paths(backend):
    rng = np.random.default_rng(0)
    g = rng.standard_normal((20, 25)).astype(np.float32)
    g[3, 4] = 1e6  # too large for float16
    weight = ms.Parameter(ms.Tensor(np.zeros_like(g)), name="w")
    compression = {"sparsity": (0.9,), "min_compress_numel": 1, "wire_dtype": "float16"}
    optimizer = DGCMomentum([weight], 0.125, 0.0, 0, **compression, backend=backend)
    optimizer((ms.Tensor(g),))
    mask, travelled = top(g, 50), np.clip(g, -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(weight.asnumpy(), np.float32(-0.125) * np.where(mask, travelled, 0))
    np.testing.assert_array_equal(optimizer.states[1].asnumpy(), np.where(mask, g - travelled, g))


def numpy_step(w, g, u, r, k, momentum, nesterov, rate):
    """One step of one process in whole numbers and halves, where float32 is exact."""
    u = momentum * u + g
    d = g + momentum * u if nesterov else u
    if k == 0:
        return w - rate * d, u, r
    r = r + d
    mask = top(r, k)
    return w - rate * np.where(mask, r, 0), np.where(mask, 0, u), np.where(mask, 0, r)


@needs_kernel
@pytest.mark.parametrize("nesterov", [False, True])
def test_whole_numbers_are_exact(nesterov):
    """Ties are many here, and must go as NumPy says; four steps of one process."""
    rng = np.random.default_rng(3)
    counts = [0 if len(s) == 0 else max(1, int(np.prod(s)) // 3) for s in SHAPES]
    w, u, r = zeros(SHAPES), zeros(SHAPES), zeros(SHAPES)
    g = zeros(SHAPES)
    launch = CompressedLaunch(w, g, u, r, counts, rule_flags=int(nesterov))
    expected = [copies(w), copies(u), copies(r)]
    for _ in range(4):
        for x in g:
            x[...] = whole(rng, x.shape)
        for i, k in enumerate(counts):
            old = (a[i].astype(np.float64) for a in (expected[0], g, expected[1], expected[2]))
            for held, new in zip(expected, numpy_step(*old, k, 0.5, nesterov, 0.125)):
                held[i] = np.asarray(new)
        assert launch.run() == 0
        for actual, wanted in zip((w, u, r), expected):
            for a, b in zip(actual, wanted):
                np.testing.assert_array_equal(a, b)
    assert launch.global_step[0] == 4


def run_everything(dtype, gradient_dtype, stages_apart, seed=5, clip=1.0):
    """Run three steps with all there is and return the bytes of all that was written."""
    rng = np.random.default_rng(seed)
    n = len(SHAPES)
    weights = [np.asarray(rng.standard_normal(s)).astype(NUMPY[dtype]) for s in SHAPES]
    masters = zeros(SHAPES) if dtype != "float32" else []
    u, r = zeros(SHAPES), zeros(SHAPES)
    gradients = [np.asarray(rng.standard_normal(s)).astype(NUMPY[gradient_dtype]) for s in SHAPES]
    sizes = [g.size for g in gradients]
    counts = [0 if size == 15 else max(1, size // 50) for size in sizes]
    common = {
        "rates": (0.01, 0.1),
        "columns": [[0, 1, int(len(s) > 1)] for s in SHAPES],
        "masters": masters,
        "clip": clip,
        "shared": SharedFlag.MASTERS * bool(masters) + SharedFlag.SKIP_NONFINITE,
    }
    for _ in range(3):
        for g in gradients:
            g[...] = np.asarray(rng.standard_normal(g.shape)).astype(g.dtype)
        tensors = (weights, gradients, u, r, counts)
        if stages_apart:
            send = CompressedLaunch(*tensors, stages=SEND, **common)
            assert send.run() == 0
            wires = send.wire.reshape(1, -1)
            launch = CompressedLaunch(*tensors, stages=APPLY, wires=wires, sums=send.sums, **common)
            assert launch.run() == 0
        else:
            launch = CompressedLaunch(*tensors, **common)
            assert launch.run() == 0
        assert n == len(launch.statistics)
    # Sums over a tensor's sent elements end in the order of their chunks: the last statistic may round otherwise.
    written = [*weights, *masters, *u, *r] + ([] if stages_apart else [launch.statistics])
    return b"".join(a.tobytes() for a in written)


@needs_kernel
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("gradient_dtype", NUMPY)
def test_threads_and_instruction_sets_give_the_same_bits(dtype, gradient_dtype):
    library = libraries.library("libms_optim_cpu.so")
    openmp = ctypes.CDLL("libgomp.so.1")
    threads = openmp.omp_get_max_threads()
    results = set()
    try:
        for name in instruction_sets():
            with forced(name):
                for count in (1, 2, 3):
                    openmp.omp_set_num_threads(count)
                    assert library.ms_optim_threads() == count
                    results.add(run_everything(dtype, gradient_dtype, False))
    finally:
        openmp.omp_set_num_threads(threads)
    assert len(results) == 1


@needs_kernel
@pytest.mark.parametrize("dtype", NUMPY)
def test_one_worker_on_its_own_wire_does_what_one_launch_does(dtype):
    together = run_everything(dtype, dtype, False)
    apart = run_everything(dtype, dtype, True)
    assert together[: len(apart)] == apart
    assert run_everything(dtype, dtype, False, clip=0.0) != together


@needs_kernel
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("compressed, half", [(True, False), (True, True), (False, False)])
def test_wires_of_several_workers_are_merged(workers, compressed, half):
    rng = np.random.default_rng(workers)
    shapes = [(5000,), (70_000,), (20,), (13, 11)]
    counts = [400, 3000, 0, 30] if compressed else [0] * 4
    start = [np.asarray(rng.standard_normal(s)).astype(np.float32) for s in shapes]
    wires, masked, drawn = [], [], []
    options = {"workers": workers, "rule_flags": 4 * half}
    for rank in range(workers):
        g = [np.asarray(rng.standard_normal(s)).astype(np.float32) for s in shapes]
        u, r = zeros(shapes), zeros(shapes)
        launch = CompressedLaunch(copies(start), g, u, r, counts, stages=SEND, rank=rank, **options)
        assert launch.run() == 0
        wires.append(launch.wire)
        drawn.append((g, launch.sums))
        travelled = [x.astype(np.float16).astype(np.float32) if half and k else x for x, k in zip(g, counts)]
        masked.append([np.where(top(x, k), y, np.float32(0)) if k else x for x, y, k in zip(g, travelled, counts)])
    total = [masked[0][i].copy() for i in range(4)]
    for other in masked[1:]:
        total = [a + b for a, b in zip(total, other)]
    if not compressed:
        # An all-reduce has added them up.
        wires = [sum(wires[1:], wires[0].copy())]
    mean = [t / np.float32(workers) for t in total]
    moved = [0.125 * np.linalg.norm(m.astype(np.float64)) for m in mean]
    for rank, (g, sums) in enumerate(drawn):
        w, u, r = copies(start), zeros(shapes), zeros(shapes)
        tensors = (w, g, u, r, counts)
        launch = CompressedLaunch(*tensors, stages=APPLY, wires=np.stack(wires), sums=sums, rank=rank, **options)
        assert launch.run() == 0
        for i, k in enumerate(counts):
            mask = top(g[i], k)
            np.testing.assert_array_equal(w[i], start[i] - np.float32(0.125) * mean[i])
            np.testing.assert_array_equal(u[i], np.where(mask, 0, g[i]) if k else mean[i])
            np.testing.assert_array_equal(r[i], np.where(mask, g[i] - masked[rank][i], g[i]) if k else 0)
        np.testing.assert_allclose(launch.statistics[:, 2], moved, rtol=1e-6)


@needs_kernel
def test_a_worker_told_to_skip_moves_nothing():
    g, w, u, r = (np.ones(100, np.float32) for _ in range(4))
    wires = None
    for stages in (SEND, APPLY):
        launch = CompressedLaunch([w], [g], [u], [r], [2], workers=2, stages=stages, wires=wires, skipping=1.0)
        assert launch.run() == 0
        wires = np.stack((launch.wire, launch.wire))
        for x in (w, u, r):
            np.testing.assert_array_equal(x, 1)
        assert (launch.global_step[0], launch.skipped[0]) == (0, int(stages == APPLY))


# Of a worker's step and settings the parts that a mistake may leave out: each bit counts.
STEPS = st.one_of(st.integers(0, 2**31 - 1), st.integers(0, 30).map(lambda bit: 1 << bit), st.integers(0, 9))
MARKS = st.tuples(STEPS, st.sampled_from([0, 1, 1 << 27, (1 << 28) - 1]))


def mark(step, settings):
    """The 60 bits of a step and a number of settings, in limbs of 6, each with its square."""
    limbs = [(step + (settings << 32)) >> 6 * k & 63 for k in range(10)]
    return np.array([x for limb in limbs for x in (limb, limb * limb)], np.float32)


def received(own, wires, workers, compressed):
    """Apply wires at a step and settings; return the status, and whether all is as before."""
    held = [np.full(3, value, np.float32) for value in (1, 2, 3, 4)]
    before = copies(held)
    launch = CompressedLaunch(*([x] for x in held), [2 * compressed], workers=workers, stages=APPLY, wires=wires,
                              sums=np.full((1, 5), 1.0), settings=own[1])  # fmt: skip
    launch.global_step[0] = own[0]
    status = launch.run()
    counted = launch.global_step[0] != own[0] or launch.skipped[0] or launch.statistics.any()
    return status, not counted and all((a == b).all() for a, b in zip(held, before))


@needs_kernel
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_skipped_step_accumulates_nothing(tensors, poison):
    w, g, u, r = ([np.ones(100, np.float32) for _ in range(tensors)] for _ in range(4))
    g[-1][7] = poison
    launch = CompressedLaunch(w, g, u, r, [2] * tensors, shared=SharedFlag.SKIP_NONFINITE)
    assert launch.run() == 0
    for x in (*w, *u, *r):
        np.testing.assert_array_equal(x, 1)
    assert (launch.global_step[0], launch.skipped[0]) == (0, 1)


@needs_kernel
@pytest.mark.parametrize("compressed", [True, False])
@settings(deadline=None, max_examples=200)
@given(marks=st.lists(MARKS, min_size=2, max_size=9), same=st.booleans(), times=st.sampled_from([1, 1, 7, 455]))
@example(marks=[(5, 0), (6, 0), (7, 0)], same=False, times=1)
@example(marks=[(4096, 0), (0, 0), (8192, 0)], same=False, times=1)
@example(marks=[(2**31 - 2, (1 << 28) - 1)] * 8, same=True, times=512)
def test_no_mixture_of_marks_passes_for_one_step(compressed, marks, same, times):
    """As of workers that left out steps, resumed from other checkpoints, or were built with other arguments."""
    marks = marks[:1] * len(marks) if same else marks
    workers = len(marks) * (1 if compressed else times)
    wires = np.zeros((len(marks), wire_words([3], [2 * compressed])), np.float32)
    wires[:, -MARK_WORDS:] = [mark(*one) for one in marks]
    if not compressed:
        total = np.zeros_like(wires[:1])
        for wire in np.repeat(wires, times, 0):
            total = total + wire
        wires = total
    for own in dict.fromkeys(marks):
        status, unchanged = received(own, wires.view(np.int32) if compressed else wires, workers, compressed)
        assert (status, unchanged) == ((0, False) if len(set(marks)) == 1 else (7, True))


@needs_kernel
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("ours, stray", [((6, 7), (5, 7)), ((6, 7), (4102, 7)), ((6, 7), (6, 8)), ((0, 7), (1, 7))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refused_exchange_leaves_all_as_it_was(compressed, ours, stray, dtype, capfd):
    """Of both launches: what is sent is not taken from the states before all workers are known to be at one step."""
    rng = np.random.default_rng(2)
    shapes, sent_of = [(300,), (13, 11)], [30 * compressed, 5 * compressed]
    held, wires, sums = [], [], []
    for rank in range(3):
        weights, gradients, u, r = ([np.asarray(rng.standard_normal(s)).astype(np.float32) for s in shapes]
                                    for _ in range(4))  # fmt: skip
        weights, masters = [w.astype(NUMPY[dtype]) for w in weights], zeros(shapes) if dtype != "float32" else []
        common = {"workers": 3, "rank": rank, "masters": masters, "shared": SharedFlag.MASTERS * bool(masters),
                  "clip": 1.0, "columns": [[0, -1, 0], [0, -1, 1]]}  # fmt: skip
        held.append(((weights, gradients, u, r, sent_of), common))
    before = [x.tobytes() for tensors, common in held for group in (*tensors[:4], common["masters"]) for x in group]
    for rank, (tensors, common) in enumerate(held):
        step, number = stray if rank == 1 else ours
        send = CompressedLaunch(*tensors, stages=SEND, settings=number, **common)
        send.global_step[0] = step
        assert send.run() == 0
        wires.append(send.wire)
        sums.append(send.sums)
    wires = wires if compressed else [wires[0] + wires[1] + wires[2]]
    for rank, (tensors, common) in enumerate(held):
        step, number = stray if rank == 1 else ours
        apply = CompressedLaunch(*tensors, stages=APPLY, wires=np.stack(wires), sums=sums[rank], settings=number,
                                 **common)  # fmt: skip
        apply.global_step[0] = step
        assert apply.run() == 7
        assert (apply.global_step[0], apply.skipped[0], apply.statistics.any()) == (step, 0, False)
    after = [x.tobytes() for tensors, common in held for group in (*tensors[:4], common["masters"]) for x in group]
    assert after == before
    assert "belongs to another step or to other settings" in capfd.readouterr().err


@needs_kernel
@pytest.mark.parametrize("stages", [kernels.GRADIENT_STAGE, SEND, APPLY])
def test_another_workers_states_are_refused(stages, capfd):
    held = [np.ones(100, np.float32) for _ in range(4)]
    wires = np.zeros((3, wire_words([100], [2])), np.int32) if stages == APPLY else None
    launch = CompressedLaunch(*([x] for x in held), [2], workers=3, stages=stages, wires=wires, rank=1, whose=2)
    if stages == kernels.GRADIENT_STAGE:
        launch.arrays = [*launch.arrays[:11], launch.arrays[12], launch.sums]
    assert launch.run() == 9
    assert all((x == 1).all() for x in held)
    assert "of worker 1 holds the residuals of worker 2" in capfd.readouterr().err


@needs_kernel
@pytest.mark.parametrize(
    "what, change, status",
    [
        ("more sent than there is", lambda a: a[1].__setitem__((0, LayoutColumn.SENT), 101), 3),
        ("fewer than none", lambda a: a[1].__setitem__((0, LayoutColumn.SENT), -1), 2),
        ("a wire of another size", lambda a: a.__setitem__(-1, np.zeros(9, np.int32)), 3),
        ("a wire of another dtype", lambda a: a.__setitem__(-1, np.zeros(4, np.float32)), 2),
        ("a velocity of float16", lambda a: a.__setitem__(13, np.zeros(100, np.float16)), 2),
        ("a layout without the column", lambda a: a.__setitem__(1, np.zeros((1, LayoutColumn.SENT), np.int32)), 4),
        ("no wire", lambda a: a.pop(), 1),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(what, change, status):
    w, g, u, r = (np.ones(100, np.float32) for _ in range(4))
    launch = CompressedLaunch([w], [g], [u], [r], [2], stages=SEND)
    change(launch.arrays)
    assert launch.run() == status, what
    for x in (w, u, r):
        np.testing.assert_array_equal(x, 1)


@needs_kernel
def test_places_from_elsewhere_are_not_followed():
    """Places beyond the tensor, as no worker of this step sends them, write nothing there."""
    w, g, u, r = (np.zeros(100, np.float32) for _ in range(4))
    send = CompressedLaunch([w], [g], [u], [r], [2], stages=SEND)
    assert send.run() == 0
    wire = send.wire
    wire[:2] = np.ones(2, np.float32).view(np.int32)
    wire[2:3].view(np.uint8)[:2] = [250, 3]
    launch = CompressedLaunch([w], [g], [u], [r], [2], stages=APPLY, wires=wire.reshape(1, -1), sums=send.sums)
    assert launch.run() == 0
    np.testing.assert_array_equal(w, 0)


def test_the_ramp():
    assert ramp(0, 1, [0.999]) == [(0, 0.999)]
    assert ramp(5, 1, [0.999]) == [(0, None), (5, 0.999)]
    assert ramp(0, 100, [0.75, 0.9375, 0.984375, 0.996, 0.999]) == [
        (0, 0.75), (20, 0.9375), (40, 0.984375), (60, 0.996), (80, 0.999),
    ]  # fmt: skip
    # Three steps for two stages: the document's floor((step - begin) * 2 / 3) is 0, 0, 1.
    assert ramp(4, 3, [0.5, 0.9]) == [(0, None), (4, 0.5), (6, 0.9)]
    assert ramp(4, 1, [0.5, 0.75, 0.9]) == [(0, None), (4, 0.5), (5, 0.9)]
    assert ramp(4, 4, [0.5, 0.5]) == [(0, None), (4, 0.5)]


def test_how_many_are_sent():
    assert sent(None, 10**6, 1) == 0
    assert sent(0.999, 16_383, 16_384) == 0
    assert sent(0.999, 16_384, 16_384) == 16
    assert sent(0.999, 1_000_000, 1) == 1000  # 1 - 0.999 is a little more than 0.001
    assert sent(0.999, 1, 1) == 1
    assert sent(0.0, 77, 1) == 77


def test_the_wire_is_as_short_as_it_can_be():
    assert [place_bytes(n) for n in (1, 256, 257, 65_536, 65_537, 1 << 24, (1 << 24) + 1, 1 << 31)] == [
        1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip
    assert wire_words([10, 20], [0, 0]) == 30 + MARK_WORDS
    assert wire_words([10, 70_000], [0, 72]) == 10 + 72 + 54 + MARK_WORDS
    assert wire_words([10, 70_000], [0, 72], "float16") == 10 + 36 + 54 + MARK_WORDS
    assert wire_words([65_536, 65_537], [3, 5]) == (3 * 6 + 5 * 7 + 3) // 4 + MARK_WORDS


def test_settings_have_a_number():
    assert settings_number(1, "a") == settings_number(1, "a") != settings_number(1, "b")
    assert all(0 <= settings_number(k) < 1 << 28 for k in range(1000))
    assert len({settings_number(k) for k in range(1000)}) > 990
