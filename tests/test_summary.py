"""What print(optimizer) shows."""

import mindspore as ms
import numpy as np
import pytest
from cases import OF_ANY_SHAPE
from mindspore import Parameter, Tensor, nn, ops

import ms_optim


def parameters(dtype=ms.float32):
    shapes = {"weight": (16, 8), "bias": (16,), "head": (3, 16)}
    return [Parameter(Tensor(np.ones(shape), dtype), name=name) for name, shape in shapes.items()]


def grouped(params):
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


@pytest.mark.parametrize("cls", OF_ANY_SHAPE, ids=lambda cls: cls.__name__)
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


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"])
def test_a_schedule_is_shown_by_name_and_does_not_run(mode):
    ms.set_context(mode=mode)
    calls = []

    class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
        def __call__(self, *args):
            calls.append(args)
            return super().__call__(*args)

        def construct(self, step):
            return ops.ones((), ms.float32)

    optimizer = ms_optim.AdamW(parameters(), Schedule(), weight_decay=0.5)
    assert "learning_rate=Schedule, weight_decay=0.5: 3 parameters, 192 elements" in repr(optimizer)
    assert not calls


def test_steps_are_counted_and_a_list_has_its_length():
    optimizer = ms_optim.AdamW(parameters(), [0.1, 0.2])
    for _ in range(2):
        optimizer(tuple(Tensor(np.zeros(p.shape), ms.float32) for p in optimizer.parameters))
    assert "learning_rate=a list of 2, weight_decay=0: " in repr(optimizer)
    assert "\n  step: 2, by" in repr(optimizer)


def test_without_a_kernel_it_says_why():
    optimizer = ms_optim.Lion(parameters(), 0.1, backend="composite")
    assert "step: 0, by MindSpore's operators, because " in repr(optimizer)
    assert "backend='composite'" in repr(optimizer)
