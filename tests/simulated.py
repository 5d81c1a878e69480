"""Simulated workers beside the reference of so many."""

import numpy as np
import reference
from harness import check_close, numbers, tensor
from mindspore import Parameter
from tolerances import TOLERANCE

from ms_optim import DGCMomentum, SimulatedWorkers

RATE = 0.01


def parameters(weights):
    return [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate(weights)]


def made(count, weights, **arguments):
    return SimulatedWorkers(
        count, parameters(weights), lambda params, group: DGCMomentum(params, RATE, group=group, **arguments)
    )


def drawn(count, shapes, seed, poisoned=False):
    rng = np.random.default_rng(seed)
    given = [[np.asarray(rng.standard_normal(s)).astype(np.float32) for s in shapes] for _ in range(count)]
    if poisoned:
        given[-1][0].reshape(-1)[-1] = np.nan
    return given


def run(workers, given):
    return workers([tuple(tensor(g, "float32") for g in one) for one in given])


def followed(count, shapes, arguments, steps, poisoned=(), seed=0):
    """Take steps, some poisoned where that is skipped; return the workers, which followed the reference."""
    weights = drawn(1, shapes, [seed])[0]
    workers = made(count, weights, **arguments)
    n, decay = len(shapes), arguments.get("weight_decay", 0.0)
    expected = reference.DGCMomentum(
        [w.astype(np.float64) for w in weights],
        [lambda k: RATE] * n,
        [lambda k: decay] * n,
        [False] * n,
        ["float32"] * n,
        workers=count,
        **{k: v for k, v in arguments.items() if k != "weight_decay"},
    )
    # Of a gradient and a decay that nearly cancel, the rounding of both is left.
    for states in ("dgc_u", "dgc_r"):
        expected.peak[states] = [np.full(s, 1.0) for s in shapes]
    for step in range(steps):
        spoiled = step in poisoned and arguments.get("skip_nonfinite", False)
        given = drawn(count, shapes, [seed, step], spoiled)
        before = [numbers(state) for o in workers.optimizers for state in o.states]
        assert run(workers, given) == (True,) * n
        if spoiled:
            after = [numbers(state) for o in workers.optimizers for state in o.states]
            assert all((a == b).all() for a, b in zip(before, after)), f"step {step} was to be skipped"
        expected.sent = [[numbers(u) == 0 for u in o.states[:n]] for o in workers.optimizers]
        expected.behind = [[numbers(r) for r in o.states[n:]] for o in workers.optimizers]
        exact = [[g.astype(np.float64) for g in one] for one in given]
        expected.step(exact if count > 1 else exact[0])
        check(workers, expected, step)
    assert {int(o.skipped_steps.asnumpy()[0]) for o in workers.optimizers} == {expected.skipped}
    assert {int(o.global_step.asnumpy()[0]) for o in workers.optimizers} == {expected.step_count}
    return workers


def check(workers, expected, step):
    n = len(expected.weights)
    for i in range(n):
        assert len({o.parameters[i].asnumpy().tobytes() for o in workers.optimizers}) == 1, f"w{i} after step {step}"
        weight, peak = numbers(workers.optimizers[0].parameters[i]), np.maximum(expected.peak["weight"][i], 1.0)
        check_close(weight, expected.weights[i], TOLERANCE["weight"], peak, f"w{i} after step {step}")
        for worker, o in enumerate(workers.optimizers):
            for place, state in ((i, "dgc_u"), (n + i, "dgc_r")):
                peak = np.maximum(expected.peak[state][i], 1.0)
                wanted = expected.of_worker[worker][state][i]
                check_close(numbers(o.states[place]), wanted, TOLERANCE["state with decay"], peak, f"{state} {step}")
