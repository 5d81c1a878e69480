"""When a loss counts as reached, at which step, and how sure the ratio to AdamW's steps is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

SIGMAS = 3.0
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A ratio of two means, and the ends of its confidence interval; NaN where there is none."""

    ratio: float
    low: float
    high: float


def is_reached(losses: Sequence[float], target: float) -> bool:
    """Return whether (target - mean) sqrt(n) >= 3 sigma for the losses of n runs.

    Sigma is the standard deviation of these losses, with n - 1 in the denominator. One run is never enough. The rule is
    that of modded-nanogpt's track 3, which knows sigma beforehand; with five runs and an estimated one, a mean that is
    not below the target passes once in fifty times.
    """
    values = np.asarray(losses, np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return False
    return bool((target - values.mean()) * math.sqrt(len(values)) >= SIGMAS * values.std(ddof=1))


def crossing(steps: Sequence[int], losses: Sequence[float], target: float) -> float:
    """Return the number of steps after which one run's loss is the target.

    Between two lengths the logarithm of the loss is interpolated linearly in the logarithm of the steps.

    Args:
        steps: Lengths of the schedule, ascending.
        losses: The loss at the end of each, greater than 0, or infinite where the run diverged.
        target: The loss to reach.

    Returns:
        float; 0 if the shortest length reaches the target already, and infinity if none does.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return 0.0
            before = losses[i - 1]
            # From an infinite loss there is no line to the target: the longer length counts.
            part = math.log(before / target) / math.log(before / loss) if math.isfinite(before) else 1.0
            return float(steps[i - 1] * (steps[i] / steps[i - 1]) ** part)
    return math.inf


def ratio_of_means(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return mean(ours) / mean(theirs) with its interval by Fieller's theorem; run i of both has the same seed.

    The interval has the ratios r for which a t-test does not tell the mean of ours - r theirs from 0. It takes the
    correlation of the pairs into account, as runs of one seed start from the same weights and see the same batches.

    Returns:
        Interval; its ends are NaN for fewer than two runs, or if the mean of `theirs` is not told from 0.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if len(a) != len(b):
        raise ValueError(f"Runs are paired by their seeds: expected as many of both, but got {len(a)} and {len(b)}.")
    n, ratio = len(a), float(a.mean() / b.mean())
    if n < 2:
        return Interval(ratio, math.nan, math.nan)
    (aa, ab), (_, bb) = np.cov(a, b)
    scale = stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) ** 2 / n
    # (mean a - r mean b)^2 <= scale (aa - 2 r ab + r^2 bb), a quadratic inequality in r.
    square, linear, constant = b.mean() ** 2 - scale * bb, a.mean() * b.mean() - scale * ab, a.mean() ** 2 - scale * aa
    if square <= 0:
        return Interval(ratio, math.nan, math.nan)
    root = math.sqrt(max(0.0, linear**2 - square * constant))
    return Interval(ratio, float((linear - root) / square), float((linear + root) / square))


def verdict(interval: Interval) -> str:
    """Return "fewer" or "more" steps if the whole interval is on one side of 1, else "as many"."""
    if interval.high < 1.0:
        return "fewer"
    return "more" if interval.low > 1.0 else "as many"
