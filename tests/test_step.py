"""What a step does besides its rule: what it leaves alone, when it is skipped, and that it repeats to the bit."""

import hashlib
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from cases import (
    ANY_SHAPE,
    CASES,
    MODES_IN_TURN,
    SCENARIOS,
    Scenario,
    dealt,
    every_case,
    every_case_and_path,
    for_each,
    grouped,
    plain,
)
from harness import LAYOUTS, Pair, Step, laid_out, numbers, tensor
from mindspore import Parameter, nn, ops
from sources import TESTS

from ms_optim import LANS, AdamW, Lamb


def snapshot(pair):
    """Return the bytes of everything that a step may write."""
    optimizer = pair.optimizer
    held = [*pair.params, *optimizer.states, *optimizer.masters, optimizer.global_step]
    return [numbers(p).tobytes() for p in held]


# Pair.run checks it as well, and so every test of test_conformance.py, for MindSpore's operators too.
@every_case(mode=MODES_IN_TURN, dtype=["float32", "bfloat16"])
def test_gradients_are_not_modified(case, dtype, mode):
    scenario = Scenario(dtype, groups=grouped, shared={"grad_clip_norm": 0.1, "loss_scale": 4.0})
    pair = Pair(case, scenario, backend="aot")
    gradients, _ = pair.gradients()
    tensors = tuple(tensor(g, dtype) for g in gradients)
    pair.call(mode, tensors)
    for t, g in zip(tensors, gradients):
        np.testing.assert_array_equal(numbers(t), g)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_may_lie_in_memory_in_any_way(layout, backend, mode):
    """A view's elements are taken where they are, not as they would lie in a tensor of its own."""
    pair = Pair(CASES[0], Scenario(shapes=("matrix", "convolution", "seven"), groups=plain), backend=backend)
    for _ in range(2):
        gradients, dtype = pair.gradients()
        views, bases = zip(*(laid_out(g, dtype, layout) for g in gradients))
        before = [numbers(base) for base in bases]
        pair.call(mode, views)
        for base, b in zip(bases, before):
            np.testing.assert_array_equal(numbers(base), b)
        pair.follow(gradients)
    pair.check()


def test_gradients_may_be_of_another_dtype_in_each_step(backend, mode):
    pair = Pair(CASES[0], Scenario(shapes=("matrix", "seven"), groups=plain), backend=backend)
    for dtype in ("float32", "float16", "bfloat16", "float32"):
        gradients = [np.round(8.0 * g) / 8.0 for g in pair.gradients()[0]]  # numbers of all three
        pair.call(mode, [tensor(g, dtype) for g in gradients])
        pair.follow(gradients)
    pair.check()


@every_case_and_path(mode=MODES_IN_TURN)
def test_a_step_with_a_nonfinite_gradient_changes_nothing(case, backend, mode):
    scenario = Scenario("bfloat16", shapes=("scalar", "matrix", "tiles+1"), groups=plain)
    pair = Pair(case, scenario, backend=backend, skip_nonfinite=True)
    pair.run(mode, 3)
    for place, poison in enumerate((np.inf, -np.inf, np.nan)):
        before = snapshot(pair)
        gradients, _ = pair.gradients()
        gradients[place].reshape(-1)[-1] = poison
        pair.call(mode, tuple(tensor(g, "bfloat16") for g in gradients))
        pair.reference.step(gradients)
        assert snapshot(pair) == before
        statistics = pair.optimizer.statistics.asnumpy()
        assert statistics[:, 4].tolist() == [float(i != place) for i in range(3)]
        assert (statistics[:, 2:4] == 0).all(), "nothing has moved"
    pair.run(mode, 3)
    pair.check()
    assert pair.reference.skipped == 3


