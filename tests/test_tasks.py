"""The benchmark of optimizers: its statistics, how it tunes and continues, and what it says of bad arguments."""

import importlib.util
import json
import math
import re
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from sources import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "tasks"))
if not (ROOT / "benchmarks" / "tasks").exists():
    pytest.skip("the benchmarks are not here", allow_module_level=True)

import report
from budgets import BUDGETS
from confidence import Interval, crossing, is_reached, ratio_of_means, verdict
from entrants import ENTRANTS
from problems import PROBLEMS
from results import Results
from training import train
from trials import run_once
from tuning import next_exponent, rate_at, tune

from ms_optim import OPTIMIZERS

T_4 = 2.7764451  # of Student's distribution: 97.5 %, four degrees of freedom
BY_NAME = {entrant.name: entrant for entrant in ENTRANTS}
OWN = f"{ROOT}/examples/own_optimizer.py:AdaBelief"


@pytest.fixture(scope="module")
def command():
    """The module that ``python benchmarks/tasks`` runs."""
    spec = importlib.util.spec_from_file_location("benchmark_of_tasks", ROOT / "benchmarks/tasks/__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_optimizer_takes_part():
    assert [entrant.cls for entrant in ENTRANTS] == list(OPTIMIZERS)


# ---- Statistics ----------------------------------------------------------------------------------------------------


def test_a_loss_is_reached_by_three_sigma_of_the_mean():
    losses = [1.0, 1.1, 1.2]  # mean 1.1, standard deviation 0.1: the target is at least 1.1 + 3 * 0.1 / sqrt(3)
    assert is_reached(losses, 1.27321)
    assert not is_reached(losses, 1.27319)
    assert not is_reached([0.1], 1.0)  # of one run nothing is known
    assert not is_reached([0.1, math.inf, 0.1], 1.0)


def test_steps_are_interpolated_in_logarithms():
    steps, losses = [50, 100, 200], [8.0, 4.0, 1.0]
    assert crossing(steps, losses, 2.0) == pytest.approx(100 * 2**0.5)
    assert crossing(steps, losses, 4.0) == 100.0
    assert crossing(steps, losses, 8.0) == 0.0
    assert crossing(steps, losses, 0.9) == math.inf
    assert crossing(steps, [math.inf, math.inf, 1.0], 1.5) == 200.0
    assert crossing(steps, [8.0, 2.0, 5.0], 4.0) == pytest.approx(50 * 2**0.5)  # the first time, not the last


def test_the_ends_of_the_interval_are_where_a_paired_t_test_turns():
    rng = np.random.default_rng(3)
    theirs = rng.normal(100.0, 4.0, 5)
    ours = 0.8 * theirs + rng.normal(0.0, 2.0, 5)

    def distance(ratio):
        difference = ours - ratio * theirs
        return abs(difference.mean()) * math.sqrt(5) / difference.std(ddof=1) - T_4

    middle = ours.mean() / theirs.mean()
    found = ratio_of_means(ours, theirs)
    assert found.ratio == pytest.approx(middle)
    assert found.low == pytest.approx(brentq(distance, 0.1, middle), rel=1e-6)
    assert found.high == pytest.approx(brentq(distance, middle, 3.0), rel=1e-6)
    # Runs that are not paired have a wider interval: the pairs are what makes it narrow.
    assert ratio_of_means(ours[::-1], theirs).high > found.high


def test_what_has_no_interval_is_not_called_different():
    assert ratio_of_means([50.0, 52.0], [50.0, 52.0]) == pytest.approx((1.0, 1.0, 1.0))
    single = ratio_of_means([50.0], [100.0])
    assert single.ratio == 0.5
    assert np.isnan(single[1:]).all()
    assert verdict(single) == "as many"
    assert np.isnan(ratio_of_means([1.0, 2.0], [-5.0, 9.0]).low)  # theirs is not told from 0
    assert [verdict(Interval(1.0, *ends)) for ends in ((0.7, 0.99), (0.7, 1.2), (1.01, 1.2))] == [
        "fewer",
        "as many",
        "more",
    ]
    with pytest.raises(ValueError, match="expected as many of both, but got 2 and 1"):
        ratio_of_means([1.0, 2.0], [1.0])


# ---- Tuning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.1, [0, -1, 1, -0.5, 0.5, -0.25, 0.25]),
        (2.2, [0, -1, 1, 2, 3, 1.5, 2.5]),
        (-9.0, [0, -1, 1, -2, -3, -4, -5]),
    ],
)
def test_rates_close_in_on_the_best(best, tried):
    losses = {}
    for _ in range(7):
        exponent = next_exponent(losses)
        losses[exponent] = (exponent - best) ** 2
    assert list(losses) == tried


