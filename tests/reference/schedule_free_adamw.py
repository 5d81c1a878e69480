"""Defazio et al. (2024), Algorithm 1, with Adam's second moment."""

import numpy as np

from .base import Reference, norm


class ScheduleFreeAdamW(Reference):
    states = ("schedule_free_z", "schedule_free_v")
    kernels = (("schedule_free_adamw", "eu", (0.9, 0.999, 1e-8, 2.0, 1.0, 2.0), 0, {"warmup_steps": 2, "r": 1.0}),)
    start_at_weights, weighs_steps = 1, True
    betas, eps = (0.9, 0.999), 1e-8
    warmup_steps, r, weight_lr_power = 0, 0.0, 2.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest_rate, self.total = [0.0] * len(self.masters), [0.0] * len(self.masters)

    def update(self, i, w, g, learning_rate, weight_decay):
        (beta1, beta2), t = self.betas, self.step_count
        z, v = (self.state[name] for name in self.states)
        gamma = learning_rate * min(1.0, t / self.warmup_steps) if self.warmup_steps else learning_rate
        self.largest_rate[i] = max(self.largest_rate[i], gamma)
        p = t**self.r * self.largest_rate[i] ** self.weight_lr_power
        self.total[i] += p
        c = p / self.total[i] if self.total[i] > 0 else 0.0
        v[i] = beta2 * v[i] + (1 - beta2) * g**2
        n = g / (np.sqrt(v[i] / (1 - beta2**t)) + self.eps) + weight_decay * w
        # The new y is (1 - c) w + c z + gamma (beta1 (1 - c) - 1) n. On the way there weight and z nearly cancel.
        parts = gamma * (1 - beta1 * (1 - c)) * n, c * w, -c * z[i]
        update = sum(parts)
        if norm(update) > 0:
            self.magnified_update = sum(norm(part) for part in parts) / norm(update)
        z[i] = z[i] - gamma * n
        return update, 1.0

    def evaluated(self):
        """Return x, the weights to be evaluated."""
        beta1, z = self.betas[0], self.state["schedule_free_z"]
        return [y + (1 - 1 / beta1) * (z[i] - y) for i, y in enumerate(self.masters)]
