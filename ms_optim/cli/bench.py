"""Measure a step of each optimizer on this machine, and compare it with the memory bandwidth."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from rich.console import Console

from .. import OPTIMIZERS
from ..base.optimizer import FusedOptimizer
from ..dgc.optimizer import CompressedStep
from ..kernels import libraries
from ..kernels import table as kernels
from ..states.formats import ROWS
from . import checks
from .plan_arguments import optimizer_name

# Shapes of a transformer layer, repeated until there are enough parameters.
LAYER: list[tuple[int, ...]] = [(768,), (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072)]
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one optimizer.

    Attributes:
        optimizer: Its name.
        path: The path that ran: "fused", "akg" or "composite".
        check: The result of the comparison with MindSpore's operators.
        right: Whether they agree. If not, nothing is timed, and the next four attributes are None.
        seconds: Median time of a step.
        nanoseconds: Median time of a step per parameter element.
        bytes: The minimum memory traffic of a step in bytes per parameter element.
        share: The bandwidth of these bytes in that time, as a fraction of the bandwidth measured before and after.
    """

    optimizer: str
    path: str
    check: str
    right: bool
    seconds: float | None = None
    nanoseconds: float | None = None
    bytes: int | None = None
    share: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    names = [optimizer.__name__ for optimizer in OPTIMIZERS]
    parser.add_argument("--optimizer", nargs="+", type=optimizer_name, choices=names, default=names)
    parser.add_argument(
        "--megabytes", type=_positive(float), default=50.0, help="megabytes of float32 weights; default: 50"
    )
    parser.add_argument("--steps", type=_positive(int), default=15, help="timed steps of each optimizer; default: 15")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _positive(kind):
    def read(text):
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number greater than 0, but got {text!r}")
        return number

    return read


