"""Random arguments for every public constructor and function.

Either the call works and what it made gives finite numbers, or an error names one of the arguments that were drawn, and
no parameter has changed.
"""

import inspect
import json
import math
import os
import re
import tempfile
import types

import mindspore as ms
import numpy as np
from harness import numbers, tensor
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from worlds import WORDS, words

import ms_optim

# What is passed, by a name that is printed, and the one word for the fault of those that are not drawn yet.
VALUES = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "zero": lambda: 0,
    "one": lambda: 1,
    "three": lambda: 3,
    "minus one": lambda: -1,
    "2**31": lambda: 2**31,
    "0.0": lambda: 0.0,
    "-0.0": lambda: -0.0,
    "0.5": lambda: 0.5,
    "1.0": lambda: 1.0,
    "2.5": lambda: 2.5,
    "1e-8": lambda: 1e-8,
    "1e4": lambda: 1e4,
    "-0.1": lambda: -0.1,
    "inf": lambda: math.inf,
    "nan": lambda: math.nan,
    "complex": lambda: 1j,
    "float32": lambda: np.float32(0.5),
    "float16": lambda: np.float16(0.5),
    "int64": lambda: np.int64(2),
    "bool_": lambda: np.bool_(True),
    "text": lambda: "0.5",
    "word": lambda: "float32",
    "8bit": lambda: "8bit",
    "4bit": lambda: "4bit",
    "bfloat16": lambda: "bfloat16",
    "composite": lambda: "composite",
    "empty text": lambda: "",
    "bytes": lambda: b"x",
    "empty list": list,
    "empty dict": dict,
    "list": lambda: [0.5, 0.25, 0.125],
    "pair": lambda: (0.5, 0.9),
    "bounds": lambda: (None, 2.0),
    "pair of text": lambda: ("a", "b"),
    "list of lists": lambda: [[0.5]],
    "generator": lambda: (x for x in (0.5, 0.25)),
    "set": lambda: {0.5},
    "array": lambda: np.array([0.5, 0.25]),
    "tensor": lambda: Tensor(0.5),
    "tensor of one": lambda: Tensor([0.5]),
    "tensor of two": lambda: Tensor([0.5, 0.25]),
    "matrix": lambda: Tensor(np.ones((2, 2), np.float32)),
    "parameter": lambda: Parameter(Tensor(np.ones(2, np.float32)), name="stranger"),
    "parameters": lambda: [Parameter(Tensor(np.ones(2, np.float32)), name="stranger")],
    "schedule": lambda: nn.ExponentialDecayLR(0.1, 0.9, 10),
    "decay schedule": lambda: ms_optim.LinearWeightDecay(0.1, 0.0, 5),
    "function": lambda: len,
    "class": lambda: dict,
    "groups": lambda: [{"params": []}],
    "settings": lambda: {"*": {"lr": 0.5}},
    "tensors": lambda: [{"a": Tensor([1.0])}],
}
FAULTS = {
    # A Cell that is no schedule is taken for one, and MindSpore's compiler refuses the step.
    "cells": {"cell": lambda: nn.Dense(2, 2)},
    # Numbers that float32 does not hold, and tensors whose numbers are not looked at.
    "numbers": {
        "1e39": lambda: 1e39,
        "1e300": lambda: 1e300,
        "1e-46": lambda: 1e-46,
        "1e-300": lambda: 1e-300,
        "tensor of nan": lambda: Tensor(math.nan),
        "tensor of -1": lambda: Tensor(-1.0),
        "list with nan": lambda: [0.5, math.nan],
        "list with inf": lambda: [math.inf, 0.5],
        "list with -1": lambda: [-1.0, 0.5],
        "array with nan": lambda: np.array([0.5, math.nan]),
        "tensor without elements": lambda: Tensor(np.zeros(0, np.float32)),
        "tensor of bool": lambda: Tensor(True),
        "tensor of int": lambda: Tensor(1),
    },
}
# The words of FAULTS whose values are drawn too: the one place where they are switched on.
MENDED = ("numbers",)
for word in MENDED:
    VALUES |= FAULTS[word]


