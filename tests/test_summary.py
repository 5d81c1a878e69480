"""What print(optimizer) shows."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import ms_optim


def parameters(dtype=ms.float32):
    shapes = {"weight": (16, 8), "bias": (16,), "head": (3, 16)}
    return [Parameter(Tensor(np.ones(shape), dtype), name=name) for name, shape in shapes.items()]


def grouped(params):
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


@pytest.mark.parametrize("cls", ms_optim.OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_every_optimizer_prints_its_groups_and_bytes(cls):
    optimizer = cls(grouped(parameters()), learning_rate=0.01, **cls.required)
    shown = repr(optimizer)
    lines = shown.splitlines()
    assert lines[0] == f"{cls.__name__}("
    assert "  learning_rate=0.01, weight_decay=0.1: 1 parameters, 128 elements" in lines
    assert "  learning_rate=0.01, weight_decay=0: 2 parameters, 64 elements" in lines
    assert f"  step: 0, by the fused kernel '{optimizer.rule.name}'" in lines or not optimizer.fused
    assert f"states (float32) {sum(p.nbytes for p in optimizer.states):,} bytes" in shown
    assert lines[-1] == ")"


def test_numbers_and_what_is_not_usual():
    optimizer = ms_optim.AdamW(
        parameters(ms.bfloat16), 0.01, (0.9, 0.95), eps=1e-6, state_dtype="8bit", grad_clip_norm=1.0, backend="auto"
    )
    first = repr(optimizer).splitlines()[1]
    assert first.startswith("  betas=(0.9, 0.95), eps=1e-06, ")
    assert first.endswith("grad_clip_norm=1.0, state_dtype='8bit'")
    assert "masters (float32) 768 bytes" in repr(optimizer)
    assert "backend" not in repr(optimizer)


def test_rates_are_those_of_the_next_step():
    optimizer = ms_optim.AdamW(parameters(), nn.PolynomialDecayLR(0.1, 0.0, 10, 1.0), weight_decay=0.5)
    gradients = tuple(Tensor(np.zeros(p.shape), ms.float32) for p in optimizer.parameters)
    for _ in range(5):
        optimizer(gradients)
    assert "learning_rate=0.05, weight_decay=0.5: 3 parameters, 192 elements" in repr(optimizer)
    assert "step: 5, by" in repr(optimizer)


def test_at_the_end_of_a_list_of_rates():
    optimizer = ms_optim.AdamW(parameters(), [0.1, 0.2])
    for _ in range(2):
        optimizer(tuple(Tensor(np.zeros(p.shape), ms.float32) for p in optimizer.parameters))
    assert "learning_rate: the list of rates has none for the next step\n  step: 2, by" in repr(optimizer)


def test_without_a_kernel_it_says_why():
    optimizer = ms_optim.Lion(parameters(), 0.1, backend="composite")
    assert "step: 0, by MindSpore's operators, as " in repr(optimizer)
    assert "backend='composite'" in repr(optimizer)
