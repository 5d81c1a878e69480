"""From trials to the report: a JSON file, the tables of the page, and its pictures."""

import json
import math
import pathlib
import re
from collections.abc import Iterator

import numpy as np
from budgets import BUDGETS
from confidence import crossing, is_reached, ratio_of_means, verdict
from entrants import BASELINE, ENTRANTS
from networks import NETWORKS
from pictures import draw_cost, draw_steps
from problems import PROBLEMS
from results import from_json

NOT_MEASURED = "not measured"
PAGES = ("tasks.md", "optimizers/index.md")  # in the report's folder


def summarize(trials: list[dict], budget: str) -> dict:
    """Return all figures of the report.

    Args:
        trials: Lines of the file.
        budget: Name of the budget whose trials are meant.

    Raises:
        ValueError: If there are no trials of AdamW for a task, or they have other data than those of another optimizer.
    """
    chosen = [trial for trial in trials if trial["budget"] == budget]
    if not chosen:
        raise ValueError(f"The file has no trials of the budget '{budget}'.")
    order = {entrant.name: place for place, entrant in enumerate(ENTRANTS)}
    by_task: dict[str, dict[str, dict[str, list]]] = {}
    for trial in sorted(chosen, key=lambda trial: order.get(trial["optimizer"], len(order))):
        kinds = by_task.setdefault(trial["task"], {}).setdefault(trial["optimizer"], {})
        kinds.setdefault(trial["kind"], []).append(trial)
    for task, found in by_task.items():
        if not ({"seed"} if task in PROBLEMS else {"seed", "target"}) <= set(found.get(BASELINE, ())):
            raise ValueError(f"Task '{task}' has no finished runs of {BASELINE}, which the others are compared with.")
        for key in ("data", "lengths"):
            values = {str(trial[key]) for kinds in found.values() for trial in kinds.get("seed", [])}
            if len(values) > 1:
                raise ValueError(f"Task '{task}' has trials with different '{key}': {', '.join(sorted(values))}.")
        # An optimizer whose runs are not finished is left out.
        runs = len(found[BASELINE]["seed"])
        by_task[task] = {name: kinds for name, kinds in found.items() if len(kinds.get("seed", [])) == runs}
    dates = sorted({trial["date"] for trial in chosen})
    return {
        "budget": {"name": budget, "trials of tuning": BUDGETS[budget].trials, "seeds": BUDGETS[budget].seeds},
        "dates": [dates[0], dates[-1]],
        "machines": sorted({trial["machine"] for trial in chosen}),
        "mindspore": sorted({trial["mindspore"] for trial in chosen}),
        "tasks": {task: _task(by_task[task]) for task in NETWORKS if task in by_task},
        "problems": {task: _problem(by_task[task], PROBLEMS[task].part) for task in PROBLEMS if task in by_task},
    }


def _task(found):
    """Return the figures of a network's task."""
    target = round(float(np.mean([_last(trial) for trial in found[BASELINE]["target"]])), 6)
    steps_of = {
        name: [crossing(trial["lengths"], from_json(trial["losses"]), target) for trial in kinds["seed"]]
        for name, kinds in found.items()
    }
    optimizers = {name: _optimizer(found[name], steps, target, steps_of[BASELINE]) for name, steps in steps_of.items()}
    tuned, run = found[BASELINE]["tuning"][0], found[BASELINE]["seed"][0]
    return {"target": target, "steps": tuned["lengths"][-1], "lengths": run["lengths"], "optimizers": optimizers}


def _optimizer(kinds, steps, target, theirs):
    """Return the figures of an optimizer on a task."""
    runs, lengths = kinds["seed"], kinds["seed"][0]["lengths"]
    losses = np.array([from_json(trial["losses"]) for trial in runs])
    reached = [length for length, of_runs in zip(lengths, losses.T) if is_reached(of_runs, target)]
    rates = [trial["rate"] for trial in kinds["tuning"]]
    told = {
        "rate": runs[0]["rate"],
        "at the edge": runs[0]["rate"] in (min(rates), max(rates)),
        "decay": runs[0]["decay"],
        "losses": [[None if math.isinf(x) else x for x in run] for run in losses],
        "steps": [None if math.isinf(x) else round(x, 2) for x in steps],
        "reached": reached[0] if reached else None,
        "ratio": None,
        "low": None,
        "high": None,
        "bound": _bound(steps, theirs),
        "verdict": "as many",
        "step_ms": min(trial["step_ms"] for trial in runs),
        "gradient_ms": min(trial["gradient_ms"] for trial in runs),
        "state_bytes": runs[0]["state_bytes"],
        "tuned loss": min(_last(trial) for trial in kinds["tuning"]),
    }
    if told["bound"] is not None:
        # A run that crosses outside of the lengths counts as crossing at their end, which is the less favourable guess.
        interval = ratio_of_means([min(max(x, lengths[0]), lengths[-1]) for x in steps], theirs)
        told["verdict"] = verdict(interval)
        for key, value in interval._asdict().items():
            told[key] = None if math.isnan(value) else round(value, 4)
    if "default" in kinds:
        trial = kinds["default"][0]
        loss = _last(trial)
        told["default"] = {"rate": trial["rate"], "decay": trial["decay"], "loss": None if math.isinf(loss) else loss}
    return told


def _bound(steps, theirs):
    """Return whether the ratio of clipped steps is the ratio, "", or a bound, "≤ " or "≥ "; None if it says nothing."""
    if any(math.isinf(x) or x == 0 for x in theirs) or (0 in steps and math.inf in steps):
        return None
    return "≤ " if 0 in steps else "≥ " if math.inf in steps else ""