@for_each([{"case": case, "backend": backend} for backend in ("aot", "composite") for case in ANY_SHAPE])
def test_without_skip_nonfinite_a_nan_goes_through(case, backend):
    """No rule takes it for a number, nor the norm that it is in; else it stays in its own element."""
    w = Parameter(tensor([1.0, 2.0], "float32"), name="w")
    optimizer = case.optimizer([w], case.learning_rate, backend=backend, skip_nonfinite=False)
    optimizer((tensor([np.nan, 1.0], "float32"),))
    assert np.isnan(w.asnumpy()[0])
    if case.cls.normalizes_gradient:
        assert np.isnan(w.asnumpy()[1])
    elif case.cls.rules[0].is_elementwise:
        assert 1.9 < w.asnumpy()[1] < 2.0
    assert int(optimizer.global_step.asnumpy()[0]) == 1


@for_each(
    [
        {"case": case, "backend": backend, "decay": decay}
        for backend in ("aot", "composite")
        for case in CASES
        for decay in ("decoupled", "cautious")
        if decay == "decoupled" or "cautious" in case.variants
    ]
)
def test_elements_without_a_gradient_are_decayed(case, backend, decay):
    """Those of words that an embedding has not met, say: what moves them is 0, of any sign, and spares no decay."""
    scenario = Scenario(shapes=("seven", "convolution"), groups=plain)
    pair = Pair(case, scenario, {} if decay == "decoupled" else {"decay": decay}, backend=backend)
    for _ in range(3):
        gradients, dtype = pair.gradients()
        for g in gradients:
            g.reshape(-1)[::2] = 0.0
            g.reshape(-1)[::4] = -0.0
        pair.call("pynative", tuple(tensor(g, dtype) for g in gradients))
        pair.follow(gradients)
    pair.check()


def test_a_zero_gradient_is_not_clipped_into_nan(backend):
    w = Parameter(tensor([1.0, 2.0], "float32"), name="w")
    optimizer = Lamb([w], 0.1, grad_clip_norm=1.0, backend=backend)
    for _ in range(3):
        optimizer((tensor([0.0, 0.0], "float32"),))
    np.testing.assert_array_equal(w.asnumpy(), [1.0, 2.0])


def test_a_vector_in_a_centralized_group_is_not_centralized(backend):
    """Such as a bias: it has no rows to take means of."""
    gradients = [np.float32([1, 2, 6]), np.float32([[1, 3], [5, 9]]), np.float32(4)]
    params = [Parameter(tensor(np.ones_like(g), "float32"), name=f"w{g.ndim}") for g in gradients]
    optimizer = AdamW([{"params": params, "grad_centralization": True}], 0.1, backend=backend)
    optimizer(tuple(tensor(g, "float32") for g in gradients))
    for moment, g in zip(optimizer.states, [gradients[0], np.float32([[-1, 1], [-2, 2]]), gradients[2]]):
        np.testing.assert_allclose(moment.asnumpy(), 0.1 * g, rtol=1e-6)


@pytest.mark.parametrize("size, clipped", [(1e-5, 0.1), (5e-7, 1.0), (1e-22, 1.0)])
def test_small_gradients_are_clipped_as_large_ones(size, clipped, backend):
    w = Parameter(tensor(np.ones(4), "float32"), name="w")
    optimizer = AdamW([w], betas=(0.5, 0.5), grad_clip_norm=1e-6, backend=backend)
    g = size * np.array([0.5, -0.5, 0.5, 0.5])
    optimizer((tensor(g, "float32"),))
    np.testing.assert_allclose(optimizer.states[0].asnumpy(), 0.5 * clipped * g, rtol=1e-6)
    assert optimizer.statistics.asnumpy()[0, 0] == pytest.approx(size, rel=1e-6, abs=0)


@pytest.mark.parametrize("cls", [Lamb, LANS])
@pytest.mark.parametrize("size", [1e-4, 1e-10, 1e-25])
def test_small_weights_have_a_trust_ratio(cls, size, backend):
    """On the first step each element of the direction is 1 but for its sign."""
    w = Parameter(tensor(np.full(4, size), "float32"), name="w")
    optimizer = cls([w], 0.1, backend=backend)
    optimizer((tensor([1.0, -1.0, 1.0, 1.0], "float32"),))
    assert optimizer.statistics.asnumpy()[0, 3] == pytest.approx(size, rel=1e-5, abs=0)
    np.testing.assert_allclose(w.asnumpy(), size * np.array([0.9, 1.1, 0.9, 0.9]), rtol=1e-5)


