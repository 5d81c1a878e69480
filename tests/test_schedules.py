"""Schedules are what their formulas say, in both modes, alone and inside an optimizer."""

import itertools
import re

import mindspore as ms
import numpy as np
import pytest
from cases import MODES
from harness import Step, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, nn, ops
from refusals import refused

import ms_optim
from ms_optim import (
    AdamW,
    ConstantWeightDecay,
    CosineWeightDecay,
    ExponentialWeightDecay,
    Lamb,
    LinearWeightDecay,
    PiecewiseConstantWeightDecay,
    PolynomialWeightDecay,
    PowerCoolLR,
    WarmUpHoldDecayLR,
    WarmUpWeightDecay,
    WeightDecaySchedule,
)

# One rounding to float32; the references and the schedules themselves compute in float64.
TOLERANCE = 1.01 * 2.0**-24
STEPS = sorted({0, 1, 2, 10**5, 10**6} | {b + d for b in (3, 5, 7, 10, 20, 100, 1000) for d in (-1, 0, 1)})


# ---- References, in float64 NumPy: the formulas as they stand in MindSpore's documentation and in the paper ----------


def polynomial(t, first, end, steps, power, update=False):
    total = steps * max(np.ceil(t / steps), 1.0) if update else steps
    return end + (first - end) * (1.0 - min(t, total) / total) ** np.float64(power)


def cosine(t, low, high, steps):
    # As a square, for the sum 1 + cos would lose the reference's own digits near the end.
    return low + (high - low) * np.cos(0.5 * np.pi * min(t, steps) / steps) ** 2 if t < steps else low


def exponential(t, first, rate, steps, stair=False):
    return first * np.float64(rate) ** (np.floor(t / steps) if stair else t / steps)


def piecewise(t, milestone, values):
    for end, value in zip(milestone, values):
        if t < end:
            return value
    return values[-1]


def warm_up(t, peak, steps):
    return peak * min(t, steps) / steps


def warm_up_hold_decay(t, peak, warmup, hold=0, total=None, end=0.0, power=1.0, decay="polynomial", start=0.0):
    if t < warmup:
        return (start * (warmup - t) + peak * t) / warmup
    if t < warmup + hold or decay == "constant":
        return peak
    if t < total and decay == "1-sqrt":
        # In more digits, for the difference would lose the reference's own near the end.
        return end + (peak - end) * float(1 - np.sqrt(np.longdouble(t - warmup - hold) / (total - warmup - hold)))
    if t < total and decay == "cosine":
        return end + (peak - end) * np.sin(np.pi / 2 * (total - t) / (total - warmup - hold)) ** 2
    if t < total:
        return end + (peak - end) * ((total - t) / (total - warmup - hold)) ** np.float64(power)
    return end


def power_cool(t, peak, coefficient, total, warmup=0, power=1.2):
    flat = peak * t / warmup if t < warmup else peak
    return min(flat, coefficient * (total - t) ** np.float64(power)) if t < total else 0.0


