"""What users' programs do around a step: many parameters, modes in any order, views, changed parameters, hooks."""

import mindspore as ms
import numpy as np
import pytest
from cases import ANY_SHAPE, MODES_IN_TURN, every_case_and_path
from harness import Step, tensor
from mindspore import Parameter, Tensor, nn, ops
from refusals import refused
from runtime import set_mode

from ms_optim import AdamW


def parameter(array, name="w"):
    return Parameter(Tensor(np.asarray(array, np.float32)), name=name)


def made(case, params, **shared):
    return case.optimizer(params, case.learning_rate, weight_decay=0.1, **shared)


def gradients_like(params, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(tensor(rng.standard_normal(p.shape), "float32") for p in params)


# ---- Many parameters ----------------------------------------------------------------------------------------------


@pytest.fixture
def shallow_calls():
    """Let graphs nest calls no deeper than some loops over a few parameters, and far less than one over many."""
    ms.set_context(mode=ms.GRAPH_MODE, max_call_depth=150)
    yield
    ms.set_context(max_call_depth=1000)


# The composite path has one step for all rules but DGCMomentum's.
@pytest.mark.parametrize(
    "case, backend",
    [pytest.param(c, b, id=f"{c.name}-{b}") for c in ANY_SHAPE for b in ("aot", "composite")
     if b == "aot" or c.name in ("AdamW", "DGCMomentum")],
)  # fmt: skip
def test_the_depth_of_a_graph_does_not_grow_with_the_parameters(case, backend, shallow_calls):
    results = []
    for graph in (True, False):
        params = [parameter(np.full((2, 2) if k % 2 else 2, k + 1.0), f"w{k}") for k in range(80)]
        # Groups of their own rates, and rates and decays beside each other.
        groups = [{"params": params[::3], "lr": 0.03}, {"params": params[1::3], "weight_decay": 0.0}]
        groups += [{"params": params[2::3]}, {"order_params": params}]
        optimizer = made(case, groups, backend=backend)
        gradients = gradients_like(params)
        if graph:
            Step(optimizer)(*gradients)
        else:
            ms.set_context(mode=ms.PYNATIVE_MODE)
            optimizer(gradients)
        results.append([x.asnumpy() for x in (*params, *optimizer.states, optimizer.statistics)])
    for in_graph, in_python in zip(*results):
        np.testing.assert_allclose(in_graph, in_python, rtol=2e-6, atol=1e-12)


# ---- Modes, shapes and loads in any order -------------------------------------------------------------------------


@every_case_and_path(cases=ANY_SHAPE)
def test_a_step_from_python_before_a_function_is_compiled(case, backend):
    weight, other = parameter(np.ones(20)), parameter(np.ones(20))
    optimizer, expected = made(case, [weight], backend=backend), made(case, [other], backend=backend)
    gradients = gradients_like([weight])

    @ms.jit
    def step(g):
        return optimizer((g,))

    for k in range(4):
        if k in (1, 3):
            step(*gradients)
        else:
            optimizer(gradients)
        expected(gradients)
    np.testing.assert_array_equal(weight.asnumpy(), other.asnumpy())
    assert int(optimizer.global_step.asnumpy()[0]) == 4


def test_a_batch_of_another_size_after_a_step_from_python():
    net = nn.Dense(4, 3)
    optimizer = AdamW(net.trainable_params(), 0.01)
    train = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer)
    for size in (2, None, 5, None, 3):
        if size is None:
            ms.set_context(mode=ms.PYNATIVE_MODE)
            optimizer(gradients_like(net.trainable_params()))
        else:
            ms.set_context(mode=ms.GRAPH_MODE)
            train(Tensor(np.ones((size, 4), np.float32)), Tensor(np.zeros(size, np.int32)))
    assert int(optimizer.global_step.asnumpy()[0]) == 5


