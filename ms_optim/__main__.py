"""Command line: python -m ms_optim doctor | plot | mindformers-path | build-ascend."""

import argparse
import pathlib
import sys


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ms_optim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what runs on this machine and why, and whether each kernel is right")
    drawing = commands.add_parser("plot", help="draw what an OptimizerMonitor recorded")
    drawing.add_argument("csv", help="the CSV file that the monitor wrote")
    drawing.add_argument("--output", help="the picture; a PNG beside the file, unless given")
    commands.add_parser("mindformers-path", help="the folder to name in REGISTER_PATH, for auto_register in YAML files")
    build = commands.add_parser("build-ascend", help="build the operators for Ascend processors, where CANN is")
    build.add_argument("--soc-version", required=True, help="the processor, as npu-smi info names it: Ascend910B1")
    build.add_argument("--cann", help="CANN's folder, if the environment does not say where it is")
    arguments = parser.parse_args()
    if arguments.command == "mindformers-path":
        print(pathlib.Path(__file__).parent / "from_yaml")
        return 0
    if arguments.command == "plot":
        from ._plot import plot

        try:
            print(f"Picture in {plot(arguments.csv, arguments.output)}")
        except (ImportError, OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    if arguments.command == "build-ascend":
        from . import _build_ascend

        return _build_ascend.main(arguments.soc_version, arguments.cann)

    from . import _doctor

    return _doctor.main()


if __name__ == "__main__":
    sys.exit(main())
