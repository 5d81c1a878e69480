"""Masters that are split between a bfloat16 weight and a remainder: nothing of a master is lost, in 16 bits or in 8."""

import dataclasses

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from cases import CASES, MODES_IN_TURN, Scenario, for_each, grouped, plain
from harness import Pair, Step, digest, flushed, numbers, tensor
from mindspore import Parameter, Tensor
from native import CompressedLaunch, Launch, forced, instruction_sets
from refusals import refused
from tolerances import TOLERANCE

from ms_optim import AdamW, Lamb, checkpoints
from ms_optim.kernels.interface import SharedFlag
from ms_optim.states import split_masters

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SPLITS = {"split": np.int16, "split8": np.int8}
each_split = pytest.mark.parametrize("split", SPLITS)

# Float32 numbers at the edges of what a weight and a remainder hold: zeros, denormals, ties between two weights, the
# largest number, which is rounded to infinity. A rule moves infinity to NaN, by a decay of 0 times it.
EDGES = [0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000]
EDGES += [0x3F7FFFFF, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF, 0x7F7FFFFF]


def edges(n):
    """Return float32 numbers: the edges with either sign, and any bits."""
    bits = np.random.default_rng(0).integers(0, 2**32, n - 2 * len(EDGES), np.uint32)
    masters = np.concatenate([EDGES, np.array(EDGES, np.uint32) | 0x80000000, bits]).astype(np.uint32).view(np.float32)
    return np.where(np.isinf(masters), np.float32(np.nan), masters)


def split_in_two(masters, dtype):
    """Return weights rounded to nearest, ties away from 0, and remainders; those of 8 bits hold these bits exactly."""
    bits = masters.view(np.uint32).astype(np.int64)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = np.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    below = np.where(nan, 0, bits - (upper << 16))
    assert dtype == np.int16 or not (below % 256).any()
    return upper.astype(np.uint16).view(ml_dtypes.bfloat16), (below >> (0 if dtype == np.int16 else 8)).astype(dtype)


def lion(weights, remainders, gradient, rate, seed=0):
    """Return a launch of Lion, which moves each weight by the rate against the sign of its gradient."""
    states, shared = [[np.zeros(weights.size, np.float32)]], SharedFlag.MASTERS
    arguments = {"masters": [remainders], "seed": seed, "shared": shared}
    return Launch("ms_optim_lion", [weights], [gradient], states, (0.9, 0.99), 0, (rate,), **arguments)


def moved(*arguments):
    """Take a step of Lion."""
    assert lion(*arguments).run() == 0


@each_split
def test_a_split_master_is_restored_to_the_bit(split):
    """By a step that moves nothing, on each instruction set: whole tiles, and the elements behind these."""
    dtype = SPLITS[split]
    masters = edges(5003)
    if split == "split8":
        masters = (masters.view(np.uint32) & 0xFFFFFF00).view(np.float32)
    for name in instruction_sets():
        weights, remainders = split_in_two(masters, dtype)
        with forced(name):
            moved(weights, remainders, np.zeros(masters.size, np.float32), 0.0)
        expected_weights, expected = split_in_two(flushed(masters), dtype)
        np.testing.assert_array_equal(weights.view(np.uint16), expected_weights.view(np.uint16))
        np.testing.assert_array_equal(remainders, expected)


def test_masters_convert():
    """As a kernel has them, but for ties, where a float32 master has left its weight at the even number."""
    masters = edges(5003)
    masters = masters[np.isfinite(masters)]
    weights = masters.astype(ml_dtypes.bfloat16)
    held = split_masters.remainders(masters, np.int16)
    back = split_masters.restored(weights.astype(np.float32), held)
    off = masters.view(np.uint32).astype(np.int64) - back.view(np.uint32)
    ties = (masters.view(np.uint32) & 0xFFFF) == 0x8000
    assert ties.any()
    assert set(off[ties]) <= {0, 1}
    np.testing.assert_array_equal(off[~ties], 0)
    in_8 = split_masters.converted(masters, np.int8, weights)
    np.testing.assert_array_equal(in_8, split_masters.converted(held, np.int8, weights))
    assert np.abs((in_8.astype(int) << 8) - held).max() <= 255
    inside = np.abs(held) < 0x7F00
    assert np.abs((in_8.astype(int) << 8) - held)[inside].max() <= 128
    np.testing.assert_array_equal(split_masters.converted(in_8, np.int16, weights), in_8.astype(np.int16) << 8)


