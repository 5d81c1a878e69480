"""The operators for Ascend processors on a CPU stand-in: unchanged sources, under sanitizers, against float64."""

import os
import shutil
import subprocess
from typing import NamedTuple

import numpy as np
import pytest
import reference
from ascend_stand_in import (
    C_TYPES,
    DTYPES,
    OPS,
    Host,
    StandIn,
    WrongError,
    in_parallel,
    linked,
    needs_compiler,
    snake,
    translated,
)
from builds import once, shared_folder
from harness import check_close, check_units
from proofs import BUILT
from sources import TESTS
from tolerances import TOLERANCE

TILE, LANES = 2048, 8
CORES = [1, 2, 8, 20, 40]
SIZES = [1, 7, TILE - 1, TILE, TILE + 1, 4097, 8 * TILE - 1, 8 * TILE + 1, 50 * TILE + 3]
BETA1, BETA2, BETA3, EPS, DECAY, RATE, STEP, SCALE = 0.9, 0.99, 0.95, 1e-4, 0.02, 0.01, 3, 0.125
ALPHA, WARMUP = 2.0, 10
SUMS_OF = {
    "MsOptimLambMoments": ("weight", "direction"),
    "MsOptimLansMoments": ("weight", "direction", "direction2"),
    "MsOptimLambApply": ("update",),
    "MsOptimLansApply": ("update",),
}


class Rule(NamedTuple):
    """A rule: its reference, what that is told, its operators' states, and which of these are never negative."""

    reference: type
    told: dict
    states: tuple
    unsigned: tuple = ("v", "vhat", "nu")


OF_ADAM = {"betas": (BETA1, BETA2), "eps": EPS}
OF_LAMB = {"beta1": BETA1, "beta2": BETA2, "eps": EPS}
RULES = {
    "Adamw": Rule(reference.AdamW, OF_ADAM, ("m", "v")),
    "AdamwAmsgrad": Rule(reference.AdamW, {**OF_ADAM, "amsgrad": True}, ("m", "v", "vhat")),
    "Lamb": Rule(reference.Lamb, OF_LAMB, ("m", "v")),
    "Lans": Rule(reference.LANS, OF_LAMB, ("m", "v")),
    "Lion": Rule(reference.Lion, {"betas": (BETA1, BETA2)}, ("m",)),
    "Ademamix": Rule(
        reference.AdEMAMix,
        {"betas": (BETA1, BETA2, BETA3), "alpha": ALPHA, "eps": EPS, "warmup_steps": WARMUP},
        ("m1", "nu", "m2"),
    ),
}
IN_ONE_LAUNCH = ["Adamw", "AdamwAmsgrad", "Lion", "Ademamix"]

pytestmark = [needs_compiler, pytest.mark.proof(*BUILT)]


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    return Host.build(tmp_path_factory)


@pytest.fixture(scope="session")
def stand_in(host, tmp_path_factory):
    """All operators for all dtypes."""
    folder = once(
        shared_folder(tmp_path_factory), "ascend_kernels", lambda folder: host.program(folder, list(host.definitions))
    )
    program = StandIn(folder / "launch")
    yield program
    program.close()


