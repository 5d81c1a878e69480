"""The versions of MindSpore that this package was tested with."""

from __future__ import annotations

import re
import warnings

OLDEST, NEWEST = (2, 9), (2, 10)


def check_version(found: str) -> None:
    """Warn if MindSpore is newer than the tested versions.

    A newer version may raise errors where it has removed functions. It cannot change results unnoticed:
    ``python -m ms_optim doctor`` compares every kernel with the same rule in MindSpore's operators.

    Args:
        found: MindSpore's version.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) > NEWEST:
        tested = " and ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        warnings.warn(
            f"ms_optim was tested with MindSpore {tested}, but this is {found}. Run python -m ms_optim doctor, which "
            "checks whether steps are correct.",
            stacklevel=3,
        )
