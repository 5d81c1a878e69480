"""How much is spent: trials of tuning, seeds, and lengths of the runs."""

import math
from dataclasses import dataclass

TUNING_SEED = 1000  # which the comparison does not use


@dataclass(frozen=True)
class Budget:
    """What each optimizer gets, the same for all.

    Attributes:
        steps: By task, the length of a trial of tuning; the target is AdamW's mean loss after it, with seeds that the
            comparison does not use.
        rates: Number of learning rates that are tried.
        decays: Multiples of the optimizer's decay; each but the first is tried at the best rate.
        seeds: Number of runs with the rate and decay that were found.
        lengths: Of the comparison's runs, relative to `steps`.
        defaults: Whether the rate and decay of the constructor get a run.
    """

    steps: dict[str, int]
    rates: int
    decays: tuple[float, ...]
    seeds: int
    lengths: tuple[float, ...]
    defaults: bool = True

    @property
    def trials(self) -> int:
        """The number of trials of tuning for each optimizer and task."""
        return self.rates + len(self.decays) - 1


def ladder(shortest: float, each: int) -> tuple[float, ...]:
    """Return factors from the shortest, a power of 2, to 2; `each` for a doubling."""
    return tuple(round(2.0 ** (k / each), 3) for k in range(round(math.log2(shortest)) * each, each + 1))


def lengths_of(characters: int, words: int, digits: int, problems: int) -> dict[str, int]:
    """Return the lengths by task."""
    return {"characters": characters, "words": words, "digits": digits, "problems": problems}


BUDGETS = {
    "night": Budget(lengths_of(400, 500, 40, 300), 7, (1.0, 0.0, 3.0), 5, ladder(0.25, 4)),
    "short": Budget(lengths_of(40, 30, 40, 300), 5, (1.0, 0.0), 5, ladder(0.5, 2)),
    "smoke": Budget(lengths_of(4, 4, 4, 20), 1, (1.0,), 2, (0.5, 1.0), defaults=False),
}
