"""What comes before a rule: unscale, centralize, skip, clip; and how weights are stored."""

import ml_dtypes
import numpy as np


def norm(x):
    return float(np.sqrt(np.sum(np.square(x))))


def round_to(x, dtype):
    """Round float64 to a storage dtype and back; float32 stays float64, for it is what is under test."""
    if dtype == "float32":
        return x
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(np.float64)


class Reference:
    """Float64 weights and states of a list of tensors.

    Args:
        weights: Float64 arrays.
        learning_rates: For each tensor a function from the step, counted from 0, to the learning rate.
        weight_decays: Likewise for the weight decay.
        centralized: For each tensor whether its gradient is centralized.
        dtypes: For each tensor its storage dtype.
        masters: Whether tensors of lower precision are rounded copies of exact ones.
        loss_scale, grad_clip_norm, skip_nonfinite: As in the package.
        names: The tensors' names, of which a rule may make a difference.
        hyper: The rule's own numbers.
    """

    states = ()
    # Of each kernel: its states' kinds (s: signed, u: unsigned, e: exact), the rule's own constants and flags, and what
    # the reference is told of them.
    kernels = ()
    # Whether the weight enters the states, by an L2 decay.
    decay_in_states = False
    decay, average_decay, average_warmup = "decoupled", None, False
    # What holds the norm of weights: a kind; of a radial brake, the parts of a growth and of a decline that are kept.
    weight_norm = None
    # Of a rule of matrices: the coefficients of the iterations of its kernel's launches.
    iterations = ()
    # How many of the states, the first ones, start as the weights; whether the rule weighs its steps.
    start_at_weights, weighs_steps = 0, False

    def __init__(
        self,
        weights,
        learning_rates,
        weight_decays,
        centralized,
        dtypes,
        masters=True,
        loss_scale=1.0,
        grad_clip_norm=None,
        skip_nonfinite=False,
        names=None,
        **hyper,
    ):
        self.masters = [np.array(w, np.float64) for w in weights]
        self.learning_rates, self.weight_decays = learning_rates, weight_decays
        self.centralized, self.dtypes, self.keeps_masters = centralized, dtypes, masters
        self.loss_scale, self.clip, self.skip = loss_scale, grad_clip_norm, skip_nonfinite
        self.step_count = self.skipped = 0
        self.names = names or [""] * len(weights)
        self.state = {
            name: [w.copy() if k < self.start_at_weights else np.zeros_like(w) for w in self.masters]
            for k, name in enumerate(self.states)
        }
        self.averages = [w.copy() for w in self.masters]
        self.radii = {}
        self.statistics = np.zeros((len(weights), 5))
        self.largest = {}
        # The largest element that a move along an orthogonalized matrix had.
        self.orthogonal_move = [0.0] * len(weights)
        # The largest magnitude that each element has held: what roundings so far were relative to.
        self.peak = {"weight": [np.abs(w) for w in self.masters], "statistics": np.zeros_like(self.statistics)}
        self.peak |= {name: [np.abs(x) for x in arrays] for name, arrays in self.state.items()}
        for name, value in hyper.items():
            setattr(self, name, value)

    def states_of(self, i):
        """Return the names of the states of a tensor, in the optimizer's order."""
        return self.states

    @property
    def weights(self):
        return [round_to(w, dtype) for w, dtype in zip(self.masters, self.dtypes)]

    def step(self, gradients):
        prepared = []
        for g, centralize in zip(gradients, self.centralized):
            g = np.array(g, np.float64) / self.loss_scale
            if centralize and g.ndim >= 2:
                g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)
            prepared.append(g)
        finite = [bool(np.isfinite(g).all()) for g in prepared]
        if self.skip and not all(finite):
            self.skipped += 1
            return
        factor = 1.0
        if self.clip is not None:
            total = np.sqrt(sum(norm(g) ** 2 for g in prepared))
            factor = min(1.0, self.clip / total) if total > 0 else 1.0
        k = self.step_count
        self.step_count += 1
        for i, g in enumerate(prepared):
            w = self.masters[i] if self.keeps_masters else self.weights[i]
            self.magnified = self.magnified_update = 1.0
            update, ratio = self.update(i, w, g * factor, self.learning_rates[i](k), self.weight_decays[i](k))
            if self.weight_norm is not None and w.ndim > 1:
                moved, factor_of_norms = self.held(i, w, update, self.learning_rates[i](k))
                update, ratio = w - moved, ratio * factor_of_norms
            self.statistics[i] = norm(g), norm(w), norm(update), ratio, 1.0
            peak = np.abs(self.statistics[i]) * [1, 1, self.magnified_update, self.magnified, 1]
            self.peak["statistics"][i] = np.maximum(self.peak["statistics"][i], peak)
            self.masters[i] = w - update
            if not self.keeps_masters:
                self.masters[i] = round_to(self.masters[i], self.dtypes[i])
            self.peak["weight"][i] = np.maximum(self.peak["weight"][i], np.abs(self.masters[i]))
            self.average(i)
            for name in self.states:
                self.peak[name][i] = np.maximum(self.peak[name][i], np.abs(self.state[name][i]))

    def update(self, i, w, g, learning_rate, weight_decay):
        """Return what is subtracted from w, and the trust ratio; advance the states."""
        raise NotImplementedError

    def held(self, i, w, update, learning_rate):
        """Return the new weights whose norm is held, and the factor of the update's direction but for the rate."""
        size = norm(update) / learning_rate
        if isinstance(self.weight_norm, tuple):
            outward, inward = self.weight_norm
            moved = w - update
            change = norm(moved) - norm(w)
            kept = norm(w) + (outward if change > 0 else inward) * change
            factor = kept / norm(moved) if norm(moved) > 0 else 1.0
            return factor * moved, factor
        radius = self.radii.setdefault(i, norm(w))
        if radius == 0 or size == 0:
            return w, 0.0
        along = (radius if self.weight_norm == "hyperball" else norm(w)) / size
        moved = w - along * update
        if self.weight_norm == "relative":
            return moved, along
        return radius * moved / norm(moved), along * radius / norm(moved)

    def average(self, i):
        """Advance the average of the weights, after a step."""
        if self.average_decay is not None:
            t, d = self.step_count, self.average_decay
            d = min(d, (1 + t) / (10 + t)) if self.average_warmup else d
            self.averages[i] = d * self.averages[i] + (1 - d) * self.masters[i]

    def decayed(self, u, w, weight_decay):
        """Return the decay that belongs to a direction u."""
        spared = np.sign(u) * np.sign(w) < 0 if self.decay == "cautious" else False
        return np.where(spared, 0.0, weight_decay * w)

    def direction(self, i, adaptive, decay):
        """Return adaptive + decay.

        A moving average that crosses 0, or two terms that cancel, leave a norm with the errors of all that went in.
        """
        d = adaptive + decay
        self.largest[i] = max(self.largest.get(i, 0.0), norm(adaptive) + norm(decay))
        if norm(d) > 0:
            self.magnified = max(self.magnified, self.largest[i] / norm(d))
        return d
