"""offload=True: any rule steps on the host, with weights on an accelerator, and ends where it ends without, to the bit.

MindSpore runs on the CPU here, and makes none of the copies between host and device.
"""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, MIXED, SCENARIOS, Scenario, constant, dealt, for_each, grouped, plain
from harness import Pair, Step, digest_of, numbers, tensor
from mindspore import Parameter, Tensor, nn
from refusals import refused

from ms_optim import AdamOffload, AdamW, DGCMomentum, ReleasedTrainStep, qk_clip
from ms_optim.kernels import table as kernels
from ms_optim.paths.fused.offloaded import BUCKETS, HostPath, Marks
from ms_optim.states.in_place import write

OFFLOADED = [case for case in CASES if "offload" not in case.cls.refuses]
KINDS = {
    "float32": (Scenario(groups=grouped), {}),
    "clip": (SCENARIOS["clip"], {"skip_nonfinite": True}),
    "bfloat16": (Scenario("bfloat16", groups=grouped), {"state_dtype": "bfloat16"}),
    "8bit": (Scenario("bfloat16", shapes=("seven", "tiles+1"), groups=plain), {"state_dtype": "8bit"}),
    "4bit": (Scenario("float16", shapes=("seven", "tiles+1"), groups=plain), {"state_dtype": "4bit"}),
    "split8": (MIXED["bfloat16"], {"master_weights": "split8"}),
    "no_masters": (SCENARIOS["bfloat16_no_masters"], {"stochastic_rounding": True}),
    "average": (SCENARIOS["bfloat16_average"], {}),
}


@pytest.fixture
def on_accelerator(monkeypatch):
    """Return a function that makes something for weights on an accelerator."""

    def made(make, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "device_target", lambda: "GPU")
            return make(*args, **kwargs)

    return made


def params(dtype="float32", n=2):
    return [Parameter(tensor(np.ones((2, 3)), dtype), name=f"{dtype}{i}") for i in range(n)]


def stepped(pairs, mode, steps, **size):
    """Take the same steps with two optimizers, and compare all that they hold after each."""
    for _ in range(steps):
        for pair in pairs:
            gradients, dtype = pair.gradients(**size)
            pair.call(mode, tuple(tensor(g, dtype) for g in gradients))
        assert digest_of(pairs[0].optimizer) == digest_of(pairs[1].optimizer)


def rows():
    """Return the rows of the test below: every optimizer with every second kind, of those that it takes."""
    kinds = list(KINDS)
    found = [{"case": c, "kind": kinds[k]} for i, c in enumerate(OFFLOADED) for k in range(i % 2, len(kinds), 2)]
    return [row for row in found if row["kind"] != "average" or row["case"].is_averaged]


# A fifth is compiled: each kind with one optimizer at least.
@for_each(dealt(rows(), mode=("graph", *["pynative"] * 4)))
def test_a_step_on_the_host_changes_nothing(case, kind, mode, on_accelerator):
    scenario, shared = KINDS[kind]
    here = Pair(case, scenario, **shared)
    there = on_accelerator(Pair, case, scenario, **shared, offload=True)
    assert isinstance(there.optimizer._path, HostPath)
    assert not isinstance(here.optimizer._path, HostPath)
    stepped((here, there), mode, 3)
    # Weights that are set or loaded between two steps are the ones that train.
    for pair in (here, there):
        pair.params[0].set_data(pair.params[0] * 0.5)
        write(pair.params[-1], np.zeros_like(pair.params[-1].asnumpy()))
    stepped((here, there), mode, 3)


def undecayed(params, rate):
    n = len(params)
    return params, rate, 0.0, [constant(rate)] * n, [constant(0.0)] * n, [False] * n


@for_each(dealt([{"name": name} for name in ("AdamW", "Muon", "AdamOffload")], mode=("pynative", "graph")))
def test_norms_are_held_on_the_host(name, mode, on_accelerator):
    """The radii go to the host and come back with the counters, also those of an optimizer that runs there always."""
    case = next(case for case in CASES if case.name == name)
    scenario = Scenario(shapes=("seven", "matrix", "convolution"), groups=undecayed)
    shared = {"weight_norm": "hyperball", **({} if name == "AdamOffload" else {"offload": True})}
    here, there = Pair(case, scenario, **shared), on_accelerator(Pair, case, scenario, **shared)
    assert isinstance(there.optimizer._path, HostPath)
    stepped((here, there), mode, 3)
    assert (there.optimizer.weight_radii.asnumpy() > 0).all()


