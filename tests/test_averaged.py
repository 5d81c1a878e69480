"""Averaged weights: in the parameters for evaluation and use, and out of them again to the bit."""

import dataclasses
import threading

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, MIXED, MODES_IN_TURN, SCENARIOS, Scenario, dealt, for_each, plain
from harness import Pair, Step, check_close, digest, numbers, tensor
from interrupting import at_every_line
from mindspore import Parameter, nn, ops
from refusals import refused
from tolerances import TOLERANCE, UNIT

import ms_optim
from ms_optim import AdamW, AveragedWeights, ScheduleFreeAdamW

FREE = next(case for case in CASES if case.cls is ScheduleFreeAdamW)
EVERY = [{"case": case} for case in CASES if case.is_averaged or case is FREE]
# One of each kind of path: a rule like all others, one that compresses, and one that averages its iterates.
KINDS = [row for row in EVERY if row["case"].name in ("AdamW", "DGCMomentum", "ScheduleFreeAdamW")]
ON_BOTH_PATHS = [row | {"backend": "aot"} for row in EVERY] + [row | {"backend": "composite"} for row in KINDS]


def bits(parameters):
    return [numbers(p).tobytes() for p in parameters]


def averaging(case, scenario, **shared):
    """Return a pair whose optimizer keeps an average, if it is not one of iterates itself."""
    return Pair(case, scenario, **({} if case is FREE else {"average_decay": 0.9}), **shared)


def for_use(pair):
    """Return what the reference says of the averaged weights."""
    free = pair.case is FREE
    return pair.reference.evaluated() if free else pair.reference.averages


@pytest.mark.parametrize("dtype", list(MIXED))
@for_each(ON_BOTH_PATHS)
def test_they_are_in_the_block_and_what_training_holds_is_back_to_the_bit(case, dtype, backend):
    pair = averaging(case, MIXED[dtype], backend=backend)
    pair.run("pynative", 4)
    before, kept = bits(pair.params), digest(pair)
    with pair.optimizer.averaged():
        inside = [numbers(p) for p in pair.params]
        with pair.optimizer.averaged():  # changes nothing
            pass
        assert bits(pair.params) == [x.tobytes() for x in inside]
    assert bits(pair.params) == before
    assert digest(pair) == kept
    assert before != [w.tobytes() for w in inside]
    for p, x, w in zip(pair.params, for_use(pair), inside):
        if dtype == "float32":
            check_close(w, x, TOLERANCE["weight"], np.abs(x) + 1, p.name)
        else:
            np.testing.assert_allclose(w, x, rtol=2.0**-8, atol=1e-6)
    pair.run("pynative", 3)
    pair.check()


@pytest.mark.parametrize("dtype", list(MIXED))
@for_each([row | {"backend": backend} for row in KINDS for backend in ("aot", "composite")])
def test_a_part_of_the_average_is_mixed_with_masters(case, dtype, backend):
    """0.4 w + 0.6 a, rounded to the parameter's dtype once."""
    pair = averaging(case, MIXED[dtype], backend=backend)
    pair.run("pynative", 4)
    before, kept = bits(pair.params), digest(pair)
    with pair.optimizer.averaged(weight=0.6):
        inside = [numbers(p) for p in pair.params]
        with pair.optimizer.averaged(0.6):  # changes nothing
            pass
        refused(RuntimeError, "with the weight 0.6: leave that block", pair.optimizer.eval)
        assert bits(pair.params) == [x.tobytes() for x in inside]
    assert bits(pair.params) == before
    assert digest(pair) == kept
    for p, a, w, found in zip(pair.params, for_use(pair), pair.reference.masters, inside):
        expected = 0.4 * w + 0.6 * a
        error = TOLERANCE["weight"] * (np.abs(w) + np.abs(a) + 1)
        if dtype != "float32":
            error += 0.5 * UNIT[dtype] * 2.0 ** np.floor(np.log2(np.maximum(np.abs(expected), 2.0**-14)))
        assert (np.abs(found - expected) <= error).all(), p.name
    pair.optimizer.eval(weight=0.6)
    assert [numbers(p).tobytes() for p in pair.params] == [x.tobytes() for x in inside]
    pair.optimizer.train()
    pair.optimizer.eval(weight=0)  # the training weights themselves, of which the average is no part
    assert bits(pair.params) == before
    pair.optimizer.train()
    pair.run("pynative", 3)
    pair.check()


