"""Muon's matrices: which tensors they are, where in a tensor they are, and what orthogonalizing them gives."""

import dataclasses
import os
import re
import subprocess
import sys
import warnings
import zlib

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
import reference
from cases import CASES, MUON_COEFFICIENTS, SCENARIOS, SHAPES, Scenario, plain
from harness import Pair, Step, check_close, numbers, peak_of_weight
from mindspore import Parameter, Tensor, ops
from native import LIBC, peak, peak_from_now
from reference.muon import COEFFICIENTS, iterations_of, orthogonalized
from sources import ROOT, TESTS
from tolerances import STEPS, TOLERANCE

from ms_optim import Muon, heads
from ms_optim.arguments import words
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.rules import matrices
from ms_optim.rules.coefficients import PUBLISHED
from ms_optim.rules.orthogonalization import MOST_GROWTH, Orthogonalize, work
from ms_optim.rules.sliced_matrices import Slicing

needs_kernel = pytest.mark.skipif(kernels.why_not("muon", "CPU") is not None, reason="it is the kernel's")
MUON = next(case for case in CASES if case.name == "Muon")
TRIPLE = (3.4445, -4.7750, 2.0315)


def drawn(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def parameters(shapes):
    return [Parameter(Tensor(w), name=name) for name, w in drawn(shapes).items()]


def prefixes(optimizer):
    """Return for each parameter which states it has."""
    return {p.name: [s.name.split(".")[0] for s in optimizer.states if s.name.partition(".")[2] == p.name]
            for p in optimizer.parameters}  # fmt: skip


def trained(shapes, backend="aot", steps=3, gradients=None, **arguments):
    """Take steps with drawn gradients; return the optimizer and a reference that took the same."""
    params = parameters(shapes)
    optimizer = Muon(params, 0.02, backend=backend, **arguments)
    starts = [numbers(p) for p in params]
    n = len(params)
    known = {k: v for k, v in arguments.items() if k != "ns_dtype"}
    expected = reference.Muon(
        starts, [lambda k: 0.02] * n, [lambda k: 0.1] * n, [False] * n, ["float32"] * n, names=list(shapes), **known
    )
    for step in range(steps):
        given = gradients(step) if gradients else drawn(shapes, 1 + step)
        optimizer(tuple(Tensor(g) for g in given.values()))
        expected.step([g.astype(np.float64) for g in given.values()])
    return optimizer, expected


def check(optimizer, expected, magnified=1):
    held = {state.name: state for state in optimizer.states}
    for i, p in enumerate(optimizer.parameters):
        check_close(numbers(p), expected.masters[i], TOLERANCE["weight"], peak_of_weight(expected, i), p.name)
        for name in expected.states_of(i):
            state, peak = held[f"{name}.{p.name}"], expected.peak[name][i]
            check_close(numbers(state), expected.state[name][i], TOLERANCE["state"], peak, state.name)
    peak = expected.peak["statistics"]
    most = magnified * TOLERANCE["statistics"]
    check_close(numbers(optimizer.statistics), expected.statistics, most, peak, "statistics")


# ---- Which tensors ------------------------------------------------------------------------------------------------

NET = {
    "dense.weight": (6, 5),
    "dense.bias": (6,),
    "token_embedding.table": (9, 4),
    "lm_head.weight": (9, 4),
    "output_layer.weight": (9, 4),
    "conv.weight": (4, 3, 2, 2),
    "experts.weight": (2, 3, 4),
}


def test_embeddings_output_layers_and_vectors_are_adamws():
    states = prefixes(Muon(parameters(NET)))
    matrices = {"dense.weight", "conv.weight", "experts.weight"}
    assert states == {name: ["muon_m"] if name in matrices else ["adam_m", "adam_v"] for name in NET}
    assert Muon.are_matrices(list(NET), list(NET.values())) == [name in matrices for name in NET]


def test_names_of_ones_own_take_the_place_of_the_usual_ones():
    states = prefixes(Muon(parameters(NET), adamw_names=["conv.*"]))
    adamws = {"conv.weight", "dense.bias"}
    assert states == {name: ["adam_m", "adam_v"] if name in adamws else ["muon_m"] for name in NET}


def test_a_group_says_for_its_parameters_whatever_their_names():
    params = parameters(NET)
    groups = [
        {"params": params[:1], "muon": False},
        {"params": params[2:3], "muon": True, "lr": 0.3},
        {"params": [params[1], *params[3:]]},
        {"order_params": params},
    ]
    states = prefixes(Muon(groups))
    matrices = {"token_embedding.table", "conv.weight", "experts.weight"}
    assert states == {name: ["muon_m"] if name in matrices else ["adam_m", "adam_v"] for name in NET}
    assert "muon" in groups[0], "what the user passed is the user's"


def test_a_vector_that_a_group_gives_to_muon_is_refused_by_name_and_shape():
    params = parameters(NET)
    with pytest.raises(ValueError, match=r"'muon': True .*'dense\.bias' has the shape \(6,\)"):
        Muon([{"params": params[:2], "muon": True}, {"params": params[2:]}])


def test_a_groups_key_must_be_a_bool():
    with pytest.raises(TypeError, match=r"params\[0\]\['muon'\].*bool"):
        Muon([{"params": parameters(NET), "muon": 1}])


# ---- Splits -------------------------------------------------------------------------------------------------------

WHOLE = {"a.weight": (12, 5), "b.weight": (2, 12, 7), "c.weight": (12, 2, 3, 1), "d.bias": (12,)}


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize(
    "split",
    [3, 1, (5, 7), [12], (4, 4, 4), ((1, 3), 3), [[2, 1, 1], 3], ((4,), 3),
     heads(3), heads(12), heads(3, 4), heads(2, (1, 3, 2)), (heads(2, 3), 6), [heads(1, 2), heads(2, (4, 1))]],
    ids=str,
)  # fmt: skip
def test_each_form_of_a_split_follows_the_reference(split, backend):
    steps = 3 if backend == "aot" else 1
    normalizes = split in (3, ((1, 3), 3), heads(2, (1, 3, 2)))
    check(*trained(WHOLE, backend, steps, splits={"?.weight": split}, normalize_rows=normalizes))


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize(
    "split, alone",
    [
        (heads(3), (4, 4, 4)),
        (heads(2, (1, 5)), (1, 5, 1, 5)),
        ((2, heads(2, (2, 3))), (2, 2, 3, 2, 3)),
        ({"heads": 3}, (4, 4, 4)),
        ([{"heads": 2, "rows": [1, 4]}, 2], (1, 4, 1, 4, 2)),
    ],
    ids=str,
)
def test_heads_are_blocks_of_rows_that_follow_each_other_and_a_group_may_state_them(split, alone, backend):
    params = parameters(WHOLE)
    groups = [{"params": params[:1], "split": split}, {"params": params[1:]}]
    optimizer = Muon(groups, 0.02, splits={"*.weight": 2}, backend=backend)
    optimizer(tuple(Tensor(g) for g in drawn(WHOLE, 1).values()))
    expected, _ = trained(WHOLE, backend, 1, splits={"a.weight": alone, "*.weight": 2})
    for ours, theirs in zip((*params, *optimizer.states), (*expected.parameters, *expected.states)):
        np.testing.assert_array_equal(numbers(ours), numbers(theirs), ours.name)


def test_heads_that_are_none_are_refused():
    for given, error in (((0,), ValueError), ((2.0,), TypeError), ((True,), TypeError), ((2, ()), ValueError),
                         ((2, (3, 0)), ValueError), ((2, "3"), TypeError), ((2, (1.5,)), TypeError)):  # fmt: skip
        with pytest.raises(error, match="For 'heads', the argument"):
            heads(*given)
    assert str(heads(2)) == "heads(2)"
    assert str(heads(2, [3])) == "heads(2, 3)"
    assert str(heads(2, (3, 1))) == "heads(2, (3, 1))"
    groups = [{"params": parameters(WHOLE)[3:], "split": heads(3)}]
    with pytest.raises(ValueError, match=r"a group with 'split' must hold a matrix .* holds \['d\.bias'\]"):
        Muon(groups)


def test_equal_parts_in_a_tuple_and_as_a_count_are_the_same_and_differ_from_none():
    ends = [
        numbers(trained(WHOLE, splits=splits)[0].parameters[0])
        for splits in ({"a*": 3}, {"a*": (4, 4, 4)}, None, {"a*": ((2, 2), 3)})
    ]
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.abs(ends[0] - ends[2]).max() > 1e-3
    assert np.abs(ends[0] - ends[3]).max() > 1e-3


def test_of_several_patterns_the_first_that_matches_counts():
    first = {"a.weight": 2, "*.weight": 3}
    optimizer, expected = trained(WHOLE, splits=first)
    check(optimizer, expected)
    alone, _ = trained(WHOLE, splits={"*.weight": 3})
    assert np.abs(numbers(optimizer.parameters[0]) - numbers(alone.parameters[0])).max() > 1e-3
    np.testing.assert_array_equal(numbers(optimizer.parameters[1]), numbers(alone.parameters[1]))


@pytest.mark.parametrize(
    "splits, said",
    [
        ({"none*": 2}, r"the pattern 'none\*' of 'splits' must match"),
        ({"*bias": 2}, r"the pattern '\*bias' of 'splits' must match"),
        ({"*.weight": 2, "a.weight": 3}, r"the pattern 'a\.weight' of 'splits' .*no earlier pattern"),
        ({"a*": 5}, r"'splits\['a\*'\]' must cover exactly the rows .*'a\.weight' of shape \(12, 5\) .* 12 rows"),
        ({"b*": (5, 6)}, r"must cover exactly the rows .*\(5, 6\).*'b\.weight'"),
        ({"b*": ((5, 1), 3)}, r"must cover exactly the rows"),
        ({"a*": heads(5)}, r"must cover exactly the rows of a matrix, but is heads\(5\)"),
        ({"a*": heads(3, (2, 3))}, r"must cover exactly the rows"),
        ({"a*": (heads(2, 4), 5)}, r"must cover exactly the rows"),
    ],
)
def test_splits_that_fit_no_tensor_are_refused(splits, said):
    with pytest.raises(ValueError, match=said):
        Muon(parameters(WHOLE), splits=splits)


@pytest.mark.parametrize(
    "split",
    [0, -3, (), (4, -1), (4, 0), 2.5, "rows", ((), 3), ((4,), 0), True, None, ((1.5,), 8),
     (heads(2), 4), {"head": 3}, {"heads": 3, "row": 4}, {}, [[heads(2), 2], 2]],
    ids=str,
)  # fmt: skip
def test_splits_that_are_none_are_refused(split):
    with pytest.raises(TypeError, match=r"splits\['a\*'\]"):
        Muon(parameters(WHOLE), splits={"a*": split})
    with pytest.raises(TypeError, match=r"params\[0\]\['split'\]"):
        Muon([{"params": parameters(WHOLE)[:1], "split": split}])


def rows_in_all(matrix):
    return [matrix.first_row + k * matrix.stride + i for k in range(matrix.runs) for i in range(matrix.run)]


@pytest.mark.parametrize(
    "shape, axis, lengths, split, is_whole",
    [
        ((12, 5), 0, (4, 8), heads(6), True),
        ((12, 5), 0, (4, 8), heads(2, (1, 3, 2)), True),
        ((12, 5), 0, (4, 8), (4, 3, 5), True),
        ((12, 5), 0, (4, 8), heads(2), False),
        ((12, 5), 0, (4, 8), ((2, 4), 2), False),
        ((12, 5), 0, (3, 3, 6), heads(4), True),
        ((12, 5), 1, (2, 3), heads(6), False),
        ((3, 12, 5), 1, (4, 8), heads(3), True),
        ((3, 12, 5), 1, (6, 6), heads(3), False),
        ((3, 12, 5), 2, (2, 3), heads(3), False),
        ((3, 12, 5), 0, (1, 2), heads(3), True),
        ((3, 12, 5), 0, (1, 2), ((2, 4), 2), True),
    ],
    ids=str,
)
def test_matrices_that_no_slice_cuts_are_each_processs_own(shape, axis, lengths, split, is_whole):
    """By the numbers of the rows of the whole tensor, of which each process has its slice."""
    of_rows, dimension = (1, 1) if len(shape) == 3 else (0, 0)
    numbered = np.broadcast_to(np.arange(np.prod(shape[: 1 + dimension])).reshape(*shape[: 1 + dimension], 1), shape)
    found, expected = [], None
    for own in range(len(lengths)):
        slicing = Slicing("g", axis, lengths, own, axis >= of_rows, axis == of_rows)
        local = [*shape[:axis], lengths[own], *shape[axis + 1 :]]
        split_of = {} if split is None else {"w": split}
        form = matrices.forms("Muon", {"w": tuple(local)}, {"w": slicing}, split_of, {})["w"]
        expected = [rows_in_all(matrix) for matrix in form.whole]
        assert form.slicing.cuts_matrices != is_whole
        assert form.singular_values == sum(min(len(rows), shape[-1]) for rows in expected)
        if not is_whole:
            assert form.matrices == form.whole
            continue
        begin = sum(lengths[:own])
        rows = numbered.take(range(begin, begin + lengths[own]), axis)[..., 0].reshape(-1)
        found += [rows[rows_in_all(matrix)].tolist() for matrix in form.matrices]
    if is_whole:
        assert sorted(found) == sorted(expected)


# ---- Iterations ---------------------------------------------------------------------------------------------------


def test_as_many_triples_as_iterations():
    with pytest.raises(ValueError, match="'ns_steps' must be the number of triples in 'ns_coefficients', 4"):
        Muon(parameters(WHOLE), ns_steps=5, ns_coefficients=MUON_COEFFICIENTS[:4])
    with pytest.raises(ValueError, match="at most 100"):
        Muon(parameters(WHOLE), ns_coefficients=[(1.5, -0.5, 0.0)] * 101)
    check(*trained(WHOLE, ns_steps=4, ns_coefficients=MUON_COEFFICIENTS[:4]))
    check(*trained(WHOLE, ns_coefficients=MUON_COEFFICIENTS[:4]))
    check(*trained(WHOLE, ns_steps=2))


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients_by_name(name):
    assert list(Muon(parameters(WHOLE), ns_coefficients=name).rule.iterations) == iterations_of(name)
    assert set(PUBLISHED) == set(COEFFICIENTS)
    others = [steps for steps in (1, 4, 7, 12) if steps != len(COEFFICIENTS[name])]
    for steps in others:
        if name in ("jordan", "polar_express"):
            made = Muon(parameters(WHOLE), ns_steps=steps, ns_coefficients=name)
            assert list(made.rule.iterations) == iterations_of(name, steps)
        else:
            with pytest.raises(ValueError, match=f"'ns_steps' must be None or .*{name}"):
                Muon(parameters(WHOLE), ns_steps=steps, ns_coefficients=name)


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize("name, steps", [*((name, None) for name in list(COEFFICIENTS)[1:]), ("polar_express", 9)])
def test_named_coefficients_follow_the_reference(name, steps, backend):
    """The first polynomial of "cans" multiplies the rounding of a singular value near 1 by 26."""
    optimizer, expected = trained(WHOLE, backend, 3 if backend == "aot" else 1, ns_coefficients=name, ns_steps=steps)
    check(optimizer, expected, 26 if name == "cans" else 1)


def test_coefficients_that_would_do_harm_are_refused():
    """Those of "aol" bring singular values from 0.884 to 1 near -1: there the weight would move uphill."""
    aol = [(4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)]
    turned = 1.0
    for a, b, c in aol:
        turned = a * turned + b * turned**3 + c * turned**5
    assert turned < -0.9
    for given, said in (
        (aol, "no singular value from 0 to 1 turns negative, .* 0.88 does"),
        ("aol", "'aol' is left out: .* uphill"),
        ("quintc", "one of .* Did you mean 'quintic'"),
    ):
        with pytest.raises(ValueError, match=said):
            Muon(parameters(WHOLE), ns_coefficients=given)


def test_bfloat16_takes_no_coefficients_that_its_rounding_spoils():
    """A singular value of 1 may become 1.004, where those of "cans" diverge."""
    with pytest.raises(ValueError, match=r"stay below 1e\+06 .* for products of bfloat16"):
        Muon(parameters(WHOLE), ns_coefficients="cans", ns_dtype="bfloat16")
    for given in ({"ns_coefficients": "deepseek_v4"}, {"ns_coefficients": "polar_express", "ns_steps": 8}):
        words._warned.clear()
        with pytest.warns(UserWarning, match="ns_dtype='bfloat16'.*noise"):
            Muon(parameters(WHOLE), ns_dtype="bfloat16", **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in set(COEFFICIENTS) - {"cans", "deepseek_v4"}:
            Muon(parameters(WHOLE), ns_coefficients=name, ns_dtype="bfloat16")
        Muon(parameters(WHOLE), ns_coefficients="deepseek_v4")


def test_one_triple_is_that_of_each_iteration():
    ends = [numbers(trained(WHOLE, ns_coefficients=c)[0].parameters[0]) for c in (TRIPLE, [TRIPLE] * 5)]
    np.testing.assert_array_equal(*ends)


SQUARE, GRAM, LAST = (2, 4, 4, 4), (2, 4, 9, 4), (2, 4, 4, 9)
NARROW = [(2, 4, 5, 4), SQUARE, (2, 4, 4, 5)]


@pytest.mark.parametrize(
    "shape, count, expected",
    [
        ((2, 5, 4), 2, 2 * NARROW),
        ((2, 9, 4), 1, [GRAM, SQUARE, LAST]),
        ((2, 4, 9), 3, [GRAM, *9 * [SQUARE], LAST]),
        ((2, 9, 4), 5, [GRAM, *9 * [SQUARE], LAST, GRAM, *5 * [SQUARE], LAST]),
    ],
)
def test_products_are_of_the_shorter_side_and_of_a_wide_matrix_few(shape, count, expected):
    made = Orthogonalize([TRIPLE] * count, False, "CPU", ms.float64)
    seen = []
    made.product = lambda left, right: seen.append((*left.shape, right.shape[-1])) or ops.bmm(left, right)
    assert made.construct(Tensor(drawn({"x": shape})["x"])).shape == shape
    assert seen == expected
    # Of a product that is symmetric, the kernel computes one half.
    operations = sum(m * k * n * (1 if m == n else 2) for _, m, k, n in seen)
    assert work([TRIPLE] * count, *shape[1:]) == pytest.approx(operations)
    spared = count * min(shape[1:]) ** 3  # b S + c S S, where c is 0
    assert work([(*TRIPLE[:2], 0.0)] * count, *shape[1:]) == pytest.approx(operations - spared)


def test_the_kernel_ends_runs_where_the_operators_do():
    header = (ROOT / "ops" / "include" / "muon.h").read_text()
    growth = re.search(r"MostGrowth\(bool is_bfloat16\) \{ return is_bfloat16 \? ([\d.]+) : ([\d.]+); \}", header)
    assert dict(zip(("bfloat16", "float32"), map(float, growth.groups()))) == MOST_GROWTH


# The singular values of a matrix to orthogonalize, and how near those of the result are to what float64 gives: a Gram
# matrix is rounded to 2^-24 or 2^-9, and a run of iterations makes that grow by as much as 42^2, or 16^2.
SPECTRA = {"gauss": lambda i: None, "1/i": lambda i: 1 / i, "1/i^2": lambda i: 1 / i**2}
NEAR = {"float32": 5e-5, "bfloat16": 0.03}


def of_spectrum(spectrum, rows, columns):
    rng = np.random.default_rng(7)
    left, _, right = np.linalg.svd(rng.standard_normal((rows, columns)), full_matrices=False)
    values = SPECTRA[spectrum](np.arange(1.0, 1 + rows))
    return rng.standard_normal((rows, columns)) if values is None else left * values @ right


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize(
    "name, ns_dtype",
    [(name, dtype) for name in COEFFICIENTS for dtype in NEAR if (name, dtype) != ("cans", "bfloat16")],
)
def test_singular_values_come_as_near_to_1_as_the_iterations_can(name, ns_dtype, backend):
    gradients = {spectrum: of_spectrum(spectrum, 96, 250) for spectrum in SPECTRA}
    params = [Parameter(Tensor(np.zeros((96, 250), np.float32)), name=spectrum) for spectrum in SPECTRA]
    settings = {"ns_coefficients": name, "ns_dtype": ns_dtype, "adjust_lr": "original", "backend": backend}
    optimizer = Muon(params, 1.0, weight_decay=0.0, **settings)
    optimizer(tuple(Tensor(g.astype(np.float32)) for g in gradients.values()))
    for p, (spectrum, g) in zip(params, gradients.items()):
        found = np.linalg.svd(-numbers(p), compute_uv=False)
        exact = np.linalg.svd(orthogonalized(g, iterations_of(name)), compute_uv=False)
        off = abs(found - 1).max() - abs(exact - 1).max()
        assert off < NEAR[ns_dtype], (spectrum, off)
        if ns_dtype == "float32":
            assert abs(found - exact).max() < NEAR[ns_dtype], spectrum


def test_rows_are_normalized_with_the_scale_that_is_theirs_alone():
    with pytest.raises(ValueError, match=r"adjust_lr.*match_rms_adamw.*normalize_rows"):
        Muon(parameters(WHOLE), normalize_rows=True, adjust_lr="original")


# ---- What comes of them -------------------------------------------------------------------------------------------

# On both sides of a tile of 384 rows, 96 columns and 256 in depth, square, wide and tall, and several at once.
LARGE = [{"w": (400, 1000)}, {"w": (1000, 400)}, {"w": (97, 96), "v": (2, 385, 258)}, {"w": (513, 513)}]


@needs_kernel
@pytest.mark.parametrize("normalize_rows", [False, True])
@pytest.mark.parametrize("shapes", LARGE, ids=str)
def test_matrices_of_several_tiles_follow_the_reference(shapes, normalize_rows):
    check(*trained(shapes, steps=2, normalize_rows=normalize_rows))


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_rows_and_columns_alone(backend):
    """Their orthogonal matrix is themselves, of norm 1, as far as the iteration gets."""
    check(*trained({"row": (1, 9), "column": (9, 1), "one": (1, 1), "more": (3, 1, 9)}, backend))


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_of_gradients_of_rank_one_rounding_stays_small(backend):
    """The iteration multiplies the singular values that should be 0 by 485, and they stay far from 1."""
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((2, 40))
    # Powers of two, which multiply exactly.
    u, v = (np.exp2(np.round(x)) * np.sign(x) for x in (u, v))
    g = np.outer(u, v[:24]).astype(np.float32)
    weight = Parameter(Tensor(np.zeros((40, 24), np.float32)), name="w")
    Muon([weight], 1.0, weight_decay=0.0, matched_adamw_rms=1.0, backend=backend)((Tensor(g),))
    singular = np.linalg.svd(numbers(weight) / np.sqrt(40), compute_uv=False)
    expected = np.linalg.svd(orthogonalized(g.astype(np.float64), [TRIPLE] * 5), compute_uv=False)
    assert singular[0] == pytest.approx(expected[0], rel=1e-5)
    assert singular[1] < 485 * 2.0**-24 * 10


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e18])
@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_the_size_of_a_gradient_does_not_matter(size, backend):
    """No constant is added to the norm; squares are added up in float64."""
    g = drawn({"w": (8, 12)}, 3)["w"]
    weight = Parameter(Tensor(np.zeros((8, 12), np.float32)), name="w")
    Muon([weight], 1.0, weight_decay=0.0, backend=backend)((Tensor((g * size).astype(np.float32)),))
    expected = -0.2 * np.sqrt(12) * orthogonalized(g.astype(np.float64), [TRIPLE] * 5)
    np.testing.assert_allclose(numbers(weight), expected, atol=2e-4)


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_of_nothing_comes_nothing(backend):
    zeros = {"w": np.zeros((6, 4), np.float32)}
    optimizer, expected = trained({"w": (6, 4)}, backend, gradients=lambda _: zeros, normalize_rows=True)
    check(optimizer, expected)
    assert optimizer.statistics.asnumpy()[0, 3] == 0


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_a_row_of_nearly_nothing_becomes_as_long_as_the_others(backend):
    """Where rows are normalized: no more is added to the root of its average than the rule says."""
    g = {"w": np.eye(4, 6, dtype=np.float32) * np.array([[1], [1], [1], [2.0**-18]], np.float32)}
    check(*trained({"w": (4, 6)}, backend, steps=1, gradients=lambda _: g, normalize_rows=True))


