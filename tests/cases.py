"""The optimizers under test and the situations each is put into: one table drives every conformance test."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
from mindspore import nn, ops
from tolerances import STEPS

import ms_optim


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, its float64 reference, and the arguments that make variants of its rule."""

    optimizer: Callable
    reference: Callable
    variants: dict[str, dict[str, Any]]
    learning_rate: float = 0.01
    # What it likes in training, and how far 100 steps of 1e-4 along a gradient of ones take a weight.
    training_rate: float = 0.02
    small_steps: float = 0.01
    # Whether each element of a step is a sign, which an error of the state takes the other way or not at all.
    moves_by_sign: bool = False

    @property
    def cls(self):
        return getattr(self.optimizer, "func", self.optimizer)

    @property
    def is_averaged(self):
        """Whether it can keep an average of the weights."""
        return "average_decay" not in self.cls.refuses

    @property
    def name(self):
        return self.cls.__name__


# Of the 50 steps, 10 without compression and 20 on the way to the last sparsity; most shapes are compressed.
RAMP = {"momentum": 0.9, "rampup_begin_step": 10, "rampup_step": 20, "sparsity": (0.5, 0.9), "min_compress_numel": 16}

# One that begins steeper, for Muon.
MUON_COEFFICIENTS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]

CASES = [
    Case(
        ms_optim.AdamW,
        reference.AdamW,
        {
            "default": {},
            "amsgrad": {"amsgrad": True},
            "maximize": {"maximize": True},
            "no_bias_correction": {"bias_correction": False},
            "betas": {"betas": [0.8, 0.95], "eps": 1e-4},
            "cautious": {"decay": "cautious"},
        },
    ),
    Case(
        ms_optim.Lamb,
        reference.Lamb,
        {
            "default": {},
            "no_bias_correction": {"bias_correction": False},
            "not_always": {"always_adapt": False},
            "bounds": {"weight_norm_bounds": (0.5, 10.0), "trust_ratio_bounds": (0.01, 2.0)},
            "cautious": {"decay": "cautious"},
            "betas": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4},
        },
        training_rate=0.06,
    ),
    Case(
        ms_optim.LANS,
        reference.LANS,
        {
            "default": {},
            "all_in_one": {"aggregate_num": 0},
            "bounds": {"lower_bound": 0.5, "upper_bound": 10.0},
            "clip_gradient": {"clip_gradient": 0.05},
            "cautious": {"decay": "cautious"},
            "betas": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4},
        },
        training_rate=0.06,
    ),
    Case(
        ms_optim.AdamOffload,
        reference.AdamOffload,
        {
            "default": {},
            "nesterov": {"use_nesterov": True, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4},
        },
    ),
    Case(
        functools.partial(ms_optim.DGCMomentum, **RAMP),
        functools.partial(reference.DGCMomentum, **RAMP),
        {
            "default": {},
            "nesterov": {"use_nesterov": True},
            "l1": {"decay_type": "l1"},
            "at_once": {"rampup_begin_step": 0, "sparsity": (0.99,), "min_compress_numel": 1},
            "many_stages": {"rampup_step": 3, "sparsity": (0.0, 0.3, 0.6, 0.8, 0.95), "momentum": 0.5},
        },
        training_rate=0.3,
        small_steps=0.091,
    ),
    Case(
        ms_optim.Lion,
        reference.Lion,
        # 1 - 0.999 shows where it was formed: in float32 it is off by 1e-5.
        {"default": {}, "betas": {"betas": [0.8, 0.999]}, "cautious": {"decay": "cautious"}},
        moves_by_sign=True,
    ),
    Case(
        ms_optim.AdEMAMix,
        reference.AdEMAMix,
        {
            "default": {},
            "warmup": {"warmup_steps": 20},
            "betas": {"betas": [0.8, 0.95, 0.99], "alpha": 2, "eps": 1e-4, "warmup_steps": 100},
            "cautious": {"decay": "cautious"},
        },
    ),
    Case(
        ms_optim.ScheduleFreeAdamW,
        reference.ScheduleFreeAdamW,
        {
            "default": {},
            "warmup": {"warmup_steps": 20},
            "powers": {"r": 1.5, "weight_lr_power": 0, "betas": [0.8, 0.95], "eps": 1e-4},
        },
        training_rate=0.06,
        small_steps=0.005,
    ),
    Case(
        ms_optim.Muon,
        reference.Muon,
        {
            "default": {},
            "normalize_rows": {"normalize_rows": True},
            "original": {"adjust_lr": "original"},
            "no_nesterov": {"nesterov": False},
            "coefficients": {"ns_coefficients": MUON_COEFFICIENTS},
            "splits": {"splits": {"conv*": (2, 4), "zero*": ((1, 2), 3)}, "normalize_rows": True},
            "heads": {"splits": {"conv*": ms_optim.heads(2, (1, 2)), "zero*": ms_optim.heads(3)}},
            "named": {"ns_coefficients": "cubic5"},
            "adamw_names": {"adamw_names": ("*volution*",)},
            "cautious": {"decay": "cautious"},
            "betas": {"adamw_betas": [0.8, 0.95], "adamw_eps": 1e-4, "momentum": 0.8, "matched_adamw_rms": 0.5},
        },
        training_rate=0.1,
    ),
    Case(
        ms_optim.Sinkhorn,
        reference.Sinkhorn,
        {
            "default": {},
            "cautious": {"decay": "cautious"},
            "rows_alone": {"normalizations": 1, "tau": 0.9},
            "numbers": {"momentum": 0.8, "normalizations": 5, "tau": 0.5, "eps": 1e-2, "scale": 0.5},
        },
    ),
    Case(
        ms_optim.Adam,
        reference.Adam,
        {
            "default": {},
            "amsgrad": {"use_amsgrad": True, "use_nesterov": True},
            "algorithm_1": {"corrects_eps": True, "eps": 1e-4, "beta1": 0.8, "beta2": 0.95},
        },
    ),
    Case(
        ms_optim.Momentum,
        reference.Momentum,
        {"default": {}, "nesterov": {"use_nesterov": True}, "dampening": {"dampening": 0.3, "momentum": 0.8}},
        training_rate=0.1,
        small_steps=0.091,
    ),
]