@pytest.mark.parametrize(
    "error, match, value",
    [
        (TypeError, "'weight' must be a number, 0 or greater, but got '0.6'", "0.6"),
        (ValueError, "'weight' must be at most 1, but got 1.5", 1.5),
        (ValueError, "'weight' must be a number, 0 or greater, but got -0.5", -0.5),
        (ValueError, "'weight' must be a number, 0 or greater, but got nan", float("nan")),
    ],
)
def test_a_weight_that_is_none_is_refused(trained, error, match, value):
    optimizer, params, training, _ = trained
    refused(error, match, lambda: optimizer.eval(value))
    refused(error, match, lambda: AveragedWeights(weight=value))
    with pytest.raises(error, match=match), optimizer.averaged(value):
        pass
    assert values_of(params) == training


@for_each(EVERY)
def test_a_state_dict_is_the_same_inside_and_outside(case):
    pair = averaging(case, MIXED["bfloat16"])
    pair.run("pynative", 3)
    outside = pair.optimizer.state_dict()
    pair.optimizer.eval()
    inside = pair.optimizer.state_dict()
    pair.optimizer.train()
    assert outside.keys() == inside.keys()
    for name, value in outside.items():
        assert numbers(inside[name]).tobytes() == numbers(value).tobytes(), name


@for_each(
    dealt([row | {"backend": "aot"} for row in KINDS], mode=MODES_IN_TURN)
    + dealt([row | {"backend": "composite"} for row in KINDS], mode=MODES_IN_TURN[::-1])
)
def test_a_step_inside_is_an_error(case, backend, mode, capfd):
    pair = averaging(case, MIXED["float32"], backend=backend)
    pair.run(mode, 3)
    gradients, dtype = pair.gradients()
    tensors = tuple(tensor(g, dtype) for g in gradients)
    states = [p.asnumpy().copy() for p in (*pair.optimizer.states, *pair.optimizer.averages)]
    with pair.optimizer.averaged():
        inside = bits(pair.params)
        # Of a kernel in a graph, MindSpore reports the status alone; the kernel itself says the rest on stderr.
        is_told = mode == "pynative" or backend == "composite"
        match = "averaged weights" if is_told else "is 8"
        refused(RuntimeError, match, lambda: (pair.call(mode, tensors), ms.runtime.synchronize()))
        assert is_told or "the parameters hold the averaged weights" in capfd.readouterr().err
        assert bits(pair.params) == inside
    for p, state in zip((*pair.optimizer.states, *pair.optimizer.averages), states):
        np.testing.assert_array_equal(p.asnumpy(), state)
    # MindSpore runs a graph no more in which an error was raised.
    vars(pair).pop("cell", None)
    pair.call(mode, tensors)
    pair.follow(gradients)
    pair.check()


@for_each(EVERY)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case, tmp_path):
    whole, first, second = (averaging(case, MIXED["bfloat16"]) for _ in range(3))
    whole.run("pynative", 6)
    first.run("pynative", 3)
    ms_optim.save(tmp_path / "half.safetensors", None, first.optimizer)
    ms_optim.load(tmp_path / "half.safetensors", None, second.optimizer)
    second.rng = first.rng
    second.run("pynative", 3)
    assert digest(second) == digest(whole)
    assert bits(second.optimizer.averages) == bits(whole.optimizer.averages)


@for_each(ON_BOTH_PATHS)
def test_they_start_as_the_weights_of_the_first_step(case, backend):
    """Weights may be loaded after construction, and steps skipped before the first that is applied."""
    pair = averaging(case, MIXED["float32"], backend=backend, skip_nonfinite=True)
    with pair.optimizer.averaged():
        assert [numbers(p).tobytes() for p in pair.params] == bits(pair.params)
        assert pair.optimizer.global_step.asnumpy()[0] < 0, "a graph would take a step"
    rng = np.random.default_rng(8)
    for i, p in enumerate(pair.params):
        value = np.asarray(rng.standard_normal(p.shape), np.float32)
        ops.assign(p, tensor(value, "float32"))
        pair.reference.masters[i] = value.astype(np.float64)
        pair.reference.averages[i] = value.astype(np.float64)
        pair.reference.peak["weight"][i] = np.abs(value.astype(np.float64))
        for name in pair.reference.states[: pair.reference.start_at_weights]:
            pair.reference.state[name][i] = value.astype(np.float64)
            pair.reference.peak[name][i] = np.abs(value.astype(np.float64))
    bad = [np.full(pair.scenario.shape(name), np.nan) for name in pair.scenario.shapes]
    pair.call("pynative", tuple(tensor(g, "float32") for g in bad))
    pair.follow(bad)
    pair.run("pynative", 3)
    pair.check()


