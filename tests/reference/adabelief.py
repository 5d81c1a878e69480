"""Zhuang et al. (2020), Algorithm 2, with decoupled weight decay."""

import numpy as np

from .base import Reference


class AdaBelief(Reference):
    states = ("adabelief_m", "adabelief_s")
    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def update(self, i, w, g, learning_rate, weight_decay):
        m, s, t = self.state["adabelief_m"], self.state["adabelief_s"], self.step_count
        m[i] = self.beta1 * m[i] + (1 - self.beta1) * g
        s[i] = self.beta2 * s[i] + (1 - self.beta2) * (g - m[i]) ** 2 + self.eps
        corrected = np.sqrt(s[i] / (1 - self.beta2**t)) + self.eps
        u = self.direction(i, m[i] / (1 - self.beta1**t) / corrected, weight_decay * w)
        return learning_rate * u, 1.0
