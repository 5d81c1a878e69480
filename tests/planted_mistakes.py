"""Mistakes that are planted in the package one at a time, to show that tests notice them.

``python tests/planted_mistakes.py`` plants each in a copy of the tree and runs the tests that must fail there; numbers
of rows after it choose some. A mistake counts as caught only if a test fails: one that stops the tests at their import
proves nothing. The whole list takes minutes, so it is no test of the suite; test_planted_mistakes.py keeps it up to
date.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from sources import ROOT


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        file: The file in ms_optim/.
        right: What stands there, exactly once.
        wrong: What is planted in its place.
        tests: The file of tests that must notice it, and options of pytest that choose some of them.
    """

    file: str
    right: str
    wrong: str
    tests: str


MISTAKES = (
    # ---- Stages of a step
    Mistake(
        "arguments/options.py",
        '        flag="SKIP_NONFINITE",\n        reads_all=True,\n',
        '        flag="SKIP_NONFINITE",\n',
        "test_launches.py -k 'skipped and pynative'",
    ),
    Mistake(
        "arguments/options.py",
        '"AVERAGE_WARMUP": float(options.average_warmup)',
        '"AVERAGE_WARMUP": float(options.average_decay is not None)',
        "test_conformance.py -k 'average and aot and pynative'",
    ),
    Mistake(
        "arguments/options.py",
        'lacking=("Ascend", "offload")',
        'lacking=("Ascend",)',
        "test_capabilities.py",
    ),
    Mistake(
        "arguments/options.py",
        "if options.stochastic_rounding and options.master_weights:",
        "if options.stochastic_rounding and options.master_weights is True:",
        "test_low_precision.py -k wants_no_masters",
    ),
    # ---- Checks of arguments
    Mistake(
        "arguments/checks.py",
        "    if not LEAST <= value <= MOST:\n        fail(ValueError, optimizer, name, NORMAL, value)",
        "    if not value <= MOST:\n        fail(ValueError, optimizer, name, NORMAL, value)",
        "test_arguments.py -k test_eps",
    ),
    Mistake(
        "arguments/checks.py",
        "if np.float32(value) == 1.0:",
        "if value == 1.0:",
        "test_arguments.py -k less_than_1",
    ),
    Mistake(
        "arguments/params.py",
        "if len(orders) > 1:",
        "if len(orders) > 2:",
        "test_arguments.py -k test_groups",
    ),
    Mistake(
        "arguments/rates.py",
        "step >= fewest_steps:",
        "step > fewest_steps:",
        "test_arguments.py -k past_the_last",
    ),
    # ---- The choice of a path
    Mistake(
        "kernels/capabilities.py",
        '"master_weights": options.master_weights in SPLIT_MASTERS',
        '"master_weights": options.master_weights is not True',
        "test_averaged.py -k 'without_masters and composite'",
    ),
    Mistake(
        "kernels/capabilities.py",
        'if without_kernel is None and (path != "offload" or missing is not None):',
        "if without_kernel is None:",
        "test_capabilities.py",
    ),
    Mistake(
        "paths/choice.py",
        "        check_composite(parts, reason)\n    else:",
        '        check_composite(parts, reason) if wanted == "akg" else None\n    else:',
        "test_low_precision.py -k kernel_is_needed",
    ),
)


def copied(folder: pathlib.Path) -> None:
    """Copy the tree, as git knows it, and the libraries that were built."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in [*map(ROOT.joinpath, listed.splitlines()), *(ROOT / "ms_optim").glob("*.so")]:
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, place, follow_symlinks=False)


def found(folder: pathlib.Path, mistake: Mistake) -> tuple[bool, str]:
    """Plant a mistake in a copy of the tree; return whether a test notices it, and which, or what happened instead."""
    file = folder / "ms_optim" / mistake.file
    text = file.read_text()
    assert text.count(mistake.right) == 1, f"{mistake.file} no longer says {mistake.right!r} once"
    name, *options = shlex.split(mistake.tests)
    # What is imported must be the copy, whatever is installed; nothing that passed before is to be remembered.
    paths = {"PYTHONPATH": str(folder), "MS_OPTIM_SOURCE": str(folder), "MS_OPTIM_TEST_PROOFS": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/{name}"]
    file.write_text(text.replace(mistake.right, mistake.wrong))
    try:
        done = subprocess.run(
            [*command, *options],
            cwd=folder,
            env={**os.environ, **paths, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    finally:
        file.write_text(text)
    failed = re.search(r"^FAILED tests/(.*?)(?: - .*)?$", done.stdout, re.M)
    if failed and done.returncode == 1:
        return True, f"caught by {failed[1]}"
    if done.returncode == 0:
        return False, f"NOT CAUGHT by {mistake.tests}"
    return False, f"NO TEST FAILED, pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


def main() -> int:
    """Plant the mistakes of the given numbers, or all; return 1 if one was not caught."""
    chosen = [int(number) for number in sys.argv[1:]] or range(1, 1 + len(MISTAKES))
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        copied(folder := pathlib.Path(name))
        for number in chosen:
            begun = time.monotonic()
            is_caught, said = found(folder, MISTAKES[number - 1])
            missed += not is_caught
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{number:2} {MISTAKES[number - 1].file}, {took}: {said}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes were caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
