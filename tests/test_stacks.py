"""The composite path's stacks: tensors that are updated together."""

import mindspore as ms
import numpy as np
import pytest
from harness import Step, tensor
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, ops

from ms_optim import AdamW, FusedOptimizer, Lamb, Rule
from ms_optim.paths.operators import held_stacks
from ms_optim.paths.operators import stacks as _stacks
from ms_optim.paths.operators.selection import slices_of
from ms_optim.paths.operators.stacks import stacked_places


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_each_place_is_in_one_stack_of_its_kind(kinds, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stacks, "MOST_TENSORS", most)
        stacks = stacked_places(kinds, [(1, 1)] * len(kinds))
    assert sorted(i for stack in stacks for i in stack) == list(range(len(kinds)))
    for stack in stacks:
        assert len(stack) <= most
        assert len({kinds[i] for i in stack}) == 1


def test_stacks_are_bounded_and_a_large_tensor_stands_alone():
    size = _stacks.MOST_ELEMENTS // 2
    assert stacked_places("aaaaa", [(size, 1)] * 5) == ((0, 1), (2, 3), (4,))
    assert stacked_places("aa", [(3 * size, 1)] * 2) == ((0,), (1,))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_slices_keep_the_order(places):
    taken = [i for begin, end, step in slices_of(places) for i in range(1000)[begin:end:step]]
    assert taken == places


def test_layers_that_repeat_are_few_slices():
    # Three tensors of one shape in each of 40 layers of twelve.
    kinds = ["square" if k % 12 in (1, 4, 5) else k for k in range(480)]
    square = next(stack for stack in stacked_places(kinds, [(1, 1)] * 480) if len(stack) == 120)
    assert len(slices_of(square)) == 3


class Normalized(FusedOptimizer):
    """A rule that looks at the whole tensor: a stack of several would be taken for one."""

    def __init__(self, params, learning_rate, weight_decay=0.0, **shared):
        rule = Rule("normalized", ("momentum",))
        super().__init__(params, learning_rate, weight_decay, rule, **{"backend": "composite", **shared})

    def directions(self, scalars, weight, gradient, weight_decay, states):
        momentum = 0.5 * states[0] + gradient
        return (momentum / ops.sqrt(ops.sum(ops.square(momentum))) + weight_decay * weight,), (momentum,)

    def coefficients(self, learning_rate, weight_decay, weight_norm, direction_norms):
        return (learning_rate * weight_norm / direction_norms[0],), weight_norm / direction_norms[0]


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_a_rule_of_whole_tensors_sees_one_at_a_time(mode):
    ms.set_context(mode=mode)
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (), (3, 4), (5,), (3, 4), (1,)]
    weights = [rng.standard_normal(shape) for shape in shapes]
    params = [Parameter(tensor(w, "float32"), name=f"w{k}") for k, w in enumerate(weights)]
    optimizer = Normalized(params, 0.1, weight_decay=0.1)
    momenta = [np.zeros(shape) for shape in shapes]
    step = Step(optimizer)
    for _ in range(4):
        gradients = [rng.standard_normal(shape) for shape in shapes]
        step(*(tensor(g, "float32") for g in gradients))
        for k, g in enumerate(gradients):
            momenta[k] = 0.5 * momenta[k] + g
            d = momenta[k] / np.linalg.norm(momenta[k]) + 0.1 * weights[k]
            weights[k] = weights[k] - 0.1 * np.linalg.norm(weights[k]) / np.linalg.norm(d) * d
    for k, p in enumerate(params):
        np.testing.assert_allclose(p.asnumpy(), weights[k], rtol=2e-6, atol=1e-7, err_msg=p.name)
        np.testing.assert_allclose(optimizer.states[k].asnumpy(), momenta[k], rtol=2e-6, atol=1e-7)


