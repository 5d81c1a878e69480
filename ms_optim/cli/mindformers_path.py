"""Print the folder for REGISTER_PATH, which auto_register in MindFormers' YAML files requires."""

import argparse

from ..kernels import libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def main(arguments: argparse.Namespace) -> int:
    """Print the folder."""
    print(libraries.FOLDER / "mindformers" / "from_yaml")
    return 0
