"""Replays published optimizers and this package's on the same recorded gradients, and shows how far weights come apart.

    python benchmarks/replay                                            all that is installed
    python benchmarks/replay --rows torch                               rows whose name starts with this
    python benchmarks/replay --checkout KellerJordan/Muon=../Muon       also code of a repository that lies there
    python benchmarks/replay --json replay.json

The gradients are those of a small Transformer (gradients.py); rows.py and muon_rows.py have the
settings of both sides. A difference is
the largest over all elements, divided by the largest move of any weight since the start. The command fails if a
difference is larger than the row allows.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import sys
from unittest import mock

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the published code is run, not compiled

import mindspore as ms
import numpy as np
from gradients import record
from mindspore import Parameter, Tensor
from muon_rows import MUON_ROWS
from rich.console import Console
from rich.table import Table
from rows import ROWS

STEPS = (1, 20, 200)


def in_torch(make, weights, in_float32=False):
    """Return what takes a step with a torch optimizer, and what reads the weights."""
    import torch  # pyright: ignore[reportMissingImports]

    params = [torch.nn.Parameter(torch.tensor(w)) for w in weights.values()]
    optimizer = make(params)
    if hasattr(optimizer, "train"):  # of schedulefree
        optimizer.train()

    to = torch.Tensor.to

    def to_float32(tensor, *args, **settings):
        wide = {torch.bfloat16: torch.float32}
        return to(tensor, *(wide.get(a, a) for a in args), **{k: wide.get(a, a) for k, a in settings.items()})

    def step(gradients):
        for p, g in zip(params, gradients):
            p.grad = torch.tensor(g)
        if not in_float32:
            return optimizer.step()
        with mock.patch("torch.Tensor.bfloat16", torch.Tensor.float), mock.patch("torch.Tensor.to", to_float32):
            return optimizer.step()

    return step, lambda: [p.detach().numpy().copy() for p in params]


def in_mindspore(make, weights):
    """Return what takes a step with a MindSpore optimizer, and what reads the weights."""
    params = [Parameter(Tensor(w), name=name) for name, w in weights.items()]
    optimizer = make(params)
    return (
        lambda gradients: optimizer(tuple(Tensor(g) for g in gradients)),
        lambda: [p.asnumpy().copy() for p in params],
    )


def in_numpy(make, weights):
    """Return what takes a step by a formula in NumPy, and what reads the weights."""
    arrays = [w.copy() for w in weights.values()]
    return make(arrays), lambda: [a.copy() for a in arrays]


VERSIONS = {"numpy": "formula"}
INSIDE = {"numpy": in_numpy, "mxnet": in_numpy, "mindspore": in_mindspore, "mindformers": in_mindspore}


def differences(row, weights, recorded, folder):
    """Return the difference after each of STEPS."""
    theirs = functools.partial(row.theirs, folder=folder, file=row.file) if row.file else row.theirs
    inside = INSIDE.get(row.needs, functools.partial(in_torch, in_float32=row.in_float32))
    sides = [inside(theirs, weights), in_mindspore(row.ours, weights)]
    found = []
    for k, gradients in enumerate(recorded, 1):
        for step, _ in sides:
            step([g * np.float32(row.gradient_scale) for g in gradients])
        if k in STEPS:
            (first, a, b) = list(weights.values()), *(read() for _, read in sides)
            move = max(np.abs(x - w).max() for x, w in zip(a, first))
            found.append(float(max(np.abs(x - y).max() for x, y in zip(a, b)) / move))
    return found


def main():
    """Run the rows that can run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], help="what the names of rows start with")
    parser.add_argument(
        "--checkout", nargs="+", default=[], metavar="OWNER/NAME=FOLDER", help="repositories that lie here"
    )
    parser.add_argument("--json", type=pathlib.Path, help="the file to write the figures to")
    arguments = parser.parse_args()
    folders = dict(each.split("=", 1) for each in arguments.checkout)
    ms.set_context(mode=ms.GRAPH_MODE)
    weights, recorded = record(max(STEPS))
    whole = [name for name, w in weights.items() if w.ndim == 2]
    chosen_by = {
        "all": list(weights),
        "matrices": [name for name in whole if "blocks" in name],
        "tables": [name for name in whole if "blocks" not in name],
    }
    console, failed, told, notes = Console(), [], {}, []
    table = Table("optimizer", "version", *(f"step {k}" for k in STEPS), "allowed", box=None)
    for name, row in (ROWS | MUON_ROWS).items():
        if not any(name.startswith(prefix) for prefix in arguments.rows):
            continue
        folder = pathlib.Path(folders.get(re.split("[ ,]", name)[0], "absent"))
        if (row.file and not (folder / row.file).is_file()) or importlib.util.find_spec(row.needs) is None:
            console.print(f"{name}: not here", style="dim")
            continue
        chosen = {each: weights[each] for each in chosen_by[row.on]}
        given = [[g for each, g in zip(weights, gradients) if each in chosen] for gradients in recorded]
        found = differences(row, chosen, given, folder)
        version = "its file" if row.file else VERSIONS.get(row.needs) or importlib.metadata.version(row.needs)
        allowed = "" if row.at_most is None else f"{row.at_most:.0e}"
        table.add_row(name, version, *(f"{value:.1e}" for value in found), allowed)
        notes += [f"{name}: {row.note}"] if row.note else []
        told[name] = {"version": version, "differences": dict(zip(map(str, STEPS), found)), "allowed": row.at_most}
        if row.at_most is not None and not max(found) <= row.at_most:
            failed.append(name)
    console.print(table, "", *notes, sep="\n", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))
    sys.exit(f"further apart than allowed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
