"""Prints docs/capabilities.md from the table of capabilities: python tools/capabilities.py > docs/capabilities.md."""

import re
import sys

from ms_optim import OPTIMIZERS
from ms_optim.kernels.capabilities import DEVICES, FEATURES, path_of

# A cell by the path that runs; the legend explains it.
CELLS = {"CPU": "yes", "GPU": "yes", "passes": "yes", "Ascend": "yes"}
CELLS |= {"offload": "host", "host": "host", "composite": "slow"}
# How a row names its feature, with the page that describes it.
ROWS = {
    "stochastic_rounding": "[`stochastic_rounding`](low_precision.md#choosing-a-setting)",
    "state_dtype": "[`state_dtype`](low_precision.md#choosing-a-setting)",
    "master_weights": '[`master_weights="split"`](low_precision.md#split-masters)',
    "shard_states": "[`shard_states`](sharded_states.md)",
    "shard_group": "[`shard_group`](sliced_tensors.md)",
    "offload": "[`offload`](offload.md)",
    "grad_clip_norm": "[`grad_clip_norm`](optimizers/index.md)",
    "skip_nonfinite": "[`skip_nonfinite`](loss_scale.md)",
    "decay": '[`decay="cautious"`](schedules.md#cautious-decay)',
    "average_decay": "[`average_decay`](average.md)",
    "weight_norm": "[`weight_norm`](weight_norm.md)",
    "attach": "[`attach()`](gradient_release.md)",
    "local_steps": "[`LocalSteps`](local_steps.md)",
    "multi": "[`MultiOptimizer`](multi_optimizer.md)",
}
ABOVE = """\
# What works together

The tables show which options each optimizer supports, one at a time, where all kernels are built. Every optimizer takes
float32, float16 and bfloat16 weights, with and without `master_weights`, in Graph and in PyNative mode.
`python -m ms_optim doctor` shows which kernels are built on a machine, and checks them.

- **yes**: The fused kernel for the device runs the step. On Ascend, the [operators for Ascend](ascend.md) do.
- **host**: The fused kernel for CPU runs the step, on the host.
- **slow**: MindSpore's own operators run the step. This is [the composite path](composite.md), which is slower.
- **–**: The option is refused when the optimizer is made. The number leads to the reason.

Four rows are not keyword arguments:

- `shard_group` is a key of a param group.
- `attach()` is a method. It needs PyNative mode. Where the table has a "–", the call raises an error.
- `LocalSteps` is made around an optimizer. Its outer step runs on the host. Where the table has a "–", it refuses the
  optimizer.
- `MultiOptimizer` is made of several optimizers. Where the table has a "–", it refuses the optimizer.
"""
BELOW = """\
## Combinations

- `offload` changes nothing on CPU. With it, GPU and Ascend support what the table for CPU shows, except `attach()`.
- `AdamOffload.target` can be set to the device. Its states are then on the device, and the composite path runs, which
  `attach()` needs there.
"""


def page() -> str:
    """Return the page."""
    notes: list[str] = []

    def cell(optimizer, device, features):
        path, reason = path_of(optimizer, device, features)
        if path is not None:
            return CELLS[path]
        text = note(optimizer.__name__, *features, reason)
        if text not in notes:
            notes.append(text)
        return f"–[^note-{notes.index(text) + 1}]"

    links = [f"[{one.__name__}](optimizers/{one.__module__.rpartition('.')[2]}.md)" for one in OPTIMIZERS]
    rows = {"none of these": [], **{ROWS[feature]: [feature] for feature in FEATURES}}
    lines = [ABOVE]
    for device in DEVICES:
        lines += [f"## {device}", "", f"| option | {' | '.join(links)} |", f"|---|{'---|' * len(links)}"]
        for row, features in rows.items():
            lines.append(f"| {row} | {' | '.join(cell(one, device, features) for one in OPTIMIZERS)} |")
        lines.append("")
    lines.append(BELOW)
    lines += [f"[^note-{k}]: {text}" for k, text in enumerate(notes, 1)]
    return "\n".join([*lines, ""])


def note(optimizer: str, feature: str, reason: str) -> str:
    """Return the reason why an optimizer does not support a feature, as a sentence of its own."""
    subject, verb = (f"`{optimizer}`", "it ") if reason.startswith("it ") else ("The option", f"{FEATURES[feature]} ")
    return re.sub(r"'(\w+)'", r"`\1`", f"{subject} {reason.removeprefix(verb)}.")


if __name__ == "__main__":
    sys.stdout.write(page())
