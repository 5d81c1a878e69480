"""What a user sets, names or freezes after or before an optimizer is made works in every mode, or is an error."""

import copy
import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from cases import ANY_SHAPE, MODES, for_each
from harness import Step, numbers, tensor
from mindspore import Parameter, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule
from refusals import refused
from runtime import set_mode

from ms_optim import AdamW, Lamb, LocalSteps, SparseTopK, WeightDecaySchedule, load, save
from ms_optim.kernels import table as kernels

BACKENDS = ["aot", "composite"] if kernels.why_not("adamw", "CPU") is None else ["composite"]


def weights(*names):
    return [Parameter(tensor(np.ones(4), "float32"), name=name) for name in names]


def made(case, params=None, **arguments):
    return case.cls(params or weights("a.w", "b.w"), 0.1, **case.cls.required, **arguments)


# ---- Attributes ----------------------------------------------------------------------------------------------------


@for_each([{"case": case, "backend": backend} for case in ANY_SHAPE for backend in BACKENDS])
def test_no_argument_can_be_set_on_an_optimizer(case, backend):
    """Each is refused with what to do, and the steps go on as if nothing was."""
    plain, other = (made(case, backend=backend) for _ in range(2))
    gradients = tuple(ops.ones_like(p) for p in plain.parameters)
    for optimizer in (plain, other):
        optimizer(gradients)
    arguments = {*other.keywords(), "lr", "learning_rate", "weight_decay", "betas", "grad_clip_norm", "loss_scale"}
    for name in arguments:
        before = getattr(other, name, None)
        said = f"'{name}' cannot be set after the optimizer was made.*(param_groups|Make)"
        refused(AttributeError, said, setattr, other, name, 0.5)
        assert getattr(other, name, None) == before
    for optimizer in (plain, other):
        optimizer(gradients)
    assert str(plain) == str(other)
    for p, q in zip(plain.parameters, other.parameters):
        np.testing.assert_array_equal(p, q)


def test_what_a_subclass_sets_in_its_constructor_is_its_own():
    class Late(AdamW):
        def __init__(self, params, learning_rate, scale=2.0):
            super().__init__(params, learning_rate)
            self.scale = scale
            self.scale = self.scale + 1.0

    optimizer = Late(weights("w"), 0.1)
    optimizer.note = "a user's own"
    assert (optimizer.scale, optimizer.note) == (3.0, "a user's own")


@pytest.mark.parametrize("name", ["every", "fragments", "outer_learning_rate", "compress", "group", "lr", "eps"])
def test_nor_on_local_steps(name):
    local = LocalSteps(AdamW(weights("w"), 0.1), every=3, compress=SparseTopK(), outer_momentum=0.0)
    refused(AttributeError, f"'{name}' cannot be set after", setattr, local, name, 2)


def test_an_optimizer_cannot_be_copied():
    refused(TypeError, "make a new optimizer.*state_dict", copy.deepcopy, AdamW(weights("w"), 0.1))


class Rate(LearningRateSchedule):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.inner = rate, nn.CellList([nn.Cell()])
        self.inner[0].factor = 1.0

    def construct(self, step):
        return ops.cast(step, ms.float32).reshape(()) * 0.0 + self.rate * self.inner[0].factor


