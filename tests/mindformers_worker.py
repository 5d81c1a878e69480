"""Runs MindFormers' trainer on a CPU, once for each of the runs asked for, and records what came of it.

    python mindformers_worker.py runs.json

A run is a dict: `yaml`, the content of a YAML file; `record`, where the record goes. It holds the loss of each step and
the weights and states after the last, or the error that ended the run.

MindFormers trains on Ascend: what a CPU has no operator for is replaced here, in its network and in its check for
overflow. Nothing is replaced around the optimizer.
"""

import json
import pathlib
import sys
import traceback
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import yaml
from mindformers import MindFormerConfig, Trainer
from mindformers.core.context.build_context import build_context
from mindformers.core.optim import muon
from mindformers.parallel_core.training_graph.base_models.common.embeddings import rotary_pos_embedding
from mindformers.parallel_core.training_graph.base_models.gpt import gpt_layer_specs
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindformers.parallel_core.training_graph.transformer import norm
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import Callback, Parameter, nn, ops
from runtime import spare_operators


class Outer(nn.Cell):
    def construct(self, a, b):
        return a.reshape(-1, 1) * b.reshape(1, -1)

    def shard(self, *_):
        return self


class Attention(nn.Cell):
    """Of queries, keys and values of shape (length, batch, heads, size), each position's on those the mask leaves.

    Like the one that it replaces it keeps the largest logit of each head, if it is asked to.
    """

    def __init__(self, config, layer_number, *_, **__):
        super().__init__()
        self.is_tracked = bool(config.track_max_attention_logit)
        if self.is_tracked:
            self.max_logits_val = Parameter(ops.zeros(config.num_attention_heads), requires_grad=False)

    def construct(self, q, k, v, mask):
        s, b, _, d = q.shape
        q, k, v = q.transpose(1, 2, 0, 3), k.transpose(1, 2, 3, 0), v.transpose(1, 2, 0, 3)
        scores = ops.matmul(q, k) / d**0.5 - 1e4 * ops.cast(mask, ms.float32)
        if self.is_tracked:
            largest = ops.stop_gradient(ops.amax(scores, (0, 2, 3)))
            ops.assign(self.max_logits_val, ops.maximum(self.max_logits_val, largest))
        return ops.matmul(ops.softmax(scores, -1), v).transpose(2, 0, 1, 3).reshape(s, b, -1)


def overflowed(self, status, gradients):
    finite = ops.ones((), ms.bool_)
    for g in gradients:
        finite = ops.logical_and(finite, ops.isfinite(g).all())
    return ops.logical_not(finite)


def run_on_cpu():
    MFTrainOneStepCell.start_overflow_check = lambda self, before, compute: (ops.zeros((8,), ms.int32), compute)
    MFTrainOneStepCell.get_overflow_status = overflowed
    norm.FusedRMSNorm = norm.RMSNorm
    rotary_pos_embedding.Outer = Outer
    gpt_layer_specs.FlashAttention = Attention
    # A CPU has no product of bfloat16 numbers.
    muon.mstype = SimpleNamespace(float32=ms.float32, bfloat16=ms.float32)
    muon.create_group, muon.get_rank = lambda name, ranks: None, lambda: 0
    VocabParallelEmbedding.construct = lambda self, places: ops.gather(self.weight, places, 0)


class Recorder(Callback):
    """Keeps losses, and at the end weights and states."""

    def __init__(self):
        super().__init__()
        self.record = {"losses": []}

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        self.record["losses"].append(float(outputs[0].asnumpy().reshape(())))

    def on_train_end(self, run_context):
        optimizer = run_context.original_args().optimizer or run_context.original_args().network.optimizer
        self.record["optimizer"] = type(optimizer).__name__
        for _, p in optimizer.parameters_and_names():
            # NumPy has no bfloat16.
            value = p.asnumpy() if p.dtype != ms.bfloat16 else ops.cast(p, ms.float32).asnumpy()
            self.record[p.name] = value


def main():
    run_on_cpu()
    spare_operators()
    for run in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        record = pathlib.Path(run["record"])
        path = record.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(run["yaml"]))
        recorder = Recorder()
        try:
            config = MindFormerConfig(str(path))
            build_context(config)
            Trainer(config, callbacks=[recorder]).train()
        except Exception as error:
            traceback.print_exc()
            recorder.record["error"] = f"{type(error).__name__}: {error}"
        np.savez(record, **recorder.record)


if __name__ == "__main__":
    main()
