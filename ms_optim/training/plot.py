"""Plot what an OptimizerMonitor recorded."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from ..arguments.checks import fail
from .readings import Record, load

if TYPE_CHECKING:
    from ..arguments.checks import FilePath

NAME = "plot"
WIDTH = 7.5
PANEL = 1.7  # height of a panel in inches
ROW = 0.2  # height of a parameter in the heat map in inches, if there are not too many
LABEL = 0.133  # height of a parameter's name in inches
TITLE = 84  # maximum number of letters of a title's line
LONGEST = 30  # maximum number of letters of a name
COLORS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9")  # differ for everyone


def plot(csv: FilePath, output: FilePath | None = None) -> pathlib.Path:
    """Plot what an OptimizerMonitor recorded.

    The top shows a heat map of the trust ratios by layer and step. If these are all 1, as for AdamW, it shows the ratio
    of update norm to weight norm. Below are the norms of gradient, weights and update, the ratio of update norm to
    weight norm, the learning rates and the weight decays; for DGCMomentum, also the density and the norm of the
    residuals.

    Args:
        csv (Union[str, PathLike]): The CSV file that the monitor wrote, with the file of the layers next to it.
        output (Union[str, PathLike, None]): The image file; matplotlib determines the format from its name. ``None``
            means a PNG file next to `csv`. Default: ``None`` .

    Returns:
        Path of the image.

    Raises:
        TypeError: If `csv` or `output` is not a path.
        FileNotFoundError: If there is no file `csv`.
        ValueError: If `csv` was not written by a monitor, or has no readings.
        ImportError: If matplotlib is not installed.

    Examples:
        >>> import os, tempfile
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Lamb, OptimizerMonitor, plot
        >>> optimizer = Lamb(nn.Dense(4, 3).trainable_params(), learning_rate=0.01)
        >>> folder = tempfile.mkdtemp()
        >>> with OptimizerMonitor(every=1, csv=os.path.join(folder, "run.csv"), verbose=False) as monitor:
        ...     for _ in range(3):
        ...         done = optimizer((ms.ops.ones((3, 4)), ms.ops.ones(3)))
        ...         monitor.step(optimizer)
        >>> print(plot(os.path.join(folder, "run.csv")).name)
        run.png
    """
    for name, value in (("csv", csv), ("output", output)):
        if not isinstance(value, (str, os.PathLike)) and not (name == "output" and value is None):
            fail(TypeError, NAME, name, "a path", value)
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"For '{NAME}', matplotlib is needed: pip install matplotlib.")
    if not pathlib.Path(csv).is_file():
        raise FileNotFoundError(
            f"For '{NAME}', the argument 'csv' must be a file that an OptimizerMonitor wrote, but there is none at "
            f"{os.fspath(csv)!r}."
        )
    record = load(pathlib.Path(csv), ("trust_ratio", "update_ratio"))
    output = pathlib.Path(csv).with_suffix(".png") if output is None else pathlib.Path(output)
    _draw(record).savefig(output, dpi=160)
    return output


def _draw(record: Record):
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    count = 6 if "density" in record.totals else 4
    heat = min(max(ROW * len(record.parameters), 1.6), 10.0) + 0.8
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
    figure = Figure(figsize=(WIDTH, heat + PANEL * count), layout=layout)
    steps, skipped = record.totals["step"], int(record.totals["skipped_steps"][-1])
    title = f"{record.optimizer}: {len(record.parameters)} parameters, steps {steps[0]:.0f} to {steps[-1]:.0f}"
    figure.suptitle(title + (f", {skipped} of them skipped" if skipped else ""), fontsize=12)
    # In subfigures, so that long names next to the heat map do not make the panels narrower.
    grid = figure.add_gridspec(2, 1, height_ratios=(heat, PANEL * count))
    top, bottom = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _draw_heat_map(top, record, heat - 0.8)
    panels = bottom.subplots(count, 1, sharex=True)
    _draw_norms(panels[0], record)
    _draw_lines(panels[1], record, "update norm / weight norm", {"": "update_ratio"}, log=True)
    for axes, title in zip(panels[2:4], ("learning rate", "weight decay")):
        prefix = title.replace(" ", "_") + "."
        names = {name.removeprefix(prefix): name for name in record.totals if name.startswith(prefix)}
        _draw_lines(axes, record, title, names)
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # so that a line at 0 is not on the axis
    if count == 6:
        _draw_lines(panels[4], record, "density: fraction of elements sent", {"": "density"}, log=True)
        _draw_lines(panels[5], record, "norm of the residuals", {"": "residual_norm"})
    panels[-1].set_xlabel("step")
    edges = _edges(steps)
    for axes in (*top.axes[:1], *panels):
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _edges(steps):
    """Return where the colours of readings meet: each covers the steps since the previous reading."""
    first = steps[0] - (steps[1] - steps[0]) if len(steps) > 1 else steps[0] - 1
    return np.concatenate(([max(first, 0)], steps))


def _draw_heat_map(figure, record, height):
    from matplotlib.colors import LogNorm

    steps = record.totals["step"]
    ratios, what = record.layers["trust_ratio"], "trust ratio"
    if np.all(np.isnan(ratios) | (ratios == 1)):
        ratios, what = record.layers["update_ratio"], "update norm / weight norm"
    drawn = np.ma.masked_invalid(ratios.T)
    drawn = np.ma.masked_less_equal(drawn, 0)
    # Otherwise a few outliers would leave one colour for all other values.
    low, high = np.percentile(drawn.compressed(), (0.5, 99.5)) if drawn.count() else (1.0, 1.0)
    low, high = (low / 1.05, high * 1.05) if high < 1.1 * low else (low, high)
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    count = len(record.parameters)
    mesh = axes.pcolormesh(_edges(steps), np.arange(count + 1) - 0.5, drawn, norm=LogNorm(low, high), rasterized=True)
    figure.colorbar(mesh, ax=axes, extend="both", pad=0.01, fraction=0.05, aspect=6 * height)
    every = int(np.ceil(LABEL * count / height))
    common = _common_prefix(record.parameters)
    shown = range(0, count, every)
    axes.set_yticks(shown, [_short(record.parameters[i].removeprefix(common)) for i in shown], fontsize=9)
    axes.invert_yaxis()
    notes = {
        f"{what} by layer": True,
        "grey: no value": bool(np.ma.getmaskarray(drawn).any()),
        f"names begin with “{common}”": bool(common),
        f"one of {every} layers is labelled": every > 1,
    }
    figure.suptitle(textwrap.fill("; ".join(note for note, holds in notes.items() if holds), TITLE), fontsize=10)
    axes.set_xlabel("step")


def _common_prefix(names) -> str:
    """Return the common beginning of all names, up to a dot."""
    before, dot, _ = os.path.commonprefix(names).rpartition(".")  # noqa: RUF071 - it is cut at a dot here
    return before + dot


def _short(name: str) -> str:
    """Return a name without its middle if it is long."""
    half = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}"


def _draw_norms(axes, record):
    steps = record.totals["step"]
    names = {name: f"{name}_norm" for name in ("gradient", "weight", "update")}
    _draw_lines(axes, record, "norms", names, log=True)
    skips = steps[np.diff(record.totals["skipped_steps"], prepend=0) > 0]
    for k, step in enumerate(skips):
        axes.axvline(step, color="tab:red", linewidth=0.8, linestyle=":", label=None if k else "steps skipped")
    # Above the panel, beside its title: the lines leave no free corner.
    axes.legend(fontsize=9, ncols=4, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.96), borderaxespad=0)


def _draw_lines(axes, record, title, names, log=False):
    """Plot columns of the totals with their labels; columns with equal numbers share a line."""
    from matplotlib import colormaps

    steps = record.totals["step"]
    lines: dict[bytes, tuple[list[str], np.ndarray]] = {}
    for label, name in names.items():
        series = np.where(np.isfinite(record.totals[name]), record.totals[name], np.nan)
        lines.setdefault(series.tobytes(), ([], series))[0].append(label)
    few = len(lines) <= len(COLORS)
    colors = COLORS if few else colormaps["viridis"](np.linspace(0, 1, len(lines)))
    for color, (labels, series) in zip(colors, lines.values()):
        style = {"marker": ".", "markersize": 3} if len(steps) < 40 else {}
        axes.plot(steps, series, color=color, linewidth=1.3, label=_labels(labels), **style)
    if log and any((series > 0).any() for _, series in lines.values()):
        axes.set_yscale("log")
    if few and len(lines) > 1:
        style = {"title": "group", "title_fontsize": 9} if labels[0].isdigit() else {}
        axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.1), handlelength=1.2, **style)
    elif not few:
        title += f": {len(lines)} groups, from dark to light"
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _labels(labels: list[str]) -> str:
    return ", ".join(labels if len(labels) <= 4 else [*labels[:2], "…", labels[-1]])
