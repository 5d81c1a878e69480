"""Scaling the loss changes nothing but what it is for: through Model at every level, and in loops of one's own."""

import mindspore as ms
import numpy as np
import pytest
from cases import ANY_SHAPE, MODES_IN_TURN, OF_EACH_KIND, every_case, for_each
from harness import numbers, tensor
from mindspore import amp, nn

SCALE = 1024.0  # a power of two, so that scaling is exact
STEPS = 6


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Let level O1, which rewrites the network's source, write it where it is forgotten."""
    monkeypatch.chdir(tmp_path)


class Net(nn.Cell):
    """Two layers with normalization between, whose weights are the same every time."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.hidden = nn.Dense(6, 8, weight_init=tensor(rng.standard_normal((8, 6)) / 3, "float32"), bias_init="zeros")
        self.norm = nn.LayerNorm((8,))
        self.out = nn.Dense(8, 3, weight_init=tensor(rng.standard_normal((3, 8)) / 3, "float32"), bias_init="zeros")

    def construct(self, x):
        return self.out(ms.ops.relu(self.norm(self.hidden(x))))


def data():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((STEPS * 16, 6)).astype(np.float32)
    return x, x[:, :3].argmax(1).astype(np.int32)


def through_model(case, level, scale, mode):
    """Train and return the weights, with what the optimizer thinks of the steps."""
    net = Net()
    arguments = (
        {} if scale == 1.0 else {"loss_scale_manager": ms.FixedLossScaleManager(scale, drop_overflow_update=False)}
    )
    optimizer = case.optimizer(net.trainable_params(), 0.01, weight_decay=0.1, loss_scale=scale)
    model = ms.Model(net, nn.CrossEntropyLoss(), optimizer, amp_level=level, **arguments)
    dataset = ms.dataset.NumpySlicesDataset(data(), shuffle=False).batch(16)
    model.train(1, dataset, dataset_sink_mode=False)
    return [numbers(p) for p in net.trainable_params()], optimizer


# How far apart two weights may be, relative to the largest of the tensor. A power of two is exact in float32.
# float16 has fewer digits below 6e-5, which scaling spares it. By another number each gradient rounds once or twice
# more, and Adam's division makes of that as much in the step.
U = 2.0**-24


# Apart from the first, levels cast networks and gradients, and the optimizer sees no more of them than the dtype.
LEVELS = [("O0", SCALE, 0.0), ("O0", 1000.0, 16 * U), *((level, SCALE, 16 * U) for level in ("O1", "O2", "O3"))]


@for_each(
    [
        {"case": case, "level": level, "scale": scale, "apart": apart, "mode": MODES_IN_TURN[(i + k) % 4]}
        for i, case in enumerate(ANY_SHAPE)
        for k, (level, scale, apart) in enumerate(LEVELS)
        if i == 0 or k == 0 or (level == "O3" and case.name in OF_EACH_KIND)
    ]
)
def test_through_model(case, level, scale, apart, mode):
    scaled, optimizer = through_model(case, level, scale, mode)
    if level == "O2":
        # Model has no O2 without a manager on CPU: let the scale be 1.
        plain, other = through_model_with_manager_of_one(case, level)
    else:
        plain, other = through_model(case, level, 1.0, mode)
    assert int(optimizer.global_step.asnumpy()[0]) == int(other.global_step.asnumpy()[0]) == STEPS
    for a, b, first in zip(scaled, plain, [numbers(p) for p in Net().trainable_params()]):
        assert np.abs(a - b).max() <= apart * np.abs(b).max()
        assert np.abs(b - first).max() > 1e-3, "nothing was learned"


def through_model_with_manager_of_one(case, level):
    net = Net()
    manager = ms.FixedLossScaleManager(1.0, drop_overflow_update=False)
    optimizer = case.optimizer(net.trainable_params(), 0.01, weight_decay=0.1)
    model = ms.Model(net, nn.CrossEntropyLoss(), optimizer, amp_level=level, loss_scale_manager=manager)
    model.train(1, ms.dataset.NumpySlicesDataset(data(), shuffle=False).batch(16), dataset_sink_mode=False)
    return [numbers(p) for p in net.trainable_params()], optimizer


def own_loop(case, scaler, mode, poisoned=()):
    """Train with value_and_grad; gradients of poisoned steps overflow."""
    net, loss = Net(), nn.CrossEntropyLoss()
    optimizer = case.optimizer(net.trainable_params(), 0.01, weight_decay=0.1, skip_nonfinite=True)
    factor = scaler.scale_value if scaler is not None else ms.Tensor(1.0, ms.float32)

    def forward(x, y, blow):
        return loss(net(x), y) * factor * blow

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)
    if mode == "graph":
        gradient = ms.jit(gradient)
    x, y = data()
    skipped = 0
    for k in range(STEPS):
        part = slice(16 * k, 16 * (k + 1))
        blow = float("inf") if k in poisoned else 1.0
        _, gradients = gradient(ms.Tensor(x[part]), ms.Tensor(y[part]), ms.Tensor(blow, ms.float32))
        if scaler is not None:
            gradients = scaler.unscale(gradients)
        optimizer(gradients)
        now = int(optimizer.skipped_steps.asnumpy()[0])
        if scaler is not None:
            scaler.adjust(ms.Tensor(now == skipped))
        skipped = now
    return [numbers(p) for p in net.trainable_params()], optimizer


@every_case(ANY_SHAPE, mode=MODES_IN_TURN)
def test_in_a_loop_of_ones_own(case, mode):
    """DynamicLossScaler unscales, and skip_nonfinite says which steps overflowed."""
    scaler = amp.DynamicLossScaler(SCALE, 2, 1000)
    scaled, _ = own_loop(case, scaler, mode)
    plain, _ = own_loop(case, None, mode)
    for a, b in zip(scaled, plain):
        np.testing.assert_array_equal(a, b)


@every_case(ANY_SHAPE, mode=MODES_IN_TURN[::-1])
def test_overflows_are_skipped_and_halve_the_scale(case, mode):
    scaler = amp.DynamicLossScaler(SCALE, 2, 1000)
    poisoned, optimizer = own_loop(case, scaler, mode, poisoned=(1, 4))
    assert int(optimizer.skipped_steps.asnumpy()[0]) == 2
    assert int(optimizer.global_step.asnumpy()[0]) == STEPS - 2
    assert float(scaler.scale_value.asnumpy()) == SCALE / 4
    assert all(np.isfinite(w).all() for w in poisoned)


@every_case(ANY_SHAPE)
def test_the_decay_is_not_scaled(case):
    """A zero gradient leaves the decay alone to act; upstream would multiply it by the loss scale."""
    moved = []
    for scale in (1.0, SCALE):
        w = ms.Parameter(tensor(np.full(4, 2.0), "float32"), name="w")
        optimizer = case.optimizer([w], 0.01, weight_decay=0.1, loss_scale=scale)
        for _ in range(3):
            optimizer((tensor(np.zeros(4), "float32"),))
        moved.append(numbers(w))
    np.testing.assert_array_equal(moved[0], moved[1])
    assert (moved[0] < 2.0).all()
