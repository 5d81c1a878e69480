"""AdamOffload: see ops/include/adam_offload.h."""

from mindspore.ops import kernel


@kernel
def adam_offload(constants, numbers, w, g, m, v):
    """Return m, v and the direction."""
    rows = output_tensor((3, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    eps = constants[4]
    of_moment = constants[5]  # beta1 with Nesterov's momentum, else 1
    of_gradient = constants[6]  # 1 - beta1, else 0
    correction = numbers[0]
    decay = numbers[1]
    for i in range(w.shape[0]):
        decayed = g[i] + decay * w[i]
        new_m = beta1 * m[i] + one_minus_beta1 * decayed
        new_v = beta2 * v[i] + one_minus_beta2 * decayed * decayed
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = correction * (of_moment * new_m + of_gradient * decayed) / (sqrt(new_v) + eps)
    return rows