SCHEDULES = [
    (ConstantWeightDecay, lambda t, x: x, [(0.1,), (0,)]),
    (
        LinearWeightDecay,
        lambda t, x, y, n: polynomial(t, x, y, n, 1),
        [(0.05, 0.0, 10), (0.04, 0.4, 1000), (1, 0, 7), (0.1, 0.01, 1)],
    ),
    (CosineWeightDecay, cosine, [(0.01, 0.1, 10), (0.0, 0.3, 1000), (0, 1, 10**6), (0.0, 0.1, 1)]),
    (
        PolynomialWeightDecay,
        polynomial,
        [
            (0.1, 0.01, 10, 0.5),
            (0.1, 0.0, 1000, 2.0),
            (0.0, 0.3, 7, 3),
            (0.3, 0.01, 10, 0.9, True),
            (0.3, 0.0, 1, 2.0, True),
        ],
    ),
    (
        ExponentialWeightDecay,
        exponential,
        [(0.1, 0.9, 10), (0.1, 0.9, 10, True), (0.3, 0.5, 100000), (0.01, 1.1, 10**5), (1, 0.1, 7, True)],
    ),
    (
        PiecewiseConstantWeightDecay,
        piecewise,
        [([3, 10, 20], [0.1, 0.05, 0.2]), ((5,), (0.3,)), ([3, 3, 7], [0.1, 0.2, 0]), ([1, 10**6], [0.7, 0.1])],
    ),
    (WarmUpWeightDecay, warm_up, [(0.1, 10), (0.3, 1000), (1, 1)]),
    (
        WarmUpHoldDecayLR,
        warm_up_hold_decay,
        [
            (0.1, 3, 7, 20),
            (0.1, 0, 0, 10),
            (0.3, 10, 0, 1000, 0.01),
            (0.00675, 3, 4, 100, 0.0, 2.0),
            (0.1, 0, 5, 7, 0.2, 0.5),
            (0.3, 5, 0, 6),
            (0.1, 3, 7, 20, 0.0, 1.0, "1-sqrt"),
            (0.3, 0, 0, 10**6, 0.01, 1.0, "1-sqrt"),
            (0.1, 0, 5, 1001, 0.2, 1, "1-sqrt"),
            (0.1, 3, 7, 20, 0.01, 1.0, "cosine"),
            (0.3, 0, 0, 10**6, 0.0, 1, "cosine"),
            (0.1, 100, 0, 1000, 0.01, 1.0, "cosine", 0.02),
            (1, 7, 13, 101, 0.01, 2, "polynomial", 1),
            (0.3, 10, 0, None, 0.0, 1.0, "constant"),
            (0.3, 0, 3, 20, 0, 1, "constant"),
            (0.7, 100, 0, 20, 0.0, 1.0, "constant", 1e-4),
        ],
    ),
    (
        PowerCoolLR,
        power_cool,
        [
            (0.1, 0.01, 20, 3),
            (0.3, 1e-5, 10**6),
            (0.1, 0.03, 11, 0, 0.5),
            (0.2, 0.01, 7, 7, 3),
            (0.1, 1e-4, 101, 20, 2),
        ],
    ),
]
INSTANCES = [(cls, reference, args) for cls, reference, variants in SCHEDULES for args in variants]
every_schedule = pytest.mark.parametrize(
    "cls, reference, args", INSTANCES, ids=[f"{cls.__name__}{args}" for cls, _, args in INSTANCES]
)
FIRST = [(cls, reference, variants[0]) for cls, reference, variants in SCHEDULES]


def in_turn(instances):
    """Run a test for each of them in one mode; these take turns."""
    rows = [(*instance, mode) for instance, mode in zip(instances, itertools.cycle(MODES))]
    ids = [f"{cls.__name__}{args}-{mode}" for cls, _, args, mode in rows]
    return pytest.mark.parametrize("cls, reference, args, mode", rows, ids=ids, indirect=["mode"])


def check(schedule, reference, args, steps=STEPS, form=lambda t: ms.Tensor([t], ms.int32)):
    for t in steps:
        value = schedule(form(t))
        assert (value.dtype, value.shape) == (ms.float32, ())
        with np.errstate(under="ignore", over="ignore"):
            expected = float(reference(t, *args))
        # Below the smallest normal number, float32 keeps fewer digits, or none.
        near = abs(float(value.asnumpy()) - expected) <= max(TOLERANCE * abs(expected), 2.0**-126)
        assert near or float(value.asnumpy()) == expected == np.inf, t


@in_turn(INSTANCES)
def test_values(cls, reference, args, mode):
    check(cls(*args), reference, args)


@in_turn(FIRST)
def test_forms_of_the_step(cls, reference, args, mode):
    """Shape () as well as (1,), a Parameter as the optimizer's own, and an int."""
    schedule = cls(*args)
    check(schedule, reference, args, [7], lambda t: ms.Tensor(t, ms.int32))
    check(schedule, reference, args, [7], lambda t: Parameter(ms.Tensor([t], ms.int32), name="global_step"))
    check(schedule, reference, args, [7], lambda t: t)