# The optimizers that take parameters of any shape, and so a whole network.
ANY_SHAPE = [case for case in CASES if case.cls.dimensions is None]
OF_ANY_SHAPE = [case.cls for case in ANY_SHAPE]

# What paths in MindSpore's operators do around a rule is shown by one rule of each kind: elementwise, layer-wise,
# compressed, weighing its steps. The rules themselves all follow their references there, in tests/test_conformance.py.
OF_EACH_KIND = ("AdamW", "Lamb", "DGCMomentum", "ScheduleFreeAdamW")
MODES = ("graph", "pynative")
# Of what is the same for every rule, every fourth is compiled, which takes longest. tests/test_conformance.py compiles
# each rule.
MODES_IN_TURN = ("graph", "pynative", "pynative", "pynative")


def dealt(rows, **choices):
    """Return rows of arguments, by name, each with one combination of the choices: these go round.

    So every choice meets every other one and its share of the rows. All combinations with all rows would mostly repeat
    on one optimizer what another one has shown.
    """
    hands = [dict(zip(choices, hand)) for hand in itertools.product(*choices.values())]
    return [row | hand for row, hand in zip(rows, itertools.cycle(hands))]


def for_each(rows):
    """Run a test for each row of arguments by name."""
    ids = ["-".join(str(getattr(value, "name", value)) for value in row.values()) for row in rows]
    indirect = [name for name in ("backend", "mode") if name in rows[0]]
    return pytest.mark.parametrize(list(rows[0]), [tuple(row.values()) for row in rows], ids=ids, indirect=indirect)


def every_case(cases=CASES, **choices):
    """Run a test for every optimizer, each with one combination of the choices."""
    return for_each(dealt([{"case": case} for case in cases], **choices))


def every_case_and_path(on_operators=None, cases=CASES, **choices):
    """Run a test for every optimizer on its fused kernel, and for one of each kind on MindSpore's operators.

    There the choices go round the other way, for that an optimizer meets others of them than on its kernel, but for
    those that `on_operators` gives.
    """
    kinds = [case for case in CASES if case.name in OF_EACH_KIND]
    fused = dealt([{"case": case, "backend": "aot"} for case in cases], **choices)
    others = {name: list(values)[::-1] for name, values in choices.items()} | (on_operators or {})
    return for_each(fused + dealt([{"case": case, "backend": "composite"} for case in kinds], **others))


class HalvingDecay(nn.Cell):
    """A weight decay that is a Cell: it halves every 10 steps."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def construct(self, step):
        return self.first * ops.pow(0.5, ops.cast(step, ops.dtype(ops.ones((), step.dtype) * 0.5)) / 10)

    def at(self, step):
        return self.first * 0.5 ** (step / 10)


# 16 elements fill the lanes of a sum; 1024 a tile; 32768 a chunk. A million elements have few rows, by whose square the
# work of Muon's float64 reference grows; square matrices of its kernel's size are in tests/test_matrices.py.
SHAPES = {
    "scalar": (),
    "one": (1,),
    "seven": (7,),
    "lanes-1": (15,),
    "lanes+1": (17,),
    "tiles+1": (4097,),
    "matrix": (13, 11),
    "convolution": (6, 4, 3, 3),
    "zero": (9, 5),
    "codes": (65, 71),  # has states of few bits
    "million": (100, 10_000),
}
SMALL = [name for name in SHAPES if name not in ("codes", "million")]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How parameters are grouped and what is asked besides the rule."""

    dtype: str = "float32"
    gradient_dtype: str | None = None
    shapes: tuple[str, ...] = tuple(SMALL)
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    # From the parameters to what the optimizer gets as params, learning_rate and weight_decay, and for each parameter
    # the learning rate and decay (functions of the step) and whether its gradient is centralized.
    groups: Callable | None = None
    # The number of dimensions that the optimizer takes alone; None: any.
    dimensions: int | None = None

    def shape(self, name):
        """Return the shape of a tensor; names that end with "again" stand for another one of the same shape."""
        shape = SHAPES[name.removesuffix(" again")]
        return shape if self.dimensions is None else as_matrix(shape)


