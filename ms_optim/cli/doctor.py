"""Report what runs on this machine, and check each kernel against MindSpore's own operators."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from rich.console import Console
from rich.table import Table

import ms_optim

from .. import _capabilities, _kernels, _libraries, _masters
from .._base import FusedOptimizer
from ..adamw import AdamW

SHAPES: list[tuple[int, ...]] = [(), (7,), (4097,), (13, 11), (6, 4, 3, 3)]
STEPS = 10
# Two float32 paths differ by rounding: each rounds about 10 times a step.
TOLERANCE = 100 * 2.0**-24
# What AKG's compiler writes into the current folder.
LEFT_BY_AKG = ("akg_kernel_meta", "dsa_transfrom.log", "kernel_build_tmp.key")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 if every kernel that runs is correct, else 1."""
    # Single operators are faster in one thread: with several threads, they mostly wait for each other.
    ms.runtime.launch_blocking()
    with others_put_away() as said:
        here, checks = machine(), [check for optimizer in ms_optim.OPTIMIZERS for check in checked(optimizer)]
        said.seek(0)
        others = said.read().decode(errors="replace")
    if not all(check.right for check in checks):
        print(others, file=sys.stderr)  # it may say why
    if arguments.json:
        told = {"checks": [dataclasses.asdict(check) for check in checks], "not_possible": impossible()}
        print(json.dumps({**here, **told}, indent=2))
    else:
        show(here, checks)
    return 0 if all(check.right for check in checks) else 1


@contextlib.contextmanager
def others_put_away():
    """Keep the standard output of AKG's compiler, a separate program, in a file, and remove the files that it leaves.

    Yields:
        The file.
    """
    before = {name for name in LEFT_BY_AKG if os.path.lexists(name)}
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        try:
            yield said
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            for name in LEFT_BY_AKG:
                if name in before:
                    continue
                shutil.rmtree(name) if os.path.isdir(name) else pathlib.Path(name).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Check:
    """An optimizer with its arguments, a backend, its path, the reason for the path, and the check's result."""

    optimizer: str
    backend: str
    path: str
    why: str
    check: str
    right: bool


def checked(optimizer: type[FusedOptimizer]) -> list[Check]:
    """Check each kernel of an optimizer."""
    found = []
    for trial in optimizer.trials:
        arguments = ", ".join(f"{name}={value}" for name, value in trial.items())
        for backend in ("auto", "akg"):
            found.append(Check(f"{optimizer.__name__}({arguments})", backend, *examine(optimizer, trial, backend)))
    if optimizer is AdamW:
        # Only for one optimizer, because all use the same code to read and write weights and masters.
        found.append(Check("AdamW(master_weights=split)", "auto", *examine_split_masters()))
    return found


def impossible() -> list[dict[str, str]]:
    """Return the features that each optimizer does not support on this device, and why."""
    found = []
    for optimizer in ms_optim.OPTIMIZERS:
        for feature in _capabilities.FEATURES:
            path, reason = _capabilities.answer(optimizer, _kernels.device_target(), [feature])
            if path is None and reason is not None:
                found.append({"optimizer": optimizer.__name__, "argument": feature, "reason": reason})
    return found


def machine() -> dict[str, Any]:
    """Return versions, and for each kind of kernel the reason why it is missing, or None."""
    here: dict[str, Any] = {"ms_optim": ms_optim.__version__, "mindspore": ms.__version__}
    here |= {"python": platform.python_version(), "processor": platform.machine()}
    here["device_target"] = _kernels.device_target()
    here["missing"] = {device: _kernels.why_not("adamw", device) for device in _libraries.LIBRARIES}
    here["missing"]["AKG"] = _kernels.why_not_akg("adamw")
    if here["missing"]["CPU"] is None:
        library = _libraries.library("libms_optim_cpu.so")
        here["instruction_set"] = library.ms_optim_instruction_set().decode()
        here["threads"] = library.ms_optim_threads()
    return here


def show(here: dict[str, Any], checks: list[Check]) -> None:
    """Print the report as text and a table."""
    console = Console()
    console.print(f"ms_optim {here['ms_optim']}, MindSpore {here['mindspore']}, Python {here['python']}")
    console.print(f"Device target {here['device_target']}, processor {here['processor']}")
    there = {"AKG": "not tested yet", "GPU": "built", "Ascend": "built"}
    if "threads" in here:
        there["CPU"] = f"instruction set {here['instruction_set']}, {here['threads']} threads"
    for name, reason in here["missing"].items():
        kernels = "AKG's kernels" if name == "AKG" else f"{name} kernels"
        console.print(f"{kernels}: {there[name] if reason is None else f'none; {reason}'}", soft_wrap=True)
    table = Table()
    for heading in ("Optimizer", "Path", "Why", "Check against MindSpore's operators"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.optimizer, check.path, check.why, check.check)
    console.print(table)
    for one in impossible():
        line = f"Not possible on {here['device_target']}: {one['optimizer']} with {one['argument']}: {one['reason']}."
        console.print(line, soft_wrap=True)


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
    device = "CPU" if built.runs_on_host else _kernels.device_target()
    return "fused", f"{built.rule.name} in {_libraries.LIBRARIES[device].file}", verdict, right


def examine_split_masters() -> tuple[str, str, str, bool]:
    """Return the same for AdamW with split masters, which must be bitwise equal to float32 masters."""
    try:
        split, whole = (build(AdamW, {"master_weights": kind}, "auto", ms.bfloat16) for kind in ("split", True))
    except RuntimeError as error:
        return "none", str(error), "nothing to check", True
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        gradients = drawn(rng)
        for optimizer in (split, whole):
            optimizer(gradients)
    weights = [ops.cast(p, ms.float32).asnumpy() for p in split.parameters]
    masters = [_masters.restored(w, m.asnumpy()) for w, m in zip(weights, split.masters)]
    off = sum(int(np.sum(a != b.asnumpy())) for a, b in zip(masters, whole.masters))
    verdict = (
        f"WRONG: {off} masters differ from float32" if off else "agrees: masters are bitwise equal to float32 masters"
    )
    return "fused", f"{split.rule.name} in {_libraries.LIBRARIES[_kernels.device_target()].file}", verdict, off == 0


def build(
    optimizer: type[FusedOptimizer], trial: dict[str, Any], backend: str, dtype: Any = ms.float32
) -> FusedOptimizer:
    """Create an optimizer with fixed initial weights."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    params = [Parameter(Tensor(np.asarray(w)).astype(dtype), name=f"w{i}") for i, w in enumerate(weights)]
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "grad_centralization": True}]
    return optimizer(groups, 0.01, weight_decay=0.01, loss_scale=8.0, grad_clip_norm=5.0, backend=backend, **trial)


def drawn(rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Return random gradients of one step."""
    return tuple(Tensor(np.asarray(rng.standard_normal(shape), np.float32)) for shape in SHAPES)


def disagreement(one: FusedOptimizer, other: FusedOptimizer) -> float:
    """Return the largest difference of weights and states, relative to the largest value ever in the tensor."""
    rng = np.random.default_rng(1)
    held = list(zip([*one.parameters, *one.states], [*other.parameters, *other.states]))
    largest = np.full(len(held), 1e-30)
    for _ in range(STEPS):
        gradients = drawn(rng)
        for optimizer in (one, other):
            optimizer(gradients)
        largest = np.maximum(largest, [np.max(np.abs(b.asnumpy())) for _, b in held])
    differences = [np.max(np.abs(a.asnumpy().astype(np.float64) - b.asnumpy())) for a, b in held]
    worst = np.max(differences / largest)
    return float(worst) if np.isfinite(worst) else np.inf
