"""Sinkhorn: gradients of an embedding by Zipf's law, rows and columns of zeros, what it refuses, and its memory."""

import contextlib
import ctypes

import mindspore as ms
import numpy as np
import pytest
import reference
from collectives import Collectives
from harness import NUMPY, Step, check_close, digest_of, numbers, peak_of_statistics, tensor
from mindspore import Parameter, nn
from native import Launch, call, peak, peak_from_now, pool_modes
from refusals import refused
from tolerances import STEPS, TOLERANCE

from ms_optim import ReleasedTrainStep, Sinkhorn
from ms_optim.rules.row_column_balance import Balance
from ms_optim.rules.sliced_matrices import Slicing

# Several chunks of 512 rows; columns that fill no vector.
SHAPE = (1500, 40)
CONSTANTS = reference.Sinkhorn.kernels[0][2]
# Of 50 updates, each 0.0018 in the mean of a row: what an element moves may be more than the element.
LEAST_PEAK = 0.1
BACKENDS = ["aot", "composite"]


def of_tokens(rng, shape, tokens=400):
    """Return a gradient of an embedding: a row for each token that a batch has, by Zipf's law, and zeros elsewhere."""
    seen = np.bincount(np.minimum(rng.zipf(1.2, tokens), shape[0]) - 1, minlength=shape[0])
    rows = np.sqrt(seen)[:, None] * 10.0 ** rng.uniform(-4, 0, (shape[0], 1))
    return rng.standard_normal(shape) * rows


def made(shapes, backend="aot", seed=0, rate=0.01, decay=0.0, **arguments):
    """Return an optimizer of matrices, and its reference."""
    rng = np.random.default_rng(seed)
    starts = [rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in shapes]
    params = [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(starts)]
    optimizer = Sinkhorn(params, rate, weight_decay=decay, backend=backend, **arguments)
    n = len(shapes)
    return optimizer, reference.Sinkhorn(
        starts, [lambda k: rate] * n, [lambda k: decay] * n, [False] * n, ["float32"] * n, **arguments
    )


def followed(optimizer, expected, drawn, steps=None, call=None):
    # MindSpore's operators, called one by one, take a second a step.
    for _ in range(steps or (STEPS if optimizer.fused else 12)):
        gradients = [g.astype(np.float32) for g in drawn()]
        (call or optimizer)(*[tuple(tensor(g, "float32") for g in gradients)])
        expected.step([g.astype(np.float64) for g in gradients])
    for i, (p, s) in enumerate(zip(optimizer.parameters, optimizer.states)):
        peak = np.maximum(expected.peak["weight"][i], LEAST_PEAK)
        check_close(numbers(p), expected.weights[i], TOLERANCE["weight"], peak, f"{p.name} {p.shape}")
        peak = expected.peak["sinkhorn_m"][i]
        check_close(numbers(s), expected.state["sinkhorn_m"][i], TOLERANCE["state"], peak, s.name)
    peak = peak_of_statistics(expected)
    check_close(numbers(optimizer.statistics), expected.statistics, TOLERANCE["statistics"], peak, "statistics")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_by_zipfs_law(backend):
    """Rows of tokens not seen for long fall below the threshold; those never seen are 0."""
    optimizer, expected = made([SHAPE, (513, 7), (700, 64), (40, 1100)], backend, decay=0.1, tau=1e-2, loss_scale=4.0)
    rng, kept = np.random.default_rng(1), []

    def drawn():
        gradients = [of_tokens(rng, p.shape) for p in optimizer.parameters]
        m = expected.state["sinkhorn_m"][0]
        rho = np.linalg.norm(0.95 * (0.95 * m + 0.05 * gradients[0]) + 0.05 * gradients[0], axis=1)
        kept.append(((rho == 0).sum(), ((rho > 0) & (rho <= 1e-2 * rho.mean())).sum()))
        return [4.0 * g for g in gradients]

    followed(optimizer, expected, drawn)
    assert optimizer.fused == (backend == "aot")
    assert min(zeros for zeros, _ in kept) > 0
    assert max(below for _, below in kept) > 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_follows_the_reference(backend):
    optimizer, expected = made([(40, 12), (40, 12)], backend, decay=0.1)
    rng, cell = np.random.default_rng(2), Step(optimizer)
    followed(optimizer, expected, lambda: [of_tokens(rng, (40, 12), 30) for _ in range(2)], 10, lambda g: cell(*g))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_columns_and_matrices_of_zeros_stay(backend):
    optimizer, expected = made([(600, 20), (30, 6), (5, 9)], backend)
    rng = np.random.default_rng(3)

    def drawn():
        first, second = rng.standard_normal((600, 20)), rng.standard_normal((30, 6))
        first[:, 3] = 0.0
        first[100:550] = 0.0
        second[:, 1:] = 0.0  # of each row one number is left: its sign
        return first, second, np.zeros((5, 9))

    before = [numbers(p).copy() for p in optimizer.parameters]
    followed(optimizer, expected, drawn)
    np.testing.assert_array_equal(numbers(optimizer.parameters[0])[:, 3], before[0][:, 3])
    np.testing.assert_array_equal(numbers(optimizer.parameters[0])[100:550], before[0][100:550])
    np.testing.assert_array_equal(numbers(optimizer.parameters[2]), before[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-15, 1e12])
