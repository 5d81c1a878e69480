"""Builds an optimizer and its reference side by side, and compares them."""

import dataclasses
import functools
import hashlib
import itertools

import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from tolerances import (
    ITERATE_WITHOUT_MASTERS,
    MOST_ON_OTHER_PATH,
    OF_ORTHOGONAL,
    ORTHOGONAL,
    STATE_WITHOUT_MASTERS,
    TOLERANCE,
    UNIT,
    UNITS_WITHOUT_MASTERS,
)

from ms_optim import RadialBrake
from ms_optim.states import split_masters

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Step(nn.Cell):
    """Calls the optimizer from inside a network's graph, as a training step does."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients)


class Around(nn.Cell):
    """A training cell of one's own, which renames the parameters of what it holds."""

    def __init__(self, optimizer):
        super().__init__()
        self.opt = optimizer


def tensor(array, dtype):
    """Make a Tensor of a storage dtype from numbers that it holds exactly."""
    return Tensor(np.asarray(array, np.float32), getattr(mstype, dtype))


LAYOUTS = ["transposed", "strided", "offset"]


def laid_out(array, dtype, layout):
    """Make a Tensor whose elements lie in memory in another way, and the tensor whose memory that is."""
    array = np.asarray(array)
    if layout == "transposed" and array.ndim >= 2:
        base = tensor(np.moveaxis(array, -1, 0), dtype)
        return ops.transpose(base, (*range(1, array.ndim), 0)), base
    if layout == "strided" and array.ndim >= 1:
        base = tensor(np.stack([array, np.full_like(array, 7.0)], -1), dtype)
        return base[..., 0], base
    if layout == "offset" and array.ndim >= 1:
        base = tensor(np.concatenate([np.full_like(array[:1], 7.0), array, np.full_like(array[:1], 7.0)]), dtype)
        return base[1:-1], base
    made = tensor(array, dtype)
    return made, made


def numbers(parameter):
    """Read a Parameter or Tensor of any dtype as float64."""
    return ops.cast(parameter, mstype.float32).asnumpy().astype(np.float64)


def flushed(x):
    """Return numbers with a 0 of the same sign for each that counts as 0, since float32 holds it as a denormal."""
    return np.where(np.abs(x.astype(np.float32)) < np.finfo(np.float32).tiny, np.copysign(x.dtype.type(0), x), x)


def in_reference(arguments):
    """Return shared arguments as a reference takes them, which knows no class of the package, and one process."""
    arguments = {name: value for name, value in arguments.items() if name != "shard_states"}
    kind = arguments.get("weight_norm")
    brake = RadialBrake() if kind == "radial_brake" else kind
    return arguments | ({"weight_norm": dataclasses.astuple(brake)} if isinstance(brake, RadialBrake) else {})


