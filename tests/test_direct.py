"""Steps called from Python: kernels run at once, after what MindSpore still has to run, and are not interrupted."""

import ctypes
import functools
import signal

import numpy as np
import pytest
from cases import CASES, SCENARIOS, for_each
from harness import Pair, digest_of, numbers, tensor
from interrupting import at_every_line
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype
from refusals import refused
from runtime import set_mode

from ms_optim import AdamW, Lamb, MultiOptimizer, Muon
from ms_optim.arguments.rates import Rates
from ms_optim.kernels import libraries
from ms_optim.kernels.interface import Stage, Status
from ms_optim.schedules import LinearWeightDecay, PowerCoolLR

SIZE = 1000


def parameters(*names):
    return [Parameter(tensor(np.linspace(-1, 1, SIZE).reshape(50, 20), "float32"), name=name) for name in names]


def several():
    """Return an optimizer of three rules, of which one clips its own gradients, and its parameters."""
    a, b, c = parameters("a", "b", "c")
    parts = [AdamW([a], PowerCoolLR(0.1, 0.001, 900)), Lamb([b], 0.1, grad_clip_norm=0.5), Muon([c], 0.1)]
    return MultiOptimizer(parts), [a, b, c]


def one():
    """Return an optimizer of one rule, whose learning rate is a schedule, and its parameters."""
    params = parameters("a", "b")
    return AdamW(params, PowerCoolLR(0.1, 0.001, 900), grad_clip_norm=1.0, average_decay=0.9), params


KINDS = pytest.mark.parametrize("make", [one, several], ids=["AdamW", "MultiOptimizer of AdamW"])


@KINDS
def test_an_operator_called_before_a_step_reads_the_weights_before_it(make):
    set_mode("pynative")
    optimizer, params = make()
    slow = Parameter(tensor(np.full((600, 600), 1 / 600), "float32"), name="slow")
    gradients = tuple(ops.ones_like(p) for p in params)
    for _ in range(5):
        before = [numbers(p) for p in params]
        x = slow
        for _ in range(20):
            x = ops.matmul(slow, x)
        read = [p + x[0, 0] * 0.0 for p in params]
        optimizer(gradients)
        for old, seen, p in zip(before, read, params):
            np.testing.assert_array_equal(numbers(seen), old)
            assert (numbers(p) != old).all()


@KINDS
def test_a_step_interrupted_anywhere_was_taken_whole_or_not_at_all(make):
    set_mode("pynative")
    (optimizer, params), (twin, _) = make(), make()
    gradients = tuple(ops.ones_like(p) for p in params)
    optimizer(gradients), twin(gradients)  # what is compiled at the first step is no line of a later one

    def check(line):
        while twin.global_step.asnumpy() < optimizer.global_step.asnumpy():
            twin(gradients)
        assert digest_of(optimizer) == digest_of(twin), line

    assert at_every_line(lambda: optimizer(gradients), check) > 50
    check("the last")
    assert twin.global_step.asnumpy() > 2  # the last attempt is a step, and those that were interrupted late are


@for_each([{"case": case} for case in CASES if case.name != "DGCMomentum"])
def test_a_step_is_one_call_of_the_kernel(case, monkeypatch):
    set_mode("pynative")
    pair, called = Pair(case, SCENARIOS["grouped"], case.variants.get("all_in_one"), backend="aot"), []
    real = libraries.call_of
    monkeypatch.setattr(libraries, "call_of", lambda *given: called.append(given[1]) or real(*given))
    pair.run("pynative", 1)
    assert len(called) == 1


def test_an_interrupt_between_two_rules_waits_for_the_last(monkeypatch):
    set_mode("pynative")
    optimizer, params = several()
    gradients = tuple(ops.ones_like(p) for p in params)
    real, raised = libraries.call_of, functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGUSR1))
    # In place of the first of three moves comes the interrupt, in a call that executes no line of Python.
    moves = iter([raised, None, None])

    def call_of(library, function, tensors, *addresses):
        is_move = tensors[0].shape[0] > 1 + Stage.GRADIENT_STAGE
        return (next(moves) if is_move else None) or real(library, function, tensors, *addresses)

    before, handler = [numbers(p) for p in params], signal.signal(signal.SIGUSR1, signal.default_int_handler)
    monkeypatch.setattr(libraries, "call_of", call_of)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer(gradients)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert [(numbers(p) != old).any() for p, old in zip(params, before)] == [False, True, True]
    assert optimizer.global_step.asnumpy() == 1


def test_the_rates_of_a_step_are_those_of_a_graph():
    rates = Rates([tensor([0.3], "float32"), PowerCoolLR(0.1, 0.01, 9, 2), LinearWeightDecay(0.2, 0.01, 7)])
    for step in range(12):
        count = Tensor([step], mstype.int32)
        np.testing.assert_array_equal(rates.now(count), rates.construct(count).asnumpy())
    np.testing.assert_array_equal(Rates([tensor([0.3], "float32")]).now(count), np.float32([0.3]))


def test_a_kernel_that_fails_is_named_and_those_after_it_do_not_run(monkeypatch):
    ran = []
    calls = iter([functools.partial(int, Status.OK), functools.partial(int, Status.WRONG_SIZE), lambda: ran.append(1)])
    monkeypatch.setattr(libraries, "call_of", lambda *_: next(calls))
    words = r"^The kernel 'lion' failed: WRONG_SIZE\.$"
    refused(
        RuntimeError, words, libraries.run_here, *(libraries.Run(name, [], []) for name in ("adamw", "lion", "lamb"))
    )
    assert not ran
