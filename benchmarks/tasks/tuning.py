"""How an optimizer is tuned: rates of one grid around its start, then decays, with a fixed number of trials."""

from collections.abc import Callable, Sequence

SPACING = 3.0  # of the rates at first; the last trials halve it, in the logarithm, around the best


def next_exponent(losses: dict[float, float]) -> float:
    """Return the next rate to try, as an exponent of SPACING relative to the start.

    The start, its two neighbours, then the neighbours of the best until it lies between two others, then halves of the
    spacing on both sides of it. Ties go to the smaller rate. A best rate on the edge moves the grid: where a start was
    badly chosen, trials find the rate nevertheless.

    Args:
        losses: The losses so far, by exponent; infinite where a run diverged.
    """
    for first in (0.0, -1.0, 1.0):
        if first not in losses:
            return first
    best, step = min(sorted(losses), key=losses.__getitem__), 1.0
    while True:
        for exponent in (best - step, best + step):
            if exponent not in losses:
                return exponent
        step /= 2


def tune(
    loss_of: Callable[[float, float], float], start: float, decay: float, rates: int, decays: Sequence[float]
) -> tuple[float, float]:
    """Return the best learning rate and decay.

    Args:
        loss_of: From a rate and a decay to the loss of a trial.
        start: The rate of the first trial.
        decay: The decay that `decays` are multiples of.
        rates: The number of trials with different rates, with the first decay.
        decays: Multiples of `decay`. Each but the first gets one trial, at the best rate.
    """
    losses: dict[float, float] = {}
    for _ in range(rates):
        exponent = next_exponent(losses)
        losses[exponent] = loss_of(rate_at(start, exponent), decays[0] * decay)
    rate = rate_at(start, min(sorted(losses), key=losses.__getitem__))
    by_decay = {decays[0] * decay: min(losses.values())}
    for factor in decays[1:]:
        by_decay[factor * decay] = loss_of(rate, factor * decay)
    return rate, min(by_decay, key=by_decay.__getitem__)


def rate_at(start: float, exponent: float) -> float:
    """Return a rate of the grid, with three digits."""
    return float(f"{start * SPACING**exponent:.3g}")
