"""Train a small convolutional network on handwritten digits, once per optimizer, and compare them in one plot.

It shows the main features of the package: a group of convolutions with gradient centralization, a group without decay
for biases and normalization, a weight decay schedule, and a learning rate that warms up, holds and decays.
"""

import argparse
import contextlib
import pathlib
import time
from collections import OrderedDict

import matplotlib as mpl
import mindspore as ms
import numpy as np
from mindspore import nn
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt
from cycler import cycler

# Suitable settings for each optimizer: Lamb and LANS scale their steps to the weights, and DGCMomentum takes steps of
# momentum SGD. The weight decay of Adam, AdamOffload, Momentum and DGCMomentum is added to the gradient, where a
# hundredth of the decoupled decay has the same effect. Warm-up steps are given as a fraction of all steps.
SETTINGS = {
    "AdamW": {"learning_rate": 4e-3},
    "Lamb": {"learning_rate": 2e-2},
    "LANS": {"learning_rate": 2e-2},
    "AdamOffload": {"learning_rate": 4e-3, "weight_decay": 5e-4},
    "DGCMomentum": {
        "learning_rate": 0.05,
        "weight_decay": 5e-4,
        "momentum": 0.9,
        "rampup_begin_step": 20,
        "rampup_step": 60,
        "sparsity": (0.75, 0.9375, 0.984375),
        "min_compress_numel": 256,
    },
    "Lion": {"learning_rate": 1e-3, "weight_decay": 0.1},
    "AdEMAMix": {"learning_rate": 4e-3, "alpha": 2.0, "warmup_steps": 1.0},
    "ScheduleFreeAdamW": {"learning_rate": 1e-2, "warmup_steps": 0.1},
    "Muon": {"learning_rate": 2e-2, "adamw_names": ("*head*",)},
    "Adam": {"learning_rate": 4e-3, "weight_decay": 5e-4},
    "Momentum": {"learning_rate": 0.05, "weight_decay": 5e-4},
}
BATCH = 64
# Colours that differ for everyone, and dashes: curves that coincide show through each other's gaps.
STYLES = cycler(
    color=[
        "#000000",
        "#0072b2",
        "#d55e00",
        "#e69f00",
        "#56b4e9",
        "#009e73",
        "#cc79a7",
        "#7f7f7f",
        "#882255",
        "#999933",
        "#332288",
    ],
    linestyle=[
        "-",
        "-",
        "-",
        (0, (2, 2)),
        (0, (6, 2)),
        "-",
        (0, (1, 1)),
        (0, (5, 1, 1, 1)),
        (0, (9, 2)),
        (0, (3, 3)),
        "-",
    ],
)


class Net(nn.Cell):
    """Two convolutions and a classifier for 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(
            OrderedDict(
                conv1=nn.Conv2d(1, 12, 3),
                norm1=nn.BatchNorm2d(12),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(12, 24, 3, stride=2),
                norm2=nn.BatchNorm2d(24),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                head=nn.Dense(24 * 4 * 4, 10),
            )
        )

    def construct(self, x):
        """Return logits of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        return self.layers(x)


class Recorder(ms.Callback):
    """Records loss and test accuracy, and moves the progress bar."""

    def __init__(self, net, optimizer, test, bar):
        super().__init__()
        self.net, self.optimizer, self.test, self.bar = net, optimizer, test, bar
        self.losses, self.accuracies = [], []

    def on_train_step_end(self, run_context):
        """Record the loss of the batch."""
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))
        self.bar.set_postfix(loss=f"{self.losses[-1]:.3f}", refresh=False)
        self.bar.update()

    def on_train_epoch_end(self, run_context):
        """Measure the accuracy on the test images."""
        images, labels = self.test
        self.net.set_train(False)
        # Schedule-Free evaluates the averaged weights, not the training weights.
        with self.optimizer.averaged() if self.optimizer.averages_iterates else contextlib.nullcontext():
            predicted = self.net(ms.Tensor(images)).asnumpy().argmax(1)
        self.net.set_train(True)
        self.accuracies.append(float((predicted == labels).mean()))


def digits():
    """Return training and test images of shape (n, 1, 8, 8) with their labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    split = train_test_split(images, labels.astype(np.int32), test_size=0.25, random_state=0, stratify=labels)
    return (split[0], split[2]), (split[1], split[3])


def train(name, epochs, seed, folder):
    """Train one network; return losses, accuracies and seconds."""
    ms.set_seed(seed)
    ms.dataset.config.set_seed(seed)
    train_set, test_set = digits()
    data = ms.dataset.NumpySlicesDataset(train_set, shuffle=True).batch(BATCH, drop_remainder=True)
    steps = epochs * data.get_dataset_size()
    net = Net()
    settings = {"weight_decay": 0.05, **SETTINGS[name]}
    if "warmup_steps" in settings:
        settings["warmup_steps"] = round(settings["warmup_steps"] * steps)
    optimizer_class, rate = getattr(ms_optim, name), settings.pop("learning_rate")
    if not optimizer_class.averages_iterates:
        rate = ms_optim.WarmUpHoldDecayLR(rate, steps // 10, steps // 5, steps)
    optimizer = optimizer_class(
        ms_optim.pattern_groups(net, {"*conv*": {"grad_centralization": True}}, filter_bias_and_norm=True),
        learning_rate=rate,
        weight_decay=ms_optim.LinearWeightDecay(settings.pop("weight_decay"), 0.0, steps),
        **settings,
    )
    model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    with tqdm(total=steps, desc=f"{name:17}", unit="step") as bar:
        callbacks = [Recorder(net, optimizer, test_set, bar)]
        if folder is not None:
            callbacks.append(ms_optim.OptimizerMonitor(every=4, csv=folder / f"{name}.csv", verbose=False))
        start = time.perf_counter()
        model.train(epochs, data, callbacks=callbacks, dataset_sink_mode=False)
        seconds = time.perf_counter() - start
    return callbacks[0].losses, callbacks[0].accuracies, seconds


def draw(results, path):
    """Plot the loss of all optimizers, and their accuracy below it."""
    plt.rcParams.update({"font.size": 11, "axes.prop_cycle": STYLES, "lines.linewidth": 1.6})
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 8.4), sharex=True, layout="constrained")
    for name, (losses, accuracies, _) in results.items():
        steps = np.arange(1, len(losses) + 1) * len(accuracies) / len(losses)
        smooth = np.convolve(losses, np.ones(10) / 10, mode="valid")
        top.plot(steps[len(losses) - len(smooth) :], smooth, label=name)
        bottom.plot(np.arange(1, len(accuracies) + 1), 100 * np.array(accuracies))
    top.set(title="Training loss, mean of 10 steps", ylabel="cross entropy", yscale="log")
    bottom.set(title="Test accuracy", xlabel="epoch", ylabel="%", ylim=(90, 100))
    bottom.axhline(97, color="grey", linewidth=1.2, linestyle=":")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    """Train, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="train.png", help="file of the plot")
    parser.add_argument(
        "--monitor", type=pathlib.Path, metavar="FOLDER", help="write a CSV file for each optimizer into this folder"
    )
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if arguments.mode == "graph" else ms.PYNATIVE_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    results = {name: train(name, arguments.epochs, arguments.seed, arguments.monitor) for name in arguments.optimizer}
    table = Table("Optimizer", "Test accuracy", "Seconds")
    for name, (_, accuracies, seconds) in results.items():
        table.add_row(name, f"{accuracies[-1]:.2%}", f"{seconds:.1f}")
    console = Console()
    console.print(table)
    draw(results, arguments.output)
    console.print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
