"""Train a small Transformer with four simulated workers that exchange every few dozen steps, and compare the losses.

Dense is AdamW on the mean gradient of all workers, exchanged every step. With DiLoCo and SparseLoCo each worker takes
steps of AdamW on its own quarter of the batch, and they exchange the differences of their weights. All take the same
number of steps on the same number of characters. The text and the network are those of low_precision.py, the network
a quarter as wide, so that it is trained to the end.
"""

import argparse
from dataclasses import dataclass

import matplotlib as mpl
import mindspore as ms
import numpy as np
from low_precision import CONTEXT, VALIDATED, WEIGHT_DECAY, Gradients, LanguageModel, read_text, save, windows
from muon import cosine
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ms_optim import AdamW, LocalSteps, SimulatedWorkers, SparseTopK, no_decay_groups

mpl.use("agg")
import matplotlib.pyplot as plt

WORKERS, BATCH, WIDTH = 4, 32, 32
RATE = 8e-3  # the best of 4e-3, this and 16e-3, for dense training
# In a run of a few hundred exchanges, DiLoCo's own momentum of 0.9 has little time to act. SparseLoCo sends few
# elements of each difference, and needs a larger rate.
OUTER = {
    "DiLoCo": {"outer_learning_rate": 1.0, "outer_momentum": 0.3},
    "SparseLoCo": {"outer_learning_rate": 3.0, "outer_momentum": 0.0, "compress": SparseTopK()},
}
COLORS = {"DiLoCo": "tab:blue", "SparseLoCo": "tab:red"}


@dataclass(frozen=True)
class Run:
    """How workers exchange: the number of steps between exchanges, 0 for dense, and the method."""

    name: str
    every: int = 0

    def optimizer(self, optimizer, group):
        """Return LocalSteps around an optimizer."""
        return LocalSteps(optimizer, self.every, group=group, **OUTER[self.name])


def adamw(net, params, steps):
    """Create AdamW with a schedule, for the parameters of a network or for copies of them."""
    own = {p.name: p for p in params}
    given = no_decay_groups(net, WEIGHT_DECAY)
    lists = ("params", "order_params")
    groups = [{key: [own[p.name] for p in v] if key in lists else v for key, v in group.items()} for group in given]
    return AdamW(groups, cosine(RATE, steps), (0.9, 0.99))


def train(run, steps, seed):
    """Train once; return the validation loss, and the bytes that a worker sends in a step on average."""
    text, held_back, vocabulary = read_text()
    rng = np.random.default_rng(seed)
    net = LanguageModel(rng, vocabulary, ms.float32, WIDTH)
    params = list(net.trainable_params())
    gradient = Gradients(net, params)
    validation = windows(held_back, np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int))

    def batch(size):
        return windows(text, rng.integers(0, len(text) - CONTEXT, size))

    description = f"{run.name}{f', every {run.every}' if run.every else ''}, seed {seed}".ljust(32)
    bar = tqdm(range(steps), desc=description, unit="step")
    if run.every == 0:
        optimizer = adamw(net, params, steps)
        for _ in bar:
            optimizer(gradient(*batch(BATCH))[1])
        return float(net(*validation).asnumpy()), 4.0 * sum(p.size for p in params)
    workers = SimulatedWorkers(WORKERS, params, lambda params, group: run.optimizer(adamw(net, params, steps), group))
    sent = 0
    for _ in bar:
        gradients = []
        for k in range(WORKERS):
            with workers.weights_of(k):
                gradients.append(gradient(*batch(BATCH // WORKERS))[1])
        workers(gradients)
        sent += workers.bytes_sent
    return float(net(*validation).asnumpy()), sent / steps


def draw(losses, dense, path):
    """Plot the losses by steps between exchanges, relative to the dense run."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.axhline(1.0, color="0.6", linewidth=1.2, label="AdamW, dense")
    for name, color in COLORS.items():
        points = {run.every: np.mean(found) / dense for run, found in losses.items() if run.name == name}
        axes.plot(list(points), list(points.values()), "o-", color=color, label=name)
    axes.set(xlabel="steps between exchanges", ylabel="÷ the dense one", title="Validation loss, four workers")
    axes.set_xscale("log")
    axes.set_xticks(sorted({run.every for run in losses}), [str(every) for every in sorted({r.every for r in losses})])
    axes.minorticks_off()
    save(figure, axes, path)


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, nargs="+", default=[15, 30, 100], help="steps between exchanges")
    parser.add_argument("--names", nargs="+", choices=list(COLORS), default=list(COLORS))
    parser.add_argument("--steps", type=int, default=9900)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs to average over")
    parser.add_argument("--output", default="local_steps.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    table = Table("Exchange", "Every", "Validation loss", "By seed", "÷ dense", "Bytes a step", "Of dense")
    runs = [Run("dense"), *(Run(name, every) for name in arguments.names for every in arguments.every)]
    losses, dense, dense_bytes = {}, 1.0, 1.0
    for run in runs:
        found = [train(run, arguments.steps, seed) for seed in range(arguments.seeds)]
        results, sent = [loss for loss, _ in found], found[0][1]
        if run.every == 0:
            dense, dense_bytes = np.mean(results), sent
        else:
            losses[run] = results
        table.add_row(
            run.name,
            str(run.every or 1),
            f"{np.mean(results):.4f}",
            ", ".join(f"{loss:.4f}" for loss in results),
            f"{np.mean(results) / dense:.4f}",
            f"{sent:,.0f}",
            f"1/{dense_bytes / sent:,.0f}" if sent else "nothing",
        )
    Console().print(table)
    draw(losses, dense, arguments.output)
    print(f"Picture in {arguments.output}")


if __name__ == "__main__":
    main()
