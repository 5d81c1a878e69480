"""Draw what OptimizerMonitor reads of healthy training and of sick training.

A small Transformer reads English text by character, as in low_precision.py, with AdamW: once with good settings, and
four times with one thing wrong. The curves of the good run are drawn in gray behind those of the others.
"""

import argparse
import csv
import pathlib
import tempfile
from dataclasses import dataclass

import matplotlib as mpl
import mindspore as ms
import numpy as np
from low_precision import BATCH, CONTEXT, WEIGHT_DECAY, Gradients, LanguageModel, read_text, windows
from rich.console import Console
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt

GOOD_RATE = 2e-3
EVERY = 5  # steps between readings
FAST_LAYER = "blocks.1.widen.weight"


@dataclass
class Run:
    """What one of the runs does otherwise than the healthy one."""

    title: str
    rate: float = GOOD_RATE
    fast_layer: bool = False  # whether one layer has 100 times the learning rate
    wrong_labels: bool = False  # whether some batches in the middle have labels at random


RUNS = (
    Run("healthy"),
    Run("learning rate 50 times too high", rate=50 * GOOD_RATE),
    Run("learning rate 100 times too low", rate=GOOD_RATE / 100),
    Run("one layer 100 times too fast", fast_layer=True),
    Run("wrong labels for 20 steps", wrong_labels=True),
)
RATIO, WEIGHTS = "update/weight of each matrix", "weight norm / its first"
READINGS = ("loss", RATIO, "gradient norm", WEIGHTS)


def optimizer_of(net, run, steps):
    """Return AdamW for a network, with warm-up and cosine decay."""

    def schedule(rate):
        return ms_optim.WarmUpHoldDecayLR(rate, steps // 10, 0, steps, decay="cosine")

    groups = [group for group in ms_optim.no_decay_groups(net, WEIGHT_DECAY) if "params" in group]
    if run.fast_layer:
        for group in groups:
            group["params"] = [p for p in group["params"] if p.name != FAST_LAYER]
        fast = [p for p in net.trainable_params() if p.name == FAST_LAYER]
        groups.append({"params": fast, "weight_decay": WEIGHT_DECAY, "lr": schedule(100 * run.rate)})
    return ms_optim.AdamW(groups, learning_rate=schedule(run.rate))


def train(run, steps, folder):
    """Train a network; return the losses of all steps, and the columns of the monitor's two files."""
    text, _, vocabulary = read_text()
    rng = np.random.default_rng(0)
    net = LanguageModel(rng, vocabulary, ms.float32)
    optimizer = optimizer_of(net, run, steps)
    gradients, file, losses = Gradients(net, optimizer.parameters), folder / "run.csv", []
    with ms_optim.OptimizerMonitor(EVERY, csv=file, verbose=False) as monitor:
        for i in tqdm(range(steps), desc=f"{run.title:32}", unit="step"):
            batch = windows(text, rng.integers(0, len(text) - CONTEXT, BATCH))
            if run.wrong_labels and steps // 2 <= i < steps // 2 + 20:
                batch = batch[0], ms.Tensor(rng.integers(0, vocabulary, (BATCH, CONTEXT)), ms.int32)
            loss, found = gradients(*batch)
            optimizer(found)
            monitor.step(optimizer)
            losses.append(float(loss.asnumpy()))
    return losses, columns(file), columns(file.with_suffix(".layers.csv"))


def columns(file):
    """Return the columns of a CSV file by name; those of numbers as float64."""
    with file.open(newline="") as lines:
        header, *rows = list(csv.reader(lines))
    return {
        name: np.array(column, float if name not in ("optimizer", "parameter") else str)
        for name, column in zip(header, zip(*rows))
    }


def curves(losses, totals, layers):
    """Return, for each of READINGS, its steps and curves; several curves are those of single layers."""
    steps, names = totals["step"], dict.fromkeys(layers["parameter"])
    matrices = [name for name in names if name.endswith("weight") or "characters" in name]
    ratios = [layers["update_ratio"][layers["parameter"] == name] for name in matrices]
    smooth = np.convolve(losses, np.full(EVERY, 1 / EVERY), "valid")
    return {
        "loss": (np.arange(len(smooth)) + EVERY, [smooth]),
        RATIO: (steps, ratios),
        "gradient norm": (steps, [totals["gradient_norm"]]),
        WEIGHTS: (steps, [totals["weight_norm"] / totals["weight_norm"][0]]),
    }


def draw(found, path):
    """Plot a row of readings for each run; the healthy run is repeated in gray."""
    plt.rcParams.update({"font.size": 10})
    size = (11, 2 * len(found))
    figure, rows = plt.subplots(
        len(found), len(READINGS), figsize=size, sharex=True, sharey="col", layout="constrained"
    )
    for run, own, row in zip(RUNS, found, rows):
        is_healthy = own is found[0]
        for name, axes in zip(READINGS, row):
            shown = [(own, "#0072b2")] if is_healthy else [(found[0], "0.75"), (own, "#d55e00")]
            for of_run, color in shown:
                steps, lines = of_run[name]
                axes.plot(steps, np.transpose(lines), color=color, linewidth=0.9)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(run.title.replace(" times", " times\n").replace(" for", "\nfor"))
    for name, axes, last in zip(READINGS, rows[0], rows[-1]):
        axes.set_title(name)
        axes.set_yscale("linear" if name == "loss" else "log")
        last.set_xlabel("step")
    # The rate, and with it the updates, end at 0.
    rows[0][READINGS.index(RATIO)].set_ylim(1e-5, 0.3)
    for axes in rows[:, -1]:
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    """Train, and save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", default="readings.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute
    found = []
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found.append(curves(*train(run, arguments.steps, pathlib.Path(folder))))
    draw(found, arguments.output)
    Console().print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