def test_a_weight_that_is_set_keeps_no_remainder_that_leads_out_of_its_range():
    """A weight that was set to 0 does not cross 0, and one that is infinite does not become NaN."""
    weights = np.array([0.0, -0.0, np.inf, -np.inf, 0.0, 1.0], ml_dtypes.bfloat16)
    for dtype in SPLITS.values():
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        remainders = np.array([least, least, most, most, most, 3], dtype)
        w, r = weights.copy(), remainders.copy()
        moved(w, r, np.zeros(6, np.float32), 0.0)
        np.testing.assert_array_equal(w.astype(np.float32), [0, 0, np.nan, np.nan, 0, 1])
        np.testing.assert_array_equal(r, [0, 0, 0, 0, 0, 3])
        # The rule has moved infinity to NaN; its norm was taken before.
        infinite = lion(weights[2:4].copy(), remainders[2:4], np.zeros(2, np.float32), 0.0)
        assert infinite.run() == 0
        assert infinite.statistics[0, 1] == np.inf
        restored = split_masters.restored(weights.astype(np.float32), remainders)
        np.testing.assert_array_equal(restored[:4], weights[:4].astype(np.float32))


def without_splits(case):
    """Return the case with a reference that knows nothing of splits."""
    return dataclasses.replace(case, reference=lambda *a, masters, **k: case.reference(*a, masters=True, **k))


def restored(pair):
    """Return the float32 masters of a pair."""
    masters = [m.asnumpy() for m in pair.optimizer.masters]
    if pair.optimizer.masters[0].dtype == ms.float32:
        return masters
    weights = [numbers(p).astype(np.float32) for p in pair.params]
    return [split_masters.restored(w, m) for w, m in zip(weights, masters)]


ASKED = {
    "": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "8bit": {"state_dtype": "8bit"},
    "4bit": {"state_dtype": "4bit"},
    "average": {"average_decay": 0.9},
}


def takes(case, asked):
    return case.is_averaged if "average_decay" in asked else not (asked and case.name == "DGCMomentum")


# The modes take turns within an optimizer, and the next one begins with the next.
@for_each(
    [
        {"case": case, "asked": asked, "mode": MODES_IN_TURN[(i + k) % 4]}
        for i, case in enumerate(CASES)
        for k, asked in enumerate(ASKED)
        if takes(case, ASKED[asked])
    ]
)
def test_masters_are_those_of_float32_to_the_bit(case, asked, mode):
    """Weights too but for ties; with every rule, over the steps in which DGCMomentum compresses."""
    asked = ASKED[asked]
    quiet = dataclasses.replace(case, reference=lambda *a, **k: None)
    scenario = Scenario("bfloat16", groups=grouped, shapes=("scalar", "seven", "tiles+1", "convolution"))
    full, split = (Pair(quiet, scenario, master_weights=kind, **asked) for kind in (True, "split"))
    for _ in range(20 if mode == "pynative" else 12):
        gradients, dtype = full.gradients()
        for pair in (full, split):
            pair.call(mode, tuple(tensor(g, dtype) for g in gradients))
    for p, a, b in zip(full.params, restored(full), restored(split)):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), p.name)
    for p, q, master in zip(full.params, split.params, restored(full)):
        ties = (master.view(np.uint32) & 0xFFFF) == 0x8000
        np.testing.assert_array_equal(numbers(p)[~ties], numbers(q)[~ties])
    held = [(*pair.optimizer.states, *pair.optimizer.scales, *pair.optimizer.averages) for pair in (full, split)]
    for a, b in zip(*held):
        np.testing.assert_array_equal(numbers(a), numbers(b), a.name)
    np.testing.assert_array_equal(full.optimizer.statistics.asnumpy(), split.optimizer.statistics.asnumpy())


