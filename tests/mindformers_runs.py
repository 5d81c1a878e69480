"""What the tests with MindFormers' trainers share: a tiny Qwen3, its data, and how a worker is run."""

import copy
import functools
import os
import subprocess
import sys

import numpy as np
from mindspore.mindrecord import FileWriter
from sources import TESTS

LENGTH, VOCABULARY = 32, 128
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "seq_length": LENGTH,
    "use_flash_attention": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    **{f"{what}_dtype": "float32" for what in ("params", "compute", "layernorm_compute", "softmax_compute", "rotary")},
}

# Latent attention, in dense layers alone; the experts are in none of them.
LATENT = {key: value for key, value in QWEN3.items() if key not in ("qk_layernorm", "head_dim")}
LATENT |= {
    "model_type": "deepseek_v3",
    "multi_latent_attention": True,
    "use_flash_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "moe_grouped_gemm": True,
}
LARGEST_LOGIT = 2e-4  # a threshold which the untrained network's logits exceed


def merged(*configs):
    """Return configurations over each other, section by section."""
    result = {}
    for config in configs:
        for key, value in config.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return copy.deepcopy(result)


def write_tokens(path, columns, count):
    """Write sequences in which each token follows from the one before: whole, or as inputs and labels."""
    rng = np.random.default_rng(0)
    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema({name: {"type": "int32", "shape": [-1]} for name in columns}, "tokens")
    for start in rng.integers(VOCABULARY - 3, size=count):
        tokens = ((start + np.arange(LENGTH + 1)) % (VOCABULARY - 3) + 3).astype(np.int32)
        parts = [tokens] if len(columns) == 1 else [tokens[:-1], tokens[1:]]
        writer.write_raw_data([dict(zip(columns, parts))])
    writer.commit()


@functools.cache
def folder_of_optimizers():
    """Ask the command line for it, as users do."""
    command = [sys.executable, "-m", "ms_optim", "mindformers-path"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_worker(worker, folder, *arguments):
    """Run a program of this folder as MindFormers is started: the environment names the folder of the optimizers."""
    return subprocess.run(
        [sys.executable, str(TESTS / worker), *arguments],
        cwd=folder,
        env={**os.environ, "REGISTER_PATH": folder_of_optimizers(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