def test_a_skipped_step_leaves_the_average_alone(backend):
    pair = Pair(CASES[0], MIXED["float32"], backend=backend, average_decay=0.9, skip_nonfinite=True)
    pair.run("pynative", 3)
    before = bits(pair.optimizer.averages)
    pair.call("pynative", tuple(tensor(np.full(p.shape, np.inf), "float32") for p in pair.params))
    assert bits(pair.optimizer.averages) == before


@for_each([row for row in ON_BOTH_PATHS if row["case"] is not FREE])
def test_without_masters_it_is_of_the_weights_as_they_are_stored(case, backend):
    pair = averaging(case, MIXED["bfloat16"], backend=backend, master_weights=False)
    expected = [numbers(p) for p in pair.params]
    for _ in range(4):
        pair.run("pynative", 1)
        expected = [x + 0.1 * (numbers(p) - x) for p, x in zip(pair.params, expected)]
    for average, x in zip(pair.optimizer.averages, expected):
        np.testing.assert_allclose(numbers(average), x, rtol=1e-6, atol=1e-9)


def test_a_weight_that_is_set_counts_and_not_its_master():
    """As in a step: what is for use is of the weight, unless the master rounds to it."""
    pair = Pair(FREE, MIXED["bfloat16"])
    pair.run("pynative", 3)
    changed = pair.params[1]
    z = numbers(pair.optimizer.states[1])
    changed.set_data(tensor(np.full(changed.shape, 3.0), "bfloat16"))
    with pair.optimizer.averaged():
        np.testing.assert_allclose(numbers(changed), 3.0 + (1 - 1 / 0.9) * (z - 3.0), rtol=2.0**-8)


def test_what_is_for_use_is_of_masters_however_they_are_held():
    inside = []
    for masters in (True, "split"):
        quiet = dataclasses.replace(FREE, reference=lambda *a, **k: None)
        pair = Pair(quiet, Scenario("bfloat16", shapes=("tiles+1",), groups=plain), master_weights=masters)
        for _ in range(3):
            gradients, dtype = pair.gradients()
            pair.optimizer(tuple(tensor(g, dtype) for g in gradients))
        with pair.optimizer.averaged():
            inside.append(numbers(pair.params[0]))
    np.testing.assert_array_equal(*inside)


def test_an_average_of_a_million_elements():
    pair = Pair(CASES[0], SCENARIOS["plain"], average_decay=0.99, average_warmup=True)
    pair.run("pynative", 20)
    pair.check()


def test_states_in_fewer_bits_leave_z_exact():
    pair = Pair(FREE, MIXED["float32"], state_dtype="bfloat16")
    n = len(pair.params)
    assert {str(p.dtype) for p in pair.optimizer.states[:n]} == {"Float32"}
    assert {str(p.dtype) for p in pair.optimizer.states[n:]} == {"BFloat16"}


def test_groups_with_rates_of_their_own_have_sums_of_their_own():
    params = [Parameter(tensor(np.ones(3), "float32"), name=f"w{i}") for i in range(2)]
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.01}]
    optimizer = ScheduleFreeAdamW(groups, 0.5)
    for _ in range(3):
        optimizer(tuple(tensor(np.ones(3), "float32") for _ in params))
    np.testing.assert_allclose(optimizer.step_weights.asnumpy(), [[0.1, 0.03], [0.01, 0.0003]], rtol=1e-6)


def test_steps_without_a_rate_count_for_nothing(backend):
    """A schedule that begins at 0 gives the first steps no weight: there is no part of z in y, and no 0 / 0."""

    def from_nothing(params, rate):
        groups, rate, decay, _, *rest = plain(params, rate)
        rates = [0.0, 0.0, rate, 0.0, 2 * rate, rate]
        return groups, rates, decay, [lambda k: rates[k]] * len(params), *rest

    pair = Pair(FREE, Scenario(shapes=("seven", "matrix"), groups=from_nothing), backend=backend)
    for _ in range(6):
        pair.run("pynative", 1)
        pair.check()
    with pair.optimizer.averaged():
        for p, x in zip(pair.params, pair.reference.evaluated()):
            check_close(numbers(p), x, TOLERANCE["weight"], np.abs(x) + 1, p.name)