@every_case
def test_masters_of_24_bits_follow_the_reference(case, mode):
    """Each step rounds a master to 2^-15 of it at most, up or down: of 20 such roundings the worst takes five."""
    scenario = Scenario("bfloat16", groups=grouped, shapes=("scalar", "seven", "tiles+1", "convolution"))
    pair = Pair(without_splits(case), scenario, master_weights="split8")
    pair.run(mode, 20)
    for p, w, peak in zip(restored(pair), pair.reference.masters, pair.reference.peak["weight"]):
        off = np.abs(p - w) / (peak + 0.01)
        assert off.max() <= 16 * 2.0**-15 + TOLERANCE["weight"]
        assert np.sqrt(np.mean(off**2)) <= 5 * 2.0**-15


def test_small_steps_add_up_in_8_bits():
    """10,000 steps of a tenth of what one step can hold: 2^-15 of a weight between 1 and 2, the last of 24 bits.

    The tenth is 26 units of float32, which masters of 32 bits hold exactly.
    """
    n, unit = 2007, 2.0**-15  # some of them behind whole tiles
    weights, remainders = np.full(n, 1.5, ml_dtypes.bfloat16), np.zeros(n, np.int8)
    launch = lion(weights, remainders, np.ones(n, np.float32), unit * 26 / 256)
    for _ in range(10_000):
        assert launch.run() == 0
    units = (1.5 - split_masters.restored(weights, remainders).astype(np.float64)) / unit
    # A step moves a tenth of the weights by a unit: of 10,000 such steps a weight's way has a deviation of 30, and
    # the mean of 2,000 ways one of 0.7; none is seven deviations off. The last bit of a weight is 256 units.
    assert abs(units.mean() - 10_000 * 26 / 256) < 4
    assert 25 < units.std() < 35
    assert np.abs(units - 10_000 * 26 / 256).max() < 210


