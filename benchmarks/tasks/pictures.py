"""The two pictures of the report."""

import pathlib

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

COLORS = {"fewer": "#0072b2", "as many": "0.5", "more": "#d55e00"}
MARKS = {"": "o", "≤ ": "<", "≥ ": ">"}
LABELS = {"fewer": "fewer steps than AdamW", "as many": "not told from AdamW", "more": "more steps than AdamW"}


def draw_steps(summary: dict, path: pathlib.Path) -> None:
    """Plot the steps of each optimizer relative to AdamW's with their intervals, one task beside the other."""
    tasks = summary["tasks"]
    plt.rcParams.update({"font.size": 11})
    names = list(dict.fromkeys(name for task in tasks.values() for name in task["optimizers"]))
    height = 1.8 + 0.33 * len(names)
    size = 3.1 * len(tasks) + 1.4, height
    figure, row = plt.subplots(1, len(tasks), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, (title, task) in zip(row[0], tasks.items()):
        for y, name in enumerate(names):
            figures = task["optimizers"].get(name)
            if figures is None or figures["ratio"] is None:
                continue
            color = COLORS[figures["verdict"]]
            if figures["low"] is not None:
                axes.plot([figures["low"], figures["high"]], [y, y], color=color, linewidth=2)
            axes.plot(figures["ratio"], y, MARKS[figures["bound"]], color=color)
        axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle="--")
        axes.set(title=title, xlabel="steps, relative to AdamW", xscale="log")
        axes.set_xticks([0.5, 0.7, 1.0, 1.4, 2.0], ["0.5", "0.7", "1", "1.4", "2"])
        axes.minorticks_off()
        axes.set_xlim(0.42, 2.4)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    row[0][0].set_yticks(range(len(names)), names)
    row[0][0].invert_yaxis()
    marks = [Line2D([], [], marker="o", color=color, linewidth=2, label=LABELS[key]) for key, color in COLORS.items()]
    for bound, label in (("≤ ", "at most so many"), ("≥ ", "at least so many")):
        marks.append(Line2D([], [], marker=MARKS[bound], color="0.3", linewidth=0, label=label))
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_cost(summary: dict, path: pathlib.Path) -> None:
    """Plot the bytes of states and the time of a step, on the first task, which has the most parameters."""
    title, task = next(iter(summary["tasks"].items()))
    names = list(task["optimizers"])
    size = 9.0, 1.2 + 0.33 * len(names)
    figure, row = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    labels = {"state_bytes": "bytes of states a parameter", "step_ms": "ms a step, without the gradients"}
    for axes, (key, label) in zip(row, labels.items()):
        bars = axes.barh(names, [figures[key] for figures in task["optimizers"].values()], color="#0072b2", height=0.6)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.set(xlabel=label)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    row[1].set(xscale="log", xlim=(1, None))
    row[0].invert_yaxis()
    figure.suptitle(f"What a step costs, on {title}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
