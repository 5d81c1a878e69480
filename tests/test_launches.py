"""How a step is split into launches, and that splitting changes nothing."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from cases import CASES, MODES, SCENARIOS, Scenario, dealt, every_case, fewer_shapes, for_each, grouped, plain
from harness import Pair, Step, numbers, tensor
from mindspore import Parameter
from refusals import refused
from tolerances import STEPS

from ms_optim import LANS, AdamW, Lamb
from ms_optim.kernels.interface import SharedFlag
from ms_optim.paths.fused.launches import MOST_LAUNCHES, Launch, phases_of

LANS_CASE = next(case for case in CASES if case.optimizer is LANS)
GRADIENT, UPDATE, COMMIT = 1, 6, 8


def test_one_launch_does_it_all():
    for looks_at_all in (False, True):
        assert phases_of(3, (0, 1, 2), 3, looks_at_all) == [[Launch(15, (0, 1, 2))]]


def test_launches_of_a_bounded_number_of_tensors():
    assert phases_of(5, (0, 1, 2, 3, 4), 2, False) == [[Launch(7, (0, 1)), Launch(7, (2, 3)), Launch(15, (4,))]]


@pytest.mark.parametrize("own", [(0, 1, 2, 3, 4), (1, 4), (2,)])
@pytest.mark.parametrize("at_most", [1, 2, 5, 9])
@pytest.mark.parametrize("looks_at_all", [False, True])
def test_every_tensor_goes_through_every_stage_once(own, at_most, looks_at_all):
    phases = phases_of(5, own, at_most, looks_at_all)
    launches = [launch for phase in phases for launch in phase]
    assert all(len(launch.tensors) <= at_most for launch in launches)
    for stage in (GRADIENT, UPDATE):
        seen = [i for launch in launches if launch.stages & stage for i in launch.tensors]
        assert seen == list(range(5) if stage == GRADIENT and looks_at_all else own)
    assert [bool(launch.stages & COMMIT) for launch in launches] == [False] * (len(launches) - 1) + [True]
    if looks_at_all:
        # All gradients are read before anything moves.
        moving = [k for k, phase in enumerate(phases) for launch in phase if launch.stages & UPDATE]
        reading = [k for k, phase in enumerate(phases) for launch in phase if launch.stages & GRADIENT]
        assert min(moving) > max(reading) or len(launches) == 1


@pytest.mark.parametrize("aggregate_num, launches", [(0, 1), (None, 1), (1, 9), (2, 5), (4, 3), (9, 1), (100, 1)])
def test_aggregate_num_bounds_a_launch(aggregate_num, launches):
    pair = Pair(LANS_CASE, SCENARIOS["grouped"], {"aggregate_num": aggregate_num})
    assert len(pair.params) == 9
    assert len(pair.optimizer._path.launches) == launches
    for launch in pair.optimizer._path.launches:
        assert launch.layout.shape[0] <= (aggregate_num or 9)


def test_a_phase_has_few_launches_however_many_tensors_there_are():
    params = [Parameter(tensor(np.ones(3), "float32"), name=f"w{i}") for i in range(2 * MOST_LAUNCHES + 1)]
    taken = [launch.layout.shape[0] for launch in LANS(params, 0.1, aggregate_num=1)._path.launches]
    assert taken == [3] * (len(params) // 3)


def test_flags_say_what_kernels_cannot_read_where_they_are_started():
    """On a GPU, whether there is a bound, and whether gradients are centralized: the CPU's kernels need no flag."""

    def shared(**settings):
        bound = {"grad_clip_norm": settings.pop("grad_clip_norm", None)}
        group = {"params": [Parameter(tensor(np.ones((2, 3)), "float32"), name="w")], **settings}
        (launch,) = AdamW([group], 0.1, **bound)._path.launches
        return launch.flags.shape[1] - 1

    assert shared(grad_clip_norm=1.0) == shared() + SharedFlag.CLIPS
    assert shared(grad_centralization=True) == shared() + SharedFlag.CENTRALIZES


SHARED = [{}, {"grad_clip_norm": 3.0}, {"skip_nonfinite": True}]


