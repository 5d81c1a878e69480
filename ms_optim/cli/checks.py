"""Check kernels against MindSpore's own operators, in a process that a kernel may end."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..base.optimizer import FusedOptimizer
from ..kernels import libraries
from ..kernels import table as kernels
from ..optimizers.adamw import AdamW
from ..states import split_masters

SHAPES: list[tuple[int, ...]] = [(), (7,), (4097,), (13, 11), (6, 4, 3, 3)]
STEPS = 10
# Two float32 paths differ by rounding: each rounds about 10 times a step.
TOLERANCE = 100 * 2.0**-24
SPLIT = {"master_weights": "split"}


@dataclasses.dataclass(frozen=True)
class Task:
    """What to check: an optimizer with arguments, on a backend."""

    optimizer: type[FusedOptimizer]
    arguments: dict[str, Any]
    backend: str = "auto"

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.optimizer.__name__}({arguments})"


@dataclasses.dataclass(frozen=True)
class Check:
    """An optimizer with its arguments, a backend, its path, the reason for the path, and the check's result."""

    optimizer: str
    backend: str
    path: str
    why: str
    check: str
    right: bool


def tasks_of(optimizer: type[FusedOptimizer], backends: Sequence[str] = ("auto",)) -> list[Task]:
    """Return the checks of an optimizer's kernels."""
    tasks = [Task(optimizer, trial, backend) for trial in optimizer.trials for backend in backends]
    if optimizer is AdamW:
        # Only for one optimizer, because all use the same code to read and write weights and masters.
        tasks.append(Task(AdamW, SPLIT))
    return tasks


def in_child(tasks: Sequence[Task]) -> Iterator[tuple[Check, str]]:
    """Yield the result of each check as it ends, and what was printed meanwhile if it is wrong.

    The checks run in a child process, one when the caller asks for it. If the process dies, that is the result, and
    another one goes on with the next check.
    """
    waiting, context = list(tasks), multiprocessing.get_context("spawn")
    while waiting:
        # A compiler of kernels leaves files in the folder that it runs in.
        with tempfile.TemporaryDirectory() as folder:
            here, there = context.Pipe()
            child = context.Process(target=_serve, args=(there, folder), daemon=True)
            child.start()
            there.close()
            try:
                while waiting:
                    try:
                        here.send(waiting[0])
                        check = here.recv()
                    except (EOFError, OSError):
                        child.join()
                        yield died(waiting.pop(0), child.exitcode or 0), _printed(folder)
                        break
                    waiting.pop(0)
                    yield check, "" if check.right else _printed(folder)
            finally:
                child.terminate()
                child.join()


def _printed(folder: str) -> str:
    """Return the end of what a child has printed."""
    return pathlib.Path(folder, "printed").read_text(errors="replace")[-8000:]


def _serve(there: Connection, folder: str) -> None:
    """Make the checks that are asked for; what is printed meanwhile goes to a file."""
    os.chdir(folder)
    with open("printed", "ab") as printed:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
    # Single operators are faster in one thread: with several threads, they mostly wait for each other.
    ms.runtime.launch_blocking()
    if kernels.device_target() == "CPU":
        ms.device_context.cpu.op_tuning.threads_num(1)
    while True:
        there.send(checked(there.recv()))


def died(task: Task, status: int) -> Check:
    """Return the result of a check that ended its process with an exit status, negative for a signal."""
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    if status == -signal.SIGILL:
        remedy = "this processor lacks an instruction. Set MS_OPTIM_INSTRUCTION_SET=baseline, and report it with lscpu"
    else:
        remedy = 'use backend="composite", and report it'
    return Check(str(task), task.backend, "died", "", f"died: {how}: {remedy}", False)


def checked(task: Task) -> Check:
    """Return the result of a check."""
    try:
        examined = examine_split_masters() if task.arguments == SPLIT else examine(*dataclasses.astuple(task))
    except Exception as error:
        examined = "failed", "", f"failed: {type(error).__name__}: {error}", False
    return Check(str(task), task.backend, *examined)


