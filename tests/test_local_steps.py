"""Local steps follow the reference, workers agree to the bit, and nothing is lost between two runs."""

import itertools

import mindspore as ms
import native
import numpy as np
import pytest
import reference
from cases import ANY_SHAPE, MODES, MODES_IN_TURN, every_case
from harness import Step, check_close, digest_of, numbers, tensor
from interrupting import PACKAGE, at_every_line
from local import EVERY, RATE, RUNS, SHAPES, SPARSE, STEPS, chunks_of, gradients, made, parameters, start, tensors
from mindspore import Parameter
from reference.local_steps import LocalSteps as Exact
from refusals import refused
from runtime import set_mode
from tolerances import TOLERANCE, U

import ms_optim
from ms_optim import AdamW, LocalSteps, Quantized, SimulatedWorkers, SparseTopK
from ms_optim.kernels import table as kernels
from ms_optim.kernels.local_interface import LocalMark
from ms_optim.local_steps.exchange import Exchange
from ms_optim.local_steps.wire import due, fragments_of
from ms_optim.training.simulated_workers import SimulatedWorker

pytestmark = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))
)
SIZES = [int(np.prod(s)) for s in SHAPES]
# How far a value may be off that quantization makes of the largest of its chunk.
STEP_OF = {2: 1.0, 4: 0.5 / 7, 8: 0.5 / 127, 16: 2**-11, 32: 0.0}


def simulated(count, every, **arguments):
    return SimulatedWorkers(count, parameters(), lambda params, group: made(params, every, group=group, **arguments))


def exact(count, every, compress=None, fragments=1, outer_learning_rate=0.7, outer_momentum=0.9, nesterov=True):
    n = len(SHAPES)
    workers = [
        reference.AdamW(
            start(), [lambda k: RATE] * n, [lambda k: 0.1] * n, [False] * n, ["float32"] * n, betas=(0.9, 0.999)
        )
        for _ in range(count)
    ]
    decay = None if compress is None else compress.decay
    outer = (outer_learning_rate, outer_momentum, nesterov, decay)
    return Exact(workers, fragments_of(SIZES, fragments), due(every, fragments), every, *outer)


class Sent:
    """What workers sent, read from their wires, and held to what they should have sent.

    Which element is the k-th largest, and which way a value is rounded, hangs on the last bit: the reference goes on
    from what was sent.
    """

    def __init__(self, monkeypatch, compress):
        self.wires, self.compress, self.seen = [], compress, 0
        send = Exchange.send_here

        def recorded(exchange):
            wire, mark = send(exchange)
            self.wires.append(wire.copy())
            return wire, mark

        monkeypatch.setattr(Exchange, "send_here", recorded)

    def __call__(self, fragment, accumulated):
        count = len(accumulated)
        wires, self.wires = self.wires[:count], self.wires[count:]
        self.seen += 1
        if self.compress is None:
            return accumulated
        return [self.of_worker(wire.view(np.uint8), own) for wire, own in zip(wires, accumulated)]

    def of_worker(self, wire, accumulated):
        values = []
        for x in accumulated:
            chunks, wire = chunks_of(wire, x.size, self.compress)
            flat, begin = x.reshape(-1), 0
            for chunk in chunks:
                self.check(chunk, flat[begin : begin + chunk.elements])
                begin += chunk.elements
            values.append(np.concatenate([chunk.dense for chunk in chunks]).reshape(x.shape))
        assert wire.size == 0
        return values

    def check(self, chunk, x):
        """Hold a chunk to what it should be: the largest elements, and their values."""
        magnitude, near = np.abs(x), 64 * U * 4  # of weights of magnitude 4
        k = len(chunk.places)
        assert k == max(1, round(self.compress.density * x.size))
        assert (np.diff(chunk.places) > 0).all()
        kth = np.sort(magnitude)[-k]
        assert magnitude[chunk.places].min() >= kth - near
        chosen = x[chunk.places]
        largest = np.abs(chosen).max()
        if self.compress.bits != 2:
            assert np.abs(chunk.values - chosen).max() <= STEP_OF[self.compress.bits] * largest * 1.001 + near
            return
        low, high = np.unique(np.abs(chunk.values))[[0, -1]]
        mean = np.abs(chosen).mean()
        above = np.abs(chosen) > mean
        expected = np.where(above, high, low) * np.sign(chosen)
        sure = np.abs(np.abs(chosen) - mean) > near
        assert (chunk.values[sure] == expected[sure])[np.abs(chosen[sure]) > near].all()
        for half, value in ((above, high), (~above, low)):
            if half.any():
                assert abs(np.abs(chosen[half]).mean() - value) <= 2**-11 * value + near + 2**-24


