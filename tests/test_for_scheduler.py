"""Learning rates set from outside: by hand, and by MindSpore's experimental schedulers."""

import re

import mindspore as ms
import numpy as np
import pytest
from cases import OF_ANY_SHAPE
from harness import numbers
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler
from refusals import refused
from sources import ROOT

from ms_optim import AdamW, LocalSteps, for_scheduler

STEPS = 6
CHECKPOINTS = (ROOT / "docs" / "migration" / "checkpoints.md").read_text()
SCHEDULERS = {
    "step": (lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5), lambda k: 0.5 ** (k // 2)),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, gamma=0.25), lambda k: 0.25**k),
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, [lambda k: 1.0 / (1 + k)] * 2), lambda k: 1 / (1 + k)),
    "warm restarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda k: (1 + np.cos(np.pi * (k % 3) / 3)) / 2,
    ),
}


def parameters():
    return [Parameter(Tensor(np.full(5, 2.0), ms.float32), name=name) for name in ("a", "b", "c")]


def grouped(params, rates=(0.5, 0.25)):
    return [{"params": params[:1], "lr": rates[0]}, {"params": params[1:], "lr": rates[1], "weight_decay": 0.1}]


def gradients(step):
    return tuple(Tensor(np.random.default_rng([step, k]).standard_normal(5), ms.float32) for k in range(3))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_mindspore_set_the_rates_of_each_group(name, mode):
    make, factor = SCHEDULERS[name]
    params, expected = parameters(), parameters()
    optimizer = AdamW(grouped(params), 0.1)
    scheduler = make(for_scheduler(optimizer))
    for step in range(STEPS):
        np.testing.assert_allclose(
            optimizer.current_step_lr(), np.array([0.5, 0.25, 0.25]) * factor(step), rtol=1e-6, atol=1e-8
        )
        rates = [float(group["lr"].asnumpy()) for group in optimizer.param_groups]
        optimizer(gradients(step))
        if step == 0:
            plain = AdamW(grouped(expected, rates), 0.1)
        for group, rate in zip(plain.param_groups, rates):
            group["lr"] = rate
        plain(gradients(step))
        scheduler.step()
    for p, q in zip(params, expected):
        np.testing.assert_array_equal(numbers(p), numbers(q))
        assert not np.array_equal(numbers(p), np.full(5, 2.0))


@pytest.mark.parametrize("cls", OF_ANY_SHAPE, ids=lambda cls: cls.__name__)
def test_a_rate_that_is_set_counts_from_the_next_step_on(cls, mode):
    first, second = parameters(), parameters()
    one = cls(first, 0.25, weight_decay=0.1, **cls.required)
    other = cls(second, [0.25, 0.25, 0.125, 0.0], weight_decay=0.1, **cls.required)
    for step in range(4):
        if step >= 2:
            one.param_groups[0]["lr"] = (None, None, 0.125, Tensor(0, ms.float32))[step]
        one(gradients(step))
        other(gradients(step))
        for p, q in zip(first, second):
            np.testing.assert_array_equal(numbers(p), numbers(q))


def test_a_run_of_the_experimental_adamw_goes_on():
    """The page's example: other names, the same steps."""
    theirs, ours = parameters(), parameters()
    before = optim.AdamW(theirs, lr=0.01)
    for step in range(3):
        before(gradients(step))
    for p, q in zip(theirs, ours):
        q.set_data(Tensor(p.asnumpy()))
    (code,) = (code for code in re.findall(r"^```python\n(.*?)^```$", CHECKPOINTS, re.M | re.S) if "state_step" in code)
    after = AdamW(ours, 0.01, weight_decay=0.01)
    exec(code, {"ms": ms, "saved": before.parameters_dict(), "optimizer": after})
    assert int(after.global_step.asnumpy()[0]) == 3
    for step in range(3, 6):
        before(gradients(step))
        after(gradients(step))
        for p, q in zip(theirs, ours):
            np.testing.assert_allclose(numbers(q), numbers(p), rtol=1e-6)
    for p, q in zip(before.exp_avg, after.states):
        np.testing.assert_allclose(numbers(q), numbers(p), rtol=1e-6, atol=1e-7)


def test_inside_a_compiled_training_step():
    net, loss_of = nn.Dense(4, 3), nn.MSELoss()
    optimizer = AdamW(net.trainable_params(), 0.5)

    def forward(x, y):
        return loss_of(net(x), y)

    grad = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def train(x, y):
        loss, given = grad(x, y)
        optimizer(given)
        return loss

    data = Tensor(np.ones((2, 4)), ms.float32), Tensor(np.ones((2, 3)), ms.float32)
    train(*data)
    optimizer.param_groups[0]["lr"] = 0.0
    before = numbers(net.weight).copy()
    train(*data)
    np.testing.assert_array_equal(numbers(net.weight), before)
    for group in optimizer.param_groups:
        group["lr"] += 0.5
    train(*data)
    assert not np.array_equal(numbers(net.weight), before)


def test_groups_that_share_a_rate_are_one():
    params = parameters()
    optimizer = AdamW([{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}], 0.5)
    (group,) = optimizer.param_groups
    assert [p.name for p in group["params"]] == ["a", "b", "c"]
    group["lr"] *= 0.5
    assert optimizer.current_step_lr() == 0.25


def test_the_handed_on_optimizer_is_the_optimizer():
    params = parameters()
    optimizer = LocalSteps(AdamW(params, 0.5), 2)
    handed = for_scheduler(optimizer)
    assert isinstance(handed, optim.Optimizer)
    assert repr(handed) == repr(optimizer)
    handed(gradients(0))
    assert int(optimizer.local_step.asnumpy()[0]) == 1
    names = [p.name for p in params]
    assert names == ["a", "b", "c"]
    handed.param_groups[0]["initial_lr"] = 3.0
    assert optimizer.param_groups[0]["initial_lr"] == 3.0


def test_what_cannot_be_set():
    group = AdamW(parameters(), 0.5).param_groups[0]
    number = "'lr' must be a number, 0 or greater, but got "
    refused(ValueError, number + "-1.0", group.update, {"lr": -1.0})
    refused(TypeError, number + "'1'", group.update, {"lr": "1"})
    refused(TypeError, number + "a Tensor of shape", group.update, {"lr": Tensor([1.0, 2.0], ms.float32)})
    refused(ValueError, number + "nan", group.update, {"lr": float("nan")})
    refused(KeyError, "only 'lr' of a group can be set .*, not 'weight_decay'", group.update, {"weight_decay": 0.1})
    refused(KeyError, "not 'params'", group.update, {"params": []})
    assert float(group["lr"].asnumpy()) == 0.5
    for rate in ([0.1, 0.2], nn.CosineDecayLR(0.0, 0.1, 10)):
        optimizer = AdamW(parameters(), rate)
        refused(TypeError, "'learning_rate' must be a number where 'param_groups' is used", for_scheduler, optimizer)
    refused(TypeError, "'optimizer' must be an optimizer of this package", for_scheduler, nn.SGD(parameters()))


def test_a_target_is_refused_in_words():
    optimizer = AdamW(parameters(), 0.5)
    assert optimizer.target == "CPU"
    refused(NotImplementedError, "'target' cannot be set to 'CPU'.*offload=True", setattr, optimizer, "target", "CPU")
