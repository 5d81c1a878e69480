"""Gradients that are released: each weight moves inside the backward pass, as in an ordinary step, to the bit."""

import dataclasses
import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from cases import ANY_SHAPE, OF_EACH_KIND, dealt, every_case, for_each
from harness import digest_of, tensor
from mindspore import Parameter, Tensor, nn, ops
from refusals import refused

import ms_optim
from ms_optim import AdamW, DGCMomentum, Lamb, ReleasedTrainStep
from ms_optim.base import gradient_release, weight_readers
from ms_optim.paths.fused import released
from ms_optim.states import shares

EXCHANGES = ("DGCMomentum",)
RELEASED = [case for case in ANY_SHAPE if case.name not in EXCHANGES]


class Net(nn.Cell):
    """A layer that is used twice, two layers that share a weight, and one that is not used."""

    def __init__(self, dtype="float32"):
        super().__init__()
        rng = np.random.default_rng(0)
        self.first, self.twice, self.last, self.unused = (
            nn.Dense(*sizes) for sizes in ((20, 70), (70, 70), (70, 20), (3, 3))
        )
        for p in self.trainable_params():
            p.set_dtype(getattr(ms, dtype))
            p.set_data(tensor(rng.standard_normal(p.shape) * 0.2, dtype))

    def construct(self, x):
        x = ops.tanh(self.through(self.first, x))
        x = self.through(self.twice, ops.tanh(self.through(self.twice, x)))
        tied = ops.cast(self.last.weight, ms.float32)
        return self.through(self.last, ops.matmul(ops.matmul(x, tied.T), tied))

    def through(self, layer, x):
        """Return what a layer makes of x in float32: on CPU there are no products of bfloat16 numbers."""
        return ops.matmul(x, ops.cast(layer.weight, ms.float32).T) + ops.cast(layer.bias, ms.float32)


def data(k):
    rng = np.random.default_rng(k)
    return tensor(rng.standard_normal((9, 20)), "float32"), tensor(rng.standard_normal((9, 20)), "float32")


def pair(make, passes=1, dtype="float32", loss_fn=None):
    """Return two training steps from the same start, an ordinary one and one that releases, and their optimizers."""
    loss_fn = loss_fn or nn.MSELoss()
    nets = [Net(dtype), Net(dtype)]
    ordinary, releasing = (make(net.trainable_params()) for net in nets)
    scale = ordinary.loss_scale
    grad = ms.value_and_grad(lambda x, y: loss_fn(nets[0](x), y) * scale, None, ordinary.parameters)

    def step(x, y):
        loss, gradients = grad(x, y)
        ordinary(gradients)
        return loss / scale

    return step, ReleasedTrainStep(nets[1], loss_fn, releasing, passes), ordinary, releasing


def check_same(ordinary, releasing, *without):
    assert digest_of(ordinary, *without) == digest_of(releasing, *without)


# Where MindSpore's operators take what is special about a rule into account: elementwise, layer-wise, of matrices,
# weighing its steps, keeping powers of betas.
ON_OPERATORS = (*OF_EACH_KIND, "Muon", "AdamOffload")
# What needs one pass, and what needs two.
ASKED = {
    "plain": {"weight_decay": 0.1},
    "8bit": {"weight_decay": 0.1, "state_dtype": "8bit", "loss_scale": 64.0},
    "4bit": {"weight_decay": 0.1, "state_dtype": "4bit"},
    "clip": {"grad_clip_norm": 0.05, "weight_decay": 0.1},
    "skip": {"weight_decay": 0.1, "skip_nonfinite": True},
}


@every_case(RELEASED, kind=["plain", "8bit", "4bit"])
def test_weights_and_states_are_those_of_ordinary_steps(case, kind):
    check_training(case, {"skip_nonfinite": False, **ASKED[kind]}, 1)


@every_case(RELEASED, kind=["clip", "skip"])
def test_weights_and_states_are_those_of_ordinary_steps_with_two_passes(case, kind):
    check_training(case, ASKED[kind], 2)


@for_each(
    dealt([{"case": case} for case in RELEASED if case.name in ON_OPERATORS], kind=["skip", "8bit", "clip", "plain"])
)
def test_weights_and_states_are_those_of_ordinary_steps_on_operators(case, kind):
    asked = {"skip_nonfinite": False, **ASKED[kind], "backend": "composite"}
    check_training(case, asked, 2 if kind in ("clip", "skip") else 1)


