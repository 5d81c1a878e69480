"""Train a small Transformer on words, most of them rare, with AdamW, with Muon, and with the recipe of DeepSeek-V4.1.

The text is Python's standard library, read by word and sign: of 20,000 rows of the embedding a hundred take most of the
text, by Zipf's law. Muon and DeepSeek-V4.1's recipe differ in two points: the recipe orthogonalizes queries and keys by
heads, and updates embedding and output layer by Sinkhorn, which keeps one state where AdamW keeps two. Each learning
rate is the best of those that --tune tries, with a seed that the comparison does not use.
"""

import argparse
import functools
import math
import multiprocessing
import pathlib
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import matplotlib as mpl
import mindspore as ms
import numpy as np
from low_precision import BATCH, CONTEXT, HEADS, WEIGHT_DECAY, WIDTH, LanguageModel, bytes_of, save, windows
from mindspore import nn
from muon import TUNING_SEED, cosine, last, tune
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt

VOCABULARY = 20_000  # the most frequent words, and one number for all others
VALIDATED = 64  # windows
POINTS = 20  # of a curve
EMBEDDING, HEAD = "characters", "head.weight"
QUERIES_AND_KEYS_BY_HEADS = {"*qkv.weight": [ms_optim.heads(2 * HEADS, WIDTH // HEADS), WIDTH]}


def adamw(net, rates):
    """Make AdamW."""
    return ms_optim.AdamW(ms_optim.no_decay_groups(net, WEIGHT_DECAY), rates, (0.9, 0.95))


def muon(net, rates):
    """Make Muon with the settings of DeepSeek-V4, which has AdamW for embedding and output layer."""
    splits = {"*qkv.weight": 3}
    return ms_optim.recipe("deepseek-v4", net, rates, embeddings=EMBEDDING, head=HEAD, splits=splits, verbose=False)


def deepseek(net, rates):
    """Make Muon by heads, Sinkhorn and AdamW, as one optimizer."""
    return ms_optim.recipe(
        "deepseek-v4.1", net, rates, embeddings=EMBEDDING, head=HEAD, splits=QUERIES_AND_KEYS_BY_HEADS, verbose=False
    )


@dataclass
class Run:
    """How the network is trained with one of the optimizers.

    Attributes:
        optimizer: Creates it from a network and the learning rate of each step.
        rate: The learning rate that --tune found.
        color: Color of its curve.
    """

    optimizer: Callable
    rate: float
    color: str


RUNS = {
    "AdamW": Run(adamw, 4e-3, "0.6"),
    "Muon and AdamW": Run(muon, 16e-3, "tab:red"),
    "DeepSeek-V4.1": Run(deepseek, 16e-3, "tab:blue"),
}
# Each learning rate is twice the previous one.
TRIED = [1e-3 * 2**k for k in range(6)]


@functools.cache
def read_words():
    """Return training and validation words as numbers.

    Every eighth file is held back.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    # Tests repeat what they test, and installed packages differ.
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    read = [re.findall(r"[A-Za-z]+|\d+|[^\w\s]|\n *", path.read_text(errors="ignore")) for path in files]
    counts = Counter(word for words in read for word in words)
    number = {word: i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 1))}
    parts = ([], [])
    for i, words in enumerate(read):
        parts[i % 8 == 7].extend(number.get(word, VOCABULARY - 1) for word in words)
    return tuple(np.array(part, np.int32) for part in parts)


def train(name, rate, steps, seed):
    """Train one network; return its validation losses by step, and the bytes of states a parameter."""
    text, held_back = read_words()
    rng = np.random.default_rng(seed)
    net = LanguageModel(rng, VOCABULARY, ms.float32)
    optimizer = RUNS[name].optimizer(net, cosine(rate, steps))
    step = nn.TrainOneStepCell(net, optimizer)
    validation = np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int)
    parts = [windows(held_back, part) for part in np.split(validation, VALIDATED // BATCH)]
    losses = {}
    with tqdm(total=steps, desc=f"{name}, {rate:g}, seed {seed}".ljust(34), unit="step") as bar:
        for i in range(1, steps + 1):
            step(*windows(text, rng.integers(0, len(text) - CONTEXT, BATCH)))
            if i % math.ceil(steps / POINTS) == 0 or i == steps:
                losses[i] = float(np.mean([net(*part).asnumpy() for part in parts]))
                bar.set_postfix(validation=f"{losses[i]:.3f}", refresh=False)
            bar.update()
    return losses, bytes_of(optimizer.states) / sum(p.size for p in net.trainable_params())


def draw(curves, path):
    """Plot the mean loss by step."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for name, (losses, size) in curves.items():
        steps, mean = list(losses[0]), np.mean([list(run.values()) for run in losses], 0)
        label = f"{name}: {mean[-1]:.3f}, states of {size:.1f} bytes a parameter"
        axes.plot(steps, mean, color=RUNS[name].color, linewidth=1.8, label=label)
        axes.plot(steps[-1], mean[-1], "o", color=RUNS[name].color)
    axes.set(xlabel="step", ylabel="cross entropy of a word", title="Validation loss")
    save(figure, axes, path)


def prepare():
    """Set what a process that trains needs."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute


def train_apart(*settings):
    """Train in a process of its own: MindSpore keeps the graphs of a process, of each network more than 1 GB."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as pool:
        return pool.submit(train, *settings).result()


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs to average over")
    parser.add_argument("--tune", action="store_true", help="tune the learning rates first")
    parser.add_argument("--output", default="words.png", help="file of the plot")
    arguments = parser.parse_args()

    console, names = Console(), arguments.optimizer
    rates = {name: RUNS[name].rate for name in names}
    if arguments.tune:

        def loss_of(name, rate):
            return last(train_apart(name, rate, arguments.steps, TUNING_SEED)[0])

        rates = tune(console, names, TRIED, loss_of)
    table = Table("Optimizer", "Learning rate", "Bytes of states a parameter", "Validation loss", "By seed")
    curves = {}
    for name in names:
        runs = [train_apart(name, rates[name], arguments.steps, seed) for seed in range(arguments.seeds)]
        losses, size = [losses for losses, _ in runs], runs[0][1]
        curves[name] = losses, size
        by_seed = [last(each) for each in losses]
        spread = ", ".join(f"{loss:.4f}" for loss in by_seed)
        table.add_row(name, f"{rates[name]:g}", f"{size:.2f}", f"{np.mean(by_seed):.4f}", spread)
    console.print(table)
    draw(curves, arguments.output)
    console.print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
