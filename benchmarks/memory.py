"""Compares the bytes that `python -m ms_optim plan` counts with those that a process holds.

Each row runs in a separate process. It creates GPT-2 small's parameters, gradients and an optimizer, takes a few steps,
and reports the increase of its resident memory since its imports and a step of a small optimizer.

    python benchmarks/memory.py
    python benchmarks/memory.py --optimizer Lion --dtype float32
"""

import argparse
import json
import subprocess
import sys

LAYER = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), *[(768,)] * 4]
SHAPES = [(50257, 768), (1024, 768), *LAYER * 12, (768,), (768,)]
ROWS = [
    {},
    {"master_weights": "split"},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "8bit"},
    {"master_weights": "split8", "state_dtype": "8bit"},
    {"master_weights": "split8", "state_dtype": "4bit"},
]


def resident_bytes():
    """Return the process's resident memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def work(optimizer, dtype, options):
    """Take steps with one optimizer; print the bytes as JSON."""
    import mindspore as ms
    import numpy as np
    from mindspore import Parameter, Tensor
    from mindspore.common.initializer import initializer

    import ms_optim
    from ms_optim.arguments.options import Options
    from ms_optim.cli.plan import DTYPES, Weight, plan

    cls, dtype = getattr(ms_optim, optimizer), DTYPES[dtype]
    # What MindSpore and the kernels set up once is no memory of an optimizer.
    small = Parameter(Tensor(np.ones(4096), dtype), name="small")
    cls([small], 1e-3, **options)((Tensor(np.ones(4096), dtype),))
    planned = plan(cls, [Weight(shape, dtype, str(i)) for i, shape in enumerate(SHAPES)], Options(**options), "CPU")
    before = resident_bytes()
    params = [Parameter(initializer("normal", shape, dtype), name=str(i)) for i, shape in enumerate(SHAPES)]
    made = cls(params, 1e-3, weight_decay=0.1, **options)
    gradients = tuple(initializer("normal", shape, dtype).init_data() for shape in SHAPES)
    for _ in range(3):
        made(gradients)
    ms.runtime.synchronize()
    print("RESULT", json.dumps({"planned": planned.total, "measured": resident_bytes() - before}))


def main():
    """Run all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.optimizer, arguments.dtype, arguments.work)
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{arguments.optimizer}, GPT-2 small, {arguments.dtype} weights", title_justify="left")
    for heading in ("options", "planned", "measured", "÷ planned", "bytes a parameter"):
        table.add_column(heading, justify="left" if heading == "options" else "right")
    count = 124_439_808
    for options in ROWS:
        if arguments.dtype == "float32" and "master_weights" in options:
            continue
        command = [sys.executable, __file__, "--optimizer", arguments.optimizer, "--dtype", arguments.dtype]
        done = subprocess.run([*command, "--work", json.dumps(options)], capture_output=True, text=True, check=False)
        answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not answers:
            sys.exit(f"{options} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(answers[0])
        planned, measured = found["planned"], found["measured"]
        said = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "-"
        numbers = (f"{planned / 1e9:.3f} GB", f"{measured / 1e9:.3f} GB", f"{measured / planned:.3f}")
        table.add_row(said, *numbers, f"{measured / count:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
