"""Convert a checkpoint of MindFormers' trainers, between its fused AdamW and MsOptimAdamW."""

import argparse
import pathlib
import sys

from ..checkpoints.mindformers import FUSED, FUSED_PYNATIVE
from ..checkpoints.mindformers_folder import HERE, convert

# What YAML files call the optimizers.
TO = {HERE: HERE, "use_fused": FUSED, "enable_fused_opt": FUSED_PYNATIVE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", type=pathlib.Path, help="the folder iteration_... of a checkpoint")
    parser.add_argument("target", type=pathlib.Path, help="the folder to write, which must not exist")
    help_of_to = f"the AdamW that will load it; default: {HERE}"
    parser.add_argument("--to", choices=TO, default=HERE, help=help_of_to)


def main(arguments: argparse.Namespace) -> int:
    """Convert, and print where the run is."""
    try:
        steps = convert(arguments.source, arguments.target, TO[arguments.to])
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.target}: for {arguments.to}, after {steps} steps")
    return 0
