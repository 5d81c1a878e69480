"""States go out and in again: bit for bit into another process, and from other packages' optimizers."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
import reference
from cases import CASES, MIXED, MODES_IN_TURN, HalvingDecay, Scenario, dealt, every_case, every_case_and_path, grouped
from harness import Around, Pair, Step, check_close, digest, numbers, tensor
from mindspore import Parameter, nn
from refusals import refused
from runtime import set_mode
from sources import TESTS
from tolerances import TOLERANCE

from ms_optim import Adam, AdamOffload, AdamW, Lamb, Momentum
from ms_optim.states.in_place import write

# ---- In and out of a dict ------------------------------------------------------------------------------------------


# What MindSpore compiles of its own operators goes on in test_a_compiled_graph_goes_on_from_what_is_loaded.
@every_case_and_path({"mode": ["pynative"]}, mode=MODES_IN_TURN, dtype=MIXED)
def test_a_state_dict_carries_a_run_on(case, dtype, backend, mode):
    unbroken, broken = (Pair(case, MIXED[dtype], backend=backend) for _ in range(2))
    for pair in (unbroken, broken):
        pair.run(mode, 3)
    resumed = Pair(case, MIXED[dtype], backend=backend)
    saved, weights = broken.optimizer.state_dict(), [p.asnumpy().copy() for p in broken.params]
    broken.run(mode, 1)
    resumed.optimizer.load_state_dict(saved)
    for p, w in zip(resumed.params, weights):
        p.set_data(ms.Tensor(w))
    resumed.rng = unbroken.rng
    state = unbroken.rng.bit_generator.state
    unbroken.run(mode, 3)
    unbroken.rng.bit_generator.state = state
    resumed.run(mode, 3)
    assert digest(resumed) == digest(unbroken)


@every_case()
def test_a_state_dict_holds_what_is_needed_by_name(case):
    pair = Pair(case, MIXED["bfloat16"])
    names = set(pair.optimizer.state_dict())
    expected = {f"{prefix}.{pair.params[i].name}" for _, i, prefix in pair.held_states()}
    expected |= {f"master.{p.name}" for p in pair.params}
    expected |= {"global_step", "skipped_steps", "learning_rate"}
    expected |= {p.name for p in pair.params}
    assert expected <= names


@every_case()
def test_a_state_dict_is_a_copy(case):
    pair = Pair(case, MIXED["float32"])
    pair.run("pynative", 1)
    saved = pair.optimizer.state_dict()
    before = {name: value.asnumpy().copy() for name, value in saved.items()}
    pair.run("pynative", 1)
    for name, value in saved.items():
        np.testing.assert_array_equal(value.asnumpy(), before[name])
    other = Pair(case, MIXED["float32"])
    other.optimizer.load_state_dict(saved)
    other.run("pynative", 1)
    for name, value in saved.items():
        np.testing.assert_array_equal(value.asnumpy(), before[name])


SPOILED = [
    (TypeError, "'state_dict' must be a dict of Tensors, but got list", lambda d, n: []),
    (TypeError, "entry 'global_step' must be a Tensor, but got int", lambda d, n: {**d, "global_step": 1}),
    (
        KeyError,
        "must have the entry 'global_step'",
        lambda d, n: {k: v for k, v in d.items() if k != "global_step"},
    ),
    (KeyError, "has the entry 'nonsense'", lambda d, n: {**d, "nonsense": d["global_step"]}),
    (
        ValueError,
        r"must have the shape \(7,\), but got \(8,\)",
        lambda d, n: {**d, n: ms.Tensor(np.zeros(8, np.float32))},
    ),
    (
        TypeError,
        "must be of dtype Float32, but got Float16",
        lambda d, n: {**d, n: ms.Tensor(np.zeros(7, np.float16))},
    ),
    (
        ValueError,
        "entry 'global_step' must hold finite numbers, 0 or greater, but holds -2",
        lambda d, n: {**d, "global_step": ms.Tensor([-2], ms.int32)},
    ),
    (ValueError, "'global_step' must have the shape", lambda d, n: {**d, "global_step": ms.Tensor(2, ms.int32)}),
    (ValueError, "'skipped_steps' must", lambda d, n: {**d, "skipped_steps": ms.Tensor([-1], ms.int32)}),
    (ValueError, "'learning_rate' must .* nan", lambda d, n: {**d, "learning_rate": ms.Tensor(np.float32("nan"))}),
]


# All optimizers read with the same code: every third of them meets each.
@pytest.mark.parametrize(
    "case, error, match, spoil",
    [
        pytest.param(case, *spoiled, id=f"{case.name}-{k}")
        for k, spoiled in enumerate(SPOILED)
        for case in CASES[k % 3 :: 3]
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(case, error, match, spoil):
    pair = Pair(case, MIXED["float32"])
    pair.run("pynative", 2)
    other = Pair(case, MIXED["float32"])
    before = digest(other)
    name = pair.first_state("seven")
    text = refused(error, match, lambda: other.optimizer.load_state_dict(spoil(pair.optimizer.state_dict(), name)))
    assert case.name in text
    assert digest(other) == before


@pytest.mark.parametrize("state_dtype", ["8bit", "float32"])
@pytest.mark.parametrize(
    "match, scales",
    [
        ("must hold finite numbers, 0 or greater, but holds nan", [1.0] * 15 + [np.nan]),
        ("must hold finite numbers, 0 or greater, but holds inf", [np.inf] * 16),
        ("must hold finite numbers, 0 or greater, but holds -1", [1.0] * 15 + [-1.0]),
        (r"must have the shape \(16,\), but got \(15,\)", [1.0] * 15),
    ],
)
def test_scales_that_are_spoiled_are_refused(state_dtype, match, scales):
    """By an optimizer that takes codes as they are, and by one that makes numbers of them."""

    def make(state_dtype):
        return AdamW([Parameter(tensor(np.ones(4096), "float32"), name="w")], state_dtype=state_dtype)

    saved = make("8bit").state_dict() | {"adam_v_scale.w": ms.Tensor(np.array(scales, np.float32))}
    optimizer = make(state_dtype)
    refused(ValueError, f"For 'AdamW', the entry 'adam_v_scale.w' {match}", lambda: optimizer.load_state_dict(saved))


def test_a_state_dict_that_lacks_entries_is_taken_on_request():
    pair, other = (Pair(CASES[0], MIXED["float32"]) for _ in range(2))
    pair.run("pynative", 2)
    saved = pair.optimizer.state_dict()
    del saved["skipped_steps"]
    other.optimizer.load_state_dict({**saved, "nonsense": saved["global_step"]}, strict=False)
    assert int(other.optimizer.global_step.asnumpy()[0]) == 2
    wrong = {"global_step": ms.Tensor([1, 2], ms.int32)}
    refused(ValueError, "'global_step'", lambda: other.optimizer.load_state_dict(wrong, strict=False))


@every_case()
def test_what_save_checkpoint_wrote_is_taken(case, tmp_path):
    pair, other = (Pair(case, MIXED["float32"]) for _ in range(2))
    pair.run("pynative", 2)
    ms.save_checkpoint(pair.optimizer, str(tmp_path / "all.ckpt"))
    other.optimizer.load_state_dict(ms.load_checkpoint(str(tmp_path / "all.ckpt")))
    assert int(other.optimizer.global_step.asnumpy()[0]) == 2
    for a, b in zip(pair.optimizer.states, other.optimizer.states):
        np.testing.assert_array_equal(numbers(a), numbers(b))


@every_case()
def test_a_cell_around_the_optimizer_collects_its_parameters(case):
    pair = Pair(case, MIXED["float32"])
    around = nn.SequentialCell([nn.Dense(2, 2)])
    around.optimizer = pair.optimizer
    collected = around.state_dict()
    assert any(name.endswith(pair.first_state("seven")) for name in collected)


# ---- What loading must not do --------------------------------------------------------------------------------------


def written(optimizer):
    """Return the bytes of all that outlives a step, but for the statistics, and of the weights."""
    return {name: value.asnumpy().tobytes() for name, value in optimizer.state_dict().items()}


@every_case()
def test_mindspore_loads_a_state_dict_without_guessing_at_weights(case, tmp_path):
    """Given names that end with those of weights but none of these, it would load moments into them."""
    pair, other = (Pair(case, MIXED["float32"]) for _ in range(2))
    pair.run("pynative", 2)
    saved = pair.optimizer.state_dict()
    ms.save_checkpoint([{"name": k, "data": v} for k, v in saved.items()], str(tmp_path / "state.ckpt"))
    read = ms.load_checkpoint(str(tmp_path / "state.ckpt"))
    weights = [numbers(p) for p in pair.params]
    for each in (pair, other):
        missing, unknown = ms.load_param_into_net(each.optimizer, read)
        for p, w in zip(each.params, weights):
            np.testing.assert_array_equal(numbers(p), w, p.name)
        assert (missing, unknown) == (["statistics"], [])
        assert written(each.optimizer) == {name: value.asnumpy().tobytes() for name, value in saved.items()}


@every_case_and_path()
def test_a_compiled_graph_goes_on_from_what_is_loaded(case, backend):
    pair = Pair(case, MIXED["bfloat16"], backend=backend)

    @ms.jit
    def step(*gradients):
        pair.optimizer(gradients)
        return gradients[0] + 1

    drawn = [pair.gradients() for _ in range(3)]
    gradients = [tuple(tensor(g, dtype) for g in each) for each, dtype in drawn]
    step(*gradients[0])
    saved, weights = pair.optimizer.state_dict(), [numbers(p) for p in pair.params]
    step(*gradients[1])
    expected, moved = written(pair.optimizer), [numbers(p) for p in pair.params]
    for from_python in (False, True, False):
        step(*gradients[2])
        pair.optimizer.load_state_dict(saved)
        for p, w in zip(pair.params, weights):
            write(p, tensor(w, "bfloat16").asnumpy())
        if from_python:
            pair.optimizer(gradients[1])
        else:
            step(*gradients[1])
        assert written(pair.optimizer) == expected
    assert int(pair.optimizer.global_step.asnumpy()[0]) == 2
    assert any((w != m).any() for w, m in zip(weights, moved))


@every_case()
@pytest.mark.parametrize("wrapped", ["saved", "loaded", "both"])
def test_a_cell_around_an_optimizer_changes_no_entry(case, wrapped, tmp_path):
    pair, other = (Pair(case, MIXED["bfloat16"]) for _ in range(2))
    names = pair.optimizer.state_dict().keys()
    pair.run("pynative", 2)
    cells = [
        Around(Around(o.optimizer)) for o, kind in ((pair, "saved"), (other, "loaded")) if wrapped in (kind, "both")
    ]
    assert all(p.name.startswith("opt.opt.") for cell in cells for p in cell.get_parameters())
    saved = pair.optimizer.state_dict()
    assert saved.keys() == names
    ms.save_checkpoint(pair.optimizer, str(tmp_path / "run.ckpt"))
    before = [numbers(p) for p in other.params]
    for given in (saved, ms.load_checkpoint(str(tmp_path / "run.ckpt"))):
        fresh = Pair(case, MIXED["bfloat16"]).optimizer.state_dict()
        other.optimizer.load_state_dict(fresh)
        other.optimizer.load_state_dict(given)
        for a, b in zip(pair.optimizer.states, other.optimizer.states):
            np.testing.assert_array_equal(numbers(a), numbers(b))
        assert int(other.optimizer.global_step.asnumpy()[0]) == 2
    for p, w in zip(other.params, before):
        np.testing.assert_array_equal(numbers(p), w)


def coded(state_dtype="8bit"):
    return AdamW([Parameter(tensor(np.ones(5000), "float32"), name="w")], 0.01, state_dtype=state_dtype)


@pytest.mark.parametrize("lacking", ["adam_m.w", "adam_m_scale.w"])
def test_codes_and_scales_are_loaded_together_or_not_at_all(lacking):
    saved, other = coded(), coded()
    saved((tensor(np.arange(5000), "float32"),))
    entries = {k: v for k, v in saved.state_dict().items() if k != lacking}
    before = written(other)
    refused(KeyError, "must have the entry 'adam_m", lambda: other.load_state_dict(entries))
    assert written(other) == before
    other.load_state_dict(entries, strict=False)
    for key, value in saved.state_dict().items():
        kept = key.startswith("adam_m") or key == "w"
        assert written(other)[key] == (before[key] if kept else value.asnumpy().tobytes()), key


def test_scales_of_another_dtype_are_not_taken_alone():
    exact, other = coded("float32"), coded()
    exact((tensor(np.arange(5000), "float32"),))
    entries = {**exact.state_dict(), "adam_m_scale.w": other.state_dict()["adam_m_scale.w"]}
    entries["adam_v.w"] = ms.Tensor(np.zeros(5000, np.float16))
    before = written(other)
    refused(TypeError, "'adam_v.w' must be of dtype", lambda: other.load_state_dict(entries, strict=False))
    assert written(other) == before


# ---- Rates as they stand -------------------------------------------------------------------------------------------


@every_case(mode=MODES_IN_TURN)
def test_rates_of_the_step_to_come(case, mode):
    pair = Pair(
        case, Scenario(shapes=("seven", "lanes-1", "lanes+1", "matrix"), groups=grouped, shared={"loss_scale": 8.0})
    )
    for k in range(3):
        rates = [rate(k) for rate in pair.reference.learning_rates]
        decays = [decay(k) for decay in pair.reference.weight_decays]
        current = pair.optimizer.current_step_lr()
        assert isinstance(current, tuple)
        np.testing.assert_allclose(current, rates, rtol=1e-6)
        np.testing.assert_allclose([float(x.asnumpy()) for x in pair.optimizer.get_lr()], rates, rtol=3e-6)
        np.testing.assert_allclose(
            [float(np.ravel(x.asnumpy())[0]) for x in pair.optimizer.get_weight_decay()], decays, rtol=1e-6
        )
        pair.run(mode, 1)


def test_one_rate_for_all_is_a_number():
    params = [Parameter(tensor(np.ones(3), "float32"), name="w")]
    assert AdamW(params, 0.25).current_step_lr() == 0.25
    optimizer = AdamW(params, [0.5, 0.125])
    assert optimizer.current_step_lr() == 0.5
    optimizer((tensor(np.ones(3), "float32"),))
    assert optimizer.current_step_lr() == 0.125
    assert float(AdamW(params, 0.25, weight_decay=0.5, loss_scale=4.0).get_weight_decay().asnumpy()) == 0.5


@every_case()
def test_the_learning_rate_of_a_parameter(case):
    params = [Parameter(tensor(np.ones((3, 1)), "float32"), name=f"w{i}") for i in range(3)]
    schedule = nn.ExponentialDecayLR(0.5, 0.9, 10)
    groups = [{"params": params[:1], "lr": 0.25}, {"params": params[1:2], "lr": schedule}, {"params": params[2:]}]
    optimizer = case.optimizer(groups, 0.125)
    assert float(optimizer.get_lr_parameter(params[0]).asnumpy()) == 0.25
    assert optimizer.get_lr_parameter(params[1:2]) == [schedule]
    assert float(optimizer.get_lr_parameter(params)[2].asnumpy()) == 0.125
    assert optimizer.current_step_lr() == (0.25, 0.5, 0.125)
    stranger = Parameter(tensor(np.ones(3), "float32"), name="stranger")
    refused(ValueError, "stranger is not in optimizer", lambda: optimizer.get_lr_parameter(stranger))


# ---- Into another process ------------------------------------------------------------------------------------------

RESUME = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from runtime import spare_threads
from test_state import resume
spare_threads()
for line in resume(sys.argv[2]):
    print("digest", line)
"""
BREAK, END = 5, 12