class Reciprocal(FusedOptimizer):
    """A rule that makes infinities and other numbers of the zeros behind a tensor's elements."""

    def __init__(self, params, learning_rate, **shared):
        rule = Rule("reciprocal", ("sum",), is_elementwise=True)
        super().__init__(params, learning_rate, 0.0, rule, **{"backend": "composite", **shared})

    def directions(self, scalars, weight, gradient, weight_decay, states):
        return (1.0 / (weight + gradient) + states[0],), (states[0] + 1.0 + gradient,)

    def coefficients(self, learning_rate, weight_decay, weight_norm, direction_norms):
        return (learning_rate / direction_norms[0],), 1.0 / direction_norms[0]


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])
def test_tensors_of_several_shapes_share_a_stack_and_nothing_behind_their_elements_counts(mode):
    ms.set_context(mode=mode)
    rng = np.random.default_rng(2)
    # Rows of 1,024 and of 4,096 elements, and large tensors of one size. Four have one shape; five are a stack of it.
    shapes = [(3, 4), (40, 30), (), (150, 120), (5,), (30, 41), *[(7, 3)] * 4, (1024,), (120, 150)]
    shapes += [*[(6,)] * 5, (4096,)]
    weights = [1.0 + rng.random(shape) for shape in shapes]
    params = [Parameter(tensor(w, "float32"), name=f"w{k}") for k, w in enumerate(weights)]
    optimizer = Reciprocal(params, 0.1, grad_clip_norm=1e6)
    stacks = sorted(sorted(places) for places in optimizer._path.stacks.places)
    assert stacks == [[0, 2, 4, 6, 7, 8, 9, 10], [1, 5, 17], [3, 11], [12, 13, 14, 15, 16]]
    states = [np.zeros(shape) for shape in shapes]
    step = Step(optimizer)
    for _ in range(4):
        gradients = [rng.random(shape) for shape in shapes]
        step(*(tensor(g, "float32") for g in gradients))
        found = optimizer.statistics.asnumpy()
        for k, g in enumerate(gradients):
            d = 1.0 / (weights[k] + g) + states[k]
            expected = [np.linalg.norm(x) for x in (g, weights[k])] + [0.1, 1.0 / np.linalg.norm(d)]
            np.testing.assert_allclose(found[k, :4], expected, rtol=2e-6, err_msg=f"statistics of {shapes[k]}")
            states[k] = states[k] + 1.0 + g
            weights[k] = weights[k] - 0.1 / np.linalg.norm(d) * d
    for k, p in enumerate(params):
        np.testing.assert_allclose(p.asnumpy(), weights[k], rtol=2e-6, atol=1e-7, err_msg=f"{shapes[k]}")
        np.testing.assert_allclose(optimizer.states[k].asnumpy(), states[k], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "key, arguments, stacks",
    [
        ({}, {}, [[0, 1, 2, 5], [3, 4]]),
        ({}, {"state_dtype": "8bit"}, [[0, 1, 2, 5], [3], [4]]),  # one is large enough for codes
        ({"grad_centralization": True}, {}, [[0], [1, 2], [3, 4], [5]]),  # of matrices alone
        ({}, {"weight_norm": "hyperball"}, [[0, 5], [1, 2], [3, 4]]),  # of matrices alone
    ],
    ids=["plain", "codes", "centralized", "norms"],
)
def test_shapes_that_matter_share_no_stack(key, arguments, stacks):
    params = [
        Parameter(tensor(np.ones(shape), "float32"), name=f"w{k}")
        for k, shape in enumerate([(3, 4), (1024,), (5,), (4096,), (4000,), (2, 6)])
    ]
    optimizer = AdamW([{"params": params, **key}], 0.1, backend="composite", **arguments)
    assert sorted(sorted(places) for places in optimizer._path.stacks.places) == stacks


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_tensor_is_rounded_as_if_it_had_a_stack_of_its_own(state_dtype, monkeypatch):
    def trained(most):
        monkeypatch.setattr(held_stacks, "MOST_MIXED", most)
        rng = np.random.default_rng(3)
        params = [Parameter(tensor(rng.standard_normal(n), "float32").bfloat16(), name=f"w{n}") for n in (1030, 1500)]
        shared = {"state_dtype": state_dtype, "stochastic_rounding": True, "master_weights": False}
        optimizer = AdamW(params, 0.1, backend="composite", **shared)
        assert len(optimizer._path.stacks.places) == (1 if most else 2)
        for _ in range(3):
            optimizer(tuple(tensor(rng.standard_normal(p.shape), "float32") for p in params))
        return [x.float().asnumpy() for x in (*params, *optimizer.states)]

    for one, several in zip(trained(0), trained(4)):
        np.testing.assert_array_equal(one, several)


def test_a_graph_finds_the_same_method_at_each_look_up():
    """MindSpore would parse it again, for each stack."""
    optimizer = AdamW([Parameter(tensor([1.0], "float32"), name="w")], 0.1, backend="composite")
    path = optimizer._path
    for cell, name in ((path, "updated"), (path.stacks, "states_of"), (optimizer, "directions")):
        assert getattr(cell, name) is getattr(cell, name)


# Several stacks of one type, of one tensor and of more; dtypes that CPU operators do not stack; gradients of others.
@pytest.mark.parametrize(
    "mode, masters",
    [(ms.GRAPH_MODE, True), (ms.PYNATIVE_MODE, True), (ms.PYNATIVE_MODE, False)],
    ids=["graph", "pynative", "pynative-no_masters"],
)
def test_the_result_does_not_depend_on_the_stacks(mode, masters, monkeypatch):
    ms.set_context(mode=mode)
    dtypes = [ms.float32, ms.bfloat16, ms.float16]

    # What is compiled takes seconds for each tensor, and anew for each number in a stack: there, fewer of both.
    count, stacked = (8, [100]) if mode == ms.GRAPH_MODE else (12, [3, 100])

    def trained(most):
        monkeypatch.setattr(_stacks, "MOST_TENSORS", most)
        rng = np.random.default_rng(1)
        params = []
        for k in range(count):
            shape = ((2, 3), (), (5,), (2, 3))[k % 4]
            weight = Tensor(rng.standard_normal(shape).astype(np.float32)).astype(dtypes[k % 3])
            params.append(Parameter(weight, name=f"w{k}"))
        groups = [{"params": params[::5], "lr": 0.03}, {"params": [p for k, p in enumerate(params) if k % 5]}]
        groups.append({"order_params": params})
        shared = {"grad_clip_norm": 1.0, "loss_scale": 2.0}
        optimizer = Lamb(groups, 0.1, weight_decay=0.1, backend="composite", master_weights=masters, **shared)
        step = Step(optimizer)
        for _ in range(3):
            step(*(tensor(rng.standard_normal(p.shape), ("float32", "float16")[k % 2]) for k, p in enumerate(params)))
        tensors = (*params, *optimizer.states, *optimizer.masters, optimizer.statistics)
        return [x.float().asnumpy() for x in tensors]

    alone = trained(1)
    for most in stacked:
        for one, several in zip(alone, trained(most)):
            np.testing.assert_array_equal(one, several)
