"""Douillard et al. (2023), algorithm 1, and Sarfi et al. (2025), for any number of workers."""

import numpy as np


class LocalSteps:
    """Workers that each have a reference of their optimizer, and exchange.

    Args:
        workers: The references of the optimizer, one for each worker, from the same weights.
        fragments: The tensors of each fragment.
        due: The place in a round of the step after which each fragment is exchanged.
        every: Steps of a round.
        rate, momentum, nesterov: Of the outer step.
        decay: Of the residuals; None: there are none.
    """

    def __init__(self, workers, fragments, due, every, rate, momentum, nesterov, decay=None):
        self.workers, self.fragments, self.due, self.every = workers, fragments, due, every
        self.rate, self.momentum, self.nesterov, self.decay = rate, momentum, nesterov, decay
        self.starts = [w.copy() for w in workers[0].masters]
        self.velocities = [np.zeros_like(w) for w in self.starts]
        self.residuals = [[np.zeros_like(w) for w in self.starts] for _ in workers]
        self.steps = 0

    def step(self, gradients, sent):
        """Take a step of all workers.

        Args:
            gradients: Those of each worker.
            sent: From the place of a fragment and what each worker would send of each of its tensors to what it sends.
        """
        for worker, own in zip(self.workers, gradients):
            worker.step(own)
        self.steps += 1
        for k, tensors in enumerate(self.fragments):
            if self.steps % self.every == self.due[k]:
                self.exchange(tensors, lambda accumulated, k=k: sent(k, accumulated))

    def exchange(self, tensors, sent):
        accumulated = [
            [(self.decay or 0.0) * self.residuals[n][i] + self.starts[i] - worker.masters[i] for i in tensors]
            for n, worker in enumerate(self.workers)
        ]
        values = sent(accumulated)
        for place, i in enumerate(tensors):
            for n in range(len(self.workers)):
                self.residuals[n][i] = accumulated[n][place] - values[n][place]
            mean = sum(one[place] for one in values) / len(self.workers)
            self.velocities[i] = self.momentum * self.velocities[i] + mean
            along = mean + self.momentum * self.velocities[i] if self.nesterov else self.velocities[i]
            self.starts[i] = self.starts[i] - self.rate * along
            for worker in self.workers:
                worker.masters[i] = self.starts[i].copy()
                worker.peak["weight"][i] = np.maximum(worker.peak["weight"][i], np.abs(self.starts[i]))