class Signum(ms_optim.FusedOptimizer):
    """An optimizer of a user's own."""

    def __init__(self, params, learning_rate, weight_decay=0.0, **shared):
        rule = ms_optim.Rule("signum", ("momentum",))
        super().__init__(params, learning_rate, weight_decay, rule, **{"backend": "composite", **shared})

    def directions(self, scalars, weight, gradient, weight_decay, states):
        momentum = 0.9 * states[0] + gradient
        return (ops.sign(momentum) + weight_decay * weight,), (momentum,)


def parameters():
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.gamma": ()}
    return [Parameter(tensor(np.ones(shape), "float32"), name=name) for name, shape in shapes.items()]


def tables():
    return [Parameter(tensor(np.ones((3, 4)), "float32"), name="a.embedding_table")]


def stepped(optimizer):
    """Take two steps: everything is finite afterwards."""
    for _ in range(2):
        optimizer(tuple(tensor(np.full(p.shape, 0.5), "float32") for p in optimizer.parameters))
    for p in (*optimizer.parameters, *optimizer.states, *optimizer.scales, optimizer.statistics):
        assert np.isfinite(numbers(p)).all(), f"{p.name} is not finite: {numbers(p)}"


def scheduled(schedule):
    for step in (0, 1, 2, 1000):
        value = float(schedule(Tensor([step], ms.int32)).asnumpy().reshape(()))
        assert math.isfinite(value), f"step {step} gives {value}"


def grouped(groups):
    stepped(ms_optim.AdamW(groups, 0.1))


def grouped_for_muon(groups):
    stepped(ms_optim.Muon(groups, 0.1))


def projection():
    """Two heads of two rows each."""
    return Parameter(tensor(np.ones((4, 3)), "float32"), name="projection")


def largest():
    return [[200.0, 3.0]]


def monitored(monitor):
    optimizer = ms_optim.Lamb(parameters(), 0.1)
    stepped(optimizer)
    with monitor:
        monitor.step(optimizer)


def evaluated(callback):
    callback.optimizer = callback.optimizer or ms_optim.ScheduleFreeAdamW(parameters(), 0.1)
    stepped(callback.optimizer)
    context = types.SimpleNamespace(original_args=dict)
    callback.on_eval_begin(context)
    callback.on_eval_end(context)


def simulated(workers):
    workers([tuple(tensor(np.ones(p.shape), "float32") for p in o.parameters) for o in workers.optimizers])


class Released:
    """A network, and an optimizer of its parameters: two arguments that belong together."""

    made = nn.Dense(3, 2)

    @classmethod
    def net(cls):
        cls.made = nn.Dense(3, 2)
        return cls.made

    @classmethod
    def optimizer(cls):
        return ms_optim.AdamW(cls.made.trainable_params(), 0.1)


def released(step):
    # Another network or function fails with its own words.
    if step.net is Released.made and isinstance(step.loss_fn, nn.MSELoss | None):
        inputs = [tensor(np.ones(shape), "float32") for shape in ((4, 3), (4, 2))]
        loss = step(*inputs[: 1 if step.loss_fn is None else 2])
        assert np.isfinite(numbers(loss)).all()
        assert step.optimizer.global_step.asnumpy()[0] == 1


def recorded():
    monitored(ms_optim.OptimizerMonitor(1, csv="record.csv", verbose=False))
    return "record.csv"


def residuals(count=2):
    workers = ms_optim.SimulatedWorkers(count, parameters(), lambda p, g: ms_optim.DGCMomentum(p, 0.1, 0.9, 0, group=g))
    return [o.state_dict() for o in workers.optimizers]


