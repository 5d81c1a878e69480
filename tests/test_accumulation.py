"""GradientAccumulation: the optimizer takes one step for the mean of several gradients."""

import mindspore as ms
import numpy as np
import pytest
from cases import MODES, for_each
from harness import Step, numbers, tensor
from mindspore import Parameter, nn
from refusals import refused
from runtime import set_mode

import ms_optim
from ms_optim import AdamOffload, AdamW, GradientAccumulation, Lamb, LocalSteps, Momentum, Muon
from ms_optim.base.entries import EntryError

SHAPES = ((3, 5), (7,), ())
SHARED = {"grad_clip_norm": 1.0, "loss_scale": 4.0, "skip_nonfinite": True}
MADE = {
    "clipped": (AdamW, "float32", SHARED),
    "operators": (AdamW, "bfloat16", {**SHARED, "backend": "composite"}),
    "norms": (Lamb, "float16", {}),
    "on host": (AdamOffload, "float32", {}),
    "matrices": (Muon, "bfloat16", {"state_dtype": "8bit"}),
}


def weights(dtype="float32"):
    rng = np.random.default_rng(0)
    return [Parameter(tensor(rng.standard_normal(s), dtype), name=f"w{i}") for i, s in enumerate(SHAPES)]


def gradients(k, dtype="float32"):
    rng = np.random.default_rng([1, k])
    return tuple(tensor(rng.standard_normal(s), dtype) for s in SHAPES)


def means(first, steps, dtype="float32"):
    """The mean of some gradients: added up in float32, each with its part, in their order."""
    given = [[np.float32(numbers(g)) for g in gradients(first + k, dtype)] for k in range(steps)]
    part = np.float32(1.0 / steps)
    return tuple(
        tensor(np.float32(sum((g * part for g in of_one), np.float32(0))), "float32") for of_one in zip(*given)
    )


def calls(optimizer, mode):
    set_mode(mode)
    return Step(optimizer) if mode == "graph" else lambda *given: optimizer(given)


def held(optimizer):
    named = {**{p.name: p for p in optimizer.parameters}, **optimizer._entries.own()}
    return {name: p.asnumpy().copy() for name, p in named.items()}


def check_same(ours, theirs):
    """All that the inner optimizer holds is the same to the bit."""
    known = held(ours)
    for name, value in held(theirs).items():
        assert known[name].tobytes() == value.tobytes(), name
    np.testing.assert_array_equal(ours.statistics.asnumpy(), theirs.statistics.asnumpy())


@for_each([{"name": name, "mode": mode} for name in MADE for mode in MODES])
def test_a_step_is_that_of_the_mean(name, mode):
    cls, dtype, shared = MADE[name]
    optimizer = GradientAccumulation(cls(weights(dtype), 0.1, **shared), steps=3)
    expected = cls(weights(dtype), 0.1, **shared)
    call = calls(optimizer, mode)
    for k in range(6):
        before = held(optimizer.optimizer)
        assert len(call(*gradients(k, dtype))) == len(SHAPES)
        if (k + 1) % 3:
            assert all((value == before[name]).all() for name, value in held(optimizer.optimizer).items())
    step = calls(expected, mode)
    for k in range(2):
        step(*means(3 * k, 3, dtype))
    assert int(optimizer.global_step.asnumpy()[0]) == 2
    check_same(optimizer, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite_skips_one_step_alone(mode):
    optimizer = GradientAccumulation(AdamW(weights(), 0.1, skip_nonfinite=True), steps=2)
    expected = AdamW(weights(), 0.1, skip_nonfinite=True)
    call = calls(optimizer, mode)
    spoiled = list(gradients(1))
    spoiled[0] = tensor(np.full(SHAPES[0], np.inf), "float32")
    for given in (gradients(0), spoiled, gradients(2), gradients(3)):
        call(*given)
    assert [int(count.asnumpy()[0]) for count in (optimizer.skipped_steps, optimizer.global_step)] == [1, 1]
    calls(expected, "pynative")(*means(2, 2))
    for ours, theirs in zip(optimizer.parameters, expected.parameters):
        assert ours.asnumpy().tobytes() == theirs.asnumpy().tobytes()


def test_sums_of_the_weights_dtype_take_their_memory():
    optimizer = GradientAccumulation(Momentum(weights("bfloat16"), 0.1), steps=2, sum_dtype="weight")
    assert {p.dtype for p in optimizer.accumulated} == {ms.bfloat16}
    assert "steps=2, sums (weight) 46 bytes" in str(optimizer)
    other = GradientAccumulation(Momentum(weights("bfloat16"), 0.1), steps=2)
    for k in range(2):
        optimizer(gradients(k, "bfloat16"))
        other(gradients(k, "bfloat16"))
    for ours, theirs in zip(optimizer.accumulated, other.accumulated):
        np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=2.0**-6)


