"""Train a small Transformer on English text with AdamW, Muon and ScheduleFreeAdamW, and compare the losses by step.

AdamW and Muon use a cosine schedule to 0 after a warm-up; Muon takes three quarters of AdamW's steps.
ScheduleFreeAdamW's learning rate is constant, and its loss at any step is that of a run that could end there. Each
learning rate is the best of those that --tune tries, with a seed that the comparison does not use. The network and the
text are those of low_precision.py.
"""

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import mindspore as ms
import numpy as np
from low_precision import BATCH, CONTEXT, VALIDATED, WEIGHT_DECAY, LanguageModel, read_text, save, windows
from mindspore import nn
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt

POINTS = 20  # of a curve
TUNING_SEED = 1000
ADAMW_NAMES = ("characters", "head.*")  # the embedding and the output layer
SPLITS = {"*qkv.weight": 3}


def cosine(rate, steps):
    """Return the learning rate of each step: a warm-up, then a half cosine to 0."""
    rising = max(1, steps // 20)
    return [rate * min(1.0, (i + 1) / rising) * (0.5 + 0.5 * math.cos(math.pi * i / steps)) for i in range(steps)]


def adamw(groups, rate, steps):
    """Make AdamW with a schedule."""
    return ms_optim.AdamW(groups, cosine(rate, steps), (0.9, 0.99))


def muon(groups, rate, steps):
    """Create Muon with the same schedule; it needs the names of embedding and output layer, and the split."""
    return ms_optim.Muon(groups, cosine(rate, steps), adamw_names=ADAMW_NAMES, splits=SPLITS)


def schedule_free(groups, rate, steps):
    """Make ScheduleFreeAdamW with a constant rate after a warm-up."""
    return ms_optim.ScheduleFreeAdamW(groups, rate, (0.95, 0.99), warmup_steps=steps // 20)


@dataclass
class Run:
    """How the network is trained with one of the optimizers.

    Attributes:
        optimizer: Creates it from groups, a learning rate and the number of steps.
        rate: The learning rate that --tune found.
        steps: Its number of steps, relative to AdamW's.
        color: Color of its curve.
    """

    optimizer: Callable[[Any, float, int], Any]
    rate: float
    steps: float
    color: str


RUNS = {
    "AdamW": Run(adamw, 2e-3, 1.0, "0.6"),
    "Muon": Run(muon, 1.6e-2, 0.75, "tab:red"),
    "ScheduleFreeAdamW": Run(schedule_free, 4e-3, 1.0, "tab:blue"),
}
# Each learning rate is twice the previous one.
TRIED = [1e-3 * 2**k for k in range(6)]


def train(name, rate, steps, seed):
    """Train one network; return its validation losses by step."""
    run = RUNS[name]
    steps = round(run.steps * steps)
    text, held_back, vocabulary = read_text()
    rng = np.random.default_rng(seed)
    net = LanguageModel(rng, vocabulary, ms.float32)
    optimizer = run.optimizer(ms_optim.no_decay_groups(net, WEIGHT_DECAY), rate, steps)
    step = nn.TrainOneStepCell(net, optimizer)
    validation = windows(held_back, np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int))
    losses = {}
    with tqdm(total=steps, desc=f"{name}, {rate:g}, seed {seed}".ljust(34), unit="step") as bar:
        for i in range(1, steps + 1):
            step(*windows(text, rng.integers(0, len(text) - CONTEXT, BATCH)))
            if i % math.ceil(steps / POINTS) == 0 or i == steps:
                with optimizer.averaged() if optimizer.averages_iterates else contextlib.nullcontext():
                    losses[i] = float(net(*validation).asnumpy())
                bar.set_postfix(validation=f"{losses[i]:.3f}", refresh=False)
            bar.update()
    return losses


def last(losses):
    """Return the loss after the last step."""
    return list(losses.values())[-1]


def tune(console, names, rates, loss_of):
    """Try learning rates, print what loss_of(name, rate) returns, and return the best rate of each optimizer."""
    found = {name: [loss_of(name, rate) for rate in rates] for name in names}
    table = Table("Validation loss", *(f"{rate:g}" for rate in rates))
    for name, losses in found.items():
        table.add_row(name, *(f"{loss:.4f}" for loss in losses))
    console.print(table)
    return {name: rates[int(np.argmin(losses))] for name, losses in found.items()}


def draw(curves, path):
    """Plot the mean loss by step."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for name, runs in curves.items():
        steps, losses = list(runs[0]), np.mean([list(run.values()) for run in runs], 0)
        color, label = RUNS[name].color, f"{name}: {losses[-1]:.3f} after {steps[-1]:,} steps"
        axes.plot(steps, losses, color=color, linewidth=1.8, label=label)
        axes.plot(steps[-1], losses[-1], "o", color=color)
        if name == "AdamW":
            axes.axhline(losses[-1], color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="cross entropy of a character", title="Validation loss")
    axes.set_ylim(top=3.0)
    save(figure, axes, path)


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
    parser.add_argument("--steps", type=int, default=800, help="number of AdamW's steps")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs to average over")
    parser.add_argument("--tune", action="store_true", help="tune the learning rates first")
    parser.add_argument("--output", default="muon.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if arguments.mode == "graph" else ms.PYNATIVE_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    console, names = Console(), list(dict.fromkeys(["AdamW", *arguments.optimizer]))
    rates = {name: RUNS[name].rate for name in names}
    if arguments.tune:
        rates = tune(console, names, TRIED, lambda name, rate: last(train(name, rate, arguments.steps, TUNING_SEED)))
    curves = {
        name: [train(name, rates[name], arguments.steps, seed) for seed in range(arguments.seeds)] for name in names
    }
    table = Table("Optimizer", "Learning rate", "Steps", "Validation loss", "Against AdamW, by seed")
    for name, runs in curves.items():
        ratios = [last(run) / last(first) for run, first in zip(runs, curves["AdamW"])]
        steps, loss = list(runs[0])[-1], np.mean([last(run) for run in runs])
        by_seed = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        table.add_row(name, f"{rates[name]:g}", f"{steps:,}", f"{loss:.4f}", by_seed)
    console.print(table)
    draw(curves, arguments.output)
    console.print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
