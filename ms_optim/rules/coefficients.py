"""The coefficients of Muon's iterations: published ones by name, each with its source, and the check of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arguments.checks import FINITE, MOST, check_at_most, check_count, fail, is_number
from ..arguments.words import closest, warn_once

Triple = tuple[float, float, float]
JORDAN: Triple = (3.4445, -4.7750, 2.0315)
STEPS = 5
MOST_STEPS = 100
MOST_SIZE = 1e6  # of a singular value or a factor during the iterations, so that sums of products are finite in float32
# How much small singular values may grow in bfloat16, and what is no more than rounding with them. The cosine of the
# result with that in float32, for singular values 1/i^2 of 256 x 512: 0.99 at a growth of 490, 0.97 at 1,050, 0.80 at
# 6,400 and 0.62 at 79,000.
MOST_GROWTH_IN_BFLOAT16 = 4096.0


class Published(NamedTuple):
    """Published coefficients.

    Attributes:
        triples: The coefficients of each iteration.
        fits_any: Whether they are for any number of iterations, of which later ones repeat the last triple; others are
            for as many as there are triples.
    """

    triples: tuple[Triple, ...]
    fits_any: bool = False


PUBLISHED: dict[str, Published] = {
    # Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    "jordan": Published((JORDAN,), fits_any=True),
    # Cesista, You and Jordan, "Squeezing 1-2% efficiency gains out of Muon by optimizing the Newton-Schulz
    # coefficients" (2025); the "quintic" of NVIDIA's Emerging-Optimizers.
    "quintic": Published(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Amsel et al., "The Polar Express" (2025), arXiv 2505.16932, divided by 1.01 to the powers of the polynomial.
    "polar_express": Published(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        fits_any=True,
    ),
    # Grishina et al., "Accelerating Newton-Schulz iteration for orthogonalization via Chebyshev-type polynomials"
    # (2025), arXiv 2506.10935.
    "cans": Published(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        )
    ),
    # DeepSeek-AI, "DeepSeek-V4" (2026).
    "deepseek_v4": Published((*(JORDAN,) * 8, *((2.0, -1.5, 0.5),) * 2)),
    # arXiv 2606.00371: c = 0 spares a product.
    "cubic5": Published(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        )
    ),
}
# Turbo-Muon's (arXiv 2512.04632), for rows that are scaled first. If one singular value is far above the others, it is
# between 0.88 and 1 after that (1 at rank one, 0.97 if they are 1/i), where the first polynomial is negative.
LEFT_OUT = {"aol": "where one singular value is far above the others, weights move uphill in its direction"}


def iterations_of(name: str, ns_steps: Any, coefficients: Any, bfloat16: bool) -> tuple[Triple, ...]:
    """Check the coefficients of the iterations, and return a triple for each.

    Args:
        name: Name of the optimizer's class, for errors.
        ns_steps: The number of iterations, or None.
        coefficients: The name of published coefficients, a triple, or a triple for each iteration.
        bfloat16: Whether the factors of products are bfloat16.
    """
    if ns_steps is not None:
        check_count(name, "ns_steps", ns_steps, 1)
        check_at_most(name, "ns_steps", ns_steps, MOST_STEPS)
    if isinstance(coefficients, str):
        iterations = _published(name, ns_steps, coefficients)
    else:
        iterations = _stated(name, ns_steps, coefficients)
    # Rounding to bfloat16 may lift a singular value of 1 by 2^-8.
    if _diverge(iterations, 1.0 + 2.0**-8 * bfloat16):
        kind = " for products of bfloat16 numbers" if bfloat16 and not _diverge(iterations, 1.0) else ""
        expected = f"such that singular values from 0 to 1 stay below {MOST_SIZE:g} in all iterations{kind}"
        fail(ValueError, name, "ns_coefficients", expected, coefficients)
    turned = _turned(iterations)
    if turned is not None:
        expected = f"such that no singular value from 0 to 1 turns negative, or weights move uphill; {turned:.2f} does"
        fail(ValueError, name, "ns_coefficients", expected, coefficients)
    growth = math.prod(abs(a) for a, _, _ in iterations)
    if bfloat16 and growth > MOST_GROWTH_IN_BFLOAT16:
        warn_once(
            f"For '{name}', the {len(iterations)} iterations of 'ns_coefficients' multiply small singular values by up "
            f"to {growth:,.0f}, and with ns_dtype='bfloat16' the rounding of the largest ones, too: where singular "
            "values fall steeply, what is orthogonalized is noise. Set ns_dtype='float32', or take fewer iterations.",
            stacklevel=5,
        )
    return iterations


def _published(name: str, ns_steps: int | None, coefficients: str) -> tuple[Triple, ...]:
    """Return the iterations of a name."""
    if coefficients not in PUBLISHED:
        hint = closest(coefficients, PUBLISHED)
        if coefficients in LEFT_OUT:
            hint = f" '{coefficients}' is left out: {LEFT_OUT[coefficients]}."
        fail(ValueError, name, "ns_coefficients", f"one of {list(PUBLISHED)}, or numbers", coefficients, hint)
    triples, fits_any = PUBLISHED[coefficients]
    if fits_any:
        steps = STEPS if ns_steps is None else ns_steps
        return (*triples, *(triples[-1],) * steps)[:steps]
    if ns_steps not in (None, len(triples)):
        expected = f"None or {len(triples)}, the number of iterations of ns_coefficients='{coefficients}'"
        fail(ValueError, name, "ns_steps", expected, ns_steps)
    return triples


def _stated(name: str, ns_steps: int | None, coefficients: Any) -> tuple[Triple, ...]:
    """Return the iterations of a triple, or of one for each."""
    expected = "three numbers, a list of three numbers for each iteration, or a name"
    if not isinstance(coefficients, (list, tuple)) or len(coefficients) == 0:
        fail(TypeError, name, "ns_coefficients", expected, coefficients)
    if all(map(is_number, coefficients)):
        triples = [coefficients] * (STEPS if ns_steps is None else ns_steps)
    else:
        triples = list(coefficients)
        if ns_steps not in (None, len(triples)):
            fail(ValueError, name, "ns_steps", f"the number of triples in 'ns_coefficients', {len(triples)}", ns_steps)
        check_at_most(name, "len(ns_coefficients)", len(triples), MOST_STEPS)
    for triple in triples:
        if not isinstance(triple, (list, tuple)) or len(triple) != 3 or not all(map(is_number, triple)):
            fail(TypeError, name, "ns_coefficients", expected, coefficients)
        if not all(abs(number) <= MOST for number in triple):
            fail(ValueError, name, "ns_coefficients", f"numbers {FINITE}", coefficients)
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def _diverge(iterations: Sequence[Triple], most: float) -> bool:
    """Return whether iterations lead singular values up to `most`, or a factor, to numbers too large for float32."""
    x = np.linspace(0.0, most, 1001)
    for a, b, c in iterations:
        factor = abs(a) + abs(b) * x**2 + abs(c) * x**4
        x = np.abs((a + b * x**2 + c * x**4) * x)
        if not max(factor.max(), x.max()) < MOST_SIZE:
            return True
    return False


def _turned(iterations: Sequence[Triple]) -> float | None:
    """Return the least singular value from 0 to 1 that iterations turn to a negative number; None if there is none."""
    x = start = np.linspace(0.0, 1.0, 1001)
    for a, b, c in iterations:
        x = (a + b * x**2 + c * x**4) * x
    return None if (x >= 0.0).all() else float(start[np.argmax(x < 0.0)])