class Decay(WeightDecaySchedule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def construct(self, step):
        return ops.cast(step, ms.float32).reshape(()) * 0.0 + self.rate


@for_each([{"kind": kind, "backend": backend} for kind in ("rate", "factor", "decay") for backend in BACKENDS])
def test_a_schedule_that_is_changed_acts_or_is_refused(kind, backend):
    rate, decay = Rate(0.1), Decay(0.5)
    optimizer = AdamW(weights("w"), rate, weight_decay=decay, backend=backend)
    zero = (ops.zeros((4,)),)
    optimizer(zero)
    before = optimizer.parameters[0].asnumpy().copy()
    changed = {"rate": rate, "factor": rate.inner[0], "decay": decay}[kind]
    setattr(changed, "factor" if kind == "factor" else "rate", 0.0)
    if optimizer.fused:
        refused(ValueError, "attribute '(rate|factor)' of the schedule .* must stay.*param_groups", optimizer, zero)
    else:
        optimizer(zero)
    np.testing.assert_array_equal(optimizer.parameters[0], before)


# ---- Freezing ------------------------------------------------------------------------------------------------------


@for_each([{"mode": mode, "backend": backend} for mode in MODES for backend in BACKENDS])
def test_a_parameter_that_is_frozen_later_is_named(mode, backend):
    set_mode(mode)
    params = weights("a", "b")
    params[0].requires_grad = False  # given nevertheless: it is updated, as ever
    optimizer = AdamW(params, 0.1, weight_decay=0.5, backend=backend)
    step = Step(optimizer)
    params[1].requires_grad = False
    before = [p.asnumpy().copy() for p in params]
    refused(ValueError, "'b' was frozen.*trainable_params", step, *(ops.ones((4,)) for _ in params))
    for p, value in zip(params, before):
        np.testing.assert_array_equal(p, value)
    params[1].requires_grad = True
    Step(optimizer)(*(ops.ones((4,)) for _ in params))
    assert optimizer.global_step.asnumpy() == [1]


# ---- Names ---------------------------------------------------------------------------------------------------------

NAMES = ["learning_rate", "weight_decay", "global_step", "skipped_steps", "statistics", "rule", "beta1", "parameters",
         "states", "loss_scale", "step_weights", "construct", "eps", "momentum", "dgc_worker", "w"]  # fmt: skip


@for_each(
    [{"case": case, "mode": mode} for i, case in enumerate(ANY_SHAPE) for mode in (MODES if i == 0 else ("pynative",))]
)
def test_a_parameter_may_have_the_name_of_an_attribute(case, mode, tmp_path):
    """Learned rates are called so; they are trained, saved and loaded as any others."""
    set_mode(mode)
    named, plain = made(case, weights(*NAMES)), made(case, weights(*(f"{i}.w" for i in range(len(NAMES)))))
    steps = [Step(optimizer) for optimizer in (named, plain)]
    for k in range(2):
        for step in steps:
            step(*(ops.ones((4,)) * (k + i) for i in range(len(NAMES))))
    for p, q in zip(named.parameters, plain.parameters):
        np.testing.assert_array_equal(p, q, err_msg=p.name)
    # Counters, states and weights are all there, each under a name of its own.
    entries = named.state_dict()
    assert len(entries) == len(plain.state_dict())
    assert [name for name in NAMES if name not in entries] == []
    other = made(case, weights(*NAMES))
    other.load_state_dict(entries)
    for p, q in zip(named.states, other.states):
        np.testing.assert_array_equal(p, q)
    assert other.global_step.asnumpy() == [2]
    save(tmp_path / "run.safetensors", None, named)
    other = made(case, weights(*NAMES))
    assert load(tmp_path / "run.safetensors", None, other).step == 2
    for p, q in zip((*named.parameters, *named.states), (*other.parameters, *other.states)):
        np.testing.assert_array_equal(p, q)


def test_a_network_may_have_buffers_with_the_names_of_what_an_optimizer_keeps(tmp_path):
    """Parameters that are not trained, such as a count of the network's own, beside the optimizer's."""

    def network(value):
        net = nn.SequentialCell([nn.Dense(2, 2)])
        for name in ("global_step", "learning_rate", "skipped_steps", "adam_m.0.weight"):
            buffer = Parameter(tensor(np.full(3, value), "float32"), name=name, requires_grad=False)
            net.insert_param_to_cell(name, buffer, check_name_contain_dot=False)
        return net, AdamW(net.trainable_params(), 0.1)

    (net, optimizer), (other, loaded) = network(5.0), network(0.0)
    optimizer(tuple(ops.ones_like(p) for p in optimizer.parameters))
    save(tmp_path / "run.safetensors", net, optimizer)
    assert load(tmp_path / "run.safetensors", other, loaded).step == 1
    assert [numbers(p).tolist() for p in other.get_parameters()] == [numbers(p).tolist() for p in net.get_parameters()]
    assert [numbers(p).tolist() for p in loaded.states] == [numbers(p).tolist() for p in optimizer.states]


def test_an_attribute_that_is_set_later_takes_no_parameters_place():
    optimizer = AdamW(weights("note", "w"), 0.1)
    optimizer.note, optimizer.w = "a user's own", ops.zeros((4,))
    assert optimizer.note == "a user's own"
    np.testing.assert_array_equal(optimizer.parameters[1], np.ones(4))
    assert [p.name for p in optimizer.get_parameters()][:4] == ["global_step", "learning_rate", "note", "w"]


# ---- What is dropped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [{}, {"average_decay": 0.9}, {"master_weights": True}])
def test_a_dropped_optimizer_leaves_nothing_with_its_network(backend, shared):
    params = [Parameter(tensor(np.ones(4), "bfloat16"), name=f"w{i}") for i in range(2)]
    gradients = tuple(tensor(np.ones(4), "bfloat16") for _ in params)
    kept = AdamW(params, 0.1, backend=backend, **shared)
    clones = [len(p.param_info.cloned_obj) for p in params]
    dropped = Lamb(params, 0.1, backend=backend, **shared)
    assert [len(p.param_info.cloned_obj) for p in params] > clones
    dropped(gradients)
    states = [weakref.ref(p) for p in (*dropped.states, *dropped.masters, *dropped.averages)]
    dropped = None
    gc.collect()
    gc.collect()
    assert [state() for state in states] == [None] * len(states)
    assert [len(p.param_info.cloned_obj) for p in params] == clones
    kept(gradients)