def test_a_rate_that_diverges_is_left_downwards():
    assert next_exponent({0.0: math.inf, -1.0: math.inf, 1.0: math.inf}) == -2.0
    assert next_exponent({0.0: 2.0, -1.0: 3.0, 1.0: math.inf}) == -0.5


def test_each_optimizer_gets_as_many_trials():
    for budget in BUDGETS.values():
        for best in (1e-5, 1e-2, 1.0):
            tried = []

            def loss_of(rate, decay, tried=tried, best=best):
                tried.append((rate, decay))
                return abs(math.log(rate / best)) + 0.01 * (decay > 0)

            rate, decay = tune(loss_of, 3e-3, 0.1, budget.rates, budget.decays)
            assert len(tried) == len(set(tried)) == budget.trials
            assert (rate, decay) == min(tried, key=lambda pair: loss_of(*pair, tried=[]))
    assert rate_at(3e-3, -1.0) == 1e-3


# ---- Runs ----------------------------------------------------------------------------------------------------------


def made(name, problem, length):
    """Return a problem at its start, and an optimizer of it."""
    task = PROBLEMS[problem]()
    task.reset(5)
    return task, BY_NAME[name].made(task, 0.05, 0.0, 2, length)


@pytest.mark.parametrize("name", ["AdamW", "Momentum", "Muon", "ScheduleFreeAdamW", "Sinkhorn"])
def test_the_lengths_of_one_run_are_runs_of_their_own(name):
    lengths = [10, 14, 20]
    together = train(*made(name, "noisy", 20), 0.05, 5, lengths, 2)["losses"]
    alone = [train(*made(name, "noisy", 20), 0.05, 5, [length], 2)["losses"][0] for length in lengths]
    assert together == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("name", ["AdEMAMix", "DGCMomentum", "Muon", "ScheduleFreeAdamW"])
def test_an_optimizer_that_is_set_back_is_as_a_new_one(name):
    made, task = {}, PROBLEMS["noisy"]()
    runs = [run_once(made, task, BY_NAME[name], 0.05, 0.1, seed, [8], 8)["losses"] for seed in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]


@pytest.mark.parametrize("name", ["AdamW", "ScheduleFreeAdamW"])
def test_the_rate_rises_stays_and_falls(name):
    task, optimizer = made(name, "quadratic", 10)
    given, gradients = [], task.gradients
    task.gradients = lambda *which: given.append(optimizer.current_step_lr()) or gradients(*which)
    train(task, optimizer, 0.3, 0, [10], 4)
    rising = [0.075, 0.15, 0.225, *[0.3] * 5, 0.2, 0.1] if name == "AdamW" else [0.3] * 10
    np.testing.assert_allclose(given, rising, rtol=1e-6)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_problems_are_those_of_their_values(name):
    task = PROBLEMS[name]()
    task.reset(1)
    x, step = task.start(np.random.default_rng(2)) + 0.5, 1e-5

    def value(i, moved):
        shifted = x.copy()
        shifted.flat[i] += moved
        return task.value(shifted)

    numeric = np.array([(value(i, step) - value(i, -step)) / (2 * step) for i in range(x.size)]).reshape(x.shape)
    slopes = np.mean([task.slope(x, np.random.default_rng(k)) for k in range(400 if name == "noisy" else 1)], 0)
    if name == "sparse":
        (row,) = np.flatnonzero(slopes.any(1))
        np.testing.assert_allclose(slopes[row], numeric[row], rtol=1e-6)
        return
    agreement = (numeric * slopes).sum() / np.sqrt((numeric**2).sum() * (slopes**2).sum())
    assert agreement > (0.9 if name == "noisy" else 1 - 1e-8)


# ---- The file of trials --------------------------------------------------------------------------------------------

KEY = {"budget": "short", "task": "digits", "data": "0", "optimizer": "AdamW", "version": "1", "kind": "seed"}
KEY |= {"rate": 0.1, "decay": 0.0, "lengths": [20]}


