"""A custom optimizer on the package's base class: AdaBelief, "Adapting Stepsizes by the Belief in Gradients"."""

import argparse
import math

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ms_optim import FusedOptimizer, Rule


class AdaBelief(FusedOptimizer):
    """Adam that divides by the deviation of gradients from their mean: Zhuang et al. (2020); decoupled weight decay."""

    def __init__(self, params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, **shared):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        # Computed here, in float64; a graph treats the betas as float32 numbers.
        self.new1, self.new2, self.logs = 1 - beta1, 1 - beta2, (math.log(beta1), math.log(beta2))
        rule = Rule("adabelief", ("adabelief_m", "adabelief_s"), is_elementwise=True)
        super().__init__(params, learning_rate, weight_decay, rule, **{"backend": "composite", **shared})

    def scalars(self, t):
        """Return the bias corrections 1 - beta^t of step t."""
        return tuple([ops.cast(1.0 - ops.exp(t * log), ms.float32) for log in self.logs])

    def directions(self, scalars, weight, gradient, weight_decay, states):
        """Return the update, m_hat / (sqrt(s_hat) + eps) + lambda w, and the new states."""
        m = self.beta1 * states[0] + self.new1 * gradient
        s = self.beta2 * states[1] + self.new2 * ops.square(gradient - m) + self.eps
        u = m / scalars[0] / (ops.sqrt(s / scalars[1]) + self.eps)
        return (self.with_decay(u, weight, weight_decay),), (m, s)


def main():
    """Train a linear network and print its loss."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    net, loss = nn.Dense(8, 1), nn.MSELoss()
    optimizer = AdaBelief(net.trainable_params(), learning_rate=0.05, weight_decay=0.01, grad_clip_norm=1.0)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)
    x = ms.Tensor(np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    for k in range(101):
        value = step(x, x.sum(axis=1, keepdims=True))
        if k % 20 == 0:
            print(f"step {k:3}: loss {float(value):.4f}")


if __name__ == "__main__":
    main()
