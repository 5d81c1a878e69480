"""Programs of users: what they do to an optimizer and its weights between steps, in any order.

After each operation the optimizer must have followed its float64 reference, or have refused with words that name the
parameter or argument, and then nothing may have changed.
"""

import copy
import threading

import mindspore as ms
import numpy as np
from harness import LAYOUTS, Step, laid_out, numbers, tensor
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from worlds import DTYPES, World, settings

place = st.integers(0, 4)
size = st.sampled_from([1e-4, 1.0, 1.0, 1e2])
filled = st.sampled_from([10, 10, 3, 0])
batch = st.sampled_from([1, 2, 4])
layout = st.sampled_from(["plain", "plain", *LAYOUTS])
gradients = (size, filled, layout)
# What programs may do: methods of Program, with strategies of their arguments.
OPERATIONS = {
    "step": gradients,
    "step_in_graph_mode": gradients,
    "step_in_thread": gradients,
    "step_in_cell": (*gradients, batch),
    "step_in_pynative_cell": (*gradients, batch),
    "step_in_jit": (*gradients, batch),
    "step_by_construct": (*gradients, st.booleans()),
    "step_of_denormals": (),
    "step_of_nonfinite": (place, st.sampled_from(["inf", "-inf", "nan"])),
    "step_of_overflow": (place,),
    "wrong_gradients": (st.sampled_from(["few", "many", "shape", "dtype", "none", "array"]),),
    "set_weight": (place, st.sampled_from(["set_data", "assign", "init"])),
    "set_view": (place, st.sampled_from(LAYOUTS)),
    "set_broadcast": (place,),
    "change_dtype": (place, st.sampled_from(DTYPES), st.sampled_from(["set_dtype", "set_data", "cell"])),
    "change_shape": (place, st.sampled_from(["assign_value", "slice_shape"])),
    "change_state": (place, st.sampled_from(DTYPES)),
    "save": (),
    "load_state_dict": (),
    "load_checkpoint": (),
    "load_param_into_net": (),
    "load_wrong": (st.sampled_from(["missing", "unknown", "shape", "dtype", "number"]),),
    "resume": (),
    "wrap": (),
    "hook": (),
    "other_optimizer": (st.sampled_from(["step", "step_in_cell"]),),
}
drawn = [st.tuples(st.just(name), *arguments) for name, arguments in OPERATIONS.items()]
PROGRAM = st.fixed_dictionaries(
    {"world": settings(), "operations": st.lists(st.one_of(drawn), min_size=1, max_size=12)}
)


class Over(Exception):  # noqa: N818 - it is no error
    """Nothing more can be said of what comes after this."""


class Batched(Step):
    """A step beside something that is compiled anew for each size of a batch."""

    def construct(self, batch, *gradients):
        return batch.sum(), self.optimizer(gradients)


class Around(nn.Cell):
    """A training cell of one's own, which renames what it holds, as Cells do."""

    def __init__(self, optimizer):
        super().__init__()
        self.inner = optimizer