def test_loading_after_both_a_step_from_python_and_a_compiled_one(backend):
    weight = parameter(np.ones(6))
    optimizer = AdamW([weight], 0.1, backend=backend)
    gradients = gradients_like([weight])

    @ms.jit
    def step(g):
        return optimizer((g,))

    optimizer(gradients)
    step(*gradients)
    kept, at = optimizer.state_dict(), weight.asnumpy().copy()
    step(*gradients)
    expected = [x.asnumpy().copy() for x in (weight, *optimizer.states, optimizer.global_step)]
    optimizer.load_state_dict(kept)
    ops.assign(weight, Tensor(at))
    step(*gradients)
    for p, value in zip((weight, *optimizer.states, optimizer.global_step), expected):
        np.testing.assert_array_equal(p.asnumpy(), value)


@every_case_and_path(cases=ANY_SHAPE, how=["set_data", "assign"], mode=MODES_IN_TURN)
def test_what_is_set_between_two_steps_counts(case, how, backend, mode):
    weight, other = parameter(np.ones(20)), parameter(np.ones(20))
    optimizer, expected = made(case, [weight], backend=backend), made(case, [other], backend=backend)
    gradients, call = gradients_like([weight]), Step(optimizer)
    call(*gradients)
    # The other one has the same from memory that nothing was compiled for.
    ms.set_context(mode=ms.PYNATIVE_MODE)
    expected(gradients)
    value = np.linspace(1.0, 2.0, 20, dtype=np.float32)
    for what in ("weight", "first state", "last state"):
        for o, w in ((optimizer, weight), (expected, other)):
            p = {"weight": w, "first state": o.states[0], "last state": o.states[-1]}[what]
            p.set_data(Tensor(value)) if how == "set_data" else ops.assign(p, Tensor(value))
        set_mode(mode)
        call(*gradients)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        expected(gradients)
        for a, b in zip((weight, *optimizer.states), (other, *expected.states)):
            np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=2e-6, atol=1e-12, err_msg=what)


# ---- Views --------------------------------------------------------------------------------------------------------

SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
VIEWS = {
    "transposed": lambda: Tensor(SQUARE).T,
    "rows": lambda: Tensor(np.arange(64, dtype=np.float32).reshape(16, 4))[4:8],
    "columns": lambda: Tensor(np.arange(64, dtype=np.float32).reshape(4, 16))[:, 4:8],
    "broadcast": lambda: ops.broadcast_to(Tensor(np.arange(4, dtype=np.float32)), (4, 4)),
}


@pytest.mark.parametrize("backend, mode", [("aot", "graph"), ("aot", "pynative"), ("composite", "pynative")])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_weight_that_is_a_view(view, when, backend, mode):
    set_mode(mode)
    results = []
    for as_view in (True, False):
        value = VIEWS[view]() if as_view else Tensor(VIEWS[view]().asnumpy().copy())
        weight = parameter(np.zeros((4, 4)))
        if when == "before":
            weight.set_data(value)
        optimizer = AdamW([weight], 0.1, weight_decay=0.5, backend=backend)
        if when == "after":
            weight.set_data(value)
        call = Step(optimizer) if mode == "graph" else lambda g, o=optimizer: o((g,))
        for k in range(2):
            call(*gradients_like([weight], k))
        results.append(weight.asnumpy())
    np.testing.assert_array_equal(*results)


def test_a_view_of_a_parameter_itself_between_two_steps():
    weight = parameter(SQUARE)
    optimizer = AdamW([weight], 0.1)
    optimizer(gradients_like([weight]))
    expected = parameter(weight.asnumpy().T.copy())
    state = [s.asnumpy() for s in optimizer.states]
    weight.set_data(weight.T)
    other = AdamW([expected], 0.1)
    other.load_state_dict({**other.state_dict(), **{s.name: Tensor(x) for s, x in zip(optimizer.states, state)},
                           "global_step": optimizer.global_step})  # fmt: skip
    optimizer(gradients_like([weight], 1))
    other(gradients_like([weight], 1))
    np.testing.assert_array_equal(weight.asnumpy(), expected.asnumpy())


# ---- Parameters that change after construction --------------------------------------------------------------------

