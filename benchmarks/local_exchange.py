"""Times the computation of an exchange of local steps, compared with the time to move its bytes.

    python benchmarks/local_exchange.py                      two workers, 8M parameters in one tensor

The bytes are those that the launches read and write. To send: the weights, the weights at the last exchange, residuals
and the send buffer. To apply: the same again, velocities, and what is written. The bandwidth is that of ``a += b`` in
the same run.
"""

import argparse
import os
import statistics
import time

import numpy as np
from mindspore import Parameter, Tensor
from rich.console import Console
from rich.table import Table

from ms_optim import AdamW, LocalSteps, Quantized, SparseTopK
from ms_optim.cli.bench import bandwidth
from ms_optim.dgc.transport import together
from ms_optim.simulated_workers import SimulatedWorker

SPARSE = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
ROWS = {
    "DiLoCo": {},
    "SparseLoCo, 2 bits": {**SPARSE, "compress": SparseTopK()},
    "SparseLoCo, 8 bits": {**SPARSE, "compress": SparseTopK(bits=8)},
    "8 bits of all": {"compress": Quantized()},
}


def measured(arguments, size, workers, rounds):
    """Return the seconds of sending and of applying, and the bytes that each moves."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(size).astype(np.float32)
    params = [Parameter(Tensor(start), name="w")]
    local = LocalSteps(AdamW(params), group=SimulatedWorker(workers, 0), **arguments)
    exchange = local.exchanges[0]
    exchange.begin_here()
    sending, applying = [], []
    moved = (1e-3 * rng.standard_normal(size)).astype(np.float32)
    for _ in range(rounds):
        params[0].asnumpy()[...] += moved
        begin = time.perf_counter()
        wire, _ = exchange.send_here()
        sending.append(time.perf_counter() - begin)
        wires = together([wire] * workers, "compress" in arguments)
        begin = time.perf_counter()
        exchange.apply_here(wires)
        applying.append(time.perf_counter() - begin)
    residuals, velocities = len(local.local_residual), len(local.local_velocity)
    send = (2 + residuals) * 4 * size + wire.nbytes
    apply = (2 + residuals + velocities) * 8 * size + wires.nbytes
    return statistics.median(sending), statistics.median(applying), send, apply


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 23, help="number of parameters")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    rows = {}
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    speeds = [bandwidth(threads)]
    for name, arguments in ROWS.items():
        rows[name] = measured(arguments, given.size, given.workers, given.rounds)
        speeds.append(bandwidth(threads))
    speed = statistics.median(speeds)
    table = Table(
        "Exchange", "send, ns", "apply, ns", "bytes", "÷ moving them",
        title=f"A parameter of {given.size:,}; {threads} threads; "
        f"a += b moves {speed / 1e9:.1f} GB/s",
    )  # fmt: skip
    for name, (send, apply, send_bytes, apply_bytes) in rows.items():
        each, total = 1e9 / given.size, send_bytes + apply_bytes
        ratio = (send + apply) / (total / speed)
        table.add_row(name, f"{send * each:.2f}", f"{apply * each:.2f}", f"{total / given.size:.1f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