def with_rates(params):
    """Return params in groups, whose rates change differently."""
    return [{"params": params[:1], "lr": [0.01, 0.04, 0.02, 0.03]}, {"params": params[1:]}]


def check_training(case, asked, passes):
    step, released, *optimizers = pair(lambda params: case.optimizer(with_rates(params), 0.01, **asked), passes)
    for k in range(4):
        np.testing.assert_array_equal(step(*data(k)).asnumpy(), released(*data(k)).asnumpy())
    check_same(*optimizers)


@pytest.mark.parametrize("master_weights", [True, "split", "split8", False])
def test_bfloat16_weights(master_weights):
    step, released, *optimizers = pair(
        lambda params: AdamW(params, 0.01, weight_decay=0.1, master_weights=master_weights), dtype="bfloat16"
    )
    for k in range(4):
        step(*data(k))
        released(*data(k))
    check_same(*optimizers)
    _, handed_on = released.forward_and_backward(*data(4))
    assert (handed_on[0].shape, handed_on[0].dtype) == ((1, 1, 1), ms.bfloat16)


# How a layer can read another layer's weight without sending it a gradient.
READERS = {
    "matmul": ops.matmul,
    "mul": lambda x, w: x * w[0],
    "tanh": lambda x, w: x * ops.tanh(w).sum(),
    "norm": lambda x, w: x / (1.0 + ops.square(w).sum().sqrt()),
    "bias": lambda x, w: ops.square(x + w[1]),
    "gather": lambda x, w: x * ops.gather(w, Tensor([2], ms.int32), 0),
}


class Reading(nn.Cell):
    """A chain of products, before each of which weights of any layer are read behind stop_gradient."""

    def __init__(self, readers):
        super().__init__()
        rng = np.random.default_rng(3)
        weights = [tensor(rng.standard_normal((6, 6)) * 0.5, "float32") for _ in readers]
        self.readers, self.weights = (
            readers,
            ms.ParameterTuple([Parameter(w, name=f"w{i}") for i, w in enumerate(weights)]),
        )

    def construct(self, x, y):
        for weight, reads in zip(self.weights, self.readers):
            for other, how in reads:
                x = READERS[how](x, ops.stop_gradient(self.weights[other]))
            x = ops.tanh(ops.matmul(x, weight))
        return ops.square(x - y).sum()


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_the_rest_of_the_pass_reads_is_updated_after_it(seed):
    """Also a function that was compiled before sees each new weight, and nothing waits that nobody reads."""
    rng = np.random.default_rng(seed)
    readers = [
        [(int(rng.integers(4)), str(rng.choice(list(READERS)))) for _ in range(rng.integers(3))] for _ in range(4)
    ]
    ordinary, releasing = Reading(readers), Reading(readers)
    optimizers = [AdamW(net.trainable_params(), 0.05, eps=1e-3) for net in (ordinary, releasing)]

    @ms.jit
    def sees(x):
        return x + releasing.weights[0] + releasing.weights[3]

    zeros = ops.zeros((6, 6))
    sees(zeros)
    grad = ms.value_and_grad(ordinary, None, optimizers[0].parameters)
    step = ReleasedTrainStep(releasing, None, optimizers[1])
    for k in range(4):
        x, y = (tensor(np.random.default_rng((k, i)).standard_normal((5, 6)), "float32") for i in range(2))
        optimizers[0](grad(x, y)[1])
        step(x, y)
        np.testing.assert_array_equal(sees(zeros), releasing.weights[0] + releasing.weights[3])
    check_same(*optimizers)


def test_a_weight_is_updated_as_soon_as_nobody_reads_it():
    net = Reading([[], [(2, "matmul")], [], []])
    optimizer, waited = AdamW(net.trainable_params(), 0.05), []
    move = gradient_release.Release._move

    def moving(self, may_move):
        move(self, may_move)
        waited.append(sorted(self._waiting))

    step = ReleasedTrainStep(net, None, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_release.Release, "_move", moving)
        for _ in range(2):
            step(ops.ones((5, 6)), ops.zeros((5, 6)))
    # Gradients arrive last layer first, each before the pass reaches what its layer reads behind stop_gradient.
    assert [2 in waiting for waiting in waited[-5:]] == [False, True, True, False, False]
    assert waited[-1] == []