@needs_kernel
def test_tensors_of_several_batches_end_as_each_alone():
    """The kernel takes tensors of 4 million elements together: here the first two, then the others."""
    shapes = {"a": (2, 1_100_000), "b": (5,), "c": (1_100_000, 2), "d": (3, 7), "e": (2, 800_000)}
    given, results = drawn(shapes, 1), []
    for some in (list(shapes), *([name] for name in shapes)):
        params = [p for p in parameters(shapes) if p.name in some]
        Muon(params, 0.02, normalize_rows=True)(tuple(Tensor(given[p.name]) for p in params))
        results += params
    together, alone = results[: len(shapes)], results[len(shapes) :]
    for p, q in zip(together, alone):
        np.testing.assert_array_equal(p.asnumpy(), q.asnumpy(), p.name)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_a_gradient_that_is_not_finite_skips_the_step(value, backend):
    optimizer, _ = trained(NET, backend, steps=1, normalize_rows=True)
    held = [*optimizer.parameters, *optimizer.states]
    before = [numbers(p) for p in held]
    bad = drawn(NET, 9)
    bad["dense.weight"][2, 3] = value
    optimizer(tuple(Tensor(g) for g in bad.values()))
    for p, b in zip(held, before):
        np.testing.assert_array_equal(numbers(p), b, p.name)
    assert (int(optimizer.global_step.asnumpy()[0]), int(optimizer.skipped_steps.asnumpy()[0])) == (1, 1)


