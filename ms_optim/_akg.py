"""The elementwise phases of the composite step in kernels that AKG compiles, and their trial: AKG errs without a word.

What is of whole tensors (norms, clipping, the skipping of a step) stays in MindSpore's operators.
"""

# AkgPhases reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from . import _kernels

# Two float32 statements of the same dozen roundings, on numbers that do not cancel.
TOLERANCE = 64 * 2.0**-24
# Trial data of so many elements is repeated: a prime, so that no tile sees the same numbers as the next.
PERIOD = 4099
# What the trial of a kernel on a device, for a number of elements, has found: None or what is wrong.
_found: dict[tuple, str | None] = {}


def rows_of(kernel, numbers, tensors):
    """Run a kernel on flattened tensors and return its rows in their shape."""
    flat = ()
    for x in tensors:
        flat += (x.reshape(-1),)
    rows = ()
    for row in ops.unstack(kernel(*numbers, *flat), 0):
        rows += (row.reshape(F.shape(tensors[0])),)
    return rows


class AkgPhases:
    """What CompositeStep asks for where AKG's kernels run; a mixin that reads the optimizer's attributes."""

    akg: bool

    def _akg_stated(self, scalars, weight, gradient, weight_decay, states):
        """Return what ``directions`` returns."""
        numbers = ()
        for x in (*scalars, weight_decay):
            numbers += (self._zero + x,)
        numbers = (self._akg_constants, ops.stack(numbers))
        rows = rows_of(self._akg_directions, numbers, (weight, gradient, *states))
        return rows[self._state_count :], rows[: self._state_count]

    def _akg_along(self, coefficients, weight, directions):
        """Return the update along some directions, and the weight that it leads to."""
        return rows_of(self._akg_move, (ops.stack(coefficients),), (weight, *directions))

    def _prepare_akg(self, rule, device):
        """Make the operators and try them; say what stands against them, or return None."""
        reason = _kernels.why_not_akg(rule.name)
        if reason is None and device != _kernels.device_target():
            reason = f"the arithmetic runs on the host, AKG's kernels on {_kernels.device_target()}"
        if reason is not None:
            return reason
        kernel, move, directions = _kernels.akg_kernels(rule.name)
        self._akg_constants = Tensor(np.array(self.akg_constants(), np.float32))
        self._akg_directions = _kernels.akg_operator(kernel, len(rule.states) + directions)
        self._akg_move = _kernels.akg_operator(move, 2)
        for size in sorted({p.size for p in self._parameters}):
            key = (type(self), kernel, move, device, size)
            if key not in _found:
                _found[key] = self._tried(rule.name, device, size, directions)
            if _found[key] is not None:
                return _found[key]
        return None

    def _tried(self, rule, device, size, directions):
        """Try the kernels on so many elements; say what is wrong, or return None."""
        data = trial_data(min(size, PERIOD), self._state_count, directions)
        self.akg = True
        try:
            made = self._both_phases([np.resize(x, size) for x in data])
        except Exception as error:
            # AKG runs as a program of its own: of what it stumbles over this is all that comes back.
            return f"AKG does not compile or run the rule '{rule}' on {device}: {str(error).splitlines()[0]}"
        finally:
            self.akg = False
        right = self._both_phases(data)
        worst = max(difference(x, np.resize(y, size)) for x, y in zip(made, right))
        if worst <= TOLERANCE:
            return None
        return (
            f"AKG's kernel for the rule '{rule}' is wrong on {device}: of {size} elements one is off by {worst:.1e} of "
            f"its value in MindSpore's operators, where {TOLERANCE:.1e} is allowed"
        )

    def _both_phases(self, data):
        """Return what both phases make of trial data."""
        weight, gradient, *others = (Tensor(x[None]) for x in data)
        states, directions = tuple(others[: self._state_count]), tuple(others[self._state_count :])
        scalars = self.scalars(Tensor(3.0, self._step_dtype))
        found, new_states = self._stated(scalars, weight, gradient, Tensor([0.1], ms.float32), states)
        coefficients = tuple(Tensor([0.5 + k], ms.float32) for k in range(len(directions)))
        moved = self._along(coefficients, weight, directions)
        return [x.asnumpy()[0] for x in (*found, *new_states, *moved)]


def trial_data(size, states, directions):
    """Make a weight, a gradient, states and directions of many magnitudes whose sums do not cancel."""
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 0.0, 1.0], size, p=[0.4, 0.2, 0.4])
    scale = 10.0 ** rng.uniform(-8, 1, size)

    def magnitudes():
        return scale * rng.uniform(0.5, 2.0, size)

    weight, gradient, m = (sign * magnitudes() for _ in range(3))
    squares = [magnitudes() ** 2 for _ in range(states - 1)]
    against = [-sign * magnitudes() for _ in range(directions)]
    return [x.astype(np.float32) for x in (weight, gradient, m, *squares, *against)]


def difference(actual, expected):
    """Return the largest difference relative to what is expected, infinite where there is no number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(actual == expected, 0.0, np.abs(actual - expected) / np.abs(expected))
    worst = float(np.max(ratio))
    return worst if np.isfinite(worst) else np.inf
