"""Problems of 256 numbers that an optimizer solves or not, each with one thing that makes training hard.

The idea is LightBench's, https://github.com/HomebrewML/LightBench: small problems that show where an optimizer fails
without a word. The minimum is away from 0, so that decay, or a step relative to the weight, is no help.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter
from training import assign

N = 16
SHAPE = (N, N)
STEPS = 300


class Problem:
    """A function of a matrix of 16 x 16 with its gradient, solved when it falls below a part of its first value.

    A subclass implements :meth:`value` and :meth:`slope`, in float64.
    """

    part = 1e-3  # of the first value
    scale = 10.0  # of the rates that tuning starts with: numbers are of order 1, where weights are of order 0.1
    tables = ("x",)
    splits = {}  # noqa: RUF012 - read only
    data = "2"  # to be raised when a problem changes

    def __init__(self):
        self.params = [Parameter(ms.Tensor(np.zeros(SHAPE, np.float32)), name="x")]
        self.prepare(np.random.default_rng([1, 2, 3]))  # a seed that no run has

    def prepare(self, rng):
        """Make what all seeds share."""
        self.minimum = 2.0 * rng.standard_normal(SHAPE)

    def start(self, rng):
        """Return where a run begins."""
        return rng.standard_normal(SHAPE)

    def value(self, x):
        """Return the function at x."""
        raise NotImplementedError

    def slope(self, x, rng):
        """Return the gradient at x; rng is that of the step, for noise."""
        raise NotImplementedError

    def reset(self, seed):
        """Go to the start."""
        assign(self.params, [self.start(np.random.default_rng(seed)).astype(np.float32)])
        self.first = self.value(self.place())

    def place(self):
        """Return x."""
        return self.params[0].asnumpy().astype(np.float64)

    def gradients(self, seed, step):
        """Return the gradient as a list of one tensor."""
        return [ms.Tensor(self.slope(self.place(), np.random.default_rng([seed, 1 + step])).astype(np.float32))]

    def loss(self):
        """Return the value as a part of the first; solved at most :attr:`part`."""
        return float(self.value(self.place()) / self.first)


class Quadratic(Problem):
    """A quadratic with curvatures from 1 to 1e-4 along the axes."""

    curvatures = np.logspace(0, -4, N * N).reshape(SHAPE)

    def value(self, x):
        """Return half the sum of curvature times the squared distance."""
        return 0.5 * (self.curvatures * (x - self.minimum) ** 2).sum()

    def slope(self, x, rng):
        """Return the gradient."""
        return self.curvatures * (x - self.minimum)


class Rotated(Quadratic):
    """A quadratic with curvatures from 1 to 1e-3, turned: no axis shows its curvature."""

    curvatures = np.logspace(0, -3, N * N)

    def prepare(self, rng):
        """Draw the minimum and the rotation."""
        super().prepare(rng)
        self.rotation = np.linalg.qr(rng.standard_normal((N * N, N * N)))[0]

    def value(self, x):
        """Return the quadratic in the turned axes."""
        return 0.5 * (self.curvatures * (self.rotation @ (x - self.minimum).ravel()) ** 2).sum()

    def slope(self, x, rng):
        """Return the gradient."""
        return (self.rotation.T @ (self.curvatures * (self.rotation @ (x - self.minimum).ravel()))).reshape(SHAPE)


class Saddle(Problem):
    """The factorization of a matrix of rank 4, begun at a saddle: near 0 there is almost no gradient."""

    part = 1e-2

    def prepare(self, rng):
        """Draw a positive semidefinite matrix."""
        factor = rng.standard_normal((N, 4))
        self.product = factor @ factor.T / N

    def start(self, rng):
        """Return a point close to the saddle."""
        return 1e-4 * rng.standard_normal(SHAPE)

    def value(self, x):
        """Return a quarter of the squared distance from the product."""
        return 0.25 * ((x @ x.T - self.product) ** 2).sum()

    def slope(self, x, rng):
        """Return the gradient."""
        return (x @ x.T - self.product) @ x


class Plateau(Problem):
    """A narrow basin in a plain: at the start gradients are a thousandth of those in the basin, and less."""

    part = 1e-2

    def start(self, rng):
        """Return a point on the plain."""
        return self.minimum + np.where(rng.random(SHAPE) < 0.5, -1, 1) * rng.uniform(3.5, 4.5, SHAPE)

    def value(self, x):
        """Return the mean of 1 - exp(-d^2 / 2) of the distances."""
        return (1.0 - np.exp(-0.5 * (x - self.minimum) ** 2)).mean()

    def slope(self, x, rng):
        """Return the gradient of the sum."""
        return (x - self.minimum) * np.exp(-0.5 * (x - self.minimum) ** 2)


class Noisy(Problem):
    """A bowl whose gradients have noise of more than four times the first distance."""

    part = 0.1

    def value(self, x):
        """Return half the squared distance."""
        return 0.5 * ((x - self.minimum) ** 2).sum()

    def slope(self, x, rng):
        """Return the gradient with noise."""
        return x - self.minimum + 10.0 * rng.standard_normal(SHAPE)


class Sparse(Noisy):
    """A bowl of which a step sees one row, the rows by Zipf's law: the last row one step in fifty."""

    part = 0.05

    def slope(self, x, rng):
        """Return the gradient of a row."""
        chances = 1.0 / np.arange(1, N + 1)
        row = rng.choice(N, p=chances / chances.sum())
        gradient = np.zeros(SHAPE)
        gradient[row] = (x - self.minimum)[row]
        return gradient


PROBLEMS = {
    "quadratic": Quadratic,
    "rotated": Rotated,
    "saddle": Saddle,
    "plateau": Plateau,
    "noisy": Noisy,
    "sparse": Sparse,
}
