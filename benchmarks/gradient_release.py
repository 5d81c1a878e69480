"""Measures the memory that gradient release saves in a training step of a Transformer, and its cost in time.

Each variant runs in a separate process, which takes a few steps and reports the increase of its peak resident memory
since before the first step, and the median time of a step. Losses must be bitwise equal.

    python benchmarks/gradient_release.py
    python benchmarks/gradient_release.py --layers 4 --optimizer Lion --passes 2
    python benchmarks/gradient_release.py --parts
    python benchmarks/gradient_release.py --dtype bfloat16 --master-weights split8 --state-dtype 8bit
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

WIDTH, HEADS, VOCABULARY = 768, 12, 8192
PARTS = ("passes alone", "passes, empty hooks")
MASTER_WEIGHTS = {"float32": True, "split": "split", "split8": "split8", "none": False}


def peak_bytes():
    """Return the process's peak resident memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def transformer(layers, dtype):
    """Return a decoder that returns its loss; its arithmetic is float32 for every dtype of its parameters."""
    import mindspore as ms
    from mindspore import Parameter, nn, ops

    rng = np.random.default_rng(0)

    class Affine(nn.Cell):
        def __init__(self, n_in, n_out):
            super().__init__()
            weight = rng.standard_normal((n_out, n_in), np.float32) / n_in**0.5
            self.weight = Parameter(ms.Tensor(weight).astype(dtype))
            self.bias = Parameter(ops.zeros((n_out,), dtype))

        def construct(self, x):
            return ops.dense(x, ops.cast(self.weight, ms.float32), ops.cast(self.bias, ms.float32))

    class Norm(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gamma, self.beta = Parameter(ops.ones((WIDTH,), dtype)), Parameter(ops.zeros((WIDTH,), dtype))
            self.norm = ops.LayerNorm(-1, -1, 1e-5)

        def construct(self, x):
            return self.norm(x, ops.cast(self.gamma, ms.float32), ops.cast(self.beta, ms.float32))[0]

    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = Norm(), Norm()
            self.qkv, self.merge = Affine(WIDTH, 3 * WIDTH), Affine(WIDTH, WIDTH)
            self.widen, self.narrow = Affine(WIDTH, 4 * WIDTH), Affine(4 * WIDTH, WIDTH)

        def construct(self, x):
            batch, length, _ = x.shape
            q, k, v = (
                part.reshape(batch, length, HEADS, -1).swapaxes(1, 2)
                for part in ops.split(self.qkv(self.norm1(x)), WIDTH, -1)
            )
            scores = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) / (WIDTH // HEADS) ** 0.5)
            x = x + self.merge(ops.matmul(scores, v).swapaxes(1, 2).reshape(batch, length, WIDTH))
            return x + self.narrow(ops.relu(self.widen(self.norm2(x))))

    class Decoder(nn.Cell):
        def __init__(self):
            super().__init__()
            words = 0.02 * rng.standard_normal((VOCABULARY, WIDTH), np.float32)
            self.words = Parameter(ms.Tensor(words).astype(dtype))
            self.blocks = nn.SequentialCell([Block() for _ in range(layers)])
            self.norm, self.head = Norm(), Affine(WIDTH, VOCABULARY)

        def construct(self, text):
            x = ops.gather(ops.cast(self.words, ms.float32), text[:, :-1], 0)
            x = self.head(self.norm(self.blocks(x)))
            return ops.cross_entropy(x.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    return Decoder()


def work(arguments):
    """Train one variant; print the measurements as JSON."""
    import mindspore as ms

    import ms_optim

    ms.set_context(mode=ms.PYNATIVE_MODE)
    net = transformer(arguments.layers, getattr(ms, arguments.dtype))
    options = {"grad_clip_norm": 1.0} if arguments.passes == 2 else {}
    options |= {"state_dtype": arguments.state_dtype, "master_weights": MASTER_WEIGHTS[arguments.master_weights]}
    optimizer = getattr(ms_optim, arguments.optimizer)(net.trainable_params(), 1e-4, weight_decay=0.1, **options)
    rng = np.random.default_rng(0)
    texts = [
        ms.Tensor(rng.integers(0, VOCABULARY, (arguments.batch, arguments.length + 1)), ms.int32) for _ in range(9)
    ]
    if arguments.work == "released":
        step = ms_optim.ReleasedTrainStep(net, None, optimizer, arguments.passes)
    else:
        if arguments.work == "passes, empty hooks":
            element = ms.ops.zeros((1,), optimizer.parameters[0].dtype)
            for p in optimizer.parameters:
                p.register_hook(lambda gradient: element)
        forward_and_backward = ms.value_and_grad(net, None, optimizer.parameters)

        def step(text):
            loss, gradients = forward_and_backward(text)
            if arguments.work == "ordinary":
                optimizer(gradients)
            return loss

    # The states are there before the first step, and have no memory yet.
    held = sum(p.nbytes for p in optimizer.get_parameters())
    before, losses, seconds = peak_bytes(), [], []
    for text in texts:
        start = time.perf_counter()
        losses.append(float(step(text).asnumpy()))
        ms.runtime.synchronize()
        seconds.append(time.perf_counter() - start)
    count = sum(p.size for p in optimizer.parameters)
    gradients = sum(p.nbytes for p in optimizer.parameters)
    found = {"losses": losses, "seconds": statistics.median(seconds[2:]), "peak": peak_bytes() - before}
    print("RESULT", json.dumps({**found, "parameters": count, "held": held, "gradients": gradients}))


def main():
    """Run both variants in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=13, help="number of layers; 13 layers have 105 million parameters"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the parameters")
    parser.add_argument("--master-weights", choices=MASTER_WEIGHTS, default="float32")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "8bit"], default="float32")
    parser.add_argument("--passes", type=int, choices=[1, 2], default=1, help="2: with grad_clip_norm")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--parts", action="store_true", help="also time the passes alone, and with hooks that update nothing"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return

    from rich.console import Console
    from rich.table import Table

    found = {"ordinary": [], "released": []} | ({way: [] for way in PARTS} if arguments.parts else {})
    for _ in range(arguments.turns):
        for way, results in found.items():
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--work", way], capture_output=True, text=True, check=False
            )
            answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not answers:
                sys.exit(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            results.append(json.loads(answers[0]))
    losses = {tuple(one["losses"]) for way in ("ordinary", "released") for one in found[way]}
    if len(losses) != 1:
        sys.exit(f"wrong: losses differ: {losses}")
    first = found["ordinary"][0]
    count, gradients = first["parameters"], first["gradients"]
    peaks = {way: statistics.median(one["peak"] for one in results) for way, results in found.items()}
    table = Table(
        title=f"{arguments.optimizer}, {count / 1e6:.0f} million {arguments.dtype} parameters", title_justify="left"
    )
    for heading in ("step", "peak above the start", "seconds a step", "÷ ordinary"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for way, results in found.items():
        seconds = statistics.median(one["seconds"] for one in results)
        ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(found["ordinary"], results))
        table.add_row(way, f"{peaks[way] / 1e9:.3f} GB", f"{seconds:.3f}", f"{ratio:.2f}")
    console = Console(width=100)
    console.print(table)
    saved = (peaks["ordinary"] - peaks["released"]) / gradients
    held = [(first["held"] + more) / count for more in (gradients, 0)]
    console.print(
        f"The peak falls by {saved:.0%} of the gradients' {gradients / 1e9:.3f} GB; losses are equal to the bit.\n"
        f"Weights, masters and states are {held[1]:.2f} bytes a parameter, with all gradients {held[0]:.2f}."
    )


if __name__ == "__main__":
    main()
