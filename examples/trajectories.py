"""Plot the paths of four optimizers on two functions whose minimum is hard to find.

Rosenbrock's minimum is in a long curved valley, Rastrigin's is among many local minima. All start from the same point,
each with the learning rate from a grid that ends with the lowest value. With fixed learning rates and two parameters,
this shows how steps are made, not which optimizer is better for a network.
"""

import argparse
import pathlib

import matplotlib as mpl
import mindspore as ms
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import ms_optim

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

STEPS = 500
RATES = 10.0 ** np.arange(-4, -0.2, 0.25)
# Without weight decay, AdamOffload's rule is AdamW's except for the position of epsilon.
OPTIMIZERS = {
    "AdamW": {},
    "Lamb": {},
    "LANS": {},
    "DGCMomentum": {"momentum": 0.9, "rampup_begin_step": 0},  # with two numbers, all is sent: momentum SGD
}
COLORS = dict(zip(OPTIMIZERS, ("#0072b2", "#e69f00", "#009e73", "#882255")))


class Rosenbrock:
    """(1 - x)^2 + 100 (y - x^2)^2."""

    name, start, minimum = "Rosenbrock", (-2.0, 2.0), (1.0, 1.0)
    window, levels = ((-2.5, 2.5), (-1.5, 3.5)), np.logspace(-1, 3.5, 16)

    @staticmethod
    def value(x, y):
        """Return the function's value."""
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2

    @staticmethod
    def gradient(x, y):
        """Return its gradient."""
        return np.array([-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)])


class Rastrigin:
    """20 + x^2 - 10 cos(2 pi x) + y^2 - 10 cos(2 pi y)."""

    name, start, minimum = "Rastrigin", (-2.0, 3.5), (0.0, 0.0)
    window, levels = ((-4.5, 4.5), (-4.5, 4.5)), np.linspace(0, 60, 16)

    @staticmethod
    def value(x, y):
        """Return the function's value."""
        return 20 + x**2 - 10 * np.cos(2 * np.pi * x) + y**2 - 10 * np.cos(2 * np.pi * y)

    @staticmethod
    def gradient(x, y):
        """Return its gradient."""
        return np.array([2 * v + 20 * np.pi * np.sin(2 * np.pi * v) for v in (x, y)])


def walks(function, name, steps):
    """Return the points of an optimizer's path for each learning rate, of shape (rates, steps + 1, 2)."""
    start = np.array(function.start, np.float32)
    weights = [ms.Parameter(ms.Tensor(start), name=f"with_rate_{k}") for k in range(len(RATES))]
    groups = [{"params": [weight], "lr": float(rate)} for weight, rate in zip(weights, RATES)]
    optimizer = getattr(ms_optim, name)(groups, 0.1, **OPTIMIZERS[name])
    points = np.empty((steps + 1, len(RATES), 2))
    points[0] = start
    for step in range(steps):
        # Far outside, the gradient would overflow.
        gradients = np.clip(function.gradient(*points[step].T).T, -1e6, 1e6).astype(np.float32)
        optimizer(tuple(ms.Tensor(g) for g in gradients))
        points[step + 1] = [weight.asnumpy() for weight in weights]
    return points.swapaxes(0, 1)


def best_walk(function, name, steps):
    """Return the final value of the path that ends lowest, its learning rate and its points."""
    candidates = walks(function, name, steps)
    ends = function.value(*candidates[:, -1].T)
    best = int(np.argmin(np.where(np.isfinite(ends), ends, np.inf)))
    return ends[best], RATES[best], candidates[best]


def draw(axes, function, best):
    """Plot a function's contours and the paths on them."""
    (left, right), (bottom, top) = function.window
    x, y = np.meshgrid(np.linspace(left, right, 400), np.linspace(bottom, top, 400))
    # Mixed with white, not transparent: the seams between transparent levels would be seen.
    pale = ListedColormap(0.5 + 0.5 * mpl.colormaps["Greys"](np.linspace(0, 1, 256)))
    axes.contourf(x, y, function.value(x, y), levels=function.levels, cmap=pale, extend="both")
    for name, (_, rate, points) in best.items():
        style = {"color": COLORS[name], "label": f"{name}, rate {rate:.2g}"}
        axes.plot(*points.T, linewidth=1.4, marker="o", markersize=2, **style)
        axes.plot(*points[-1], marker="s", markersize=7, color=COLORS[name], markeredgecolor="black")
    single = {"linestyle": "none", "markeredgecolor": "black"}
    axes.plot(*function.start, marker="o", color="black", label="start", **single)
    axes.plot(*function.minimum, marker="*", markersize=14, color="gold", label="minimum", **single)
    axes.set(title=function.name, xlim=(left, right), ylim=(bottom, top), xlabel="x", ylabel="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3, fontsize=10, frameon=False)


def main():
    """Compute the paths, print the table and save the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("trajectories.png"))
    arguments = parser.parse_args()
    ms.device_context.cpu.op_tuning.threads_num(1)  # more would wait for each other longer than they compute
    functions = (Rosenbrock, Rastrigin)
    plt.rcParams.update({"font.size": 11})
    figure, plots = plt.subplots(len(functions), 1, figsize=(7.5, 12.5), layout="constrained")
    table = Table("Function", "Optimizer", "Learning rate", "Value at the end", "Distance to the minimum")
    for axes, function in zip(plots, functions):
        best = {name: best_walk(function, name, arguments.steps) for name in tqdm(OPTIMIZERS, desc=function.name)}
        draw(axes, function, best)
        for name, (end, rate, points) in best.items():
            distance = np.linalg.norm(points[-1] - function.minimum)
            table.add_row(function.name, name, f"{rate:.2g}", f"{end:.2e}", f"{distance:.2e}")
    figure.savefig(arguments.output, dpi=120)
    Console().print(table)
    print(f"Picture in {arguments.output}")


if __name__ == "__main__":
    main()
