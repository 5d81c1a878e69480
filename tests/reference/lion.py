"""Chen et al. (2023), Algorithm 2."""

import numpy as np

from .base import Reference


class Lion(Reference):
    states = ("lion_m",)
    beta1, beta2 = 0.9, 0.99

    def update(self, i, w, g, learning_rate, weight_decay):
        m = self.state["lion_m"]
        u = self.direction(i, np.sign(self.beta1 * m[i] + (1 - self.beta1) * g), weight_decay * w)
        m[i] = self.beta2 * m[i] + (1 - self.beta2) * g
        return learning_rate * u, 1.0