class Program(World):
    """A world, and what may be done to it."""

    def __init__(self, settings):
        super().__init__(settings)
        self.batched = Batched(self.optimizer)
        self.jitted = ms.jit(self.batched.construct)
        self.saved = None
        self.bases, self.fired, self.hooks = {}, 0, 0
        self.other, self.waits_for_step = None, False

    def run(self, operations):
        done = {"operations": 0, "refused": 0}
        try:
            for name, *arguments in operations:
                done["refused"] += bool(getattr(self, name)(*arguments))
                done["operations"] += 1
                ms.set_context(mode=ms.PYNATIVE_MODE)
                self.look()
        except Over:
            pass
        return done

    def look(self):
        """Look at everything, besides what the reference knows at what lies beside weights in memory."""
        # Masters are made by the first step, and made anew by the next where a weight was set; a step that was skipped
        # reports norms that are not finite.
        if self.reference.step_count and not self.waits_for_step:
            self.check()
        for base, mask, before in self.bases.values():
            assert (numbers(base)[mask] == before).all(), "A step wrote beside a weight that is a view."

    # ---- Steps --------------------------------------------------------------------------------------------------

    def tensors(self, gradients, dtype, layout="plain"):
        """Make Tensors, and look afterwards that none was written, nor what lies beside it."""
        made = [laid_out(g, dtype, layout) for g in gradients]
        self.given = [(base, numbers(base)) for _, base in made]
        return tuple(t for t, _ in made)

    def take(self, call, gradients, tensors):
        refused = self.refused(self.parameter_names(), lambda: call(tensors))
        for base, before in self.given:
            np.testing.assert_array_equal(numbers(base), before, "A gradient was written.")
        if not refused:
            self.follow(gradients)
            self.waits_for_step = False
        return refused

    def parameter_names(self):
        return [f"'{p.name}'" for p in self.params]

    def stepped(self, call, size, filled, layout):
        gradients, dtype = self.scaled(size, filled)
        tensors = self.tensors(gradients, dtype, layout)
        refused = self.take(call, gradients, tensors)
        # A plain step has no reason to be refused.
        assert not refused or self.bases, "A step that should work was refused."
        return refused

    def step(self, *gradients):
        fired = self.fired
        refused = self.stepped(self.optimizer, *gradients)
        assert refused or self.fired == fired + self.hooks, "A hook of the optimizer did not fire."
        return refused

    def graph_mode(self):
        """Compile what follows, except where the optimizer has hooks.

        MindSpore compiles the hooks of a Cell, too. A hook that changes something outside is its error then ("Graph
        cycle exists"), for nn.AdamWeightDecay as well.
        """
        ms.set_context(mode=ms.PYNATIVE_MODE if self.hooks else ms.GRAPH_MODE)

    def step_in_graph_mode(self, *gradients):
        self.graph_mode()
        return self.stepped(self.optimizer, *gradients)

    def step_by_construct(self, size, filled, layout, graph):
        ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)
        return self.stepped(self.optimizer.construct, size, filled, layout)

    def step_in_thread(self, *gradients):
        def call(tensors):
            raised = []

            def work():
                try:
                    self.optimizer(tensors)
                except Exception as error:
                    raised.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            if raised:
                raise raised[0]

        return self.stepped(call, *gradients)

    def in_graph(self, call, size, filled, layout, batch):
        share = Tensor(np.ones(batch, np.float32))
        return self.stepped(lambda tensors: call(share, *tensors), size, filled, layout)

    def step_in_cell(self, *arguments):
        self.graph_mode()
        return self.in_graph(self.batched, *arguments)

    def step_in_pynative_cell(self, *arguments):
        return self.in_graph(self.batched, *arguments)

    def step_in_jit(self, *arguments):
        return self.in_graph(self.batched if self.hooks else self.jitted, *arguments)

    def step_of_denormals(self):
        """Moments that fall below the least normal number: the same bits from any thread, or from none."""
        twin = self.twin()
        gradients, dtype = self.scaled(1e-20, 10)
        for world, call in ((self, "step"), (twin, "thread")):
            tensors = self.tensors(gradients, dtype)
            if call == "thread":
                thread = threading.Thread(target=lambda w=world, t=tensors: w.optimizer(t))
                thread.start()
                thread.join()
            else:
                world.optimizer(tensors)
        assert self.held() == twin.held(), "A thread made other bits of denormal numbers."
        raise Over

    def step_of_nonfinite(self, i, value):
        gradients, dtype = self.scaled(1.0, 10)
        gradients[i % len(gradients)].reshape(-1)[-1:] = float(value)
        tensors = self.tensors(gradients, dtype)
        if not self.reference.skip:
            self.optimizer(tensors)
            assert int(self.optimizer.global_step.asnumpy()[0]) == self.reference.step_count + 1
            raise Over
        before, skipped = self.held()[:-1], self.reference.skipped
        self.optimizer(tensors)
        self.reference.skipped = skipped + 1
        assert self.held()[:-1] == before, "A step that was to be skipped changed something."
        self.waits_for_step = True

    def step_of_overflow(self, i):
        """The largest gradients that there are: what they make is not defined, but they harm nothing else."""
        gradients, dtype = self.scaled(1.0, 10)
        gradients[i % len(gradients)].reshape(-1)[:] = {"float16": 65504.0}.get(dtype, 3.3e38)
        self.optimizer(self.tensors(gradients, dtype))
        # Kernels skip gradients whose norm is too large for float32.
        skipped = self.optimizer.skipped_steps.asnumpy()[0] if self.optimizer.options.skip_nonfinite else 0
        assert self.optimizer.global_step.asnumpy()[0] + skipped == self.reference.step_count + 1
        raise Over

    def wrong_gradients(self, how):
        gradients, dtype = self.scaled(1.0, 10)
        tensors = list(self.tensors(gradients, dtype))
        wrong = {
            "few": tensors[:-1],
            "many": [*tensors, tensors[0]],
            "shape": [*tensors[:-1], Tensor(np.zeros((2, 3, 5), np.float32))],
            "dtype": [*tensors[:-1], Tensor(np.zeros(gradients[-1].shape, np.int32))],
            "none": [*tensors[:-1], None],
            "array": [*tensors[:-1], gradients[-1]],
        }[how]
        names = ["gradients", *self.parameter_names()]
        assert self.refused(names, lambda: self.optimizer(tuple(wrong))), "Wrong gradients were taken."
        return True

    # ---- Weights ------------------------------------------------------------------------------------------------

    def set_weight(self, i, how):
        i %= len(self.params)
        value = self.start(self.scenario.shapes[i], self.scenario.dtype)
        made = tensor(value, self.scenario.dtype)
        self.give_weight(i, value)
        self.waits_for_step = True
        p = self.params[i]
        # MindSpore has no Assign of bfloat16 on a CPU, nor of a weight that is a view.
        if how == "assign" and self.scenario.dtype != "bfloat16" and p.is_contiguous():
            ops.assign(p, made)
        elif how == "init":
            p.set_data(ms.common.initializer.initializer(made, p.shape, p.dtype))
        else:
            p.set_data(made)
        return False

    def set_view(self, i, layout):
        i %= len(self.params)
        value = self.start(self.scenario.shapes[i], self.scenario.dtype)
        view, base = laid_out(value, self.scenario.dtype, layout)
        self.give_weight(i, value)
        self.waits_for_step = True
        self.params[i].set_data(view)
        beside = numbers(base) == 7.0
        self.bases[i] = base, beside, numbers(base)[beside]
        return False

    def set_broadcast(self, i):
        i %= len(self.params)
        p = self.params[i]
        base = tensor(np.full((1,) * p.ndim, 0.5), self.scenario.dtype)
        if base.shape == p.shape:
            # MindSpore tells nobody that this is a view, and its operators refuse to write it, or write a copy.
            return False
        self.give_weight(i, np.full(p.shape, 0.5))
        self.waits_for_step = True
        p.set_data(ops.broadcast_to(base, p.shape))
        self.bases[i] = base, np.zeros(base.shape, bool), np.zeros(0)
        return False

    def changed(self, i, back):
        """Take a step after something about a parameter was changed: it is refused by name, or the program is over."""
        gradients, dtype = self.scaled(1.0, 10)
        tensors = self.tensors(gradients, dtype)
        if not self.refused(
            [f"'{self.params[i].name}'", self.optimizer.states[i].name], lambda: self.optimizer(tensors)
        ):
            for p in self.params:
                assert np.isfinite(numbers(p)).all(), f"{p.name} is not finite after its dtype was changed."
            self.follow(gradients)
            loose = 2.0**-6 * np.maximum(self.reference.peak["weight"][i], 1.0)
            wrong = np.abs(numbers(self.params[i]) - self.reference.weights[i]) > loose
            assert not wrong.any(), f"{self.params[i].name} is wrong after its dtype was changed."
            raise Over
        back()
        return True

    def change_dtype(self, i, dtype, how):
        i %= len(self.params)
        p, before = self.params[i], self.params[i].dtype
        if dtype == self.scenario.dtype:
            return False
        stored, to = Tensor(ops.cast(p, ms.float32).asnumpy()), getattr(ms, dtype)
        if how == "set_dtype":
            p.set_dtype(to)
        elif how == "set_data":
            p.set_data(ops.cast(stored, to))
        else:
            cell = nn.Cell()
            cell.insert_param_to_cell("w", p)
            cell.to(to)

        def back():
            p.set_dtype(before)
            p.set_data(ops.cast(stored, before))

        return self.changed(i, back)

    def change_state(self, i, dtype):
        i %= len(self.params)
        state, stored = self.optimizer.states[i], Tensor(numbers(self.optimizer.states[i]).astype(np.float32))
        if dtype == "float32":
            return False
        state.set_dtype(getattr(ms, dtype))

        def back():
            state.set_dtype(ms.float32)
            state.set_data(stored)

        return self.changed(i, back)

    def change_shape(self, i, how):
        i %= len(self.params)
        p = self.params[i]
        if p.size < 4:
            return False
        stored, less = (
            Tensor(p.asnumpy()) if p.dtype != ms.bfloat16 else p.copy(),
            tensor(np.ones(2), self.scenario.dtype),
        )
        if how == "assign_value":
            p.assign_value(less)
        else:
            p.set_data(less, slice_shape=True)
        names = [f"'{p.name}'", "gradients"]
        for of in (p.shape, stored.shape):
            given, dtype = self.scaled(1.0, 10)
            given[i] = np.ones(of)
            tensors = self.tensors(given, dtype)
            assert self.refused(names, lambda t=tensors: self.optimizer(t)), f"A {p.name} of another shape was moved."
        p.set_data(stored, slice_shape=True)
        return True

    # ---- States -------------------------------------------------------------------------------------------------

    def save(self):
        weights = [Tensor(numbers(p).astype(np.float32), p.dtype) for p in self.params]
        self.saved = self.optimizer.state_dict(), weights, copy.deepcopy((self.reference, self.shaken))
        return False

    def load(self, load):
        if self.saved is None:
            return False
        states, weights, references = self.saved
        load(states, weights)
        self.reference, self.shaken = copy.deepcopy(references)
        self.reference.statistics[:] = numbers(self.optimizer.statistics)
        return False

    def set_weights(self, weights):
        for p, w in zip(self.params, weights):
            p.set_data(w)

    def load_state_dict(self):
        def load(states, weights):
            self.optimizer.load_state_dict(states)
            self.set_weights(weights)

        return self.load(load)

    def load_checkpoint(self):
        """Load weights and states together, as a checkpoint of the optimizer has them."""

        def load(states, weights):
            entries = {**states, **{p.name: w for p, w in zip(self.params, weights)}}
            entries["statistics"] = Tensor(numbers(self.optimizer.statistics).astype(np.float32))
            given = {name: Parameter(value, name=name) for name, value in entries.items()}
            assert ms.load_param_into_net(self.optimizer, given) == ([], [])

        return self.load(load)

    def load_param_into_net(self):
        """Load a state dict as MindSpore loads: the weights in it are set, too."""

        def load(states, weights):
            given = {name: Parameter(value, name=name) for name, value in states.items()}
            # A state dict has no statistics.
            assert ms.load_param_into_net(self.optimizer, given) == (["statistics"], [])
            for p, w in zip(self.params, weights):
                assert numbers(p).tobytes() == numbers(w).tobytes(), f"Loading set {p.name} to what was not saved."

        return self.load(load)

    def load_wrong(self, how):
        entries = self.optimizer.state_dict()
        name = self.optimizer.states[0].name
        if how == "missing":
            del entries[name]
        else:
            value = {
                "shape": Tensor(np.zeros(3, np.float32).reshape(3, 1, 1)),
                "dtype": Tensor(np.zeros(self.params[0].shape, np.int32)),
                "unknown": entries[name],
                "number": 3.0,
            }[how]
            name = "nonsense" if how == "unknown" else name
            entries[name] = value
        load = self.optimizer.load_state_dict
        assert self.refused([repr(name)], lambda: load(entries)), f"A state dict was taken with {how} wrong."
        return True

    def twin(self):
        """Build another optimizer that stands where this one stands."""
        twin = World(self.settings)
        for p, q in zip(self.params, twin.params):
            q.set_data(Tensor(numbers(p).astype(np.float32), p.dtype))
        twin.optimizer.load_state_dict(self.optimizer.state_dict())
        return twin

    def resume(self):
        """Another optimizer that goes on from here makes the same bits."""
        twin = self.twin()
        assert twin.held() == self.held(), "What was saved is not what is loaded."
        gradients, dtype = self.scaled(1.0, 10)
        twin.optimizer(tuple(tensor(g, dtype) for g in gradients))
        self.take(self.optimizer, gradients, self.tensors(gradients, dtype))
        assert twin.held() == self.held(), "A resumed step made other bits."
        return False

    def wrap(self):
        """In a Cell of one's own the optimizer's states are saved and loaded as outside of it."""
        plain, states = self.twin(), self.optimizer.state_dict()
        held = [(p, p.name) for p in self.optimizer.get_parameters()]
        around = Around(self.optimizer)
        inside = around.inner.state_dict()
        assert inside.keys() == states.keys(), "A Cell around the optimizer renamed its states."
        plain.optimizer.load_state_dict(inside)
        around.inner.load_state_dict(plain.optimizer.state_dict())
        # What follows looks for the names that everything had.
        for p, name in held:
            p.name = name
        return False

    # ---- The rest -----------------------------------------------------------------------------------------------

    def hook(self):
        def count(*arguments):
            self.fired += 1

        self.optimizer.register_forward_pre_hook(count)
        self.hooks += 1
        return False

    def other_optimizer(self, how):
        """An optimizer of other parameters takes steps in between."""
        if self.other is None:
            self.other = Program({**self.settings, "seed": self.settings["seed"] ^ 1})
        arguments = (1.0, 10, "plain") if how == "step" else (1.0, 10, "plain", 2)
        getattr(self.other, how)(*arguments)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        self.other.look()
        return False


def attack(program):
    return Program(program["world"]).run(program["operations"])