class Pair:
    """An optimizer of the package and its reference, from the same start and fed the same gradients."""

    def __init__(self, case, scenario, variant=None, seed=0, steps=60, **shared):
        self.case, self.scenario = case, dataclasses.replace(scenario, dimensions=case.cls.dimensions)
        self.rng = np.random.default_rng(seed)
        self.shared = {**scenario.shared, **shared}
        variant = variant or {}
        starts = [self.start(name, scenario.dtype) for name in scenario.shapes]
        self.params = [
            Parameter(tensor(w, scenario.dtype), name=f"{name}.w") for w, name in zip(starts, scenario.shapes)
        ]
        params, rate, decay, rates, decays, centralized = scenario.groups(self.params, case.learning_rate)
        self.optimizer = case.optimizer(params, rate, weight_decay=decay, **variant, **self.shared)
        known = {k: v for k, v in self.shared.items() if k not in ("master_weights", "backend", "offload")}
        known = in_reference(known)
        self.reference = case.reference(
            starts,
            rates,
            decays,
            centralized,
            [scenario.dtype] * len(starts),
            masters=self.shared.get("master_weights", True),
            names=[p.name for p in self.params],
            **known,
            **variant,
        )

    def start(self, name, dtype):
        shape = self.scenario.shape(name)
        w = np.zeros(shape) if name == "zero" else self.rng.standard_normal(shape)
        return w.astype(NUMPY[dtype]).astype(np.float64)

    def gradients(self, size=1.0):
        """Draw gradients of some size; they are what a gradient of the storage dtype holds after loss scaling."""
        scale = size * self.shared.get("loss_scale", 1.0)
        dtype = self.scenario.gradient_dtype or self.scenario.dtype
        drawn = [
            np.asarray(self.rng.standard_normal(self.scenario.shape(name)) * scale) for name in self.scenario.shapes
        ]
        return [g.astype(NUMPY[dtype]).astype(np.float64) for g in drawn], dtype

    @functools.cached_property
    def cell(self):
        """The optimizer as part of a network; there is one, for MindSpore compiles each anew, in seconds."""
        return Step(self.optimizer)

    def call(self, mode, tensors):
        """Take one step, in Graph mode inside a network's graph."""
        return self.optimizer(tensors) if mode == "pynative" else self.cell(*tensors)

    def run(self, mode, steps):
        for _ in range(steps):
            gradients, dtype = self.gradients()
            tensors = tuple(tensor(g, dtype) for g in gradients)
            self.call(mode, tensors)
            self.follow(gradients)
        for t, g in zip(tensors, gradients):
            np.testing.assert_array_equal(numbers(t), g, "a step has modified a gradient")

    def follow(self, gradients):
        """Take the step that the optimizer has just taken in the reference, too."""
        if hasattr(self.reference, "sent"):
            self.reference.sent = [self.sent()]
        if hasattr(self.reference, "seen"):
            self.reference.seen = [numbers(p) for p in self.optimizer._held.masters_or_weights()]
        self.reference.step(gradients)

    def state_tolerance(self, k, masters):
        if k < self.reference.start_at_weights:
            return TOLERANCE["weight"] if masters else ITERATE_WITHOUT_MASTERS[self.scenario.dtype]
        if not self.reference.decay_in_states:
            return TOLERANCE["state"]
        return TOLERANCE["state with decay"] if masters else STATE_WITHOUT_MASTERS[self.scenario.dtype]

    def held_states(self):
        """Return of each state, in order, its place among those of its tensor, the tensor's place, and its name."""
        names = [self.reference.states_of(i) for i in range(len(self.params))]
        most = max(map(len, names))
        return [(k, i, names[i][k]) for k in range(most) for i in range(len(names)) if k < len(names[i])]

    def first_state(self, name):
        """Return the name of the first state of a tensor."""
        return f"{self.reference.states_of(self.scenario.shapes.index(name))[0]}.{name}.w"

    def sent(self):
        """Tell which elements the optimizer sent in the last step, if it compresses: u and r are 0 there."""
        n = len(self.params)
        states = [state.asnumpy() for state in self.optimizer.states]
        return [(u == 0) & (r == 0) for u, r in zip(states[:n], states[n:])]

    def check(self):
        masters = self.scenario.dtype == "float32" or self.reference.keeps_masters
        held = self.held_states()
        assert [f"{prefix}.{self.params[i].name}" for _, i, prefix in held] == [s.name for s in self.optimizer.states]
        for state, (k, i, prefix) in zip(self.optimizer.states, held):
            expected, peak = self.reference.state[prefix][i], self.reference.peak[prefix][i]
            check_close(numbers(state), expected, self.state_tolerance(k, masters), peak, state.name)
        for i, (p, w, peak) in enumerate(zip(self.params, self.reference.weights, self.reference.peak["weight"])):
            if self.scenario.dtype == "float32":
                self.check_close(p, w, "weight", peak_of_weight(self.reference, i))
            else:
                check_units(numbers(p), w, self.scenario.dtype, 1 if masters else UNITS_WITHOUT_MASTERS, peak, p.name)
        for master in self.optimizer.masters:
            i = [p.name for p in self.params].index(master.name.removeprefix("master."))
            # A weight that was set by hand wins over a master that does not round to it, until the master is written.
            held, weight = numbers(master), numbers(self.params[i])
            held = np.where(held.astype(NUMPY[self.scenario.dtype]).astype(np.float64) == weight, held, weight)
            peak = peak_of_weight(self.reference, i)
            check_close(held, self.reference.masters[i], TOLERANCE["weight"], peak, master.name)
        for i, (average, expected) in enumerate(zip(self.optimizer.averages, self.reference.averages)):
            self.check_close(average, expected, "weight", peak_of_weight(self.reference, i))
        assert int(self.optimizer.global_step.asnumpy()[0]) == self.reference.step_count
        assert int(self.optimizer.skipped_steps.asnumpy()[0]) == self.reference.skipped
        if masters:
            peak = peak_of_statistics(self.reference)
            self.check_close(self.optimizer.statistics, self.reference.statistics, "statistics", peak)

    @staticmethod
    def check_close(parameter, expected, kind, peak):
        check_close(numbers(parameter), expected, TOLERANCE[kind], peak, parameter.name)


