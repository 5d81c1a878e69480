"""Kingma and Ba (2015), section 2, with L2 decay; Nesterov's momentum as the document of nn.AdamOffload."""

import numpy as np

from .base import Reference


class Adam(Reference):
    states = ("moment1", "moment2")
    kernels = (
        ("adam", "su", (0.9, 0.999, 1e-8), 2, {"corrects_eps": True}),
        ("adam_amsgrad", "suu", (0.9, 0.999, 1e-8), 0, {"use_amsgrad": True}),
    )
    decay_in_states = True
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    use_nesterov = use_amsgrad = corrects_eps = False

    def __init__(self, *args, use_amsgrad=False, **kwargs):
        if use_amsgrad:
            self.states = (*self.states, "vhat")
        super().__init__(*args, use_amsgrad=use_amsgrad, **kwargs)

    def update(self, i, w, g, learning_rate, weight_decay):
        m, v = self.state["moment1"], self.state["moment2"]
        g = g + weight_decay * w
        m[i] = self.beta1 * m[i] + (1 - self.beta1) * g
        v[i] = self.beta2 * v[i] + (1 - self.beta2) * g**2
        second = v[i]
        if self.use_amsgrad:
            vhat = self.state["vhat"]
            vhat[i] = second = np.maximum(vhat[i], v[i])
        first = self.beta1 * m[i] + (1 - self.beta1) * g if self.use_nesterov else m[i]
        bc1, bc2 = 1 - self.beta1**self.step_count, 1 - self.beta2**self.step_count
        if self.corrects_eps:  # Algorithm 1
            return learning_rate * (first / bc1) / (np.sqrt(second / bc2) + self.eps), 1.0
        return learning_rate * np.sqrt(bc2) / bc1 * first / (np.sqrt(second) + self.eps), 1.0


class AdamOffload(Adam):
    kernels = (("adam_offload", "su", (0.9, 0.999, 1e-8), 1, {"use_nesterov": True}),)
    use_locking = False
