"""Sutskever et al. (2013), as the documents of nn.Momentum, nn.SGD and torch.optim.SGD have it."""

from .base import Reference


class Momentum(Reference):
    states = ("moments",)
    kernels = (("momentum", "s", (0.9, 0.3), 0, {"dampening": 0.3}),)
    decay_in_states = True
    momentum, dampening, use_nesterov = 0.9, 0.0, False

    def update(self, i, w, g, learning_rate, weight_decay):
        v = self.state["moments"]
        g = g + weight_decay * w
        v[i] = g if self.step_count == 1 else self.momentum * v[i] + (1 - self.dampening) * g
        return learning_rate * (g + self.momentum * v[i] if self.use_nesterov else v[i]), 1.0
