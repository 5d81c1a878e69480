"""A session in a notebook: optimizers are made, dropped, attached and asked for averages, and cells are interrupted.

A twin takes the same steps in the ordinary way and nothing else; after each cell the weights and states are its, to the
bit, or the cell was refused with words and changed nothing.
"""

import contextlib
import gc

import mindspore as ms
import numpy as np
from harness import laid_out, numbers, tensor
from hypothesis import strategies as st
from interrupting import interrupted_at
from mindspore import Parameter, nn, ops
from worlds import WORDS

from ms_optim import AdamW, Lamb, Lion, LocalSteps, ScheduleFreeAdamW

MAKERS = {
    "AdamW": lambda params: AdamW(params, 0.05, weight_decay=0.1, average_decay=0.5),
    "Lamb": lambda params: Lamb(params, 0.05, average_decay=0.5),
    "Lion": lambda params: Lion(params, 0.01, average_decay=0.9),
    "ScheduleFreeAdamW": lambda params: ScheduleFreeAdamW(params, 0.05),
    "LocalSteps": lambda params: LocalSteps(AdamW(params, 0.05, average_decay=0.5), every=2),
}
# What users call parameters, attributes of optimizers among them.
NAMES = [
    "w",
    "learning_rate",
    "weight_decay",
    "global_step",
    "statistics",
    "rule",
    "beta1",
    "states",
    "a.b",
    "a.b.weight",
]
line = st.integers(0, 400)
place = st.integers(0, 3)
CELLS = {
    "make": (st.sampled_from(list(MAKERS)),),
    "drop": (),
    "step": (),
    "interrupted_step": (line,),
    "backward_pass": (),
    "interrupted_pass": (line,),
    "attach": (),
    "detach": (),
    "averaged": (),
    "interrupted_averaged": (line,),
    "interrupted_eval": (line,),
    "interrupted_attach": (line,),
    "set_attribute": (st.sampled_from(["lr", "loss_scale", "weight_decay", "learning_rate", "betas"]),),
    "freeze": (place,),
    "view": (place, st.sampled_from(["transposed", "strided", "offset"])),
    "second_optimizer": (),
}
PROGRAM = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(NAMES), min_size=4, max_size=4, unique=True),
        "readers": st.lists(st.lists(place, max_size=2), min_size=4, max_size=4),
        "maker": st.sampled_from(list(MAKERS)),
        "cells": st.lists(st.one_of(*[st.tuples(st.just(n), *a) for n, a in CELLS.items()]), min_size=1, max_size=14),
        "seed": st.integers(0, 2**32 - 1),
    }
)
SIDE = 5


class Net(nn.Cell):
    """A chain of products; each layer also reads weights of other layers behind stop_gradient."""

    def __init__(self, weights, readers):
        super().__init__()
        self.weights, self.readers = tuple(weights), readers

    def construct(self, x):
        for weight, readers in zip(self.weights, self.readers):
            for other in readers:
                x = ops.tanh(ops.matmul(x, ops.stop_gradient(self.weights[other])))
            x = ops.tanh(ops.matmul(x, weight))
        return ops.square(x - 0.3).sum()


