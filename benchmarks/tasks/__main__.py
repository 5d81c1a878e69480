"""Rank the package's optimizers on small tasks: how many steps each takes to a loss that AdamW reaches.

The rules are those of modded-nanogpt's track 3, on tasks that run in minutes: data, network and batch are fixed, and a
loss counts as reached when (target - mean) sqrt(n) >= 3 sigma for n runs. Each optimizer is tuned with the same number
of trials; then come runs with other seeds. A trial that has ended is a line of a file, and a new start continues there.
--report makes the JSON, the tables of the page and the pictures from that file.
"""

import argparse
import contextlib
import datetime
import functools
import pathlib
import platform
import re
import tempfile

import mindspore as ms
from budgets import BUDGETS, TUNING_SEED
from entrants import BASELINE, ENTRANTS, entrants
from networks import NETWORKS
from problems import PROBLEMS
from report import write_report
from results import Results, from_json, to_json
from rich.console import Console
from tqdm import tqdm
from training import WARM_UP, train
from tuning import tune

TASKS = {**NETWORKS, **PROBLEMS}
# The minima of problems are known, and decay only moves away from them.
WITHOUT_DECAY = (0.0,)


@functools.cache
def processor():
    """Return the processor's name."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def optimizer_of(made, task, entrant, rate, decay, warm_up, steps):
    """Return an optimizer at its first step: one of the same decay that is made already, set back, as others compile.

    One whose states start as the weights is always made anew.
    """
    if decay in made:
        optimizer, first = made[decay]
        optimizer.load_state_dict(first)
        return optimizer
    optimizer = entrant.made(task, rate, decay, warm_up, steps)
    if not optimizer.averages_iterates:
        made[decay] = optimizer, optimizer.state_dict()
    return optimizer


def run_once(made, task, entrant, rate, decay, seed, lengths, steps):
    """Train once; return what goes into the file besides the trial's key."""
    warm_up = max(1, round(WARM_UP * steps))
    task.reset(seed)
    optimizer = optimizer_of(made, task, entrant, rate, decay, warm_up, steps)
    found = train(task, optimizer, rate, seed, lengths, warm_up)
    held = (*optimizer.states, *optimizer.scales, *optimizer.masters)
    of_states = sum(p.size * p.itemsize for p in held) / sum(p.size for p in task.params)
    where = {"machine": processor(), "date": datetime.date.today().isoformat(), "mindspore": ms.__version__}
    return {**found, "losses": to_json(found["losses"]), "state_bytes": round(of_states, 3), **where}


def compare(results, name, budget_name, asked, progress):
    """Tune each optimizer on a task, run it with its seeds, and once as it is by default; and AdamW for the target."""
    task, budget = TASKS[name](), BUDGETS[budget_name]
    is_problem = name in PROBLEMS
    steps = budget.steps["problems" if is_problem else name]
    decays = WITHOUT_DECAY if is_problem else budget.decays
    lengths = [steps] if is_problem else [max(2, round(factor * steps)) for factor in budget.lengths]
    for entrant in asked:
        made = {}

        def trial(kind, rate, decay, seed, lengths, entrant=entrant, made=made):
            progress.set_postfix_str(f"{name}, {entrant.name}, {kind}", refresh=False)
            key = {"budget": budget_name, "task": name, "data": task.data, "optimizer": entrant.name}
            key |= {
                "version": entrant.version,
                "kind": kind,
                "rate": rate,
                "decay": decay,
                "seed": seed,
                "lengths": lengths,
            }
            found = results.get(lambda: run_once(made, task, entrant, rate, decay, seed, lengths, steps), **key)
            progress.update()
            return from_json(found["losses"])[-1]

        rate, decay = tune(
            lambda rate, decay, trial=trial: trial("tuning", rate, decay, TUNING_SEED, [steps]),
            entrant.rate * (task.scale if is_problem else 1.0),
            entrant.decay,
            budget.rates,
            decays,
        )
        if entrant.name == BASELINE and not is_problem:
            for seed in range(budget.seeds):
                trial("target", rate, decay, TUNING_SEED + 1 + seed, [steps])
        for seed in range(budget.seeds):
            trial("seed", rate, decay, seed, lengths)
        defaults = entrant.defaults() if budget.defaults and not is_problem else None
        if defaults:
            trial("default", defaults[0], defaults[1], TUNING_SEED, [steps])


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
    parser.add_argument("--report", action="store_true", help="make the report of the trials, and train nothing")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(), help="folder of the report")
    arguments = parser.parse_args()
    budget = "smoke" if arguments.smoke else arguments.budget
    try:
        asked = entrants(arguments.optimizer)
        with tempfile.TemporaryDirectory() as folder:
            in_folder = pathlib.Path(folder) / "tasks.jsonl"
            results = Results(in_folder if arguments.smoke else arguments.results)
            if not arguments.report:
                ms.set_context(mode=ms.GRAPH_MODE)
                with contextlib.suppress(RuntimeError):  # set already, by another run in this process
                    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait longer than they compute
                with tqdm(unit="trial") as progress:
                    for name in arguments.tasks:
                        compare(results, name, budget, asked, progress)
            if arguments.report or arguments.smoke:
                target = pathlib.Path(folder) if arguments.smoke else arguments.output
                for line in write_report(results.trials, budget, target):
                    Console().print(line, highlight=False)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
