"""What has not been sent yet belongs to its worker, and is folded, not lost, when the number of workers changes."""

import mindspore as ms
import numpy as np
import pytest
from harness import Step, numbers, tensor
from mindspore import Parameter, Tensor, nn
from refusals import refused

from ms_optim import DGCMomentum, SimulatedWorkers, fold_residuals
from ms_optim.kernels import table as kernels

SHAPE = (300,)
pytestmark = pytest.mark.skipif(
    kernels.why_not("dgc_momentum", "CPU") is not None, reason=str(kernels.why_not("dgc_momentum", "CPU"))
)


def made(count):
    def make(params, group):
        return DGCMomentum(params, 0.1, 0.9, 1, sparsity=[0.9], min_compress_numel=1, group=group)

    return SimulatedWorkers(count, [Parameter(tensor(np.ones(SHAPE), "float32"), name="w")], make)


def run(workers, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        workers([(tensor(rng.standard_normal(SHAPE), "float32"),) for _ in workers.optimizers])


def held(workers, place):
    return [numbers(o.states[place]).astype(np.float64) for o in workers.optimizers]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_the_sum_of_the_residuals_is_kept(new):
    old = made(3)
    run(old, 5)
    folded = fold_residuals([o.state_dict() for o in reversed(old.optimizers)], new)
    workers = made(new)
    for o, first, entries in zip(workers.optimizers, old.optimizers * 2, folded):
        o.load_state_dict(entries)
        o.parameters[0].set_data(ms.Tensor(first.parameters[0].asnumpy()))
    np.testing.assert_allclose(sum(held(workers, 1)), sum(held(old, 1)), rtol=0, atol=1e-6)
    velocities = held(old, 0)
    for rank, u in enumerate(held(workers, 0)):
        np.testing.assert_allclose(u, np.mean(velocities[rank::new] or velocities, 0), rtol=1e-6, atol=1e-7)
    assert all(int(o.global_step.asnumpy()[0]) == 5 for o in workers.optimizers)
    run(workers, 2)
    assert len({o.parameters[0].asnumpy().tobytes() for o in workers.optimizers}) == 1
    if new == 3:
        run(old, 2)
        one, other = (w.optimizers[0].parameters[0].asnumpy() for w in (old, workers))
        assert one.tobytes() == other.tobytes()


def test_states_of_other_workers_are_refused(tmp_path):
    two, three = made(2), made(3)
    run(two, 3)
    saved = two.optimizers[1].state_dict()
    before = held(three, 1)
    for workers in (three, two):
        match = f"worker 0 of {len(workers.optimizers)}, but got that of worker 1 of 2"
        text = refused(ValueError, match, lambda workers=workers: workers.optimizers[0].load_state_dict(saved))
        assert "fold_residuals" in text
    assert all((a == b).all() for a, b in zip(before, held(three, 1)))
    # MindSpore's own loading refuses another number of workers as well: by the shape of an entry of that name.
    ms.save_checkpoint(two.optimizers[1], str(tmp_path / "two.ckpt"))
    read = ms.load_checkpoint(str(tmp_path / "two.ckpt"))
    with pytest.raises(RuntimeError, match="dgc_worker"):
        ms.load_param_into_net(three.optimizers[0], read)
    two.optimizers[1].load_state_dict(read)


class Holder(nn.Cell):
    """A Cell of the user's own, which puts its attribute's name before those of the optimizer's parameters."""

    def __init__(self, optimizer):
        super().__init__()
        self.opt = optimizer


def everything(workers):
    kept = [(*o.parameters, *o.states, o.global_step, o.skipped_steps, o.statistics) for o in workers.optimizers]
    return [p.asnumpy().tobytes() for parameters in kept for p in parameters]


def test_a_step_with_the_residuals_of_another_worker_is_refused(tmp_path):
    """MindSpore's own loading takes them: the step that follows does not."""
    workers = made(2)
    run(workers, 3)
    for rank, o in enumerate(workers.optimizers):
        ms.save_checkpoint(o, str(tmp_path / f"{rank}.ckpt"))
    first = workers.optimizers[0]
    ms.load_param_into_net(first, ms.load_checkpoint(str(tmp_path / "1.ckpt")), strict_load=True)
    before = everything(workers)
    match = r"must be those of worker 0 of 2, but are those of worker 1 of 2.*load_state_dict.*fold_residuals"
    refused(RuntimeError, match, lambda: run(workers, 1))
    gradients = (tensor(np.ones(SHAPE), "float32"),)
    refused(RuntimeError, match, lambda: first(gradients))
    assert everything(workers) == before
    ms.load_param_into_net(first, ms.load_checkpoint(str(tmp_path / "0.ckpt")), strict_load=True)
    run(workers, 1)
    assert len({o.parameters[0].asnumpy().tobytes() for o in workers.optimizers}) == 1


def test_a_graph_refuses_the_residuals_of_another_worker(capfd):
    """Of one process that is worker 0 of 1, and holds those of nobody; several are in test_exchange.py."""
    params = [Parameter(tensor(np.ones(SHAPE), "float32"), name="w")]
    optimizer = DGCMomentum(params, 0.1, 0.9, 0, sparsity=[0.9], min_compress_numel=1)
    optimizer.dgc_worker.set_data(ms.Tensor([0], ms.int32))
    ms.set_context(mode=ms.GRAPH_MODE)
    kept = (*params, *optimizer.states, optimizer.global_step)
    before = [p.asnumpy().tobytes() for p in kept]
    with pytest.raises(RuntimeError):
        Step(optimizer)(tensor(np.ones(SHAPE), "float32"))
    assert "of worker 0 holds the residuals of worker" in capfd.readouterr().err
    assert [p.asnumpy().tobytes() for p in kept] == before


def test_an_optimizer_that_another_cell_holds():
    workers = made(2)
    run(workers, 3)
    plain = fold_residuals([o.state_dict() for o in workers.optimizers], 1)[0]
    holders = [Holder(o) for o in workers.optimizers]
    first, second = workers.optimizers
    refused(ValueError, "worker 0 of 2, but got that of worker 1", lambda: first.load_state_dict(second.state_dict()))
    held_by = [{p.name: ms.Tensor(p.asnumpy()) for p in holder.get_parameters()} for holder in holders]
    assert all("opt.dgc_worker" in entries for entries in held_by)
    (folded,) = fold_residuals([{k: v for k, v in e.items() if "dgc_" in k} for e in held_by], 1)
    assert folded["opt.dgc_worker"].asnumpy().tolist() == [1]
    for name in ("dgc_r.w", "dgc_u.w"):
        np.testing.assert_array_equal(folded[f"opt.{name}"].asnumpy(), plain[name].asnumpy())
    twice = held_by[0] | {"other.dgc_worker": ms.Tensor([1, 0], ms.int32)}
    refused(ValueError, "must be of one optimizer", lambda: fold_residuals([twice, held_by[1]], 1))


def test_what_cannot_be_folded_is_refused():
    workers = made(2)
    run(workers, 2)
    first, second = (o.state_dict() for o in workers.optimizers)
    refused(
        ValueError,
        "of all workers, but got 1 state dicts, one of them of 2 workers",
        lambda: fold_residuals([first], 1),
    )
    refused(ValueError, r"each worker once, but holds workers \[0\]", lambda: fold_residuals([first, first], 1))
    refused(ValueError, "each worker once", lambda: fold_residuals([], 1))
    refused(TypeError, "'state_dicts' must be a list of dicts", lambda: fold_residuals(first, 1))
    refused(TypeError, "'state_dicts' must be a list of dicts", lambda: fold_residuals([first, {"a": 1}], 1))
    refused(ValueError, "'workers'", lambda: fold_residuals([first, second], 0))
    refused(TypeError, "'workers'", lambda: fold_residuals([first, second], 2.0))
    fewer = {name: value for name, value in second.items() if name != "skipped_steps"}
    refused(ValueError, "not all have 'skipped_steps'", lambda: fold_residuals([first, fewer], 1))
    name = next(name for name in first if name.startswith("dgc_r."))
    for other in (Tensor(np.zeros(3, np.float32)), Tensor(np.zeros(first[name].shape, np.float16))):
        match = f"the entry '{name}' must be of one dtype and shape on all workers"
        refused(ValueError, match, lambda other=other: fold_residuals([first, {**second, name: other}], 1))
    whole = ([0, 0], [1, 1], [0, 2], [0, -1], [[0, 1]], [])
    for whose in (*(np.array(places, np.int32) for places in whole), np.array([0, 1], np.float32)):
        entries = {**second, "dgc_worker": Tensor(whose)}
        match = "the entry 'dgc_worker' must be 1-dimensional int32, 1 at the worker's index and 0 elsewhere"
        refused(ValueError, match, lambda entries=entries: fold_residuals([first, entries], 1))
        refused(ValueError, match, lambda entries=entries: workers.optimizers[1].load_state_dict(entries))
    run(workers, 1)
    later = workers.optimizers[1].state_dict()
    refused(ValueError, "at the same step, but 'global_step'", lambda: fold_residuals([first, later], 1))
