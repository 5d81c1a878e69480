"""Command line: python -m ms_optim doctor."""

import argparse
import sys

from . import _doctor


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ms_optim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what runs on this machine and why, and whether each kernel is right")
    parser.parse_args()
    return _doctor.main()


if __name__ == "__main__":
    sys.exit(main())