def test_a_state_dict_without_averages_starts_them_as_the_weights():
    weights = [Parameter(tensor(np.ones(5), "float32"), name="w") for _ in range(2)]
    plain, averaging = AdamW(weights[:1], 0.1), AdamW(weights[1:], 0.1, average_decay=0.9)
    for _ in range(2):
        plain((tensor(np.ones(5), "float32"),))
    refused(KeyError, "'average.w'", lambda: averaging.load_state_dict(plain.state_dict()))
    averaging.load_state_dict(plain.state_dict(), strict=False)
    np.testing.assert_array_equal(averaging.averages[0].asnumpy(), weights[1].asnumpy())
    free = ScheduleFreeAdamW(weights[1:], 0.1)
    free.load_state_dict({"global_step": plain.global_step}, strict=False)
    np.testing.assert_array_equal(free.states[0].asnumpy(), weights[1].asnumpy())
    # Without a step count they are not those of another run, and stay.
    averaging((tensor(np.ones(5), "float32"),))
    kept = bits(averaging.averages)
    averaging.load_state_dict({"skipped_steps": plain.skipped_steps}, strict=False)
    assert bits(averaging.averages) == kept


def test_what_needs_what_training_holds_is_refused_inside(tmp_path):
    weight = Parameter(tensor(np.ones(5), "float32"), name="w")
    optimizer = AdamW([weight], 0.1, average_decay=0.9)
    optimizer((tensor(np.ones(5), "float32"),))
    given = optimizer.state_dict()
    with optimizer.averaged():
        refused(RuntimeError, "train", lambda: optimizer.load_state_dict(given))
        refused(RuntimeError, "train", lambda: ms_optim.save(tmp_path / "x.safetensors", None, optimizer))
        ms.save_checkpoint(optimizer, str(tmp_path / "wrong.ckpt"))
    wrong = ms.load_checkpoint(str(tmp_path / "wrong.ckpt"))
    match = "'global_step' must hold finite numbers, 0 or greater"
    refused(ValueError, match, lambda: optimizer.load_state_dict(wrong))


def test_weights_written_inside_are_lost_with_a_warning():
    pair = Pair(FREE, MIXED["bfloat16"])
    pair.run("pynative", 2)
    before = bits(pair.params)
    pair.optimizer.eval()
    for p in pair.params[1:3]:
        p.set_data(p + 1)
    with pytest.warns(UserWarning, match=f"2 parameters, the first being '{pair.params[1].name}', were changed"):
        pair.optimizer.train()
    assert bits(pair.params) == before


def test_without_an_average_there_is_nothing_to_put_in():
    optimizer = AdamW([Parameter(tensor(np.ones(5), "float32"), name="w")], 0.1)
    optimizer.train()
    refused(RuntimeError, "pass 'average_decay'", optimizer.eval)


# ---- With Model ---------------------------------------------------------------------------------------------------


class Watch(ms.train.Callback):
    """Keeps the weights as evaluation sees them."""

    def __init__(self, net):
        super().__init__()
        self.net, self.seen = net, []

    def on_eval_step_begin(self, run_context):
        self.seen.append(self.net.weight.asnumpy().copy())


@pytest.mark.parametrize("make", [lambda p: ScheduleFreeAdamW(p, 0.1), lambda p: AdamW(p, 0.1, average_decay=0.5)])
def test_the_callback_evaluates_and_saves_averaged_weights(make, mode, tmp_path):
    rng = np.random.default_rng(0)
    data = (rng.standard_normal((32, 4)).astype(np.float32), rng.integers(0, 3, 32).astype(np.int32))
    data = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(8)
    net = nn.Dense(4, 3)
    optimizer = make(net.trainable_params())
    model = ms.Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"loss"})
    watch, path = Watch(net), tmp_path / "use.safetensors"
    model.fit(2, data, data, callbacks=[AveragedWeights(network=net, path=path), watch])
    training = net.weight.asnumpy().copy()
    with optimizer.averaged():
        averaged = net.weight.asnumpy().copy()
    assert not np.array_equal(averaged, training)
    np.testing.assert_array_equal(watch.seen[-1], averaged)
    np.testing.assert_array_equal(net.weight.asnumpy(), training)
    watch.seen.clear()
    model.eval(data, callbacks=[AveragedWeights(optimizer), watch])
    np.testing.assert_array_equal(watch.seen[0], averaged)
    np.testing.assert_array_equal(net.weight.asnumpy(), training)
    other = nn.Dense(4, 3)
    for p, q in zip(other.get_parameters(), net.get_parameters()):
        p.name = q.name
    ms_optim.load(path, other)
    np.testing.assert_array_equal(other.weight.asnumpy(), averaged)
    watch.seen.clear()
    model.eval(data, callbacks=[AveragedWeights(optimizer, weight=0.25), watch])
    np.testing.assert_allclose(watch.seen[0], 0.75 * training + 0.25 * averaged, rtol=1e-6)
    model.fit(1, data, data, callbacks=[AveragedWeights()])