def in_the_middle(params, rate):
    """In the middle of a warm-up when the run breaks, and of a decay that changes."""
    n = len(params)
    none = [None] * n
    return params, nn.WarmUpLR(rate, 8), HalvingDecay(0.1), none, none, [False] * n


def warming_up(case, dtype):
    scenario = Scenario(
        dtype, shapes=("scalar", "matrix", "tiles+1"), groups=in_the_middle, shared={"grad_clip_norm": 5.0}
    )
    return Pair(case, scenario)


def walk(pair, first, last, mode):
    """Step with gradients that depend on the step alone."""
    for k in range(first, last):
        pair.rng = np.random.default_rng(k)
        gradients, dtype = pair.gradients()
        pair.call(mode, tuple(tensor(g, dtype) for g in gradients))


def each_run():
    """Give every optimizer: in one of the modes and with one of the dtypes, in turn."""
    for row in dealt([{"case": case} for case in CASES], mode=("graph", "pynative"), dtype=("float32", "bfloat16")):
        case, mode, dtype = row.values()
        set_mode(mode)
        yield case, mode, dtype, f"{case.name}-{mode}-{dtype}"


def resume(folder):
    """Go on from the checkpoints in a folder and return a line for each run."""
    lines = []
    for case, mode, dtype, name in each_run():
        pair = warming_up(case, dtype)
        missing, unknown = ms.load_param_into_net(pair.optimizer, ms.load_checkpoint(f"{folder}/{name}.ckpt"))
        assert not missing, missing
        assert not unknown, unknown
        walk(pair, BREAK, END, mode)
        lines.append(f"{name} {digest(pair)}")
    return lines


