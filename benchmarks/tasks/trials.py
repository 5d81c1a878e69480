"""The trials of one optimizer on one task, in a process of their own."""

import datetime
import functools
import multiprocessing
import pathlib
import platform
import re
from collections.abc import Iterator

import mindspore as ms
from budgets import BUDGETS, TUNING_SEED
from entrants import BASELINE, entrants
from networks import NETWORKS
from problems import PROBLEMS
from results import Results, from_json, to_json
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


def compare(job: tuple[str, str, str, pathlib.Path]) -> str:
    """Tune an optimizer on a task, run it with its seeds, and once as it is by default; and AdamW for the target.

    Args:
        job: The task, the optimizer as the command line has it, the budget, and the file of the trials.

    Returns:
        str, the job in words.
    """
    name, asked, budget_name, path = job
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait longer than they compute
    results, made = Results(path), {}
    task, budget, entrant = TASKS[name](), BUDGETS[budget_name], entrants([asked])[-1]
    is_problem = name in PROBLEMS
    steps = budget.steps["problems" if is_problem else name]
    decays = WITHOUT_DECAY if is_problem else budget.decays
    lengths = [steps] if is_problem else [max(2, round(factor * steps)) for factor in budget.lengths]

    def trial(kind, rate, decay, seed, lengths):
        key = {"budget": budget_name, "task": name, "data": task.data, "optimizer": entrant.name}
        key |= {"version": entrant.version, "kind": kind}
        key |= {"rate": rate, "decay": decay, "seed": seed, "lengths": lengths}
        found = results.get(lambda: run_once(made, task, entrant, rate, decay, seed, lengths, steps), **key)
        return from_json(found["losses"])[-1]

    rate, decay = tune(
        lambda rate, decay: trial("tuning", rate, decay, TUNING_SEED, [steps]),
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
    return f"{name}, {entrant.name}"


def compare_apart(jobs: list[tuple[str, str, str, pathlib.Path]], processes: int) -> Iterator[str]:
    """Run jobs in processes of their own, so many at once: MindSpore keeps all graphs that a process compiled.

    Yields:
        str, a job that is done, in words.
    """
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(compare, jobs, chunksize=1)
