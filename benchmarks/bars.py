"""Draws what step_cpu.py measured as bars: time and memory of a step for each parameter.

python benchmarks/step_cpu.py --json step.json
python benchmarks/bars.py step.json docs/peers.png
"""

import argparse
import json
import pathlib

OURS, PEER = "#1f77b4", "#9aa5b1"
# Rows of step_cpu.py, as a reader knows them; others keep their names.
LABELS = {
    "adamw graph": "ms_optim AdamW",
    "adamw 8bit": "ms_optim AdamW, 8-bit states",
    "bfloat16 weights, split8 masters, 8bit": "ms_optim AdamW, bfloat16,\nsplit8 masters, 8-bit states",
    "torch fused AdamW": "torch AdamW, fused",
    "deepspeed CPUAdam": "DeepSpeed CPUAdam",
    "nn.Adam": "mindspore.nn.Adam",
    "nn.AdamOffload": "mindspore.nn.AdamOffload",
    "nn.AdamWeightDecay": "mindspore.nn.AdamWeightDecay",
    "mindformers graph": "MindFormers AdamW",
}


def draw(found, path):
    """Draw the bars.

    Args:
        found: What step_cpu.py wrote.
        path: The picture's path.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted(found["rows"], key=lambda row: row["ratio"], reverse=True)
    # By the ratios within turns: between rows the machine's speed may have changed.
    first = found["rows"][0]["seconds"] / found["parameters"] * 1e9
    labels = [str(LABELS.get(row["name"], row["name"])) for row in rows]
    colors = [OURS if label.startswith("ms_optim") else PEER for label in labels]
    panels = {
        "Time of a step, ns per parameter": [row["ratio"] * first for row in rows],
        "Peak memory, bytes per parameter": [row["peak"] / found["parameters"] for row in rows],
    }
    plt.rcParams.update({"font.size": 11})
    figure, both = plt.subplots(2, 1, figsize=(7.5, 1.2 + 0.8 * len(rows)), layout="constrained")
    for axes, (title, values) in zip(both, panels.items()):
        bars = axes.barh(labels, values, color=colors)
        axes.bar_label(bars, fmt="%.2f" if max(values) < 20 else "%.1f", padding=3)
        axes.set_title(title, fontsize=12)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main():
    """Read the figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path, help="what step_cpu.py --json wrote")
    parser.add_argument("picture", help="the picture to write")
    arguments = parser.parse_args()
    draw(json.loads(arguments.json.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
