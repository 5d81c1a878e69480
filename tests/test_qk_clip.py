"""QK-clip: after it no attention logit exceeds the threshold, and what need not change keeps its bits."""

import csv

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, for_each
from harness import numbers, tensor
from mindspore import Parameter, Tensor, nn, ops
from refusals import refused

from ms_optim import AdamW, Muon, OptimizerMonitor, QKClip, ScheduleFreeAdamW, qk_clip

WIDTH, SAMPLES, THRESHOLD = 12, 40, 5.0


def parameter(shape, seed=0, dtype="float32", name="weight", scale=1.0):
    return Parameter(tensor(scale * np.random.default_rng(seed).standard_normal(shape), dtype), name=name)


def inputs():
    return np.random.default_rng(9).standard_normal((SAMPLES, WIDTH))


def largest(query, key):
    """Return the largest logit of each head, in float64, from arrays of shape (samples, heads, rows)."""
    return np.einsum("ihd,jhd->hij", query, key).max((1, 2))


def by_head(x, weight, heads, bias=None):
    rows = x @ weight.T + (0.0 if bias is None else bias)
    return rows.reshape(len(x), heads, -1)


def logits(query, key, heads, key_heads=None, biases=(None, None)):
    """Return the largest logit of each head of ordinary attention."""
    key_heads = key_heads or heads
    q = by_head(inputs(), query, heads, biases[0])
    k = np.repeat(by_head(inputs(), key, key_heads, biases[1]), heads // key_heads, 1)
    return largest(q, k)


def check_clipped(before, after, tolerance):
    """Check that heads above the threshold are at it now, and that others are where they were."""
    assert (before > THRESHOLD).any()
    assert (before <= THRESHOLD).any()
    np.testing.assert_allclose(after, np.minimum(before, THRESHOLD), rtol=tolerance)


def bits(p):
    return p.asnumpy().copy().view(np.uint16 if p.itemsize == 2 else np.uint32)


# ---- The three kinds of attention --------------------------------------------------------------------------------


def scaled_to(weights, heads, wanted):
    """Scale the rows of queries so that the largest logits of heads are what is wanted, and return the array."""
    query, key, key_heads = weights
    factors = np.asarray(wanted) / logits(query, key, heads, key_heads)
    return (query.reshape(heads, -1, WIDTH) * factors[:, None, None]).reshape(query.shape)


def attention(heads, key_heads, wanted, dtype, rows=6):
    """Return parameters of queries and keys whose largest logits are about those wanted."""
    rng = np.random.default_rng(1)
    key = rng.standard_normal((key_heads * rows, WIDTH))
    query = scaled_to((rng.standard_normal((heads * rows, WIDTH)), key, key_heads), heads, wanted)
    return (Parameter(tensor(a, dtype), name=name) for a, name in ((query, "query"), (key, "key")))


TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_head_has_its_own_keys(dtype):
    heads, wanted = 4, [2.0, 7.0, 30.0, 4.0]
    query, key = attention(heads, heads, wanted, dtype)
    before, was = logits(numbers(query), numbers(key), heads), (numbers(query), numbers(key))
    old = bits(query), bits(key)
    assert qk_clip(query, key, tensor(before, "float32"), THRESHOLD) == 2
    check_clipped(before, logits(numbers(query), numbers(key), heads), TOLERANCE[dtype])
    factors = np.repeat(np.sqrt(np.minimum(1.0, THRESHOLD / before)), 6)[:, None]
    for p, start, start_bits in zip((query, key), was, old):
        np.testing.assert_allclose(numbers(p), start * factors, rtol=TOLERANCE[dtype])
        kept = np.flatnonzero(factors[:, 0] == 1.0)
        np.testing.assert_array_equal(bits(p)[kept], start_bits[kept])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_share_keys(dtype):
    """In the first group all heads are above the threshold, in the second one is, in the third none is."""
    heads, key_heads, wanted = 6, 3, [9.0, 20.0, 3.0, 50.0, 1.0, 4.5]
    query, key = attention(heads, key_heads, wanted, dtype)
    before, was = logits(numbers(query), numbers(key), heads, key_heads), (numbers(query), numbers(key))
    old = bits(query), bits(key)
    assert qk_clip(query, key, before.tolist(), THRESHOLD, key_heads=key_heads) == 3
    check_clipped(before, logits(numbers(query), numbers(key), heads, key_heads), TOLERANCE[dtype])
    gamma = np.minimum(1.0, THRESHOLD / before)
    of_group = gamma.reshape(key_heads, 2).min(1)
    np.testing.assert_allclose(numbers(key), was[1] * np.sqrt(of_group).repeat(6)[:, None], rtol=TOLERANCE[dtype])
    of_query = gamma / np.sqrt(of_group.repeat(2))
    np.testing.assert_allclose(numbers(query), was[0] * of_query.repeat(6)[:, None], rtol=TOLERANCE[dtype])
    np.testing.assert_array_equal(bits(query)[4 * 6 :], old[0][4 * 6 :])
    np.testing.assert_array_equal(bits(key)[2 * 6 :], old[1][2 * 6 :])


def test_one_key_for_all_heads():
    query, key = attention(4, 1, [9.0, 20.0, 3.0, 50.0], "float32")
    before = logits(numbers(query), numbers(key), 4, 1)
    assert qk_clip(query, key, before, THRESHOLD, key_heads=1) == 3
    check_clipped(before, logits(numbers(query), numbers(key), 4, 1), 1e-6)


HEADS, NOPE, ROPE, VALUES = 4, 5, 3, 2


def latent_logits(query, key_value, rotary):
    x = inputs()
    q = by_head(x, query, HEADS)
    k = by_head(x, key_value, HEADS)[..., :NOPE]
    shared = np.repeat((x @ rotary.T)[:, None], HEADS, 1)
    return largest(q, np.concatenate([k, shared], -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention(dtype):
    """The rotary part of the key is one for all heads and stays as it is, and so do the values."""
    query = parameter((HEADS * (NOPE + ROPE), WIDTH), 1, dtype, "query", 0.3)
    key_value = parameter((HEADS * (NOPE + VALUES), WIDTH), 2, dtype, "key_value", 0.3)
    rotary = numbers(parameter((ROPE, WIDTH), 3, dtype, scale=0.3))
    scale = np.repeat([0.25, 9.0, 4.0, 0.25], NOPE + ROPE)[:, None]
    query.set_data(tensor(numbers(query) * scale, dtype))
    before = latent_logits(numbers(query), numbers(key_value), rotary)
    was, old = (numbers(query), numbers(key_value)), (bits(query), bits(key_value))
    found = qk_clip(query, key_value, before, THRESHOLD, query_rope=ROPE, key_values=VALUES)
    assert found == (before > THRESHOLD).sum() == 2
    check_clipped(before, latent_logits(numbers(query), numbers(key_value), rotary), TOLERANCE[dtype])
    gamma = np.minimum(1.0, THRESHOLD / before)
    of_query = np.stack([np.sqrt(gamma)] * NOPE + [gamma] * ROPE, 1).reshape(-1, 1)
    of_key = np.stack([np.sqrt(gamma)] * NOPE + [np.ones(HEADS)] * VALUES, 1).reshape(-1, 1)
    for p, start, start_bits, factors in zip((query, key_value), was, old, (of_query, of_key)):
        np.testing.assert_allclose(numbers(p), start * factors, rtol=TOLERANCE[dtype])
        kept = np.flatnonzero(factors[:, 0] == 1.0)
        np.testing.assert_array_equal(bits(p)[kept], start_bits[kept])


# ---- Where the rows are ------------------------------------------------------------------------------------------


def test_a_bias_is_scaled_with_its_weight():
    heads = 2
    query, key = attention(heads, heads, [3.0, 40.0], "float32")
    biases = [parameter(12, seed, name=f"bias{seed}") for seed in (5, 6)]
    arrays = [numbers(bias) for bias in biases]
    before = logits(numbers(query), numbers(key), heads, biases=arrays)
    count = qk_clip([query, biases[0]], (key, biases[1]), before, THRESHOLD)
    after = logits(numbers(query), numbers(key), heads, biases=[numbers(bias) for bias in biases])
    assert count == (before > THRESHOLD).sum() > 0
    np.testing.assert_allclose(after, np.minimum(before, THRESHOLD), rtol=1e-6)


@pytest.mark.parametrize("order", ["one after the other", "head by head"])
def test_a_fused_projection(order):
    heads, rows = 3, 6
    query, key = attention(heads, heads, [3.0, 40.0, 9.0], "float32")
    value = parameter((heads * rows, WIDTH), 4)
    before = logits(numbers(query), numbers(key), heads)
    parts = np.stack([p.asnumpy().reshape(heads, rows, WIDTH) for p in (query, key, value)])
    place = np.arange(parts.size // WIDTH).reshape(parts.shape[:3])
    if order == "head by head":
        parts = parts.swapaxes(0, 1)
        place = np.arange(parts.size // WIDTH).reshape(parts.shape[:3]).swapaxes(0, 1)
    fused = Parameter(Tensor(np.ascontiguousarray(parts).reshape(-1, WIDTH)), name="qkv")
    where = place.reshape(3, -1)
    rows_of = {"query_rows": where[0].tolist(), "key_rows": where[1]}
    if order == "one after the other":
        rows_of = {"query_rows": range(18), "key_rows": range(18, 36)}
    assert qk_clip(fused, fused, before, THRESHOLD, **rows_of) == 2
    assert qk_clip(query, key, before, THRESHOLD) == 2
    for p, its in zip((query, key, value), where):
        np.testing.assert_array_equal(fused.asnumpy()[its], p.asnumpy())


def test_below_the_threshold_nothing_is_written():
    query, key = attention(2, 2, [3.0, 4.0], "bfloat16")
    old = bits(query), bits(key)
    assert qk_clip(query, key, [THRESHOLD, -100.0], THRESHOLD) == 0
    assert qk_clip(query, key, [99.0, 100.0]) == 0
    np.testing.assert_array_equal(bits(query), old[0])
    np.testing.assert_array_equal(bits(key), old[1])


def test_the_largest_number_of_float32():
    query, key = attention(1, 1, [4.0], "float32")
    assert qk_clip(query, key, [3.4e38], THRESHOLD) == 1
    assert np.isfinite(numbers(query)).all()


# ---- In graphs, with masters, in training ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
def test_a_compiled_network_sees_it(mode):
    net = nn.Dense(WIDTH, 12, has_bias=False)
    key = parameter((12, WIDTH), 2, name="key")
    x = tensor(np.ones((1, WIDTH)), "float32")
    before = net(x).asnumpy()
    qk_clip(net.weight, key, [4 * THRESHOLD, 1.0], THRESHOLD)
    expected = before * np.repeat([0.5, 1.0], 6)
    np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masters", [True, "split", "split8"])
def test_masters_follow(masters):
    """A step of rate 0 leaves the weights clipped, where it would bring back the masters otherwise."""
    query, key = attention(2, 2, [3.0, 20.0], "bfloat16")
    optimizer = AdamW([query, key], 0.0, master_weights=masters)
    step = tuple(tensor(np.ones(p.shape), "bfloat16") for p in (query, key))
    optimizer(step)
    qk_clip(query, key, [3.0, 20.0], THRESHOLD)
    clipped = bits(query), bits(key)
    optimizer(step)
    np.testing.assert_array_equal(bits(query), clipped[0])
    np.testing.assert_array_equal(bits(key), clipped[1])


class Attention(nn.Cell):
    """Reports the largest logit of each head."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Dense(WIDTH, WIDTH, has_bias=False), nn.Dense(WIDTH, WIDTH, has_bias=False)
        for seed, cell in enumerate((self.query, self.key)):
            cell.weight.set_data(tensor(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)), "float32"))
        self.max_logits = Parameter(ops.zeros(2), name="max_logits", requires_grad=False)

    def construct(self, x):
        q = self.query(x).reshape((-1, 2, 6)).swapaxes(0, 1)
        k = self.key(x).reshape((-1, 2, 6)).swapaxes(0, 1)
        found = ops.bmm(q, k.swapaxes(1, 2))
        ops.assign(self.max_logits, ops.amax(ops.stop_gradient(found), (1, 2)))
        return ops.softmax(found).sum(0)


@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
def test_the_callback(mode, tmp_path, capfd):
    """Each forward pass, after the first, finds logits that one small step has moved from the threshold."""
    net = Attention()
    seen = []
    callback = QKClip([(net.query.weight, net.key.weight)], lambda: [net.max_logits], THRESHOLD)

    class See(ms.Callback):
        def on_train_step_end(self, run_context):
            seen.append((net.max_logits.asnumpy().copy(), callback.clipped))

    x = inputs().astype(np.float32)
    data = ms.dataset.NumpySlicesDataset(
        (np.stack([x] * 4), np.zeros((4, SAMPLES, SAMPLES), np.float32)), shuffle=False
    )
    model = ms.Model(net, nn.MSELoss(), Muon(net.trainable_params(), 1e-5))
    monitor = OptimizerMonitor(every=2, csv=tmp_path / "run.csv", qk_clip=callback)
    model.train(1, data, callbacks=[callback, See(), monitor], dataset_sink_mode=False)
    assert (seen[0][0] > 2 * THRESHOLD).all()
    assert seen[0][1] == 2
    for found, _ in seen[1:]:
        np.testing.assert_allclose(found, THRESHOLD, rtol=1e-3)
    assert callback.total == sum(count for _, count in seen)
    with (tmp_path / "run.csv").open(newline="") as file:
        recorded = [int(row["clipped_heads"]) for row in csv.DictReader(file)]
    assert recorded == [sum(count for _, count in seen[:k]) for k in (2, 4)]
    assert f"heads clipped so far: {recorded[0]}" in capfd.readouterr().out
    with pytest.raises(TypeError, match="'qk_clip' must be of type QKClip, but got 3"):
        OptimizerMonitor(qk_clip=3)


def test_the_callback_takes_what_functions_return():
    layers = [tuple(attention(2, 2, [3.0, 4.0], "float32")) for _ in range(3)]
    above = np.array([[1.0, 6.0], [7.0, 8.0], [2.0, 3.0]], np.float32)
    for found in (above, Tensor(above), above.tolist(), [Tensor(row) for row in above], tuple(above)):
        callback = QKClip(layers, lambda found=found: found, THRESHOLD)
        assert callback.clip() == callback.clipped == 3
        assert callback.clip() == 3
        assert callback.total == 6


# ---- What is refused ---------------------------------------------------------------------------------------------


def clipped(**given):
    arguments = {"query": parameter((12, 4)), "key": parameter((12, 4)), "max_logits": [1.0, 200.0], **given}
    return qk_clip(arguments.pop("query"), arguments.pop("key"), arguments.pop("max_logits"), **arguments)


@pytest.mark.parametrize(
    "error, match, given",
    [
        (TypeError, "'query' must be a Parameter, or a list of Parameters", {"query": Tensor([1.0])}),
        (TypeError, "'key' must be a Parameter, or a list of Parameters", {"key": []}),
        (TypeError, "'key' must be a Parameter, or", {"key": [3]}),
        (
            TypeError,
            "'i' of 'key' must be float32,.*is Int32",
            {"key": Parameter(Tensor([1, 2], ms.int32), name="i", requires_grad=False)},
        ),
        (
            ValueError,
            r"'query' must have the same number of rows, but have the shapes \[\(12, 4\), \(4,\)\]",
            {"query": [parameter((12, 4)), parameter(4)]},
        ),
        (TypeError, "'max_logits' must be a Tensor or a list", {"max_logits": 3.0}),
        (TypeError, "'max_logits' must be a Tensor or a list", {"max_logits": ["1", "2"]}),
        (TypeError, "'max_logits' must be a Tensor or a list", {"max_logits": []}),
        (
            ValueError,
            r"'max_logits' must have one number for each head, but has the shape \(1, 2\)",
            {"max_logits": Tensor([[1.0, 2.0]])},
        ),
        (ValueError, "'max_logits' must be finite, but is nan for head 1", {"max_logits": [1.0, float("nan")]}),
        (ValueError, "'max_logits' must be finite, but is inf for head 0", {"max_logits": [float("inf"), 1.0]}),
        (ValueError, "'threshold' must be a number greater than 0", {"threshold": 0}),
        (TypeError, "'threshold' must be a number greater than 0", {"threshold": "100"}),
        (TypeError, "'key_heads' must be an int, 1 or greater", {"key_heads": 1.0}),
        (ValueError, "'key_heads' must be an int, 1 or greater", {"key_heads": 0}),
        (ValueError, "'key_heads' must be a divisor of the number of heads, 2, but got 3", {"key_heads": 3}),
        (ValueError, "'query' has 6 rows for each of 2 heads, and 'key' 12 for each of 1", {"key_heads": 1}),
        (
            ValueError,
            "the number of rows of 'query' must be a multiple of the number of heads, 5, but is 12",
            {"max_logits": [1.0] * 5},
        ),
        (ValueError, "'query_rope' must be an int, 0 or greater", {"query_rope": -1}),
        (ValueError, "'query_rope' must be less than the number of rows of a head in 'query', 6", {"query_rope": 6}),
        (ValueError, "'query' has 4 rows for each of 2 heads, and 'key' 6", {"query_rope": 2}),
        (TypeError, "'key_values' must be an int, 0 or greater", {"key_values": True}),
        (ValueError, "'key_values' must be less than the number of rows of a head in 'key', 6", {"key_values": 7}),
        (TypeError, "'query_rows' must be a range or a list of int, or None", {"query_rows": 4}),
        (TypeError, "'key_rows' must be a range or a list of int, or None", {"key_rows": [0.5]}),
        (ValueError, "'key_rows' must hold distinct rows from 0 to 11", {"key_rows": range(1, 13)}),
        (
            ValueError,
            "'query_rows' must hold distinct rows from 0 to 11, .* 1 of them distinct",
            {"query_rows": [3, 3]},
        ),
    ],
)
def test_arguments_are_checked(error, match, given):
    refused(error, f"^For 'qk_clip'.*{match}", lambda: clipped(**given))


def test_what_is_refused_changes_nothing():
    query, key = parameter((12, 4)), parameter((12, 4))
    old = bits(query), bits(key)
    refused(ValueError, "'threshold'", lambda: qk_clip(query, key, [200.0, 200.0], -1.0))
    np.testing.assert_array_equal(bits(query), old[0])
    np.testing.assert_array_equal(bits(key), old[1])


def test_rows_are_queries_or_keys():
    fused = parameter((12, 4))
    match = "'query_rows' and 'key_rows' must have no row in common where 'query' and 'key' are one Parameter"
    refused(ValueError, match, lambda: qk_clip(fused, fused, [200.0]))
    refused(ValueError, match, lambda: qk_clip(fused, fused, [200.0], query_rows=range(6), key_rows=range(5, 11)))


def test_the_callbacks_arguments_are_checked():
    query, key = parameter((12, 4)), parameter((12, 4))
    pairs = [(query, key)]
    for wrong in (3, [query], [(query,)], (query, key), None):
        refused(TypeError, "For 'QKClip'.*'layers' must be a list of pairs", lambda wrong=wrong: QKClip(wrong, list))
    refused(ValueError, "'layers' must be a list of at least one pair", lambda: QKClip([], list))
    refused(TypeError, r"'layers\[1\]\.key' must be a Parameter", lambda: QKClip([*pairs, (query, 3)], list))
    refused(TypeError, "'max_logits' must be a function without arguments", lambda: QKClip(pairs, 3.0))  # type: ignore[arg-type]
    refused(ValueError, "For 'QKClip'.*'threshold'", lambda: QKClip(pairs, list, -1.0))
    refused(ValueError, "For 'QKClip'.*'key_heads'", lambda: QKClip(pairs, list, key_heads=0))
    refused(ValueError, "For 'QKClip'.*'key_rows'", lambda: QKClip(pairs, list, key_rows=[12]))
    refused(ValueError, "must return the logits of 1 layers, but returned 0", lambda: QKClip(pairs, list).clip())
    refused(TypeError, "'max_logits' must be a function that returns", lambda: QKClip(pairs, lambda: 3.0).clip())
    match = r"For 'QKClip', the argument 'layers\[0\]\.max_logits' must be finite, but is nan for head 0"
    refused(ValueError, match, lambda: QKClip(pairs, lambda: [[float("nan")]]).clip())


# ---- With optimizers ---------------------------------------------------------------------------------------------

STORED = {"float32": ("float32", {}), "bfloat16": ("bfloat16", {"master_weights": False})}
WITH_MASTERS = ("AdamW", "ScheduleFreeAdamW", "Muon")
STORED |= {kind: ("bfloat16", {"master_weights": kind}) for kind in (True, "split", "split8")}


@for_each(
    [
        {"case": case, "kind": kind}
        for case in CASES
        for kind in STORED
        if kind == "float32" or case.name in WITH_MASTERS
    ]
)
def test_a_clip_lasts(case, kind):
    """Whatever an optimizer goes on from, the weight, its master or what it averages, has the clip."""
    dtype, arguments = STORED[kind]
    query, key = attention(4, 4, [2.0, 7.0, 30.0, 4.0], dtype)
    if case.cls.required.get("rampup_begin_step") == 0:
        arguments = arguments | {"min_compress_numel": 10**6}
    optimizer = case.cls([query, key], 1e-7, weight_decay=0.0, **{**case.cls.required, **arguments})
    rng = np.random.default_rng(0)

    def steps(count):
        for _ in range(count):
            optimizer(tuple(tensor(rng.standard_normal(p.shape), dtype) for p in (query, key)))

    steps(5)
    held = optimizer._held
    before, masters = logits(numbers(query), numbers(key), 4), [held.weights(i).copy() for i in range(2)]
    qk_clip(query, key, before, THRESHOLD)
    factors = np.repeat(np.sqrt(np.minimum(1.0, THRESHOLD / before)), 6)
    unit = 2.0**-22 if kind in ("float32", True, "split") else 2.0**-7 if kind == "bfloat16" else 2.0**-14
    for i, (p, master) in enumerate(zip((query, key), masters)):
        wanted = master.reshape(p.shape) * factors[:, None]
        np.testing.assert_allclose(held.weights(i).reshape(p.shape), wanted, rtol=unit)
        # The weight is its master, rounded.
        np.testing.assert_array_equal(numbers(p), numbers(tensor(held.weights(i).reshape(p.shape), dtype)))
        kept = factors == 1.0
        np.testing.assert_array_equal(held.weights(i).reshape(p.shape)[kept], master.reshape(p.shape)[kept])
    steps(40)
    check_clipped(before, logits(numbers(query), numbers(key), 4), 2e-2 if dtype == "bfloat16" else 1e-4)
    if optimizer.averages_iterates:
        with optimizer.averaged():
            check_clipped(before, logits(numbers(query), numbers(key), 4), 2e-2 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [AdamW, ScheduleFreeAdamW])
def test_a_weight_of_several_optimizers_is_scaled_once(kind, dtype):
    """As where one was made again, and the first is not collected yet."""
    query, key = attention(4, 4, [2.0, 7.0, 30.0, 4.0], dtype)
    optimizers = [kind([query, key], 1e-7) for _ in range(2)]
    for optimizer in optimizers:
        optimizer(tuple(tensor(np.ones(p.shape), dtype) for p in (query, key)))
    before = logits(numbers(query), numbers(key), 4)
    qk_clip(query, key, before, THRESHOLD)
    check_clipped(before, logits(numbers(query), numbers(key), 4), TOLERANCE[dtype])
    for optimizer in optimizers:
        optimizer(tuple(tensor(np.ones(p.shape), dtype) for p in (query, key)))
        check_clipped(before, logits(numbers(query), numbers(key), 4), 2e-2 if dtype == "bfloat16" else 1e-4)
