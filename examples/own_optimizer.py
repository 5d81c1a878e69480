"""An optimizer of your own on the package's base: Lion, "Symbolic Discovery of Optimization Algorithms"."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ms_optim import FusedOptimizer, Rule


class Lion(FusedOptimizer):
    """The sign of an interpolated momentum, with decoupled weight decay: Chen et al. (2023), Algorithm 2."""

    def __init__(self, params, learning_rate=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0, **shared):
        # 1 - beta is formed here, in float64: in a graph it would be a difference of float32 numbers.
        self.old1, self.new1, self.old2, self.new2 = beta1, 1 - beta1, beta2, 1 - beta2
        rule = Rule("lion", ("lion_m",), is_elementwise=True)
        super().__init__(params, learning_rate, weight_decay, rule, **{"backend": "composite", **shared})

    def directions(self, scalars, weight, gradient, weight_decay, states):
        """State the update, u = sign(beta1 m + (1 - beta1) g) + lambda w, and the new momentum."""
        u = ops.sign(self.old1 * states[0] + self.new1 * gradient) + weight_decay * weight
        return (u,), (self.old2 * states[0] + self.new2 * gradient,)


if __name__ == "__main__":
    net, loss = nn.Dense(8, 1), nn.MSELoss()
    optimizer = Lion(net.trainable_params(), learning_rate=0.01, weight_decay=0.01, grad_clip_norm=1.0)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)
    x = ms.Tensor(np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    for k in range(101):
        value = step(x, x.sum(axis=1, keepdims=True))
        if k % 20 == 0:
            print(f"step {k:3}: loss {float(value):.4f}")