def test_unless_it_is_told_otherwise():
    optimizer, _ = trained(NET, steps=1, skip_nonfinite=False)
    bad = drawn(NET, 9)
    bad["dense.weight"][2, 3] = np.nan
    optimizer(tuple(Tensor(g) for g in bad.values()))
    assert np.isnan(numbers(optimizer.parameters[0])).all()
    assert np.isfinite(numbers(optimizer.parameters[5])).all()


# ---- Products of bfloat16 numbers ---------------------------------------------------------------------------------

ODD = {"a": (7, 13), "b": (13, 7), "c": (1, 5), "d": (3, 9, 9), "e": (129, 257), "f": (20, 30)}


def moves(backend, shapes=ODD, **arguments):
    """Return by name the orthogonal matrices that one step moved along."""
    params = [Parameter(Tensor(np.zeros(shape, np.float32)), name=name) for name, shape in shapes.items()]
    optimizer = Muon(params, 1.0, weight_decay=0.0, backend=backend, **arguments)
    optimizer(tuple(Tensor(g) for g in drawn(shapes, 5).values()))
    return {p.name: -numbers(p) for p in params}


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_bfloat16_products_stay_close_to_float32_ones(backend):
    """What is rounded to 2^-9 in each of 5 iterations, and stretched by these, is off by some hundredths in norm."""
    exact, rounded = moves("aot"), moves(backend, ns_dtype="bfloat16")
    for name, wide in exact.items():
        assert not np.array_equal(rounded[name], wide), name
        off = np.linalg.norm(rounded[name] - wide) / np.linalg.norm(wide)
        assert 1e-5 < off < 0.08, (name, off)


