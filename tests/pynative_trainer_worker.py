"""Runs the PyNative trainer of MindFormers 2 on a CPU, once for each run, and records what came of it.

    python pynative_trainer_worker.py runs.json

A run is a dict: `yaml`, the content of a YAML file; `record`, where the record goes. It holds the loss of each step
and the weights and states after the last, or the error that ended the run.
"""

import json
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import hyper_parallel_stand_in  # noqa: F401 - must come before MindFormers
import mindspore as ms
import numpy as np
import yaml
from mindformers.pynative.callback import TrainerCallback
from mindformers.pynative.layers import flash_attention, layer_norm
from mindformers.pynative.optimizer import muon
from mindformers.pynative.trainer import Trainer
from mindspore import Tensor, mint, nn, ops
from reference.muon import orthogonalized
from runtime import spare_threads


class Recorder(TrainerCallback):
    """Keeps the losses."""

    def __init__(self):
        self.losses = []

    def on_step_end(self, args, state, **kwargs):
        self.losses.append(float(kwargs["loss"].asnumpy()))


def normal_(self, mean=0.0, std=1.0, *, generator=None):
    drawn = np.random.default_rng(self.size).normal(mean, std, self.shape)
    return self.copy_(Tensor(drawn.astype(np.float32)).astype(self.dtype))


def fill_(self, value):
    return self.copy_(ops.full(self.shape, value, dtype=self.dtype))


def rms_norm(x, gamma, epsilon=1e-6):
    scale = ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + epsilon)
    return x * scale * gamma, scale


class Attention:
    """Of queries, keys and values of shape (batch, heads, length, size), on the places that the mask leaves.

    The first output is the largest logit of each row.
    """

    def __init__(self, *, scale_value, **_):
        self.scale = scale_value

    def __call__(self, *, query, key, value, attn_mask, **_):
        scores = ops.matmul(query, key.swapaxes(2, 3)) * self.scale - 1e4 * ops.cast(attn_mask, ms.float32)
        return ops.amax(scores, -1, True), None, None, ops.matmul(ops.softmax(scores, -1), value)


def keep_largest(self, largest, dims):
    """Keep the largest logit of each head; a CPU does not write into a view of the buffer."""
    self.max_logits_val.copy_(ops.maximum(self.max_logits_val, ops.stop_gradient(ops.amax(largest, dims))))


def iterated(x, rows, columns, eps, steps, coefficients, product):
    """Do the iterations of Muon in float64: a CPU has no product of bfloat16 numbers."""
    matrix = x.asnumpy().astype(np.float64)
    return Tensor(orthogonalized(matrix, coefficients).astype(np.float32))


# Functions of mindspore.mint.
FUNCTIONS = {
    "addcmul": lambda x, a, b, *, value=1: x + value * a * b,
    "arange": lambda n, *, dtype=None: Tensor(np.arange(n), dtype),
    "full": lambda size, value, *, dtype=None: ops.full(size, value, dtype=dtype),
    "index_select": lambda x, dim, index: ops.gather(x, index, dim),
    "ones_like": lambda x: ops.ones(x.shape, x.dtype),
    "outer": lambda a, b: a.reshape(-1, 1) * b.reshape(1, -1),
    "scatter_add": lambda x, dim, index, source: ops.tensor_scatter_elements(x, index, source, dim, "add"),
    "stack": lambda tensors, dim=0: ops.stack(tensors, dim),
    "tril": lambda x, diagonal=0: Tensor(np.tril(x.asnumpy(), diagonal)),
    "zeros_like": lambda x, *, dtype=None: ops.zeros(x.shape, dtype or x.dtype),
}


def run_on_cpu():
    """Replace what MindSpore 2.10 has on Ascend alone."""
    to_empty = nn.Cell.to_empty
    nn.Cell.to_empty = lambda self, *, device=None, recurse=True: to_empty(self, device="CPU", recurse=recurse)
    # Tensor.mul_ writes nothing on a CPU.
    Tensor.mul_ = lambda self, factor: self.copy_(self * factor)
    Tensor.normal_, Tensor.fill_, Tensor.zero_ = normal_, fill_, lambda self: fill_(self, 0.0)
    for name, function in FUNCTIONS.items():
        setattr(mint, name, function)
    layer_norm.rms_norm, flash_attention.FlashAttentionScore = rms_norm, Attention
    flash_attention.FlashAttention._update_max_logits = keep_largest
    muon._enable_muon_cube_math_type, muon.newton_schulz = lambda: None, iterated


def main(path):
    run_on_cpu()
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    spare_threads()
    for run in json.loads(pathlib.Path(path).read_text()):
        recorder, record = Recorder(), {}
        try:
            pathlib.Path("run.yaml").write_text(yaml.safe_dump(run["yaml"]))
            trainer = Trainer("run.yaml", callbacks=[recorder])
            trainer.train()
            record["losses"] = recorder.losses
            record["optimizer"] = type(trainer.optimizer).__name__
            record |= {name: p.asnumpy() for name, p in trainer.optimizer.parameters_dict().items()}
        except Exception as error:  # what ended it is what is asked for
            traceback.print_exc()
            record["error"] = f"{type(error).__name__}: {error}"
        np.savez(run["record"], **record)


if __name__ == "__main__":
    main(*sys.argv[1:])
