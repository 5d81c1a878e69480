"""The elementwise parts of the composite step in AKG kernels, each of which is tested: AKG miscompiles some.

Operations on whole tensors (norms, clipping, skipping a step) remain in MindSpore's operators.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ...arguments.options import asked_stages
from ...kernels import table as kernels
from ...rules.arithmetic import moved_along

# Two float32 implementations with about a dozen roundings each, on numbers that do not cancel.
TOLERANCE = 64 * 2.0**-24
# Test data with this period is repeated: a prime, so that consecutive tiles get different numbers.
PERIOD = 4099
# The result of the test of a kernel on a device, for a number of elements: None, or what is wrong.
_found: dict[tuple, str | None] = {}


def rows_of(kernel, numbers, tensors) -> Any:
    """Run a kernel on flattened tensors and return its rows in their shape."""
    flat = ()
    for x in tensors:
        flat += (x.reshape(-1),)
    rows = ()
    for row in ops.unstack(kernel(*numbers, *flat), 0):
        rows += (row.reshape(F.shape(tensors[0])),)
    return rows


class AkgKernels(nn.Cell):
    """AKG's kernels for the elementwise parts of a rule.

    Args:
        rule: The rule's name.
        state_count: Number of its states.
        constants: Its constants, in the order of its kernel.
    """

    def __init__(self, rule: str, state_count: int, constants: tuple[float, ...]):
        super().__init__(auto_prefix=False)
        kernel, move, directions = kernels.akg_kernels(rule)
        self.state_count, self.direction_count = state_count, directions
        self.constants, self.zero = Tensor(np.array(constants, np.float32)), Tensor(0.0, ms.float32)
        self.directions = kernels.akg_operator(kernel, state_count + directions)
        self.move = kernels.akg_operator(move, 2)

    def stated(self, scalars, weight, gradient, weight_decay, states):
        """Return what the rule's ``directions`` returns."""
        numbers = ()
        for x in (*scalars, weight_decay):
            numbers += (self.zero + x,)
        numbers = (self.constants, ops.stack(numbers))
        rows = rows_of(self.directions, numbers, (weight, gradient, *states))
        return rows[self.state_count :], rows[: self.state_count]

    def along(self, coefficients, weight, directions):
        """Return the update along the directions, and the new weight."""
        return rows_of(self.move, (ops.stack(coefficients),), (weight, *directions))


def why_not(rule, settings, options) -> str | None:
    """Return why a rule has no AKG kernels for an optimizer's settings and arguments, or None."""
    reason = kernels.why_not_akg(rule.name)
    for stage in asked_stages(options):
        if reason is None and "akg" in stage.lacking:
            return f"{stage.words or stage.keyword} is not supported by AKG's kernels"
    if reason is None and settings.device != kernels.device_target():
        return f"the arithmetic runs on the host, but AKG's kernels run on {kernels.device_target()}"
    return reason


def tried(akg_kernels: AkgKernels, statement, rule, device: str, dtype, sizes) -> str | None:
    """Test the kernels on tensors of some sizes; return what is wrong, or None.

    Args:
        akg_kernels: The kernels.
        statement: The optimizer, which implements its rule in MindSpore's operators.
        rule: Its rule.
        device: The device.
        dtype: The dtype of the step count.
        sizes: Numbers of elements.
    """
    for size in sorted(set(sizes)):
        key = (type(statement), *kernels.akg_kernels(rule.name)[:2], device, size)
        if key not in _found:
            _found[key] = _tried(akg_kernels, statement, rule, device, dtype, size)
        if _found[key] is not None:
            return _found[key]
    return None


def _tried(akg_kernels, statement, rule, device, dtype, size):
    """Test the kernels on a number of elements; return what is wrong, or None."""
    data = trial_data(min(size, PERIOD), [kind for _, kind in rule.kinds], akg_kernels.direction_count)
    scalars = statement.scalars(Tensor(3.0, dtype))
    try:
        made = _both_parts(
            akg_kernels.stated, akg_kernels.along, akg_kernels, scalars, [np.resize(x, size) for x in data]
        )
    except Exception as error:
        # AKG runs as a separate program; this is all that it reports of a failure.
        return f"AKG cannot compile or run the rule '{rule.name}' on {device}: {str(error).splitlines()[0]}"
    right = _both_parts(statement.directions, _along, akg_kernels, scalars, data)
    worst = max(difference(x, np.resize(y, size)) for x, y in zip(made, right))
    if worst <= TOLERANCE:
        return None
    return (
        f"AKG's kernel for the rule '{rule.name}' is wrong on {device}: of {size} elements, one has a relative "
        f"error of {worst:.1e} against MindSpore's operators; the tolerance is {TOLERANCE:.1e}"
    )


def _along(coefficients, weight, directions):
    """Return what :meth:`AkgKernels.along` returns, in MindSpore's operators."""
    return moved_along(weight, [c * d for c, d in zip(coefficients, directions)])


def _both_parts(stated, along, akg_kernels, scalars, data):
    """Return the results of two functions for test data: directions and states, and the update along directions."""
    weight, gradient, *others = (Tensor(x) for x in data)
    states, directions = tuple(others[: akg_kernels.state_count]), tuple(others[akg_kernels.state_count :])
    found, new_states = stated(scalars, weight, gradient, Tensor(0.1, ms.float32), states)
    coefficients = tuple(Tensor(0.5 + k, ms.float32) for k in range(len(directions)))
    return [x.asnumpy() for x in (*found, *new_states, *along(coefficients, weight, directions))]


def trial_data(size, kinds, directions):
    """Make a weight, a gradient, states and directions with many magnitudes, whose sums do not cancel."""
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 0.0, 1.0], size, p=[0.4, 0.2, 0.4])
    scale = 10.0 ** rng.uniform(-8, 1, size)

    def magnitudes():
        return scale * rng.uniform(0.5, 2.0, size)

    weight, gradient = (sign * magnitudes() for _ in range(2))
    states = [magnitudes() ** 2 if kind == "unsigned" else sign * magnitudes() for kind in kinds]
    against = [-sign * magnitudes() for _ in range(directions)]
    return [x.astype(np.float32) for x in (weight, gradient, *states, *against)]


def difference(actual, expected):
    """Return the largest difference relative to the expected values; infinite if it is not a number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(actual == expected, 0.0, np.abs(actual - expected) / np.abs(expected))
    worst = float(np.max(ratio))
    return worst if np.isfinite(worst) else np.inf