def examine(
    optimizer: type[FusedOptimizer], trial: dict[str, Any], backend: str = "auto"
) -> tuple[str, str, str, bool]:
    """Return an optimizer's path, the reason for it, the result of the check, and whether the path is correct."""
    try:
        built = build(optimizer, trial, backend)
    except RuntimeError as error:
        return f"no {backend}", str(error), "nothing to check", True
    if not (built.fused or built.akg):
        return "composite", built.backend_reason, "nothing to check", True
    worst = disagreement(built, build(optimizer, trial, "composite"))
    right = worst <= TOLERANCE
    verdict = f"{'agrees' if right else 'WRONG'}: max difference {worst:.1e} (tolerance {TOLERANCE:.1e})"
    if built.akg:
        return "akg", f"{built.rule.name} in ops/akg", verdict, right
    device = "CPU" if built.runs_on_host else kernels.device_target()
    return "fused", f"{built.rule.name} in {libraries.LIBRARIES[device].file}", verdict, right


def examine_split_masters() -> tuple[str, str, str, bool]:
    """Return the same for AdamW with split masters, which must be bitwise equal to float32 masters."""
    try:
        split, whole = (build(AdamW, {"master_weights": kind}, "auto", ms.bfloat16) for kind in ("split", True))
    except RuntimeError as error:
        return "none", str(error), "nothing to check", True
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        gradients = drawn(rng, split)
        for optimizer in (split, whole):
            optimizer(gradients)
    weights = [ops.cast(p, ms.float32).asnumpy() for p in split.parameters]
    masters = [split_masters.restored(w, m.asnumpy()) for w, m in zip(weights, split.masters)]
    off = sum(int(np.sum(a != b.asnumpy())) for a, b in zip(masters, whole.masters))
    verdict = (
        f"WRONG: {off} masters differ from float32" if off else "agrees: masters are bitwise equal to float32 masters"
    )
    return "fused", f"{split.rule.name} in {libraries.LIBRARIES[kernels.device_target()].file}", verdict, off == 0


def build(
    optimizer: type[FusedOptimizer], trial: dict[str, Any], backend: str, dtype: Any = ms.float32
) -> FusedOptimizer:
    """Create an optimizer with fixed initial weights."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in shapes_for(optimizer, SHAPES)]
    params = [Parameter(Tensor(np.asarray(w)).astype(dtype), name=f"w{i}") for i, w in enumerate(weights)]
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "grad_centralization": True}]
    return optimizer(groups, 0.01, weight_decay=0.01, loss_scale=8.0, grad_clip_norm=5.0, backend=backend, **trial)


def shapes_for(optimizer: type[FusedOptimizer], shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return shapes that an optimizer takes: these, or those of matrices of as many elements."""
    if optimizer.dimensions is None:
        return list(shapes)
    return [(shape[0] if len(shape) > 1 else 1, math.prod(shape[len(shape) > 1 :])) for shape in shapes]


def drawn(rng: np.random.Generator, optimizer: FusedOptimizer) -> tuple[Tensor, ...]:
    """Return random gradients of one step."""
    return tuple(Tensor(np.asarray(rng.standard_normal(p.shape), np.float32)) for p in optimizer.parameters)


def disagreement(one: FusedOptimizer, other: FusedOptimizer) -> float:
    """Return the largest difference of weights and states, relative to the largest value ever in the tensor."""
    rng = np.random.default_rng(1)
    held = list(zip([*one.parameters, *one.states], [*other.parameters, *other.states]))
    largest = np.full(len(held), 1e-30)
    for _ in range(STEPS):
        gradients = drawn(rng, one)
        for optimizer in (one, other):
            optimizer(gradients)
        largest = np.maximum(largest, [np.max(np.abs(b.asnumpy())) for _, b in held])
    differences = [np.max(np.abs(a.asnumpy().astype(np.float64) - b.asnumpy())) for a, b in held]
    worst = np.max(differences / largest)
    return float(worst) if np.isfinite(worst) else np.inf
