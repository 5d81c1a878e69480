"""Build the operators for Ascend with the builder that MindSpore ships, and put them into the package."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import mindspore

from ..kernels import libraries

BUILDER = pathlib.Path(mindspore.__path__[0]) / "lib" / "plugin" / "ascend" / "custom_compiler"
CANN_VARIABLE, CANN_DEFAULT = "ASCEND_HOME_PATH", "/usr/local/Ascend/cann"
# The builder's names of the processors that can copy any number of bytes between global memory and a core.
PROCESSORS = ("ascend910b", "ascend910_93")


def sources() -> pathlib.Path:
    """Return the folder of the operators' sources: in the package, or next to it in a clone."""
    inside = libraries.FOLDER / "ops" / "ascendc"
    return inside if inside.is_dir() else libraries.FOLDER.parent / "ops" / "ascendc"


def processor(name: str) -> str | None:
    """Return the builder's name of a processor such as "Ascend910B1"; None if the operators do not support it."""
    return next((listed for listed in PROCESSORS if re.match(listed, name.lower())), None)


def what_is_missing(soc_version: str, cann: str | None) -> str | None:
    """Return a description of what is missing for a build, or None.

    Args:
        soc_version: Name of the processor.
        cann: CANN's folder; None for the folder in the environment variable.
    """
    if processor(soc_version) is None:
        return (
            f"--soc-version must be one of the processors {' and '.join(PROCESSORS)}, such as Ascend910B1, but got "
            f"{soc_version!r}"
        )
    if not (sources() / "op_host").is_dir():
        return f"{sources()} has no sources of the operators: install ms_optim again"
    if not (BUILDER / "setup.py").exists():
        return f"MindSpore {mindspore.__version__} has no builder in {BUILDER}: install MindSpore for Ascend"
    folder = cann or os.environ.get(CANN_VARIABLE, CANN_DEFAULT)
    if not pathlib.Path(folder).is_dir():
        return f"CANN is not in {folder}: install its toolkit and source its set_env.sh, or pass its folder as --cann"
    if shutil.which("cmake") is None:
        return "cmake is not installed (Debian: apt install cmake)"
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--soc-version", required=True, help="the processor, such as Ascend910B1, as shown by npu-smi info"
    )
    parser.add_argument("--cann", help="CANN's folder, if it is not set in the environment")


def main(arguments: argparse.Namespace) -> int:
    """Build the operators for the processor given on the command line."""
    return build(arguments.soc_version, arguments.cann)


def build(soc_version: str, cann: str | None = None) -> int:
    """Build the operators and return 0; if something is missing or fails, print it and return 1."""
    missing = what_is_missing(soc_version, cann)
    if missing:
        print(f"The operators for Ascend cannot be built: {missing}.")
        return 1
    target = libraries.FOLDER / "ascend"
    library = pathlib.Path(libraries.LIBRARIES["Ascend"].file).relative_to("ascend")
    with tempfile.TemporaryDirectory(prefix="ms_optim_") as work:
        # The builder writes into its own folder, and accepts only paths of plain characters.
        builder = shutil.copytree(BUILDER, pathlib.Path(work, "builder"))
        own = shutil.copytree(sources(), pathlib.Path(work, "sources"))
        made = pathlib.Path(work, "made")
        made.mkdir()
        command = [sys.executable, "setup.py", "-o", own / "op_host", "-k", own / "op_kernel"]
        command += ["--soc_version", processor(soc_version), "--vendor_name", "ms_optim", "--install_path", made]
        command += ["--ascend_cann_package_path", cann] if cann else []
        done = subprocess.run(list(map(str, command)), cwd=builder)
        if done.returncode != 0 or not (made / library).exists():
            for log in builder.glob("*.log"):
                print(log.read_text(errors="replace")[-8000:])
            print(f"The operators for Ascend were not built: the builder exited with {done.returncode} and no library.")
            return 1
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(made, target)
    print(f"The operators for Ascend are in {target}. Check them with python -m ms_optim doctor.")
    return 0
