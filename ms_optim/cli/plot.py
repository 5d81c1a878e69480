"""Plot what an OptimizerMonitor recorded."""

from __future__ import annotations

import argparse
import sys

from ..training.plot import plot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("csv", help="the CSV file that the monitor wrote")
    parser.add_argument("--output", help="the image file; default: a PNG file next to the CSV file")


def main(arguments: argparse.Namespace) -> int:
    """Plot the image; return 0, or 2 if it cannot be plotted."""
    try:
        print(f"Picture in {plot(arguments.csv, arguments.output)}")
    except (ImportError, OSError, ValueError) as error:
        print(f"python -m ms_optim plot: error: {error}", file=sys.stderr)
        return 2
    return 0
