"""Makes this package's optimizers from the YAML files of MindFormers, with `type` changed alone.

    python tools/mindformers_sections.py FOLDER

FOLDER has YAML files, such as a checkout of MindFormers' repository. Each section `optimizer` is given to MindFormers
as its trainer for static graphs gives it, for a tiny network. Needs MindFormers.
"""

import collections
import json
import pathlib
import sys

import numpy as np
import yaml
from mindformers.core.optim import build_optim
from mindspore import Parameter, Tensor, nn

import ms_optim.mindformers  # noqa: F401 - registers the optimizers

OURS = dict.fromkeys(("AdamW", "FP32StateAdamWeightDecay"), "MsOptimAdamW") | {"Muon": "MsOptimMuon"}


def sections(folder):
    """Return the sections in YAML files of a folder, and the files of each."""
    found = collections.defaultdict(list)
    for path in sorted(path for end in ("yaml", "yml") for path in pathlib.Path(folder).rglob(f"*.{end}")):
        for content in yaml.safe_load_all(path.read_text()):
            if isinstance(content, dict) and isinstance(content.get("optimizer"), dict):
                found[json.dumps(content["optimizer"])].append(path)
    return {text: (json.loads(text), paths) for text, paths in found.items()}.values()


def made(section):
    """Return the name of the optimizer that a section makes, or why it makes none."""
    decay = section.get("weight_decay") or 0.0
    groups = [
        {"params": [Parameter(Tensor(np.ones((4, 6), np.float32)), name="layer.weight")], "weight_decay": decay},
        {"params": [Parameter(Tensor(np.ones(4, np.float32)), name="layer.bias")], "weight_decay": 0.0},
    ]
    try:
        changed = {**section, "type": OURS[section["type"]]}
        optimizer = build_optim(changed, {"params": groups, "learning_rate": nn.CosineDecayLR(0.0, 0.1, 10)})
    except Exception as error:  # what went wrong is what is asked for
        return f"{type(error).__name__}: {error}", False
    return type(optimizer).__name__, True


def main(folder):
    """Print what became of each section, and how many worked."""
    works = total = 0
    for section, paths in sections(folder):
        name, is_made = made(section)
        total, works = total + len(paths), works + is_made * len(paths)
        print(f"{len(paths)} × {section}\n    {name}, such as in {paths[0]}")
    print(f"{works} of {total} sections work.")


if __name__ == "__main__":
    main(*sys.argv[1:])
