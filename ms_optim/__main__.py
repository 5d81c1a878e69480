"""Command line: python -m ms_optim doctor | mindformers-path."""

import argparse
import pathlib
import sys


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ms_optim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what runs on this machine and why, and whether each kernel is right")
    commands.add_parser("mindformers-path", help="the folder to name in REGISTER_PATH, for auto_register in YAML files")
    if parser.parse_args().command == "mindformers-path":
        print(pathlib.Path(__file__).parent / "from_yaml")
        return 0

    from . import _doctor

    return _doctor.main()


if __name__ == "__main__":
    sys.exit(main())
