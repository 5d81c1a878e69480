"""Kingma and Ba (2015), section 2, with L2 decay; Nesterov's momentum as the document of nn.AdamOffload."""

import numpy as np

from .base import Reference


class AdamOffload(Reference):
    states = ("moment1", "moment2")
    kernels = (("adam_offload", "su", (0.9, 0.999, 1e-8), 1, {"use_nesterov": True}),)
    decay_in_states = True
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    use_nesterov = use_locking = False

    def update(self, i, w, g, learning_rate, weight_decay):
        m, v = self.state["moment1"], self.state["moment2"]
        g = g + weight_decay * w
        m[i] = self.beta1 * m[i] + (1 - self.beta1) * g
        v[i] = self.beta2 * v[i] + (1 - self.beta2) * g**2
        rate = learning_rate * np.sqrt(1 - self.beta2**self.step_count) / (1 - self.beta1**self.step_count)
        first = self.beta1 * m[i] + (1 - self.beta1) * g if self.use_nesterov else m[i]
        return rate * first / (np.sqrt(v[i]) + self.eps), 1.0
