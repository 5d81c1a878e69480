"""The operators for Ascend processors on a CPU stand-in: unchanged sources, under sanitizers, against float64."""

import os
import shutil
import subprocess

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
from sources import TESTS
from tolerances import TOLERANCE

TILE, LANES = 2048, 8
CORES = [1, 2, 8, 20, 40]
SIZES = [1, 7, TILE - 1, TILE, TILE + 1, 4097, 8 * TILE - 1, 8 * TILE + 1, 50 * TILE + 3]
BETA1, BETA2, EPS, DECAY, RATE, STEP, SCALE = 0.9, 0.99, 1e-4, 0.02, 0.01, 3, 0.125
SUMS_OF = {
    "MsOptimAdamw": ("weight", "update"),
    "MsOptimAdamwAmsgrad": ("weight", "update"),
    "MsOptimLambMoments": ("weight", "direction"),
    "MsOptimLansMoments": ("weight", "direction", "direction2"),
    "MsOptimLambApply": ("update",),
    "MsOptimLansApply": ("update",),
}

pytestmark = needs_compiler


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

    def __init__(self, size, weight="float32", master="float32", gradient="float32", seed=0):
        rng = np.random.default_rng(seed)
        start = rng.standard_normal(size)
        low = weight != "float32"
        self.weight = start.astype(DTYPES[weight]) if low else np.zeros(1, np.float32)
        self.master = start.astype(np.float32)
        if low and master == "float32":
            # Some weights were set since their masters were written.
            self.weight[::5] = rng.standard_normal(len(self.weight[::5])).astype(DTYPES[weight])
        elif low:
            self.master = np.zeros(1, DTYPES[master])
        self.m = rng.standard_normal(size).astype(np.float32)
        self.v = rng.random(size).astype(np.float32)
        self.vhat = rng.random(size).astype(np.float32)
        self.gradient = (rng.standard_normal(size) / SCALE).astype(DTYPES[gradient])
        self.constants = np.array([BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, np.inf], np.float32)
        corrections = 1 / (1 - BETA1**STEP), 1 / np.sqrt(1 - BETA2**STEP)
        self.scalars = np.array([*corrections, SCALE, DECAY, RATE, 0, 1], np.float32)

    @property
    def exact(self):
        """The weights that are updated, in float64."""
        if self.master.size != self.m.size or self.master.dtype != np.float32:
            return self.weight.astype(np.float64)
        if self.weight.size != self.m.size or self.weight.dtype == np.float32:
            return self.master.astype(np.float64)
        fits = self.master.astype(self.weight.dtype) == self.weight
        return np.where(fits, self.master, self.weight.astype(np.float32)).astype(np.float64)

    def launch(self, stand_in, operator, inputs, cores):
        """Run an operator and return the sum of each kind, the partial ones added up by an operator too."""
        partial = stand_in.launch(operator, [getattr(self, name) for name in inputs], cores)
        partial = partial.reshape(len(SUMS_OF[operator]), -1)
        assert partial.shape[1] == LANES * -(-self.m.size // TILE)
        sums = stand_in.launch("MsOptimSums", [partial.copy()], cores).reshape(-1, LANES).sum(1)
        return dict(zip(SUMS_OF[operator], sums))

    def step(self, stand_in, rule, cores):
        """Run a whole step as ms_optim/_ascend.py does, and return the sums."""
        states = ["m", "v", "vhat"] if rule == "AdamwAmsgrad" else ["m", "v"]
        inputs = ["weight", "master", *states, "gradient", "constants", "scalars"]
        if rule.startswith("Adamw"):
            return self.launch(stand_in, f"MsOptim{rule}", inputs, cores)
        if rule == "Lans":
            self.scalars[2] /= np.linalg.norm(self.gradient.astype(np.float64) * SCALE)
        sums = self.launch(stand_in, f"MsOptim{rule}Moments", inputs, cores)
        phi = np.sqrt(sums["weight"])
        if rule == "Lamb":
            self.scalars[4] = RATE * phi / np.sqrt(sums["direction"])
            inputs.remove("gradient")
        else:
            self.scalars[4] = RATE * BETA1 * phi / np.sqrt(sums["direction"])
            self.scalars[5] = RATE * (1 - BETA1) * phi / np.sqrt(sums["direction2"])
        return sums | self.launch(stand_in, f"MsOptim{rule}Apply", inputs, cores)

    def stepped(self, rule):
        """Return the reference after the same step."""
        if rule.startswith("Adamw"):
            cls, choice = reference.AdamW, {"betas": (BETA1, BETA2), "amsgrad": rule == "AdamwAmsgrad"}
        else:
            cls = {"Lamb": reference.Lamb, "Lans": reference.LANS}[rule]
            choice = {"beta1": BETA1, "beta2": BETA2}
        made = cls([self.exact], [lambda k: RATE], [lambda k: DECAY], [False], ["float32"], eps=EPS, **choice)
        for prefix, state in zip(made.states, (self.m, self.v, self.vhat)):
            made.state[prefix][0] = state.astype(np.float64)
            made.peak[prefix] = [np.abs(state)]
        # What is added to a weight carries the errors of terms that may cancel, of the rate's size.
        made.peak["weight"] = [np.maximum(np.abs(self.exact), RATE)]
        made.step_count = STEP - 1
        made.step([self.gradient.astype(np.float64) * SCALE])
        return made


def columns(host, operator):
    of = [host.definitions[operator][f"input{i}"] for i in (0, 1, 4)]
    return list(zip(*(parameter["dtype"].split(",") for parameter in of)))


@pytest.mark.parametrize("rule", ["Adamw", "AdamwAmsgrad", "Lamb", "Lans"])
def test_a_step_agrees_with_float64_for_all_dtypes_and_sizes(host, stand_in, rule):
    """All weights and states and sums, for each dtype that there is a kernel for."""
    kinds = columns(host, "MsOptimAdamw")
    cases = [(size, kinds[0]) for size in SIZES] + [(size, kind) for size in (1, 7, 4097) for kind in kinds[1:]]
    for size, (weight, master, gradient) in cases:
        arrays = Arrays(size, weight, master, gradient)
        expected = arrays.stepped(rule)
        sums = arrays.step(stand_in, rule, 8)
        check_step(arrays, expected, sums, f"{rule}, {size} elements of {weight}, {master}, {gradient}")


def check_step(arrays, expected, sums, what):
    for prefix, state in zip(expected.states, (arrays.m, arrays.v, arrays.vhat)):
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


@pytest.mark.parametrize("rule", ["Adamw", "Lamb", "Lans"])
def test_the_number_of_cores_changes_no_bit(stand_in, rule):
    for size in SIZES:
        results = []
        for cores in CORES:
            arrays = Arrays(size)
            sums = arrays.step(stand_in, rule, cores)
            results.append([a.tobytes() for a in (arrays.master, arrays.m, arrays.v, *map(np.array, sums.values()))])
        assert all(result == results[0] for result in results), size


def test_a_million_elements(stand_in):
    arrays = Arrays(1_000_000)
    expected = arrays.stepped("Adamw")
    sums = arrays.step(stand_in, "Adamw", 40)
    check(arrays.master, expected.masters[0], "weight", expected.peak["weight"][0], "weight")
    check_norms(sums, expected)


def test_a_skipped_step_writes_nothing(stand_in):
    for operator in ("MsOptimAdamw", "MsOptimLambMoments", "MsOptimLansMoments", "MsOptimLansApply"):
        arrays = Arrays(4097)
        arrays.scalars[-1] = 0
        inputs = ["weight", "master", "m", "v", "gradient", "constants", "scalars"]
        before = [getattr(arrays, name).copy() for name in inputs]
        arrays.launch(stand_in, operator, inputs, 3)
        for name, was in zip(inputs, before):
            np.testing.assert_array_equal(getattr(arrays, name), was, f"{operator}: {name}")


def test_the_gradient_of_lans_is_bounded(stand_in):
    arrays = Arrays(4097)
    arrays.constants[5] = 0.5
    m = arrays.m.astype(np.float64)
    arrays.launch(stand_in, "MsOptimLansMoments", ["weight", "master", "m", "v", "gradient", "constants", "scalars"], 2)
    bounded = np.clip(arrays.gradient.astype(np.float64) * SCALE, -0.5, 0.5)
    check_close(
        arrays.m.astype(np.float64), BETA1 * m + (1 - BETA1) * bounded, TOLERANCE["state"], np.abs(m) + 0.5, "m"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_of_the_host_is_added(stand_in, dtype):
    for size in SIZES:
        rng = np.random.default_rng(0)
        weight, delta = rng.standard_normal(size).astype(DTYPES[dtype]), rng.standard_normal(size).astype(np.float32)
        before = weight.astype(np.float64)
        partial = stand_in.launch("MsOptimDelta", [weight, delta], 8)
        np.testing.assert_array_equal(weight, (before.astype(np.float32) + delta).astype(DTYPES[dtype]))
        np.testing.assert_allclose(partial.astype(np.float64).sum(), np.sum(before**2), rtol=TOLERANCE["statistics"])


# ---- What the stand-in is there for is found --------------------------------------------------------------------

TILES, ADAM, WEIGHT, TILING = "tiles.h", "adam.h", "weight.h", "tiling.h"
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
    "the decay is forgotten": (ADAM, "AscendC::Add(d, d, scratch, count);", "", None),
    "the states change places": (
        ADAM,
        "m_.Store(out, begin, count);",
        "m_.Store(out, 0, count);",
        "after a core wrote",
    ),
    "memory is read behind the stand-in's back": (
        ADAM,
        "uint32_t in = 0, out = 0;",
        "uint32_t in = 0, out = 0;\n(void)*const_cast<volatile uint8_t *>(a.constants + kConstants * sizeof(float));",
        "heap-buffer-overflow",
    ),
}


def attempt(program):
    """Run a step of AdamW, for float16 weights with masters, and check it."""
    arrays = Arrays(2 * TILE + 1, "float16", "float32", "float16")
    expected = arrays.stepped("Adamw")
    inputs = [arrays.weight, arrays.master, arrays.m, arrays.v, arrays.gradient, arrays.constants, arrays.scalars]
    partial = program.launch("MsOptimAdamw", inputs, 3).reshape(2, -1)
    check_step(arrays, expected, dict(zip(("weight", "update"), partial.sum(1))), "a mistake")


def test_without_a_mistake_nothing_is_found(stand_in):
    attempt(stand_in)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(host, tmp_path, mistake):
    """A kernel with a mistake put into it is stopped, with the right words, or gives numbers that are not right."""
    file, before, after, said = MISTAKES[mistake]
    kernels = shutil.copytree(OPS / "op_kernel", tmp_path / "op_kernel")
    text = (kernels / file).read_text()
    assert text.count(before) == 1, f"{file} no longer says what the mistake is put in place of"
    (kernels / file).write_text(text.replace(before, after))
    program = StandIn(host.program(tmp_path, ["MsOptimAdamw"], [1], kernels))
    with pytest.raises(AssertionError if said is None else WrongError, match=said):
        attempt(program)


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
