"""Pagliardini et al. (2024), Algorithm 1 and its schedulers."""

import numpy as np

from .base import Reference


class AdEMAMix(Reference):
    states = ("ademamix_m1", "ademamix_nu", "ademamix_m2")
    kernels = (("ademamix", "sus", (0.9, 0.999, 1e-8, 0.9999, 5.0, 2.0), 0, {"warmup_steps": 2}),)
    betas, alpha, eps, warmup_steps = (0.9, 0.999, 0.9999), 5.0, 1e-8, None

    def scheduled(self):
        """Return alpha and beta3 of the step."""
        beta1, _, beta3 = self.betas
        if self.warmup_steps is None:
            return self.alpha, beta3
        t, steps = self.step_count, self.warmup_steps
        if t >= steps:
            return self.alpha, beta3
        power = np.log(beta1) * np.log(beta3) / ((1 - t / steps) * np.log(beta3) + t / steps * np.log(beta1))
        return min(t * self.alpha / steps, self.alpha), min(np.exp(power), beta3)

    def update(self, i, w, g, learning_rate, weight_decay):
        beta1, beta2, _ = self.betas
        alpha, beta3 = self.scheduled()
        m1, nu, m2 = (self.state[name] for name in self.states)
        m1[i] = beta1 * m1[i] + (1 - beta1) * g
        nu[i] = beta2 * nu[i] + (1 - beta2) * g**2
        m2[i] = beta3 * m2[i] + (1 - beta3) * g
        fast, root = m1[i] / (1 - beta1**self.step_count), np.sqrt(nu[i] / (1 - beta2**self.step_count))
        mixed = (fast + alpha * m2[i]) / (root + self.eps)
        return learning_rate * self.direction(i, mixed, self.decayed(mixed, w, weight_decay)), 1.0
