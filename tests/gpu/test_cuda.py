"""The CUDA operators through their C interface: on a GPU where there is one, and their sources on the host."""

import dataclasses
import os

import machines
import mindspore as ms
import numpy as np
import pytest
import recording
import replays
from builds import needs, once, shared_folder
from harness import NUMPY
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SIZES, compare
from mindspore import Parameter, Tensor
from native import CompressedLaunch, Launch
from parity import EVERYTHING, RULES, check_launches
from proofs import BUILT
from recording import Recorded
from replays import SANITIZERS, add_workspace, built, replayed
from sources import ROOT

import ms_optim
from ms_optim.kernels import description, libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import MuonFlag, SharedFlag
from ms_optim.kernels.libraries import call_of

pytestmark = pytest.mark.proof(*BUILT, "ms_optim/states", "ms_optim/optimizers", "ms_optim/base", "ms_optim/paths")
# Rules that have no kernel of their own there.
ELSEWHERE = tuple(kernels.GPU_PASSES)
ON_GPU = [rule for rule in RULES if rule[0].removeprefix("ms_optim_") not in ELSEWHERE]
HOST_ONLY = SharedFlag.BY_ADDRESS | SharedFlag.LOCKS | SharedFlag.RETURNED | SharedFlag.SHARES | SharedFlag.HOLDS_NORMS
CUDA = libraries.FOLDER / "libms_optim_cuda.so"


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    needs("g++")
    return machines.StandIn(once(shared_folder(tmp_path_factory), "standin", machines.StandIn.build))


@pytest.fixture(scope="session")
def gpu():
    reason = machines.why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    return machines.Cuda()


@pytest.fixture(params=["stand_in", "gpu"])
def machine(request):
    return request.getfixturevalue(request.param)


def cases():
    """The recorded launches that a GPU takes too."""
    kept = [case for case in recording.cases() if not case.function.startswith("ms_optim_local")]
    kept = [case for case in kept if not (case.arrays[0].shape[1] - 1) & HOST_ONLY]
    kept = [case for case in kept if case.function.removeprefix("ms_optim_") not in ELSEWHERE]
    return [with_clips(case) for case in kept]


def with_clips(case):
    """Say in the flags that there is a bound on the norm: on a GPU the host cannot read it."""
    stages, shared, rule = case.arrays[0].shape
    clips = SharedFlag.CLIPS * bool(case.arrays[2][1] > 0)
    flags = np.zeros((stages, 1 + (shared - 1 | clips), rule), np.int8)
    return dataclasses.replace(case, arrays=[flags, *case.arrays[1:]])


def waits_for_sums(case):
    """Whether anything that is stored depends on sums, which devices add up in different orders."""
    centralizes = (case.arrays[0].shape[1] - 1) & SharedFlag.CENTRALIZES
    layerwise = case.function in ("ms_optim_lamb", "ms_optim_lans")
    return layerwise or case.arrays[2][1] > 0 or (centralizes and case.arrays[1][:, 2].any())


def test_storage_and_arithmetic_are_those_of_the_cpu(machine):
    """Where no sum enters, all bits are the same: all dtypes, codes, noise, masters, what is selected and sent."""
    compared = 0
    for case in cases():
        expected = case.run()
        if not waits_for_sums(case):
            compare(case, case.run(machine.call), expected, exactly=True)
            compared += 1
        elif all(a.dtype in (np.float32, np.float64, np.int32) for a in case.arrays[1:]):
            compare(case, case.run(machine.call), expected, exactly=False)
            compared += 1
    assert compared > 25


@pytest.mark.parametrize("weight", NUMPY)
@pytest.mark.parametrize("gradient", NUMPY)
@pytest.mark.parametrize("rule", ON_GPU, ids=lambda rule: rule[0])
def test_every_rule_dtype_and_shape_follows_the_reference(machine, rule, weight, gradient):
    check_launches(machine.call, rule, SIZES, weight, gradient, 8.0, 0.0, True, 0.1, 3)
    check_launches(machine.call, rule, SIZES[3:7], weight, gradient, 1.0, 0.5, False, 0.0, 4)


# Threads that are fibers take their time.
SMALL = st.lists(st.lists(st.integers(1, 12), max_size=3).map(tuple), min_size=1, max_size=5)


