"""Simulated workers do what real ones do: they follow the reference of so many, and hold the same weights."""

import mindspore as ms
import numpy as np
import pytest
import simulated
from exchange import RAMP, SHAPES, start
from harness import tensor
from mindspore import Parameter
from refusals import refused

from ms_optim import AdamW, DGCMomentum, SimulatedWorkers
from ms_optim.dgc.wire import wire_words
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import MARK_WORDS
from ms_optim.training.simulated_workers import SimulatedWorker

STEPS = 9
pytestmark = pytest.mark.skipif(
    kernels.why_not("dgc_momentum", "CPU") is not None, reason=str(kernels.why_not("dgc_momentum", "CPU"))
)


def parameters():
    return [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(start("float32"))]


def made(count, **arguments):
    return SimulatedWorkers(
        count, parameters(), lambda params, group: DGCMomentum(params, 0.01, group=group, **{**RAMP, **arguments})
    )


def drawn(count, step):
    return simulated.drawn(count, SHAPES, [2, step])


def run(workers, step):
    return simulated.run(workers, drawn(len(workers.optimizers), step))


MORE = {"use_nesterov": True, "grad_clip_norm": 3.0, "skip_nonfinite": True}


@pytest.mark.parametrize(
    "count, wire_dtype, extra",
    [(1, "float16", MORE), (2, "float32", MORE), (2, "float16", {}), (3, "float32", {}), (3, "float16", MORE)],
)
def test_they_follow_the_reference_of_so_many(count, wire_dtype, extra):
    simulated.followed(count, SHAPES, {**RAMP, "wire_dtype": wire_dtype, "weight_decay": 0.1, **extra}, STEPS, {5})


def test_bytes_are_those_of_the_wire():
    workers = made(3, wire_dtype="float16")
    sizes = [int(np.prod(s)) for s in SHAPES]
    run(workers, 0)
    assert workers.bytes_sent == 4 * (sum(sizes) + MARK_WORDS)
    for step in range(1, 6):
        run(workers, step)
    counts = [700, 41, 1, 0, 0]
    assert workers.bytes_sent == 4 * wire_words(sizes, counts, "float16")


def test_a_simulated_worker_takes_no_step_of_its_own():
    workers = made(2)
    gradients = tuple(tensor(g, "float32") for g in drawn(1, 0)[0])
    with pytest.raises(RuntimeError, match="call the SimulatedWorkers instead"):
        workers.optimizers[0](gradients)


def test_what_does_not_fit_is_refused():
    refused(ValueError, "'count' must be", lambda: made(0))
    refused(TypeError, "'count'", lambda: made(1.5))
    refused(TypeError, "'params' must be a list of Parameters", lambda: SimulatedWorkers(2, [1], made))
    refused(TypeError, "'make' must be a function", lambda: SimulatedWorkers(2, parameters(), 3))
    wrong = [lambda p, g: AdamW(p), lambda p, g: DGCMomentum(p, 0.1, 0.9, 0)]
    for make in wrong:
        refused(TypeError, "built with its group", lambda make=make: SimulatedWorkers(2, parameters(), make))
    refused(ValueError, "'num_trainers'", lambda: made(2, num_trainers=3))
    refused(RuntimeError, "the fused kernel is needed", lambda: made(2, backend="composite"))
    workers = made(2)
    run(workers, 0)
    before = [o.parameters[0].asnumpy().tobytes() for o in workers.optimizers]
    given = [tuple(tensor(g, "float32") for g in one) for one in drawn(2, 1)]
    refused(ValueError, "of each of 2 workers", lambda: workers(given[:1]))
    refused(ValueError, "gradients", lambda: workers([given[0], given[1][:-1]]))
    assert [o.parameters[0].asnumpy().tobytes() for o in workers.optimizers] == before
    assert int(workers.optimizers[0].global_step.asnumpy()[0]) == 1
    ms.set_context(mode=ms.GRAPH_MODE)


class Counting(SimulatedWorker):
    """A worker that counts the exchanges that its optimizer asks for."""

    made = 0

    def exchange(self, compressed, words):
        self.made += 1
        return super().exchange(compressed, words)


def test_exchanges_do_not_grow_with_the_tensors():
    """A step runs the one of its phase of the ramp, for all tensors at once."""
    made = []
    for params in (parameters()[:1], parameters()):
        worker = Counting(2, 0)
        optimizer = DGCMomentum(params, 0.01, group=worker, **RAMP)
        made.append(worker.made)
        for exchanges in optimizer._path.exchanges:
            assert len(exchanges) == len(optimizer._schedule.ends) + 1
        assert worker.made == sum(map(len, optimizer._path.exchanges))
    assert made[0] == made[1] > 1
