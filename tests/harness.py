"""Builds an optimizer and its reference side by side, and compares them."""

import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from tolerances import STATE_WITHOUT_MASTERS, TOLERANCE, UNIT, UNITS_WITHOUT_MASTERS

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Step(nn.Cell):
    """Calls the optimizer from inside a network's graph, as a training step does."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients)


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


class Pair:
    """An optimizer of the package and its reference, from the same start and fed the same gradients."""

    def __init__(self, case, scenario, variant=None, seed=0, steps=60, **shared):
        self.case, self.scenario = case, scenario
        self.rng = np.random.default_rng(seed)
        self.shared = {**scenario.shared, **shared}
        variant = variant or {}
        starts = [self.start(name, scenario.dtype) for name in scenario.shapes]
        self.params = [
            Parameter(tensor(w, scenario.dtype), name=f"{name}.w") for w, name in zip(starts, scenario.shapes)
        ]
        params, rate, decay, rates, decays, centralized = scenario.groups(self.params, case.learning_rate)
        self.optimizer = case.optimizer(params, rate, weight_decay=decay, **variant, **self.shared)
        known = {k: v for k, v in self.shared.items() if k not in ("master_weights", "backend")}
        self.reference = case.reference(
            starts,
            rates,
            decays,
            centralized,
            [scenario.dtype] * len(starts),
            masters=self.shared.get("master_weights", True),
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

    def run(self, mode, steps):
        cell = Step(self.optimizer)
        call = self.optimizer if mode == "pynative" else lambda tensors: cell(*tensors)
        for _ in range(steps):
            gradients, dtype = self.gradients()
            call(tuple(tensor(g, dtype) for g in gradients))
            self.follow(gradients)

    def follow(self, gradients):
        """Take the step that the optimizer has just taken in the reference, too."""
        if hasattr(self.reference, "sent"):
            self.reference.sent = [self.sent()]
        self.reference.step(gradients)

    def state_tolerance(self, masters):
        if not self.reference.decay_in_states:
            return TOLERANCE["state"]
        return TOLERANCE["state with decay"] if masters else STATE_WITHOUT_MASTERS[self.scenario.dtype]

    def sent(self):
        """Tell which elements the optimizer sent in the last step, if it compresses: u and r are 0 there."""
        n = len(self.params)
        states = [state.asnumpy() for state in self.optimizer.states]
        return [(u == 0) & (r == 0) for u, r in zip(states[:n], states[n:])]

    def check(self):
        n = len(self.params)
        masters = self.scenario.dtype == "float32" or self.reference.keeps_masters
        tolerance = self.state_tolerance(masters)
        for k, prefix in enumerate(self.reference.states):
            for i in range(n):
                state = self.optimizer.states[k * n + i]
                assert state.name == f"{prefix}.{self.params[i].name}"
                expected, peak = self.reference.state[prefix][i], self.reference.peak[prefix][i]
                check_close(numbers(state), expected, tolerance, peak, state.name)
        for p, w, peak in zip(self.params, self.reference.weights, self.reference.peak["weight"]):
            if self.scenario.dtype == "float32":
                self.check_close(p, w, "weight", peak)
            else:
                check_units(numbers(p), w, self.scenario.dtype, 1 if masters else UNITS_WITHOUT_MASTERS, peak, p.name)
        for master in self.optimizer.masters:
            i = [p.name for p in self.params].index(master.name.removeprefix("master."))
            # A weight that was set by hand wins over a master that does not round to it, until the master is written.
            held, weight = numbers(master), numbers(self.params[i])
            held = np.where(held.astype(NUMPY[self.scenario.dtype]).astype(np.float64) == weight, held, weight)
            peak = self.reference.peak["weight"][i]
            check_close(held, self.reference.masters[i], TOLERANCE["weight"], peak, master.name)
        assert int(self.optimizer.global_step.asnumpy()[0]) == self.reference.step_count
        assert int(self.optimizer.skipped_steps.asnumpy()[0]) == self.reference.skipped
        if masters:
            peak = self.reference.peak["statistics"]
            self.check_close(self.optimizer.statistics, self.reference.statistics, "statistics", peak)

    @staticmethod
    def check_close(parameter, expected, kind, peak):
        check_close(numbers(parameter), expected, TOLERANCE[kind], peak, parameter.name)


def check_close(actual, expected, tolerance, peak, what):
    """Compare element by element, relative to the largest magnitude that the element has held."""
    assert actual.shape == np.shape(expected), what
    assert np.isfinite(actual).all(), what
    error = np.abs(actual - expected)
    ratio = float(np.max(np.where(error == 0, 0.0, error / np.maximum(tolerance * peak, 1e-300)), initial=0.0))
    assert ratio <= 1.0, f"{what}: an element is off by {ratio:.3g} times the tolerance {tolerance:.3g}"


def check_units(actual, expected, dtype, units, peak, what):
    """Compare numbers of a storage dtype by units in the last place, those of the largest magnitude held."""
    assert np.isfinite(actual).all(), what
    unit = UNIT[dtype] * 2.0 ** np.floor(np.log2(np.maximum(peak, 2.0**-14)))
    off = np.max(np.abs(actual - expected) / unit, initial=0.0)
    assert off <= units, f"{what}: an element is off by {off:.3g} units in the last place"