@every_schedule
def test_the_last_steps_that_int32_counts(cls, reference, args):
    check(cls(*args), reference, args, [2**24 + 1, 2**31 - 1])


def test_there_is_a_reference_for_every_schedule():
    public = {getattr(ms_optim, name) for name in ms_optim.__all__}
    kinds = (WeightDecaySchedule, nn.learning_rate_schedule.LearningRateSchedule)
    schedules = {x for x in public if isinstance(x, type) and issubclass(x, kinds)}
    assert schedules == {cls for cls, _, _ in SCHEDULES} | {WeightDecaySchedule}


# ---- Beside MindSpore's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (CosineWeightDecay(0.01, 0.1, 10), nn.CosineDecayLR(0.01, 0.1, 10)),
        (ExponentialWeightDecay(0.1, 0.9, 7), nn.ExponentialDecayLR(0.1, 0.9, 7)),
        (ExponentialWeightDecay(0.1, 0.9, 7, is_stair=True), nn.ExponentialDecayLR(0.1, 0.9, 7, is_stair=True)),
        (PolynomialWeightDecay(0.1, 0.01, 10, 0.5), nn.PolynomialDecayLR(0.1, 0.01, 10, 0.5)),
        (PolynomialWeightDecay(0.1, 0.01, 10, 2.0, True), nn.PolynomialDecayLR(0.1, 0.01, 10, 2.0, True)),
        (WarmUpWeightDecay(0.1, 10), nn.WarmUpLR(0.1, 10)),
        (WarmUpHoldDecayLR(0.1, 0, 0, 10, 0.01, 2.0), nn.PolynomialDecayLR(0.1, 0.01, 10, 2.0)),
        (WarmUpHoldDecayLR(0.1, 0, 0, 10, 0.01, decay="cosine"), nn.CosineDecayLR(0.01, 0.1, 10)),
        (WarmUpHoldDecayLR(0.1, 10, decay="constant"), nn.WarmUpLR(0.1, 10)),
        (PowerCoolLR(0.1, 1e-3, 10, power=2.0), nn.PolynomialDecayLR(0.1, 1e-30, 10, 2.0)),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_agrees_with_mindspore(ours, theirs):
    for t in range(35):
        step = ms.Tensor(t, ms.int32)
        # Theirs computes in float32, and the sum 1 + cos, or 1 - p, loses digits.
        np.testing.assert_allclose(ours(step).asnumpy(), theirs(step).asnumpy(), rtol=1e-5, atol=1e-7)


def test_piecewise_agrees_with_mindspore():
    milestone, values = [2, 5, 5, 9], [0.1, 0.05, 0.7, 0.01]
    ours = PiecewiseConstantWeightDecay(milestone, values)
    theirs = nn.piecewise_constant_lr(milestone, values)
    assert [float(ours(t)) for t in range(9)] == [float(np.float32(x)) for x in theirs]


# ---- Any arguments ---------------------------------------------------------------------------------------------------

decay = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))
count = st.integers(1, 10**5)


@settings(deadline=None, max_examples=25)
@given(a=decay, b=decay, n=count, power=st.floats(0.1, 4.0), t=st.integers(0, 10**6))
def test_any_polynomial(a, b, n, power, t):
    value = float(PolynomialWeightDecay(a, b, n, power)(t))
    # A sum may cancel: its rounding is relative to the terms.
    assert value == pytest.approx(polynomial(t, a, b, n, power), rel=TOLERANCE, abs=1e-14 * max(a, b))


@settings(deadline=None, max_examples=25)
@given(low=decay, rise=st.floats(1e-3, 10.0), n=count, t=st.integers(0, 2 * 10**5))
def test_any_cosine(low, rise, n, t):
    value = float(CosineWeightDecay(low, low + rise, n)(t))
    assert value == pytest.approx(cosine(t, low, low + rise, n), rel=TOLERANCE, abs=1e-14 * (low + rise))


