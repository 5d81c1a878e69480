"""What tests of local steps and the processes that these start agree on, and a second reading of the wire."""

import math

import numpy as np
from harness import tensor
from mindspore import Parameter

from ms_optim import AdamW, LocalSteps, Quantized, SparseTopK

SHAPES = [(), (1,), (7,), (4097,), (13, 11), (6, 4, 3, 3), (9, 5), (97, 101)]
RATE, DECAY = 0.01, 0.1
SPARSE = {"outer_learning_rate": 0.9, "outer_momentum": 0.0}


def start():
    rng = np.random.default_rng(0)
    return [np.asarray(rng.standard_normal(s) * (s != (9, 5)), np.float32) for s in SHAPES]


def gradients(step, worker):
    rng = np.random.default_rng([1, step, worker])
    return [np.asarray(rng.standard_normal(s), np.float32) for s in SHAPES]


def made(params, every, optimizer=AdamW, inner=None, **arguments):
    return LocalSteps(optimizer(params, RATE, weight_decay=DECAY, **(inner or {})), every, **arguments)


def parameters(dtype="float32"):
    return [Parameter(tensor(w, dtype), name=f"w{i}") for i, w in enumerate(start())]


def tensors(drawn, dtype="float32"):
    return tuple(tensor(g, dtype) for g in drawn)


# What processes run, and simulated workers beside them: 12 steps, exchanged every 4th.
EVERY, STEPS = 4, 12
RUNS = {
    "dense": {},
    "dense, fragments": {"fragments": 2, "nesterov": False},
    "sparse": {**SPARSE, "compress": SparseTopK(0.05)},
    "quantized": {"compress": Quantized(4, 1000), "fragments": 4},
}


class Chunk:
    """What was sent of a chunk, read from its bytes by a statement of the format of its own."""

    def __init__(self, wire, elements, compress):
        k = max(1, round(compress.density * elements))
        bits = compress.bits
        head = 4 if bits < 16 else 0
        values = wire[head : head + math.ceil(k * bits / 8)]
        rest = wire[head + values.size :]
        self.elements, self.values = elements, self.read(wire[:head], values, k, bits)
        if k == elements:
            self.places, used = np.arange(elements), 0
        else:
            low_bits = math.floor(math.log2(elements / k))
            low_bytes = math.ceil(k * low_bits / 8)
            flags = np.unpackbits(rest[:low_bytes], bitorder="little")[: k * low_bits].reshape(k, low_bits)
            low = flags @ (1 << np.arange(low_bits)) if low_bits else np.zeros(k, int)
            steps = k + ((elements - 1) >> low_bits)
            high_bytes = math.ceil(steps / 8)
            ones = np.flatnonzero(np.unpackbits(rest[low_bytes : low_bytes + high_bytes], bitorder="little"))
            assert len(ones) == k
            self.places, used = ((ones - np.arange(k)) << low_bits) + low, low_bytes + high_bytes
        self.bytes = -(-(head + values.size + used) // 4) * 4

    @staticmethod
    def read(head, values, k, bits):
        if bits >= 16:
            return values.view({16: np.float16, 32: np.float32}[bits]).astype(np.float64)
        flags = np.unpackbits(values, bitorder="little")[: k * bits].reshape(k, bits)
        numbers = flags @ (1 << np.arange(bits))
        if bits == 2:
            return head.view(np.float16).astype(np.float64)[numbers & 1] * (1 - 2 * (numbers >> 1))
        # A float32 scale times a small whole number is rounded once.
        return (head.view(np.float32)[0] * (numbers - (1 << bits - 1)).astype(np.float32)).astype(np.float64)

    @property
    def dense(self):
        out = np.zeros(self.elements)
        out[self.places] = self.values
        return out


def chunks_of(wire, size, compress):
    """Read the chunks of a tensor from the front of a wire; return them and the bytes behind."""
    found = []
    for begin in range(0, size, compress.chunk):
        chunk = Chunk(wire, min(compress.chunk, size - begin), compress)
        found.append(chunk)
        wire = wire[chunk.bytes :]
    return found, wire
