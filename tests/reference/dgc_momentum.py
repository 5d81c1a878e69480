"""Lin et al. (2018), sections 3.1 to 3.3, for any number of workers."""

import numpy as np

from .base import Reference, norm, round_to

# How far float32 may be off in the magnitudes that it compares, relative to the largest that they have held.
NEAR = 64 * 2.0**-24


class DGCMomentum(Reference):
    """The same weights on all workers, states for each.

    Args:
        workers: How many there are; with more than one, step() takes a list of gradients for each.
    """

    states = ("dgc_u", "dgc_r")
    decay_in_states = True
    momentum, use_nesterov, decay_type = 0.9, False, "l2"
    rampup_begin_step, rampup_step, sparsity = 0, 1, (0.999,)
    min_compress_numel, workers, wire_dtype = 16384, 1, "float32"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        blank = {name: [np.zeros_like(w) for w in self.masters] for name in self.states}
        self.of_worker = [self.state] + [
            {name: [np.zeros_like(x) for x in arrays] for name, arrays in blank.items()}
            for _ in range(self.workers - 1)
        ]  # fmt: skip
        # For each worker and tensor what the optimizer sent, where that is known; see chosen(). And what its r is now;
        # see travelled().
        self.sent = self.behind = None

    def count(self, size):
        """Return how many elements of a tensor are sent now; None while all are."""
        if self.step_count < self.rampup_begin_step or size < self.min_compress_numel:
            return None
        stage = (self.step_count - self.rampup_begin_step) * len(self.sparsity) // self.rampup_step
        part = self.sparsity[min(stage, len(self.sparsity) - 1)]
        return max(1, round((1 - part) * size))

    def step(self, gradients):
        of_workers = gradients if self.workers > 1 else [gradients]
        prepared = [[self.prepared(g, c) for g, c in zip(one, self.centralized)] for one in of_workers]
        if self.skip and not all(np.isfinite(g).all() for one in prepared for g in one):
            self.skipped += 1
            return
        for i in range(len(self.masters)):
            w = self.masters[i] if self.keeps_masters else self.weights[i]
            lr, decay = self.learning_rates[i](self.step_count), self.weight_decays[i](self.step_count)
            local = [one[i] + decay * (np.sign(w) if self.decay_type == "l1" else w) for one in prepared]
            k = self.count(w.size)
            direction = self.dense(i, local) if k is None else self.compressed(i, local, k)
            self.statistics[i] = norm(prepared[0][i]), norm(w), norm(lr * direction), 1.0, 1.0
            self.peak["statistics"][i] = np.maximum(self.peak["statistics"][i], np.abs(self.statistics[i]))
            self.masters[i] = w - lr * direction
            if not self.keeps_masters:
                self.masters[i] = round_to(self.masters[i], self.dtypes[i])
            # A weight carries the errors of all that was added to it.
            self.peak["weight"][i] = np.maximum(self.peak["weight"][i], np.abs(w) + np.abs(lr * direction))
        self.step_count += 1
        for i in range(len(self.masters)):
            self.average(i)

    def prepared(self, g, centralize):
        g = np.array(g, np.float64) / self.loss_scale
        if centralize and g.ndim >= 2:
            g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)
        return g

    def velocity(self, state, i, g):
        """Advance u and return the direction of momentum SGD."""
        u = state["dgc_u"]
        u[i] = self.momentum * u[i] + g
        self.peak["dgc_u"][i] = np.maximum(self.peak["dgc_u"][i], np.abs(u[i]))
        return g + self.momentum * u[i] if self.use_nesterov else u[i]

    def dense(self, i, local):
        mean = sum(local) / self.workers
        directions = [self.velocity(state, i, mean) for state in self.of_worker]
        return directions[0]

    def compressed(self, i, local, k):
        total = np.zeros_like(local[0])
        for worker, (state, g) in enumerate(zip(self.of_worker, local)):
            if self.clip is not None:
                bound = self.clip / np.sqrt(self.workers)
                g = g * (bound / norm(g) if norm(g) > bound else 1.0)
            state["dgc_r"][i] = r = state["dgc_r"][i] + self.velocity(state, i, g)
            # r carries the errors of the velocities that it is made of.
            peak = np.maximum(np.abs(r), 4 * self.peak["dgc_u"][i])
            self.peak["dgc_r"][i] = np.maximum(self.peak["dgc_r"][i], peak)
            mask = self.chosen(i, worker, r, k)
            travelled = self.travelled(i, worker, r, mask)
            total += np.where(mask, travelled, 0.0)
            state["dgc_u"][i] = np.where(mask, 0.0, state["dgc_u"][i])
            state["dgc_r"][i] = np.where(mask, r - travelled, r)
        return total / self.workers

    def travelled(self, i, worker, r, mask):
        """Return what arrives of numbers.

        Where float32 and float64 lie on either side of the middle between two float16 numbers, either may arrive:
        float32 is off by a rounding of the largest magnitude that the residual has held.
        """
        if self.wire_dtype == "float32":
            return r
        if self.behind is None:
            return r.astype(np.float16).astype(np.float64)
        arrived = (r - np.where(mask, self.behind[worker][i], 0.0)).astype(np.float16).astype(np.float64)
        unit = 2.0 ** np.floor(np.log2(np.maximum(np.abs(r), 2.0**-14))) * 2.0**-10
        most = 0.501 * unit + 2.0**-24 * self.peak["dgc_r"][i]
        assert not (mask & (np.abs(r - arrived) > most)).any(), f"tensor {i}: not the nearest float16 number"
        return arrived

    def chosen(self, i, worker, r, k):
        """Return the mask of what is sent: what the optimizer sent, if that can be right.

        Float32 may order two magnitudes otherwise than float64 where they nearly tie, and there alone.
        """
        magnitude = np.abs(r).reshape(-1)
        last = np.partition(magnitude, r.size - k)[r.size - k]
        exact = magnitude > last
        exact[np.flatnonzero(magnitude == last)[: k - exact.sum()]] = True
        if self.sent is None:
            return exact.reshape(r.shape)
        sent = np.array(self.sent[worker][i]).reshape(-1)
        # Zeros that were not sent look as if they were.
        for j in np.flatnonzero(sent & (magnitude == 0) & ~exact):
            sent[j] = False
        assert sent.sum() == k, f"tensor {i}: {sent.sum()} elements were sent instead of {k}"
        near = NEAR * np.maximum(self.peak["dgc_r"][i].reshape(-1), last)
        wrong = (sent != exact) & (np.abs(magnitude - last) > near)
        assert not wrong.any(), f"tensor {i}: {wrong.sum()} of {k} elements were chosen wrongly"
        return sent.reshape(r.shape)
