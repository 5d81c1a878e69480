"""A rule is one row: two rules of one state that the package does not have, on the CPU and on CUDA's stand-in."""

import ctypes
import functools
import platform
import shutil

import machines
import numpy as np
import parity
import pytest
import recording
from builds import linked, needs, once, shared_folder
from machines import SIZES, compare
from proofs import BUILT
from recording import Recorded
from reference.base import Reference, norm
from sources import ROOT, TESTS

from ms_optim.kernels import description, interface
from ms_optim.kernels.interface import SharedFlag
from ms_optim.kernels.libraries import call_of

pytestmark = pytest.mark.proof(*BUILT)
SETS = ("avx512", "avx2", "baseline")


class Sgd(Reference):
    """Momentum SGD."""

    states = ("m",)
    momentum = 0.9

    def update(self, i, w, g, learning_rate, weight_decay):
        self.state["m"][i] = self.momentum * self.state["m"][i] + g
        return learning_rate * self.direction(i, self.state["m"][i], weight_decay * w), 1.0


class Lars(Sgd):
    """You et al. (2017), with the trust ratio of the direction that momentum gives."""

    def update(self, i, w, g, learning_rate, weight_decay):
        u, _ = super().update(i, w, g, 1.0, weight_decay)
        ratio = norm(w) / norm(u) if norm(w) > 0 and norm(u) > 0 else 1.0
        return learning_rate * ratio * u, ratio


def build(folder):
    """Compile the sources with the other list of rules in place of the package's."""
    ops = folder / "ops"
    shutil.copytree(ROOT / "ops", ops)
    shutil.copy(TESTS / "gpu" / "one_state" / "rules.h", ops / "include" / "rules.h")
    # Optimized less than for use: that takes half the time, and changes no bit.
    linked(folder / "cpu.so", "g++", platform.machine(), ["-fPIC", "-O1"], ["-shared"], ops=ops)
    machines.StandIn.build(folder, ops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    needs("g++")
    return once(shared_folder(tmp_path_factory), "one_state", build)


@pytest.fixture(scope="module")
def cpu(folder):
    return ctypes.CDLL(str(folder / "cpu.so"))


@pytest.fixture(scope="module")
def stand_in(folder):
    return machines.StandIn(folder)


def call_on(library):
    return lambda function, arrays: call_of(library, function, arrays, [a.ctypes.data for a in arrays])()


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    """Let launches of the two rules be made as those of the package's."""
    for rule in ("sgd", "lars"):
        monkeypatch.setitem(recording.RULES, rule, ("s", (0.9,), 0))


def cases(rule):
    """The rule with every storage of weights and states, and with stages in launches of their own."""
    rng, made = np.random.default_rng(3), []
    for weights in recording.WEIGHTS:
        for states in recording.STATES:
            shared = SharedFlag.SKIP_NONFINITE * (states in recording.CODES)
            launch = recording.launch(rule, rng, weights, states, shared=shared)
            remainders = recording.remainders_of(launch, weights[1], len(recording.SHAPES))
            name = f"{rule}, {weights}, {states}"
            made.append(Recorded(name, launch.function, launch.arrays, remainders=remainders))
    return made


def test_the_libraries_say_what_they_have(cpu, stand_in):
    for library in (cpu, stand_in.library):
        assert description.rules(library) == dict.fromkeys(("sgd", "lars"), (1, 1, False, False, False))
        numbers = description.exported(library)
        assert numbers["Sgd.MAXIMIZE"] == 1
        assert numbers["SharedFlag.CLIPS"] == interface.SharedFlag.CLIPS


@pytest.mark.parametrize("weight", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("formula", [Sgd, Lars], ids=lambda formula: formula.__name__)
def test_they_follow_the_reference(cpu, stand_in, formula, weight):
    rule = (f"ms_optim_{formula.__name__.lower()}", formula, (0.9,), 0, {})
    for call in (call_on(cpu), stand_in.call):
        check = functools.partial(parity.check_launches, call, rule)
        check(SIZES, weight, weight, 8.0, 0.0, True, 0.1, 3)
        check(SIZES[3:7], weight, "float32", 1.0, 0.5, False, 0.0, 4)


@pytest.mark.parametrize("rule", ["sgd", "lars"])
def test_instruction_sets_give_the_same_bits(cpu, rule):
    for case in cases(rule):
        assert cpu.ms_optim_force_instruction_set(b"baseline") == 0
        expected = case.run(call_on(cpu))
        assert expected[0] == 0, case.name
        for name in SETS:
            if cpu.ms_optim_force_instruction_set(name.encode()) == 0:
                case.check(case.run(call_on(cpu)), expected)


def test_both_devices_give_the_same_bits(cpu, stand_in):
    for case in cases("sgd"):
        compare(case, case.run(stand_in.call), case.run(call_on(cpu)), exactly=True)


@pytest.mark.parametrize("states", ["bfloat16", "8bit", "4bit"])
def test_states_of_lower_precision_stay_close(cpu, states):
    """Rounding is unbiased: of the sum of many elements hardly anything of it is left."""
    shapes, results = [(65_536,)], {}
    for kind in ("float32", states):
        made = recording.launch("sgd", np.random.default_rng(5), states=kind, shapes=shapes)
        made.arrays[9][...] = 1.0 + 0.25 * made.arrays[9]
        assert [made.run(call_on(cpu)) for _ in range(20)] == [0] * 20
        results[kind] = made.arrays[8].astype(np.float64).mean()
    assert results[states] == pytest.approx(results["float32"], rel=2e-3)
