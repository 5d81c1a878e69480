"""Rank the package's optimizers on small tasks: how many steps each takes to a loss that AdamW reaches.

The rules are those of modded-nanogpt's track 3, on tasks that run in minutes: data, network and batch are fixed, and a
loss counts as reached when (target - mean) sqrt(n) >= 3 sigma for n runs. Each optimizer is tuned with the same number
of trials; then come runs with other seeds. A trial that has ended is a line of a file, and a new start continues there.
--report makes the JSON, the tables of the page and the pictures from that file.
"""

import argparse
import pathlib
import tempfile

from budgets import BUDGETS
from entrants import BASELINE, ENTRANTS, entrants
from report import write_report
from results import Results
from rich.console import Console
from tqdm import tqdm
from trials import TASKS, compare_apart


def main():
    """Run the trials, or make the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", choices=list(BUDGETS), default="night", help="how much is spent")
    parser.add_argument("--smoke", action="store_true", help="the smallest budget, in a file that is removed")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--optimizer",
        nargs="+",
        default=[entrant.name for entrant in ENTRANTS],
        metavar="NAME",
        help="optimizers of the package, or FILE.py:CLASS for your own; AdamW is always among them",
    )
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("tasks.jsonl"), help="file of the trials")
    parser.add_argument("--processes", type=int, default=2, help="at once, each of one thread and about 1.5 GB")
    parser.add_argument("--report", action="store_true", help="make the report of the trials, and train nothing")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(), help="folder of the report")
    arguments = parser.parse_args()
    budget = "smoke" if arguments.smoke else arguments.budget
    names = list(dict.fromkeys([BASELINE, *arguments.optimizer]))
    try:
        entrants(names)  # a wrong name is an error here, before any process starts
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "tasks.jsonl" if arguments.smoke else arguments.results
            Results(path)  # so is a file of something else; and a line that was cut off is removed
            if not arguments.report:
                jobs = [(task, name, budget, path) for task in arguments.tasks for name in names]
                with tqdm(compare_apart(jobs, arguments.processes), total=len(jobs), unit="optimizer") as progress:
                    for done in progress:
                        progress.set_postfix_str(done)
            if arguments.report or arguments.smoke:
                target = pathlib.Path(folder) if arguments.smoke else arguments.output
                for line in write_report(Results(path).trials, budget, target):
                    Console().print(line, highlight=False)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
