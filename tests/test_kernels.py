"""The operators through their C interface: any shape, any instruction set, and arguments that do not fit."""

import copy

import ml_dtypes
import numpy as np
import pytest
import recording
from harness import NUMPY, flushed
from hypothesis import given, settings
from native import Launch, call, forced, instruction_sets
from parity import EVERYTHING, RULES, check_launches

from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import CODE_BLOCK, SharedFlag, Statistic

BY_NAME = {rule[0].removeprefix("ms_optim_"): rule for rule in RULES}
LINE = 64  # bytes of a cache line
# Elements of tensors that end before their first line does, in it, with a tile, and behind the beginning of another.
ACROSS = [(5,), (12,), (1023,), (1041,), (4100,), (33, 31), (40_000,), (3000,)]
PLACED = [{}, {"shared": SharedFlag.AVERAGES, "clip": 0.5, "cautious": True}, {"states": "bfloat16"}]
pytestmark = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))
)


@settings(deadline=None, max_examples=100)
@given(**EVERYTHING)
def test_any_shape_follows_the_reference(**chosen):
    check_launches(call, **chosen)


@pytest.mark.parametrize("rule", [BY_NAME["adamw"], BY_NAME["lamb"]], ids=["adamw", "lamb"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_instruction_sets_give_the_same_bits(rule, dtype):
    function, _, constants, flags, _ = rule
    sizes = [(), (1,), (17,), (5, 7, 3), (4097,), (300, 301)]
    results = {}
    for name in instruction_sets():
        rng = np.random.default_rng(1)
        weights = [np.asarray(rng.standard_normal(s)).astype(NUMPY[dtype]) for s in sizes]
        masters = [np.zeros(s, np.float32) for s in sizes] if dtype != "float32" else []
        states = [[np.zeros(s, np.float32) for s in sizes] for _ in range(2)]
        gradients = [np.asarray(rng.standard_normal(s)).astype(NUMPY[dtype]) for s in sizes]
        layout = [[0, 1, int(len(s) > 1), i] for i, s in enumerate(sizes)]
        shared = SharedFlag.MASTERS * bool(masters)
        launch = Launch(
            function, weights, gradients, states, constants, flags, (0.01, 0.1), layout, masters, clip=1.0,
            shared=shared,
        )  # fmt: skip
        with forced(name):
            for _ in range(5):
                assert launch.run() == 0
        written = [*weights, *masters, *states[0], *states[1], launch.statistics]
        results[name] = b"".join(a.tobytes() for a in written)
    assert len(set(results.values())) == 1


def placed(array, elements):
    """Return a copy that begins so many float32 numbers behind the start of a cache line."""
    memory = np.zeros(array.nbytes + 2 * LINE, np.uint8)
    first = -memory.ctypes.data % LINE + 4 * elements
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("options", PLACED, ids=list(map(str, PLACED)))
@pytest.mark.parametrize("rule", recording.RULES)
def test_the_place_in_a_cache_line_changes_no_bit(rule, options):
    """Vectors begin with lines: which elements share one, also with those of the next tile, depends on the place."""
    if options.get("shared") == SharedFlag.AVERAGES and rule.startswith("schedule_free"):
        options = {}  # it is an average itself
    for name in instruction_sets():
        seen = set()
        for places in ([0], [1], [4], [12], [15], [4, 0, 4]):
            launch = recording.launch(rule, np.random.default_rng(2), shapes=ACROSS, **options)
            for i in range(launch.first, len(launch.arrays)):
                launch.arrays[i] = placed(launch.arrays[i], places[i % len(places)])
            # Elements of very different sizes show the order in which they are added up. Squares of the last tensor's
            # vanish in float32, and are added up once more.
            for k, array in enumerate(launch.arrays[launch.first : launch.first + 2 * len(ACROSS)]):
                sizes = np.random.default_rng(k).uniform(-6, 6, array.shape)
                array *= np.float32(1e-25) if k % len(ACROSS) == len(ACROSS) - 1 else np.float32(10) ** sizes
            with forced(name):
                for _ in range(recording.STEPS):
                    assert launch.run() == 0
            seen.add(b"".join(array.tobytes() for array in launch.arrays))
        assert len(seen) == 1, name


def test_an_instruction_set_the_processor_lacks_is_refused():
    assert libraries.library("libms_optim_cpu.so").ms_optim_force_instruction_set(b"none such") == 1


@pytest.mark.parametrize("magnitude", [1e30, 1e25, 1e-25, 1e-30])
def test_norms_survive_squares_that_float32_cannot_hold(magnitude):
    g = np.full(5000, magnitude, np.float32)
    w = np.full(5000, magnitude, np.float32)
    states = [[np.zeros(5000, np.float32)] for _ in range(2)]
    launch = Launch("ms_optim_adamw", [w], [g], states, (0.9, 0.999, 1e-8), 4, shared=SharedFlag.SKIP_NONFINITE)
    assert launch.run() == 0
    expected = np.float64(np.float32(magnitude)) * np.sqrt(5000)
    assert launch.statistics[0, :2] == pytest.approx([expected, expected], rel=1e-6, abs=0)
    assert launch.skipped[0] == 0


@pytest.mark.parametrize("size", [5000, 1024, 37])
@pytest.mark.parametrize("name, states", [("adamw", "su"), ("adamw_amsgrad", "suu"), ("lamb", "su"), ("momentum", "s")])
@pytest.mark.parametrize("in_codes", [False, True])
def test_norms_of_updates_survive_directions_whose_squares_vanish(name, states, in_codes, size):
    """Beside gradients of 1e-30 an epsilon of 1e-8 leaves directions of 1e-22, by which such small weights move."""
    function, _, constants, flags, _ = BY_NAME[name]
    rng = np.random.default_rng(0)
    g, w = (rng.standard_normal(size).astype(np.float32) * np.float32(scale) for scale in (1e-30, 1e-22))
    before, scales = w.astype(np.float64), []
    held = [[np.zeros(size, np.float32)] for _ in states]
    if in_codes:  # signed and unsigned ones
        held = [[np.zeros(size, np.int8 if kind == "s" else np.uint8)] for kind in states]
        scales = [[np.zeros(-(-size // CODE_BLOCK), np.float32)] for _ in states]
    launch = Launch(function, [w], [g], held, constants, flags, (1.0, 0.1), [[0, 1, 0, 0]], scales=scales)
    for _ in range(3):
        assert launch.run() == 0
        moved = np.linalg.norm(w - before)
        assert 0 < moved < 1e-19
        assert launch.statistics[0, Statistic.UPDATE_NORM] == pytest.approx(moved, rel=1e-5, abs=0)
        before = w.astype(np.float64)


@pytest.mark.parametrize("poison", [0.0, np.nan])
@pytest.mark.parametrize(
    "function, constants, flags", [(r[0], r[2], r[3]) for r in (BY_NAME["adamw"], BY_NAME["adam_offload"])]
)
def test_a_commit_of_its_own_reports_the_sums_that_it_is_given(function, constants, flags, poison):
    """As for split tensors, whose sums are known only after the weights moved."""

    def launch(stages):
        rng = np.random.default_rng(0)
        w, g = (rng.standard_normal(5000).astype(np.float32) for _ in range(2))
        g[17] += poison
        states = [[np.zeros(5000, np.float32)] for _ in range(2)]
        shared = SharedFlag.SKIP_NONFINITE
        return Launch(function, [w], [g], states, constants, flags, stages=stages, shared=shared)

    whole = launch(kernels.ALL_STAGES)
    assert whole.run() == 0
    commit = launch(kernels.COMMIT_STAGE)
    # It takes no tensors.
    commit.arrays = [*commit.arrays[:4], whole.sums.copy(), *commit.arrays[5:8], commit.sums]
    assert commit.run() == 0
    assert commit.statistics.tobytes() == whole.statistics.tobytes()
    counts = (int(commit.global_step[0]), int(commit.skipped[0]))
    assert counts == (int(whole.global_step[0]), int(whole.skipped[0])) == ((0, 1) if poison else (1, 0))


def test_conversions_round_as_numpy_does():
    """All float16 and bfloat16 numbers and many float32 between them, by a step that moves nothing.

    The small ones of float16 are ordinary numbers in float32, those of bfloat16 count as 0.
    """
    for dtype, bits in ((np.float16, np.uint16), (ml_dtypes.bfloat16, np.uint16)):
        every = np.arange(2**16, dtype=bits).view(dtype)
        every = every[np.isfinite(every.astype(np.float32))]
        # By bits: where this thread's arithmetic flushes, too, such a number equals 0.
        assert (flushed(every).view(bits) != every.view(bits)).any() == (dtype != np.float16)
        low = every.copy()
        master = np.zeros(low.shape, np.float32)
        states = [[np.zeros(low.shape, np.float32)] for _ in range(2)]
        args = ("ms_optim_adamw", [low], [np.zeros(low.shape, np.float32)], states, (0.9, 0.999, 1e-8), 4)
        launch = Launch(*args, masters=[master], shared=SharedFlag.MASTERS)
        assert launch.run() == 0
        every = flushed(every)
        np.testing.assert_array_equal(low.view(bits), every.view(bits))
        np.testing.assert_array_equal(master, every.astype(np.float32))

        rng = np.random.default_rng(0)
        between = (every.astype(np.float64) * (1 + rng.uniform(-1, 1, every.shape) * 2.0**-7)).astype(np.float32)
        ties = np.concatenate([between, ((every[1:].astype(np.float64) + every[:-1].astype(np.float64)) / 2)])
        wanted = flushed(ties[np.abs(ties) < np.finfo(np.float32).max].astype(np.float32))
        with np.errstate(over="ignore"):
            wanted = wanted[np.isfinite(wanted.astype(dtype).astype(np.float32))]
        low = np.zeros(wanted.shape, dtype)
        states = [[np.zeros(low.shape, np.float32)] for _ in range(2)]
        # With m = 0 after one step of gradient 0 the weight stays the master, which is taken for the weight's if it
        # rounds to it: so start from the rounded value and look at what is stored.
        low[...] = wanted.astype(dtype)
        master = wanted.copy()
        args = ("ms_optim_adamw", [low], [np.zeros(low.shape, np.float32)], states, (0.9, 0.999, 1e-8), 4)
        launch = Launch(*args, masters=[master], shared=SharedFlag.MASTERS)
        assert launch.run() == 0
        np.testing.assert_array_equal(low.view(bits), wanted.astype(dtype).view(bits))
        np.testing.assert_array_equal(master, wanted)


def misfit(change):
    w = np.ones(8, np.float32)
    states = [[np.zeros(8, np.float32)] for _ in range(2)]
    launch = Launch("ms_optim_adamw", [w], [np.ones(8, np.float32)], states, (0.9, 0.999, 1e-8), 4)
    change(launch.arrays)
    return launch.run(), w


@pytest.mark.parametrize(
    "what, change, status",
    [
        ("an input too few", lambda a: a.pop(8), None),  # whichever misfit is found first
        ("an input too many", lambda a: a.append(np.zeros(1)), 1),
        ("a layout of the wrong dtype", lambda a: a.__setitem__(1, a[1].astype(np.int64)), 2),
        ("a gradient of another size", lambda a: a.__setitem__(9, np.ones(7, np.float32)), 3),
        ("a gradient of whole numbers", lambda a: a.__setitem__(9, np.ones(8, np.int32)), 2),
        ("a float64 weight", lambda a: a.__setitem__(8, np.ones(8)), 2),
        ("a first state of float16", lambda a: a.__setitem__(10, np.zeros(8, np.float16)), 2),
        ("a first state without signs", lambda a: a.__setitem__(10, np.zeros(8, np.uint8)), 2),
        ("a second state with signs", lambda a: a.__setitem__(11, np.zeros(8, np.int8)), 2),
        ("a second state with signs, in 4 bits", lambda a: a.__setitem__(11, np.zeros(2, np.int16)), 2),
        ("a state of 4 bits, as long as its weight", lambda a: a.__setitem__(10, np.zeros(8, np.int16)), 3),
        ("a rate that is not there", lambda a: a.__setitem__(1, np.array([[5, -1, 0, 0, 0]], np.int32)), 3),
        (
            "a row of statistics that is not there",
            lambda a: a.__setitem__(1, np.array([[0, -1, 0, 1, 0]], np.int32)),
            3,
        ),
        ("constants of another rule", lambda a: a.__setitem__(2, np.zeros(10)), 3),
        ("no stage", lambda a: a.__setitem__(0, np.zeros((1, 1, 5), np.int8)), 4),
        ("sums of another shape", lambda a: a.__setitem__(-1, np.zeros((2, 6))), 3),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(what, change, status):
    returned, w = misfit(change)
    assert returned != 0 if status is None else returned == status, what
    np.testing.assert_array_equal(w, np.ones(8, np.float32))


@pytest.mark.parametrize("states", recording.STATES)
def test_a_launch_without_states_bounds_the_norm_to_the_bit(states):
    """A launch of the gradient stage knows no states; its sums are those of a launch that does all."""
    rng = np.random.default_rng(8)
    whole = recording.launch("adamw", rng, states=states, shapes=[(300,), (5000,), (64, 75)], clip=0.5)
    parts = copy.deepcopy(whole)
    gradients = parts.arrays[parts.first + 3 : parts.first + 6]
    sums, rest = np.zeros_like(parts.sums), kernels.ALL_STAGES - kernels.GRADIENT_STAGE
    flags = [np.zeros((1 + stages, *whole.arrays[0].shape[1:]), np.int8) for stages in (kernels.GRADIENT_STAGE, rest)]
    for _ in range(12):
        for i, gradient in enumerate(gradients):
            gradient[...] = whole.arrays[whole.first + 3 + i][...] = rng.standard_normal(gradient.shape)
        assert whole.run() == 0
        assert call(parts.function, [flags[0], *parts.arrays[1 : parts.first], *gradients, sums]) == 0
        parts.arrays[0], parts.arrays[4] = flags[1], sums
        assert parts.run() == 0
        for array, expected in zip(parts.arrays[5:], whole.arrays[5:]):
            assert array.tobytes() == expected.tobytes()
