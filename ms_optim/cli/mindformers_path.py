"""The folder to name in REGISTER_PATH, for auto_register in MindFormers' YAML files."""

import argparse

from .. import _kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def main(arguments: argparse.Namespace) -> int:
    """Print the folder."""
    print(_kernels.FOLDER / "from_yaml")
    return 0