def _problem(found, part):
    """Return how many seeds of each optimizer solve a problem."""
    return {
        name: {
            "solved": sum(_last(trial) <= part for trial in kinds["seed"]),
            "of": len(kinds["seed"]),
            "rate": kinds["seed"][0]["rate"],
        }
        for name, kinds in found.items()
    }


def _last(trial):
    return from_json(trial["losses"])[-1]


# ---- Tables --------------------------------------------------------------------------------------------------------


def tables(summary: dict) -> dict[str, list[str]]:
    """Return the tables of the pages in Markdown, by name."""
    found = {"steps": _steps_table(summary), "cost": _cost_table(summary), "defaults": _defaults_table(summary)}
    found["ratios"] = _table(["optimizer", *summary["tasks"]], [[name, *row] for name, row in ratios(summary).items()])
    if summary["problems"]:
        found["problems"] = _problems_table(summary)
    return {name: table for name, table in found.items() if len(table) > 2}


def _table(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _names(parts):
    """Return the names of optimizers, in the order of the trials."""
    return list(dict.fromkeys(name for part in parts for name in part))


def ratios(summary: dict) -> dict[str, list[str]]:
    """Return, for each optimizer, the ratio to AdamW's steps on each task; bold where the two differ."""
    tasks = summary["tasks"].values()
    return {
        name: [_ratio(task["optimizers"].get(name)) for task in tasks]
        for name in _names(task["optimizers"] for task in tasks)
    }


def _ratio(figures):
    if figures is None:
        return ""
    if figures["ratio"] is None:
        return NOT_MEASURED
    return _number(figures) if figures["verdict"] == "as many" else f"**{_number(figures)}**"


def _number(figures):
    return f"{figures['bound']}{figures['ratio']:.2f}"


def cell(figures: dict) -> str:
    """Return the ratio to AdamW's steps with its interval; bold where the interval does not include 1."""
    if figures["ratio"] is None:
        return NOT_MEASURED
    text = _number(figures)
    if figures["low"] != figures["high"]:
        text += f" ({figures['low']:.2f} to {figures['high']:.2f})"
    return f"**{text}, {figures['verdict']}**" if figures["verdict"] != "as many" else text


def _steps_table(summary):
    tasks = summary["tasks"]
    head = ["optimizer", *(f"{name}: ratio | reached at" for name in tasks)]
    head = [part for cells in head for part in cells.split(" | ")]
    rows = []
    for name in _names(task["optimizers"] for task in tasks.values()):
        row = [name]
        for task in tasks.values():
            figures = task["optimizers"].get(name)
            row += [cell(figures), str(figures["reached"] or f"not in {task['lengths'][-1]}")] if figures else ["", ""]
        rows.append(row)
    return _table(head, rows)


def _problems_table(summary):
    problems = summary["problems"]
    rows = []
    for name in _names(problems.values()):
        found = [problem.get(name) for problem in problems.values()]
        cells = ["" if f is None else _passed(f) for f in found]
        rows.append([name, *cells, str(cells.count("pass"))])
    return _table(["optimizer", *problems, "passed"], rows)


def _passed(figures):
    return "pass" if figures["solved"] == figures["of"] else f"fail, {figures['solved']} of {figures['of']}"


def _cost_table(summary):
    tasks = summary["tasks"]
    rows = []
    for name in _names(task["optimizers"] for task in tasks.values()):
        found = [task["optimizers"].get(name) for task in tasks.values()]
        first = next(f for f in found if f)
        rows.append([name, f"{first['state_bytes']:.1f}", *("" if f is None else f"{f['step_ms']:.2f}" for f in found)])
    return _table(["optimizer", "bytes of states a parameter", *(f"{name}, ms a step" for name in tasks)], rows)


def _defaults_table(summary):
    tasks, rows = summary["tasks"], []
    for name in _names(task["optimizers"] for task in tasks.values()):
        found = [task["optimizers"].get(name) for task in tasks.values()]
        default = next((f["default"] for f in found if f and "default" in f), None)
        if default:
            cells = [_beside_default(f) if f and "default" in f else "" for f in found]
            rows.append([name, f"{default['rate']:g}, {default['decay']:g}", *cells])
    return _table(["optimizer", "default rate, decay", *(f"{name}: best, and loss by default" for name in tasks)], rows)


def _beside_default(figures):
    """Return the best rate and decay, and how many times as high the loss with the defaults is."""
    loss, edge = figures["default"]["loss"], "*" if figures["at the edge"] else ""
    times = "diverges" if loss is None else f"{loss / figures['tuned loss']:.3g} ×"
    return f"{figures['rate']:g}{edge}, {figures['decay']:g}: {times}"


# ---- Files ---------------------------------------------------------------------------------------------------------


def write_report(trials: list[dict], budget: str, folder: pathlib.Path) -> Iterator[str]:
    """Write tasks.json and two pictures, replace the tables in the pages that the folder has, and yield what is new."""
    summary = summarize(trials, budget)
    (folder / "tasks.json").write_text(json.dumps(summary, indent=1) + "\n")
    if summary["tasks"]:
        draw_steps(summary, folder / "tasks_steps.png")
        draw_cost(summary, folder / "tasks_cost.png")
    found = tables(summary)
    for page in (folder / name for name in PAGES):
        if page.exists():
            page.write_text(with_tables(page.read_text(), found))
    for name, table in found.items():
        yield "\n".join([f"{name}:", *table, ""])


def with_tables(text: str, found: dict[str, list[str]]) -> str:
    """Return a page with its tables replaced: each stands between <!-- NAME --> and <!-- end -->."""
    for name, table in found.items():
        block = "\n".join([f"<!-- {name} -->", "", *table, "", "<!-- end -->"])
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, block=block: block, text, flags=re.S)
    return text
