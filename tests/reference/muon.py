"""Jordan (2024), with the scale of Liu et al. (2025), Section 2.2; NorMuon of Li et al. (2025), Algorithm 1."""

import fnmatch

import numpy as np

from .base import Reference, norm

JORDAN = (3.4445, -4.7750, 2.0315)
# Of each published set: the triples, in the order of the iterations.
COEFFICIENTS = {
    "jordan": [JORDAN] * 5,
    "quintic": [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)],
    "polar_express": [(8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
                      (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
                      (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750)],
    "cans": [(8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630),
             (3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162)],
    "deepseek_v4": [JORDAN] * 8 + [(2.0, -1.5, 0.5)] * 2,
    "cubic5": [(3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
               (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0)],
}  # fmt: skip


def iterations_of(coefficients, steps=None):
    """Return the triple of each iteration; a name without a number of them stands for 5 or, of ten, for all."""
    if isinstance(coefficients, str):
        known = COEFFICIENTS[coefficients]
        steps = steps or {"deepseek_v4": 10}.get(coefficients, 5)
        return [known[min(k, len(known) - 1)] for k in range(steps)]
    return [coefficients] * (steps or 5) if np.ndim(coefficients[0]) == 0 else coefficients


def orthogonalized(u, iterations):
    """Return the matrix near u whose singular values are near 1, by Newton and Schulz's iteration."""
    if norm(u) == 0:
        return np.zeros_like(u)
    x = u / norm(u)
    if x.shape[0] > x.shape[1]:
        return orthogonalized(x.T, iterations).T
    for a, b, c in iterations:
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x


def summed(x):
    """Return how much further products may be off for the longer side of a tensor, over which float32 adds up."""
    return max(1.0, np.sqrt(max(len(x), x.size / len(x))) / 32)


def rows_of(split, count):
    """Return for each matrix that a split makes of one of so many rows which of these it has."""
    if isinstance(split, int):
        split = [count // split] * split
    if hasattr(split, "count") and hasattr(split, "rows"):  # heads, of blocks of these rows
        head = np.arange(count).reshape(split.count, -1)
        ends = np.cumsum(split.rows or (len(head[0]),))
        return [block for one in head for block in np.split(one, ends[:-1])]
    if any(hasattr(part, "rows") for part in split):  # among numbers of rows
        split = [n for part in split for n in (part.rows * part.count if hasattr(part, "rows") else [part])]
    times = 1
    if len(split) == 2 and not isinstance(split[0], int):
        split, times = split
    unit = np.arange(count).reshape(times, -1)
    return [unit[:, sum(split[:k]) : sum(split[: k + 1])].reshape(-1) for k in range(len(split))]


class Muon(Reference):
    states = ("muon_m", "muon_v", "adam_m", "adam_v")
    # beta1, beta2 and eps of AdamW; momentum, the scale and beta of V.
    kernels = (("muon", "su", (0.95, 0.95, 1e-8, 0.95, 0.2, 0.95, 0.0), 1, {}),)
    iterations = [JORDAN] * 5
    matched_adamw_rms, momentum, nesterov = 0.2, 0.95, True
    adamw_betas, adamw_eps = (0.95, 0.95), 1e-8
    adjust_lr, normalize_rows, row_beta, row_eps = "match_rms_adamw", False, 0.95, 1e-8
    ns_steps, ns_coefficients = None, JORDAN
    adamw_names, splits = ("*embed*", "*lm_head*", "*output_layer*"), None

    def __init__(self, *args, skip_nonfinite=True, **kwargs):
        super().__init__(*args, skip_nonfinite=skip_nonfinite, **kwargs)
        for i in range(len(self.masters)):
            # What a tensor does not have takes no room; V has a number for each row.
            for name in self.states:
                if name not in self.states_of(i):
                    self.state[name][i] = self.peak[name][i] = np.zeros(0)
            if "muon_v" in self.states_of(i):
                shape = self.masters[i].shape
                rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
                self.state["muon_v"][i], self.peak["muon_v"][i] = np.zeros(rows), np.zeros(rows)

    def is_matrix(self, i):
        return self.masters[i].ndim > 1 and not any(fnmatch.fnmatch(self.names[i], p) for p in self.adamw_names)

    def states_of(self, i):
        if not self.is_matrix(i):
            return ("adam_m", "adam_v")
        return ("muon_m", "muon_v") if self.normalize_rows else ("muon_m",)

    def update(self, i, w, g, learning_rate, weight_decay):
        if not self.is_matrix(i):
            d = self.adamw(i, g)
            return learning_rate * self.direction(i, d, self.decayed(d, w, weight_decay)), 1.0
        d, ratio = self.matrices(i, g)
        decay = self.decayed(d, w, weight_decay)
        # The decay may cancel what comes of the iteration.
        self.magnified = self.magnified_update = summed(g)
        if norm(d + decay) > 0:
            self.magnified_update *= (norm(d) + norm(decay)) / norm(d + decay)
        self.orthogonal_move[i] = max(self.orthogonal_move[i], learning_rate * np.abs(d).max())
        return learning_rate * (d + decay), ratio

    def adamw(self, i, g):
        (beta1, beta2), t = self.adamw_betas, self.step_count
        m, v = self.state["adam_m"], self.state["adam_v"]
        m[i] = beta1 * m[i] + (1 - beta1) * g
        v[i] = beta2 * v[i] + (1 - beta2) * g**2
        return (m[i] / (1 - beta1**t)) / (np.sqrt(v[i] / (1 - beta2**t)) + self.adamw_eps)

    def matrices(self, i, g):
        """Return the direction of a tensor of matrices, and the root mean square of their singular values."""
        m = self.state["muon_m"]
        m[i] = self.momentum * m[i] + g
        u = g + self.momentum * m[i] if self.nesterov else m[i]
        batch = u if u.ndim == 3 else u.reshape(1, len(u), -1)
        split = next((s for p, s in (self.splits or {}).items() if fnmatch.fnmatch(self.names[i], p)), 1)
        iterations = iterations_of(self.ns_coefficients, self.ns_steps)
        moved, squares, values = np.zeros_like(batch), 0.0, 0
        for e, matrix in enumerate(batch):
            for rows in rows_of(split, len(matrix)):
                x = orthogonalized(matrix[rows], iterations)
                squares, values = squares + norm(x) ** 2, values + min(x.shape)
                moved[e, rows] = self.scaled(i, e * len(matrix) + rows, x)
        return moved.reshape(u.shape), np.sqrt(squares / values)

    def scaled(self, i, rows, x):
        """Return an orthogonal matrix in the size of a step; its rows in the tensor are those of V."""
        a, b = x.shape
        if self.adjust_lr == "original":
            return np.sqrt(max(1.0, a / b)) * x
        if not self.normalize_rows:
            return self.matched_adamw_rms * np.sqrt(max(a, b)) * x
        v = self.state["muon_v"][i]
        v[rows] = self.row_beta * v[rows] + (1 - self.row_beta) * np.mean(x**2, axis=1)
        # A rounding of x, multiplied by 3.4445 each of 5 times, is 20 times what a state may be off; and rows share it.
        self.peak["muon_v"][i] = np.maximum(self.peak["muon_v"][i], 20 * summed(x) * v.max())
        x = x / (np.sqrt(v[rows]) + self.row_eps)[:, None]
        return self.matched_adamw_rms * np.sqrt(a * b) / norm(x) * x if norm(x) > 0 else x