@pytest.mark.parametrize("how", ["state_dict", "save"])
def test_a_run_goes_on_in_the_middle_of_a_step(how, tmp_path):
    one, other = (GradientAccumulation(AdamW(weights(), 0.1), steps=4) for _ in range(2))
    for k in range(6):
        one(gradients(k))
    if how == "save":
        ms_optim.save(tmp_path / "run.safetensors", optimizer=one)
        ms_optim.load(tmp_path / "run.safetensors", optimizer=other)
    else:
        saved = one.state_dict()
        assert "accumulated.w0" in saved
        without = {name: value for name, value in saved.items() if not name.startswith("accumulated.")}
        refused(EntryError, "must have the entry 'accumulated.w0'", other.load_state_dict, without)
        for p in other.parameters:
            p.set_data(saved[p.name])
        other.load_state_dict(saved)
    for k in range(6, 8):
        one(gradients(k))
        other(gradients(k))
    assert int(other.global_step.asnumpy()[0]) == 2
    check_same(other, one)


@pytest.mark.parametrize("place", ["before adding", "before the step", "after the step"])
def test_an_interrupt_loses_and_repeats_nothing(place, monkeypatch):
    optimizer, expected = (GradientAccumulation(AdamW(weights(), 0.1), steps=2) for _ in range(2))
    for each in (optimizer, expected):
        each(gradients(0))
    inner = type(optimizer.optimizer)

    def interrupt(*given):
        if place == "after the step":
            call(*given)
        raise KeyboardInterrupt

    call = inner.__call__
    with monkeypatch.context() as patched:
        if place == "before adding":
            patched.setitem(optimizer.__dict__, "_add", interrupt)
        else:
            patched.setattr(inner, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer(gradients(1))
    if place == "before adding":
        optimizer(gradients(1))
    expected(gradients(1))
    assert int(optimizer.state_dict()["global_step"].asnumpy()[0]) == 1  # which completes the step
    check_same(optimizer, expected)


def test_local_steps_count_the_steps():
    optimizer = GradientAccumulation(LocalSteps(AdamW(weights(), 0.1), every=2), steps=2)
    for k in range(8):
        optimizer(gradients(k))
    assert [int(n.asnumpy()[0]) for n in (optimizer.local_step, optimizer.accumulated_count)] == [4, 0]


@pytest.mark.parametrize("mode", MODES)
def test_one_gradient_for_a_step_is_the_optimizer_as_it_is(mode):
    optimizer, expected = GradientAccumulation(AdamW(weights(), 0.1), steps=1), AdamW(weights(), 0.1)
    for each in (optimizer, expected):
        calls(each, mode)(*gradients(0))
    check_same(optimizer, expected)
    assert not optimizer.accumulated  # no memory for sums


def test_a_model_trains_with_it():
    net = nn.Dense(4, 1)
    optimizer = GradientAccumulation(AdamW(net.trainable_params(), 0.1), steps=2)
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((8, 4)).astype(np.float32), np.ones((8, 1), np.float32)) for _ in range(6)]
    source = ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)
    monitor = ms_optim.OptimizerMonitor(verbose=False)
    ms.Model(net, nn.MSELoss(), optimizer).train(1, source, callbacks=[monitor], dataset_sink_mode=False)
    assert int(optimizer.global_step.asnumpy()[0]) == 3
    assert "GradientAccumulation(AdamW)" in str(ms_optim.training.readings.read(optimizer).optimizer)


def test_what_it_refuses():
    attached = AdamW(weights(), 0.1)
    attached.attach()
    refused(RuntimeError, "updated inside the backward pass", GradientAccumulation, attached)
    attached.detach()
    optimizer = GradientAccumulation(AdamW(weights(), 0.1), steps=2)
    refused(RuntimeError, "gradients cannot be released", optimizer.attach)
    refused(TypeError, "'optimizer' must be an optimizer of ms_optim", GradientAccumulation, optimizer)
    refused(TypeError, "'optimizer' must be an optimizer of ms_optim", GradientAccumulation, nn.Adam(weights()))
    refused(ValueError, "'steps' must be", GradientAccumulation, AdamW(weights()), 0)
    refused(ValueError, "'sum_dtype' must be one of", lambda: GradientAccumulation(AdamW(weights()), sum_dtype="half"))
    refused(AttributeError, "'steps' cannot be set after", setattr, optimizer, "steps", 3)
    refused(AttributeError, "'eps' cannot be set after", setattr, optimizer, "eps", 0.1)
    longer = GradientAccumulation(AdamW(weights(), 0.1), steps=4)
    for k in range(3):
        longer(gradients(k))
    refused(
        ValueError,
        "sums of less than 2 gradients.*'accumulated_count' is 3",
        optimizer.load_state_dict,
        longer.state_dict(),
    )
    refused(ValueError, "must have the parameter's shape", optimizer, gradients(0)[::-1])
    assert int(optimizer.accumulated_count.asnumpy()[0]) == 0
