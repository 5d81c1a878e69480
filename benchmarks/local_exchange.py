"""Times the computation of an exchange of local steps, compared with the time to move its bytes.

    python benchmarks/local_exchange.py                      two workers, 50M parameters in one tensor

The bytes are those that the launches read and write. To send: the weights, the weights at the last exchange and the
residuals are read, and the send buffer is written. To apply: the same arrays, the velocities and what all workers sent
are read, and what changes is written. Bytes that are only read take the time that ``numpy.dot`` takes to read them, all
others that of ``a += b``. The last column compares with bare loops, which read and write as many arrays as the launches
and do nothing else (streams.cc, compiled with ``c++``). Their arrays are NumPy's, which are on huge pages where the
system has them. What compression sends and receives is omitted.

The memory of a shared machine is faster at one time than at another. So all is measured in each round, one behind the
other; the ratios are medians of the rounds' ratios.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor
from rich.console import Console
from rich.table import Table
from streams import passing, timed

from ms_optim import AdamW, LocalSteps, Quantized, SparseTopK
from ms_optim.cli.bench import bandwidth, speed_of
from ms_optim.training.simulated_workers import SimulatedWorker
from ms_optim.workers.transport import together

SPARSE = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
ROWS = {
    "DiLoCo": {},
    "SparseLoCo, 2 bits": {**SPARSE, "compress": SparseTopK()},
    "SparseLoCo, 8 bits": {**SPARSE, "compress": SparseTopK(bits=8)},
    "8 bits of all": {"compress": Quantized()},
}


@dataclass
class Round:
    """What was measured in one round: seconds, and bytes per second."""

    send: float
    apply: float
    loops: float
    read: float
    move: float


def measured(arguments, size, workers, rounds, threads):
    """Return what was measured in each round, and the bytes of an exchange that are only read, and that are moved."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(size).astype(np.float32)
    params = [Parameter(Tensor(start), name="w")]
    local = LocalSteps(AdamW(params), group=SimulatedWorker(workers, 0), **arguments)
    exchange = local.exchanges[0]
    exchange.begin_here()
    moved = (1e-3 * rng.standard_normal(size)).astype(np.float32)

    is_dense = "compress" not in arguments
    residuals, velocities = len(local.local_residual), len(local.local_velocity)
    # Without velocities, the few that were sent are all that changes of the weights at the last exchange.
    start_moves = velocities > 0 or residuals == 0
    changed = 1 + start_moves + residuals + velocities
    loops = [
        passing(2 + residuals, 0, is_dense, size),
        passing(is_dense or not start_moves, changed, False, size),
    ]

    measurements = []
    for _ in range(rounds):
        params[0].asnumpy()[...] += moved
        begin = time.perf_counter()
        wire, _ = exchange.send_here()
        send = time.perf_counter() - begin
        wires = together([wire] * workers, not is_dense)
        apply = timed(lambda sent=wires: exchange.apply_here(sent))
        of_loops = sum(timed(loop) for loop in loops)
        read, move = speed_of(np.dot, 8, threads, repeats=2), bandwidth(threads, repeats=2)
        measurements.append(Round(send, apply, of_loops, read, move))
    array = 4 * size
    read_bytes = (2 + residuals) * array + wires.nbytes + (not start_moves) * array
    return measurements, read_bytes, wire.nbytes + 2 * changed * array


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=50_000_000, help="number of parameters")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    table = Table(
        "Exchange", "send + apply, ns", "bytes", "dot, a += b, GB/s", "÷ bytes", "÷ loops",
        title=f"A parameter of {given.size:,}; {threads} threads; medians of {given.rounds} rounds",
    )  # fmt: skip
    for name, arguments in ROWS.items():
        measurements, read_bytes, moved_bytes = measured(arguments, given.size, given.workers, given.rounds, threads)

        def median(of, measurements=measurements):
            return statistics.median(map(of, measurements))

        def of_bytes(m, read=read_bytes, moved=moved_bytes):
            return (m.send + m.apply) / (read / m.read + moved / m.move)

        each = 1e9 / given.size
        table.add_row(
            name,
            f"{median(lambda m: m.send) * each:.2f} + {median(lambda m: m.apply) * each:.2f}",
            f"{(read_bytes + moved_bytes) / given.size:.1f}",
            f"{median(lambda m: m.read) / 1e9:.1f}, {median(lambda m: m.move) / 1e9:.1f}",
            f"{median(of_bytes):.2f}",
            f"{median(lambda m: (m.send + m.apply) / m.loops):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