def test_tiling_loses_and_repeats_nothing(tmp_path):
    source = translated(TESTS / "ascendc" / "tiling.cc", tmp_path, OPS / "op_kernel")
    done = subprocess.run([linked([source], tmp_path / "tiling")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- One launch of each rule, against float64 -------------------------------------------------------------------


class Arrays:
    """A tensor in the middle of training, as a rule's operators take it."""

    def __init__(self, rule, size, weight="float32", master="float32", gradient="float32", seed=0):
        rng = np.random.default_rng(seed)
        start = rng.standard_normal(size)
        low = weight != "float32"
        self.rule, self.size = rule, size
        self.weight = start.astype(DTYPES[weight]) if low else np.zeros(1, np.float32)
        self.master = start.astype(np.float32)
        if low and master == "float32":
            # Some weights were set since their masters were written.
            self.weight[::5] = rng.standard_normal(len(self.weight[::5])).astype(DTYPES[weight])
        elif low:
            self.master = np.zeros(1, DTYPES[master])
        for state in RULES[rule].states:
            drawn = rng.random(size) if state in RULES[rule].unsigned else rng.standard_normal(size)
            setattr(self, state, drawn.astype(np.float32))
        self.gradient = (rng.standard_normal(size) / SCALE).astype(DTYPES[gradient])
        constants, scalars = self.numbers()
        self.constants = np.array(constants, np.float32)
        self.scalars = np.array([SCALE, DECAY, RATE, 0, 1, *scalars], np.float32)

    def numbers(self):
        """Return the rule's constants, and what else of it the operators take: of this step."""
        constants, scalars = [BETA1, 1 - BETA1, BETA2, 1 - BETA2], []
        if self.rule != "Lion":
            constants.append(EPS)
            scalars += [1 - BETA1**STEP, np.sqrt(1 - BETA2**STEP)]
        if self.rule == "Lans":
            constants.append(np.inf)
        if self.rule == "Ademamix":
            made = self.reference()
            made.step_count = STEP
            alpha, beta3 = made.scheduled()
            scalars += [alpha, beta3, 1 - beta3]
        return constants, scalars

    @property
    def states(self):
        return [getattr(self, state) for state in RULES[self.rule].states]

    @property
    def inputs(self):
        return ["weight", "master", *RULES[self.rule].states, "gradient", "constants", "scalars"]

    @property
    def exact(self):
        """The weights that are updated, in float64."""
        if self.master.size != self.size or self.master.dtype != np.float32:
            return self.weight.astype(np.float64)
        if self.weight.size != self.size or self.weight.dtype == np.float32:
            return self.master.astype(np.float64)
        fits = self.master.astype(self.weight.dtype) == self.weight
        return np.where(fits, self.master, self.weight.astype(np.float32)).astype(np.float64)

    def launch(self, stand_in, operator, inputs, cores):
        """Run an operator and return the sum of each kind, the partial ones added up by an operator too."""
        partial = stand_in.launch(operator, [getattr(self, name) for name in inputs], cores)
        kinds = SUMS_OF.get(operator, ("weight", "update"))
        partial = partial.reshape(len(kinds), -1)
        assert partial.shape[1] == LANES * -(-self.size // TILE)
        sums = stand_in.launch("MsOptimSums", [partial.copy()], cores).reshape(-1, LANES).sum(1)
        return dict(zip(kinds, sums))

    def step(self, stand_in, cores):
        """Run a whole step as ms_optim/paths/ascend/operators.py does, and return the sums."""
        rule, inputs = self.rule, self.inputs
        if rule in IN_ONE_LAUNCH:
            return self.launch(stand_in, f"MsOptim{rule}", inputs, cores)
        if rule == "Lans":
            self.scalars[0] /= np.linalg.norm(self.gradient.astype(np.float64) * SCALE)
        sums = self.launch(stand_in, f"MsOptim{rule}Moments", inputs, cores)
        phi = np.sqrt(sums["weight"])
        if rule == "Lamb":
            self.scalars[2] = RATE * phi / np.sqrt(sums["direction"])
            inputs.remove("gradient")
        else:
            self.scalars[2] = RATE * BETA1 * phi / np.sqrt(sums["direction"])
            self.scalars[3] = RATE * (1 - BETA1) * phi / np.sqrt(sums["direction2"])
        return sums | self.launch(stand_in, f"MsOptim{rule}Apply", inputs, cores)

    def reference(self):
        """Return the reference before the same step."""
        cls, told, *_ = RULES[self.rule]
        made = cls([self.exact], [lambda k: RATE], [lambda k: DECAY], [False], ["float32"], **told)
        for prefix, state in zip(made.states, self.states):
            made.state[prefix][0] = state.astype(np.float64)
            made.peak[prefix] = [np.abs(state)]
        # What is added to a weight carries the errors of terms that may cancel, of the rate's size.
        made.peak["weight"] = [np.maximum(np.abs(self.exact), RATE)]
        made.step_count = STEP - 1
        return made


def columns(host, operator):
    of = [host.definitions[operator][f"input{i}"] for i in (0, 1, 4)]
    return list(zip(*(parameter["dtype"].split(",") for parameter in of)))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_agrees_with_float64_for_all_dtypes_and_sizes(host, stand_in, rule):
    """All weights and states and sums, for each dtype that there is a kernel for."""
    kinds = columns(host, "MsOptimAdamw")
    cases = [(size, kinds[0]) for size in SIZES] + [(size, kind) for size in (1, 7, 4097) for kind in kinds[1:]]
    for size, (weight, master, gradient) in cases:
        arrays = Arrays(rule, size, weight, master, gradient)
        expected = arrays.reference()
        sums = arrays.step(stand_in, 8)
        check_step(arrays, expected, sums, f"{rule}, {size} elements of {weight}, {master}, {gradient}")


def check_step(arrays, expected, sums, what):
    """Take the step that was taken in the reference, too, and compare."""
    if hasattr(expected, "seen"):
        expected.seen = [arrays.exact]
    expected.step([arrays.gradient.astype(np.float64) * SCALE])
    for prefix, state in zip(expected.states, arrays.states):
        check(state, expected.state[prefix][0], "state", expected.peak[prefix][0], what)
    exact, peak = expected.masters[0], expected.peak["weight"][0]
    if arrays.master.dtype == np.float32:
        check(arrays.master, exact, "weight", peak, what)
    if arrays.weight.dtype != np.float32:
        check_units(arrays.weight.astype(np.float64), exact, str(arrays.weight.dtype), 1, peak, what)
    check_norms(sums, expected)


def check(actual, expected, kind, peak, what):
    check_close(actual.astype(np.float64), expected, TOLERANCE[kind], peak, what)


def check_norms(sums, expected):
    norms = np.sqrt([sums["weight"], sums["update"]])
    check(norms, expected.statistics[0, 1:3], "statistics", expected.peak["statistics"][0, 1:3], "norms")


@pytest.mark.parametrize("rule", ["Adamw", "Lamb", "Lans", "Lion", "Ademamix"])
def test_the_number_of_cores_changes_no_bit(stand_in, rule):
    for size in SIZES:
        results = []
        for cores in CORES:
            arrays = Arrays(rule, size)
            sums = arrays.step(stand_in, cores)
            results.append([a.tobytes() for a in (arrays.master, *arrays.states, *map(np.array, sums.values()))])
        assert all(result == results[0] for result in results), size


def test_a_million_elements(stand_in):
    arrays = Arrays("Adamw", 1_000_000)
    expected = arrays.reference()
    check_step(arrays, expected, arrays.step(stand_in, 40), "a million")


@pytest.mark.parametrize(
    "rule, operators",
    [
        ("Adamw", ["MsOptimAdamw"]),
        ("Lamb", ["MsOptimLambMoments"]),
        ("Lans", ["MsOptimLansMoments", "MsOptimLansApply"]),
        ("Lion", ["MsOptimLion"]),
        ("Ademamix", ["MsOptimAdemamix"]),
    ],
)
def test_a_skipped_step_writes_nothing(stand_in, rule, operators):
    for operator in operators:
        arrays = Arrays(rule, 4097)
        arrays.scalars[4] = 0
        before = [getattr(arrays, name).copy() for name in arrays.inputs]
        arrays.launch(stand_in, operator, arrays.inputs, 3)
        for name, was in zip(arrays.inputs, before):
            np.testing.assert_array_equal(getattr(arrays, name), was, f"{operator}: {name}")


def test_the_gradient_of_lans_is_bounded(stand_in):
    arrays = Arrays("Lans", 4097)
    arrays.constants[5] = 0.5
    m = arrays.m.astype(np.float64)
    arrays.launch(stand_in, "MsOptimLansMoments", arrays.inputs, 2)
    bounded = np.clip(arrays.gradient.astype(np.float64) * SCALE, -0.5, 0.5)
    check_close(
        arrays.m.astype(np.float64), BETA1 * m + (1 - BETA1) * bounded, TOLERANCE["state"], np.abs(m) + 0.5, "m"
    )


@pytest.mark.parametrize("rule", IN_ONE_LAUNCH)
def test_a_nan_stays_where_it_is(stand_in, rule):
    """In the gradient or in a state: of that element alone, and its weight is NaN."""
    size = TILE + 7
    where = np.isin(np.arange(size), (0, 100, TILE - 1, TILE + 6))
    # The larger of a number and a NaN that was there before is left open.
    for name in ("gradient", *(state for state in RULES[rule].states if state != "vhat")):
        arrays = Arrays(rule, size)
        expected = arrays.reference()
        getattr(arrays, name)[where] = np.nan
        arrays.step(stand_in, 3)
        np.testing.assert_array_equal(np.isnan(arrays.master), where, name)
        for prefix, state in zip(RULES[rule].states, arrays.states):
            assert not np.isnan(state[~where]).any()
            assert np.isnan(state[where]).all() == (name in ("gradient", prefix) or (prefix == "vhat" and name == "v"))
        if hasattr(expected, "seen"):
            expected.seen = [np.where(where, 0, arrays.exact)]
        expected.step([np.where(where, 0, arrays.gradient).astype(np.float64) * SCALE])
        peak = expected.peak["weight"][0]
        check(arrays.master[~where], expected.masters[0][~where], "weight", peak[~where], name)


TINY = np.finfo(np.float32).tiny


@pytest.mark.parametrize("size", [15, TILE - 1, TILE, TILE + 15])
def test_the_sign_of_lion(stand_in, size):
    """Of 0 it is 0, of NaN NaN, of a denormal number nothing to speak of, and of all else 1 or -1."""
    cases = [
        *((0.0, 0.0, 0), (-0.0, -0.0, 0), (1.0, -9.0, 0), (0.0, 1.0, 1), (-0.0, -1.0, -1)),
        *((3 * TINY, 0.0, 1), (-3 * TINY, 0.0, -1), (TINY / 2, 0.0, 0), (-TINY / 2, 0.0, 0), (0.0, TINY / 8, 0)),
        *(
            (np.inf, 1.0, 1),
            (1.0, -np.inf, -1),
            (np.inf, -np.inf, np.nan),
            (np.nan, 1.0, np.nan),
            (1.0, np.nan, np.nan),
        ),
    ]
    m, g, sign = (np.resize(np.array(column, np.float64), size) for column in zip(*cases))
    arrays = Arrays("Lion", size)
    # Of 1 and -9 the sum is exactly 0.
    arrays.constants[0] = arrays.constants[1] * np.float32(9)
    arrays.m, arrays.gradient = m.astype(np.float32), (g / SCALE).astype(np.float32)
    before = arrays.exact
    arrays.step(stand_in, 2)
    np.testing.assert_allclose(arrays.master, before - RATE * (sign + DECAY * before), rtol=8 * 2.0**-24, atol=2.0**-26)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(arrays.m, BETA2 * m + (1 - BETA2) * g, rtol=4 * 2.0**-24, atol=TINY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_of_the_host_is_added(stand_in, dtype):
    for size in SIZES:
        rng = np.random.default_rng(0)
        weight, delta = rng.standard_normal(size).astype(DTYPES[dtype]), rng.standard_normal(size).astype(np.float32)
        before = weight.astype(np.float64)
        partial = stand_in.launch("MsOptimDelta", [weight, delta], 8)
        np.testing.assert_array_equal(weight, (before.astype(np.float32) + delta).astype(DTYPES[dtype]))
        np.testing.assert_allclose(partial.astype(np.float64).sum(), np.sum(before**2), rtol=TOLERANCE["statistics"])


MU = 0.875


def muon(stand_in, size, weight="float32", master="float32", nesterov=True, applied=1, cores=8):
    """Run Muon's operators before and after the products, which are left out; check all that they write."""
    rng = np.random.default_rng(size)
    arrays = Arrays("Lion", size, weight, master)
    m, gradient, weights = arrays.m.astype(np.float64), rng.standard_normal(size).astype(np.float32), arrays.exact
    g = SCALE * gradient.astype(np.float64)
    constants, numbers = np.array([MU, nesterov], np.float32), np.array([SCALE, applied], np.float32)
    u = stand_in.launch("MsOptimMuonMomentum", [arrays.m, gradient, constants, numbers], cores)
    after, peak = MU * m + g, np.abs(m) + np.abs(g)
    check(u, g + MU * after if nesterov else after, "state", peak, "direction")
    check(arrays.m, after if applied else m, "state", peak, "momentum")
    scalars = np.array([1, DECAY, RATE, 0, applied], np.float32)
    before = [arrays.weight.copy(), arrays.master.copy()]
    partial = stand_in.launch("MsOptimMuonApply", [arrays.weight, arrays.master, u.copy(), scalars], cores)
    if not applied:
        np.testing.assert_array_equal(arrays.weight, before[0])
        np.testing.assert_array_equal(arrays.master, before[1])
        return arrays, u
    update = RATE * (u.astype(np.float64) + DECAY * weights)
    peak = np.maximum(np.abs(weights), RATE)
    if arrays.master.dtype == np.float32:
        check(arrays.master, weights - update, "weight", peak, "weight")
    if weight != "float32":
        check_units(arrays.weight.astype(np.float64), weights - update, weight, 1, peak, "weight")
    norms = np.sqrt(partial.reshape(2, -1).astype(np.float64).sum(1))
    np.testing.assert_allclose(norms, np.linalg.norm([weights, update], axis=1), rtol=TOLERANCE["statistics"])
    return arrays, u


def test_the_passes_of_muon_agree_with_float64_for_all_dtypes_and_sizes(host, stand_in):
    inputs = [host.definitions["MsOptimMuonApply"][f"input{i}"]["dtype"].split(",") for i in (0, 1)]
    kinds = list(zip(*inputs))
    assert len(kinds) == 5
    for size, kind in [(size, kinds[0]) for size in SIZES] + [(4097, kind) for kind in kinds[1:]]:
        muon(stand_in, size, *kind)
    muon(stand_in, 4097, nesterov=False)
    muon(stand_in, 4097, applied=0)


def test_the_number_of_cores_changes_no_bit_of_muon(stand_in):
    results = [
        [a.tobytes() for a in (u, made.m, made.master)]
        for made, u in (muon(stand_in, 9 * TILE + 5, cores=n) for n in CORES)
    ]
    assert all(result == results[0] for result in results)


# ---- What the stand-in is there for is found --------------------------------------------------------------------

TILES, RULE, WEIGHT, TILING = "tiles.h", "rule.h", "weight.h", "tiling.h"
# A mistake: the file, what stands there, what is put there instead, and what is said of it, None where the numbers are
# wrong instead.
MISTAKES = {
    "a tail is written to the tile's end": (
        TILES,
        "DataCopyPad(global_[begin], Out(buffer), Bytes(count))",
        "DataCopyPad(global_[begin], Out(buffer), Bytes(kTile))",
        "read before it is written|beyond a tensor",
    ),
    "a tail is read to the tile's end": (
        TILES,
        "global_[begin], Bytes(count),",
        "global_[begin], Bytes(kTile),",
        "beyond",
    ),
    "a tensor is not freed": (TILES, "out_.FreeTensor(out);", "", "no buffer left|was not freed"),
    "the last tensor is not freed": (
        TILES,
        "in_.FreeTensor(in);",
        "if (tile + 1 < share.end) in_.FreeTensor(in);",
        "was not freed",
    ),
    "a tensor is used after it was freed": (
        TILES,
        "      out_.EnQue(made);",
        "      kernel->Compute(in, made, count);\n      out_.EnQue(made);",
        "after it was freed",
    ),
    "a tensor is not queued": (TILES, "in_.EnQue(empty);", "", "empty queue"),
    "a tensor is not dequeued": (
        TILES,
        "LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();",
        "LocalTensor<uint8_t> out = made;",
        "not dequeued",
    ),
    "a buffer is too small": (TILES, "*bytes += kTile * sizeof(T);", "*bytes += kTile;", "too small|overlaps"),
    "buffers are too many": (TILES, "kBuffers = 2", "kBuffers = 9", "more than 8 buffers"),
    "buffers are too large": (TILING, "kTile = 2048", "kTile = 4096", "memory is too small"),
    "two cores share a tile": (
        TILING,
        "tiles * (core + 1) / cores}",
        "tiles * (core + 1) / cores + 1}",
        "after a core wrote",
    ),
    "a core leaves its last tile out": (TILING, "tiles * (core + 1) / cores}", "tiles * (core + 1) / cores - 1}", None),
    "a copy without padding is not aligned": (
        TILES,
        "DataCopy(global_[(kind * tiles_ + tile) * kLanes]",
        "DataCopy(global_[(kind * tiles_ + tile) * (kLanes - 1)]",
        "not to an aligned address",
    ),
    "a copy without padding is of an odd length": (
        TILES,
        "Part<float>(out, out_)[kind * kLanes], kLanes);",
        "Part<float>(out, out_)[kind * kLanes], kLanes - 1);",
        "multiple of 32 bytes",
    ),
    "an instruction is not aligned": (TILES, "Add(x, x, x[n], n)", "Add(x, x, x[n + 1], n)", "not aligned to 32 bytes"),
    "the rest of a tile is not cleared": (
        TILES,
        "if (count < kTile) AscendC::Duplicate(scratch, 0.0f, kTile);",
        "",
        "read before it is written",
    ),
    "a comparison is of a tail": (WEIGHT, "CMPMODE::EQ, kTile)", "CMPMODE::EQ, count)", "multiple of 256 bytes"),
    "a number is rounded the wrong way": (
        WEIGHT,
        "Cast(stored_.Out(out), w, AscendC::RoundMode::CAST_RINT",
        "Cast(stored_.Out(out), w, AscendC::RoundMode::CAST_NONE",
        "rounded to the nearest",
    ),
    "the decay is forgotten": (RULE, "AscendC::Add(t.d[k], t.d[k], scratch, count);", ";", None),
    "the states change places": (
        RULE,
        "states_[k].Store(out, begin, count);",
        "states_[k].Store(out, 0, count);",
        "after a core wrote",
    ),
    "memory is read behind the stand-in's back": (
        RULE,
        "uint32_t in = 0, out = 0;",
        "uint32_t in = 0, out = 0;\n(void)*const_cast<volatile uint8_t *>(a.constants + Rule::kConstants * 4);",
        "heap-buffer-overflow",
    ),
}


# Likewise of a rule's own arithmetic, where the numbers are wrong.
LION, MIX = "lion.h", "ademamix.h"
DECAY_BEFORE_SCALE = (RULE, "GetValue(kLambda), count", "GetValue(kLambda) / scalars_.GetValue(kCoefficient), count")
MISTAKES_OF_RULES = {
    "Lion": {
        "the momentum decays by the other beta": (LION, "Mix(t.s[0], beta2", "Mix(t.s[0], beta1"),
        "the sign is of the other beta": (LION, "Mix(c, beta1", "Mix(c, beta2"),
        "the sign is of the new momentum": (LION, "Mix(c, beta1, t.before[0]", "Mix(c, beta1, t.s[0]"),
        "the sign of 0 is 1": (LION, "CMPMODE::GE, kLeastNormal", "CMPMODE::GE, 0.0f"),
        "the sign of 0 is -1": (LION, "CMPMODE::LE, -kLeastNormal", "CMPMODE::LE, 0.0f"),
        "what is negative stays": (LION, "-kLeastNormal, -1.0f", "-3e38f, -1.0f"),
        "a comparison is of a tail": (LION, "t.scratch, mode, kTile)", "t.scratch, mode, t.count)"),
        "a comparison is of what is not written": (
            RULE,
            "sums_.AddSquares(out, 0, w, t.d[0]",
            "sums_.AddSquares(out, 0, w, scratch",
        ),
        "the decay is not times the rate": DECAY_BEFORE_SCALE,
    },
    "Ademamix": {
        "the slow moment decays by beta1": (MIX, "Mix(t.s[2], beta3", "Mix(t.s[2], beta1"),
        "the slow moment is of the fast one's place": (MIX, "t.before[2], one", "t.before[0], one"),
        "the slow moment takes what the fast one takes": (
            MIX,
            "t.before[2], one_minus_beta3",
            "t.before[2], one_minus_beta1",
        ),
        "the slow moment is from before the step": (MIX, "Muls(t.scratch, t.s[2]", "Muls(t.scratch, t.before[2]"),
        "the slow moment is corrected": (MIX, "t.s[2], alpha, ", "t.s[2], alpha * correction1, "),
        "the denominator is that of the slow moment": (
            MIX,
            "Denominator(t.scratch, t.s[1]",
            "Denominator(t.scratch, t.s[2]",
        ),
        "the decay is not times the rate": DECAY_BEFORE_SCALE,
        "alpha and beta3 change places": (
            MIX,
            "AdamMoments::kScalars, kBeta3,",
            "AdamMoments::kScalars + 1, kBeta3 = kAlpha - 1,",
        ),
    },
}


def attempt(program, rule="Adamw"):
    """Run a step of a rule, for float16 weights with masters, and check it."""
    arrays = Arrays(rule, 2 * TILE + 1, "float16", "float32", "float16")
    if rule == "Lion":
        arrays.m[:7], arrays.gradient[:7] = 0, 0  # whose sign is 0
    expected = arrays.reference()
    partial = program.launch(f"MsOptim{rule}", [getattr(arrays, name) for name in arrays.inputs], 3).reshape(2, -1)
    check_step(arrays, expected, dict(zip(("weight", "update"), partial.sum(1))), "a mistake")


@pytest.mark.parametrize("rule", ["Adamw", *MISTAKES_OF_RULES])
def test_without_a_mistake_nothing_is_found(stand_in, rule):
    attempt(stand_in, rule)


def mistaken(host, folder, file, before, after, *operators, columns=(1,)):
    """Build a program of operators with a mistake put into them, for some columns of dtypes; for all if None."""
    kernels = shutil.copytree(OPS / "op_kernel", folder / "op_kernel")
    text = (kernels / file).read_text()
    assert text.count(before) == 1, f"{file} no longer says what the mistake is put in place of"
    (kernels / file).write_text(text.replace(before, after))
    return StandIn(host.program(folder, operators, columns, kernels))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(host, tmp_path, mistake):
    """A kernel with a mistake put into it is stopped, with the right words, or gives numbers that are not right."""
    *put, said = MISTAKES[mistake]
    program = mistaken(host, tmp_path, *put, "MsOptimAdamw")
    with pytest.raises(AssertionError if said is None else WrongError, match=said):
        attempt(program)


MUON = "muon.h"
# The file, what stands there, what is put there instead.
MISTAKES_OF_MUON = {
    "the momentum does not decay": (MUON, "m_.In(in), momentum_,", "m_.In(in), 1.0f,"),
    "the gradient is not scaled": (MUON, "scalars_.GetValue(kScale)", "1.0f"),
    "the direction is the momentum": (MUON, "is_nesterov_ ? momentum_ : 1.0f", "1.0f"),
    "the direction lacks the gradient": (MUON, "if (is_nesterov_) AscendC::Add(u, u, g, count);", ""),
    "a skipped step writes the momentum": (MUON, "if (scalars_.GetValue(kMuonApplied) != 0.0f) m_", "m_"),
    "the direction has the other sign": (MUON, "t.d[0], t.g, 1.0f", "t.d[0], t.g, -1.0f"),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_MUON)
def test_a_mistake_in_muon_is_found(host, tmp_path, mistake):
    put = MISTAKES_OF_MUON[mistake]
    program = mistaken(host, tmp_path, *put, "MsOptimMuonMomentum", "MsOptimMuonApply", columns=None)
    with pytest.raises((AssertionError, WrongError)):
        [muon(program, 2 * TILE + 1, applied=applied) for applied in (1, 0)]


@pytest.mark.parametrize("rule, mistake", [(rule, name) for rule, names in MISTAKES_OF_RULES.items() for name in names])
def test_a_mistake_in_a_rule_is_found(host, tmp_path, rule, mistake):
    program = mistaken(host, tmp_path, *MISTAKES_OF_RULES[rule][mistake], f"MsOptim{rule}")
    with pytest.raises((AssertionError, WrongError)):
        attempt(program, rule)


# ---- The vendor's own headers -----------------------------------------------------------------------------------

# The vendor's build makes this macro.
TILING_DATA = "const ms_optim::Tiling name = *reinterpret_cast<__gm__ ms_optim::Tiling *>(address)"
FOR_A2 = ["-DASCENDC_CPU_DEBUG=1", "-D__CCE_AICORE__=220", "-D__DAV_C220__", "-D__DAV_C220_VEC__"]


@pytest.mark.skipif(
    "ASCENDC_INCLUDE" not in os.environ, reason="ASCENDC_INCLUDE names no folders with the headers of Ascend C"
)
def test_the_real_headers_accept_the_sources(host, tmp_path):
    """g++ checks types only: what the vendor's compiler makes of the sources is its own affair."""
    include = [f"-I{folder}" for folder in os.environ["ASCENDC_INCLUDE"].split(":")]
    check = ["g++", "-std=c++17", "-w", "-fsyntax-only", *include]

    def accepted(job):
        name, text, flags = job
        source = tmp_path / f"{name}.cc"
        source.write_text(text)
        return subprocess.run([*check, *flags, source], capture_output=True, text=True).stderr

    jobs = [("host", f'#include "{OPS}/op_host/ms_optim.cpp"\n', [])]
    for operator, definition in host.definitions.items():
        inputs = {p["name"]: p["dtype"].split(",") for key, p in definition.items() if key.startswith("input")}
        for column in range(len(next(iter(inputs.values())))):
            lines = [f"#define DTYPE_{name.upper()} {C_TYPES[of[column]]}" for name, of in inputs.items()]
            lines += [f"#define GET_TILING_DATA(name, address) {TILING_DATA}", '#include "kernel_operator.h"']
            lines.append(f'#include "{OPS}/op_kernel/{snake(operator)}.cpp"\n')
            jobs.append((f"{operator}{column}", "\n".join(lines), FOR_A2))
    # What is wrong is not accepted.
    wrong = jobs[-1][1] + "float wrong = AscendC::GlobalTensor<float>();\n"
    assert "error" in accepted(("wrong", wrong, FOR_A2))
    assert [said for said in in_parallel(accepted, jobs) if said] == []
