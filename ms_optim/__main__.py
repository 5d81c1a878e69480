"""Command line: python -m ms_optim, and one of COMMANDS, which --help lists."""

import argparse
import sys

from .cli import bench, build_ascend, doctor, mindformers_checkpoint, mindformers_path, plan, plot

COMMANDS = {
    "doctor": doctor,
    "bench": bench,
    "plan": plan,
    "plot": plot,
    "mindformers-path": mindformers_path,
    "mindformers-checkpoint": mindformers_checkpoint,
    "build-ascend": build_ascend,
}


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ms_optim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip()
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args()
    return COMMANDS[arguments.command].main(arguments)


if __name__ == "__main__":
    sys.exit(main())