def test_rounding_to_8_bits_uses_the_noise_of_its_step_and_element():
    n, seen = 40_000, set()
    for seed in (0, 1):
        weights, remainders = np.ones(n, ml_dtypes.bfloat16), np.zeros(n, np.int8)
        moved(weights, remainders, np.full(n, -1.0, np.float32), 2.0**-17, seed)
        # 2^-17 is a quarter of the last unit.
        assert set(remainders) == {0, 1}
        assert abs(remainders.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
        seen.add(remainders.tobytes())
    assert len(seen) == 2


def test_elements_that_compression_moves_one_by_one_are_rounded_likewise():
    """Those whose masters have 8 bits of a remainder with noise, those with masters in float32 to nearest."""
    n, shared = 40_000, SharedFlag.MASTERS + SharedFlag.STOCHASTIC_ROUNDING
    for masters in (np.zeros(n, np.int8), np.ones(n, np.float32)):
        weights, gradient = np.ones(n, ml_dtypes.bfloat16), np.full(n, -1.0, np.float32)
        states = ([np.zeros(n, np.float32)] for _ in range(2))
        launch = CompressedLaunch(
            [weights], [gradient], *states, [n], rates=(2.0**-17,), masters=[masters], shared=shared
        )
        assert launch.run() == 0
        assert (weights == 1.0).all()
        moved = masters if masters.dtype == np.int8 else (masters - 1) * 2.0**15
        assert abs(moved.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
        assert set(moved) == ({0, 1} if masters.dtype == np.int8 else {0.25})


@each_split
def test_nan_stays_nan_whatever_its_bits(split):
    """Noise does not carry one whose bits are all set, as those of a gradient may be, over to 0."""
    weights, remainders = np.ones(71, ml_dtypes.bfloat16), np.zeros(71, SPLITS[split])
    moved(weights, remainders, np.full(71, 0x7FFFFFFF, np.uint32).view(np.float32), 0.5)
    assert np.isnan(weights.astype(np.float32)).all()
    assert not remainders.any()


@each_split
@every_case
def test_a_run_resumes_bit_for_bit(case, split, tmp_path):
    quiet = dataclasses.replace(case, reference=lambda *a, **k: None)
    scenario = Scenario("bfloat16", shapes=("seven", "tiles+1"), groups=grouped)

    def steps(pair, count, rng):
        for _ in range(count):
            drawn = [rng.standard_normal(p.shape) for p in pair.params]
            pair.optimizer(tuple(tensor(g, "bfloat16") for g in drawn))

    def made(seed):
        return Pair(quiet, scenario, seed=seed, master_weights=split)

    pair, resumed = made(0), made(9)
    steps(pair, 3, np.random.default_rng(1))
    checkpoints.save(tmp_path / "split.safetensors", optimizer=pair.optimizer)
    checkpoints.load(tmp_path / "split.safetensors", optimizer=resumed.optimizer)
    steps(pair, 3, np.random.default_rng(2))
    steps(resumed, 3, np.random.default_rng(2))
    assert digest(pair) == digest(resumed)


@pytest.mark.parametrize("dtype", SPLITS.values(), ids=str)
def test_a_float32_master_of_a_split_one_rounds_to_its_weight(dtype):
    """A step drops a float32 master that does not round to its weight: all weights, with the remainders near ties."""
    weights = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    weights = weights[np.isfinite(weights)]
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    near = [least, least + 1, least + 2, -1, 0, 1, most - 1, most]
    for remainder in range(least, most + 1) if dtype == np.int8 else near:
        remainders = np.full(weights.shape, remainder, dtype)
        masters = split_masters.converted(remainders, np.float32, weights)
        np.testing.assert_array_equal(masters.astype(ml_dtypes.bfloat16).astype(np.float32), weights)
        exact = split_masters.restored(weights, remainders).view(np.int32)
        assert np.abs(masters.view(np.int32) - exact).max() <= (remainder == least)


KINDS = [True, "split", "split8"]


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("here", KINDS)
@pytest.mark.parametrize("by", ["state_dict", "file"])
def test_a_run_goes_on_with_masters_held_otherwise(there, here, by, tmp_path):
    scenario = Scenario("bfloat16", shapes=("seven", "tiles+1"), groups=plain)
    quiet = dataclasses.replace(CASES[0], reference=lambda *a, **k: None)
    saved, taken = (Pair(quiet, scenario, seed=s, master_weights=k) for s, k in enumerate((there, here)))
    for _ in range(3):
        gradients, dtype = saved.gradients()
        saved.optimizer(tuple(tensor(g, dtype) for g in gradients))
    if by == "file":
        checkpoints.save(tmp_path / "masters.safetensors", optimizer=saved.optimizer)
        checkpoints.load(tmp_path / "masters.safetensors", optimizer=taken.optimizer)
    else:
        state = saved.optimizer.state_dict()
        taken.optimizer.load_state_dict(state)  # before its weights
        for p, q in zip(taken.params, saved.params):
            p.set_data(Tensor(q))
    exact = "split8" not in (there, here) or there == here or there == "split8"
    for a, b in zip(restored(saved), restored(taken)):
        ties = (a.view(np.uint32) & 0xFFFF) == 0x8000
        apart = np.abs(a.view(np.uint32).astype(np.int64) - b.view(np.uint32))[~ties]
        assert apart.max(initial=0) <= (0 if exact else 255)
        assert exact or apart.max() > 0


def test_remainders_that_come_without_weights_are_of_those_of_the_network():
    w = Parameter(tensor(np.full(5, 1.0), "bfloat16"), name="w")
    split, full = AdamW([w], 1e-3, master_weights="split"), AdamW([w], 1e-3)
    split((Tensor(np.ones(5), ms.float32),))
    state = {name: value for name, value in split.state_dict().items() if name != "w"}
    full.load_state_dict(state)
    np.testing.assert_allclose(full.masters[0].asnumpy(), 0.999, rtol=1e-6)


@each_split
def test_weights_that_are_loaded_before_the_first_step_count_as_they_are(split):
    """The remainders are zeros then: nothing of the first weights is left."""
    (a, b), results = (np.full(7, 1.0), np.full(7, -3.0)), []
    for first in (a, b):
        w = Parameter(tensor(first, "bfloat16"), name="w")
        optimizer = Lamb([w], 1e-3, master_weights=split)
        w.set_data(tensor(b, "bfloat16"))
        for _ in range(3):
            optimizer((Tensor(np.ones(7), ms.float32),))
        results.append((numbers(w).tobytes(), optimizer.masters[0].asnumpy().tobytes()))
    assert results[0] == results[1]


@each_split
def test_a_weight_that_is_set_later_counts_but_for_its_remainder(split):
    w = Parameter(tensor(np.full(3, 1.0), "bfloat16"), name="w")
    optimizer = AdamW([w], 1e-4, master_weights=split)
    optimizer((Tensor(np.ones(3), ms.float32),))
    w.set_data(tensor([5.0, 1.0, 0.0], "bfloat16"))
    optimizer((Tensor(np.zeros(3), ms.float32),))
    half = 2.0**-7 / 2 * np.array([4.0, 1.0, 0.0])
    assert (np.abs(numbers(w) - [5.0, 1.0, 0.0]) <= 2 * half + 2e-4).all()


def test_what_cannot_be_split_is_refused():
    def made(dtype="bfloat16", **arguments):
        return AdamW([Parameter(tensor(np.ones(3), dtype), name="w")], 0.1, **arguments)

    for split in SPLITS:
        why = "because 16 bits cannot restore the master of a small float16 number, and 'w' is float16"
        asked = lambda s=split: made("float16", master_weights=s)  # noqa: E731
        refused(ValueError, f"'master_weights' must be True or False, {why}", asked)
    refused(ValueError, "'master_weights' must be True, False or one of", lambda: made(master_weights="half"))
    refused(TypeError, "'master_weights' must be True, False or one of", lambda: made(master_weights=1))
    assert len(made("float32", master_weights="split").masters) == 0


def test_a_kernel_refuses_a_remainder_of_another_weight():
    n = 8
    for dtype, kind in ((np.float16, np.int16), (np.float16, np.int8), (ml_dtypes.bfloat16, np.uint8)):
        weights, states = np.ones(n, dtype), [[np.zeros(n, np.float32)]]
        launch = Launch("ms_optim_lion", [weights], [np.ones(n, np.float32)], states, (0.9, 0.99), 0,
                        masters=[np.zeros(n, kind)], shared=SharedFlag.MASTERS)  # fmt: skip
        assert launch.run() == 2  # wrong dtype
        np.testing.assert_array_equal(weights.astype(np.float32), 1.0)


def test_a_graph_takes_a_step_as_python_does():
    for split in SPLITS:
        digests = set()
        for kind in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
            ms.set_context(mode=kind)
            w = Parameter(tensor(np.linspace(-2, 2, 5000), "bfloat16"), name="w")
            optimizer = AdamW([w], 1e-3, master_weights=split, state_dtype="8bit")
            call = Step(optimizer)
            for k in range(4):
                call(tensor(np.cos(np.arange(5000) + k), "bfloat16"))
            held = (w, *optimizer.masters, *optimizer.states)
            digests.add(b"".join(numbers(p).tobytes() for p in held))
        assert len(digests) == 1