def check_workers(workers, expected, what):
    """Hold the weights, and all that local steps keep, to the reference."""
    for n, optimizer in enumerate(workers.optimizers):
        for i in range(len(SHAPES)):
            where = f"{what}, worker {n}, tensor {i}"
            peak = np.maximum(expected.workers[n].peak["weight"][i], 1e-3)
            check_close(
                numbers(optimizer.parameters[i]), expected.workers[n].masters[i], TOLERANCE["weight"], peak, where
            )
            check_close(numbers(optimizer.local_start[i]), expected.starts[i], TOLERANCE["weight"], peak, where)
            # Differences of weights carry the weights' errors.
            if len(optimizer.local_velocity) > 0:
                velocity = numbers(optimizer.local_velocity[i])
                check_close(velocity, expected.velocities[i], 2 * TOLERANCE["weight"], 10 * peak, where)
            if len(optimizer.local_residual) > 0:
                residual = numbers(optimizer.local_residual[i])
                check_close(residual, expected.residuals[n][i], 2 * TOLERANCE["weight"], 10 * peak, where)


def check_alike(workers, steps):
    """After its exchange a fragment is the same on all workers, to the bit."""
    first = workers.optimizers[0]
    for tensors_of, place in zip(fragments_of(SIZES, first.fragments), first.due):
        for i in tensors_of if steps % first.every == place else ():
            assert len({numbers(o.parameters[i]).tobytes() for o in workers.optimizers}) == 1


CONFIGURATIONS = {
    "diloco": {},
    "momentum": {"nesterov": False, "outer_momentum": 0.5, "outer_learning_rate": 1.3},
    "no momentum": {"outer_momentum": 0.0, "fragments": 2},
    "sparseloco": {**SPARSE, "compress": SparseTopK(0.02)},
    "exact": {**SPARSE, "compress": SparseTopK(0.1, 32, 1000, 1.0), "fragments": 2},
    "half": {**SPARSE, "compress": SparseTopK(0.3, 16, 50, 0.0)},
    "8 bits": {"compress": SparseTopK(0.05, 8)},
    "4 bits": {**SPARSE, "compress": SparseTopK(0.5, 4, 4096), "fragments": 4},
    "int8": {"compress": Quantized()},
    "int4": {"compress": Quantized(4, 300), "fragments": 4},
}


# One worker exchanges with nobody, whatever it would send.
@pytest.mark.parametrize("name, count", [*zip(CONFIGURATIONS, itertools.cycle((2, 4))), ("exact", 1)])
def test_simulated_workers_follow_the_reference(name, count, monkeypatch):
    arguments = CONFIGURATIONS[name]
    sent = Sent(monkeypatch, arguments.get("compress"))
    workers, expected = simulated(count, 8, **arguments), exact(count, 8, **arguments)
    for step in range(48):
        given = [gradients(step, n) for n in range(count)]
        workers([tensors(g) for g in given])
        expected.step(given, sent)
        check_alike(workers, step + 1)
    assert sent.seen == 48 // 8 * arguments.get("fragments", 1)
    assert [int(o.local_step.asnumpy()[0]) for o in workers.optimizers] == [48] * count
    check_workers(workers, expected, name)


def test_reports_are_what_was_exchanged():
    """The norms, and the mean cosine between workers, from what the workers hold before and after."""
    workers = simulated(3, 2, outer_learning_rate=1.0, outer_momentum=0.0, compress=SparseTopK(1.0, 32, decay=1.0))
    before = start()
    workers([tensors(gradients(0, n)) for n in range(3)])
    # One step more, of which each worker knows its own weights.
    alone = [AdamW(parameters(), RATE, weight_decay=0.1) for _ in range(3)]
    for n, optimizer in enumerate(alone):
        for step in range(2):
            optimizer(tensors(gradients(step, n)))
    workers([tensors(gradients(1, n)) for n in range(3)])
    moved = [np.concatenate([(b - p.asnumpy()).reshape(-1) for b, p in zip(before, o.parameters)]) for o in alone]
    report = workers.optimizers[1].exchange_report()
    total, each = np.sum(moved, 0), [np.linalg.norm(m) for m in moved]
    pairs = sum(moved[a] @ moved[b] for a in range(3) for b in range(3) if a != b)
    np.testing.assert_allclose(report["difference_norm"], each[1], rtol=TOLERANCE["exchange"])
    np.testing.assert_allclose(report["mean_norm"], np.linalg.norm(total) / 3, rtol=TOLERANCE["exchange"])
    np.testing.assert_allclose(report["agreement"], pairs / (2 * np.sum(np.square(each))), rtol=1e-4)
    assert report["residual_norm"] == 0.0


def test_reports_of_fragments_are_combined():
    """The norms by their squares, and the agreement by the squares of what arrived."""
    local = LocalSteps(AdamW(parameters(), RATE), 2, fragments=2)
    for report, row in zip(local.kept.reports, [(3.0, 6.0, 1.0, 0.5), (4.0, 8.0, 2.0, 1.0)], strict=True):
        report.set_data(tensor(row, "float32"))
    expected = {"difference_norm": 5.0, "residual_norm": 10.0, "mean_norm": 5**0.5, "agreement": 0.9}
    assert local.exchange_report() == pytest.approx(expected)


