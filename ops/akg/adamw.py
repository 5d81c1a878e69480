"""AdamW, and Lamb's moments stage, whose direction is the same: see ops/include/adamw.h and lamb.h."""

from mindspore.ops import kernel


@kernel
def adamw(constants, numbers, w, g, m, v):
    """Return m, v and the direction."""
    rows = output_tensor((3, w.shape[0]), w.dtype)
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
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = (new_m / correction1) / (sqrt(new_v) / root2 + eps) + decay * w[i]
    return rows


@kernel
def adamw_amsgrad(constants, numbers, w, g, m, v, vhat):
    """Return m, v, the largest v so far, and the direction."""
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
        new_vhat = max(vhat[i], new_v)  # in this order a NaN in the new v is kept
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = new_vhat
        rows[3, i] = (new_m / correction1) / (sqrt(new_vhat) / root2 + eps) + decay * w[i]
    return rows