CHANGES = {
    "set_dtype": lambda p: p.set_dtype(ms.float16),
    "other data": lambda p: p.set_data(Tensor(np.ones((4, 4), np.float16))),
    "fewer elements": lambda p: p.set_data(Tensor(np.ones(3, np.float32)), slice_shape=True),
    "assign_value": lambda p: p.assign_value(Tensor(np.ones(3, np.float32))),
}


@pytest.mark.parametrize("what", ["weight", "state", "statistics"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changed_is_named(change, what, backend):
    weight, other = parameter(np.ones((4, 4))), parameter(np.ones(5), "other")
    optimizer = AdamW([other, weight], 0.1, backend=backend)
    gradients = gradients_like([other, weight])
    changed = {"weight": weight, "state": optimizer.states[1], "statistics": optimizer.statistics}[what]
    dtype, size = changed.dtype, changed.size
    CHANGES[change](changed)
    if changed.dtype == dtype and changed.size == size:
        optimizer(gradients)  # MindSpore kept the dtype, and nothing has changed
        return
    before = other.asnumpy().copy()
    refused(ValueError, f"'{changed.name}' must stay as it was", lambda: optimizer(gradients))
    np.testing.assert_array_equal(other.asnumpy(), before)
    assert int(optimizer.global_step.asnumpy()[0]) == 0


@pytest.mark.skipif(not hasattr(nn.Cell, "to"), reason="this MindSpore converts no networks")
def test_a_network_that_is_converted_after_the_optimizer_was_made():
    net = nn.SequentialCell(nn.Dense(4, 3), nn.Dense(3, 2))
    optimizer = AdamW(net.trainable_params(), 0.1)
    net.to(ms.float16)
    gradients = tuple(tensor(np.ones(p.shape), "float16") for p in net.trainable_params())
    refused(ValueError, "Change parameters before the optimizer is made", lambda: optimizer(gradients))


# ---- Hooks, and construct -----------------------------------------------------------------------------------------


def test_hooks_are_called(backend):
    weight = parameter(np.ones(6))
    optimizer = AdamW([weight], 0.1, backend=backend)
    seen = []
    before = optimizer.register_forward_pre_hook(lambda cell, inputs: seen.append(("before", len(inputs[0]))))
    after = optimizer.register_forward_hook(lambda cell, inputs, outputs: seen.append(("after", outputs)))
    optimizer(gradients_like([weight]))
    assert seen == [("before", 1), ("after", (True,))]
    assert int(optimizer.global_step.asnumpy()[0]) == 1
    before.remove()
    after.remove()
    optimizer(gradients_like([weight]))
    assert len(seen) == 2


@every_case_and_path(cases=ANY_SHAPE, mode=MODES_IN_TURN)
def test_construct_called_from_python(case, backend, mode):
    weight, other = parameter(np.ones(20)), parameter(np.ones(20))
    optimizer, expected = made(case, [weight], backend=backend), made(case, [other], backend=backend)
    gradients = gradients_like([weight])
    for _ in range(2):
        optimizer.construct(gradients)
        expected(gradients)
    np.testing.assert_allclose(weight.asnumpy(), other.asnumpy(), rtol=1e-6)
    assert int(optimizer.global_step.asnumpy()[0]) == 2


# ---- Wrong gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot", "composite"])
@pytest.mark.parametrize("wrong", [None, 3.0, np.zeros(2, np.float32)], ids=["None", "number", "array"])
def test_what_is_no_gradient_is_refused_by_its_place(backend, wrong):
    params = [parameter(np.ones(2), "a"), parameter(np.ones(2), "b")]
    optimizer = AdamW(params, 0.1, backend=backend)
    whole = tensor(np.ones(2), "float32")
    refused(TypeError, r"'gradients\[1\]' must be a Tensor", lambda: optimizer((whole, wrong)))
    refused(TypeError, "'gradients' must be a tuple of Tensors", lambda: optimizer(whole))
    np.testing.assert_array_equal(params[0].asnumpy(), 1.0)