def shares():
    """What one worker of one writes."""
    alone = {"worker": 0, "workers": 1, "parts": {"adam_m.w": [[0, 3], [3]]}}
    entry = Tensor(np.frombuffer(json.dumps(alone).encode(), np.uint8))
    return [{"state_shares": entry, "adam_m.w": Tensor([1.0, 2.0, 3.0]), "global_step": Tensor([3], ms.int32)}]


def saved_there():
    """What MindFormers' fused AdamW saves."""
    states = {f"{word}.{p.name}": p.value() for word in ("exp_avg", "exp_avg_sq") for p in parameters()}
    return {**states, "global_step": Tensor([3], ms.int32)}


def makers(values):
    """Return what makes each of some values."""
    return {name: lambda value=value: value for name, value in values.items()}


OPTIMIZER = {"params": parameters, "learning_rate": lambda: 0.1}


def arguments_of(cls):
    """Return right arguments of an optimizer."""
    params = parameters if cls.dimensions is None else tables
    return {**OPTIMIZER, "params": params, **makers(cls.required)}


NET = {"network": lambda: nn.SequentialCell(nn.Dense(3, 4), nn.LayerNorm((4,)), nn.Dense(4, 2))}
LINEAR = {"weight_decay": lambda: 0.1, "end_weight_decay": lambda: 0.0, "decay_steps": lambda: 10}
COSINE = {"min_weight_decay": lambda: 0.0, "max_weight_decay": lambda: 0.1, "decay_steps": lambda: 10}
HOLD = {"learning_rate": 0.1, "warmup_steps": 1, "hold_steps": 1, "total_steps": 10}
POWER_COOL = {"learning_rate": 0.1, "coefficient": 0.01, "total_steps": 10}
MAKE = {"make": lambda: lambda params, group: ms_optim.DGCMomentum(params, 0.1, 0.9, 0, group=group)}
# For each public name arguments that are right, and what is done with what it makes.
PUBLIC = {
    **{cls.__name__: (arguments_of(cls), stepped) for cls in ms_optim.OPTIMIZERS},
    "FusedOptimizer": (OPTIMIZER, stepped),
    "MultiOptimizer": ({"optimizers": lambda: [ms_optim.AdamW(parameters()), ms_optim.Sinkhorn(tables())]}, stepped),
    "heads": ({"count": lambda: 2}, str),
    "recipe": ({"name": lambda: "apertus", **NET, "learning_rate": lambda: 0.1}, stepped),
    "ConstantWeightDecay": ({"weight_decay": lambda: 0.1}, scheduled),
    "LinearWeightDecay": (LINEAR, scheduled),
    "PolynomialWeightDecay": ({**LINEAR, "power": lambda: 1.0}, scheduled),
    "CosineWeightDecay": (COSINE, scheduled),
    "ExponentialWeightDecay": (
        {"weight_decay": lambda: 0.1, "decay_rate": lambda: 0.9, "decay_steps": lambda: 10},
        scheduled,
    ),
    "PiecewiseConstantWeightDecay": ({"milestone": lambda: [2, 4], "weight_decays": lambda: [0.1, 0.2]}, scheduled),
    "WarmUpWeightDecay": ({"weight_decay": lambda: 0.1, "warmup_steps": lambda: 10}, scheduled),
    "WarmUpHoldDecayLR": (makers(HOLD), scheduled),
    "PowerCoolLR": (makers(POWER_COOL), scheduled),
    "RadialBrake": ({"outward": lambda: 0.5, "inward": lambda: 1.0}, str),
    "no_decay_groups": (NET, grouped),
    "pattern_groups": ({**NET, "patterns": lambda: {"*.bias": {"weight_decay": 0.0}}}, grouped),
    "layerwise_groups": ({**NET, "learning_rate": lambda: 0.1, "decay": lambda: 0.9}, grouped),
    "muon_groups": (NET, grouped_for_muon),
    "qk_clip": ({"query": projection, "key": projection, "max_logits": lambda: [200.0, 3.0]}, range),
    "QKClip": ({"layers": lambda: [(projection(), projection())], "max_logits": lambda: largest}, ms_optim.QKClip.clip),
    "create_optimizer": ({"name": lambda: "adamw", **NET}, stepped),
    "list_optimizers": ({}, len),
    "for_scheduler": ({"optimizer": lambda: ms_optim.AdamW(parameters())}, lambda made: made.param_groups[0]["lr"]),
    "AveragedWeights": ({}, evaluated),
    "ReleasedTrainStep": (
        {"net": Released.net, "loss_fn": nn.MSELoss, "optimizer": Released.optimizer},
        released,
    ),
    "LocalSteps": ({"optimizer": lambda: ms_optim.AdamW(parameters())}, stepped),
    "GradientAccumulation": ({"optimizer": lambda: ms_optim.AdamW(parameters())}, stepped),
    "SparseTopK": ({}, lambda compress: compress.density),
    "Quantized": ({}, lambda compress: compress.density),
    "OptimizerMonitor": ({"verbose": lambda: False}, monitored),
    "SimulatedWorkers": ({"count": lambda: 2, "params": parameters, **MAKE}, simulated),
    "fold_residuals": ({"state_dicts": residuals, "workers": lambda: 1}, len),
    "merge_states": ({"states": shares}, len),
    "from_mindformers": ({"saved": saved_there, "optimizer": lambda: ms_optim.AdamW(parameters())}, len),
    "to_mindformers": ({"optimizer": lambda: ms_optim.AdamW(parameters())}, len),
    "plot": ({"csv": recorded, "output": lambda: "plot.png"}, os.stat),
}
# They take what they are given, and hold nothing; checkpoints have a campaign of their own.
WITHOUT = {"ParamGroups", "Rule", "WeightDecaySchedule", "CheckpointSaver", "Loaded", "SpoiledError", "load", "save"}
assert PUBLIC.keys() | WITHOUT == set(ms_optim.__all__)