@settings(deadline=None, max_examples=25)
@given(
    peak=st.floats(1e-6, 10.0),
    end=decay,
    started=st.floats(0.0, 1.0),
    phases=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5), count),
    t=st.integers(0, 4 * 10**5),
)
def test_any_warm_up_hold_decay(peak, end, started, phases, t):
    warmup, hold, total = phases[0], phases[1], sum(phases)
    start = peak * started if warmup else 0.0
    value = float(WarmUpHoldDecayLR(peak, warmup, hold, total, end, start_learning_rate=start)(t))
    expected = warm_up_hold_decay(t, peak, warmup, hold, total, end, start=start)
    assert value == pytest.approx(expected, rel=TOLERANCE, abs=1e-14 * max(peak, end))


# ---- In an optimizer -------------------------------------------------------------------------------------------------


def steps_of(optimizer, mode, gradients):
    call = Step(optimizer) if mode == "graph" else lambda *given: optimizer(given)
    for _ in range(5):
        call(*gradients)


def decayed(first, rates, decays):
    """Return weights that only the decay of AdamW has moved: gradients of 0 leave the rest at 0."""
    weight = np.float64(first)
    for rate, value in zip(rates, decays):
        weight *= 1.0 - rate * value
    return weight


@in_turn(FIRST[::-1])
def test_drives_an_optimizer(cls, reference, args, mode):
    """AdamW is given the decay, or, by the learning rate, a fixed decay's strength; the step is counted from 0."""
    w = Parameter(tensor([2.0, -3.0], "float32"), name="w")
    values = [float(reference(t, *args)) for t in range(5)]
    if issubclass(cls, nn.learning_rate_schedule.LearningRateSchedule):
        optimizer = AdamW([w], cls(*args), weight_decay=0.5)
        rates, decays = values, [0.5] * 5
    else:
        optimizer = AdamW([w], 0.1, weight_decay=cls(*args))
        rates, decays = [0.1] * 5, values
    steps_of(optimizer, mode, (tensor([0.0, 0.0], "float32"),))
    np.testing.assert_allclose(w.asnumpy(), decayed([2.0, -3.0], rates, decays), rtol=1e-6)


def test_a_decay_per_group(mode, backend):
    arguments = [(0.5, 0.0, 4), (0.1, 0.9, 10)]
    params = [Parameter(tensor([2.0, -3.0], "float32"), name=f"w{i}") for i in range(4)]
    schedule = LinearWeightDecay(*arguments[0])
    groups = [
        {"params": [params[0], params[3]], "weight_decay": schedule},
        {"params": [params[1]], "weight_decay": CosineWeightDecay(*arguments[1])},
        {"params": [params[2]]},
        {"order_params": params},
    ]
    optimizer = AdamW(groups, 0.1, weight_decay=WarmUpWeightDecay(0.3, 4), backend=backend)
    steps_of(optimizer, mode, (tensor([0.0, 0.0], "float32"),) * 4)
    expected = [
        [polynomial(t, *arguments[0], 1) for t in range(5)],
        [cosine(t, *arguments[1]) for t in range(5)],
        [warm_up(t, 0.3, 4) for t in range(5)],
    ]
    for p, decays in zip(params, [*expected, expected[0]]):
        np.testing.assert_allclose(p.asnumpy(), decayed([2.0, -3.0], [0.1] * 5, decays), rtol=1e-6, err_msg=p.name)


def test_has_no_state_and_resumes(mode, tmp_path):
    """A checkpoint holds nothing of a schedule; the step count alone brings it back to where it was."""

    def make():
        w = Parameter(tensor([2.0, -3.0], "float32"), name="w")
        return AdamW([w], WarmUpHoldDecayLR(0.1, 2, 2, 20), weight_decay=ExponentialWeightDecay(0.5, 0.5, 2))

    through, resumed = make(), make()
    names = {p.name for p in through.get_parameters()}
    assert names == {
        p.name for p in AdamW([Parameter(tensor([2.0, -3.0], "float32"), name="w")], 0.1).get_parameters()
    } - {"learning_rate"}
    gradient = (tensor([0.1, -0.2], "float32"),)
    steps_of(through, mode, gradient)
    ms.save_checkpoint(through, str(tmp_path / "state.ckpt"))
    ms.load_param_into_net(resumed, ms.load_checkpoint(str(tmp_path / "state.ckpt")))
    for optimizer in (through, resumed):
        steps_of(optimizer, mode, gradient)
    np.testing.assert_array_equal(through.parameters[0].asnumpy(), resumed.parameters[0].asnumpy())


