"""Train with four simulated workers, dense and with Deep Gradient Compression, and compare the results.

Two tasks: handwritten digits, by accuracy, and a small Transformer on the language reference that ships with Python, by
validation loss. Each worker gets a quarter of every batch. "Dense" is the same optimizer before its first step with
compression: momentum SGD on the mean gradient.
"""

import argparse

import mindspore as ms
import numpy as np
from low_precision import CONTEXT, VALIDATED, Gradients, LanguageModel, read_text, windows
from mindspore import nn
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from ms_optim import DGCMomentum, SimulatedWorkers, WarmUpHoldDecayLR

WORKERS, BATCH, SEEDS = 4, 32, 3
# The paper's ramp, up to the sparsity of the task; all matrices of these small networks are compressed.
RAMP = (0.75, 0.9375, 0.984375)
LEAST = 1024


class Digits:
    """Handwritten digits of 8 by 8 pixels, and a network with two layers of 512 neurons."""

    name, measure, steps = "digits", "test accuracy, %", 600
    learning_rate, momentum, sparsity = 0.05, 0.9, 0.996

    def __init__(self, rng):
        images, labels = load_digits(return_X_y=True)
        split = train_test_split((images / 16).astype(np.float32), labels.astype(np.int32), random_state=0)
        self.train, test, self.labels, self.expected = split
        self.test, self.rng = ms.Tensor(test), rng
        self.net = nn.SequentialCell(nn.Dense(64, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))
        self.loss = nn.WithLossCell(self.net, nn.CrossEntropyLoss())

    def batch(self):
        """Return a worker's part of a batch."""
        chosen = self.rng.integers(0, len(self.train), BATCH // WORKERS)
        return ms.Tensor(self.train[chosen]), ms.Tensor(self.labels[chosen])

    def result(self):
        """Return the accuracy on the test set."""
        return 100 * float((self.net(self.test).asnumpy().argmax(1) == self.expected).mean())


class Text:
    """English text, character by character, and a Transformer of two blocks."""

    name, measure, steps = "text", "validation loss", 800
    # Sent elements lose their momentum, so less momentum is better in such a short run. With a higher sparsity, many
    # elements would never be sent.
    learning_rate, momentum, sparsity = 0.5, 0.5, 0.99

    def __init__(self, rng):
        self.text, held_back, vocabulary = read_text()
        self.rng = rng
        self.loss = self.net = LanguageModel(rng, vocabulary, ms.float32)
        places = np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int)
        self.validation = windows(held_back, places)

    def batch(self):
        """Return a worker's part of a batch."""
        return windows(self.text, self.rng.integers(0, len(self.text) - CONTEXT, BATCH // WORKERS))

    def result(self):
        """Return the validation loss."""
        return float(self.net(*self.validation).asnumpy())


def train(make_task, sparsity, wire_dtype, steps, seed):
    """Train once; return the result, and the bytes that a worker sends in the last step and in a dense one."""
    ms.set_seed(seed)
    task = make_task(np.random.default_rng(seed))
    steps = steps or task.steps
    begin = steps // 10 if sparsity else steps

    def make(params, group):
        rate = WarmUpHoldDecayLR(task.learning_rate, steps // 10, steps // 2, steps)
        return DGCMomentum(
            params,
            rate,
            task.momentum,
            begin,
            steps // 5,
            (*(s for s in RAMP if s < sparsity), sparsity),
            min_compress_numel=LEAST,
            group=group,
            wire_dtype=wire_dtype,
        )

    params = task.net.trainable_params()
    workers = SimulatedWorkers(WORKERS, params, make)
    gradient = Gradients(task.loss, params)
    dense = 4 * sum(p.size for p in params)
    for _ in tqdm(range(steps), desc=f"{task.name}, {'DGC' if sparsity else 'dense'}, seed {seed}", unit="step"):
        workers([gradient(*task.batch())[1] for _ in range(WORKERS)])
    return task.result(), workers.bytes_sent, dense


def main():
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=["digits", "text"], default=["digits", "text"])
    parser.add_argument("--steps", type=int, default=0, help="number of steps; default: the tasks' own")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--sparsity", type=float, nargs="+", help="one or more values instead of the tasks' own")
    parser.add_argument("--wire-dtype", choices=["float32", "float16"], default="float16")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute

    table = Table("Task", "Exchange", "Mean", "By seed", "Bytes a worker sends", "Of dense")
    for make_task in (task for task in (Digits, Text) if task.name in arguments.tasks):
        for sparsity in (0.0, *(arguments.sparsity or [make_task.sparsity])):
            runs = [
                train(make_task, sparsity, arguments.wire_dtype, arguments.steps, seed)
                for seed in range(arguments.seeds)
            ]
            results = [result for result, _, _ in runs]
            _, sent, dense = runs[0]
            table.add_row(
                f"{make_task.name}, {make_task.measure}",
                f"DGC, sparsity {sparsity}" if sparsity else "dense",
                f"{np.mean(results):.3f}",
                ", ".join(f"{result:.3f}" for result in results),
                f"{sent:,}",
                f"1/{dense / sent:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
