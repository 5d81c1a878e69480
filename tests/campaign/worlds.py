"""An optimizer of drawn parameters and settings beside its float64 reference."""

import copy
import dataclasses
import re

import cases
import numpy as np
from cases import CASES, Scenario
from harness import NUMPY, Pair, Step, numbers
from hypothesis import strategies as st
from tolerances import TOLERANCE, U

BY_NAME = {case.name: case for case in CASES}
DTYPES = ["float32", "float16", "bfloat16"]
GROUPS = ["plain", "grouped", "dynamic"]
shapes = st.lists(st.sampled_from([1, 2, 3, 7, 16, 17, 33, 70]), max_size=3)
OPTIONS = {
    "loss_scale": st.sampled_from([1.0, 8.0, 1024.0]),
    "grad_clip_norm": st.sampled_from([None, 0.01, 3.0, 1e3]),
    "skip_nonfinite": st.booleans(),
    "master_weights": st.booleans(),
}
# Errors that tell the user what to do otherwise; any other is a fault.
WORDS = (TypeError, ValueError, RuntimeError, KeyError)


def settings(shapes=shapes):
    """Draw what a World is made of."""

    def of(name):
        return st.fixed_dictionaries(
            {
                "optimizer": st.just(name),
                # Splits are of tensors with certain names.
                "variant": st.sampled_from([v for v, given in BY_NAME[name].variants.items() if "splits" not in given]),
                "dtype": st.sampled_from(DTYPES),
                "gradient_dtype": st.sampled_from(DTYPES),
                "shapes": st.lists(shapes, min_size=1, max_size=5),
                "groups": st.sampled_from(GROUPS),
                "options": st.fixed_dictionaries({}, optional=OPTIONS),
                # The composite path costs twenty times as much to compile, and is the second statement of the rule.
                "backend": st.sampled_from(["aot", "aot", "aot", "composite"]),
                "seed": st.integers(0, 2**32 - 1),
            }
        )

    return st.sampled_from(list(BY_NAME)).flatmap(of)


@dataclasses.dataclass(frozen=True)
class Drawn(Scenario):
    """A scenario of shapes that are not among the named ones."""

    sizes: dict = dataclasses.field(default_factory=dict)

    def shape(self, name):
        shape = self.sizes[name]
        return shape if self.dimensions is None else cases.as_matrix(shape)


def words(error):
    """Return what an error says itself, without where MindSpore was when it was raised."""
    return re.split(r"\n-{10,}", str(error))[0]


class World(Pair):
    """A pair that is looked at after everything that is done to it."""

    def __init__(self, settings):
        case = BY_NAME[settings["optimizer"]]
        sizes = {f"t{i}": tuple(shape) for i, shape in enumerate(settings["shapes"])}
        scenario = Drawn(
            settings["dtype"],
            settings["gradient_dtype"],
            tuple(sizes),
            settings["options"],
            getattr(cases, settings["groups"]),
            sizes=sizes,
        )
        self.settings = settings
        super().__init__(
            case, scenario, case.variants[settings["variant"]], settings["seed"], backend=settings["backend"]
        )
        self.cell = Step(self.optimizer)
        # What the rule makes of gradients that are a few roundings larger or smaller.
        self.shaken = [] if self.is_compressed else [copy.deepcopy(self.reference) for _ in range(2)]

    @property
    def is_compressed(self):
        return hasattr(self.reference, "sent")

    def entering(self, gradients):
        """Return the sizes of the terms whose sum enters the rule: where they cancel, their roundings are left."""
        r, terms = self.reference, []
        for i, g in enumerate(gradients):
            term = np.abs(g)
            if r.centralized[i] and g.ndim >= 2:
                term = term + np.abs(g.mean(axis=tuple(range(1, g.ndim)), keepdims=True))
            if r.decay_in_states:
                weight = np.maximum(np.abs(r.masters[i]), getattr(r, "decay_type", "l2") == "l1")
                term = term + r.loss_scale * r.weight_decays[i](r.step_count) * weight
            terms.append(term)
        return terms

    def follow(self, gradients):
        terms = self.entering(gradients)
        for sign, shaken in zip((4 * U, -4 * U), self.shaken):
            shaken.step([g + sign * term for g, term in zip(gradients, terms)])
        if self.is_compressed:
            for i, term in enumerate(terms):
                for name in self.reference.states:
                    peak = self.reference.peak[name]
                    peak[i] = np.maximum(peak[i], term / self.reference.loss_scale)
        super().follow(gradients)

    def check(self):
        """Compare, and allow for what a rounding of the gradients makes of an element.

        Of an element whose gradient and decay nearly cancel, Adam's first step is the sign of what is left.
        """
        r = self.reference
        state = self.state_tolerance(0, self.scenario.dtype == "float32" or r.keeps_masters)
        for shaken in self.shaken:
            for i, w in enumerate(shaken.masters):
                for name in r.states:
                    raise_to(r.peak[name], i, np.abs(shaken.state[name][i] - r.state[name][i]) / state)
                raise_to(r.peak["weight"], i, np.abs(w - r.masters[i]) / TOLERANCE["weight"])
                away = np.abs(shaken.statistics[i] - r.statistics[i])
                raise_to(r.peak["statistics"], i, away / TOLERANCE["statistics"])
        super().check()

    def scaled(self, size, filled):
        """Draw gradients of some size, of which so many of ten elements are not 0."""
        gradients, dtype = self.gradients(size)
        largest = 60000.0 if dtype == "float16" else np.inf
        kept = [self.rng.integers(10, size=g.shape) < filled for g in gradients]
        # Not a product: float16 may have made infinity of a large one.
        clipped = (np.clip(np.where(k, g, 0.0), -largest, largest) for g, k in zip(gradients, kept))
        # Of arrays without dimensions NumPy makes numbers, which nobody can write to.
        return [np.array(g.astype(NUMPY[dtype]).astype(np.float64)) for g in clipped], dtype

    def held(self):
        """Return the bytes of everything that a step may write."""
        o = self.optimizer
        held = (*self.params, *o.states, *o.masters, o.global_step, o.skipped_steps)
        return [(p.name, p.shape, str(p.dtype), numbers(p).tobytes()) for p in held]

    def refused(self, names, action):
        """Do something that may be refused, with words that name one of `names`, if nothing is changed then."""
        before = self.held()
        try:
            action()
        except WORDS as error:
            said = words(error)
            assert any(name in said for name in names), f"An error that names none of {names}: {said}"
            changed = [a[0] for a, b in zip(before, self.held()) if a != b]
            assert not changed, f"It was refused ({said}), but {changed} changed."
            return True
        return False

    def give_weight(self, i, value):
        """Tell the reference of a weight set by hand: it wins over its master where it is not what was stored."""
        stays = value == self.reference.weights[i]
        for r in (self.reference, *self.shaken):
            r.masters[i] = np.where(stays, r.masters[i], value)
            raise_to(r.peak["weight"], i, np.abs(value))


def raise_to(peaks, i, least):
    peaks[i] = np.maximum(peaks[i], least)