def test_output_is_true_for_each_parameter(backend, mode):
    params = [Parameter(tensor(np.ones(n), "float32"), name=f"w{n}") for n in (2, 3)]
    optimizer = AdamW(params, backend=backend)
    out = optimizer(tuple(tensor(np.ones(n), "float32") for n in (2, 3)))
    assert isinstance(out, tuple)
    assert len(out) == 2
    assert all(bool(x) for x in out)


@pytest.mark.parametrize("how", ["assign", "set_data", "load"])
def test_a_learning_rate_set_by_hand_counts(how, backend, mode):
    w = Parameter(tensor([1.0], "float32"), name="w")
    optimizer = AdamW([w], learning_rate=0.1, backend=backend)
    call = Step(optimizer) if mode == "graph" else lambda g: optimizer((g,))
    call(tensor([1.0], "float32"))
    moved = 1.0 - w.asnumpy()[0]
    assert moved == pytest.approx(0.1, rel=1e-5)
    if how == "assign":
        ops.assign(optimizer.learning_rate, ms.Tensor(0.0, ms.float32))
    elif how == "set_data":
        optimizer.learning_rate.set_data(ms.Tensor(0.0, ms.float32))
    else:
        ms.load_param_into_net(optimizer, {"learning_rate": Parameter(ms.Tensor(0.0, ms.float32))})
    call(tensor([1.0], "float32"))
    assert 1.0 - w.asnumpy()[0] == moved


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_weight_set_by_hand_wins_over_its_master(dtype, backend, mode):
    w = Parameter(tensor([1.0, 2.0, 3.0], dtype), name="w")
    optimizer = AdamW([w], learning_rate=1e-4, backend=backend)
    call = Step(optimizer)
    gradient = tensor([1.0, 1.0, 1.0], dtype)
    call(gradient)
    np.testing.assert_allclose(optimizer.masters[0].asnumpy(), [0.9999, 1.9999, 2.9999], rtol=1e-6)
    w.set_data(tensor([5.0, 2.0, 3.0], dtype))
    call(gradient)
    np.testing.assert_allclose(optimizer.masters[0].asnumpy(), [4.9999, 1.9998, 2.9998], rtol=1e-6)


@for_each(
    [*({"case": case, "backend": "aot"} for case in ANY_SHAPE), {"case": CASES[0], "backend": "composite"}],
)
def test_small_steps_add_up_in_the_master(case, backend):
    """A step below the weight's precision is lost without a master, and not with one."""
    moved = {}
    # So many steps are compiled in less time than MindSpore's operators take them one by one.
    ms.set_context(mode=ms.GRAPH_MODE if backend == "composite" else ms.PYNATIVE_MODE)
    for masters in (True, False):
        w = Parameter(tensor(np.full(8, 1.0), "bfloat16"), name="w")
        call = Step(case.optimizer([w], 1e-4, backend=backend, master_weights=masters))
        for _ in range(100):
            call(tensor(np.ones(8), "bfloat16"))
        moved[masters] = 1.0 - numbers(w)[0]
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(case.small_steps, rel=0.25)


DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from cases import CASES, SHAPES, SMALL, Scenario, grouped
from harness import Pair, numbers, tensor
from runtime import spare_threads
spare_threads()
for run in range(int(sys.argv[2])):
    for case in CASES:
        for name, variant in case.variants.items():
            if run > 0 and name != "default":
                continue
            digest = hashlib.sha256()
            # Variants change what is made of an element, not how elements are shared out.
            shapes = tuple(SHAPES if name == "default" else SMALL)
            scenario = Scenario(shapes=shapes, shared={"grad_clip_norm": 5.0}, groups=grouped)
            pair = Pair(case, scenario, variant, backend="aot")
            for _ in range(2):
                gradients, dtype = pair.gradients()
                pair.optimizer(tuple(tensor(g, dtype) for g in gradients))
            for p in [*pair.params, *pair.optimizer.states, pair.optimizer.statistics]:
                digest.update(numbers(p).tobytes())
            print("digest", case.name, name, digest.hexdigest())
