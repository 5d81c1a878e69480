"""Command line: python -m ms_optim doctor | bench | plan | plot | mindformers-path | build-ascend."""

import argparse
import sys

from . import _bench, _build_ascend, _doctor, _mindformers_path, _plan, _plot

COMMANDS = {
    "doctor": _doctor,
    "bench": _bench,
    "plan": _plan,
    "plot": _plot,
    "mindformers-path": _mindformers_path,
    "build-ascend": _build_ascend,
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