def test_gradients_of_any_size_make_the_same_update(backend, size):
    optimizer, expected = made([(64, 24)], backend)
    rng = np.random.default_rng(4)

    def drawn():
        g = rng.standard_normal((64, 24)) * size
        g[:, 5] *= 1e-9  # its squares vanish in float32
        return (g,)

    followed(optimizer, expected, drawn, 10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_has_rows_of_the_scale_and_columns_alike(backend):
    optimizer, _ = made([(500, 32)], backend, rate=1.0)
    before = numbers(optimizer.parameters[0]).copy()
    g = np.random.default_rng(5).standard_normal((500, 32)) * np.logspace(-2, 2, 32)
    optimizer((tensor(g, "float32"),))
    update = before - numbers(optimizer.parameters[0])
    np.testing.assert_allclose(np.sqrt(np.mean(update**2, 1)), 0.18, rtol=1e-4)
    columns = np.linalg.norm(update, axis=0)
    assert columns.max() / columns.min() < 1.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_is_not_finite_is_skipped(backend):
    optimizer, expected = made([(20, 6)], backend)
    g = np.ones((20, 6))
    followed(optimizer, expected, lambda: (g,), 2)
    held = [numbers(p).copy() for p in (*optimizer.parameters, *optimizer.states)]
    optimizer((tensor(np.full((20, 6), np.inf), "float32"),))
    assert int(optimizer.skipped_steps.asnumpy()[0]) == 1
    for p, before in zip((*optimizer.parameters, *optimizer.states), held):
        np.testing.assert_array_equal(numbers(p), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_skipping_a_nan_is_seen(backend):
    optimizer, _ = made([(20, 6)], backend, skip_nonfinite=False)
    g = np.ones((20, 6))
    g[3, 2] = np.nan
    optimizer((tensor(g, "float32"),))
    assert np.isnan(numbers(optimizer.parameters[0])).all()
    assert optimizer.statistics.asnumpy()[0, 4] == 0.0


@pytest.mark.parametrize(
    "asked, passes",
    [({"grad_clip_norm": 0.1}, 2), ({"skip_nonfinite": False}, 1), ({"grad_clip_norm": 0.1, "state_dtype": "8bit"}, 2)],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_released_gradients_take_the_same_steps(backend, asked, passes):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    nets, optimizers = [], []
    for _ in range(2):
        ms.set_seed(1)
        # One matrix large enough for codes, and one that is not.
        nets.append(nn.SequentialCell(nn.Dense(12, 600, has_bias=False), nn.ReLU(), nn.Dense(600, 5, has_bias=False)))
        optimizers.append(Sinkhorn(nets[-1].trainable_params(), 0.1, weight_decay=0.1, backend=backend, **asked))
    loss, rng = nn.CrossEntropyLoss(), np.random.default_rng(7)
    grad = ms.value_and_grad(lambda x, y: loss(nets[0](x), y), None, optimizers[0].parameters)
    released = ReleasedTrainStep(nets[1], loss, optimizers[1], passes)
    for _ in range(4):
        x, y = tensor(rng.standard_normal((9, 12)), "float32"), ms.Tensor(rng.integers(0, 5, 9), ms.int32)
        optimizers[0](grad(x, y)[1])
        released(x, y)
    assert digest_of(optimizers[0]) == digest_of(optimizers[1])


@pytest.mark.parametrize("state_dtype", ["bfloat16", "8bit", "4bit"])
@pytest.mark.parametrize("shape", [(600, 48), (1030, 17)])
def test_directions_follow_from_states_as_they_are_stored(state_dtype, shape):
    """Kernel and operators take the same steps; the update is that of the state that was written."""
    fused, _ = made([shape], "aot", state_dtype=state_dtype)
    operators, _ = made([shape], "composite", state_dtype=state_dtype)
    rng = np.random.default_rng(6)
    for _ in range(4):
        g = tensor(of_tokens(rng, shape), "float32")
        fused((g,))
        operators((g,))
    a, b = (numbers(o.parameters[0]) for o in (fused, operators))
    off = np.abs(a - b) > TOLERANCE["other path"] * np.maximum(np.abs(b), 0.01)
    assert off.mean() <= 2e-3  # codes on either side of a tie


def test_slices_of_rows_exchange_n_numbers_for_each_pair_of_normalizations(monkeypatch):
    """Besides one number for the mean norm; three processes balance what one does, but for rounding."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng, lengths, asked = np.random.default_rng(8), (20, 3, 47), (11, 1e-2, 1e-20, ms.float64)
    whole = np.stack([of_tokens(rng, (70, 9)) for _ in range(2)]).astype(np.float32)
    alone = Balance(*asked, None)(tensor(whole, "float32")).asnumpy()
    collectives = Collectives(monkeypatch, "world")

    def process(own, rows):
        balance = Balance(*asked, Slicing("world", 0, lengths, own, True, True))
        return lambda: balance(tensor(rows, "float32")).asnumpy()

    slices = np.split(whole, np.cumsum(lengths)[:-1], 1)
    found = np.concatenate(collectives.run([process(own, rows) for own, rows in enumerate(slices)]), 1)
    assert [of_one[0].shape for of_one in collectives.answers] == [(2, 1, 1), *[(2, 1, 9)] * 5]
    np.testing.assert_allclose(found, alone, rtol=TOLERANCE["state"])
    assert np.sum(np.any(whole != 0, 2) & np.all(found == 0, 2)) > 0, "no row fell below the threshold"


def test_what_it_refuses():
    def params(shape=(4, 3)):
        return [Parameter(tensor(np.ones(shape), "float32"), name="w")]

    for shape in ((), (4,), (4, 3, 2)):
        match = r"For 'Sinkhorn', each parameter must be a matrix.*'w' has the shape .*another optimizer"
        refused(ValueError, match, lambda shape=shape: Sinkhorn(params(shape)))
    match = "'normalizations' must be odd, because rows are normalized first and last, but got 10"
    refused(ValueError, match, lambda: Sinkhorn(params(), normalizations=10))
    for bad, error in ((0, ValueError), (101, ValueError), (1.0, TypeError), (True, TypeError)):
        refused(error, "'normalizations' must be", lambda bad=bad: Sinkhorn(params(), normalizations=bad))
    refused(ValueError, "'tau' must be at most 1", lambda: Sinkhorn(params(), tau=1.5))
    groups = [{"params": params(), "shard_axis": 0}]
    refused(ValueError, "'shard_axis'.*omitted without 'shard_group'", lambda: Sinkhorn(groups))
    refused(KeyError, "'muon'", lambda: Sinkhorn([{"params": params(), "muon": True}]))


@contextlib.contextmanager
def threads(count):
    """Have kernels run in so many threads."""
    openmp = ctypes.CDLL("libgomp.so.1")
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(count)
    try:
        assert len(pool_modes()) == count
        yield
    finally:
        openmp.omp_set_num_threads(before)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_any_number_of_threads_gives_the_same_bits(state_dtype):
    """Of matrices of three bands each, which threads share."""
    found = set()
    for count in (1, 2, 3):
        rng, shapes = np.random.default_rng(9), (SHAPE, (1030, 64))
        weights, states = ([rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(2))
        gradients = [of_tokens(rng, shape).astype(np.float32) for shape in shapes]
        states = [state.astype(NUMPY[state_dtype]) for state in states]
        launch = Launch("ms_optim_sinkhorn", weights, gradients, [states], CONSTANTS, 11 // 2, clip=1.0)
        with threads(count):
            assert [launch.run(call) for _ in range(3)] == [0, 0, 0]
        found.add(b"".join(x.tobytes() for x in (*weights, *states, launch.statistics)))
    assert len(found) == 1


def test_a_launch_needs_little_memory():
    """Of a matrix of 16,384 by 1,024 elements, 64 MiB: the peak of a process, before and after its first step."""
    shape = (16384, 1024)
    arrays = [np.ones(shape, np.float32) for _ in range(3)]
    arrays[1][...] = np.arange(shape[1])
    launch = Launch("ms_optim_sinkhorn", arrays[:1], arrays[1:2], [arrays[2:]], CONSTANTS, 0)
    small = Launch(
        "ms_optim_sinkhorn", *([[np.ones((8, 8), np.float32)]] * 2), [[np.ones((8, 8), np.float32)]], CONSTANTS, 0
    )
    assert small.run(call) == 0  # threads have stacks
    before = peak_from_now()
    assert launch.run(call) == 0
    assert peak() - before < 0.01 * arrays[0].nbytes