def test_a_step_of_a_compiled_network_sees_the_switch():
    """Nothing that a graph was compiled with is taken for what the parameters hold later."""
    weight = Parameter(tensor(np.ones(5), "float32"), name="w")
    optimizer = AdamW([weight], 0.1, average_decay=0.5)
    cell, gradient = Step(optimizer), tensor(np.ones(5), "float32")
    ms.set_context(mode=ms.GRAPH_MODE)
    cell(gradient)
    one = weight.asnumpy().copy()
    optimizer.eval()
    optimizer.train()
    cell(gradient)
    assert (weight.asnumpy() < one).all()
    assert int(optimizer.global_step.asnumpy()[0]) == 2


# ---- Interrupts and threads --------------------------------------------------------------------------------------


@pytest.fixture(params=[(AdamW, {"average_decay": 0.5}), (ScheduleFreeAdamW, {})], ids=["average", "iterates"])
def trained(request):
    """An optimizer after three steps, its parameters, and their values in training and averaged."""
    optimizer_class, arguments = request.param
    params = [Parameter(tensor(np.ones(s), "float32"), name=f"w{i}") for i, s in enumerate([(3,), (2, 2)])]
    optimizer = optimizer_class(params, 0.1, **arguments)
    for _ in range(3):
        optimizer(tuple(ops.ones_like(p) for p in params))
    training = values_of(params)
    with optimizer.averaged():
        averaged = values_of(params)
    assert training != averaged
    return optimizer, params, training, averaged


def values_of(params):
    return [numbers(p).tolist() for p in params]


def test_a_block_that_is_interrupted_anywhere_leaves_the_next_one_whole(trained):
    optimizer, params, training, averaged = trained

    def block():
        with optimizer.averaged():
            assert values_of(params) == averaged

    def check(line):
        block()
        optimizer._check_begin()
        assert values_of(params) == training, line
        assert optimizer.global_step.asnumpy() == [3]

    assert at_every_line(block, check) > 50


def test_a_step_after_an_interrupted_block_begins_at_the_training_weights(trained):
    optimizer, params, training, _ = trained

    def block():
        with optimizer.averaged():
            pass

    def check(line):
        optimizer._check_begin()  # what a step begins with
        assert values_of(params) == training, line

    at_every_line(block, check)
    optimizer(tuple(ops.ones_like(p) for p in params))
    assert optimizer.global_step.asnumpy() == [4]


def test_train_restores_what_an_interrupted_eval_has_put_in(trained):
    optimizer, params, training, _ = trained

    def evaluate():
        optimizer.eval()
        optimizer.train()

    def check(line):
        optimizer.train()
        assert values_of(params) == training, line

    at_every_line(evaluate, check)


def test_blocks_in_threads_share_the_averaged_weights(trained):
    """They are there until the last block ends, whichever that is."""
    optimizer, params, training, averaged = trained
    entered, may_leave = threading.Event(), threading.Event()

    def first():
        with optimizer.averaged():
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with optimizer.averaged():
        may_leave.set()
        thread.join()
        assert values_of(params) == averaged
    assert values_of(params) == training


@pytest.mark.parametrize("value", [1, 2])
def test_a_view_is_averaged_and_written_as_any_other_weight(value):
    """MindSpore refuses to write into a view; a weight that was imported transposed is one."""
    params = [Parameter(tensor(np.ones((3, 4)), "float32"), name=f"w{i}") for i in range(3)]
    optimizer = AdamW(params, 0.1, average_decay=0.5)
    optimizer(tuple(ops.ones_like(p) for p in params))
    for p in params[1:]:
        p.set_data(tensor(np.arange(12).reshape(4, 3) * value, "float32").T)
    training = values_of(params)
    with optimizer.averaged():
        assert values_of(params) == values_of(optimizer.averages)
    assert values_of(params) == training