def test_trials_that_are_done_are_not_run_again(tmp_path):
    path = tmp_path / "trials.jsonl"
    for seed in range(3):
        Results(path).get(lambda seed=seed: {"losses": [seed]}, **KEY, seed=seed)
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    # Cut off within the last line, or right before its end: that trial alone runs again.
    for cut in (len(whole) - 9, len(whole) - 1):
        path.write_text(whole[:cut])
        results = Results(path)
        assert path.read_text() == "".join(lines[:2])
        got = [results.get(lambda seed=seed: {"losses": [10 + seed]}, **KEY, seed=seed)["losses"] for seed in range(3)]
        assert got == [[0], [1], [12]]
        assert Results(path).trials == results.trials
    # Of files that are joined, the first trial with one key counts.
    path.write_text(whole + lines[0].replace("[0]}", "[7]}"))
    assert [trial["losses"] for trial in Results(path).trials] == [[0], [1], [2]]
    # Another version of an optimizer is another trial.
    assert Results(path).get(lambda: {"losses": [9]}, **{**KEY, "version": "2"}, seed=0)["losses"] == [9]


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    path = tmp_path / "trials.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(ValueError, match=r"Line 1 of .*trials.jsonl is not a trial"):
        Results(path)
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'


# ---- The command ---------------------------------------------------------------------------------------------------