@pytest.mark.parametrize(
    "compress", [*(SparseTopK(0.05, bits) for bits in (2, 4, 8, 16)), Quantized(), Quantized(4, 300)]
)
def test_workers_that_send_the_same_agree(compress):
    """Whatever the code; no lane behind the last value counts."""
    workers = simulated(3, 1, outer_momentum=0.0, compress=compress)
    workers([tensors(gradients(0, 0))] * 3)
    for optimizer in workers.optimizers:
        assert optimizer.exchange_report()["agreement"] == pytest.approx(1.0, rel=TOLERANCE["exchange"])


KINDS = {
    "float32": ("float32", {}),
    "masters": ("bfloat16", {"state_dtype": "bfloat16"}),
    "split": ("bfloat16", {"master_weights": "split"}),
    "split8": ("bfloat16", {"master_weights": "split8", "state_dtype": "8bit"}),
    "bfloat16": ("bfloat16", {"master_weights": False}),
    "float16": ("float16", {}),
    "float16 alone": ("float16", {"master_weights": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind_are_read_and_written(kind):
    """With one worker the outer step is known: from where the round began to where it would end, by the outer rate."""
    dtype, inner = KINDS[kind]
    alone, params = parameters(dtype), parameters(dtype)
    ms.set_seed(3)
    plain = AdamW(alone, RATE, weight_decay=0.1, **inner)
    ms.set_seed(3)
    local = made(params, 3, inner=inner, outer_learning_rate=0.5, outer_momentum=0.0)
    for step in range(3):
        given = tensors(gradients(step, 0), dtype)
        plain(given)
        local(given)
    for i, (w, p, q) in enumerate(zip(start(), alone, params)):
        moved = plain._held.weights(i).reshape(w.shape).astype(np.float64)
        began = numbers(tensor(w, dtype))
        expected = began - 0.5 * (began - moved)
        peak = np.maximum(np.maximum(np.abs(began), np.abs(moved)), 1e-3)
        held = local._held.weights(i).reshape(w.shape)
        check_close(numbers(local.local_start[i]), expected, 4 * U, peak, kind)
        # The weight is the start, rounded as it is held; a split8 master has 24 bits.
        units = {"split8": 2.0**-16, "bfloat16": 2.0**-8, "float16 alone": 2.0**-11}.get(kind, 4 * U)
        check_close(held.astype(np.float64), numbers(local.local_start[i]), units, peak, kind)
        assert np.array_equal(numbers(q), numbers(tensor(held, dtype)) if kind != "split8" else numbers(q))
        assert not np.array_equal(numbers(p), numbers(q)) or p.size < 10


def test_small_outer_steps_add_up_without_masters():
    """The start keeps what the bfloat16 weight rounds away, and the next round does not take it back."""
    weight = Parameter(tensor(np.ones(64), "bfloat16"), name="w")
    inner = AdamW([weight], 2.0**-9, betas=(1e-9, 1e-9), eps=1e-30, master_weights=False, stochastic_rounding=True)
    local = LocalSteps(inner, 1, outer_learning_rate=0.01, outer_momentum=0.0)
    for _ in range(400):
        local((tensor(np.ones(64), "bfloat16"),))
    # Each step takes 2^-8 with probability 1/2, and a hundredth of it is far below a unit of bfloat16.
    mean = numbers(local.local_start[0]).mean()
    assert abs((1 - mean) - 400 * 0.01 * 2**-9) < 0.1 * 400 * 0.01 * 2**-9
    assert len(np.unique(numbers(weight))) <= 2


@every_case([case for case in ANY_SHAPE if "local_steps" not in case.cls.refuses], mode=MODES_IN_TURN)
def test_one_worker_that_exchanges_every_step_is_its_optimizer(case, mode):
    set_mode(mode)
    optimizers = []
    for wrap in (lambda o: o, lambda o: LocalSteps(o, 1, outer_learning_rate=1.0, outer_momentum=0.0)):
        params = parameters()
        optimizer = wrap(case.optimizer(params, RATE, weight_decay=0.1))
        call = Step(optimizer) if mode == "graph" else lambda *g, optimizer=optimizer: optimizer(g)
        for step in range(6):
            call(*tensors(gradients(step, 0)))
        optimizers.append(optimizer)
    kept = [name for name in optimizers[1]._entries.own() if name.startswith("local_")]
    assert len(kept) == len(SHAPES) + 2
    assert digest_of(optimizers[0]) == digest_of(optimizers[1], *kept)


@pytest.mark.parametrize("name", ["diloco", "exact", "int4"])
def test_a_graph_gives_the_bits_of_pynative_mode(name):
    digests = []
    for mode in MODES:
        set_mode(mode)
        optimizer = made(parameters(), 4, **CONFIGURATIONS[name])
        call = Step(optimizer) if mode == "graph" else lambda *g, optimizer=optimizer: optimizer(g)
        for step in range(9):
            call(*tensors(gradients(step, 0)))
        digests.append((digest_of(optimizer), optimizer.exchange_report()))
    assert digests[0] == digests[1]


def test_weights_that_are_copied_to_the_host_and_back_are_the_same():
    """Where the weights are on an accelerator, the host's kernels have copies of them."""
    digests = []
    for on_host in (True, False):
        optimizer = made(parameters("bfloat16"), 2, inner={"master_weights": "split"}, **CONFIGURATIONS["exact"])
        if not on_host:
            optimizer._on_host = False
            known = (optimizer._held, optimizer.kept, optimizer.outer, optimizer.workers)
            optimizer.exchanges = ms.nn.CellList(
                [
                    Exchange(tensors, *known, e.mark.asnumpy(), e.report, on_host)
                    for tensors, e in zip(fragments_of(SIZES, 2), optimizer.exchanges)
                ]
            )
        for step in range(5):
            optimizer(tensors(gradients(step, 0), "bfloat16"))
        digests.append(digest_of(optimizer))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("mode", MODES)
def test_weights_loaded_after_construction_are_where_the_first_round_begins(mode):
    set_mode(mode)
    found = []
    for loads in (False, True):
        params = [Parameter(tensor(w + 3.0 * loads, "float32"), name=f"w{i}") for i, w in enumerate(start())]
        optimizer = made(params, 2)
        for p, w in zip(params, start()):
            p.set_data(tensor(w, "float32"))
        call = Step(optimizer) if mode == "graph" else lambda *g, optimizer=optimizer: optimizer(g)
        for step in range(3):
            call(*tensors(gradients(step, 0)))
        found.append(digest_of(optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("stop", [3, 4, 6])
@pytest.mark.parametrize("name", ["diloco", "exact"])
def test_a_run_resumes_to_the_bit_between_exchanges_too(name, stop, tmp_path):
    def run(optimizer, steps):
        for step in steps:
            optimizer(tensors(gradients(step, 0)))

    whole, first, second = (made(parameters(), 4, **CONFIGURATIONS[name]) for _ in range(3))
    run(whole, range(9))
    run(first, range(stop))
    ms_optim.save(tmp_path / "run.safetensors", None, first)
    assert ms_optim.load(tmp_path / "run.safetensors", None, second).step == stop
    run(second, range(stop, 9))
    assert digest_of(whole) == digest_of(second)
    third = made(parameters(), 4, **CONFIGURATIONS[name])
    third.load_state_dict(first.state_dict())
    for p, q in zip(third.parameters, first.parameters):
        p.set_data(tensor(q.asnumpy(), "float32"))
    run(third, range(stop, 9))
    assert digest_of(whole) == digest_of(third)


def test_entries_that_do_not_fit_change_nothing():
    optimizer = made(parameters(), 4, **CONFIGURATIONS["exact"])
    optimizer(tensors(gradients(0, 0)))
    before, entries = digest_of(optimizer), optimizer.state_dict()
    for error, match, changed in (
        (KeyError, "'local_residual.w3'", {k: v for k, v in entries.items() if k != "local_residual.w3"}),
        (KeyError, "'local_velocity.w0'", {**entries, "local_velocity.w0": entries["local_start.w0"]}),
        (ValueError, "'local_start.w3' must have the shape", {**entries, "local_start.w3": entries["local_start.w4"]}),
        (TypeError, "'local_step' must be of dtype", {**entries, "local_step": tensor([1.0], "float32")}),
        (ValueError, "'adam_m.w3' must have the shape", {**entries, "adam_m.w3": entries["adam_m.w4"]}),
        (ValueError, "worker 1 of 2", {**entries, "local_worker": ms.Tensor(np.array([0, 1], np.int32))}),
    ):
        refused(error, match, optimizer.load_state_dict, changed)
        assert digest_of(optimizer) == before


def test_workers_that_differ_are_refused_with_both_values():
    def differing(second, **first):
        made_of = iter([first, second])
        workers = SimulatedWorkers(
            2, parameters(), lambda params, group: made(params, **{"every": 1, **next(made_of)}, group=group)
        )
        return workers, [tensors(gradients(0, n)) for n in range(2)]

    for match, second in (
        (r"the same outer_learning_rate, but worker 0 has 0.7, and worker 1 has 0.5", {"outer_learning_rate": 0.5}),
        (r"the same outer_momentum, but worker 0 has 0.9, and worker 1 has 0.8", {"outer_momentum": 0.8}),
        (r"the same nesterov, but worker 0 has 1, and worker 1 has 0", {"nesterov": False}),
        (r"the same optimizer", {"inner": {"amsgrad": True}}),
    ):
        workers, given = differing(second)
        refused(RuntimeError, match, workers, given)
        for optimizer in workers.optimizers:
            assert all(np.array_equal(s.asnumpy(), w) for s, w in zip(optimizer.local_start, start()))
    workers, given = differing({})
    workers.optimizers[1].parameters[3].set_data(tensor(start()[3] + 1e-3, "float32"))
    refused(RuntimeError, r"the same weights at the last exchange, but worker 0 has the checksum", workers, given)
    workers, given = differing({})
    workers.optimizers[1].local_step.set_data(ms.Tensor([1], ms.int32))
    refused(RuntimeError, r"the same step, but worker 0 has 1, and worker 1 has 2", workers, given)
    workers, given = differing({"compress": Quantized(4)}, compress=Quantized(8))
    refused(RuntimeError, r"the same bits, but worker 0 has 8, and worker 1 has 4", workers, given)
    workers.optimizers[0].local_worker.set_data(ms.Tensor(np.array([0, 1], np.int32)))
    refused(RuntimeError, r"residuals must be those of worker 0 of 2", workers, given)


def test_fragments_take_turns_and_hold_about_as_many_elements():
    assert due(30, 1) == (0,)
    assert due(30, 3) == (10, 20, 0)
    assert fragments_of([5, 5, 5, 5], 2) == [(0, 1), (2, 3)]
    assert fragments_of([1000, 1, 1], 3) == [(0,), (1,), (2,)]
    assert fragments_of([1, 1, 1000], 3) == [(0,), (1,), (2,)]
    for sizes, count in (([7] * 100, 4), ([3, 900, 20, 20, 20, 800, 1], 3)):
        fragments = fragments_of(sizes, count)
        assert [i for tensors in fragments for i in tensors] == list(range(len(sizes)))
        held = [sum(sizes[i] for i in tensors) for tensors in fragments]
        assert max(held) - min(held) <= 2 * max(sizes)


def test_bytes_of_a_step_are_those_of_its_wire():
    """1.56 % of 4,096 elements: 2 bits a value, two scales, and 8 bits a place; and the marks of 52 bytes."""
    params = [Parameter(tensor(np.zeros((100, 4096)), "float32"), name="w")]
    local = LocalSteps(AdamW(params), group=SimulatedWorker(2, 0), compress=SparseTopK())
    assert local.exchanges[0].bytes_sent == 100 * (64 * 2 // 8 + 4 + 64) + 52
    dense = simulated(2, 2, fragments=2)
    sent = []
    for step in range(4):
        dense([tensors(gradients(step, n)) for n in range(2)])
        sent.append(dense.bytes_sent)
    assert sent[:2] == sent[2:]
    assert sum(sent[:2]) == 4 * sum(SIZES) + 2 * (4 + 52)


def test_what_cannot_be_is_refused():
    params = parameters()
    adamw = AdamW(params)
    for error, match, arguments in (
        (TypeError, "'optimizer' must be an optimizer of ms_optim", {"optimizer": ms.nn.Adam(params)}),
        (TypeError, "'every'", {"every": 1.5}),
        (ValueError, "'every'", {"every": 0}),
        (ValueError, "'fragments' must be a divisor of 'every', 30", {"fragments": 4}),
        (ValueError, "the number of parameters, 8", {"fragments": 10}),
        (TypeError, "'outer_learning_rate'", {"outer_learning_rate": "0.7"}),
        (ValueError, "'outer_learning_rate'", {"outer_learning_rate": 0.0}),
        (ValueError, "'outer_momentum'", {"outer_momentum": 1.0}),
        (TypeError, "'nesterov'", {"nesterov": 1}),
        (TypeError, "'compress'", {"compress": "int8"}),
        (ValueError, "'group' must be None before", {"group": "hccl_world_group"}),
        (ValueError, "DGCMomentum, which exchanges", {"optimizer": ms_optim.DGCMomentum(params, 0.1, 0.9, 0)}),
    ):
        refused(error, match, lambda arguments=arguments: LocalSteps(**{"optimizer": adamw, **arguments}))
    refused(RuntimeError, "gradients cannot be released", LocalSteps(adamw).attach)
    for error, match, make in (
        (ValueError, "'density'", lambda: SparseTopK(0.0)),
        (TypeError, "'density'", lambda: SparseTopK("1")),
        (ValueError, "'bits' must be one of", lambda: SparseTopK(bits=3)),
        (ValueError, "'chunk' must be at most", lambda: Quantized(chunk=1 << 17)),
        (ValueError, "'decay'", lambda: SparseTopK(decay=1.5)),
    ):
        refused(error, match, make)


@pytest.mark.parametrize(("chunk", "density"), [(1 << 16, 0.01), (4096, 0.0156), (1000, 0.3)])
def test_a_large_tensor_follows_the_reference(chunk, density):
    """A million elements, with ties, zeros and a NaN, in chunks that are much larger or smaller than the one before."""
    rng = np.random.default_rng(5)
    w = np.zeros(1_000_003, np.float32)
    moved = np.round(rng.standard_normal(w.size) * 8).astype(np.float32) / 8  # many are equal
    scales = np.exp2(rng.integers(-20, 20, -(-w.size // chunk))).astype(np.float32)
    scales[2] = 0.0
    moved *= np.repeat(scales, chunk)[: w.size]
    compress = SparseTopK(density, 32, chunk, 0.5)
    params = [Parameter(tensor(w, "float32"), name="w")]
    local = LocalSteps(AdamW(params, 0.0), 1, outer_learning_rate=1.0, outer_momentum=0.0, compress=compress)
    local((tensor(w, "float32"),))
    params[0].set_data(tensor(-moved, "float32"))
    local((tensor(w, "float32"),))
    sent, left = -local.local_start[0].asnumpy(), local.local_residual[0].asnumpy()
    np.testing.assert_array_equal(sent + left, moved)
    report = local.exchange_report()
    for of, x in (("difference_norm", moved), ("residual_norm", left), ("mean_norm", sent)):
        np.testing.assert_allclose(report[of], np.linalg.norm(x.astype(np.float64)), rtol=TOLERANCE["exchange"])
    for begin in range(0, w.size, compress.chunk):
        x, got = moved[begin : begin + compress.chunk], sent[begin : begin + compress.chunk]
        k = max(1, round(compress.density * x.size))
        order = np.lexsort((np.arange(x.size), -np.abs(x)))[:k]  # of equal ones the first
        assert set(np.flatnonzero(got)) == set(order[x[order] != 0.0])
    moved[7] = np.nan
    params[0].set_data(tensor(local.local_start[0].asnumpy() - moved, "float32"))
    local((tensor(w, "float32"),))
    assert np.isnan(params[0].asnumpy()[7])
    assert np.isfinite(np.delete(params[0].asnumpy(), 7)).all()


@pytest.mark.parametrize("outer_momentum", [0.0, 0.9])
@pytest.mark.parametrize("bits", [2, 8])
def test_the_norm_of_residuals_is_that_of_what_is_kept(bits, outer_momentum):
    """Of elements that were not sent, and of what rounding left of those that were."""
    moved = np.random.default_rng(4).standard_normal(30_011).astype(np.float32)
    params = [Parameter(tensor(np.zeros_like(moved), "float32"), name="w")]
    compress = SparseTopK(0.5, bits, 1000)
    local = LocalSteps(AdamW(params, 0.0), 1, outer_momentum=outer_momentum, compress=compress)
    local((tensor(np.zeros_like(moved), "float32"),))
    params[0].set_data(tensor(moved, "float32"))
    local((tensor(np.zeros_like(moved), "float32"),))
    kept = np.linalg.norm(local.local_residual[0].asnumpy().astype(np.float64))
    assert kept > 0.0
    np.testing.assert_allclose(local.exchange_report()["residual_norm"], kept, rtol=TOLERANCE["exchange"])


@pytest.mark.parametrize("compress", [None, SparseTopK(chunk=4096), SparseTopK(chunk=100), Quantized(8, 1000)])
def test_the_checksum_is_that_of_the_weights(compress):
    """Each weight at the place that it has among all, however they are divided."""
    drawn = np.random.default_rng(3).standard_normal(70_007).astype(np.float32)
    params = [Parameter(tensor(w, "float32"), name=f"w{i}") for i, w in enumerate((drawn[:5], drawn[5:]))]
    local = LocalSteps(AdamW(params), group=SimulatedWorker(2, 0), compress=compress, outer_momentum=0.0)
    local.exchanges[0].begin_here()
    _, mark = local.exchanges[0].send_here()
    mixed = (drawn.view(np.uint32) ^ np.arange(drawn.size, dtype=np.uint32) * np.uint32(0x9E3779B1)) * np.uint32(
        0x85EBCA77
    )
    expected = (mixed ^ mixed >> np.uint32(15)).sum(dtype=np.uint32)
    assert np.uint32(mark.view(np.uint32)[LocalMark.MARK_START]) == expected


def test_a_worker_that_skips_a_step_counts_it():
    """Its gradients were its own; exchanges come at the same calls on all workers."""
    workers = simulated(2, 2, inner={"skip_nonfinite": True})
    for step in range(4):
        given = [gradients(step, n) for n in range(2)]
        if step == 1:
            given[1][3][0] = np.nan
        workers([tensors(g) for g in given])
    assert [int(o.global_step.asnumpy()[0]) for o in workers.optimizers] == [4, 3]
    check_alike(workers, 4)


@pytest.mark.program("local_steps")
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_give_the_bits_of_simulated_workers(processes, records_of):
    """Each is a worker, in both modes; four are also two hosts of two, whose gradients are averaged every step."""
    records, _ = records_of(processes)
    for name, arguments in RUNS.items():
        workers = simulated(processes, EVERY, **arguments)
        for step in range(STEPS):
            workers([tensors(gradients(step, n)) for n in range(processes)])
        for n, optimizer in enumerate(workers.optimizers):
            kept = (*optimizer.parameters, *optimizer._entries.kept.values())
            for mode in ("graph", "pynative"):
                for p in kept:
                    key = f"{mode}/{name}/{p.name}"
                    assert records[n][key].tobytes() == p.asnumpy().tobytes(), f"{key} of {n}"
    for record in records:
        assert "the same every, but worker 0 has 2, and worker 1 has 1" in str(record["said"])
        assert record["changed"].tolist() == [False]
        assert record["resumed"].tolist() == [True]
    if processes == 4:
        for mode in ("graph", "pynative"):
            hosts = simulated(2, EVERY, **RUNS["sparse"])
            for step in range(STEPS):
                means = [
                    [(a + b) / 2 for a, b in zip(gradients(step, 2 * n), gradients(step, 2 * n + 1))] for n in range(2)
                ]
                hosts([tensors(g) for g in means])
            for rank, record in enumerate(records):
                for p in (*hosts.optimizers[rank // 2].parameters, *hosts.optimizers[rank // 2].local_residual):
                    assert record[f"{mode}/hosts/{p.name}"].tobytes() == p.asnumpy().tobytes(), p.name


@pytest.mark.parametrize(
    "kind, new", [("float32", 1), ("float32", 8), ("masters", 2), ("masters", 3), ("split", 3), ("split", 8)]
)
def test_nothing_is_lost_where_the_number_of_workers_changes(new, kind, tmp_path):
    """Between two exchanges: the means of residuals and of what weights have moved stay."""
    dtype, inner = KINDS[kind]

    def made_of(count):
        return SimulatedWorkers(
            count, parameters(dtype), lambda p, group: made(p, 4, inner=inner, group=group, **CONFIGURATIONS["exact"])
        )

    def step_of(workers, step):
        workers([tensors(gradients(step, n), dtype) for n in range(len(workers.optimizers))])

    def pending(workers, i):
        moved = [
            numbers(o.local_start[i]) - o._held.weights(i).reshape(SHAPES[i]).astype(np.float64)
            for o in workers.optimizers
        ]
        return np.mean(moved, 0), np.mean([numbers(o.local_residual[i]) for o in workers.optimizers], 0)

    old = made_of(4)
    for step in range(6):
        step_of(old, step)
    folded = ms_optim.fold_residuals([o.state_dict() for o in reversed(old.optimizers)], new)
    workers = made_of(new)
    for optimizer, entries in zip(workers.optimizers, folded):
        optimizer.load_state_dict(entries)
        for p in optimizer.parameters:
            p.set_data(entries[p.name])
    for i in range(len(SHAPES)):
        for one, other in zip(pending(old, i), pending(workers, i)):
            np.testing.assert_allclose(other, one, rtol=0, atol=16 * U)
        assert np.array_equal(
            workers.optimizers[0].local_start[i].asnumpy(), old.optimizers[0].local_start[i].asnumpy()
        )
    for step in (6, 7):
        step_of(workers, step)
        check_alike(workers, step + 1)
    without = [{k: v for k, v in o.state_dict().items() if k != "w3"} for o in old.optimizers]
    refused(KeyError, "must also have the weight 'w3'", ms_optim.fold_residuals, without, 2)


@pytest.mark.parametrize("mode", MODES)
def test_through_model_with_a_monitor_and_checkpoints(mode, tmp_path):
    """The callbacks find the local steps, and not the optimizer inside of them."""
    set_mode(mode)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((48, 8)).astype(np.float32)
    data = ms.dataset.NumpySlicesDataset((x, x[:, :3].argmax(1).astype(np.int32)), shuffle=False).batch(24)

    def trained(epochs):
        ms.set_seed(0)
        net = ms.nn.Dense(8, 3)
        optimizer = LocalSteps(AdamW(net.trainable_params(), 0.1), 5, compress=SparseTopK(0.5, 32), outer_momentum=0.0)
        callbacks = [
            ms_optim.OptimizerMonitor(every=5, csv=tmp_path / "run.csv", verbose=False),
            ms_optim.CheckpointSaver(tmp_path / "run", every=6),
        ]
        ms.Model(net, ms.nn.CrossEntropyLoss(), optimizer).train(epochs, data, callbacks=callbacks)
        return net, optimizer

    net, optimizer = trained(15)
    assert (net(ms.Tensor(x)).asnumpy().argmax(1) == x[:, :3].argmax(1)).mean() > 0.8
    assert optimizer.local_step.asnumpy()[0] == 30
    header, *rows = (tmp_path / "run.csv").read_text().splitlines()
    assert {"difference_norm", "residual_norm", "mean_norm", "agreement"} <= set(header.split(","))
    assert [row.split(",")[1] for row in rows] == ["LocalSteps(AdamW)"] * 6
    last = max((tmp_path / "run").glob("step-*.safetensors"))
    again = LocalSteps(AdamW(ms.nn.Dense(8, 3).trainable_params(), 0.1), 5, compress=SparseTopK(0.5, 32))
    refused(KeyError, "local_velocity", ms_optim.load, last, None, again)
    again = LocalSteps(AdamW(net.trainable_params(), 0.1), 5, compress=SparseTopK(0.5, 32), outer_momentum=0.0)
    assert ms_optim.load(last, net, again).step == 30
    assert digest_of(again, "statistics") == digest_of(optimizer, "statistics")


def test_parameters_may_have_no_data_yet_or_be_views():
    """What a first round begins at is what the parameter holds, wherever it is in memory."""
    with ms.nn.utils.no_init_parameters():
        net = ms.nn.Dense(3, 2)
    local = LocalSteps(AdamW(net.trainable_params(), 0.1), 2)
    assert net.weight.has_init
    local((tensor(np.ones((2, 3)), "float32"), tensor(np.ones(2), "float32")))
    np.testing.assert_allclose(local.local_start[0].asnumpy() - net.weight.asnumpy(), 0.1, rtol=1e-4)
    numbers_of = np.arange(12, dtype=np.float32).reshape(3, 4)
    for every in (2, 1):
        weight = Parameter(tensor(np.zeros((4, 3)), "float32"), name="w")
        local = LocalSteps(AdamW([weight], 0.0), every, outer_learning_rate=1.0, outer_momentum=0.0)
        weight.set_data(tensor(numbers_of, "float32").T)
        local((tensor(np.zeros((4, 3)), "float32"),))
        np.testing.assert_array_equal(local.local_start[0].asnumpy(), numbers_of.T)
    local.local_start[0].set_data(tensor(2 * numbers_of, "float32").T)
    local((tensor(np.zeros((4, 3)), "float32"),))
    np.testing.assert_array_equal(weight.asnumpy(), numbers_of.T)
    local.local_start[0].set_dtype(ms.float16)
    refused(ValueError, "'local_start.w' must stay as it was", local, (tensor(np.zeros((4, 3)), "float32"),))


def test_what_an_exchange_cannot_write_is_refused_before_the_weights_move():
    weight = Parameter(tensor(np.zeros(3), "float32"), name="w")
    local = LocalSteps(AdamW([weight], 0.1), 3)
    for _ in range(2):
        local((tensor(np.ones(3), "float32"),))
    before = digest_of(local)
    local.local_velocity[0].set_dtype(ms.float16)
    refused(ValueError, "'local_velocity.w' must stay as it was", local, (tensor(np.ones(3), "float32"),))
    local.local_velocity[0].set_dtype(ms.float32)
    local.local_step.set_dtype(ms.int64)
    refused(ValueError, "'local_step' must stay as it was", local, (tensor(np.ones(3), "float32"),))
    local.local_step.set_dtype(ms.int32)
    assert digest_of(local) == before


@pytest.mark.parametrize("name", ["diloco", "sparseloco", "exact", "int4"])
def test_every_instruction_set_gives_the_same_bits(name):
    def taken():
        workers = simulated(2, 4, **CONFIGURATIONS[name])
        for step in range(8):
            workers([tensors(gradients(step, n)) for n in range(2)])
        return [p.asnumpy().tobytes() for o in workers.optimizers for p in (*o.parameters, *o.kept.of_tensors)]

    found = {}
    for chosen in native.instruction_sets():
        with native.forced(chosen):
            found[chosen] = taken()
    assert len({tuple(held) for held in found.values()}) == 1


def test_gradients_that_do_not_fit_move_no_simulated_worker():
    workers = simulated(2, 2)
    before = [digest_of(o) for o in workers.optimizers]
    given = [tensors(gradients(0, n)) for n in range(2)]
    refused(ValueError, "gradients", workers, [given[0], given[1][:-1]])
    assert [digest_of(o) for o in workers.optimizers] == before


# ---- Interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", RUNS.values(), ids=RUNS)
def test_an_interrupt_anywhere_in_a_step_loses_neither_its_count_nor_its_exchange(exchange):
    """A worker that is interrupted at each line in turn goes through the states of one that never is."""
    every = 4 if exchange.get("fragments") == 4 else 2
    plain, other = (made(parameters(), every, **exchange) for _ in range(2))

    def taken(local):
        return int(local.optimizer.global_step.asnumpy()[0])

    def step(local=other):
        local(tensors(gradients(taken(local), 0)))

    def held(local):
        return [t.asnumpy().tobytes() for name, t in local.state_dict().items()]

    def check(line):
        found = held(other)
        while taken(plain) < taken(other):
            step(plain)
        assert found == held(plain), (line, taken(other))
        while taken(other) % every != every - 1:  # the step that exchanges is the one to interrupt
            step()

    check(0)
    assert at_every_line(step, check, files=(PACKAGE + "/local_steps/",)) > 50


def test_the_first_workers_weights_come_back_after_an_interrupt_anywhere():
    workers = simulated(2, EVERY)
    for k in range(3):
        workers([tensors(gradients(k, worker)) for worker in range(2)])
    own = [numbers(p).tobytes() for p in workers.optimizers[0].parameters]

    def look():
        with workers.weights_of(1):
            pass

    def check(line):
        look()
        assert [numbers(p).tobytes() for p in workers.optimizers[0].parameters] == own, line

    at_every_line(look, check)