def digest(pair):
    """Return a digest of everything that outlives a step."""
    optimizer = pair.optimizer
    held = [*pair.params, *optimizer.states, *optimizer.masters, optimizer.global_step, optimizer.statistics]
    return hashlib.sha256(b"".join(numbers(p).tobytes() for p in held)).hexdigest()


def digest_of(optimizer, *without):
    """Return a digest of the weights and of all that an optimizer holds, but for what has one of some names."""
    held = {**optimizer._entries.named(), "statistics": optimizer.statistics}
    return hashlib.sha256(b"".join(numbers(p).tobytes() for name, p in held.items() if name not in without)).hexdigest()


def numbers_of(optimizer):
    """Yield what an optimizer holds, by name: in float32 what has so many bits, the rest in float64.

    Remainders of 16 bits are the masters that they restore.
    """
    for held in (optimizer.parameters, optimizer.states, optimizer.scales, optimizer.averages, optimizer.masters):
        for weight, p in zip(itertools.cycle(optimizer.parameters), held):
            if p.dtype == mstype.int16 and held is optimizer.masters:
                yield p.name, split_masters.restored(numbers(weight).astype(np.float32), p.asnumpy())
            else:
                yield p.name, p.asnumpy() if p.dtype == mstype.float32 else numbers(p)


def check_stored_alike(expected, found, led_apart=0.0, remainders=MOST_ON_OTHER_PATH):
    """Compare what two paths hold, as :func:`numbers_of` yields it.

    Args:
        expected: What one holds.
        found: What the other one holds.
        led_apart: The part of the float32 elements that may differ: an element of few bits that differs by a unit leads
            those that follow from it apart.
        remainders: The part of the remainders of 8 bits of masters that may differ.
    """
    for (name, x), (_, y) in zip(expected, found, strict=True):
        if x.dtype == np.float32:
            apart = np.abs(y - x) > TOLERANCE["other path"] * np.abs(x).max()
            assert np.mean(apart) <= led_apart, name
            assert np.isfinite(y).all(), name
        else:
            assert np.mean(x != y) <= (remainders if name.startswith("master.") else MOST_ON_OTHER_PATH), name


def check_close(actual, expected, tolerance, peak, what):
    """Compare element by element, relative to the largest magnitude that the element has held."""
    assert actual.shape == np.shape(expected), what
    assert np.isfinite(actual).all(), what
    error = np.abs(actual - expected)
    ratio = float(np.max(np.where(error == 0, 0.0, error / np.maximum(tolerance * peak, 1e-300)), initial=0.0))
    assert ratio <= 1.0, f"{what}: an element is off by {ratio:.3g} times the tolerance {tolerance:.3g}"


def peak_of_weight(expected, i):
    """Return what the error of a weight is relative to; moves along orthogonalized matrices may be off further."""
    return np.maximum(expected.peak["weight"][i], expected.orthogonal_move[i] * ORTHOGONAL / TOLERANCE["weight"])


def check_units(actual, expected, dtype, units, peak, what):
    """Compare numbers of a storage dtype by units in the last place, those of the largest magnitude held."""
    assert np.isfinite(actual).all(), what
    unit = UNIT[dtype] * 2.0 ** np.floor(np.log2(np.maximum(peak, 2.0**-14)))
    off = np.max(np.abs(actual - expected) / unit, initial=0.0)
    assert off <= units, f"{what}: an element is off by {off:.3g} units in the last place"


def peak_of_statistics(expected):
    """Return what the tolerance of statistics is relative to."""
    peak = expected.peak["statistics"].copy()
    if expected.iterations:
        of_matrices = np.array([np.any(move > 0) for move in expected.orthogonal_move])
        peak[of_matrices, 2:4] *= OF_ORTHOGONAL / TOLERANCE["statistics"]
    return peak