def test_what_reads_no_more_than_its_own_weight_waits_for_nothing_but_its_reader():
    weight = Parameter(ops.ones((3, 3)), name="w")
    readers = weight_readers.Readers(weight)
    for dtype in (ms.float16, ms.bfloat16, ms.float32):
        weight.set_dtype(dtype)
        assert readers.renew()()  # it has other memory: who reads the memory from before cannot be seen
        address = weight.data_ptr()
        assert not readers.renew()()
        reader = Tensor(weight)
        is_read = readers.renew()
        assert is_read()
        del reader
        assert not is_read()
        assert weight.data_ptr() == address


def test_groups_schedules_and_centralization():
    def make(params):
        matrices, vectors = ([p for p in params if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        groups = [
            {"params": matrices, "lr": nn.ExponentialDecayLR(0.05, 0.8, 2), "grad_centralization": True},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return Lamb(groups, 0.01, weight_decay=0.1, average_decay=0.9)

    step, released, *optimizers = pair(make)
    for k in range(5):
        step(*data(k))
        released(*data(k))
    check_same(*optimizers)
    with optimizers[0].averaged(), optimizers[1].averaged():
        check_same(*optimizers)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_infinity_that_appears_late_moves_nothing_with_two_passes(poison):
    """The last gradient to arrive is that of the first layer."""
    step, released, ordinary, releasing = pair(lambda params: AdamW(params, 0.01, skip_nonfinite=True), 2)
    x, y = data(0)
    step(x, y)
    released(x, y)
    before = digest_of(releasing, "skipped_steps", "statistics")
    bad = x.asnumpy()
    bad[0, 0] = poison
    released(Tensor(bad), y)
    assert releasing.skipped_steps.asnumpy()[0] == 1
    assert releasing.global_step.asnumpy()[0] == 1
    assert digest_of(releasing, "skipped_steps", "statistics") == before
    for k in range(2):
        step(*data(k))
        released(*data(k))
    check_same(ordinary, releasing, "skipped_steps")


def test_each_gradient_is_free_before_the_next_layer_is_reached():
    """Of a chain of layers no more than a few gradients are alive at a time, where an ordinary step has all."""
    net = nn.SequentialCell([nn.Dense(50, 50, has_bias=False) for _ in range(12)])
    optimizer = AdamW(net.trainable_params(), 0.01)
    alive, most = weakref.WeakSet(), [0]
    release = gradient_release.Release._take

    def counting(self, i, gradient):
        alive.add(gradient)
        gc.collect()
        most[0] = max(most[0], len(alive))
        return release(self, i, gradient)

    step = ReleasedTrainStep(net, nn.MSELoss(), optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_release.Release, "_take", counting)
        for _ in range(2):
            step(ops.ones((4, 50)), ops.zeros((4, 50)))
    assert most[0] <= 2
    assert optimizer.global_step.asnumpy()[0] == 2


def test_a_backward_pass_that_fails_counts_nothing_and_training_goes_on():
    class Fails(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fails = False

        def construct(self, x):
            return x * 1

        def bprop(self, x, out, dout):
            if self.fails:
                raise ValueError("no memory")
            return (dout,)

    middle = Fails()
    first, last = nn.Dense(5, 6), nn.Dense(6, 7)
    net = nn.SequentialCell([first, middle, last])
    optimizer = AdamW(net.trainable_params(), 0.01)
    step = ReleasedTrainStep(net, nn.MSELoss(), optimizer)
    x, y = ops.ones((2, 5)), ops.zeros((2, 7))
    step(x, y)
    before = {p.name: p.asnumpy().copy() for p in net.trainable_params()}
    middle.fails = True
    refused(RuntimeError, "a backward pass failed. The step is not counted, and 2 parameters were updated", step, x, y)
    assert optimizer.global_step.asnumpy()[0] == 1
    moved = {name for name, w in before.items() if not np.array_equal(w, dict(net.parameters_dict())[name].asnumpy())}
    assert moved == {last.weight.name, last.bias.name}
    middle.fails = False
    step(x, y)
    assert optimizer.global_step.asnumpy()[0] == 2


def loop(passes=1, **arguments):
    """Return a loop's function of gradients, of a network with two parameters, and the optimizer."""
    net = nn.Dense(3, 2)
    optimizer = AdamW(net.trainable_params(), 0.01, **arguments)
    optimizer.attach(passes)
    return ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters), optimizer, net


def test_gradients_cannot_be_accumulated():
    grad, optimizer, net = loop()
    grad(ops.ones((1, 3)))
    before = {p.name: p.asnumpy().copy() for p in net.trainable_params()}
    refused(RuntimeError, "a second gradient of '.*' has arrived in one backward pass", grad, ops.ones((1, 3)))
    for p in net.trainable_params():
        np.testing.assert_array_equal(before[p.name], p.asnumpy())
    assert sorted(optimizer.abandon()) == sorted(before)
    assert optimizer.global_step.asnumpy()[0] == 0
    grad(ops.ones((1, 3)))
    assert optimizer.finish()
    assert optimizer.global_step.asnumpy()[0] == 1


def test_nor_while_they_are_measured():
    grad, optimizer, _ = loop(2, grad_clip_norm=1.0)
    grad(ops.ones((1, 3)))
    refused(RuntimeError, "a second gradient of '.*' has arrived in one backward pass", grad, ops.ones((1, 3)))
    assert optimizer.abandon() == []


def test_gradients_that_never_arrive_are_named():
    net = nn.Dense(3, 2)
    optimizer = AdamW(net.trainable_params(), 0.01)
    optimizer.attach()
    refused(
        RuntimeError, "2 parameters must arrive before finish.*only 0 did.*0 parameters were updated", optimizer.finish
    )
    ms.value_and_grad(lambda x: net(x).sum(), None, [net.weight])(ops.ones((1, 3)))
    refused(
        RuntimeError, "but only 1 did; the one of '.*bias' is missing.* not counted, and 1 parameters", optimizer.finish
    )
    assert optimizer.global_step.asnumpy()[0] == 0
    ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(ops.ones((1, 3)))
    assert optimizer.finish()


def check_two_passes(grad, optimizer, net, before):
    """Take a step of two passes, of which the first leaves the weights as they were."""
    grad(ops.ones((1, 3)))
    assert optimizer.finish() is False
    for p, w in zip(net.trainable_params(), before):
        np.testing.assert_array_equal(p.asnumpy(), w)
    grad(ops.ones((1, 3)))
    assert optimizer.finish() is True


def test_the_first_of_two_passes_moves_nothing():
    grad, optimizer, net = loop(2, grad_clip_norm=1.0)
    before = [p.asnumpy().copy() for p in net.trainable_params()]
    grad(ops.ones((1, 3)))
    assert optimizer.abandon() == []
    begun, check = [], optimizer._attachment.release.check
    optimizer._attachment.release.check = lambda: begun.append(check())
    check_two_passes(grad, optimizer, net, before)
    assert len(begun) == 1
    assert not np.array_equal(net.weight.asnumpy(), before[0])


def test_what_was_measured_is_forgotten_with_its_step():
    """Between the two passes a step is under way; abandoned there, or in the second pass, the next one begins anew."""
    grad, optimizer, net = loop(2, grad_clip_norm=1.0)
    for passes in (1, 2):
        grad(ops.ones((1, 3)))
        assert optimizer.finish() is False
        refused(RuntimeError, "detach.* must be called between two steps", optimizer.detach)
        refused(RuntimeError, "state_dict.* must be called between two steps", optimizer.state_dict)
        if passes == 2:
            grad(ops.ones((1, 3)))
        assert len(optimizer.abandon()) == (2 if passes == 2 else 0)
        optimizer.state_dict()
    before = [p.asnumpy().copy() for p in net.trainable_params()]
    check_two_passes(grad, optimizer, net, before)
    assert optimizer.global_step.asnumpy()[0] == 1
    optimizer.detach()


def test_what_is_asked_between_is_refused_in_the_middle_of_a_step(tmp_path):
    grad, optimizer, net = loop(average_decay=0.9)
    grad(ops.ones((1, 3)))
    between = [
        ("state_dict", optimizer.state_dict),
        ("load_state_dict", lambda: optimizer.load_state_dict({})),
        ("save", lambda: ms_optim.save(tmp_path / "x", net, optimizer)),
        ("averaged", optimizer.eval),
        ("detach", optimizer.detach),
    ]
    for name, call in between:
        refused(RuntimeError, rf"{name}.* must be called between two steps", call)
    optimizer.finish()
    for _, call in (between[0], between[2]):
        call()


def test_an_ordinary_step_is_refused_until_detached():
    grad, optimizer, _ = loop()
    _, gradients = grad(ops.ones((1, 3)))
    assert [g.shape for g in gradients] == [(1, 1, 1), (1, 1)]
    optimizer.finish()
    refused(RuntimeError, "since attach.*call finish", optimizer, gradients)
    refused(RuntimeError, "released already: call detach", optimizer.attach)
    optimizer.detach()
    _, gradients = grad(ops.ones((1, 3)))
    assert [g.shape for g in gradients] == [(2, 3), (2,)]
    optimizer(gradients)
    assert optimizer.global_step.asnumpy()[0] == 2
    optimizer.attach()
    grad(ops.ones((1, 3)))
    optimizer.finish()
    assert optimizer.global_step.asnumpy()[0] == 3


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_who_is_dropped_releases_nothing_and_two_never_share_a_weight(shape):
    ones = tensor(np.ones(shape), "float32")
    w = Parameter(ones.copy(), name="w")
    grad = ms.value_and_grad(lambda x: (x * w).sum(), None, ms.ParameterTuple([w]))
    second = AdamW([w], 0.1)
    second.attach()
    second = AdamW([w], 0.5)  # as in a cell of a notebook that is run again
    np.testing.assert_array_equal(grad(ones)[1][0], ones)
    assert np.all(w.asnumpy() == 1.0)
    second.attach()
    grad(ones)
    assert second.finish()
    assert np.all(w.asnumpy() == 0.5)
    third = AdamW([w], 0.5)
    refused(RuntimeError, "'w' is updated inside the backward pass by another optimizer.*detach", third.attach)
    _, gradients = grad(ones)
    second.finish()
    refused(RuntimeError, "'w' is updated inside the backward pass by another optimizer.*detach", third, gradients)
    del second
    gc.collect()
    before = w.asnumpy().copy()
    _, gradients = grad(ones)
    np.testing.assert_array_equal(gradients[0], ones)
    np.testing.assert_array_equal(w, before)
    third(gradients)


def test_what_is_handed_on_is_no_gradient_of_any_weight():
    """A loop that goes on with it elsewhere is refused, also where the weight has one element."""
    weights = [
        Parameter(tensor(np.ones(shape), "float32"), name=f"w{len(shape)}") for shape in ((), (1,), (1, 1), (1, 1, 1))
    ]
    optimizer, other = AdamW(weights, 0.1), AdamW([Parameter(w.copy(), name=w.name) for w in weights], 0.1)
    optimizer.attach()
    grad = ms.value_and_grad(lambda x: sum((x * w).sum() for w in weights), None, optimizer.parameters)
    _, handed_on = grad(ops.ones((1,)))
    refused(ValueError, "shape", other, handed_on)


def test_weights_that_are_set_or_loaded_after_attach_are_updated():
    grad, optimizer, net = loop()
    for change in (
        lambda p: p.set_data(Tensor(np.full(p.shape, 2.0), ms.float32)),
        lambda p: ops.assign(p, ops.ones_like(p)),
        lambda p: ms.load_param_into_net(net, {p.name: Parameter(ops.zeros_like(p), name=p.name)}),
    ):
        for p in net.trainable_params():
            change(p)
        before = [p.asnumpy().copy() for p in net.trainable_params()]
        grad(ops.ones((1, 3)))
        optimizer.finish()
        for p, w in zip(net.trainable_params(), before):
            assert (p.asnumpy() < w).all()


def test_a_step_with_averaged_weights_in_the_parameters_is_refused():
    grad, optimizer, _ = loop(average_decay=0.9)
    grad(ops.ones((1, 3)))
    optimizer.finish()
    with optimizer.averaged():
        refused(RuntimeError, "hold the averaged weights", grad, ops.ones((1, 3)))
    grad(ops.ones((1, 3)))
    assert optimizer.finish()


def test_who_cannot_says_why():
    def made(kind=AdamW, **arguments):
        return kind([Parameter(tensor(np.ones((3, 2)), "float32"), name="w")], 0.1, **arguments)

    refused(RuntimeError, "exchanges gradients", made(DGCMomentum, momentum=0.9, rampup_begin_step=0).attach)
    refused(ValueError, "'passes' must be 2, because 'grad_clip_norm'", made(grad_clip_norm=1.0).attach)
    refused(ValueError, "'passes' must be 2, because 'skip_nonfinite'", made(skip_nonfinite=True).attach)
    for wrong in (0, 3, True, "1"):
        refused(ValueError, "'passes' must be 1 or 2", made().attach, wrong)
    for call in ("finish", "abandon", "detach"):
        refused(RuntimeError, f"{call}.. must be called after attach", getattr(made(), call))
    net = Net()
    settings = dataclasses.replace(made()._parts.settings, is_parallel=True)
    for part in ({"slices": net}, {"shares": net}, {"settings": settings}):
        exchanging = made()
        exchanging._attachment.parts = dataclasses.replace(exchanging._parts, **part)
        refused(RuntimeError, "attach.. is not supported by optimizers that exchange", exchanging.attach)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms, "get_auto_parallel_context", lambda _: "data_parallel")
        refused(RuntimeError, "attach.. needs the parallel mode 'stand_alone'", made().attach)
    upstream = nn.SGD(net.trainable_params())
    refused(TypeError, "'optimizer' must be an optimizer of ms_optim", ReleasedTrainStep, net, None, upstream)
    ms.set_context(mode=ms.GRAPH_MODE)
    refused(RuntimeError, "attach.. needs PyNative mode", made().attach)


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel", "semi_auto_parallel"])
def test_where_other_workers_gradients_come_later_it_is_refused(mode):
    optimizer = AdamW(Net().trainable_params())
    ms.set_auto_parallel_context(parallel_mode=mode)
    try:
        refused(RuntimeError, "attach.. needs the parallel mode 'stand_alone'", optimizer.attach)
    finally:
        ms.reset_auto_parallel_context()
    optimizer.attach()


class OneOfTwo(shares.Peers):
    """A worker whose peer is not there."""

    def all_gather(self):
        return None


def test_an_optimizer_with_sharded_states_refuses(monkeypatch):
    """That with sliced tensors is refused in tests/sharding_worker.py, as it takes processes."""
    monkeypatch.setattr(shares, "peers", lambda: OneOfTwo(0, 2, None))
    optimizer = AdamW(Net().trainable_params(), shard_states=True)
    refused(RuntimeError, "attach.. is not supported by optimizers that exchange", optimizer.attach)


class WithLoss(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x, y):
        return ((self.net(x) - y) ** 2).mean()


def test_a_network_that_returns_its_loss():
    """The loss scale multiplies it, as it does a loss that a function makes."""
    held, losses = [], []
    for has_loss in (True, False):
        net = nn.Dense(20, 20, weight_init=0.1, bias_init=0.0)
        optimizer = Lamb(net.trainable_params(), 0.1, loss_scale=2.0**20)
        step = ReleasedTrainStep(*((WithLoss(net), None) if has_loss else (net, nn.MSELoss())), optimizer)
        losses.append([float(step(*data(k))) for k in range(3)])
        held.append([*net.trainable_params(), *optimizer.states])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for p, q in zip(*held):
        np.testing.assert_allclose(p.asnumpy(), q.asnumpy(), rtol=1e-4, atol=1e-8)


def test_a_parameter_that_changed_after_attach_is_named():
    _, optimizer, net = loop()
    before = net.weight.asnumpy().copy()
    optimizer.states[1].set_data(Tensor(np.ones(7, np.float32)), slice_shape=True)
    refused(ValueError, "must stay as it was", optimizer._attachment.release._take, 0, ops.ones((2, 3)))
    np.testing.assert_array_equal(net.weight.asnumpy(), before)


def test_a_gradient_that_does_not_fit_is_refused_before_its_weight_moves():
    _, optimizer, net = loop()
    before = [p.asnumpy().copy() for p in net.trainable_params()]
    for wrong, error in ((ops.ones((3, 2)), ValueError), (ops.ones((2, 3), ms.int32), TypeError)):
        refused(error, "the gradient of '.*weight'", optimizer._attachment.release._take, 0, wrong)
    for p, w in zip(net.trainable_params(), before):
        np.testing.assert_array_equal(p.asnumpy(), w)


def test_the_graph_that_lets_threads_sleep_has_an_operator():
    """Without one, which MindSpore's simplification may take out, threads go on polling."""
    assert released._through_a_graph(Tensor([2.0], ms.float64)).asnumpy() == [3.0]
