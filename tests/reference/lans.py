"""Zheng et al. (2020), Algorithm 2."""

import numpy as np

from .base import Reference, norm


class LANS(Reference):
    states = ("lans_m", "lans_v")
    kernels = (("lans", "su", (0.9, 0.999, 1e-6, 0.1, 0.0, np.inf), 0, {"clip_gradient": 0.1}),)
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    lower_bound = upper_bound = clip_gradient = aggregate_num = None
    use_fused_step = True

    def update(self, i, w, g, learning_rate, weight_decay):
        m, v = self.state["lans_m"], self.state["lans_v"]
        size = norm(g)
        g = g / size if size > 0 else np.zeros_like(g)
        if self.clip_gradient is not None:
            g = np.clip(g, -self.clip_gradient, self.clip_gradient)
        m[i] = self.beta1 * m[i] + (1 - self.beta1) * g
        v[i] = self.beta2 * v[i] + (1 - self.beta2) * g**2
        d = np.sqrt(v[i] / (1 - self.beta2**self.step_count)) + self.eps
        of_moment, of_gradient = m[i] / (1 - self.beta1**self.step_count) / d, g / d
        c = self.direction(i, of_moment, self.decayed(of_moment, w, weight_decay))
        s = self.direction(i, of_gradient, self.decayed(of_gradient, w, weight_decay))
        phi = norm(w)
        if self.lower_bound is not None:
            phi = max(phi, self.lower_bound)
        if self.upper_bound is not None:
            phi = min(phi, self.upper_bound)
        ratio_c = phi / norm(c) if phi > 0 and norm(c) > 0 else 1.0
        ratio_s = phi / norm(s) if phi > 0 and norm(s) > 0 else 1.0
        along_c, along_s = self.beta1 * ratio_c, (1 - self.beta1) * ratio_s
        return learning_rate * (along_c * c + along_s * s), along_c + along_s