class Notebook:
    def __init__(self, program):
        self.rng = np.random.default_rng(program["seed"])
        starts = [self.rng.standard_normal((SIDE, SIDE)) * 0.5 for _ in program["names"]]
        self.params, self.twins = (
            [Parameter(tensor(w, "float32"), name=name) for w, name in zip(starts, program["names"])] for _ in range(2)
        )
        self.net, self.twin_net = (Net(params, program["readers"]) for params in (self.params, self.twins))
        self.attached, self.refusals, self.interrupts = False, 0, 0
        self.make(program["maker"])

    def run(self, cells):
        for name, *arguments in cells:
            getattr(self, name)(*arguments)
            self.look(name)
        return {"cells": len(cells), "refused": self.refusals, "interrupted": self.interrupts}

    def look(self, name):
        assert self.held(self.optimizer) == self.held(self.twin), f"After {name}, weights or states are not the twin's."

    @staticmethod
    def held(optimizer):
        return [t.asnumpy().tobytes() for t in optimizer.state_dict().values()]

    def refused(self, call):
        words = ""
        try:
            call()
        except (*WORDS, AttributeError) as error:
            words = str(error)
            assert "For '" in words, words
            self.refusals += 1
        return bool(words)

    # ---- Cells --------------------------------------------------------------------------------------------------

    def make(self, name):
        """Run the cell that makes the optimizer again: the old one is forgotten."""
        self.optimizer, self.twin, self.name = MAKERS[name](self.params), MAKERS[name](self.twins), name
        self.attached = False
        if name == "LocalSteps":
            # Its first step begins a round, of which an interrupt may leave something that the next one writes again.
            self.step()

    def drop(self):
        self.make(self.name)
        gc.collect()

    def gradients(self):
        return tuple(tensor(self.rng.standard_normal(p.shape), "float32") for p in self.params)

    def step(self):
        gradients = self.gradients()
        if self.attached:
            assert self.refused(lambda: self.optimizer(gradients)), "An ordinary step was taken beside attach()."
            return
        self.optimizer(gradients)
        self.twin(gradients)

    def interrupted_step(self, at):
        if self.attached:
            return
        gradients, before = self.gradients(), self.steps()
        self.interrupts += interrupted_at(lambda: self.optimizer(gradients), at)
        if self.steps() > before:
            self.twin(gradients)

    def steps(self):
        return int(self.optimizer.global_step.asnumpy()[0])

    def backward_pass(self):
        x = tensor(self.rng.standard_normal((3, SIDE)), "float32")
        _, gradients = ms.value_and_grad(self.net, None, ms.ParameterTuple(self.params))(x)
        if self.attached:
            assert self.optimizer.finish()
        else:
            self.optimizer(gradients)
        self.twin(ms.value_and_grad(self.twin_net, None, ms.ParameterTuple(self.twins))(x)[1])

    def interrupted_pass(self, at):
        """Interrupt a backward pass that releases gradients, or its end: training goes on from what is loaded then."""
        if not self.attached:
            return
        x, before = tensor(self.rng.standard_normal((3, SIDE)), "float32"), self.steps()

        def work():
            try:
                ms.value_and_grad(self.net, None, ms.ParameterTuple(self.params))(x)
                self.optimizer.finish()
            except RuntimeError as error:  # what MindSpore makes of an interrupt in a hook
                raise KeyboardInterrupt from error

        if interrupted_at(work, at):
            self.interrupts += 1
            self.optimizer.abandon()
            assert self.steps() in (before, before + 1)
            for p, q in zip(self.params, self.twins):
                p.set_data(q.copy())
            self.optimizer.load_state_dict(self.twin.state_dict())
        else:
            self.twin(ms.value_and_grad(self.twin_net, None, ms.ParameterTuple(self.twins))(x)[1])

    def attach(self):
        self.attached = not self.refused(self.optimizer.attach) or self.attached

    def detach(self):
        if not self.refused(self.optimizer.detach):
            self.attached = False

    def averaged(self):
        inside = []
        for optimizer in (self.optimizer, self.twin):
            inner = optimizer.optimizer if isinstance(optimizer, LocalSteps) else optimizer
            with inner.averaged():
                inside.append([numbers(p).tobytes() for p in inner.parameters])
        assert inside[0] == inside[1], "A block evaluates other weights than the twin's."

    def interrupted_averaged(self, at):
        def block():
            with inner.averaged():
                pass

        inner = self.optimizer.optimizer if isinstance(self.optimizer, LocalSteps) else self.optimizer
        self.interrupts += interrupted_at(block, at)
        self.averaged()

    def interrupted_attach(self, at):
        def attach():
            if not self.refused(self.optimizer.attach):
                self.optimizer.detach()

        if not self.attached:
            self.interrupts += interrupted_at(attach, at)
            if getattr(self.optimizer, "_release", None) is not None:
                self.optimizer.detach()

    def interrupted_eval(self, at):
        inner = self.optimizer.optimizer if isinstance(self.optimizer, LocalSteps) else self.optimizer

        def evaluate():
            inner.eval()
            inner.train()

        self.interrupts += interrupted_at(evaluate, at)
        inner.train()

    def set_attribute(self, name):
        assert self.refused(lambda: setattr(self.optimizer, name, 0.5)), f"{name} was set."

    def freeze(self, i):
        if self.attached:
            return
        self.params[i].requires_grad = False
        # The local steps between two exchanges look at the optimizer's own parameters, as it does.
        assert self.refused(lambda: self.optimizer(self.gradients())), "A frozen parameter was trained."
        self.params[i].requires_grad = True

    def view(self, i, layout):
        value = self.rng.standard_normal((SIDE, SIDE))
        with contextlib.suppress(KeyError):
            self.params[i].set_data(laid_out(value, "float32", layout)[0])
            self.twins[i].set_data(tensor(value, "float32"))

    def second_optimizer(self):
        """Another one over the same network, which takes no step while the first releases gradients."""
        other = AdamW(self.params, 0.0)
        if self.attached:
            assert self.refused(other.attach), "Two optimizers release one weight."
        del other
        gc.collect()


def attack(program):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return Notebook(program).run(program["cells"])