"""


def test_the_same_bits_for_any_number_of_threads_and_every_run():
    digests = []
    for threads, runs in (("1", "1"), ("2", "2")):
        run = subprocess.run(
            [sys.executable, "-c", DIGEST, str(TESTS), runs],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        digests += [line.split() for line in run.stdout.splitlines() if line.startswith("digest")]
    found = {}
    for _, case, variant, digest in digests:
        found.setdefault((case, variant), []).append(digest)
    assert set(found) == {(case.name, name) for case in CASES for name in case.variants}
    for (case, variant), same in found.items():
        assert len(same) == (3 if variant == "default" else 2)
        assert len(set(same)) == 1, (case, variant)


ONE_LAUNCH = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import mindspore as ms
from cases import CASES, SCENARIOS
from harness import Pair
from runtime import set_mode, spare_threads
spare_threads()
# Other steps from Python call the kernel themselves: see test_direct.py.
compiled = [("graph", case) for case in CASES] + [("pynative", case) for case in CASES if case.name == "DGCMomentum"]
for mode, case in compiled:
    set_mode(mode)
    ms.set_context(save_graphs=2, save_graphs_path=f"{mode}/{case.name}")
    Pair(case, SCENARIOS["grouped"], case.variants.get("all_in_one"), backend="aot").run(mode, 1)
"""


def test_all_parameters_are_updated_by_one_operator(tmp_path):
    subprocess.run([sys.executable, "-c", ONE_LAUNCH, str(TESTS)], cwd=tmp_path, check=True, capture_output=True)
    folders = list(tmp_path.glob("*/*"))
    assert len(folders) == len(CASES) + 1
    for folder in folders:
        graphs = sorted(folder.glob("**/*execute*.ir")) or sorted(folder.glob("**/*validate*.ir"))
        assert graphs, f"no graph was saved in {folder}"
        for graph in graphs:
            assert graph.read_text().count("= Custom(") == 1, graph


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.hidden, self.relu, self.out = nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 3)

    def construct(self, x):
        return self.out(self.relu(self.hidden(x)))


# On MindSpore's operators one: what they do with a rule is the same as for any other caller.
@for_each(
    [
        *dealt([{"case": case, "backend": "aot"} for case in ANY_SHAPE], mode=MODES_IN_TURN),
        {"case": CASES[1], "backend": "composite", "mode": "graph"},
    ]
)
def test_a_model_learns(case, backend, mode):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 8)).astype(np.float32)
    labels = x[:, :3].argmax(1).astype(np.int32)
    data = ms.dataset.NumpySlicesDataset((x, labels), shuffle=False).batch(48)
    net = Net()
    model = ms.Model(
        net, nn.CrossEntropyLoss(), case.optimizer(net.trainable_params(), case.training_rate, backend=backend)
    )
    model.train(20, data, dataset_sink_mode=False)
    accuracy = (net(ms.Tensor(x)).asnumpy().argmax(1) == labels).mean()
    assert accuracy > 0.95


def test_scenarios_differ():
    """The situations above are not all one: their references end in different places."""
    digests = set()
    for scenario in ("grouped", "dynamic", "clip", "plain"):
        pair = Pair(CASES[0], SCENARIOS[scenario])
        gradients, _ = pair.gradients()
        pair.reference.step(gradients)
        digests.add(hashlib.sha256(pair.reference.masters[1].tobytes()).hexdigest())
    assert len(digests) == 4


def test_parameters_without_data_are_given_some(backend, mode):
    with nn.utils.no_init_parameters():
        net = nn.Dense(3, 2)
    assert net.weight.has_init
    optimizer = AdamW(net.trainable_params(), 0.1, backend=backend)
    gradients = (tensor(np.ones((2, 3)), "float32"), tensor(np.ones(2), "float32"))
    optimizer(gradients)
    before = net.weight.asnumpy().copy()
    optimizer(gradients)
    np.testing.assert_allclose(before - net.weight.asnumpy(), 0.1, rtol=1e-4)
