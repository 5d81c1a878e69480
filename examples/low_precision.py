"""Train a small Transformer on English text with weights and states in fewer bits, and compare the losses.

The same network, text, batches and learning rates are used seven times: everything in float32; the states in 8-bit or
4-bit codes; the states in bfloat16; the weights in bfloat16 with masters of 24 bits, and the states in 8-bit codes; and
the weights in bfloat16 without masters, rounded stochastically or to nearest. The text is the language reference that
ships with Python, read by character.
"""

import argparse
import math
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import matplotlib as mpl
import mindspore as ms
import numpy as np
from mindspore import Parameter, nn, ops
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib import ticker

BATCH, CONTEXT, VALIDATED = 8, 64, 256
WIDTH, HEADS, BLOCKS = 128, 4, 2
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
POINTS = 16  # of a curve


@dataclass
class Setting:
    """The formats of weights and states in one of the runs."""

    label: str
    color: str
    line: Any = "-"
    weights: Any = ms.float32
    options: dict = field(default_factory=dict)


NO_MASTERS = {"master_weights": False}
SETTINGS = {
    "float32": Setting("float32", "0.8"),
    "8bit": Setting("8-bit states", "#0072b2", options={"state_dtype": "8bit"}),
    "4bit": Setting("4-bit states", "#56b4e9", (0, (6, 2)), options={"state_dtype": "4bit"}),
    "bfloat16": Setting("bfloat16 states", "#009e73", (0, (1, 1)), options={"state_dtype": "bfloat16"}),
    "split8": Setting(
        "bfloat16 weights, split8, 8-bit states",
        "#882255",
        (0, (5, 1, 1, 1)),
        ms.bfloat16,
        {"master_weights": "split8", "state_dtype": "8bit"},
    ),
    "stochastic": Setting(
        "bfloat16 weights, stochastic", "#e69f00", (0, (3, 2)), ms.bfloat16, {**NO_MASTERS, "stochastic_rounding": True}
    ),
    "nearest": Setting("bfloat16 weights, nearest", "#d55e00", "-", ms.bfloat16, NO_MASTERS),
}


class Affine(nn.Cell):
    """A linear layer whose parameters may be bfloat16, while the arithmetic is float32."""

    def __init__(self, rng, n_in, n_out, dtype, scale=1.0):
        super().__init__()
        weight = rng.normal(0.0, scale / math.sqrt(n_in), (n_out, n_in)).astype(np.float32)
        self.weight = Parameter(ms.Tensor(weight).astype(dtype))
        self.bias = Parameter(ops.zeros((n_out,), dtype))
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        """Return (rows, n_out) for (rows, n_in)."""
        return self.matmul(x, ops.cast(self.weight, ms.float32)) + ops.cast(self.bias, ms.float32)


class Norm(nn.Cell):
    """Layer normalization whose parameters may be bfloat16, while the arithmetic is float32."""

    def __init__(self, width, dtype):
        super().__init__()
        self.gamma = Parameter(ops.ones((width,), dtype))
        self.beta = Parameter(ops.zeros((width,), dtype))
        self.norm = ops.LayerNorm(-1, -1, 1e-5)

    def construct(self, x):
        """Return x of mean 0 and variance 1 over its last axis, scaled and shifted."""
        return self.norm(x, ops.cast(self.gamma, ms.float32), ops.cast(self.beta, ms.float32))[0]


class Block(nn.Cell):
    """Causal self-attention and two layers, each with a residual connection."""

    def __init__(self, rng, width, dtype):
        super().__init__()
        self.width = width
        # As in GPT-2: the initial weights of residual branches are scaled down.
        small = 1 / math.sqrt(2 * BLOCKS)
        self.norm1, self.norm2 = Norm(width, dtype), Norm(width, dtype)
        self.qkv = Affine(rng, width, 3 * width, dtype)
        self.merge = Affine(rng, width, width, dtype, small)
        self.widen = Affine(rng, width, 4 * width, dtype)
        self.narrow = Affine(rng, 4 * width, width, dtype, small)
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        # Positions enter only as distances, with a smaller slope for each further head (ALiBi).
        behind = np.arange(CONTEXT)[:, None] - np.arange(CONTEXT)
        slopes = 4.0 ** -np.arange(HEADS)[:, None, None]
        self.bias = ms.Tensor(np.where(behind < 0, -1e9, -slopes * behind), ms.float32)

    def construct(self, x):
        """Return a tensor of shape (batch * CONTEXT, width) for one of the same shape."""
        qkv = self.qkv(self.norm1(x)).reshape(-1, CONTEXT, 3 * HEADS, self.width // HEADS).transpose(0, 2, 1, 3)
        q, k, v = qkv[:, :HEADS], qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS :]
        attention = ops.softmax(self.scores(q, k) * math.sqrt(HEADS / self.width) + self.bias, -1)
        x = x + self.merge(self.mix(attention, v).transpose(0, 2, 1, 3).reshape(-1, self.width))
        return x + self.narrow(ops.relu(self.widen(self.norm2(x))))


class LanguageModel(nn.Cell):
    """A decoder that predicts the next character, with its loss."""

    def __init__(self, rng, vocabulary, dtype, width=WIDTH):
        super().__init__()
        self.width = width
        self.characters = Parameter(ms.Tensor(rng.normal(0, 0.02, (vocabulary, width)), ms.float32).astype(dtype))
        self.blocks = nn.SequentialCell([Block(rng, width, dtype) for _ in range(BLOCKS)])
        self.norm = Norm(width, dtype)
        self.head = Affine(rng, width, vocabulary, dtype)

    def construct(self, text, following):
        """Return the mean cross entropy of what follows each character; both inputs are (batch, CONTEXT)."""
        x = ops.gather(ops.cast(self.characters, ms.float32), text, 0)
        logits = self.head(self.norm(self.blocks(x.reshape(-1, self.width))))
        return ops.cross_entropy(logits, following.reshape(-1))


