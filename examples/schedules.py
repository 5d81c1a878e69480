"""Plot the learning rates of schedules over a training of 1,000 steps."""

import argparse
import pathlib

import matplotlib as mpl
import mindspore as ms
import numpy as np

from ms_optim import PowerCoolLR, WarmUpHoldDecayLR

mpl.use("agg")
import matplotlib.pyplot as plt

PEAK, WARM_UP, TOTAL = 1.0, 50, 1000
SCHEDULES = {
    "constant": WarmUpHoldDecayLR(PEAK, WARM_UP, decay="constant"),
    "constant, then linear": WarmUpHoldDecayLR(PEAK, WARM_UP, 750, TOTAL),
    "constant, then 1 - sqrt": WarmUpHoldDecayLR(PEAK, WARM_UP, 750, TOTAL, decay="1-sqrt"),
    "cosine to a tenth": WarmUpHoldDecayLR(PEAK, WARM_UP, 0, TOTAL, end_learning_rate=PEAK / 10, decay="cosine"),
    "linear to 0": WarmUpHoldDecayLR(PEAK, WARM_UP, 0, TOTAL),
    "PowerCool": PowerCoolLR(PEAK, 3e-4, TOTAL, WARM_UP, power=1.2),
}
COLORS = ("#777777", "#00795a", "#b03a82", "#0072b2", "#b85c00", "#5b2d8e")
STYLES = ("-.", "-", "--", "-", "-", ":")


def arguments():
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default="schedules.png", help="default: %(default)s")
    return parser.parse_args()


def rates_of(schedule, steps):
    """Return the learning rate at each step."""
    return [float(schedule(ms.Tensor([int(step)], ms.int32)).asnumpy()) for step in steps]


def main():
    """Draw the curves."""
    given, steps = arguments(), np.arange(0, TOTAL + 1, 5)
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for (name, schedule), color, style in zip(SCHEDULES.items(), COLORS, STYLES):
        rates = rates_of(schedule, steps)
        axes.plot(steps, rates, style, color=color, label=name)
        print(f"{name}: {rates[len(rates) // 2]:.3f} in the middle, {rates[-2]:.4f} at step {steps[-2]}")
    axes.set(xlabel="step", ylabel="learning rate / peak", ylim=(0, 1.03), xlim=(0, TOTAL))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.06, 0.0))
    figure.savefig(given.output, dpi=150)


if __name__ == "__main__":
    main()
