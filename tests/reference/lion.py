"""Chen et al. (2023), Algorithm 2."""

import numpy as np

from .base import Reference

# Float32 settles the sign of a sum of two terms only if it is more than this part of these.
SETTLED = 2.0**-20


class Lion(Reference):
    states = ("lion_m",)
    kernels = (("lion", "s", (0.9, 0.99), 0, {}),)
    betas = (0.9, 0.99)
    # Weights after the step under test: where rounding decides a sign, and so a whole step, they say which one it took.
    seen = None

    def update(self, i, w, g, learning_rate, weight_decay):
        (beta1, beta2), m = self.betas, self.state["lion_m"]
        old, new = beta1 * m[i], (1 - beta1) * g
        sign = np.sign(old + new)
        if self.seen is not None and learning_rate > 0:
            open_ = (np.abs(old + new) <= SETTLED * (np.abs(old) + np.abs(new))) & (old + new != 0)
            signs = np.array([-1.0, 0.0, 1.0]).reshape(3, *(1,) * np.ndim(w))
            off = np.abs((w - self.seen[i]) / learning_rate - signs - self.decayed(signs, w, weight_decay))
            sign = np.where(open_, np.argmin(off, axis=0) - 1.0, sign)
        u = self.direction(i, sign, self.decayed(sign, w, weight_decay))
        m[i] = beta2 * m[i] + (1 - beta2) * g
        return learning_rate * u, 1.0