@for_each(dealt([{"kind": kind} for kind in ("no_masters", "split8", "average")], mode=("pynative", "graph")))
def test_what_adam_offload_cannot_send_back_runs_on_copies(kind, mode, on_accelerator):
    """A weight's noise, its remainder and its average are made where the weight is: here on the host."""
    case = next(case for case in CASES if case.cls is AdamOffload)
    scenario, shared = KINDS[kind]
    here, there = Pair(case, scenario, **shared), on_accelerator(Pair, case, scenario, **shared)
    assert isinstance(there.optimizer._path, HostPath)
    stepped((here, there), mode, 3)
    weights = sum(p.nbytes for p in there.params)
    kept = sum(p.nbytes for p in there.optimizer._held.of_tensors)
    assert there.optimizer.offload_report("GPU").host_bytes == kept + weights


def test_the_host_has_all_but_weights_and_gradients(on_accelerator, monkeypatch):
    """Of the device's tensors, the host's operators take gradients in every step, and weights where these are new."""
    scenario = Scenario("bfloat16", shapes=("seven", "tiles+1", "matrix"), groups=plain)
    pair = on_accelerator(Pair, OFFLOADED[0], scenario, state_dtype="8bit", offload=True)
    path, sent = pair.optimizer._path, []
    send = type(path.send_weights).construct
    monkeypatch.setattr(type(path.send_weights), "construct", lambda self, x: sent.append(x) or send(self, x))
    on_device = {id(p) for p in (*pair.params, *pair.optimizer._held.counters)}
    held = [p for launch in path.path.launches for p in (*launch.launch.before, *launch.launch.weights)]
    held += [p for launch in path.path.launches for p in launch.launch.held]
    assert on_device.isdisjoint(map(id, held))
    assert path.path.addresses is None, "nor launches by address, which it cannot use"
    assert {id(p) for p in pair.optimizer._held.of_tensors} <= set(map(id, held))
    for launch in path.path.launches:
        assert launch.launch.kernel.attrs["primitive_target"] == "CPU"
        assert launch.fetch.copy.attrs["primitive_target"] == "CPU"
    pair.run("pynative", 3)
    assert [tensors is path.weights for tensors in sent] == [True, False, False, False]
    write(pair.params[1], -pair.params[1].asnumpy())
    pair.run("pynative", 1)
    assert [tensors is path.weights for tensors in sent[4:]] == [True, False]


def test_marks_are_of_the_weights_that_a_step_leaves(mode, on_accelerator):
    """Of others, each step would send all weights once more."""
    pair = on_accelerator(Pair, OFFLOADED[0], MIXED["float32"], offload=True)
    pair.run(mode, 2)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    marks = Marks([p.shape for p in pair.params])
    expected = marks(tuple(Tensor(p.asnumpy()) for p in pair.params)).asnumpy()
    np.testing.assert_allclose(pair.optimizer._path.marks.asnumpy(), expected, rtol=1e-6, atol=1e-6)


def test_tensors_cross_in_buckets(on_accelerator):
    names = [str(i) for i in range(3 * BUCKETS + 1)]
    weights = [Parameter(tensor(np.ones(3), "float32"), name=name) for name in names]
    optimizer = on_accelerator(AdamW, weights, 0.1, grad_clip_norm=1.0, offload=True)
    moving = [launch.weights for launch in optimizer._path.path.launches if hasattr(launch, "fetch")]
    assert len(moving) <= BUCKETS
    assert [p.name for bucket in moving for p in bucket] == names
    assert max(map(len, moving)) == 4


def test_a_step_is_skipped(mode, on_accelerator):
    weights = params("float16")
    optimizer = on_accelerator(AdamW, weights, 0.1, skip_nonfinite=True, offload=True)
    call = Step(optimizer)
    good, bad = (tuple(tensor(np.full((2, 3), x), "float16") for _ in weights) for x in (1.0, np.inf))
    call(*good)
    before = digest_of(optimizer, "skipped_steps", "statistics")
    call(*bad)
    assert digest_of(optimizer, "skipped_steps", "statistics") == before
    assert int(optimizer.skipped_steps.asnumpy()[0]) == 1
    call(*good)
    assert int(optimizer.global_step.asnumpy()[0]) == 2


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("kind", ["8bit", "split8", "average"])
def test_a_checkpoint_goes_on_with_and_without(kind, to_host, on_accelerator):
    scenario, shared = KINDS[kind]
    case = next(case for case in CASES if case.name == "Lamb")
    there = on_accelerator(Pair, case, scenario, **shared, offload=True)
    here = Pair(case, scenario, **shared)
    first, second = (here, there) if to_host else (there, here)
    first.run("pynative", 3)
    second.run("pynative", 1)  # its copies are of older weights now
    for p, loaded in zip(second.params, first.params):
        p.set_data(loaded.copy())
    assert second.optimizer.state_dict().keys() == first.optimizer.state_dict().keys()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.rng = np.random.default_rng(1)
    first.rng = np.random.default_rng(1)
    stepped((first, second), "pynative", 3)


