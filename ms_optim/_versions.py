"""The versions of MindSpore that this package was tested with."""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = (2, 9), (2, 10)


def check_version(found: str) -> None:
    """Warn of a MindSpore that is newer than what was tested.

    Its removals may end in an error, and never in other numbers that go unseen: ``python -m ms_optim doctor`` compares
    every kernel with the same rule in MindSpore's operators.

    Args:
        found: MindSpore's version.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) > NEWEST:
        tested = " and ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        warnings.warn(
            f"ms_optim was tested with MindSpore {tested}, and this is {found}. Run python -m ms_optim doctor, which "
            "tells whether steps are right.",
            stacklevel=3,
        )
