"""Sinkhorn's passes over matrices of several bands of rows: on the stand-in for CUDA, and on the CPU."""

import dataclasses
import functools

import machines
import numpy as np
import pytest
import recording
import reference
import replays
from builds import needs, once, shared_folder
from harness import NUMPY, check_close, peak_of_statistics
from native import Launch
from parity import check_launches
from proofs import BUILT
from recording import Recorded
from test_sinkhorn import LEAST_PEAK, of_tokens
from tolerances import STEPS, TOLERANCE

from ms_optim.kernels import libraries
from ms_optim.kernels.interface import SharedFlag

pytestmark = pytest.mark.proof(*BUILT)
# Of one band and of several; rows that are whole tiles, which are read in four places, rows that share tiles, and those
# of more than a segment. Few matrices have many elements: fibers take their time.
SHAPES = [
    [(5, 3), (1, 1), (40, 256), (513, 17), (1030, 7)],
    [(600, 256), (), (7,), (3, 8200), (6, 4, 3, 3)],
    [(20, 1000), (33, 2048), (17, 1600), (0, 5)],
    [(1500, 40), (2, 512), (515, 512)],
]
CONSTANTS, PAIRS = reference.Sinkhorn.kernels[0][2:4]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    needs("g++")
    return machines.StandIn(once(shared_folder(tmp_path_factory), "standin", machines.StandIn.build))


def matrices(rng, weights, states, shapes, **options):
    """A launch on matrices with rows of zeros, and with rows that fall below the threshold."""
    made = recording.launch("sinkhorn", rng, weights, states, shapes=shapes, **options)
    n = len(shapes)
    for g in made.arrays[made.first + n : made.first + 2 * n]:
        if g.ndim == 2 and len(g) > 30:
            g[::5] = 0
            g[1::7] *= np.asarray(1e-4, g.dtype)
    remainders = recording.remainders_of(made, weights[1], n)
    return Recorded(f"{weights}, {states}, {shapes}", made.function, made.arrays, remainders=remainders)


@pytest.mark.parametrize("states", recording.STATES)
@pytest.mark.parametrize("weights", recording.WEIGHTS, ids=str)
def test_the_bits_are_those_of_the_cpu_whatever_runs_first(stand_in, weights, states):
    k = recording.WEIGHTS.index(weights)
    case = matrices(
        np.random.default_rng(k),
        weights,
        states,
        SHAPES[(k + recording.STATES.index(states)) % len(SHAPES)],
        gradients=["float32", weights[0]][k % 2],
        shared=SharedFlag.SKIP_NONFINITE | SharedFlag.AVERAGES * (k % 2),
        cautious=k % 3 == 1,
        loss_scale=[1.0, 1024.0][k % 2],
    )
    expected = case.run()
    machines.compare(case, case.run(stand_in.call), expected, exactly=True)
    machines.compare(case, machines.backwards(lambda: case.run(stand_in.call)), expected, exactly=True)


@pytest.mark.parametrize("beta, pairs", [(0.3, 5), (0.0, 2), (0.95, 0), (0.95, 1)])
def test_any_momentum_and_number_of_normalizations(stand_in, beta, pairs):
    """Below a half, and in the end, the state does not hold the elements that are divided."""
    rng = np.random.default_rng(3)
    tensors = [[recording.normal(rng, s) for s in ((530, 256), (70, 9))] for _ in range(3)]
    made = Launch("ms_optim_sinkhorn", *tensors[:2], tensors[2:], (beta, *CONSTANTS[1:]), pairs)
    case = Recorded("numbers", made.function, made.arrays)
    machines.compare(case, case.run(stand_in.call), case.run(), exactly=True)
    numbers = {"momentum": beta, "normalizations": 2 * pairs + 1}
    formula = type("Numbers", (reference.Sinkhorn,), numbers)
    rule = (made.function, formula, (beta, *CONSTANTS[1:]), pairs, {})
    check_launches(stand_in.call, rule, [(30, 8), (5, 300)], "float32", "float32", 1.0, 0.5, True, 0.1, 3)


@pytest.mark.parametrize("number", [np.inf, np.nan], ids=str)
def test_what_is_not_finite_spreads_as_on_the_cpu(stand_in, number):
    case = matrices(np.random.default_rng(4), recording.WEIGHTS[0], "float32", [(600, 256), (40, 9)])
    for g in case.arrays[10:12]:
        assert g.shape in ((600, 256), (40, 9))
        g[3, 2] = number
    machines.compare(case, case.run(stand_in.call), case.run(), exactly=True)


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_fifty_steps_of_tokens_by_zipfs_law(stand_in, states):
    """Rows of tokens not seen for long fall below the threshold; those never seen are 0."""
    rng, shapes = np.random.default_rng(1), [(530, 24), (60, 256)]
    weights = [recording.normal(rng, s) for s in shapes]
    gradients = [np.zeros(s, np.float32) for s in shapes]
    held = [np.zeros(s, NUMPY[states]) for s in shapes]
    numbers = (CONSTANTS[0], 1e-2, *CONSTANTS[2:])
    launch = Launch(
        "ms_optim_sinkhorn",
        weights,
        gradients,
        [held],
        numbers,
        PAIRS,
        rates=(0.01, 0.1),
        layout=[[0, 1, 0, i] for i in range(2)],
    )
    starts = [w.astype(np.float64) for w in weights]
    rates = [lambda k: 0.01] * 2, [lambda k: 0.1] * 2
    expected = reference.Sinkhorn(starts, *rates, [False] * 2, ["float32"] * 2, tau=1e-2)
    below = 0
    for _ in range(STEPS):
        for g in gradients:
            g[...] = of_tokens(rng, g.shape, 100)
        assert launch.run(stand_in.call) == 0
        expected.step([g.astype(np.float64) for g in gradients])
        rho = np.linalg.norm(0.95 * expected.state["sinkhorn_m"][0] + 0.05 * gradients[0], axis=1)
        below += ((rho > 0) & (rho <= 1e-2 * rho.mean())).sum()
    assert below > 500
    if states != "float32":
        # A state of fewer bits takes other steps: the weights move about as far.
        for w, start, of_float64 in zip(weights, starts, expected.weights):
            assert np.linalg.norm(w - of_float64) < 0.1 * np.linalg.norm(of_float64 - start)
        return
    for i in range(2):
        peak = np.maximum(expected.peak["weight"][i], LEAST_PEAK)
        check_close(weights[i].astype(np.float64), expected.weights[i], TOLERANCE["weight"], peak, "w")
        peak = expected.peak["sinkhorn_m"][i]
        check_close(held[i].astype(np.float64), expected.state["sinkhorn_m"][i], TOLERANCE["state"], peak, "m")
    statistics = launch.statistics.astype(np.float64)
    check_close(statistics, expected.statistics, TOLERANCE["statistics"], peak_of_statistics(expected), "statistics")


