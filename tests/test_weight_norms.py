"""What holds the norm of weights: every optimizer follows its reference, and the hyperball's radius is kept."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, MODES, Scenario, constant, dealt, for_each, grouped, plain
from harness import Pair, Step, check_stored_alike, digest_of, numbers, numbers_of, tensor
from mindspore import Parameter
from refusals import refused
from tolerances import MOST_ON_OTHER_PATH, MOST_REMAINDERS_ON_OTHER_PATH, STEPS

import ms_optim
from ms_optim import AdamW, RadialBrake

KINDS = ("hyperball", "relative", "radial_brake", RadialBrake(0.25, 0.5))
TAKERS = [case for case in CASES if "weight_norm" not in case.cls.refuses]
SHAPES = ("scalar", "seven", "matrix", "convolution", "zero", "matrix again")
FEWER_SHAPES = ("seven", "matrix", "zero", "matrix again")  # MindSpore's operators take time to compile


def undecayed(params, rate):
    """Two groups with rates of their own, one of which centralizes, in turn, and no decay."""
    rates = [rate if i % 2 else 2 * rate for i in range(len(params))]
    groups = [{"params": params[1::2], "lr": rate, "grad_centralization": True}]
    groups += [{"params": params[::2], "lr": 2 * rate}, {"order_params": params}]
    centralized = [bool(i % 2) for i in range(len(params))]
    return groups, rate, 0.0, [constant(r) for r in rates], [constant(0.0)] * len(params), centralized


def scenario_of(kind, dtype="float32", decayed=grouped, **shared):
    groups = undecayed if kind == "hyperball" else decayed
    return Scenario(dtype, shapes=SHAPES, groups=groups, shared={"weight_norm": kind, **shared})


def pair_of(case, kind, backend, dtype="float32"):
    shapes = SHAPES if backend == "aot" else FEWER_SHAPES
    return Pair(case, dataclasses.replace(scenario_of(kind, dtype), shapes=shapes), backend=backend)


def kinds_of_each():
    """Give each optimizer every kind on its kernel, and one in a graph of operators, where the first has all."""
    for i, case in enumerate(TAKERS):
        for j, kind in enumerate(KINDS):
            dtype = ("float32", "bfloat16")[(i + j) % 3 == 2]
            for k, backend in enumerate(("composite", "aot")):
                row = {"case": case, "kind": kind, "mode": MODES[(i + j + k) % 2], "dtype": dtype, "backend": backend}
                if backend == "aot" or i == 0:
                    yield row
                elif (i + i // 4) % 4 == j:
                    yield row | {"mode": "graph"}


@for_each(list(kinds_of_each()))
def test_follows_the_reference(case, kind, mode, dtype, backend):
    pair = pair_of(case, kind, backend, dtype)
    pair.run(mode, STEPS if mode == "graph" or backend == "aot" else 4)
    pair.check()


# More than a tile and more than a chunk, rows of odd lengths, and more than the elements that two passes share.
LARGE = ("scalar", "lanes+1", "tiles+1", "million", "zero", "matrix", "million again")


@for_each(dealt([{"case": case} for case in TAKERS], kind=KINDS))
def test_kernels_follow_the_reference_in_any_shape(case, kind):
    # A decay that enters the states may cancel the gradient: of a million elements, one comes close.
    decayed = undecayed if case.reference.decay_in_states else grouped
    pair = Pair(case, dataclasses.replace(scenario_of(kind, decayed=decayed), shapes=LARGE), backend="aot")
    pair.run("pynative", 6)
    pair.check()


STORED = (
    {"state_dtype": "8bit"},
    {"state_dtype": "4bit", "master_weights": "split"},
    {"state_dtype": "bfloat16", "master_weights": "split8"},
    {"state_dtype": "bfloat16", "master_weights": False, "stochastic_rounding": True},
)


@for_each(dealt([{"case": case, "stored": stored} for case in TAKERS for stored in STORED], kind=KINDS[:3]))
def test_both_paths_store_alike(case, stored, kind):
    """States and weights of few bits: rounded by the same noise."""
    scenario = dataclasses.replace(scenario_of(kind, "bfloat16", **stored), shapes=("seven", "matrix", "codes"))
    pairs = [Pair(case, scenario, backend=backend) for backend in ("composite", "aot")]
    for pair in pairs:
        pair.run("pynative", 3)
    held = (numbers_of(pair.optimizer) for pair in pairs)
    check_stored_alike(*held, MOST_ON_OTHER_PATH, MOST_REMAINDERS_ON_OTHER_PATH)


@for_each(dealt([{"kind": kind} for kind in KINDS], clip=(True, False), backend=("composite", "aot")))
def test_with_other_stages(kind, clip, backend):
    """A bound of the gradients, steps that are skipped, cautious decay and an average."""
    shared = {"grad_clip_norm": 3.0, "loss_scale": 8.0, "skip_nonfinite": True} if clip else {"decay": "cautious"}
    pair = Pair(CASES[0], scenario_of(kind, decayed=plain, average_decay=0.9, **shared), backend=backend)
    for _ in range(2):
        if clip:
            gradients, dtype = pair.gradients()
            gradients[2][0] = np.nan
            pair.call("pynative", tuple(tensor(g, dtype) for g in gradients))
            pair.follow(gradients)
        pair.run("pynative", 2)
        pair.check()


def of_shapes(*shapes, dtype="float32", size=1.0):
    rng = np.random.default_rng(0)
    return [Parameter(tensor(rng.standard_normal(s) * size, dtype), name=f"w{i}") for i, s in enumerate(shapes)]


EXTREMES = [
    {"backend": backend, "dtype": dtype, "size": size}
    for backend in ("aot", "composite")
    for dtype in ("float32", "bfloat16")
    for size in (1e-12, 1.0, 1e12)
]


@for_each(dealt(EXTREMES, mode=MODES))
def test_the_norm_stays_within_two_units_of_the_radius(dtype, size, mode, backend):
    """After each of many steps: that of the weights, or of their masters."""
    shapes = [(2, 2), (13, 11), (6, 4, 3, 3), (300, 400), (1, 7)]
    params = of_shapes(*shapes, dtype=dtype, size=size)
    start = [np.linalg.norm(numbers(p)) for p in params]
    optimizer = AdamW(params, 0.02, weight_norm="hyperball", backend=backend)
    call, rng = Step(optimizer) if mode == "graph" else lambda *g: optimizer(g), np.random.default_rng(1)
    for _ in range(STEPS if mode == "graph" or backend == "aot" else 8):
        call(*(tensor(rng.standard_normal(s) * size, dtype) for s in shapes))
        radii = optimizer.weight_radii.asnumpy()
        np.testing.assert_allclose(radii, start, rtol=2.0**-23)
        norms = [np.linalg.norm(numbers(p)) for p in (optimizer.masters if dtype == "bfloat16" else params)]
        assert (np.abs(norms - radii.astype(np.float64)) <= 2 * np.spacing(radii)).all()


def test_vectors_move_freely(backend):
    """Biases begin at 0, and would stay there."""
    weights = [of_shapes((7,), (3, 5)) for _ in range(2)]
    held, free = (AdamW(p, 0.1, weight_norm=kind, backend=backend) for p, kind in zip(weights, ("hyperball", None)))
    for optimizer in (held, free):
        optimizer((tensor(np.ones(7), "float32"), tensor(np.ones((3, 5)), "float32")))
    np.testing.assert_array_equal(weights[0][0].asnumpy(), weights[1][0].asnumpy())
    assert (weights[0][1].asnumpy() != weights[1][1].asnumpy()).all()


@pytest.mark.parametrize("kind", ["hyperball", "relative"])
def test_nan_stays_nan(kind, backend):
    (weight,) = of_shapes((3, 5))
    optimizer = AdamW([weight], 0.1, weight_norm=kind, backend=backend)
    gradient = np.ones((3, 5))
    gradient[1, 1] = np.nan
    optimizer((tensor(gradient, "float32"),))
    assert np.isnan(weight.asnumpy()).all()


# ---- The radius ----------------------------------------------------------------------------------------------------


def test_the_radius_is_the_norm_of_the_first_step_that_is_taken(backend):
    """Weights may be loaded after construction, and steps skipped before the first."""
    (weight,) = of_shapes((3, 5))
    optimizer = AdamW([weight], 0.1, weight_norm="hyperball", skip_nonfinite=True, backend=backend)
    bad, good = (tensor(np.full((3, 5), x), "float32") for x in (np.nan, 0.5))
    optimizer((bad,))
    assert optimizer.weight_radii.asnumpy() == [0.0]
    weight.set_data(tensor(np.full((3, 5), 2.0), "float32"))
    for gradient in (good, bad, good):
        optimizer((gradient,))
        np.testing.assert_allclose(optimizer.weight_radii.asnumpy(), np.sqrt(60), rtol=2.0**-23)
    weight.set_data(weight * 3)
    optimizer((good,))
    np.testing.assert_allclose(np.linalg.norm(weight.asnumpy()), np.sqrt(60), rtol=2.0**-22)


@pytest.mark.parametrize("kind", ["hyperball", "relative"])
def test_a_norm_of_0_leaves_the_tensor_alone(kind, backend):
    params = of_shapes((3, 5), (3, 5))
    params[1].set_data(tensor(np.zeros((3, 5)), "float32"))
    start = [p.asnumpy().copy() for p in params]
    optimizer = AdamW(params, 0.1, weight_norm=kind, backend=backend)
    optimizer((tensor(np.zeros((3, 5)), "float32"), tensor(np.ones((3, 5)), "float32")))
    for p, before in zip(params, start):
        np.testing.assert_array_equal(p.asnumpy(), before)


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(mode, tmp_path, backend):
    whole, first, second = (pair_of(CASES[0], "hyperball", backend) for _ in range(3))
    whole.run(mode, 6)
    first.run(mode, 3)
    ms_optim.save(tmp_path / "half.safetensors", None, first.optimizer)
    ms_optim.load(tmp_path / "half.safetensors", None, second.optimizer)
    second.rng = first.rng
    second.run(mode, 3)
    assert digest_of(second.optimizer) == digest_of(whole.optimizer)


def test_a_radius_that_is_missing_is_taken_anew_and_a_spoiled_one_is_refused(backend):
    params, others = of_shapes((3, 5)), of_shapes((3, 5), size=2.0)
    plain, held = AdamW(params, 0.1), AdamW(others, 0.1, weight_norm="hyperball", backend=backend)
    gradient = (tensor(np.ones((3, 5)), "float32"),)
    plain(gradient)
    refused(KeyError, "'weight_radii'", lambda: held.load_state_dict(plain.state_dict()))
    held.load_state_dict(plain.state_dict(), strict=False)
    held(gradient)
    np.testing.assert_allclose(held.weight_radii.asnumpy(), np.linalg.norm(of_shapes((3, 5), size=2.0)[0].asnumpy()))
    spoiled = {**held.state_dict(), "weight_radii": tensor([-1.0], "float32")}
    refused(ValueError, "'weight_radii' must hold finite numbers, 0 or greater", lambda: held.load_state_dict(spoiled))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["hyperball", "radial_brake"])
def test_released_gradients_give_the_same_bits(kind, passes, backend):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    made = []
    for attached in (False, True):
        params = of_shapes((4, 3), (5, 4), (4, 3))
        optimizer = AdamW(params, 0.1, weight_norm=kind, backend=backend, skip_nonfinite=passes == 2)
        if attached:
            optimizer.attach(passes)

        def loss(x, params=params):
            return ((ms.ops.matmul(params[1], params[0]) ** 2).sum() + (params[2] * x).sum()) * x

        gradients_of = ms.value_and_grad(loss, None, optimizer.parameters)
        for step in range(3):
            for _ in range(passes if attached else 1):
                gradients = gradients_of(tensor(1.0 + step, "float32"))[1]
                if attached:
                    optimizer.finish()
                else:
                    optimizer(gradients)
        made.append(optimizer)
    assert digest_of(made[0]) == digest_of(made[1])


# ---- Several rules in one step -------------------------------------------------------------------------------------


def several(backend, together, skips=False):
    """Return four optimizers of some weights each, two of which keep radii, as one optimizer or each by itself."""
    made = []
    kinds = ("hyperball", None, "relative", "hyperball")
    for i, (cls, kind) in enumerate(zip((AdamW, ms_optim.Lion, ms_optim.Lion, ms_optim.Muon), kinds)):
        params = of_shapes((5,), (13, 11))
        for k, p in enumerate(params):
            p.name = f"w{i}.{k}"
        shared = {"backend": backend, "weight_norm": kind, "skip_nonfinite": skips}
        made.append(cls(params, 0.01, weight_decay=0.0, **shared))
    return [ms_optim.MultiOptimizer(made)] if together else made


def drawn(steps, poisoned=-1):
    rng = np.random.default_rng(3)
    for step in range(steps):
        gradients = [tensor(rng.standard_normal(s), "float32") for _ in range(4) for s in ((5,), (13, 11))]
        if step == poisoned:
            gradients[1] = gradients[1] * float("nan")
        yield gradients


def held_by_all(optimizers):
    """Return what optimizers hold by name, and the rows of their radii and statistics, one below the other."""
    held = {p.name: numbers(p) for o in optimizers for p in (*o.parameters, *o.states)}
    radii = [np.zeros(len(o.parameters)) if o.weight_radii is None else numbers(o.weight_radii) for o in optimizers]
    return held | {
        "radii": np.concatenate(radii),
        "statistics": np.concatenate([numbers(o.statistics) for o in optimizers]),
    }


def test_several_rules_hold_norms_as_each_alone(mode, backend):
    (joint,), alone = several(backend, True), several(backend, False)
    together = Step(joint) if mode == "graph" else lambda *g: joint(g)
    each = [Step(o) if mode == "graph" else lambda *g, o=o: o(g) for o in alone]
    for gradients in drawn(3):
        together(*gradients)
        for k, call in enumerate(each):
            call(*gradients[2 * k : 2 * k + 2])
    expected, found = held_by_all(alone), held_by_all([joint])
    assert (found["radii"][[0, 1, 6, 7]] > 0).all()
    for name, x in found.items():
        rows = [0, 1, 6, 7] if name == "radii" else slice(None)
        np.testing.assert_array_equal(x[rows], expected[name][rows], name)
    assert joint.optimizers[0].weight_radii is joint.weight_radii
    assert joint.optimizers[2].weight_radii is None


@pytest.mark.parametrize("passes", [1, 2])
def test_several_rules_hold_norms_of_released_gradients(passes, backend):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    made = []
    for attached in (False, True):
        (optimizer,) = several(backend, True, skips=passes == 2)
        if attached:
            optimizer.attach(passes)
        for gradients in drawn(3, poisoned=1 if passes == 2 else -1):

            def loss(x, gradients=gradients, weights=optimizer.parameters):
                return sum((w * g).sum() for w, g in zip(weights, gradients)) * x

            gradients_of = ms.value_and_grad(loss, None, optimizer.parameters)
            for _ in range(passes if attached else 1):
                found = gradients_of(tensor(1.0, "float32"))[1]
                if attached:
                    optimizer.finish()
                else:
                    optimizer(found)
        made.append(optimizer)
    assert digest_of(made[0]) == digest_of(made[1])


def test_radii_of_several_rules_go_on_from_a_checkpoint(tmp_path, backend):
    (whole,), (first,), (second,) = (several(backend, True) for _ in range(3))
    steps = list(drawn(4))
    for gradients in steps:
        whole(gradients)
    for gradients in steps[:2]:
        first(gradients)
    ms_optim.save(tmp_path / "half.safetensors", None, first)
    ms_optim.load(tmp_path / "half.safetensors", None, second)
    for gradients in steps[2:]:
        second(gradients)
    assert digest_of(second) == digest_of(whole)


# ---- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, reason",
    [
        (ms_optim.Lamb, "scales its updates by the norm of the weights already"),
        (ms_optim.LANS, "scales its updates by the norm of the weights already"),
        (ms_optim.ScheduleFreeAdamW, "moves its weights along more than one direction"),
        (ms_optim.DGCMomentum, "adds up gradients before they are exchanged"),
    ],
)
def test_optimizers_that_cannot_hold_norms_say_why(cls, reason):
    said = f"unknown keyword argument 'weight_norm'. It {reason}.*Optimizers that take it: AdamW"
    refused(TypeError, said, lambda: cls(of_shapes((3, 5)), 0.1, **cls.required, weight_norm="relative"))


def test_a_decay_on_a_hyperball_is_refused_by_the_name_of_its_weight():
    vector, matrix = of_shapes((7,), (3, 5))
    match = "the weight decay of 'w1' must be 0 with weight_norm='hyperball'"
    refused(ValueError, match, lambda: AdamW([vector, matrix], 0.1, weight_decay=0.1, weight_norm="hyperball"))
    schedule = ms_optim.ConstantWeightDecay(0.0)
    refused(ValueError, match, lambda: AdamW([vector, matrix], 0.1, weight_decay=schedule, weight_norm="hyperball"))
    groups = [{"params": [vector], "weight_decay": 0.1}, {"params": [matrix], "weight_decay": 0.0}]
    AdamW(groups, 0.1, weight_norm="hyperball", backend="composite")


@pytest.mark.parametrize("value, error", [("0.5", TypeError), (1.5, ValueError), (-0.1, ValueError), (None, TypeError)])
def test_the_parts_of_a_brake_are_checked(value, error):
    refused(error, "For 'RadialBrake', the argument 'inward' must be", lambda: RadialBrake(inward=value))