def test_averaged_weights_are_put_in_and_taken_out(on_accelerator):
    case = next(case for case in CASES if case.name == "ScheduleFreeAdamW")
    here = Pair(case, KINDS["bfloat16"][0])
    there = on_accelerator(Pair, case, KINDS["bfloat16"][0], offload=True)
    stepped((here, there), "pynative", 3)
    with here.optimizer.averaged(), there.optimizer.averaged():
        for one, other in zip(here.params, there.params):
            np.testing.assert_array_equal(numbers(one), numbers(other))
    stepped((here, there), "pynative", 3)


def test_qk_clip_is_kept(on_accelerator):
    """What scales weights between two steps is not undone by the host."""
    query, key = (Parameter(tensor(np.ones((4, 3)), "bfloat16"), name=name) for name in ("q", "k"))
    optimizer = on_accelerator(AdamW, [query, key], 1e-4, offload=True)
    gradients = (tensor(np.ones((4, 3)), "bfloat16"),) * 2
    optimizer(gradients)
    qk_clip(query, key, [400.0, 100.0])
    clipped = [numbers(p).copy() for p in (query, key)]
    optimizer(gradients)
    for p, before in zip((query, key), clipped):
        np.testing.assert_allclose(numbers(p), before, atol=1e-2)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (13, 11), (9, 9), (6, 4, 3, 3), (100, 10_000)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changes_are_noticed(shape, dtype):
    rng = np.random.default_rng(0)
    weight = np.asarray(rng.standard_normal(shape))
    marks = Marks([shape])

    def mark(values):
        return marks((tensor(values, dtype),)).asnumpy()[0]

    before = mark(weight)
    assert mark(weight.copy()) == before
    changes = {"scaled": weight * 1.01, "negated": -weight}
    one = weight.copy()
    one.reshape(-1)[-1] = 0
    changes["one"] = one
    if len(shape) > 1:
        changes["swapped rows"] = weight[::-1]
        changes["swapped columns"] = weight[..., ::-1]
    if shape == (9, 9):
        changes["transposed"] = weight.T
    for what, changed in changes.items():
        assert mark(changed) != before, what


def test_offload_does_nothing_where_weights_are_on_the_host():
    one, other = AdamW(params(), 0.1, offload=True), AdamW(params(), 0.1)
    assert type(one._path) is type(other._path)


def test_what_cannot_be_offloaded_is_refused(on_accelerator):
    def make(optimizer=AdamW, tensors=None, **arguments):
        return lambda: on_accelerator(optimizer, tensors or params(), 0.1, **arguments, offload=True)

    refused(RuntimeError, "'offload' needs the fused kernel", make(backend="composite"))
    refused(TypeError, "'offload' must be of type bool", lambda: AdamW(params(), 0.1, offload=1))
    refused(TypeError, "unknown keyword argument 'offload'", make(AdamOffload))
    refused(TypeError, "unknown keyword argument 'offload'", make(DGCMomentum, momentum=0.9, rampup_begin_step=0))
    net = nn.Dense(3, 2)
    optimizer = make(tensors=net.trainable_params())()
    refused(
        RuntimeError,
        r"attach\(\) needs the arithmetic where .* use offload=False",
        ReleasedTrainStep,
        net,
        None,
        optimizer,
    )
    refused(RuntimeError, r"offload_report\(\) needs an optimizer made", AdamW(params()).offload_report)


def test_the_report_counts_what_crosses(on_accelerator):
    weights = [*params("bfloat16", 1), *params("float32", 1)]
    report = on_accelerator(AdamW, weights, 0.1, offload=True).offload_report("GPU")
    # 6 elements of 2 bytes and 6 of 4; gradients likewise; on the host copies, two moments each, and one master.
    assert dataclasses.astuple(report) == ("GPU", 2 * 36, 36 + 12 * 8 + 24, 36, 36)
