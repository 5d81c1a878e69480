"""The moments stage of LANS: see ops/include/lans.h."""

from mindspore.ops import kernel


@kernel
def lans(constants, numbers, w, g, m, v):
    """Return m, v, the direction c of the moments and s of the gradient."""
    rows = output_tensor((4, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    eps = constants[4]
    correction1 = numbers[0]
    root2 = numbers[1]
    decay = numbers[2]
    for i in range(w.shape[0]):
        new_m = beta1 * m[i] + one_minus_beta1 * g[i]
        new_v = beta2 * v[i] + one_minus_beta2 * g[i] * g[i]
        d = sqrt(new_v) / root2 + eps
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = (new_m / correction1) / d + decay * w[i]
        rows[3, i] = g[i] / d + decay * w[i]
    return rows