def run(command, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks/tasks", *map(str, arguments)])
    command.main()


def test_a_rerun_continues_and_an_optimizer_of_your_own_takes_part(command, monkeypatch, tmp_path):
    path = tmp_path / "trials.jsonl"
    asked = ["--budget", "smoke", "--tasks", "quadratic", "--results", path, "--optimizer", "Momentum", OWN]
    run(command, monkeypatch, *asked)
    trials = [json.loads(line) for line in path.read_text().splitlines()]
    each = BUDGETS["smoke"].trials + BUDGETS["smoke"].seeds
    names = ["AdamW", "Momentum", "AdaBelief (own_optimizer.py)"]
    # Two processes append to the file; the trials of each optimizer are one job.
    assert sorted(trial["optimizer"] for trial in trials) == sorted(name for name in names for _ in range(each))
    assert {trial["seed"] for trial in trials if trial["kind"] == "seed"} == {0, 1}
    kept = "".join(f"{json.dumps({**trial, 'machine': 'kept'})}\n" for trial in trials[:-1])
    path.write_text(kept)
    run(command, monkeypatch, *asked)
    again = path.read_text()
    assert again.startswith(kept)
    (last,) = again[len(kept) :].splitlines()
    assert {**json.loads(last), "step_ms": 0, "gradient_ms": 0} == {**trials[-1], "step_ms": 0, "gradient_ms": 0}
    run(command, monkeypatch, "--report", "--budget", "smoke", "--results", path, "--output", tmp_path)
    told = json.loads((tmp_path / "tasks.json").read_text())
    assert list(told["problems"]["quadratic"]) == names


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--optimizer", "Lam"], r"'Lam' is no optimizer .* did you mean 'Lamb'\?"),
        (["--optimizer", "Zzz"], "'Zzz' is no optimizer .* there are AdamW, Lamb"),
        (["--optimizer", "missing.py:Mine"], "There is no file 'missing.py'"),
        (["--optimizer", OWN.replace("AdaBelief", "Ada")], "has no optimizer 'Ada', .* it has AdaBelief"),
        (["--optimizer", OWN.replace("AdaBelief", "math")], "has no optimizer 'math'"),
        (["--report", "--results", "nothing.jsonl"], "The file has no trials of the budget 'night'"),
    ],
)
def test_bad_arguments_are_named(command, monkeypatch, capsys, tmp_path, asked, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(command, monkeypatch, *asked)
    assert stopped.value.code == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


# ---- The report ----------------------------------------------------------------------------------------------------


def trials_of(name, runs, **other):
    """Return the lines of an optimizer that was tuned to a loss of 2: losses of runs at 5, 10 and 20 steps."""
    same = {**KEY, "optimizer": name, "step_ms": 1.0, "gradient_ms": 2.0, "state_bytes": 8.0, "machine": "M"}
    same |= {"date": "2026-11-27", "mindspore": "2.10.0", **other}
    lines = [{**same, "kind": "tuning", "seed": 9, "lengths": [10], "losses": [x], "rate": x / 20} for x in (1.5, 2, 3)]
    lines += [{**same, "kind": "target", "seed": k, "lengths": [10], "losses": [1.9 + 0.1 * k]} for k in range(3)]
    lines += [{**same, "seed": seed, "lengths": [5, 10, 20], "losses": losses} for seed, losses in enumerate(runs)]
    return [*lines, {**same, "kind": "default", "seed": 9, "lengths": [10], "losses": [3.0], "rate": 0.5}]


def test_the_report_compares_with_the_mean_loss_of_adamw():
    lines = trials_of("AdamW", [[4.0, 2.0, 1.0], [4.0, 2.5, 1.25], [4.0, 1.6, 1.0]])
    lines += trials_of("Half", [[2.5, 1.6, 1.0]] * 3)
    lines += trials_of("Slow", [[5.0, 4.0, 1.9], [5.0, 4.0, 1.9], [5.0, 4.0, None]], rate=0.15)
    lines += trials_of("Fast", [[1.5, 1.0, 0.5]] * 3)
    lines += trials_of("Unfinished", [[1.0, 1.0, 1.0]])
    task = report.summarize(lines, "short")["tasks"]["digits"]
    figures = task["optimizers"]
    assert (task["target"], task["steps"]) == (2.0, 10)
    assert [figures[name]["reached"] for name in figures] == [20, 10, None, 5]
    theirs = [10.0, 10 * 2 ** (math.log(1.25) / math.log(2)), 5 * 2 ** (math.log(2) / math.log(2.5))]
    assert figures["AdamW"]["steps"] == pytest.approx(theirs, abs=0.006)
    ours = 5 * 2 ** (math.log(1.25) / math.log(2.5 / 1.6))
    assert figures["Half"]["ratio"] == pytest.approx(ours / np.mean(theirs), abs=1e-3)
    assert figures["Half"]["low"] < figures["Half"]["ratio"] < figures["Half"]["high"]
    # The best of the rates that were tried, 0.1, lies between two others.
    assert (figures["Half"]["at the edge"], figures["Slow"]["at the edge"]) == (False, True)
    assert report.cell(figures["AdamW"]) == "1.00"
    assert (
        report.cell({**figures["Half"], "low": 0.6, "high": 0.9, "verdict": "fewer"})
        == "**0.69 (0.60 to 0.90), fewer**"
    )
    # What crosses outside of the lengths is bounded by their ends, and is called different only if the bound is.
    assert (figures["Slow"]["bound"], figures["Fast"]["bound"], figures["Half"]["bound"]) == ("≥ ", "≤ ", "")
    slow = 10 * 2 ** (math.log(2) / math.log(4 / 1.9))
    assert figures["Slow"]["ratio"] == pytest.approx((2 * slow + 20) / 3 / np.mean(theirs), abs=1e-3)
    assert figures["Fast"]["ratio"] == pytest.approx(5 / np.mean(theirs), abs=1e-3)
    assert report.cell(figures["Fast"]).startswith("**≤ 0.48 (0.")
    assert report.cell({**figures["Fast"], "ratio": None}) == "not measured"
    table = report.tables({"tasks": {"digits": task}, "problems": {}})["defaults"]
    assert table[2] == "| AdamW | 0.5, 0 | 0.1, 0: 2 × |"
    with pytest.raises(ValueError, match="different 'data': 0, 1"):
        report.summarize(lines + trials_of("Other", [[1.0, 1.0, 1.0]], data="1"), "short")
    with pytest.raises(ValueError, match="no finished runs of AdamW"):
        report.summarize(trials_of("Half", [[1.0, 1.0, 1.0]]), "short")


def test_pages_have_the_figures_of_the_file():
    summary = json.loads((ROOT / "docs/tasks.json").read_text())
    tables, pages = report.tables(summary), [(ROOT / "docs" / name).read_text() for name in report.PAGES]
    for page in pages:
        assert page == report.with_tables(page, tables)
    for name, table in tables.items():
        assert sum(f"<!-- {name} -->\n\n" + "\n".join(table) in page for page in pages) == 1, name
    for readme in ("README.md", "README_zh.md"):
        rows = (ROOT / readme).read_text().splitlines()
        for name, ratios in report.ratios(summary).items():
            (row,) = (row for row in rows if row.startswith(f"| [`{name}`]"))
            assert f" | {', '.join(ratios)} | " in row, (readme, name)