class Inverse(WeightDecaySchedule):
    def construct(self, global_step):
        return 0.5 / (1 + ops.cast(global_step, ms.float32))


def test_a_schedule_of_ones_own(mode):
    w = Parameter(tensor([2.0, -3.0], "float32"), name="w")
    steps_of(AdamW([w], 0.1, weight_decay=Inverse()), mode, (tensor([0.0, 0.0], "float32"),))
    expected = decayed([2.0, -3.0], [0.1] * 5, [0.5 / (1 + t) for t in range(5)])
    np.testing.assert_allclose(w.asnumpy(), expected, rtol=1e-6)


def test_in_mindspores_own_optimizer():
    """Momentum adds decay times weight to a gradient of 0."""
    w = Parameter(tensor([2.0, -3.0], "float32"), name="w")
    optimizer = nn.Momentum([w], WarmUpHoldDecayLR(0.1, 0, 9, 10), 0.0001, weight_decay=WarmUpWeightDecay(0.4, 4))
    for _ in range(2):
        optimizer((tensor([0.0, 0.0], "float32"),))
    np.testing.assert_allclose(w.asnumpy(), np.array([2.0, -3.0]) * (1 - 0.1 * 0.1), rtol=1e-5)


def test_one_schedule_serves_two_optimizers():
    """Each asks it for its own step: Lamb, which begins later, for the decays that AdamW began with."""
    schedule = LinearWeightDecay(0.5, 0.0, 4)
    adamw, lamb = (
        cls([Parameter(tensor([2.0], "float32"), name="w")], 0.1, weight_decay=schedule) for cls in (AdamW, Lamb)
    )
    taken = []
    for optimizer in (adamw, adamw, lamb):
        before = optimizer.parameters[0].asnumpy().copy()
        optimizer((tensor([0.0], "float32"),))
        taken.append(float(1 - optimizer.parameters[0].asnumpy()[0] / before[0]))
    # A gradient of 0 leaves the decay: AdamW shrinks by rate times decay, LAMB by the rate, as its ratio is 1 / decay.
    np.testing.assert_allclose(taken, [0.1 * 0.5, 0.1 * 0.375, 0.1], rtol=1e-5)
    assert [int(o.global_step.asnumpy()[0]) for o in (adamw, lamb)] == [2, 1]


# ---- Wrong arguments -------------------------------------------------------------------------------------------------


