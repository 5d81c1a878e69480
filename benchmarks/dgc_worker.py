"""A worker of dgc_cluster.py, or the scheduler: trains with each rule in turn and prints its measurements."""

import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from dgc_cluster import LAYERS
from mindspore import Tensor, nn, ops
from mindspore import communication as comm

from ms_optim import AdamW, DGCMomentum, LocalSteps, SparseTopK

RATE, MOMENTUM = 0.01, 0.9
BATCHES, CHECK_STEPS, EVERY = 4, 3, 30
SPARSE = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}


# ---- Training -----------------------------------------------------------------------------------------------------


class Gradients(nn.Cell):
    """A network's loss and its gradients, times a factor."""

    def __init__(self, network, factor=1.0):
        super().__init__()
        loss = nn.CrossEntropyLoss()

        def forward(x, y):
            return loss(network(x), y) * factor

        self.gradients = ms.value_and_grad(forward, None, ms.ParameterTuple(network.trainable_params()))

    def construct(self, x, y):
        """Return them for a batch."""
        return self.gradients(x, y)


class OneAllReduce(nn.Cell):
    """Sums the workers' gradients with one AllReduce."""

    def __init__(self, weights):
        super().__init__()
        self.shapes = [weight.shape for weight in weights]
        self.sizes = [weight.size for weight in weights]
        self.all_reduce = ops.AllReduce()

    def construct(self, gradients):
        """Return the sums."""
        flat = ()
        for gradient in gradients:
            flat += (gradient.reshape(-1),)
        total = self.all_reduce(ops.concat(flat))
        sums, begin = (), 0
        for shape, size in zip(self.shapes, self.sizes):
            sums += (total[begin : begin + size].reshape(shape),)
            begin += size
        return sums


class AllReduceEach(nn.Cell):
    """Sums the workers' gradients with one AllReduce per tensor, as MindSpore's data-parallel mode does."""

    def __init__(self, weights):
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, gradients):
        """Return the sums."""
        sums = ()
        for gradient in gradients:
            sums += (self.all_reduce(gradient),)
        return sums


class Step(nn.Cell):
    """A training step: gradients, their exchange between the workers, and the optimizer."""

    def __init__(self, gradients, exchange, optimizer):
        super().__init__()
        self.gradients, self.exchange, self.optimizer = gradients, exchange, optimizer

    def construct(self, x, y):
        """Train on a batch and return its loss."""
        loss, gradients = self.gradients(x, y)
        return ops.depend(loss, self.optimizer(self.exchange(gradients)))


def network():
    """Return the network and its weights, which are equal on all workers."""
    ms.set_seed(0)
    inputs, hidden, outputs = LAYERS
    net = nn.SequentialCell(nn.Dense(inputs, hidden), nn.ReLU(), nn.Dense(hidden, outputs))
    return net, net.trainable_params()


def dgc(options):
    """Return a step of DGC and its weights."""
    net, weights = network()
    given = {} if options["wire_dtype"] == "float32" else {"wire_dtype": options["wire_dtype"]}
    optimizer = DGCMomentum(weights, RATE, MOMENTUM, 0, backend="aot", **given)
    return Step(Gradients(net), nn.Identity(), optimizer), weights


def local(**arguments):
    """Return a step of AdamW with LocalSteps, and its weights."""
    net, weights = network()
    optimizer = LocalSteps(AdamW(weights, RATE / 10), EVERY, **arguments)
    return Step(Gradients(net), nn.Identity(), optimizer), weights


def dense(exchange, workers):
    """Return a step of momentum SGD with dense gradients and its weights."""
    net, weights = network()
    # Gradients of each worker's share of the loss add up to the mean: this saves the pass that would divide them.
    gradients = Gradients(net, 1.0 / workers)
    return Step(gradients, exchange(weights), nn.Momentum(weights, RATE, MOMENTUM)), weights


def data(batch, rank):
    """Return this worker's batches."""
    rng = np.random.default_rng([1, rank])
    return [
        (
            Tensor(rng.standard_normal((batch, LAYERS[0]), np.float32)),
            Tensor(rng.integers(0, LAYERS[-1], batch, np.int32)),
        )
        for _ in range(BATCHES)
    ]


# ---- Measuring ----------------------------------------------------------------------------------------------------


def barrier():
    """Wait for all workers."""
    ops.AllReduce()(Tensor([1.0], ms.float32)).asnumpy()


