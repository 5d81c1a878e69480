"""What has not been sent yet belongs to its worker, and is folded, not lost, when the number of workers changes."""

import mindspore as ms
import numpy as np
import pytest
from harness import numbers, tensor
from mindspore import Parameter
from refusals import refused

from ms_optim import DGCMomentum, SimulatedWorkers, _kernels, fold_residuals

SHAPE = (300,)
pytestmark = pytest.mark.skipif(
    _kernels.why_not("dgc_momentum", "CPU") is not None, reason=str(_kernels.why_not("dgc_momentum", "CPU"))
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


def test_what_cannot_be_folded_is_refused():
    workers = made(2)
    run(workers, 2)
    first, second = (o.state_dict() for o in workers.optimizers)
    refused(ValueError, "of all workers, but one of the 1 is of 2", lambda: fold_residuals([first], 1))
    refused(ValueError, r"each worker once, but holds workers \[0\]", lambda: fold_residuals([first, first], 1))
    refused(ValueError, "each worker once", lambda: fold_residuals([], 1))
    refused(TypeError, "'state_dicts' must be a list of dicts", lambda: fold_residuals(first, 1))
    refused(TypeError, "'state_dicts' must be a list of dicts", lambda: fold_residuals([first, {"a": 1}], 1))
    refused(ValueError, "'workers'", lambda: fold_residuals([first, second], 0))
    refused(TypeError, "'workers'", lambda: fold_residuals([first, second], 2.0))
    fewer = {name: value for name, value in second.items() if name != "skipped_steps"}
    refused(ValueError, "not all hold 'skipped_steps'", lambda: fold_residuals([first, fewer], 1))
    run(workers, 1)
    later = workers.optimizers[1].state_dict()
    refused(ValueError, "of one step, but 'global_step'", lambda: fold_residuals([first, later], 1))
