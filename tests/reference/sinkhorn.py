"""DeepSeek-AI, DeepSeek-V4.1-Flash (2026), Section 2.5, Algorithm 1, as it stands: divided matrices."""

import numpy as np

from .base import Reference


def balanced(g, normalizations, tau, eps):
    """Return a matrix after its rows and columns were normalized in turn."""
    rho = np.linalg.norm(g, axis=1)
    u = np.where((rho <= tau * rho.mean())[:, None], 0.0, g)
    for k in range(1, normalizations + 1):
        u = u / (np.linalg.norm(u, axis=k % 2, keepdims=True) + eps)
    return u


class Sinkhorn(Reference):
    states = ("sinkhorn_m",)
    kernels = (("sinkhorn", "s", (0.95, 1e-3, 1e-20, 0.18), 11 // 2, {}),)
    momentum, normalizations, tau, eps, scale = 0.95, 11, 1e-3, 1e-20, 0.18

    def __init__(self, *args, skip_nonfinite=True, **kwargs):
        super().__init__(*args, skip_nonfinite=skip_nonfinite, **kwargs)

    def update(self, i, w, g, learning_rate, weight_decay):
        m, beta = self.state["sinkhorn_m"], self.momentum
        m[i] = beta * m[i] + (1 - beta) * g
        # A kernel takes any tensor as a matrix: its first dimension has the rows.
        matrix = (beta * m[i] + (1 - beta) * g).reshape(len(g) if g.ndim > 1 else 1, -1)
        u = balanced(matrix, self.normalizations, self.tau, self.eps).reshape(g.shape)
        d = self.scale * np.sqrt(matrix.shape[1]) * u
        return learning_rate * self.direction(i, d, self.decayed(d, w, weight_decay)), 1.0