BAD_DECAYS = [(TypeError, "0.1"), (TypeError, None), (TypeError, True), (ValueError, -0.1), (ValueError, np.inf)]
BAD_COUNTS = [(TypeError, 10.0), (TypeError, "10"), (TypeError, True), (ValueError, -1), (ValueError, 2**31)]
ARGUMENTS = {
    ConstantWeightDecay: ({"weight_decay": 0.1}, BAD_DECAYS, ["weight_decay"], []),
    LinearWeightDecay: (
        {"weight_decay": 0.1, "end_weight_decay": 0.0, "decay_steps": 10},
        BAD_DECAYS,
        ["weight_decay", "end_weight_decay"],
        ["decay_steps"],
    ),
    CosineWeightDecay: (
        {"min_weight_decay": 0.0, "max_weight_decay": 0.1, "decay_steps": 10},
        BAD_DECAYS,
        ["min_weight_decay", "max_weight_decay"],
        ["decay_steps"],
    ),
    PolynomialWeightDecay: (
        {"weight_decay": 0.1, "end_weight_decay": 0.0, "decay_steps": 10, "power": 1.0},
        BAD_DECAYS,
        ["weight_decay", "end_weight_decay", "power"],
        ["decay_steps"],
    ),
    ExponentialWeightDecay: (
        {"weight_decay": 0.1, "decay_rate": 0.9, "decay_steps": 10},
        BAD_DECAYS,
        ["weight_decay", "decay_rate"],
        ["decay_steps"],
    ),
    WarmUpWeightDecay: (
        {"weight_decay": 0.1, "warmup_steps": 10},
        BAD_DECAYS,
        ["weight_decay"],
        ["warmup_steps"],
    ),
    WarmUpHoldDecayLR: (
        {"learning_rate": 0.1, "warmup_steps": 1, "hold_steps": 1, "total_steps": 10, "end_learning_rate": 0.0},
        BAD_DECAYS,
        ["learning_rate", "end_learning_rate", "power", "start_learning_rate"],
        ["warmup_steps", "hold_steps", "total_steps"],
    ),
    PowerCoolLR: (
        {"learning_rate": 0.1, "coefficient": 0.01, "total_steps": 10, "warmup_steps": 1},
        BAD_DECAYS,
        ["learning_rate", "coefficient", "power"],
        ["total_steps", "warmup_steps"],
    ),
}


@pytest.mark.parametrize("cls", ARGUMENTS, ids=lambda cls: cls.__name__)
def test_numbers_and_counts_are_checked(cls):
    right, bad_numbers, numbers, counts = ARGUMENTS[cls]
    cls(**right)
    for names, bad in ((numbers, bad_numbers), (counts, BAD_COUNTS)):
        for name in names:
            for error, value in bad:
                words = (
                    f"^For '{cls.__name__}', the argument '{name}' must be .*, but got {re.escape(repr(value))} of type"
                )
                refused(error, words, lambda name=name, value=value: cls(**{**right, name: value}))


