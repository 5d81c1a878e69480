"""The tasks that train a network: data, network and batch are fixed; an optimizer chooses all else."""

import pathlib
import sys
import zlib

import mindspore as ms
import numpy as np
from mindspore import nn
from training import assign

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import large_batch  # pyright: ignore[reportMissingImports]
from low_precision import (  # pyright: ignore[reportMissingImports]
    CONTEXT,
    Gradients,
    LanguageModel,
    read_text,
    windows,
)
from words import read_words  # pyright: ignore[reportMissingImports]

BATCH, VALIDATED = 8, 128  # windows


class Language:
    """A small Transformer that predicts the next character or word.

    Args:
        text: Training text as numbers.
        held_back: Validation text.
        vocabulary: The number of different characters or words.
        width: Of the network.
    """

    tables = ("characters", "head.weight")  # embedding and output layer
    splits = {"*qkv.weight": 3}  # noqa: RUF012 - read only

    def __init__(self, text, held_back, vocabulary, width):
        self.text, self.shape = text, (vocabulary, ms.float32, width)
        net = LanguageModel(np.random.default_rng(0), *self.shape)
        self.net, self.params = net, net.trainable_params()
        self._gradients = Gradients(net, self.params)
        starts = np.linspace(0, len(held_back) - CONTEXT - 1, VALIDATED).astype(int)
        self.validation = [windows(held_back, part) for part in np.split(starts, VALIDATED // BATCH)]
        self.data = fingerprint(text, held_back)

    def reset(self, seed):
        """Draw the first weights."""
        fresh = LanguageModel(np.random.default_rng(seed), *self.shape).trainable_params()
        assign(self.params, [p.asnumpy() for p in fresh])

    def gradients(self, seed, step):
        """Return the gradients of a batch, in the order of params."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.text) - CONTEXT, BATCH)
        return self._gradients(*windows(self.text, starts))[1]

    def loss(self):
        """Return the cross entropy of the validation windows."""
        return float(np.mean([self.net(*part).asnumpy() for part in self.validation]))


class Digits:
    """Handwritten digits in batches of half of all images: data and network of examples/large_batch.py.

    The loss is that of all training images. On others it soon stops to fall, and noise would decide.
    """

    batch = 512
    splits = {}  # noqa: RUF012 - read only

    def __init__(self):
        task = self.task = large_batch.Task()
        self.params = task.params
        self._of_batch = Gradients(nn.WithLossCell(task.net, nn.CrossEntropyLoss()), task.params)
        self.tables = (self.params[-2].name,)
        images, labels = task.images[task.train], task.labels[task.train]
        self.data = fingerprint(images, labels)
        self._loss, self._all = nn.CrossEntropyLoss(), (ms.Tensor(images), ms.Tensor(labels))

    def reset(self, seed):
        """Draw the first weights as He et al. do."""
        rng = np.random.default_rng(seed)
        spread = [np.sqrt(2 / p.shape[-1]) if p.ndim == 2 else 0.0 for p in self.params]
        assign(self.params, [rng.normal(0.0, s, p.shape).astype(np.float32) for s, p in zip(spread, self.params)])

    def gradients(self, seed, step):
        """Return the gradients of a batch: each epoch draws a new order, and leaves out what fills no batch."""
        each = len(self.task.train) // self.batch
        order = np.random.default_rng([seed, step // each]).permutation(self.task.train)
        chosen = order[step % each * self.batch :][: self.batch]
        return self._of_batch(ms.Tensor(self.task.images[chosen]), ms.Tensor(self.task.labels[chosen]))[1]

    def loss(self):
        """Return the cross entropy of all training images."""
        images, labels = self._all
        return float(self._loss(self.task.net(images), labels).asnumpy())


def fingerprint(*arrays):
    """Return what tells other data: the text of another Python, for example."""
    return f"{zlib.crc32(b''.join(np.ascontiguousarray(a).tobytes() for a in arrays)):08x}"


def characters():
    """Return the language model of about 1 million parameters, on characters of the language reference."""
    return Language(*read_text(), width=208)


def words():
    """Return the embedding with Zipf's rows: words of the standard library, most of them rare, in a narrow network."""
    vocabulary = 2048
    text, held_back = (np.minimum(part, vocabulary - 1) for part in read_words())
    return Language(text, held_back, vocabulary, width=32)


NETWORKS = {"characters": characters, "words": words, "digits": Digits}
