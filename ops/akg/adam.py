"""Adam with L2 decay: see ops/include/adam.h."""

from mindspore.ops import kernel


@kernel
def adam(constants, numbers, w, g, m, v):
    """Return m, v and the direction."""
    rows = output_tensor((3, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    of_moment = constants[4]  # beta1 with Nesterov's momentum, else 1
    of_gradient = constants[5]  # 1 - beta1, else 0
    correction = numbers[0]
    eps = numbers[1]
    decay = numbers[2]
    for i in range(w.shape[0]):
        decayed = g[i] + decay * w[i]
        new_m = beta1 * m[i] + one_minus_beta1 * decayed
        new_v = beta2 * v[i] + one_minus_beta2 * decayed * decayed
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = correction * (of_moment * new_m + of_gradient * decayed) / (sqrt(new_v) + eps)
    return rows


@kernel
def adam_amsgrad(constants, numbers, w, g, m, v, vhat):
    """Return m, v, the largest v so far and the direction."""
    rows = output_tensor((4, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    of_moment = constants[4]
    of_gradient = constants[5]
    correction = numbers[0]
    eps = numbers[1]
    decay = numbers[2]
    for i in range(w.shape[0]):
        decayed = g[i] + decay * w[i]
        new_m = beta1 * m[i] + one_minus_beta1 * decayed
        new_v = beta2 * v[i] + one_minus_beta2 * decayed * decayed
        largest = max(vhat[i], new_v)  # in this order a NaN in the new v is kept
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = largest
        rows[3, i] = correction * (of_moment * new_m + of_gradient * decayed) / (sqrt(largest) + eps)
    return rows
