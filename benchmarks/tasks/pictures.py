"""The two pictures of the report."""

import pathlib

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

COLORS = {"fewer": "#0072b2", "as many": "0.5", "more": "#d55e00"}
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
        most, least = (task["lengths"][k] / task["steps"] for k in (-1, 0))
        for y, name in enumerate(names):
            figures = task["optimizers"].get(name)
            if figures is None:
                continue
            if figures["ratio"] is None:
                is_slow = figures["verdict"].startswith("more")
                mark, color, x = (">", COLORS["more"], most) if is_slow else ("<", COLORS["fewer"], least)
                axes.plot(x, y, mark, color=color, markersize=8, fillstyle="none")
                continue
            color = COLORS[figures["verdict"]]
            if figures["low"] is not None:
                axes.plot([figures["low"], figures["high"]], [y, y], color=color, linewidth=2)
            axes.plot(figures["ratio"], y, "o", color=color)
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
    for mark, key, label in ((">", "more", "more than can be measured"), ("<", "fewer", "fewer than can be measured")):
        marks.append(Line2D([], [], marker=mark, color=COLORS[key], linewidth=0, fillstyle="none", label=label))
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_cost(summary: dict, path: pathlib.Path) -> None:
    """Plot the time of a step over the bytes of states a parameter, on the task with the most parameters."""
    title, task = next(iter(summary["tasks"].items()))
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    at: dict[tuple[float, float], list[str]] = {}
    for name, figures in task["optimizers"].items():
        at.setdefault((round(figures["state_bytes"], 1), figures["step_ms"]), []).append(name)
    for (size, milliseconds), names in at.items():
        axes.plot(size, milliseconds, "o", color="#0072b2")
        text = ", ".join(names)
        axes.annotate(text, (size, milliseconds), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(title=f"What a step costs, on {title}", yscale="log")
    axes.set(xlabel="bytes of states a parameter", ylabel="ms a step, without the gradients")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.18)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
