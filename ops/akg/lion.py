"""Lion: see ops/include/lion.h."""

from mindspore.ops import kernel


@kernel
def lion(constants, numbers, w, g, m):
    """Return m and the direction, which sees the m from before."""
    rows = output_tensor((2, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    decay = numbers[0]
    for i in range(w.shape[0]):
        # The sign of c as a quotient, for AKG drops branches. In this order of arguments a NaN is kept.
        c = max(-1.0, min(1.0, beta1 * m[i] + one_minus_beta1 * g[i]))
        rows[0, i] = beta2 * m[i] + one_minus_beta2 * g[i]
        rows[1, i] = c / max(1.17549435e-38, max(0.0 - c, c)) + decay * w[i]
    return rows