@settings(deadline=None, max_examples=15)
@given(**{**EVERYTHING, "rule": st.sampled_from(ON_GPU), "shapes": SMALL})
def test_any_shape_follows_the_reference(stand_in, **chosen):
    check_launches(stand_in.call, **chosen)


def test_many_tensors_and_a_large_one(machine):
    """Tables that take several launches to fill, and a tensor of many chunks."""
    shapes = [(k % 7,) for k in range(250)] + [(200_000,)]
    made = recording.launch("lamb", np.random.default_rng(0), shapes=shapes, shared=SharedFlag.SKIP_NONFINITE)
    case = Recorded("many", made.function, made.arrays, steps=1)
    compare(case, case.run(machine.call), case.run(), exactly=False)


# Stacks of tensors of one form: the framework's operators orthogonalize each at once.
STACKS = [((33, 31), (33, 31)), ((3, 8200),), ((6, 4, 3, 3),)]
MATRICES = [shape for stack in STACKS for shape in stack]
MOMENTUM = {"float32": np.float32, "bfloat16": NUMPY["bfloat16"], "8bit": np.int8, "4bit": np.int16}


def passes_of_matrices(states, weights):
    """Return the launches before and after Muon's products, which only GPUs have."""
    rng, n = np.random.default_rng(5), len(MATRICES)
    dtype, masters, stochastic = weights
    made = {"weights": [recording.normal(rng, shape, NUMPY[dtype]) for shape in MATRICES]}
    made["gradients"] = [recording.normal(rng, shape, NUMPY[dtype]) for shape in MATRICES]
    options = {"seed": 7, "cautious": True, "rates": (0.01, 0.1), "layout": [[0, 1, 0, i] for i in range(n)]}
    stacks = [np.zeros((len(stack), *stack[0]), np.float32) for stack in STACKS]
    momenta = [recording.state_of(shape, MOMENTUM[states]) for shape in MATRICES]
    held = {**made, "states": [momenta], "scales": [recording.scales_of(momenta)]}
    constants, flags = (0.95,), int(MuonFlag.NESTEROV)
    before = Launch(
        "ms_optim_muon_before", **held, **options, constants=constants, rule_flags=flags, stages=kernels.MOMENTS_STAGE
    )
    shared = SharedFlag.MASTERS * bool(masters) | SharedFlag.STOCHASTIC_ROUNDING * stochastic | SharedFlag.AVERAGES
    kept = {"masters": recording.zeros(MATRICES, masters) if masters else [], "averages": recording.zeros(MATRICES)}
    update = kernels.MOMENTS_STAGE + kernels.APPLY_STAGE + kernels.COMMIT_STAGE
    options |= {**kept, "shared": shared, "average": (0.9, True), "states": [], "rule_flags": 0, "constants": ()}
    after = Launch("ms_optim_muon_after", **made, **options, stages=update)
    sums = np.abs(rng.standard_normal((n, len(kernels.SUMS))))
    before.arrays[4] = after.arrays[4] = sums
    first = after.first
    after.arrays[first + n : first + 2 * n] = [recording.normal(rng, stack.shape) for stack in stacks]
    low = range(first + n + len(stacks), first + 2 * n + len(stacks)) if masters not in (None, "float32") else ()
    return [
        Recorded("before", before.function, [*before.arrays, *stacks], steps=2),
        Recorded("after", after.function, after.arrays, steps=1, remainders=tuple(low)),
    ]


@pytest.mark.parametrize("states, weights", list(zip(2 * recording.STATES, recording.WEIGHTS)))
def test_passes_around_products_give_the_bits_of_the_host(stand_in, gpu, states, weights):
    for case in passes_of_matrices(states, weights):
        expected = case.run(stand_in.call)
        assert any(a.tobytes() != b.tobytes() for a, b in zip(expected[1], case.arrays)), "nothing was written"
        compare(case, case.run(gpu.call), expected, exactly=True)


def test_the_same_bits_from_run_to_run(gpu):
    for case in cases():
        first, second = case.run(gpu.call), case.run(gpu.call)
        case.check(second, first)


