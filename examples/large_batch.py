"""Train with increasing batch sizes for the same number of epochs, and compare how optimizers keep their accuracy.

This tests the claim of LAMB and LANS on a small scale. A larger batch means fewer steps, so each step must be larger.
All optimizers are tuned in the same way: for each batch size, the same number of learning rates is tried, and the one
with the best accuracy on validation images over all seeds is used. The network, weight decay, warm-up and decay of the
learning rate are the same. The reported accuracy is on test images.
"""

import argparse
import itertools

import matplotlib as mpl
import mindspore as ms
import numpy as np
from mindspore import nn, ops
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt

LAYERS = (64, 128, 128, 128, 128, 10)
WEIGHT_DECAY = 0.01
# The lowest learning rate; each further one is half a decade higher.
LOWEST = {"momentum SGD": 1e-3, "AdamW": 1e-4, "Lamb": 10**-3.5, "LANS": 10**-3.5}
RATES = 7
BATCHES = (32, 128, 512, 1077)  # the last one is all training images


def make(name, params, rates):
    """Make an optimizer with a learning rate for each step."""
    if name == "momentum SGD":
        return nn.Momentum(params, rates, 0.9, WEIGHT_DECAY)
    return getattr(ms_optim, name)(params, rates, weight_decay=WEIGHT_DECAY)


def schedule(peak, steps):
    """Return the learning rate of each step: it rises over a tenth of the steps, then falls linearly towards 0.

    WarmUpHoldDecayLR, the schedule of LANS, has a rate of 0 in the first step, which is too much of a run of ten steps.
    """
    done, warm_up = np.arange(1, steps + 1), max(1, steps // 10)
    return (peak * np.minimum(done / warm_up, (steps + 1 - done) / (steps + 1 - warm_up))).tolist()


class Task:
    """Handwritten digits of 8 by 8 pixels, and a network of five layers without normalization."""

    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
        self.images, self.labels = images, labels
        kept, self.test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
        self.train, self.validation = train_test_split(kept, test_size=0.25, random_state=0, stratify=labels[kept])
        layers = [nn.Dense(n_in, n_out) for n_in, n_out in itertools.pairwise(LAYERS)]
        self.net = nn.SequentialCell(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])
        self.params = self.net.trainable_params()
        loss = nn.WithLossCell(self.net, nn.CrossEntropyLoss())
        self.gradients = ms.jit(ms.value_and_grad(loss, None, self.params))

    def run(self, name, batch, peak, epochs, seed):
        """Train once; return the accuracies on validation and test images, in percent."""
        rng = np.random.default_rng(seed)
        for p in self.params:
            spread = np.sqrt(2 / p.shape[-1]) if p.ndim == 2 else 0.0
            # After p.set_data the compiled gradients would continue to use the old weights (MindSpore 2.10).
            ops.assign(p, ms.Tensor(rng.normal(0.0, spread, p.shape), ms.float32))
        each = len(self.train) // batch
        optimizer = make(name, self.params, schedule(peak, epochs * each))
        for _ in range(epochs):
            for chosen in rng.permutation(self.train)[: each * batch].reshape(each, batch):
                optimizer(self.gradients(ms.Tensor(self.images[chosen]), ms.Tensor(self.labels[chosen]))[1])
        return [self.accuracy(part) for part in (self.validation, self.test)]

    def accuracy(self, part):
        """Return the accuracy on a part of the images, in percent."""
        predicted = self.net(ms.Tensor(self.images[part])).asnumpy().argmax(1)
        return 100 * float((predicted == self.labels[part]).mean())


def tune(task, name, batch, epochs, seeds):
    """Return the learning rate that is best on validation images, and its accuracy on test images for each seed."""
    found = []
    for peak in LOWEST[name] * 10.0 ** (np.arange(RATES) / 2):
        validation, test = zip(*(task.run(name, batch, peak, epochs, seed) for seed in range(seeds)))
        found.append((np.mean(validation), peak, test))
    _, peak, test = max(found)
    return peak, test


def draw(results, path):
    """Plot the accuracy of each optimizer over the batch size, with a dot for each seed."""
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    batches = list(dict.fromkeys(batch for _, batch in results))
    for name in LOWEST:
        accuracies = np.array([results[name, batch][1] for batch in batches])
        (line,) = axes.plot(batches, accuracies.mean(1), marker="o", label=name)
        for seed in range(accuracies.shape[1]):
            axes.plot(batches, accuracies[:, seed], ".", color=line.get_color(), alpha=0.4)
    axes.set(title="The same epochs in fewer, larger batches", xlabel="batch", ylabel="test accuracy, %", xscale="log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    """Train everything, print the table, save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="large_batch.png", help="file of the plot")
    arguments = parser.parse_args()
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute
    task, results = Task(), {}
    if max(arguments.batches) > len(task.train):
        parser.error(f"a batch has at most {len(task.train)} images")
    table = Table("Optimizer", "Batch", "Steps", "Learning rate", "Test accuracy, %", "By seed")
    for name, batch in tqdm([(name, batch) for name in LOWEST for batch in arguments.batches], unit="batch size"):
        peak, test = results[name, batch] = tune(task, name, batch, arguments.epochs, arguments.seeds)
        steps = arguments.epochs * (len(task.train) // batch)
        by_seed = ", ".join(f"{accuracy:.1f}" for accuracy in test)
        table.add_row(name, str(batch), str(steps), f"{peak:.2g}", f"{np.mean(test):.1f}", by_seed)
    console = Console(width=max(100, Console().width))
    console.print(table)
    draw(results, arguments.output)
    console.print(f"Curves in {arguments.output}")


if __name__ == "__main__":
    main()
