"""Muon's step on a GPU as MindSpore runs it: the device is faked, and the CUDA operators run on the host."""

import dataclasses

import machines
import mindspore as ms
import numpy as np
import pytest
from builds import needs, once, shared_folder
from cases import CASES, SCENARIOS
from harness import Pair, numbers, tensor
from mindspore import Parameter

import ms_optim
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.paths.fused.matrix_passes import MatrixPassesPath
from ms_optim.paths.operators.released import ReleasedCompositePath

MUON = next(case for case in CASES if case.name == "Muon")
# Two stacks of two tensors each, one of which is split; and tensors that AdamW updates.
SHAPES = ("matrix", "convolution", "scalar", "matrix again", "zero", "tiles+1", "convolution again")


@pytest.fixture
def gpu(tmp_path_factory, monkeypatch):
    """A GPU, as far as the package can tell."""
    needs("g++")
    folder = once(shared_folder(tmp_path_factory), "standin", machines.StandIn.build)
    stand_in, writing = machines.StandIn(folder).library, kernels._writing
    monkeypatch.setattr(kernels, "device_target", lambda: "GPU")
    monkeypatch.setattr(kernels, "why_not", lambda rule, device: None)
    monkeypatch.setattr(kernels, "_writing", lambda primitive, device, written: writing(primitive, "CPU", written))
    monkeypatch.setattr(libraries, "library", lambda name: stand_in)
    monkeypatch.setattr(libraries, "path_of", lambda device: folder / "standin.so")


def pair(scenario, variant=None, shapes=SHAPES, **shared):
    """Return a pair whose optimizer takes the passes."""
    made = Pair(MUON, dataclasses.replace(scenario, shapes=shapes), variant, **shared)
    assert isinstance(made.optimizer._path, MatrixPassesPath)
    return made


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "mode, scenario, variant",
    [
        ("pynative", "grouped", "default"),
        ("graph", "clip", "splits"),
        ("pynative", "clip", "heads"),
        ("graph", "bfloat16", "normalize_rows"),
        ("pynative", "loss_scale", "original"),
        ("pynative", "float16_no_masters", "no_nesterov"),
        ("pynative", "average", "coefficients"),
        ("pynative", "bfloat16_average", "cautious"),
        ("pynative", "float32_gradients", "betas"),
        ("pynative", "dynamic", "adamw_names"),
    ],
)
def test_steps_agree_with_float64(mode, scenario, variant):
    made = pair(SCENARIOS[scenario], MUON.variants[variant])
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    made.run(mode, 12)
    made.check()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shapes", [("matrix", "convolution"), ("seven", "tiles+1")], ids=["matrices", "none"])
def test_a_network_of_one_kind(shapes):
    made = pair(SCENARIOS["plain"], shapes=shapes)
    made.run("pynative", 3)
    made.check()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variant", ["default", "normalize_rows"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(variant):
    made = pair(SCENARIOS["plain"], MUON.variants[variant])
    made.run("pynative", 2)
    kept = [numbers(p) for p in (*made.params, *made.optimizer.states)]
    infinite = [np.full(w.shape, np.inf if i == 0 else 1.0) for i, w in enumerate(made.reference.weights)]
    made.optimizer(tuple(tensor(g, "float32") for g in infinite))
    made.reference.step(infinite)
    for before, after in zip(kept, (*made.params, *made.optimizer.states)):
        np.testing.assert_array_equal(numbers(after), before)
    _, _, *reported = numbers(made.optimizer.statistics).T
    np.testing.assert_array_equal(reported, [[0] * len(SHAPES), [0] * len(SHAPES), [0] + [1] * (len(SHAPES) - 1)])
    made.run("pynative", 2)
    made.check()


LARGE = {"wide": (3, 40, 130), "tall": (96, 64), "wide again": (3, 40, 130), "vector": (5000,)}
KEPT = [
    {"state_dtype": "8bit", "master_weights": "split8"},
    {"state_dtype": "bfloat16", "master_weights": "split"},
    {"state_dtype": "4bit", "stochastic_rounding": True, "master_weights": False},
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept["state_dtype"])
def test_low_precision_is_that_of_the_kernel_for_cpu(request, kept):
    """The bits of momentum and noise are the same, as no product enters them; weights differ by rounding."""

    def trained():
        rng = np.random.default_rng(3)
        start = {name: rng.standard_normal(shape) for name, shape in LARGE.items()}
        params = [Parameter(tensor(w, "bfloat16"), name=name) for name, w in start.items()]
        optimizer = ms_optim.Muon(params, 0.02, loss_scale=8.0, **kept)
        for _ in range(3):
            optimizer(tuple(tensor(8 * rng.standard_normal(w.shape), "bfloat16") for w in start.values()))
        return params, optimizer

    params, optimizer = trained()
    request.getfixturevalue("gpu")
    others, passes = trained()
    assert isinstance(passes._path, MatrixPassesPath)
    assert [s.name for s in passes.states] == [s.name for s in optimizer.states]
    for ours, theirs in zip((*passes.states, *passes.scales), (*optimizer.states, *optimizer.scales)):
        np.testing.assert_array_equal(numbers(ours), numbers(theirs), ours.name)
    for ours, theirs in zip(others, params):
        a, b = numbers(ours), numbers(theirs)
        different = a != b
        assert different.mean() < 1e-2, ours.name
        # Where a sum is at a rounding border, it goes to the neighbour.
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)


@pytest.mark.usefixtures("gpu")
def test_there_are_four_launches_for_any_number_of_tensors():
    made = pair(SCENARIOS["plain"])
    launches = [cell for _, cell in made.optimizer.cells_and_names() if isinstance(cell, kernels.WithoutWorkspace)]
    assert sorted(cell.primitive.func.rpartition("_optim_")[2] for cell in launches) == [
        "adamw",
        "adamw",
        "muon_after",
        "muon_before",
    ]


@pytest.mark.usefixtures("gpu")
def test_gradients_are_released_by_mindspores_operators():
    """The passes take stacks of matrices, and no single gradient."""
    optimizer = ms_optim.Muon([Parameter(tensor(np.ones((3, 4)), "float32"), name="w")], 0.1, skip_nonfinite=False)
    assert isinstance(optimizer._path, MatrixPassesPath)
    optimizer.attach()
    assert isinstance(optimizer._attachment.release.path, ReleasedCompositePath)
    optimizer.detach()