def function(name):
    return Signum if name == "FusedOptimizer" else getattr(ms_optim, name)


def arguments(name):
    made = function(name)
    if hasattr(made, "keywords"):
        return ["params", *made.keywords()]
    return [p.name for p in inspect.signature(made).parameters.values() if p.kind is not p.VAR_KEYWORD]


def calls(name):
    passed = st.dictionaries(st.sampled_from(arguments(name)), st.sampled_from(list(VALUES)), min_size=1, max_size=2)
    return st.fixed_dictionaries({"name": st.just(name), "arguments": passed})


# matplotlib refuses a picture's name without words about the argument.
DRAWN = [name for name in PUBLIC if name != "plot"]
PROGRAM = st.sampled_from(DRAWN).flatmap(calls)


def attack(program):
    right, exercise = PUBLIC[program["name"]]
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            passed = {name: make() for name, make in right.items() if name not in program["arguments"]}
            passed |= {name: VALUES[value]() for name, value in program["arguments"].items()}
            return attempted(program, passed, exercise)
        finally:
            os.chdir(here)


def attempted(program, passed, exercise):
    given = (
        passed["params"] if PUBLIC[program["name"]][0].get("params") and "params" not in program["arguments"] else ()
    )
    before = [(p.name, p.requires_grad, p.asnumpy().tobytes()) for p in given]
    try:
        made = function(program["name"])(**passed)
    except (*WORDS, OSError) as error:
        said = words(error)
        named = [name for name in program["arguments"] if re.search(rf"\b{name}\b", said)]
        # Of a file that is not there its name says enough.
        named += [value for value in program["arguments"].values() if isinstance(error, OSError) and error.filename]
        what = f"{type(error).__name__}, which names no argument: {said}"
    else:
        exercise(made)
        return {"taken": 1}
    assert named, what
    after = [(p.name, p.requires_grad, p.asnumpy().tobytes()) for p in given]
    assert before == after, f"A refused construction changed a parameter: {before} {after}"
    return {"refused": 1}
