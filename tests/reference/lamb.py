"""You et al. (2020), Algorithm 2."""

import numpy as np

from .base import Reference, norm


class Lamb(Reference):
    states = ("lamb_m", "lamb_v")
    kernels = (("lamb", "su", (0.9, 0.999, 1e-6, 0.0, np.inf, 0.0, np.inf), 1 + 2, {}),)
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    bias_correction = always_adapt = True
    weight_norm_bounds = trust_ratio_bounds = None

    def update(self, i, w, g, learning_rate, weight_decay):
        m, v = self.state["lamb_m"], self.state["lamb_v"]
        m[i] = self.beta1 * m[i] + (1 - self.beta1) * g
        v[i] = self.beta2 * v[i] + (1 - self.beta2) * g**2
        m_hat, v_hat = m[i], v[i]
        if self.bias_correction:
            m_hat = m_hat / (1 - self.beta1**self.step_count)
            v_hat = v_hat / (1 - self.beta2**self.step_count)
        r = m_hat / (np.sqrt(v_hat) + self.eps)
        u = self.direction(i, r, self.decayed(r, w, weight_decay))
        phi = norm(w)
        if self.weight_norm_bounds is not None:
            phi = np.clip(phi, *self.weight_norm_bounds)
        ratio = phi / norm(u) if phi > 0 and norm(u) > 0 else 1.0
        if self.trust_ratio_bounds is not None:
            ratio = np.clip(ratio, *self.trust_ratio_bounds)
        if not self.always_adapt and weight_decay == 0:
            ratio = 1.0
        return learning_rate * ratio * u, ratio