def test_threads_and_blocks_may_run_in_any_order(stand_in):
    for case in cases()[::3]:
        case.check(machines.backwards(lambda case=case: case.run(stand_in.call)), case.run(stand_in.call))


def shifted(arrays):
    """Return copies that begin 4 bytes after a multiple of 16, as a slice of a buffer may."""
    moved = []
    for a in arrays:
        room = np.zeros(a.nbytes + 32, np.uint8)
        begin = -room.ctypes.data % 16 + 4
        view = room[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
        view[...] = a
        moved.append(view)
    return moved


def test_tensors_that_begin_anywhere(stand_in):
    made = recording.launch("adamw", np.random.default_rng(0))
    n = made.arrays[1].shape[0]
    expected = Recorded("aligned", made.function, made.arrays).run()
    arrays = [a.copy() for a in made.arrays]
    arrays[8 : 8 + 4 * n] = shifted(arrays[8 : 8 + 4 * n])
    for _ in range(recording.STEPS):
        assert stand_in.call(made.function, arrays) == 0
    compare(Recorded("shifted", made.function, made.arrays), (0, arrays), expected, exactly=True)


def test_a_skipped_step_reports_no_sums_that_nobody_made(machine):
    """The memory of an output may hold anything."""
    made = small()
    made.arrays[0] = np.zeros((1 + kernels.ALL_STAGES, 1 + SharedFlag.SKIP_NONFINITE, 5), np.int8)
    weights, gradients, statistics, sums = made.arrays[8:10], made.arrays[10:12], made.arrays[7], made.arrays[-1]
    assert [w.shape for w in weights] == [g.shape for g in gradients] == [(5,), (300,)]
    gradients[0][1] = np.inf
    sums[...] = np.nan
    assert machine.call(made.function, made.arrays) == 0
    np.testing.assert_array_equal(statistics[:, 1:4], np.zeros((2, 3)))


# ---- Arguments that do not fit ----------------------------------------------------------------------------------


def small():
    return recording.launch("adamw", np.random.default_rng(0), shapes=[(5,), (300,)])


@pytest.mark.parametrize("flag", [16, 64, 128, 256])
def test_what_only_the_host_can_do_is_refused(stand_in, flag):
    made = small()
    made.arrays[0] = np.zeros((1 + kernels.ALL_STAGES, 1 + flag, 5), np.int8)
    before = [a.copy() for a in made.arrays]
    assert stand_in.call(made.function, made.arrays) == 4
    for a, b in zip(made.arrays, before):
        assert a.tobytes() == b.tobytes()


def test_states_of_two_formats_of_one_tensor_are_refused(stand_in):
    """A GPU has a pass for each format; a tensor is in one of them."""
    made = recording.launch("adamw", np.random.default_rng(0), states="bfloat16", shapes=[(300,)])
    second, scale = np.zeros(300, np.uint8), np.zeros(2, np.float32)
    arrays = [*made.arrays[:11], second, scale, made.sums]
    before = [a.copy() for a in arrays]
    assert stand_in.call(made.function, arrays) == 2
    for a, b in zip(arrays, before):
        assert a.tobytes() == b.tobytes()
    arrays[10] = np.zeros(300, np.float32)
    assert stand_in.call(made.function, arrays) == 0


def test_a_workspace_that_does_not_fit_is_refused(stand_in):
    made = small()
    needed = machines.workspace_bytes(stand_in.library, made.function, made.arrays)
    for workspace, status in ((np.zeros(needed - 1, np.uint8), 3), (np.zeros(needed, np.int8), 2)):
        arrays = [*made.arrays, workspace]
        assert call_of(stand_in.library, made.function, arrays, [a.ctypes.data for a in arrays])() == status
    assert call_of(stand_in.library, made.function, [], [])() == 1


@pytest.mark.skipif(not CUDA.exists(), reason="libms_optim_cuda.so was not built: that needs nvcc")
def test_without_a_gpu_the_library_loads_and_says_so():
    library = libraries.library(CUDA.name)
    on_cpu = libraries.described("CPU")
    passes = {rule for needed in kernels.GPU_PASSES.values() for rule in needed} - set(on_cpu)
    described = description.rules(library)
    assert {rule: described.pop(rule).states for rule in passes} == {"muon_before": 1, "muon_after": 0}
    assert described == {r: on_cpu[r] for r in on_cpu if r not in ELSEWHERE}
    for rule in description.rules(library):
        assert getattr(library, f"ms_optim_{rule}")
    if machines.why_no_gpu() is None:
        pytest.skip("there is a GPU")
    made = small()
    arrays = [*made.arrays, machines.workspace_of(library, made.function, made.arrays)]
    assert call_of(library, made.function, arrays, [a.ctypes.data for a in arrays])() == 6


# Only who installed the package knows whether it was asked for with MS_OPTIM_CUDA=1.
@pytest.mark.skipif(not os.environ.get("MS_OPTIM_TEST_CUDA"), reason="MS_OPTIM_TEST_CUDA=1 asks for it")
def test_the_library_is_built_where_it_was_asked_for():
    assert CUDA.exists()


# ---- What the stand-in is there for is found --------------------------------------------------------------------

MISTAKES = {
    "no barrier before warps' sums are read": (
        "blocks.cuh",
        "of_warp[s][WarpOfThread()] = of_lanes;\n  }\n  __syncthreads();",
        "of_warp[s][WarpOfThread()] = of_lanes;\n  }",
    ),
    "a warp takes a chunk's neighbor for its tensor": (
        "blocks.cuh",
        "first[owner + i] <= index",
        "first[owner + i] < index",
    ),
    "a warp leaves the last tile out": (
        "chunk_passes.cuh",
        "for (; begin < chunk.end; begin += kStride) {",
        "for (; begin + kTile < chunk.end; begin += kStride) {",
    ),
    "the tile ahead is fetched from where this one is": (
        "chunk_passes.cuh",
        "next.From(usual.t, Tile(following))",
        "next.From(usual.t, Tile(begin))",
    ),
    "a tile that is not whole is taken for one": (
        "chunk_passes.cuh",
        "for (; begin + kTile <= chunk.end; begin += kStride)",
        "for (; begin < chunk.end; begin += kStride)",
    ),
    "two warps take the same tile": (
        "chunk_passes.cuh",
        "  int64_t begin = chunk.begin + WarpOfThread() * kTile;\n  const auto run_usual",
        "  int64_t begin = chunk.begin + WarpOfThread() / 2 * kTile;\n  const auto run_usual",
    ),
    "states of another format are taken for float32": (
        "chunk_passes.cuh",
        "takes_floats && FormatsOf(t) == 0",
        "takes_floats",
    ),
    "every pass takes float32": (
        "engine.cuh",
        "      takes_floats = false;",
        "      takes_floats = true;",
    ),
    "the tail is written whole": (
        "storage.cuh",
        "      if (i < tile.end) target[i / kInWord] = run.x[k];",
        "      target[i / kInWord] = run.x[k];",
    ),
}


# The one rule that a mistake is looked for with, in place of ops/include/rules.h.
ADAMW_ALONE = """
#pragma once
#include "adamw.h"
#define MS_OPTIM_RULES(RULE) RULE(adamw, AdamW<false>)
#define MS_OPTIM_HOST_RULES(RULE)
#define MS_OPTIM_GPU_RULES(RULE)
#define MS_OPTIM_RULE_FLAGS(FLAG) FLAG(AdamW<false>, kMaximize)
"""


def little_ones(monkeypatch):
    """Every rule with each storage, and what DGCMomentum sends and receives, on shapes that take little time."""
    shapes = [(), (7,), (257,), (3, 31), (2049,)]
    monkeypatch.setattr(recording, "SHAPES", shapes)
    rng, kept = np.random.default_rng(5), []
    for i, rule in enumerate(rule for rule in recording.RULES if rule not in ELSEWHERE):
        for k, states in enumerate(recording.STATES):
            shared = [SharedFlag.SKIP_NONFINITE, SharedFlag.CENTRALIZES, 0][k % 3]
            made = recording.launch(
                rule, rng, recording.WEIGHTS[(i + k) % len(recording.WEIGHTS)], states, shapes=shapes, shared=shared
            )
            kept.append(Recorded(f"{rule}, {states}", made.function, made.arrays, steps=2))
    return [with_clips(case) for case in (*kept, *list(recording.compressed(rng))[5:10])]


@pytest.fixture(scope="module")
def whole_program(tmp_path_factory):
    return (
        once(shared_folder(tmp_path_factory), "standin_sanitized", lambda f: built(f, ROOT / "ops", SANITIZERS))
        / "replay"
    )


def test_address_and_undefined_behavior_sanitizers(stand_in, whole_program, tmp_path, monkeypatch):
    kept = little_ones(monkeypatch)
    results, said = replayed(tmp_path, whole_program, [add_workspace(stand_in, case) for case in kept])
    assert results is not None, said[-4000:]
    for case, result in zip(kept, results):
        case.check(result, case.run(stand_in.call))


@pytest.mark.parametrize("behind", [0, 1])
def test_what_belongs_to_another_step_stops_the_kernel(stand_in, whole_program, tmp_path, behind):
    """A GPU's host could learn of it in no other way without waiting."""
    tensors = [[np.ones(100, np.float32)] for _ in range(4)]
    wires = []
    for worker in range(2):
        send = CompressedLaunch(*tensors, [2], workers=2, stages=kernels.MOMENTS_STAGE)
        send.global_step[0] = 5 - behind * worker
        assert send.run(stand_in.call) == 0
        wires.append(send.wire)
    stages = kernels.APPLY_STAGE + kernels.COMMIT_STAGE
    sums = np.zeros((1, len(kernels.SUMS)))
    made = CompressedLaunch(*tensors, [2], workers=2, stages=stages, wires=np.stack(wires), sums=sums)
    made.global_step[0] = 5
    case = add_workspace(stand_in, Recorded("receives", "ms_optim_dgc_momentum", made.arrays, steps=1))
    results, said = replayed(tmp_path, whole_program, [case])
    assert (results is None) == bool(behind)
    assert ("a kernel has stopped by itself" in said) == bool(behind)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(stand_in, mistake, tmp_path):
    rng, kept = np.random.default_rng(0), []
    for states in ("float32", ["float32", "8bit", "bfloat16"]):
        made = recording.launch("adamw", rng, states=states, shapes=[(4097,), (300,), (600,)])
        kept.append(Recorded("small", made.function, made.arrays))
    assert replays.is_noticed(stand_in, tmp_path, MISTAKES[mistake], ADAMW_ALONE, kept)


# ---- In MindSpore, as far as it goes without a GPU --------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch, stand_in):
    """Have optimizers take the device target for a GPU, and its library for there."""
    monkeypatch.setattr(kernels, "device_target", lambda: "GPU")
    monkeypatch.setattr(kernels, "why_not", lambda rule, device: None)
    monkeypatch.setattr(libraries, "library", lambda name: stand_in.library)
    return stand_in


PARAMS = {cls.__name__: cls.trials[0] for cls in ms_optim.OPTIMIZERS if cls.rules[0].name not in ELSEWHERE}


DTYPES = (ms.float32, ms.float16)


def make(name, **options):
    """Make an optimizer of two parameters, one of them of lower precision."""
    cls = getattr(ms_optim, name)
    shapes = [(4, 300), (7,) if cls.dimensions is None else (7, 1)]
    params = [Parameter(Tensor(np.ones(s), t), name=f"w{i}") for i, (s, t) in enumerate(zip(shapes, DTYPES))]
    return cls(params, 0.1, **{**PARAMS[name], **options})


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("options", [{}, {"grad_clip_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_operators_are_made_for_a_gpu(on_gpu, name, options):
    optimizer = make(name, **options)
    assert optimizer.fused
    made = [cell for _, cell in optimizer.cells_and_names() if isinstance(cell, kernels.WithoutWorkspace)]
    custom = [cell.primitive for cell in made]
    if name == "AdamOffload":
        # Its operator is the host's, wherever the weights are.
        assert not made
        return
    assert len(made) == 1
    assert custom[0].get_attr_dict()["primitive_target"] == "GPU"
    assert custom[0].func.endswith(f"libms_optim_cuda.so:ms_optim_{optimizer.rule.name}")
    shapes = [p.shape for p in optimizer.parameters]
    needed = libraries.workspace_bytes(on_gpu.library, optimizer.rule.name, shapes, False)
    assert custom[0].out_shape[-1] == (needed,)
