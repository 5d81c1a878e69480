"""Prints docs/capabilities.md from the table of capabilities: python tools/capabilities.py > docs/capabilities.md."""

import re
import sys

from ms_optim import OPTIMIZERS
from ms_optim._capabilities import DEVICES, FEATURES, answer

PATHS = {
    "CPU": "fused kernel",
    "GPU": "fused kernel",
    "Ascend": "operators for Ascend",
    "offload": "the host's kernel",
    "composite": "composite path",
}
ABOVE = """\
# What works together

What an optimizer does where all kernels are built. "yes" is done by what the third column names; "composite" by
MindSpore's own operators, which are slower; "no" is refused when the optimizer is made, and the number says why. All
optimizers take float32, float16 and bfloat16 weights, with and without `master_weights`, in Graph and in PyNative mode;
the column is for split ones. `attach` is a call, and refused there. `local_steps` is `LocalSteps` around the optimizer,
whose outer step runs on the host. With `offload` the fused kernel for CPU runs on the
host, whatever the device, and all works but `shard_states`, `shard_group` and `attach`.

`python -m ms_optim doctor` says what is built on a machine, and whether it is right. Setting `AdamOffload.target` to
the device moves the arithmetic to the composite path, which takes neither `state_dtype` nor `stochastic_rounding`.
"""


def page() -> str:
    """Return the page."""
    reasons: list[str] = []

    def cell(optimizer, device, feature):
        path, reason = answer(optimizer, device, [feature])
        if path is None:
            reason = re.sub("^it ", f"`{optimizer.__name__}` ", reason)
            if reason not in reasons:
                reasons.append(reason)
            return f"no ({reasons.index(reason) + 1})"
        return "composite" if path == "composite" else "yes"

    lines = [
        f"| | | runs in | {' | '.join(f'`{feature}`' for feature in FEATURES)} |",
        f"|---|---|---|{'---|' * len(FEATURES)}",
    ]
    for optimizer in OPTIMIZERS:
        for device in DEVICES:
            path = answer(optimizer, device, []).path
            cells = " | ".join(cell(optimizer, device, feature) for feature in FEATURES)
            lines.append(f"| `{optimizer.__name__}` | {device} | {PATHS[path]} | {cells} |")
    why = [f"{k}. {reason[0].upper()}{reason[1:]}." for k, reason in enumerate(reasons, 1)]
    return "\n".join([ABOVE, *lines, "", *why, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
