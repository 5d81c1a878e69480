"""AdamOffload: what is on the host, what crosses, and what else its document promises."""

import dataclasses
import threading

import numpy as np
import pytest
from cases import CASES, MODES_IN_TURN, SCENARIOS, SMALL, Scenario, dealt, for_each, grouped, plain
from harness import NUMPY, Pair, Step, numbers, tensor
from mindspore import Parameter
from native import Launch
from refusals import refused
from tolerances import STEPS

from ms_optim import AdamOffload
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import SharedFlag
from ms_optim.paths.fused.adam_offload import CrossingPath
from ms_optim.paths.fused.launches import LaunchCell

CASE = next(case for case in CASES if case.optimizer is AdamOffload)
ALSO = {
    "nesterov": Scenario("bfloat16", groups=grouped, shared={"grad_clip_norm": 3.0}),
    "no_weight_decay": Scenario(groups=lambda params, rate: (*plain(params, rate)[:2], 0.0, *plain(params, rate)[3:])),
}


@pytest.fixture
def accelerator(monkeypatch):
    """Let the package believe that the weights are on an accelerator; MindSpore goes on running on the CPU."""
    monkeypatch.setattr(kernels, "device_target", lambda: "Ascend")


def params(dtype="float32", n=2):
    return [Parameter(tensor(np.ones((2, 3)), dtype), name=f"{dtype}{i}") for i in range(n)]


CROSSING = [{"scenario": name} for name in SCENARIOS if "average" not in name and name != "integer_decay"]


@pytest.mark.usefixtures("accelerator")
@for_each(dealt(CROSSING, mode=MODES_IN_TURN))
def test_crossing_changes_nothing(scenario, mode):
    shapes = [name for name in SCENARIOS[scenario].shapes if name in SMALL]
    pair = Pair(CASE, dataclasses.replace(SCENARIOS[scenario], shapes=tuple(shapes)))
    assert isinstance(pair.optimizer._path, CrossingPath)
    # In PyNative mode the same operators are called one by one, slowly.
    pair.run(mode, STEPS if mode == "graph" else 12)
    pair.check()


@pytest.mark.usefixtures("accelerator")
def test_crossing_with_nesterov(mode):
    pair = Pair(CASE, ALSO["nesterov"], {"use_nesterov": True})
    pair.run(mode, STEPS if mode == "graph" else 12)
    pair.check()


@pytest.mark.usefixtures("accelerator")
def test_a_step_is_skipped_on_both_sides(mode):
    pair = Pair(CASE, Scenario("float16", shapes=("scalar", "matrix"), groups=plain), skip_nonfinite=True)
    extra = Parameter(tensor(np.ones(3), "float32"), name="extra")
    optimizer = AdamOffload([*pair.params, extra], skip_nonfinite=True)
    call = Step(optimizer)
    good = [tensor(np.ones(p.shape), "float16") for p in pair.params]
    call(*good, tensor(np.ones(3), "float32"))
    held = [*optimizer.parameters, *optimizer.states, *optimizer.masters, optimizer.global_step, optimizer.beta1_power]
    before = [numbers(p).tobytes() for p in held]
    call(*good, tensor([1.0, np.nan, 1.0], "float32"))
    bad = [tensor(np.full(p.shape, np.inf), "float16") for p in pair.params]
    call(*bad, tensor(np.ones(3), "float32"))
    assert [numbers(p).tobytes() for p in held] == before
    assert int(optimizer.skipped_steps.asnumpy()[0]) == 2
    call(*good, tensor(np.ones(3), "float32"))
    assert int(optimizer.global_step.asnumpy()[0]) == 2
    assert all(numbers(p).tobytes() != b for p, b in zip(held, before))