@pytest.fixture(params=["amx", "avx512bf16", "avx512", "avx2", "baseline"])
def products(request, proves):
    """Multiply matrices by one of the ways that this processor has."""
    library = libraries.library("libms_optim_cpu.so")
    if library.ms_optim_force_products(request.param.encode()) != 0:
        pytest.skip(f"this processor has no {request.param}")
    proves(f"products for {request.param}")
    yield request.param
    assert library.ms_optim_force_products(None) == 0


def rounded_to_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def orthogonalized_in_bfloat16(u):
    """The iterations with exact sums, of which what is multiplied is rounded: a wide matrix in runs of 2, 2 and 1.

    Rounding leaves products of the runs not quite symmetric; the kernel computes their lower half.
    """
    kept = lambda x: rounded_to_bfloat16(x.astype(np.float32))  # noqa: E731
    x = kept(u / np.linalg.norm(u))
    if len(u) > u[0].size:
        return orthogonalized_in_bfloat16(u.T).T
    a, b, c = (np.float64(np.float32(number)) for number in TRIPLE)
    mirrored = lambda s: np.tril(kept(s)) + np.tril(kept(s), -1).T  # noqa: E731
    for count in (2, 2, 1) if 2 * u[0].size >= 3 * len(u) else 5 * (1,):
        s = kept(x @ x.T)
        z = kept(b * s + c * s @ s)
        if count == 1:
            x = kept(a * x + z @ x)
            continue
        q, w = kept(z + a * np.eye(len(u))), mirrored(s @ z + a * s)
        s = mirrored(z @ w + a * w)
        z = kept(b * s + c * s @ s)
        x = kept(mirrored(q @ z + a * q) @ x)
    return x


