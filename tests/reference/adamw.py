"""Loshchilov and Hutter (2019), Algorithm 2."""

import numpy as np

from .base import Reference


class AdamW(Reference):
    states = ("adam_m", "adam_v")
    kernels = (
        ("adamw", "su", (0.9, 0.999, 1e-8), 4, {}),
        ("adamw_amsgrad", "suu", (0.9, 0.999, 1e-8), 1 + 2 + 4, {"amsgrad": True, "maximize": True}),
    )
    betas, eps = (0.9, 0.999), 1e-8
    amsgrad = maximize = False
    bias_correction = True

    def __init__(self, *args, amsgrad=False, **kwargs):
        if amsgrad:
            self.states = (*self.states, "adam_vhat")
        super().__init__(*args, amsgrad=amsgrad, **kwargs)

    def update(self, i, w, g, learning_rate, weight_decay):
        beta1, beta2 = self.betas
        m, v = self.state["adam_m"], self.state["adam_v"]
        if self.maximize:
            g = -g
        m[i] = beta1 * m[i] + (1 - beta1) * g
        v[i] = beta2 * v[i] + (1 - beta2) * g**2
        second = v[i]
        if self.amsgrad:
            vhat = self.state["adam_vhat"]
            vhat[i] = second = np.maximum(vhat[i], v[i])
        bc1 = bc2 = 1.0
        if self.bias_correction:
            bc1, bc2 = 1 - beta1**self.step_count, 1 - beta2**self.step_count
        adaptive = (m[i] / bc1) / (np.sqrt(second / bc2) + self.eps)
        return learning_rate * self.decayed(adaptive, w, weight_decay) + learning_rate * adaptive, 1.0