@pytest.mark.usefixtures("accelerator")
def test_each_dtype_crosses_in_a_launch_of_its_own_and_ends_the_same(mode):
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal((2, 3)) for _ in range(4)] for _ in range(5)]
    together = [p for pair in zip(params("float32"), params("bfloat16")) for p in pair]
    apart = params("float32") + params("bfloat16")
    one = AdamOffload(together, 0.01, weight_decay=0.1, loss_scale=4.0)
    two = [AdamOffload(apart[k : k + 2], 0.01, weight_decay=0.1, loss_scale=4.0) for k in (0, 2)]
    for g in gradients:
        as_dtype = [tensor(x, "float32" if i % 2 == 0 else "bfloat16") for i, x in enumerate(g)]
        one(tuple(as_dtype))
        for k in range(2):
            two[k](tuple(as_dtype[k::2]))
    for a, b in zip(together, (apart[0], apart[2], apart[1], apart[3])):
        assert a.name == b.name
        np.testing.assert_array_equal(numbers(a), numbers(b))
    assert one._path.group_count == 2
    np.testing.assert_array_equal(one.statistics.asnumpy()[0::2], two[0].statistics.asnumpy())
    np.testing.assert_array_equal(one.statistics.asnumpy()[1::2], two[1].statistics.asnumpy())


def inputs_of(optimizer, launch):
    """Return the tensors that a launch takes and those that it writes, by name."""
    return [p.name for p in optimizer._path.launches[launch].held]


