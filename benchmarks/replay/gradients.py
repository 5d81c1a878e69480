"""Gradients of a small Transformer on English text, recorded once for all optimizers that are compared."""

import pathlib
import sys

import mindspore as ms
import numpy as np
from mindspore import nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

from low_precision import (  # pyright: ignore[reportMissingImports]
    BATCH,
    CONTEXT,
    Gradients,
    LanguageModel,
    read_text,
    windows,
)

WIDTH = 32
SEED = 0


def record(steps):
    """Train with MindSpore's own Adam; return the first weights by name, and the gradients of each step.

    All optimizers get the same gradients, whatever weights they have made: differences of rules do not grow by what the
    network makes of them.
    """
    rng = np.random.default_rng(SEED)
    text, _, vocabulary = read_text()
    net = LanguageModel(rng, vocabulary, ms.float32, WIDTH)
    params = net.trainable_params()
    first = {p.name: p.asnumpy().copy() for p in params}
    optimizer, gradients = nn.Adam(params, 2e-3), Gradients(net, params)
    recorded = []
    for _ in range(steps):
        _, given = gradients(*windows(text, rng.integers(0, len(text) - CONTEXT - 1, BATCH)))
        recorded.append([g.asnumpy().copy() for g in given])
        optimizer(given)
    return first, recorded