# Edges of tiles: of 16 rows, 32 columns, 32 and 512 in depth.
TILES = {"a": (16, 32), "b": (17, 33), "c": (31, 16), "d": (33, 513), "e": (1100, 70), "f": (400, 530), "g": (49, 97)}


@needs_kernel
@pytest.mark.parametrize("shapes", [TILES, ODD], ids=["tiles", "odd"])
def test_all_ways_to_multiply_follow_the_same_iteration(products, shapes):
    """Where a sum falls on either side of a tie, what is rounded differs by 2^-8, and little comes of one of many."""
    given = drawn(shapes, 5)
    exact, rounded = moves("aot", shapes), moves("aot", shapes, ns_dtype="bfloat16")
    for name, g in given.items():
        batch = g.astype(np.float64).reshape(-1, *g.shape[-2:])
        scale = 0.2 * np.sqrt(max(g.shape[-2:]))
        for moved, iterate, most in (
            (exact, lambda u: orthogonalized(u, [TRIPLE] * 5), 1e-4),
            (rounded, orthogonalized_in_bfloat16, 0.01),
        ):
            expected = scale * np.stack([iterate(u) for u in batch]).reshape(g.shape)
            off = np.linalg.norm(moved[name] - expected) / np.linalg.norm(expected)
            assert off < most, (products, name, off)


