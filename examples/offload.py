"""Train a small Transformer with its optimizer's states on the device and in host memory, and plot the memory use.

It uses the network, text and batches of low_precision.py, without weight decay. Then AdamW and AdamOffload are the same
rule except for the position of epsilon, and their losses must agree. Memory on device and host is counted for an
Ascend, from the tensors that the optimizers created. On a CPU, device and host share one memory, and nothing is
transferred.
"""

import argparse

import matplotlib as mpl
import mindspore as ms
import numpy as np
from low_precision import BATCH, CONTEXT, LanguageModel, bytes_of, read_text, windows
from mindspore import nn
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

LEARNING_RATE = 1e-3
# Optimizer, dtype of the weights, options.
SETTINGS = {
    "AdamW": ("AdamW", ms.float32, {}),
    "AdamW, 8-bit states": ("AdamW", ms.float32, {"state_dtype": "8bit"}),
    "AdamOffload": ("AdamOffload", ms.float32, {}),
    "AdamW, bfloat16 weights": ("AdamW", ms.bfloat16, {}),
    "AdamOffload, bfloat16 weights": ("AdamOffload", ms.bfloat16, {}),
}
KINDS = {"weights": "#0072b2", "gradients": "#56b4e9", "masters": "#e69f00", "moments": "#d55e00"}


def train(label, steps, seed):
    """Train one network; return its losses, the MB held by kind, and the MB transferred in a step."""
    name, dtype, options = SETTINGS[label]
    ms.set_seed(seed)
    text, _, vocabulary = read_text()
    rng = np.random.default_rng(seed)
    net = LanguageModel(rng, vocabulary, dtype)
    rate = ms_optim.WarmUpHoldDecayLR(LEARNING_RATE, steps // 10, 0, steps)
    optimizer = getattr(ms_optim, name)(net.trainable_params(), rate, **options)
    step = nn.TrainOneStepCell(net, optimizer)
    batches = tqdm(range(steps), desc=f"{label:30}", unit="step")
    losses = [float(step(*windows(text, rng.integers(0, len(text) - CONTEXT, BATCH))).asnumpy()) for _ in batches]
    weights = bytes_of(optimizer.parameters) / 1e6
    held = {
        "weights": weights,
        "gradients": weights,
        "masters": bytes_of(optimizer.masters) / 1e6,
        "moments": bytes_of([*optimizer.states, *optimizer.scales]) / 1e6,
    }
    return losses, held, crossing(optimizer)


def crossing(optimizer):
    """Return the MB transferred between device and host in a step, in both directions."""
    if not isinstance(optimizer, ms_optim.AdamOffload):
        return 0.0
    report = optimizer.offload_report("Ascend")
    return (report.to_host_bytes + report.to_device_bytes) / 1e6


def on_device(label):
    """Return which of the kinds are on the device."""
    return [kind for kind in KINDS if SETTINGS[label][0] != "AdamOffload" or kind in ("weights", "gradients")]


def draw(results, path):
    """Plot device and host memory as bars."""
    plt.rcParams.update({"font.size": 11})
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for row, (label, (_, held, _)) in enumerate(results.items()):
        for place, at, hatch in (("device", row - 0.2, ""), ("host", row + 0.2, "///")):
            end = 0.0
            for kind, color in KINDS.items():
                if (place == "device") == (kind in on_device(label)):
                    axes.barh(at, held[kind], 0.36, end, color=color, hatch=hatch, edgecolor="white")
                    end += held[kind]
            axes.text(end, at, f" {place} {end:.1f}", va="center", fontsize=10)
    names = [label.replace(", ", ",\n") for label in results]
    axes.set(title="Memory on an accelerator and its host, MB", yticks=range(len(results)), yticklabels=names)
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * axes.get_xlim()[1])
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def at_least_10(text):
    """Return a number of steps: the learning rate warms up in the first tenth of them."""
    if int(text) < 10:
        raise argparse.ArgumentTypeError(f"must be 10 or more, but is {text}")
    return int(text)


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least_10, default=200, help="10 or more; default: 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="offload.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    results = {label: train(label, arguments.steps, arguments.seed) for label in SETTINGS}
    table = Table("Setting", "MB on the device", "MB on the host", "MB transferred per step", "Loss, last 20 steps")
    for label, (losses, held, crosses) in results.items():
        device = sum(held[kind] for kind in on_device(label))
        figures = (device, sum(held.values()) - device, crosses)
        table.add_row(label, *(f"{figure:.2f}" for figure in figures), f"{np.mean(losses[-20:]):.4f}")
    console = Console(width=max(110, Console().width))
    console.print(table)
    draw(results, arguments.output)
    console.print(f"Picture in {arguments.output}")


if __name__ == "__main__":
    main()