@pytest.mark.parametrize(
    "error, match, make",
    [
        (ValueError, "'decay_steps' must be an int, 1 or greater", lambda: LinearWeightDecay(0.1, 0.0, 0)),
        (ValueError, "'decay_steps' must be an int, 1 or greater", lambda: CosineWeightDecay(0.0, 0.1, 0)),
        (ValueError, "'decay_steps' must be an int, 1 or greater", lambda: PolynomialWeightDecay(0.1, 0.0, 0, 1.0)),
        (ValueError, "'decay_steps' must be an int, 1 or greater", lambda: ExponentialWeightDecay(0.1, 0.9, 0)),
        (ValueError, "'warmup_steps' must be an int, 1 or greater", lambda: WarmUpWeightDecay(0.1, 0)),
        (ValueError, "'power' must be a number greater than 0", lambda: PolynomialWeightDecay(0.1, 0.0, 10, 0)),
        (
            TypeError,
            "'update_decay_steps' must be of type bool, but got 1",
            lambda: PolynomialWeightDecay(0.1, 0.0, 10, 1.0, 1),
        ),
        (
            ValueError,
            "'decay_rate' must be a number greater than 0, but got 0.0",
            lambda: ExponentialWeightDecay(0.1, 0.0, 10),
        ),
        (TypeError, "'is_stair' must be of type bool", lambda: ExponentialWeightDecay(0.1, 0.9, 10, "yes")),
        (
            ValueError,
            "'max_weight_decay' must be greater than 'min_weight_decay', 0.2, but got 0.1",
            lambda: CosineWeightDecay(0.2, 0.1, 10),
        ),
        (ValueError, "'max_weight_decay' must be greater", lambda: CosineWeightDecay(0.1, 0.1, 10)),
        (ValueError, "'learning_rate' must be a number greater than 0", lambda: WarmUpHoldDecayLR(0.0, 1, 1, 3)),
        (ValueError, "'power' must be a number greater than 0", lambda: WarmUpHoldDecayLR(0.1, 1, 1, 3, power=0)),
        (
            ValueError,
            "'total_steps' must be greater than 'warmup_steps' and 'hold_steps' together, 3, but got 3",
            lambda: WarmUpHoldDecayLR(0.1, 1, 2, 3),
        ),
        (
            ValueError,
            "'decay' must be one of .*, but got '1-sqr' of type str. Did you mean '1-sqrt'",
            lambda: WarmUpHoldDecayLR(0.1, 1, 2, 9, decay="1-sqr"),
        ),
        (
            ValueError,
            "'power' must be 1 with the decay '1-sqrt'",
            lambda: WarmUpHoldDecayLR(0.1, 1, 2, 9, power=0.5, decay="1-sqrt"),
        ),
        (TypeError, "'total_steps' must be an int, 1 or greater, but got None", lambda: WarmUpHoldDecayLR(0.1, 1)),
        (
            TypeError,
            "'total_steps' must be an int, 1 or greater, but got 9.0",
            lambda: WarmUpHoldDecayLR(0.1, 1, total_steps=9.0, decay="constant"),
        ),
        (
            ValueError,
            "'end_learning_rate' must be 0 with the decay 'constant', but got 0.01",
            lambda: WarmUpHoldDecayLR(0.1, 1, end_learning_rate=0.01, decay="constant"),
        ),
        (
            ValueError,
            "'power' must be 1 with the decay 'constant'",
            lambda: WarmUpHoldDecayLR(0.1, 1, power=2.0, decay="constant"),
        ),
        (
            ValueError,
            "'start_learning_rate' must be at most 'learning_rate', 0.1, but got 0.2",
            lambda: WarmUpHoldDecayLR(0.1, 1, 2, 9, start_learning_rate=0.2),
        ),
        (
            ValueError,
            "'start_learning_rate' must be 0 without warm-up, but got 0.05",
            lambda: WarmUpHoldDecayLR(0.1, 0, 2, 9, start_learning_rate=0.05),
        ),
        (ValueError, "'coefficient' must be a number greater than 0", lambda: PowerCoolLR(0.1, 0, 9)),
        (
            TypeError,
            "'milestone' must be a list or tuple, but got 3",
            lambda: PiecewiseConstantWeightDecay(3, [0.1]),
        ),
        (
            TypeError,
            "'weight_decays' must be a list or tuple, but got 0.1",
            lambda: PiecewiseConstantWeightDecay([3], 0.1),
        ),
        (
            ValueError,
            "'milestone' must be a list or tuple of at least one int",
            lambda: PiecewiseConstantWeightDecay([], []),
        ),
        (
            ValueError,
            "'weight_decays' must be of the length of 'milestone', 2, but got",
            lambda: PiecewiseConstantWeightDecay([3, 4], [0.1]),
        ),
        (
            ValueError,
            r"'milestone\[1\]' must be at least milestone\[0\], 3, but got 2",
            lambda: PiecewiseConstantWeightDecay([3, 2], [0.1, 0.2]),
        ),
        (
            ValueError,
            r"'milestone\[0\]' must be an int, 1 or greater",
            lambda: PiecewiseConstantWeightDecay([0], [0.1]),
        ),
        (TypeError, r"'milestone\[0\]' must be an int", lambda: PiecewiseConstantWeightDecay([3.0], [0.1])),
        (TypeError, r"'weight_decays\[0\]' must be a number", lambda: PiecewiseConstantWeightDecay([3], ["a"])),
        (ValueError, r"'weight_decays\[0\]' must be a number, 0 or", lambda: PiecewiseConstantWeightDecay([3], [-0.1])),
    ],
)
def test_wrong_arguments(error, match, make):
    refused(error, match, make)


def test_the_base_has_no_schedule_of_its_own():
    class Unfinished(WeightDecaySchedule):
        pass

    refused(NotImplementedError, "For 'Unfinished', 'construct' must be defined", lambda: Unfinished()(ms.Tensor([0])))


def test_numpy_numbers_are_numbers():
    args = (np.float32(0.5), np.float64(0.0), np.int64(4))
    check(LinearWeightDecay(*args), lambda t: polynomial(t, 0.5, 0.0, 4, 1), ())
