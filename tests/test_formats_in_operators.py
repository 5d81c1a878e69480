"""The formats of states and masters in MindSpore's operators are what their definition says and what kernels store."""

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from cases import CASES, as_matrix, for_each
from harness import Step, check_stored_alike, digest_of, numbers_of, tensor
from mindspore import Parameter, Tensor, nn
from stated_formats import BLOCK, CODES, coded, codes_in, noise, numbers_in

from ms_optim import AdamW
from ms_optim.states import bits, split_masters
from ms_optim.states.formats import FORMATS
from ms_optim.states.in_place import write

TINY = np.float32(2.0**-126)


def computed(function, *arrays):
    """Return what a function makes of arrays, compiled where the mode is Graph mode."""

    class Computing(nn.Cell):
        def construct(self, *tensors):
            return function(*tensors)

    made = Computing()(*(Tensor(array) for array in arrays))
    return [x.asnumpy() for x in made] if isinstance(made, tuple) else made.asnumpy()


def of_every_kind(n=1 << 17):
    """Return float32 numbers: special ones, powers of two and their neighbours, and any bits."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 3.4e38, 1.0 - 2.0**-24]
    powers = np.array([s * 2.0**e for e in range(-126, 128) for s in (1, -1)], np.float32)
    near = [np.nextafter(powers, np.float32(x)) for x in (np.inf, -np.inf)]
    any_bits = np.random.default_rng(0).integers(0, 2**32, n, np.uint64).astype(np.uint32).view(np.float32)
    found = np.concatenate([np.array(special, np.float32), powers, *near, any_bits])
    return np.where(np.abs(found) < TINY, np.float32(0), found)


def test_bits_are_those_of_the_numbers(mode):
    x = of_every_kind()

    def there_and_back(x):
        return bits.bits_of(x), bits.from_bits(bits.bits_of(x))

    found, back = computed(there_and_back, x)
    expected = np.where(np.isnan(x), np.float32(np.nan), np.where(x == 0, np.float32(0), x)).view(np.int32)
    np.testing.assert_array_equal(found, np.where(np.isnan(x), bits.NAN, expected))
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(("begin", "end"), [(0, 7), (0, 1024), (0, 4097), (2048, 5000)])
def test_noise_is_what_its_definition_says(begin, end, mode):
    seed, step, rows = 5, 3, np.array([2, 0, 7], np.int32)
    drawn = bits.Noise(seed, 5000)

    def draw(step, rows):
        return drawn(step, rows, begin, end)

    found = computed(draw, np.array([step], np.int32), rows)
    expected = np.stack([noise(seed, step, row, end)[begin:] for row in rows])
    np.testing.assert_array_equal(found.view(np.uint32), expected.astype(np.uint32))


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("n", [4099, 4096])
@pytest.mark.parametrize("kind", CODES)
def test_codes_are_what_their_definition_says(kind, n, k, mode):
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((2, n)) * np.exp(3 * rng.standard_normal((2, n)))).astype(np.float32)
    x[:, :: n // 7] = 0.0
    x[0, BLOCK : 2 * BLOCK] = 0.0
    x[1, :BLOCK] *= np.float32(1e-38)
    x = np.where(np.abs(x) < TINY, np.float32(0), x if k == 0 else np.abs(x))
    conversion, is_signed = FORMATS[kind].conversion, int(k == 0)
    random = np.stack([noise(1, 2, row, -(-n // BLOCK) * BLOCK) for row in range(2)])

    def there_and_back(x, random):
        words, scales = conversion.encode(x, conversion.noise(random, k), is_signed)
        return words, scales, conversion.decode(words, scales, n, is_signed)

    words, scales, back = computed(there_and_back, x, random.astype(np.uint32).view(np.int32))
    for row in range(2):
        magnitude, scale = coded(x[row], kind, k, random[row, :n])
        np.testing.assert_array_equal(scales[row], scale)
        held = codes_in(words[row].astype(CODES[kind].dtypes[k > 0]), kind, n)
        expected = np.where(x[row] < 0, -magnitude, magnitude)
        np.testing.assert_array_equal(held, np.maximum(expected, x[row] > 0) if k else expected)
        decoded = numbers_in(words[row].astype(CODES[kind].dtypes[k > 0]), scale, kind, k, n)
        np.testing.assert_allclose(back[row], decoded, rtol=1e-6, atol=TINY)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("kind", CODES)
def test_words_that_both_paths_store_fit_their_dtype(kind, k, mode):
    """A device may not wrap what does not fit."""
    x = np.random.default_rng(0).standard_normal((1, 1000)).astype(np.float32)
    conversion, dtype = FORMATS[kind].conversion, CODES[kind].dtypes[k]

    def words_of(x):
        return conversion.encode(x, conversion.half, int(k == 0))[0]

    words = computed(words_of, np.abs(x) if k else x)
    np.testing.assert_array_equal(words, words.astype(dtype))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", CODES)
def test_what_is_not_finite_is_not_hidden(kind, poison):
    x = np.ones((1, 1024), np.float32)
    x[0, 300] = poison
    conversion = FORMATS[kind].conversion
    words, scales = conversion.encode(Tensor(x), conversion.half, 1)
    back = conversion.decode(words, scales, 1024, 1).asnumpy()[0]
    assert not np.isfinite(scales.asnumpy()[0, 1])
    assert not np.isfinite(back[300])
    assert (back[:256] == 1).all()
    assert (back[512:] == 1).all()


def test_rounding_to_bfloat16_is_what_its_definition_says(mode):
    x = of_every_kind()
    random = np.random.default_rng(1).integers(0, 2**16, x.size, np.int32)
    found = computed(bits.bfloat16_with_noise, x, random)
    cut = (x.view(np.uint32) + random.astype(np.uint32)) & np.uint32(0xFFFF0000)
    np.testing.assert_array_equal(found, np.where(np.isfinite(x), cut.view(np.float32), x))


def test_rounding_to_float16_is_what_its_definition_says(mode):
    """Of each number, the two neighbours in float16 and how near it is; in units below 2^-14, its sum in float32."""
    x = of_every_kind()
    random = np.random.default_rng(1).integers(0, 2**16, x.size, np.int32)
    found = computed(bits.float16_with_noise, x, random)
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x.astype(np.float64)) + 1e-300)), -14)
        unit = 2.0 ** (exponent - 10)
        part, thirteenth = np.abs(x.astype(np.float64)) / unit, (random >> 3) * 2.0**-13
        small = (part.astype(np.float32) + thirteenth.astype(np.float32)).astype(np.float64)
        expected = np.copysign(np.floor(np.where(exponent == -14, small, part + thirteenth)) * unit, x)
        expected = np.where(np.abs(x) < 2.0**-14, expected, np.copysign(np.floor(part + thirteenth) * unit, x))
        held, expected = found.astype(np.float16), expected.astype(np.float16)
    np.testing.assert_array_equal(held, np.where(np.isfinite(x), expected, x.astype(np.float16)))


@pytest.mark.parametrize("dtype", [np.int16, np.int8])
def test_masters_are_split_and_restored(dtype, mode):
    masters, is_8_bit = of_every_kind(), dtype == np.int8
    random = np.random.default_rng(1).integers(0, 2**16, masters.size, np.int32)

    def there_and_back(masters, random):
        weights, rest, kept = split_masters.split_bits(masters, random, is_8_bit)
        return weights, rest, kept, split_masters.restored_bits(weights, rest, is_8_bit)

    weights, rest, kept, restored = computed(there_and_back, masters, random)
    np.testing.assert_array_equal(weights, weights.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(rest, rest.astype(dtype))
    np.testing.assert_array_equal(restored, split_masters.restored(weights, rest.astype(dtype)))
    np.testing.assert_array_equal(restored, kept)
    finite = np.isfinite(masters)
    expected = masters.view(np.uint32)
    if is_8_bit:
        expected = np.where(finite, (expected + (random & 0xFF).astype(np.uint32)) & np.uint32(0xFFFFFF00), expected)
    np.testing.assert_array_equal(kept[finite].view(np.uint32), np.where(masters == 0, 0, expected)[finite])


def test_a_remainder_that_its_weight_cannot_have_is_left_out(mode):
    weights, rest = np.array([0.0, np.inf, -np.inf, 1.0], np.float32), np.array([-5, 3, 7, -32768], np.int32)

    def restore(weights, rest):
        return split_masters.restored_bits(weights, rest, False)

    found = computed(restore, weights, rest)
    np.testing.assert_array_equal(found, split_masters.restored(weights, rest.astype(np.int16)))
    np.testing.assert_array_equal(found[:3], weights[:3])


# ---- Through the optimizers: what one path writes, the other one continues -------------------------------------------

OPTIONS = {
    "8bit": ("float32", {"state_dtype": "8bit"}),
    "split8": ("bfloat16", {"master_weights": "split8", "average_decay": 0.9}),
    "bfloat16": ("float32", {"state_dtype": "bfloat16"}),
    "rounded": ("bfloat16", {"master_weights": False, "stochastic_rounding": True}),
    "4bit": ("bfloat16", {"state_dtype": "4bit", "master_weights": "split"}),
    "float16": ("float16", {"master_weights": False, "stochastic_rounding": True, "state_dtype": "8bit"}),
}
# Two of one shape, which the composite path updates together, with a block of codes that is not whole; and a small one.
STACKED = [(65, 67), (65, 67), (11,)]


def dealt_options():
    """Give each optimizer two sets of options, the one compiled and the other not; each set meets two optimizers."""
    for i, case in enumerate(CASES):
        names = [name for name in OPTIONS if case.name != "DGCMomentum" or "state_dtype" not in OPTIONS[name][1]]
        for j, mode in enumerate(("graph", "pynative")):
            yield {"case": case, "options": names[(i + 2 * j) % len(names)], "mode": mode}


@for_each(list(dealt_options()))
def test_both_paths_store_the_same(case, options, mode):
    """After some steps of each on the same gradients, in the middle of which they exchange what they hold.

    Their arithmetic in float32 differs in the order of operations. So numbers differ by its rounding, and an element of
    few bits differs by one unit where this rounding leads across a border.
    """
    dtype, shared = OPTIONS[options]
    shared = {name: value for name, value in shared.items() if case.is_averaged or "average" not in name}
    ms.set_seed(3)
    rng = np.random.default_rng(0)
    shapes = STACKED if case.cls.dimensions is None else [as_matrix(shape) for shape in STACKED]
    starts = [rng.standard_normal(shape) for shape in shapes]
    made = {}
    for backend in ("aot", "composite"):
        params = [Parameter(tensor(w, dtype), name=f"w{i}") for i, w in enumerate(starts)]
        made[backend] = case.optimizer(params, case.learning_rate, weight_decay=0.02, backend=backend, **shared)
    cells = {backend: Step(optimizer) for backend, optimizer in made.items()}
    for step in range(4):
        gradients = [tensor(rng.standard_normal(s) * 10.0 ** rng.integers(-2, 2), dtype) for s in shapes]
        for backend, optimizer in made.items():
            optimizer(tuple(gradients)) if mode == "pynative" else cells[backend](*gradients)
        check_stored_alike(*map(numbers_of, made.values()))
        if step == 1:
            held = {backend: optimizer.state_dict() for backend, optimizer in made.items()}
            for there, here in (("aot", "composite"), ("composite", "aot")):
                made[here].load_state_dict(held[there])
                for p in made[here].parameters:
                    write(p, held[there][p.name].asnumpy())


@pytest.mark.parametrize("options", ["8bit", "4bit", "bfloat16", "split8"])
def test_a_skipped_step_changes_no_state(options):
    """States that were rounded again would change by the noise."""
    dtype, shared = OPTIONS[options]
    params = [Parameter(tensor(np.ones(shape), dtype), name=f"w{i}") for i, shape in enumerate(STACKED)]
    optimizer = AdamW(params, 0.01, backend="composite", skip_nonfinite=True, **shared)
    gradients = [tensor(np.random.default_rng(i).standard_normal(s), dtype) for i, s in enumerate(STACKED)]
    optimizer(tuple(gradients))
    before = digest_of(optimizer, "skipped_steps", "statistics")
    optimizer((*gradients[:2], tensor(np.full(STACKED[2], np.nan), dtype)))
    assert digest_of(optimizer, "skipped_steps", "statistics") == before