def as_matrix(shape):
    """Return the shape of a matrix of as many elements: of a vector's, as square as can be."""
    if len(shape) > 1:
        return shape[0], math.prod(shape[1:])
    size = math.prod(shape)
    rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
    return rows, size // rows


def constant(value):
    return lambda step: value


def plain(params, rate):
    n = len(params)
    return params, rate, 0.02, [constant(rate)] * n, [constant(0.02)] * n, [False] * n


def integer_decay(params, rate):
    n = len(params)
    return params, rate, 1, [constant(rate)] * n, [constant(1.0)] * n, [False] * n


def grouped(params, rate):
    """Groups with their own rate and decay, a dynamic rate, a decay that is a Cell, centralization, an order."""
    cell = HalvingDecay(0.1)
    schedule = nn.ExponentialDecayLR(rate, 0.9, 10)
    kinds = [
        ({"lr": 2 * rate, "weight_decay": 0.3}, constant(2 * rate), constant(0.3), False),
        ({"lr": schedule, "weight_decay": 0}, lambda k: rate * 0.9 ** (k / 10), constant(0.0), False),
        ({"weight_decay": cell, "grad_centralization": True}, constant(rate), cell.at, True),
        ({"grad_centralization": True}, constant(rate), constant(0.02), True),
    ]
    which = [i % len(kinds) for i in range(len(params))]
    groups = [{"params": [p for p, w in zip(params, which) if w == k], **kind[0]} for k, kind in enumerate(kinds)]
    groups = [group for group in groups if group["params"]]
    groups.append({"order_params": params})
    rates, decays, centralized = zip(*((kinds[w][1], kinds[w][2], kinds[w][3]) for w in which))
    return groups, rate, 0.02, list(rates), list(decays), list(centralized)


def dynamic(params, rate):
    """One iterable learning rate and one decay that is a Cell, for all."""
    n = len(params)
    rates = [rate * (1 + math.sin(k)) for k in range(100)]
    cell = HalvingDecay(0.05)
    return params, rates, cell, [lambda k: rates[k]] * n, [cell.at] * n, [False] * n


SCENARIOS = {
    "plain": Scenario(shapes=(*SMALL, "million"), groups=plain),
    "integer_decay": Scenario(shapes=("seven", "matrix"), groups=integer_decay),
    "grouped": Scenario(groups=grouped),
    "dynamic": Scenario(groups=dynamic),
    "loss_scale": Scenario(shared={"loss_scale": 1024.0}, groups=grouped),
    "clip": Scenario(shared={"grad_clip_norm": 3.0, "loss_scale": 8.0}, groups=grouped),
    "float16": Scenario("float16", groups=grouped),
    "bfloat16": Scenario("bfloat16", groups=grouped),
    "float32_gradients": Scenario("bfloat16", "float32", groups=plain),
    "float16_no_masters": Scenario("float16", shared={"master_weights": False}, groups=plain),
    "bfloat16_no_masters": Scenario("bfloat16", shared={"master_weights": False}, groups=plain),
    "average": Scenario(shared={"average_decay": 0.95}, groups=grouped),
    "bfloat16_average": Scenario("bfloat16", shared={"average_decay": 0.95, "average_warmup": True}, groups=plain),
}
# As many steps as DGCMomentum's ramp takes, and one at its end.
ONCE_AROUND = RAMP["rampup_begin_step"] + RAMP["rampup_step"] + 1
# Few tensors of every kind, for what is about states.
MIXED = {
    dtype: Scenario(dtype, shapes=("scalar", "seven", "matrix"), groups=grouped) for dtype in ("float32", "bfloat16")
}


def fewer_shapes(case, scenario, backend, mode):
    """Spare MindSpore's operators, slow to compile or to call one by one, the shapes that differ only to a kernel."""
    if backend == "aot" or len(scenario.shapes) < 4:
        return scenario
    shapes = ("scalar", "zero", "convolution")
    if case.name == "DGCMomentum":
        shapes = ("tiles+1", "seven", "convolution")  # what is compressed, and what is not
    elif mode == "graph":
        shapes = tuple(SMALL) if scenario is SCENARIOS["plain"] else ("tiles+1", "convolution")
    return dataclasses.replace(scenario, shapes=shapes)


def steps(case, scenario, backend, mode):
    """Likewise most of the steps. Every optimizer takes all of them on its kernel in one scenario."""
    if backend != "aot" and mode == "pynative":
        return 12 if case.name == "DGCMomentum" else 6  # it compresses from the eleventh on
    if "million" in scenario.shapes:
        return 12  # in the last two, chunks are compressed
    return STEPS if scenario is SCENARIOS["grouped"] else ONCE_AROUND