@pytest.mark.parametrize("device", ["CPU", "Ascend", "GPU"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_operator_is_placed_on_the_host(device, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "device_target", lambda: device)
    optimizer = AdamOffload(params(dtype))
    assert optimizer.fused
    for launch in optimizer._path.launches:
        assert launch.kernel.attrs["primitive_target"] == "CPU"


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_never_leave_the_host(dtype):
    """Only the host's operator takes states and masters, and what it returns are weights or updates."""
    optimizer = AdamOffload(params(dtype))
    kept = [p.name for p in (*optimizer.states, *optimizer.masters)]
    assert sorted(inputs_of(optimizer, 0)) == sorted(kept)
    outputs = optimizer._path.launches[0].kernel.out_dtype
    returned = [str(t) for t in outputs[2:]]
    assert returned == ["BFloat16" if dtype == "bfloat16" else "Float32"] * 2
    if dtype == "bfloat16":
        assert optimizer._path.take_master.attrs["primitive_target"] == "CPU"


@pytest.mark.usefixtures("accelerator")
def test_masters_are_taken_on_the_first_step(mode):
    (w,) = params("bfloat16", 1)
    optimizer = AdamOffload([w], learning_rate=1e-3)
    w.set_data(tensor(np.full((2, 3), 5.0), "bfloat16"))
    call = Step(optimizer)
    call(tensor(np.ones((2, 3)), "bfloat16"))
    np.testing.assert_allclose(optimizer.masters[0].asnumpy(), 4.999, rtol=1e-6)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("with_masters", [True, False])
def test_masters_of_a_checkpoint_are_kept_and_missing_ones_taken(with_masters, mode):
    """A checkpoint of nn.AdamOffload has no masters, but steps behind it."""
    pair, other = (Pair(CASE, Scenario("bfloat16", shapes=("matrix",), groups=plain)) for _ in range(2))
    pair.run(mode, 3)
    saved = pair.optimizer.state_dict()
    if not with_masters:
        saved = {name: value for name, value in saved.items() if not name.startswith("master")}
    other.optimizer.load_state_dict(saved, strict=False)
    (weight,) = other.params
    weight.set_data(pair.params[0])
    gradients, _ = pair.gradients()
    call = Step(other.optimizer)
    call(*(tensor(g, "bfloat16") for g in gradients))
    expected = pair.reference.masters if with_masters else pair.reference.weights
    assert np.abs(other.optimizer.masters[0].asnumpy() - expected[0]).max() < 0.05
    assert np.abs(numbers(weight)).max() > 0.5


@pytest.mark.parametrize("dtype, held, crossing", [("float32", 8, 4), ("float16", 12, 2), ("bfloat16", 12, 2)])
def test_report(dtype, held, crossing, monkeypatch):
    optimizer = AdamOffload(params(dtype))
    n, width = 12, 4 if dtype == "float32" else 2
    report = optimizer.offload_report("Ascend")
    assert report.device_bytes == 2 * n * width
    assert report.host_bytes == held * n
    assert (report.to_host_bytes, report.to_device_bytes) == (crossing * n, crossing * n)
    here = optimizer.offload_report()
    assert here.device == "CPU"
    assert here.host_bytes == held * n + 2 * n * width
    assert here.device_bytes == here.to_host_bytes == here.to_device_bytes == 0
    assert "to host a step" in str(report)
    monkeypatch.setattr(kernels, "device_target", lambda: "GPU")
    assert optimizer.offload_report().device == "GPU"
    refused(ValueError, "'device' must be one of .*'TPU'", lambda: optimizer.offload_report("TPU"))
    refused(TypeError, "'device'", lambda: optimizer.offload_report(0))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("dtype", NUMPY)
def test_gradients_go_to_the_host_and_weights_come_back_and_no_more(dtype, monkeypatch):
    """The tensors that the host's operator really takes and returns, against the report."""
    calls, construct = [], LaunchCell.construct

    def recorded(self, constants, rates, sums, tensors):
        returned = construct(self, constants, rates, sums, tensors)
        calls.append(((constants, rates, sums, *tensors), returned))
        return returned

    monkeypatch.setattr(LaunchCell, "construct", recorded)
    optimizer = AdamOffload(params(dtype), weight_decay=0.1, grad_clip_norm=1.0)
    gradients = tuple(tensor(np.ones(p.shape), dtype) for p in optimizer.parameters)
    optimizer(gradients)
    optimizer(gradients)
    report = optimizer.offload_report("Ascend")
    on_host = [id(p) for p in (*optimizer.states, *optimizer.masters)]
    assert len(calls) == 2
    for taken, returned in calls:
        crossing = [t for t in taken if id(t) not in on_host]
        # Constants, rates and counters, whatever the weights' sizes.
        few = [t for t in crossing if t.shape not in [p.shape for p in optimizer.parameters]]
        assert sum(t.nbytes for t in crossing) - sum(t.nbytes for t in few) == report.to_host_bytes
        assert sum(t.nbytes for t in few) < 200
        assert sum(t.nbytes for t in returned[2:]) == report.to_device_bytes
        assert [t.shape for t in returned[2:]] == [p.shape for p in optimizer.parameters]


def test_the_report_counts_what_the_states_hold():
    optimizer = AdamOffload(params("float16"))
    held = sum(p.asnumpy().nbytes for p in (*optimizer.states, *optimizer.masters))
    assert optimizer.offload_report("Ascend").host_bytes == held


def test_target_on_a_processor():
    optimizer = AdamOffload(params())
    assert optimizer.target == "CPU"
    optimizer.target = "CPU"
    for device in ("Ascend", "GPU"):
        refused(ValueError, "'target' must be 'CPU' with the device target CPU", lambda d=device: set_target(d))
    refused(ValueError, "'target' must be one of", lambda: set_target("TPU"))
    refused(TypeError, "'target'", lambda: set_target(1))


def set_target(value):
    AdamOffload(params()).target = value


@pytest.mark.usefixtures("accelerator")
def test_target_on_an_accelerator(mode):
    """With the device as target the arithmetic runs there, in MindSpore's own operators."""
    pair = Pair(CASE, Scenario(shapes=("seven", "matrix"), groups=grouped))
    pair.optimizer.target = "Ascend"
    assert not pair.optimizer.fused
    pair.optimizer.target = "CPU"
    assert pair.optimizer.fused
    pair.optimizer.target = "Ascend"
    weights, states = [[numbers(p) for p in group] for group in (pair.params, pair.optimizer.states)]
    pair.run(mode, 3)
    for group, before in ((pair.params, weights), (pair.optimizer.states, states)):
        assert not any(np.array_equal(numbers(p), b) for p, b in zip(group, before))
    for p, expected in zip(pair.params, pair.reference.weights):
        # There is no float64 on Ascend, and MindSpore's expm1 is inexact on the CPU that stands in for it here.
        np.testing.assert_allclose(numbers(p), expected, rtol=1e-3)
    refused(ValueError, "'target'", lambda: setattr(pair.optimizer, "target", "GPU"))


def test_output_is_true(backend, mode):
    (w,) = params(n=1)
    out = AdamOffload([w], backend=backend)((tensor(np.ones((2, 3)), "float32"),))
    assert out.shape == ()
    assert out.asnumpy().dtype == np.bool_
    assert bool(out)


def test_powers_of_beta_are_kept_for_checkpoints(backend, mode):
    (w,) = params(n=1)
    optimizer = AdamOffload([w], beta1=0.8, beta2=0.99, backend=backend)
    assert (optimizer.beta1_power.name, optimizer.beta2_power.name) == ("beta1_power", "beta2_power")
    for t in range(4):
        np.testing.assert_allclose(optimizer.beta1_power.asnumpy(), [0.8**t], rtol=1e-6)
        np.testing.assert_allclose(optimizer.beta2_power.asnumpy(), [0.99**t], rtol=1e-6)
        Step(optimizer)(tensor(np.ones((2, 3)), "float32"))


def test_the_lock_keeps_every_step_whole():
    """Two threads, each with its own moments, step the same weights: with the lock no step is lost.

    The gradient is constant and so each step moves each weight by the same amount.
    """
    n, steps = 40_000, 60
    weights = [np.zeros(n, np.float32), np.zeros(7, np.float32)]

    def launch(shared):
        states = [[np.zeros(w.size, np.float32) for w in weights] for _ in range(2)]
        gradients = [np.ones(w.size, np.float32) for w in weights]
        return Launch(
            "ms_optim_adam_offload", weights, gradients, states, (0.9, 0.999, 1e-30), 0, rates=(1.0,), shared=shared
        )

    def run(shared):
        for w in weights:
            w[:] = 0.0
        launches = [launch(shared), launch(shared)]
        threads = [threading.Thread(target=lambda x=x: [x.run() for _ in range(steps)]) for x in launches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return np.abs(np.concatenate(weights) + 2 * steps).max()

    for _ in range(5):
        assert run(SharedFlag.LOCKS) < 0.01


def test_locks_of_overlapping_weights_do_not_deadlock():
    """Launches that take the same weights in opposite order wait for each other, not forever."""
    weights = [np.zeros(64, np.float32) for _ in range(40)]

    def launch(order):
        states = [[np.zeros(64, np.float32) for _ in weights] for _ in range(2)]
        gradients = [np.ones(64, np.float32) for _ in weights]
        return Launch("ms_optim_adam_offload", order, gradients, states, (0.9, 0.999, 1e-8), 0, shared=SharedFlag.LOCKS)

    launches = [launch(weights), launch(weights[::-1])]
    threads = [threading.Thread(target=lambda x=x: [x.run() for _ in range(300)], daemon=True) for x in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_locking_asks_the_kernel_for_its_locks(mode):
    (w,) = params(n=1)
    optimizer = AdamOffload([w], 0.1, use_locking=True)
    (launch,) = optimizer._path.launches
    assert (launch.flags.shape[1] - 1) & SharedFlag.LOCKS
    Step(optimizer)(tensor(np.ones((2, 3)), "float32"))
    np.testing.assert_allclose(w.asnumpy(), 0.9, rtol=1e-6)
    assert not (AdamOffload(params())._path.launches[0].flags.shape[1] - 1) & SharedFlag.LOCKS


def test_locking_needs_the_kernel():
    refused(
        RuntimeError,
        "use_locking=True needs the host's operator: backend='composite'",
        lambda: AdamOffload(params(), use_locking=True, backend="composite"),
    )


def test_a_returned_weight_comes_from_its_master():
    """The operator's returned form, through its C interface: no weight goes in, the new one or the update comes out."""
    master = np.full(5, 3.0, np.float32)
    states = [[np.zeros(5, np.float32)] for _ in range(2)]
    launch = Launch(
        "ms_optim_adam_offload",
        [np.zeros(5, np.float16)],
        [np.ones(5, np.float16)],
        states,
        (0.9, 0.999, 1e-8),
        0,
        masters=[master],
        shared=SharedFlag.RETURNED + SharedFlag.MASTERS,
        stages=7,
    )
    out = np.zeros(5, np.float16)
    sums, statistics = np.zeros((1, 5)), np.zeros((1, 5), np.float32)
    launch.arrays = [a for k, a in enumerate(launch.arrays[:-1]) if k not in (7, 8)] + [sums, statistics, out]
    assert launch.run() == 0
    np.testing.assert_allclose(master, 2.99, rtol=1e-6)
    np.testing.assert_array_equal(out, master.astype(np.float16))
    launch.arrays[0] = np.zeros((1 + 15, *launch.arrays[0].shape[1:]), np.int8)
    assert launch.run() == 4