@pytest.mark.parametrize("shape", [(50_257, 768), (151_936, 4096), (16_384, 1024)])
def test_a_launch_needs_little_memory(stand_in, shape):
    needed = libraries.workspace_bytes(stand_in.library, "sinkhorn", [shape], True)
    assert needed < 0.01 * 4 * np.prod(shape)


def test_stages_that_no_launch_has_are_refused(stand_in):
    for stages in (2, 4, 10):
        ones = [[np.ones((4, 3), np.float32)] for _ in range(3)]
        made = Launch("ms_optim_sinkhorn", *ones[:2], ones[2:], CONSTANTS, PAIRS, stages=stages)
        assert made.run(stand_in.call) == 4
        assert made.run() == 4


# ---- What the stand-in is there for is found --------------------------------------------------------------------

ENGINE = "sinkhorn_engine.cuh"
MISTAKES = {
    "rows are added up before they are made": (
        ENGINE,
        "    prepare(first);\n    __syncthreads();\n",
        "    prepare(first);\n",
    ),
    "columns are added up before the factors of rows are known": (
        ENGINE,
        "has_row ? Sinkhorn::Lifted(factor) : 0.0f;\n    __syncthreads();\n",
        "has_row ? Sinkhorn::Lifted(factor) : 0.0f;\n",
    ),
    "a tile moves before all of its rows were added up": (
        ENGINE,
        "begin + k * columns / kTile * kTile : end",
        "TilesFrom(k) : end",
    ),
    "tiles of the next row are left to it": (
        ENGINE,
        "(k * columns + kTile - 1) / kTile * kTile",
        "k * columns / kTile * kTile",
    ),
    "rows that became 0 stay in the sums": (
        ENGINE,
        "if (factor == 0.0 && norm != 0.0) again = 1;",
        "if (factor == 0.0 && norm != 0.0) again = 0;",
    ),
    "the last band's sums are left out": (
        ENGINE,
        "k < b.bands; ++k) sum += b.sums",
        "k + 1 < b.bands; ++k) sum += b.sums",
    ),
    "lanes of both rows of a warp are added up": (
        ENGINE,
        "for (int lane = kRowLanes / 2; lane > 0; lane /= 2)",
        "for (int lane = kRowLanes; lane > 0; lane /= 2)",
    ),
    "squares that vanish in float32 are lost": (
        ENGINE,
        "has_row && !IsExact(sum)",
        "has_row && sum > 1e38",
    ),
    "the state keeps the elements that were divided": (
        ENGINE,
        "if (band.in_place) StoreFloats(t.state[0], tile, x.s[0]);",
        "if (!band.in_place) StoreFloats(t.state[0], tile, x.s[0]);",
    ),
    "two tensors share their factors": (
        "workspace.h",
        "    *floats += columns;",
        "    *floats += 0;",
    ),
}
SINKHORN_ALONE = """
#pragma once
#include "sinkhorn.h"
#define MS_OPTIM_RULES(RULE) RULE(sinkhorn, Sinkhorn)
#define MS_OPTIM_HOST_RULES(RULE)
#define MS_OPTIM_GPU_RULES(RULE)
#define MS_OPTIM_RULE_FLAGS(FLAG)
"""


@functools.cache
def little_ones():
    """Launches that take little time: of few columns, and of rows that are whole tiles."""
    rng, made = np.random.default_rng(7), []
    for states, shapes in (("float32", [(530, 5), (34, 256)]), ("8bit", [(34, 256), (40, 9)])):
        made.append(dataclasses.replace(matrices(rng, recording.WEIGHTS[0], states, shapes), steps=2))
        made[-1].arrays[11][...] *= np.float32(1e-25)  # squares vanish in float32
    return made


def test_what_mistakes_are_looked_for_with_is_right(stand_in):
    for case in little_ones():
        machines.compare(case, case.run(stand_in.call), case.run(), exactly=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(stand_in, mistake, tmp_path):
    """Without sanitizers, for which fibers that wait so often take too long."""
    assert replays.is_noticed(stand_in, tmp_path, MISTAKES[mistake], SINKHORN_ALONE, little_ones(), flags=())
