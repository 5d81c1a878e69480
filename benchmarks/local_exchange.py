"""Times the computation of an exchange of local steps, compared with the time to move its bytes.

    python benchmarks/local_exchange.py                      two workers, 50M parameters in one tensor

The bytes are those that the launches read and write. To send: the weights, the weights at the last exchange and the
residuals are read, and the send buffer is written. To apply: the same arrays, the velocities and what all workers sent
are read, and what changes is written. Bytes that are only read take the time that ``numpy.dot`` takes to read them, all
others that of ``a += b``, both measured in the same run. The last column compares with bare loops, which read and write
as many arrays as the launches and do nothing else (streams.cc, compiled with ``c++``), also in the same run. Their
arrays are NumPy's, which are on huge pages where the system has them. What compression sends and receives is omitted.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor
from rich.console import Console
from rich.table import Table

from ms_optim import AdamW, LocalSteps, Quantized, SparseTopK
from ms_optim.cli.bench import bandwidth, speed_of
from ms_optim.dgc.transport import together
from ms_optim.simulated_workers import SimulatedWorker

SPARSE = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
ROWS = {
    "DiLoCo": {},
    "SparseLoCo, 2 bits": {**SPARSE, "compress": SparseTopK()},
    "SparseLoCo, 8 bits": {**SPARSE, "compress": SparseTopK(bits=8)},
    "8 bits of all": {"compress": Quantized()},
}


def reading_speed(threads):
    """Return the bytes per second at which threads read two arrays each."""
    return speed_of(np.dot, 8, threads)


@cache
def streams():
    """Compile and load streams.cc."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "streams.so")
        source = Path(__file__).with_name("streams.cc")
        options = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["c++", *options, str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found["pass"].argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found["pass"].restype = ctypes.c_float
    return found["pass"]


def passing(read, updated, writes, size, rounds):
    """Return the seconds of a loop that reads arrays, updates others, and writes one without reading it."""
    arrays = [np.ones(size // 16 * 16, np.float32) for _ in range(read + updated + writes)]
    addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    if streams()(addresses, read, updated, writes, len(arrays[0])) < 0:
        raise ValueError(f"streams.cc has no loop that reads {read} arrays and updates {updated}")
    values = [1.0] * read + [0.5 + read] * updated + [read] * writes
    if not all((a == value).all() for a, value in zip(arrays, values, strict=True)):
        raise ValueError("a loop of streams.cc left out elements")
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        streams()(addresses, read, updated, writes, len(arrays[0]))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measured(arguments, size, workers, rounds):
    """Return the seconds of sending and of applying, the bytes that each only reads and moves, and the loops' time."""
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
    array = 4 * size
    # Without velocities, the few that were sent are all that changes of the weights at the last exchange.
    start_moves = velocities > 0 or residuals == 0
    send = ((2 + residuals) * array, wire.nbytes)
    apply = (wires.nbytes + (not start_moves) * array, 2 * (1 + start_moves + residuals + velocities) * array)
    is_dense = "compress" not in arguments
    changed = 1 + start_moves + residuals + velocities
    loops = passing(2 + residuals, 0, is_dense, size, rounds)
    loops += passing(is_dense or not start_moves, changed, False, size, rounds)
    return statistics.median(sending), statistics.median(applying), send, apply, loops


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=50_000_000, help="number of parameters")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rows = {}
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    reads, moves = [reading_speed(threads)], [bandwidth(threads)]
    for name, arguments in ROWS.items():
        rows[name] = measured(arguments, given.size, given.workers, given.rounds)
        reads.append(reading_speed(threads))
        moves.append(bandwidth(threads))
    read, move = statistics.median(reads), statistics.median(moves)
    table = Table(
        "Exchange", "send, ns", "apply, ns", "bytes", "÷ moving them", "÷ bare loops",
        title=f"A parameter of {given.size:,}; {threads} threads; "
        f"dot(a, b) reads {read / 1e9:.1f} GB/s, a += b moves {move / 1e9:.1f} GB/s",
    )  # fmt: skip
    for name, (send, apply, of_send, of_apply, loops) in rows.items():
        each, read_bytes, moved_bytes = 1e9 / given.size, of_send[0] + of_apply[0], of_send[1] + of_apply[1]
        ratio = (send + apply) / (read_bytes / read + moved_bytes / move)
        total = (read_bytes + moved_bytes) / given.size
        of_loops = f"{(send + apply) / loops:.2f}"
        table.add_row(name, f"{send * each:.2f}", f"{apply * each:.2f}", f"{total:.1f}", f"{ratio:.2f}", of_loops)
    Console().print(table)


if __name__ == "__main__":
    main()