def test_a_run_resumes_in_another_process_bit_for_bit(tmp_path):
    expected = []
    for case, mode, dtype, name in each_run():
        pair = warming_up(case, dtype)
        walk(pair, 0, BREAK, mode)
        ms.save_checkpoint(pair.optimizer, str(tmp_path / f"{name}.ckpt"))
        walk(pair, BREAK, END, mode)
        expected.append(f"{name} {digest(pair)}")
    run = subprocess.run(
        [sys.executable, "-c", RESUME, str(TESTS), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = [line.removeprefix("digest ") for line in run.stdout.splitlines() if line.startswith("digest")]
    assert found == expected
    assert len(expected) == len(CASES)


@every_case_and_path({"mode": ["pynative"]}, mode=MODES_IN_TURN)
def test_weights_loaded_after_construction_are_respected(case, backend, mode):
    """Frameworks build the optimizer first and load the weights then."""
    late, early = (Pair(case, MIXED["bfloat16"], backend=backend) for _ in range(2))
    loaded = [numbers(p) * 2 + 1 for p in late.params]
    for p, w in zip(late.params, loaded):
        p.set_data(tensor(w, "bfloat16"))
    for p, w in zip(early.params, loaded):
        p.set_data(tensor(w, "bfloat16"))
    params, rate, decay, *_ = early.scenario.groups(early.params, case.learning_rate)
    early.optimizer = case.optimizer(params, rate, weight_decay=decay, backend=backend)
    for pair in (late, early):
        pair.rng = np.random.default_rng(5)
        pair.run(mode, 3)
    assert digest(late) == digest(early)
    assert not np.allclose(numbers(late.optimizer.masters[2]), late.reference.masters[2], atol=0.5)


# ---- From other optimizers -----------------------------------------------------------------------------------------


def two_parameters():
    rng = np.random.default_rng(3)
    return [Parameter(tensor(rng.standard_normal(s), "float32"), name=f"w{s[0]}") for s in ((4, 3), (5,))]


def some_gradients(k):
    rng = np.random.default_rng(100 + k)
    return [tensor(rng.standard_normal(s), "float32") for s in ((4, 3), (5,))]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_checkpoint_of_adam_offload_goes_on_here(nesterov, backend, tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    arguments = {"learning_rate": 0.01, "beta1": 0.8, "weight_decay": 0.1, "use_nesterov": nesterov}
    theirs = nn.AdamOffload(two_parameters(), **arguments)
    call = Step(theirs)
    for k in range(5):
        call(*some_gradients(k))
    ms.save_checkpoint(theirs, str(tmp_path / "theirs.ckpt"))
    ours = AdamOffload(two_parameters(), **arguments, backend=backend)
    missing, unknown = ms.load_param_into_net(ours, ms.load_checkpoint(str(tmp_path / "theirs.ckpt")))
    assert set(missing) == {"skipped_steps", "statistics"}
    assert not unknown
    assert int(ours.global_step.asnumpy()[0]) == 5
    call_ours = Step(ours)
    for k in range(5, 15):
        call(*some_gradients(k))
        call_ours(*some_gradients(k))
    for a, b in zip([*ours.parameters, *ours.states], [*theirs.parameters, *theirs.moment1, *theirs.moment2]):
        # Theirs multiplies beta^t up in float32.
        np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(ours.beta1_power.asnumpy(), theirs.beta1_power.asnumpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "theirs, ours, arguments",
    [
        (nn.Adam, Adam, {"learning_rate": 0.01, "beta1": 0.8, "use_nesterov": True}),
        (nn.Adam, Adam, {"learning_rate": 0.01, "beta2": 0.99, "use_amsgrad": True}),
        (nn.Momentum, Momentum, {"learning_rate": 0.1, "momentum": 0.8}),
    ],
)
def test_checkpoints_of_adam_and_momentum_go_on_here(theirs, ours, arguments, backend, tmp_path):
    theirs = theirs(two_parameters(), **arguments, weight_decay=0.1)
    for k in range(5):
        theirs(tuple(some_gradients(k)))
    ms.save_checkpoint(theirs, str(tmp_path / "theirs.ckpt"))
    ours = ours(two_parameters(), **arguments, weight_decay=0.1, backend=backend)
    missing, _ = ms.load_param_into_net(ours, ms.load_checkpoint(str(tmp_path / "theirs.ckpt")))
    assert set(missing) == {"skipped_steps", "statistics"}
    for k in range(5, 15):
        theirs(tuple(some_gradients(k)))
        ours(tuple(some_gradients(k)))
    known = {p.name: p.asnumpy() for p in theirs.get_parameters()}
    for p in (*ours.parameters, *ours.states):
        np.testing.assert_allclose(p.asnumpy(), known[p.name], rtol=2e-5, atol=1e-6)


def test_a_checkpoint_of_mindformers_adamw_goes_on_here(backend, tmp_path):
    adamw = pytest.importorskip("mindformers.core.optim", reason="MindFormers is not installed").AdamW
    arguments = {"learning_rate": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
    theirs = adamw(two_parameters(), **arguments)
    for k in range(5):
        theirs(tuple(some_gradients(k)))
    ms.save_checkpoint(theirs, str(tmp_path / "theirs.ckpt"))
    ours = AdamW(two_parameters(), **arguments, backend=backend)
    missing, unknown = ms.load_param_into_net(ours, ms.load_checkpoint(str(tmp_path / "theirs.ckpt")))
    assert set(missing) == {"skipped_steps", "statistics"}
    assert not unknown
    for k in range(5, 15):
        theirs(tuple(some_gradients(k)))
        ours(tuple(some_gradients(k)))
    for a, b in zip(ours.parameters, theirs.parameters):
        np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer, rule, prefixes",
    [(AdamW, reference.AdamW, ("adam_m", "adam_v")), (Lamb, reference.Lamb, ("lamb_m", "lamb_v"))],
)
def test_states_under_their_names_go_on_here(optimizer, rule, prefixes, backend):
    """A checkpoint of weights, moments and the step count, as MindFormers' AdamW and nn.Lamb name them."""
    weights = [p.asnumpy().astype(np.float64) for p in two_parameters()]
    constants = [[lambda k: 0.01] * 2, [lambda k: 0.1] * 2, [False] * 2, ["float32"] * 2]
    expected = rule(weights, *constants)
    for k in range(5):
        expected.step([g.asnumpy() for g in some_gradients(k)])
    saved = {p.name: Parameter(tensor(w, "float32")) for p, w in zip(two_parameters(), expected.weights)}
    for prefix in prefixes:
        saved |= {
            f"{prefix}.{p.name}": Parameter(tensor(s, "float32"))
            for p, s in zip(two_parameters(), expected.state[prefix])
        }
    saved["global_step"] = Parameter(ms.Tensor([5], ms.int32))
    ours = optimizer(two_parameters(), 0.01, weight_decay=0.1, backend=backend)
    ms.load_param_into_net(ours, saved)
    for k in range(5, 15):
        gradients = some_gradients(k)
        ours(tuple(gradients))
        expected.step([g.asnumpy() for g in gradients])
    for p, w, peak in zip(ours.parameters, expected.weights, expected.peak["weight"]):
        check_close(numbers(p), w, TOLERANCE["weight"], peak, p.name)


def test_names_are_those_of_upstream():
    """nn.Lamb runs on no CPU, but it can be built there."""
    theirs = {p.name for _, p in nn.Lamb(two_parameters(), 0.1).parameters_and_names()}
    ours = {p.name for _, p in Lamb(two_parameters(), 0.1).parameters_and_names()}
    assert {name for name in theirs if "lamb" in name} == {name for name in ours if "lamb" in name}
    assert theirs - ours <= {"beta1_power", "beta2_power"}
