"""Report what runs on this machine, and check each kernel against MindSpore's own operators."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import sys
from typing import Any

import mindspore as ms
from rich.console import Console

import ms_optim

from ..kernels import capabilities, libraries
from ..kernels import table as kernels
from . import checks
from .checks import Check

TESTED = (
    "natively on x86-64, in each instruction set that the test's processor has, and in an emulator on x86-64 with AVX2 "
    "and without AVX-512, on x86-64 without AVX, and on aarch64"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, at the end")
    parser.add_argument("--all", action="store_true", help="check AKG's kernels too, which are compiled first")


def main(arguments: argparse.Namespace) -> int:
    """Print the report, each check as it ends; return 0 if every kernel that runs is correct, else 1."""
    console = Console(highlight=False, soft_wrap=True, quiet=arguments.json)
    here = machine()
    show(console, here, arguments.all)
    backends = ("auto", "akg") if arguments.all else ("auto",)
    tasks = [task for optimizer in ms_optim.OPTIMIZERS for task in checks.tasks_of(optimizer, backends)]
    found, known = [], set(here["missing"].values())
    for check, printed in checks.in_child(tasks):
        found.append(check)
        is_news = check.path not in ("fused", "akg") and check.why and check.why not in known
        reason = f": {check.why}" if is_news else ""
        known.add(check.why)
        console.print(f"  {check.optimizer:34}  {check.path:9}  {check.check}{reason}", markup=False)
        print(printed, end="", file=sys.stderr)  # it may say why the check is wrong
    said = verdict(found, here["missing"].get(here["device_target"]))
    if arguments.json:
        told = {"checks": [dataclasses.asdict(check) for check in found], "not_possible": impossible()}
        print(json.dumps({**here, **told, "verdict": said}, indent=2))
    show_impossible(console, here["device_target"])
    console.print(f"\n{said}", markup=False)
    return 0 if all(check.right for check in found) else 1


def verdict(found: list[Check], missing: str | None = None) -> str:
    """Return the report's last line: whether all kernels are right, and what runs without one.

    Args:
        found: The checks.
        missing: Why the device has no kernels at all, with the remedy; None if it has some.
    """
    wrong = [f"{check.optimizer} ({check.path})" for check in found if not check.right]
    compared = [check for check in found if check.path in ("fused", "akg")]
    if wrong:
        return f"NOT RIGHT: {', '.join(wrong)}. Of {len(found)} checks, {len(found) - len(wrong)} are right."
    remedy = f" Why: {missing}" if missing else ""
    if not compared:
        return f"No kernel runs here: every optimizer runs on MindSpore's operators, which is slower.{remedy}"
    right = f"All {len(compared)} kernels are right."
    without = list(dict.fromkeys(check.optimizer.split("(")[0] for check in found if check.path == "composite"))
    if not without:
        return right
    return f"{right} Without a kernel, on MindSpore's operators, which is slower: {', '.join(without)}.{remedy}"


def impossible() -> list[dict[str, str]]:
    """Return the features that each optimizer does not support on this device, and why."""
    found = []
    for optimizer in ms_optim.OPTIMIZERS:
        for feature in capabilities.FEATURES:
            path, reason = capabilities.path_of(optimizer, kernels.device_target(), [feature])
            if path is None and reason is not None:
                found.append({"optimizer": optimizer.__name__, "argument": feature, "reason": reason})
    return found


def machine() -> dict[str, Any]:
    """Return versions, and for each kind of kernel the reason why it is missing, or None."""
    here: dict[str, Any] = {"ms_optim": ms_optim.__version__, "mindspore": ms.__version__}
    here |= {"python": platform.python_version(), "processor": platform.machine()}
    here["device_target"] = kernels.device_target()
    here["missing"] = {device: kernels.why_not("adamw", device) for device in libraries.LIBRARIES}
    here["missing"]["AKG"] = kernels.why_not_akg("adamw")
    if here["missing"]["CPU"] is None:
        library = libraries.library("libms_optim_cpu.so")
        here["instruction_set"] = library.ms_optim_instruction_set().decode()
        here["products"] = library.ms_optim_product_set().decode()
        here["threads"] = library.ms_optim_threads()
    here["tested"] = TESTED
    return here


def show(console: Console, here: dict[str, Any], with_akg: bool) -> None:
    """Print what comes before the checks."""
    console.print(f"ms_optim {here['ms_optim']}, MindSpore {here['mindspore']}, Python {here['python']}")
    console.print(f"Device target {here['device_target']}, processor {here['processor']}")
    there = {"GPU": "built", "Ascend": "built", "AKG": "checked below" if with_akg else "not checked, --all does"}
    if "threads" in here:
        there["CPU"] = (
            f"instruction set {here['instruction_set']}, matrix products {here['products']}, {here['threads']} threads"
        )
    for name, reason in here["missing"].items():
        which = "AKG's kernels" if name == "AKG" else f"{name} kernels"
        console.print(f"{which}: {there[name] if reason is None else f'none; {reason}'}", markup=False)
    console.print(f"The project's tests run the CPU kernels {here['tested']}.")
    console.print("\nEach kernel against MindSpore's operators, on this machine:")


def show_impossible(console: Console, device: str) -> None:
    """Print a line for each optimizer that does not support everything on this device."""
    rows = impossible()
    if rows:
        console.print(f"\nNot possible on {device}:")
    for name, found in itertools.groupby(rows, lambda row: row["optimizer"]):
        reasons = "; ".join(f"{row['argument']}, {row['reason']}" for row in found)
        console.print(f"  {name}: {reasons}", markup=False)