@for_each(dealt([{"shared": shared} for shared in SHARED], mode=MODES))
def test_the_result_does_not_depend_on_aggregate_num(shared, mode):
    seen = []
    for aggregate_num in (0, 1, 4):
        scenario = Scenario("bfloat16", groups=grouped, shared=shared)
        pair = Pair(LANS_CASE, scenario, {"aggregate_num": aggregate_num})
        pair.run(mode, 5)
        held = [*pair.params, *pair.optimizer.states, *pair.optimizer.masters, pair.optimizer.statistics]
        seen.append(b"".join(numbers(p).tobytes() for p in held))
        assert int(pair.optimizer.global_step.asnumpy()[0]) == 5
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("aggregate_num", [0, 2])
def test_a_skipped_step_is_skipped_by_all_launches(aggregate_num, mode):
    params = [Parameter(tensor(np.ones(3), "float32"), name=f"w{i}") for i in range(5)]
    optimizer = LANS(params, 0.1, aggregate_num=aggregate_num, skip_nonfinite=True)
    call = Step(optimizer)
    for place in range(5):
        gradients = [tensor(np.full(3, np.nan if i == place else 1.0), "float32") for i in range(5)]
        call(*gradients)
        assert optimizer.statistics.asnumpy()[:, 4].tolist() == [float(i != place) for i in range(5)]
    assert all((numbers(p) == 1.0).all() for p in params)
    assert all((numbers(s) == 0.0).all() for s in optimizer.states)
    assert (int(optimizer.global_step.asnumpy()[0]), int(optimizer.skipped_steps.asnumpy()[0])) == (0, 5)


@pytest.mark.parametrize("shared", [{}, {"grad_clip_norm": 1.0}])
def test_clipping_before_normalizing_changes_nothing_but_the_launches(shared, backend):
    """LANS normalizes: a global bound can only scale what is scaled away."""
    ms.set_context(mode=ms.GRAPH_MODE)
    scenario = fewer_shapes(LANS_CASE, Scenario(groups=plain, shared=shared), backend, "graph")
    pair = Pair(LANS_CASE, scenario, backend=backend)
    pair.run("graph", STEPS)
    pair.check()


def test_zero_gradients_and_weights_leave_numbers(backend, mode):
    w, zero = (Parameter(tensor(np.full(4, x), "float32"), name=f"w{x}") for x in (1.0, 0.0))
    optimizer = LANS([w, zero], 0.1, weight_decay=0.1, rescale_grad=0.5, backend=backend)
    call = Step(optimizer)
    for g in (0.0, 0.0, 1.0, 0.0):
        call(*[tensor(np.full(4, g), "float32")] * 2)
        # Of normalized gradients, only this tells what they were multiplied by.
        assert optimizer.statistics.asnumpy()[:, 0].tolist() == [g, g]
        for p in (w, zero, *optimizer.states, optimizer.statistics):
            assert np.isfinite(numbers(p)).all()
    assert (numbers(optimizer.states[0]) != 0).all()


@pytest.mark.parametrize("size", [1e-30, 1e-37, 1e30])
def test_gradients_of_any_size_are_normalized(size):
    """LANS' step does not depend on the gradient's size, to the ends of float32."""
    steps = []
    for factor in (1.0, size):
        w = Parameter(tensor([1.0, 2.0, 3.0], "float32"), name="w")
        LANS([w], 0.1, eps=1e-12)((tensor(np.array([1.0, 1.0, 1.0]) * factor, "float32"),))
        steps.append(numbers(w))
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-6)


class Halved:
    """The parallel optimizer as upstream arranges it: each process updates its share and broadcasts it.

    Upstream allows it on Ascend only; here a process of two is played, and what it would broadcast is noted.
    """

    def _use_parallel_optimizer(self):
        self.use_parallel, self.dev_num = True, 2
        self.param_rank = [i % 2 for i in range(self.param_length)]
        self.optim_filter = tuple(rank == 0 for rank in self.param_rank)
        self.broadcasts = 0

    def broadcast_params(self, optim_result):
        self.broadcasts = self.broadcasts + 1
        return optim_result


@every_case([case for case in CASES if case.cls._support_parallel_optimizer], shared=SHARED)
def test_a_process_updates_its_share(case, shared, backend):
    halved = type(case.name, (Halved, case.cls), {})
    scenario = Scenario(shapes=("seven", "lanes-1", "lanes+1", "matrix", "scalar"), groups=grouped, shared=shared)
    share = Pair(dataclasses.replace(case, optimizer=halved), scenario, backend=backend)
    whole = Pair(case, scenario, backend=backend)
    start = [numbers(p) for p in share.params]
    for pair in (share, whole):
        pair.run("pynative", 3)
    for i, (p, q, first) in enumerate(zip(share.params, whole.params, start)):
        np.testing.assert_array_equal(numbers(p), numbers(q) if i % 2 == 0 else first)
    assert share.optimizer.broadcasts == 3
    assert int(share.optimizer.global_step.asnumpy()[0]) == 3


def test_a_process_that_updates_a_share_keeps_no_average():
    halved = type("AdamW", (Halved, AdamW), {})
    params = [Parameter(tensor(np.ones(3), "float32"), name=f"w{i}") for i in range(2)]
    refused(ValueError, "enable_parallel_optimizer=False", lambda: halved(params, 0.1, average_decay=0.9))


@every_case()
def test_the_parallel_optimizer_is_supported_as_upstream(case):
    others = ("AdamOffload", "DGCMomentum", "ScheduleFreeAdamW", "Muon")
    assert case.cls._support_parallel_optimizer == (case.name not in others)
    assert Lamb._support_parallel_optimizer