def main(arguments: argparse.Namespace) -> int:
    """Print the table; return 0, or 1 if a check failed or there is nothing to measure."""
    device = kernels.device_target()
    if device != "CPU":
        print(f"bench measures only the CPU, but the device target is {device}: see docs/performance.md.")
        return 1
    shapes = tensors(int(arguments.megabytes * 1e6) // 4)
    parameters = sum(int(np.prod(shape)) for shape in shapes)
    chosen = [optimizer for optimizer in OPTIMIZERS if optimizer.__name__ in arguments.optimizer]
    threads = thread_count()
    console = Console(highlight=False, soft_wrap=True, quiet=arguments.json)
    console.print(f"{len(shapes)} tensors, {parameters / 1e6:.1f}M float32 parameters, {threads} threads")
    console.print(HEADINGS)
    rows, speeds = [], [bandwidth(threads, max(1, 2 * parameters // threads))]
    tasks = [checks.Task(optimizer, optimizer.trials[0]) for optimizer in chosen]
    for optimizer, (check, printed) in zip(chosen, checks.in_child(tasks)):
        timing = measure(optimizer, checks.shapes_for(optimizer, shapes), arguments.steps) if check.right else None
        # Measured before and after each optimizer, because the speed of a shared machine varies.
        speeds.append(bandwidth(threads, max(1, 2 * parameters // threads)))
        rows.append(row(optimizer, check, timing, parameters, statistics.mean(speeds[-2:])))
        console.print(line(rows[-1]), markup=False)
        print(printed, end="", file=sys.stderr)  # it may say why the check is wrong
    speed = statistics.median(speeds)
    if arguments.json:
        summary = {"parameters": parameters, "tensors": len(shapes), "threads": threads, "bandwidth": speed}
        print(json.dumps({**summary, "rows": [dataclasses.asdict(one) for one in rows]}, indent=2))
    console.print(f"a += b on as many threads moves {speed / 1e9:.1f} GB/s, the median of {len(speeds)} measurements")
    return 0 if all(one.right for one in rows) else 1


def thread_count() -> int:
    """Return the number of threads of a step."""
    if kernels.why_not("adamw", "CPU") is not None:
        return len(os.sched_getaffinity(0))
    return libraries.library("libms_optim_cpu.so").ms_optim_threads()


def tensors(elements: int) -> list[tuple[int, ...]]:
    """Return shapes with this total number of elements, layer after layer; the last tensor is shortened to fit."""
    shapes, left = [], elements
    while left > 0:
        shape = LAYER[len(shapes) % len(LAYER)]
        if np.prod(shape) > left:
            shape = (left,)
        shapes.append(shape)
        left -= int(np.prod(shape))
    return shapes


def bandwidth(threads: int, size: int = 32_000_000, repeats: int = 5) -> float:
    """Return the bytes per second of a += b, which reads what it writes, as an update does."""
    return speed_of(lambda a, b: np.add(a, b, out=a), 12, threads, size, repeats)


def speed_of(
    work: Callable[[np.ndarray, np.ndarray], Any], moved: int, threads: int, size: int = 32_000_000, repeats: int = 5
) -> float:
    """Return the bytes per second of work on two float32 arrays, in threads with arrays of their own.

    Args:
        work: Takes the two arrays.
        moved: The bytes that it moves for each element.
        threads: Number of threads.
        size: Elements of an array.
        repeats: How often each thread does it.
    """
    pairs = [(np.ones(size, np.float32), np.ones(size, np.float32)) for _ in range(threads)]

    def repeat(a, b):
        for _ in range(repeats):
            work(a, b)

    for a, b in pairs:
        work(a, b)
    workers = [threading.Thread(target=repeat, args=pair) for pair in pairs]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return moved * size * repeats * threads / (time.perf_counter() - start)


def least_bytes(optimizer: FusedOptimizer) -> int:
    """Return the memory traffic of a float32 step in bytes per parameter element, if nothing stays in a cache."""
    states = sum(kind != ROWS for _, kind in optimizer.rule.kinds)
    moments = 2 + 2 * states  # weight, gradient and states are read, states are written
    if isinstance(optimizer, CompressedStep):
        return 4 * moments  # only few weights are written
    if optimizer.rule.iterations:
        return 4 * (moments + 1 + 4)  # directions are written, orthogonalized in place, and read
    if optimizer.rule.reads_stored_states:
        return 4 * (moments + 4 + optimizer.rule.reads_between)  # the last pass reads and writes weights and states
    if not optimizer.rule.is_layerwise:
        return 4 * (moments + 1)
    apply = 2 + states  # weight and states are read again, the weight is written
    gradient = 2 * optimizer.normalizes_gradient  # read first for its norm, and last for the second direction
    return 4 * (moments + apply + gradient)


def measure(optimizer: type[FusedOptimizer], shapes: list[tuple[int, ...]], steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and its minimum memory traffic in bytes per parameter element."""
    rng = np.random.default_rng(0)
    weights, gradients = (
        [rng.standard_normal(shape, np.float32) * np.float32(scale) for shape in shapes] for scale in (0.02, 0.01)
    )
    params = [Parameter(Tensor(w), name=f"w{i}") for i, w in enumerate(weights)]
    given = tuple(Tensor(g) for g in gradients)
    del weights, gradients
    built = optimizer(params, 1e-3, weight_decay=0.01, **optimizer.required)
    return timed(built, given, steps), least_bytes(built)


def timed(optimizer: FusedOptimizer, gradients: tuple[Tensor, ...], steps: int) -> float:
    """Return the median seconds of a step."""
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer(gradients)
        # A step writes its statistics last, so reading them waits for the step.
        optimizer.statistics.asnumpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def row(
    optimizer: type[FusedOptimizer],
    check: checks.Check,
    timing: tuple[float, int] | None,
    parameters: int,
    speed: float,
) -> Row:
    """Return the row of an optimizer."""
    known = (optimizer.__name__, check.path, check.check, check.right)
    if timing is None:
        return Row(*known)
    seconds, moved = timing
    return Row(*known, seconds, seconds / parameters * 1e9, moved, moved * parameters / seconds / speed)


HEADINGS = (
    f"{'optimizer':<18} {'path':<9} {'check':<6} {'ms/step':>9} {'ns/parameter':>12} {'bytes/parameter':>15} "
    f"{'of a += b':>9}"
)


def line(row: Row) -> str:
    """Return a row as text, in columns under the headings."""
    if row.seconds is None:
        return f"{row.optimizer:<18} not timed: {row.check}"
    known = f"{row.optimizer:<18} {row.path:<9} {row.check.split(':')[0]:<6}"
    return f"{known} {row.seconds * 1e3:>9.2f} {row.nanoseconds:>12.3f} {row.bytes:>15} {row.share:>9.0%}"