@needs_kernel
def test_bfloat16_products_give_the_same_bits_again():
    once, again = (moves("aot", ns_dtype="bfloat16") for _ in range(2))
    for name, bits in once.items():
        np.testing.assert_array_equal(bits, again[name])


PROGRAM = """
import zlib, sys
from ms_optim import heads
from runtime import spare_threads
from test_matrices import LARGE, ODD, moves
spare_threads()
found = 0
HEADS = [({"w": (12 * 64, 96)}, {"w": heads(12)}), ({"w": (10 * 40, 96)}, {"w": heads(10, (7, 33))})]
for shapes, splits in (*((shapes, None) for shapes in (*LARGE[:3], ODD)), *HEADS):
    for kind in ("float32", "bfloat16"):
        for w in moves("aot", shapes, ns_dtype=kind, splits=splits).values():
            found = zlib.crc32(w.tobytes(), found)
print(f"bits {found}")
"""


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits():
    said = set()
    for threads in ("1", "3"):
        # Not sys.path, which may have a folder of MindSpore by now whose modules have the names of Python's own.
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
        assert done.returncode == 0, done.stderr
        said |= {line for line in done.stdout.splitlines() if line.startswith("bits")}
    assert len(said) == 1, said


@pytest.mark.parametrize("name", ["grouped", "clip", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_batches_of_matrices_follow_the_reference(name, backend, monkeypatch):
    """In groups of all kinds, beside AdamW's tensors; tests/test_conformance.py has no tensors of three dimensions."""
    monkeypatch.setitem(SHAPES, "experts", (2, 5, 4))
    monkeypatch.setitem(SHAPES, "taller", (3, 6, 2))
    scenario = dataclasses.replace(SCENARIOS[name], shapes=("seven", "experts", "taller", "matrix"))
    pair = Pair(MUON, scenario, {"normalize_rows": True}, backend=backend)
    pair.run("pynative", STEPS if backend == "aot" else 6)
    pair.check()


# ---- The tolerance ------------------------------------------------------------------------------------------------

RIGHT = reference.muon.orthogonalized, reference.muon.rows_of, reference.Muon.scaled


def not_transposed_back(u, iterations):
    x = RIGHT[0](u, iterations)
    return x.T.reshape(x.shape) if len(x) > len(x[0]) else x


def with_parts_exchanged(split, count):
    return RIGHT[1](split[::-1] if split == (3, 6) else split, count)


def of_heads(wrong):
    """Return what takes other rows for heads(3, (1, 2)) than the right ones."""
    return lambda split, count: wrong(RIGHT[1](split, count)) if hasattr(split, "rows") else RIGHT[1](split, count)


def with_a_row_of_the_neighbour(blocks):
    rows = np.concatenate(blocks)
    rows[2], rows[3] = rows[3], rows[2]
    return np.split(rows, np.cumsum([len(block) for block in blocks])[:-1])


def by_the_whole_matrix(self, i, rows, x):
    return RIGHT[2](self, i, rows, x) * np.sqrt(max(self.masters[i].shape) / max(x.shape))


def by_the_shorter_side(self, i, rows, x):
    return RIGHT[2](self, i, rows, x) * np.sqrt(min(x.shape) / max(x.shape))


MISTAKES = {
    "none": None,
    **{
        f"{name} off by a thousandth": (reference.Muon, "ns_coefficients", tuple(np.multiply(TRIPLE, factors)))
        for name, factors in zip("abc", 1 + 1e-3 * np.eye(3))
    },
    "not transposed back": (reference.muon, "orthogonalized", not_transposed_back),
    "scaled by the shorter side": (reference.Muon, "scaled", by_the_shorter_side),
    "parts exchanged": (reference.muon, "rows_of", with_parts_exchanged),
    "a head with a row of its neighbour": (reference.muon, "rows_of", of_heads(with_a_row_of_the_neighbour)),
    "heads joined": (reference.muon, "rows_of", of_heads(lambda blocks: [np.concatenate(blocks)])),
    "parts of heads joined": (
        reference.muon,
        "rows_of",
        of_heads(lambda blocks: [np.concatenate(blocks[k::2]) for k in range(2)]),
    ),
    "sizes of blocks exchanged": (
        reference.muon,
        "rows_of",
        lambda split, count: RIGHT[1](heads(3, (2, 1)) if hasattr(split, "rows") else split, count),
    ),
    "scaled by the whole matrix": (reference.Muon, "scaled", by_the_whole_matrix),
    "the first coefficients for every iteration": (
        reference.muon,
        "iterations_of",
        lambda coefficients, steps=None: iterations_of(coefficients, steps)[:1] * 5,
    ),
}


@needs_kernel
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_tolerance_shows_a_mistake(mistake, monkeypatch):
    """The iterations amplify rounding, so it is wide; each of these mistakes is 40 times as far off, or more."""
    if mistake:
        monkeypatch.setattr(*mistake)
    scenario = Scenario(shapes=("matrix", "convolution", "zero", "zero again"), groups=plain)
    settings = {"splits": {"zero again*": heads(3, (1, 2)), "zero*": (3, 6)}}
    if mistake and mistake[1] == "iterations_of":
        settings["ns_coefficients"] = "quintic"
    pair = Pair(MUON, scenario, settings)
    pair.run("pynative", STEPS)
    if mistake:
        with pytest.raises(AssertionError, match="times the tolerance"):
            pair.check()
    else:
        pair.check()


# ---- Beside another implementation --------------------------------------------------------------------------------

# The weights of torch.optim.Muon (torch 2.13, lr=0.02, weight_decay=0.1) after the steps below, with Tensor.bfloat16
# replaced by Tensor.clone, so that its iterations are in float32 too.
OF_TORCH = {
    ((3, 4), "original"): [
        [-0.0382954, 0.8224235, -0.7342889, 0.4361970],
        [-0.2634419, -0.1660511, -0.9839868, -0.9658867],
        [0.9092849, -0.6496747, -0.5348487, 0.9960014],
    ],
    ((3, 4), "match_rms_adamw"): [
        [-0.0153182, 0.8308288, -0.7450780, 0.4202693],
        [-0.2770844, -0.1453560, -0.9850988, -0.9551797],
        [0.9124241, -0.6355397, -0.5159397, 0.9941012],
    ],
    ((4, 3), "original"): [
        [-0.0426293, 0.8455599, -0.7541955],
        [0.4136445, -0.2680549, -0.1683109],
        [-0.9740216, -0.9836659, 0.8912402],
        [-0.6513913, -0.5356182, 0.9719722],
    ],
    ((4, 3), "match_rms_adamw"): [
        [-0.0147672, 0.8395942, -0.7529376],
        [0.4110343, -0.2799008, -0.1442904],
        [-0.9817461, -0.9603822, 0.9064537],
        [-0.6348718, -0.5145174, 0.9856076],
    ],
}


@pytest.mark.parametrize("shape, adjust_lr", OF_TORCH)
def test_torchs_muon_goes_the_same_way(shape, adjust_lr):
    start, *gradients = (np.sin(k + np.arange(12.0) ** 2).reshape(shape).astype(np.float32) for k in range(4))
    weight = Parameter(Tensor(start), name="w")
    optimizer = Muon([weight], 0.02, weight_decay=0.1, adjust_lr=adjust_lr)
    for g in gradients:
        optimizer((Tensor(g),))
    np.testing.assert_allclose(numbers(weight), OF_TORCH[shape, adjust_lr], rtol=0, atol=1e-6)


# ---- Resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
@pytest.mark.parametrize("arguments", [{}, {"normalize_rows": True, "splits": {"dense*": 2}}], ids=["muon", "normuon"])
def test_training_resumes_bit_for_bit(arguments, mode):
    ms.set_context(mode=mode)

    def step(optimizer, k):
        return optimizer(*(Tensor(g) for g in drawn(NET, k).values()))

    def made(weights):
        optimizer = Muon([Parameter(Tensor(w), name=name) for name, w in weights.items()], 0.02, **arguments)
        return optimizer, Step(optimizer)

    first, cell = made(drawn(NET))
    for k in range(2):
        step(cell, k)
    saved = {name: Tensor(p.asnumpy()) for name, p in first.state_dict().items()}
    second, other = made({p.name: p.asnumpy() for p in first.parameters})
    second.load_state_dict(saved)
    for k in range(2, 4):
        step(cell, k)
        step(other, k)
    for a, b in zip((*first.parameters, *first.states), (*second.parameters, *second.states)):
        assert a.name == b.name
        assert zlib.crc32(a.asnumpy().tobytes()) == zlib.crc32(b.asnumpy().tobytes()), a.name


# ---- Temporary memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize("most", [1, 3000])
def test_a_bound_of_temporary_memory_changes_no_bit(most, backend):
    shapes = {**NET, **{f"same.{i}": (6, 5) for i in range(9)}}
    bounded, _ = trained(shapes, backend, max_temporary_bytes=most)
    free, _ = trained(shapes, backend)
    for ours, expected in zip(bounded.parameters_dict().values(), free.parameters_dict().values()):
        assert numbers(ours).tobytes() == numbers(expected).tobytes(), ours.name
    if backend == "composite":
        of_stacks = [[len(stack) for stack in one._path.stacks.places] for one in (bounded, free)]
        assert max(of_stacks[0]) < max(of_stacks[1])


@needs_kernel
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_temporary_memory_stays_within_its_bound(ns_dtype):
    # What a thread frees may stay with the allocator, unless it is mapped: from how many bytes on must be fixed.
    m_mmap_threshold = -3
    assert LIBC.mallopt(m_mmap_threshold, 1 << 20) == 1
    side, count, most = 512, 16, 16 << 20
    params = parameters({f"w{i}": (side, side) for i in range(count)})
    given = tuple(Tensor(np.ones((side, side), np.float32)) for _ in params)

    def taken(**arguments):
        optimizer = Muon(params, 0.02, backend="aot", ns_steps=1, ns_dtype=ns_dtype, **arguments)
        optimizer(given)  # what is made once
        before = peak_from_now()
        optimizer(given)
        return peak() - before

    own = side * side * (4 + 4 * {"float32": 4, "bfloat16": 2}[ns_dtype])
    assert taken(max_temporary_bytes=most) < most + (2 << 20)
    assert taken() > 0.8 * count * own  # 4 million elements


def test_a_bound_of_temporary_memory_is_a_number_of_bytes():
    for bad, error in ((0, ValueError), (-1, ValueError), (1e6, TypeError), (True, TypeError)):
        with pytest.raises(error, match="'max_temporary_bytes' must be an int, 1 or greater"):
            Muon(parameters(NET), max_temporary_bytes=bad)