class Gradients(nn.Cell):
    """The loss of a network and its gradients. As a Cell it runs in a fifth of the time that a bare function takes."""

    def __init__(self, net, params):
        super().__init__()
        self.gradients = ms.value_and_grad(net, None, ms.ParameterTuple(params))

    def construct(self, *batch):
        """Return them for a batch."""
        return self.gradients(*batch)


def read_text():
    """Return training and validation characters as numbers, and the size of the vocabulary.

    Many topics repeat paragraphs of others. Repeated paragraphs are omitted, so that no validation text is in the
    training text.
    """
    seen, parts = set(), ([], [])
    for i, topic in enumerate(sorted(topics)):
        for paragraph in topics[topic].split("\n\n"):
            if paragraph not in seen:
                seen.add(paragraph)
                parts[i % 8 == 7].append(paragraph)
    texts = ["\n\n".join(part) for part in parts]
    number = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    train, validation = (np.array([number[character] for character in text], np.int32) for text in texts)
    return train, validation, len(number)


def windows(text, starts):
    """Return characters from each start, and those that follow them, as tensors of shape (starts, CONTEXT)."""
    places = np.asarray(starts)[:, None] + np.arange(CONTEXT)
    return ms.Tensor(text[places]), ms.Tensor(text[places + 1])


def bytes_of(parameters):
    """Return the number of bytes of parameters."""
    return sum(p.size * p.itemsize for p in parameters)


def train(setting, steps, seed):
    """Train one network; return its validation losses by step, and bytes of weights and states per parameter."""
    # The seed of stochastic rounding.
    ms.set_seed(seed)
    text, held_back, vocabulary = read_text()
    rng = np.random.default_rng(seed)
    net = LanguageModel(rng, vocabulary, setting.weights)
    optimizer = ms_optim.AdamW(
        ms_optim.no_decay_groups(net, WEIGHT_DECAY),
        learning_rate=ms_optim.WarmUpHoldDecayLR(LEARNING_RATE, steps // 10, 0, steps),
        **setting.options,
    )
    step = nn.TrainOneStepCell(net, optimizer)
    validation = windows(held_back, np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int))
    losses = {}
    with tqdm(total=steps, desc=f"{setting.label:30}", unit="step") as bar:
        for i in range(1, steps + 1):
            loss = step(*windows(text, rng.integers(0, len(text) - CONTEXT, BATCH)))
            if i % math.ceil(steps / POINTS) == 0 or i == steps:
                losses[i] = float(net(*validation).asnumpy())
                bar.set_postfix(train=f"{float(loss.asnumpy()):.3f}", validation=f"{losses[i]:.3f}", refresh=False)
            bar.update()
    count = sum(p.size for p in net.trainable_params())
    held = (*optimizer.states, *optimizer.scales, *optimizer.masters)
    return losses, bytes_of(net.trainable_params()) / count, bytes_of(held) / count


def draw(steps, curves, path):
    """Plot the losses, and below them the difference from the loss in float32."""
    plt.rcParams.update({"font.size": 11})
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 8.8), sharex=True, layout="constrained")
    for name, losses in curves.items():
        setting, above = SETTINGS[name], 100 * (losses / curves["float32"] - 1)
        if name == "float32":
            # Wide and pale, to be visible behind the curves that coincide with it.
            style = {"color": setting.color, "linewidth": 6, "label": setting.label}
        else:
            style = {
                "color": setting.color,
                "linestyle": setting.line,
                "linewidth": 1.8,
                "label": f"{setting.label}: {above[:, -1].mean():+.2f} %",
            }
        top.plot(steps, losses.mean(0), **style)
        bottom.plot(steps, above.mean(0), **style)
    top.set(title="Validation loss", ylabel="cross entropy of a character", yscale="log")
    top.yaxis.set_major_locator(ticker.MultipleLocator(0.2))
    top.yaxis.set_major_formatter("{x:.1f}")
    top.yaxis.set_minor_locator(ticker.NullLocator())
    bottom.set(title="Validation loss above that of float32", xlabel="step", ylabel="%")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, handlelength=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save(figure, axes, path):
    """Save a plot with one pair of axes and a legend."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs to average over")
    parser.add_argument("--output", default="low_precision.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if arguments.mode == "graph" else ms.PYNATIVE_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    results = {name: [] for name in dict.fromkeys(["float32", *arguments.setting])}
    for seed in range(arguments.seeds):
        for name, found in results.items():
            found.append(train(SETTINGS[name], arguments.steps, seed))
    curves = {name: np.array([list(losses.values()) for losses, _, _ in found]) for name, found in results.items()}

    # Results differ more between seeds than between settings, so each run is compared with the float32 run of the same
    # seed.
    spread = " (by seed)" if arguments.seeds > 1 else ""
    table = Table("Setting", "Validation loss", f"Against float32{spread}", "Bytes of weights", "Bytes of states")
    for name, found in results.items():
        ratios = curves[name][:, -1] / curves["float32"][:, -1]
        by_seed = f" ({', '.join(f'{ratio:.4f}' for ratio in ratios)})" if arguments.seeds > 1 else ""
        _, weights, states = found[0]
        table.add_row(
            SETTINGS[name].label,
            f"{curves[name][:, -1].mean():.4f}",
            f"{ratios.mean():.4f}{by_seed}",
            f"{weights:.2f}",
            f"{states:.2f}",
        )
    console = Console()
    console.print(table)
    console.print("Bytes are per parameter.")
    draw(list(results["float32"][0][0]), curves, arguments.output)
    console.print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