def counters():
    """Return how many bytes this host has sent and received."""
    folder = Path("/sys/class/net/eth0/statistics")
    return np.array([int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")])


def check(name, losses, weights):
    """Raise an error if a loss is not finite, or weights are not bitwise equal on all workers."""
    if not np.isfinite(losses).all():
        raise RuntimeError(f"{name}: a loss is not finite: {losses}")
    if weights:
        digest = hashlib.sha256(b"".join(weight.asnumpy().tobytes() for weight in weights)).digest()
        digests = ops.AllGather()(Tensor(np.frombuffer(digest, np.int32))).asnumpy().reshape(-1, 8)
        if (digests != digests[0]).any():
            raise RuntimeError(f"{name}: the weights are not the same on all workers")


def measure(name, step, weights, steps, batches, checked=CHECK_STEPS, average=statistics.median):
    """Check some steps and time more; print and return this worker's measurements."""

    def done(number):
        result = step(*batches[number % BATCHES])
        # All of a graph is done when its first output is.
        return float((result[0] if isinstance(result, tuple) else result).asnumpy().flat[0])

    losses = [done(number) for number in range(checked)]
    check(name, losses, weights)
    times = []
    barrier()
    before = counters()
    for number in range(steps):
        start = time.perf_counter()
        losses.append(done(checked + number))
        times.append(time.perf_counter() - start)
    sent, received = ((counters() - before) / steps).tolist()
    check(name, losses, weights)
    result = {"rule": name, "seconds": average(times), "least": min(times), "sent": sent,
              "received": received}  # fmt: skip
    print("RESULT", json.dumps(result), flush=True)
    return result


def measure_to_loss(name, step, network, every, points, options):
    """Train until the loss of other points is small enough, and print what that took.

    The loss is computed every few steps, at which local steps have exchanged; neither this nor the first step, which
    compiles, is timed.
    """
    held_back, loss_of = points([3], 512)(), nn.WithLossCell(network, nn.CrossEntropyLoss())
    draw = points([1, comm.get_rank()], options["batch"])
    step(*draw()).asnumpy()
    barrier()
    before, seconds = counters(), 0.0
    for number in itertools.count(2):
        batch = draw()
        start = time.perf_counter()
        step(*batch).asnumpy()
        seconds += time.perf_counter() - start
        if number % every == 0:
            loss = ops.AllReduce()(loss_of(*held_back).reshape(1)).asnumpy()[0] / comm.get_group_size()
            if loss <= options["loss"] or number >= options["most"]:
                break
    sent, received = (counters() - before).tolist()
    result = {"rule": name, "seconds": seconds, "least": float(loss), "sent": sent, "received": received,
              "steps": number}  # fmt: skip
    print("RESULT", json.dumps(result), flush=True)


class Points:
    """Draws points around a center for each class, in more dimensions than there are points in many batches."""

    def __init__(self, seed, batch):
        self.centers = 0.1 * np.random.default_rng(0).standard_normal((LAYERS[-1], LAYERS[0]), np.float32)
        self.rng, self.batch = np.random.default_rng(seed), batch

    def __call__(self):
        """Return the next batch."""
        labels = self.rng.integers(0, LAYERS[-1], self.batch, np.int32)
        points = self.centers[labels] + self.rng.standard_normal((self.batch, LAYERS[0]), np.float32)
        return Tensor(points), Tensor(labels)


def work_to_loss(options):
    """Train with each rule until the loss is reached."""
    comm.init()

    def adamw(weights):
        return AdamW(weights, RATE / 10)

    def local_adamw(**arguments):
        return lambda weights: LocalSteps(adamw(weights), EVERY, **arguments)

    rules = {
        f"SparseLoCo, every {EVERY}": (EVERY, None, local_adamw(**SPARSE, compress=SparseTopK())),
        f"DiLoCo, every {EVERY}": (EVERY, None, local_adamw(outer_learning_rate=1.0, outer_momentum=0.5)),
        "DGC": (5, None, lambda weights: DGCMomentum(weights, 10 * RATE, MOMENTUM, 0, backend="aot")),
        "dense": (5, OneAllReduce, adamw),
    }
    for name, (every, exchange, optimizer) in rules.items():
        net, weights = network()
        gradients = Gradients(net, 1.0 / comm.get_group_size() if exchange else 1.0)
        step = Step(gradients, exchange(weights) if exchange else nn.Identity(), optimizer(weights))
        measure_to_loss(name, step, net, every, Points, options)
    barrier()


def work(options):
    """Check and time everything."""
    # An optimizer that is made before communication is initialized exchanges nothing.
    lone, _ = dgc(options)
    comm.init()
    rank, workers = comm.get_rank(), comm.get_group_size()
    batches = data(options["batch"], rank)
    steps, dense_steps = options["steps"], options["dense_steps"]
    compressed = measure("DGC", *dgc(options), steps, batches)
    # A whole round each: of a median, the one step that exchanges would not be seen.
    for name, arguments in (("DiLoCo", {}), ("SparseLoCo", {**SPARSE, "compress": SparseTopK()})):
        step, weights = local(**arguments)
        measure(f"{name}, every {EVERY}", step, weights, EVERY, batches, EVERY, statistics.mean)
    measure("dense, one AllReduce", *dense(OneAllReduce, workers), dense_steps, batches)
    measure("dense, AllReduce each", *dense(AllReduceEach, workers), dense_steps, batches)
    # What a step of DGC is made of.
    measure("gradients", Gradients(network()[0]), None, steps, batches)
    measure("no exchange", lone, None, steps, batches)
    # In MindSpore, a message's acknowledgement is the message: half of what was sent.
    sent = ops.AllReduce()(Tensor([compressed["sent"]], ms.float32)).asnumpy()[0] / workers
    wire = Tensor(np.zeros(int(sent / (workers - 1) / 2 / 4), np.int32))
    gather = ops.AllGather()
    measure("AllGather", lambda x, y: gather(wire), None, steps, batches)
    # A worker that ends before its peers' last exchange makes that fail.
    barrier()


def main():
    """Run the scheduler or a worker."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    if os.environ["MS_ROLE"] == "MS_SCHED":
        comm.init()
    else:
        options = json.loads(sys.argv[1])
        work_to_loss(options) if options["loss"] else work(options)


if __name__ == "__main__":
    main()
