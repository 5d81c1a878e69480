"""AdEMAMix: see ops/include/ademamix.h."""

from mindspore.ops import kernel


@kernel
def ademamix(constants, numbers, w, g, m1, nu, m2):
    """Return both moving averages, the second moment between them, and the direction."""
    rows = output_tensor((4, w.shape[0]), w.dtype)
    beta1 = constants[0]
    one_minus_beta1 = constants[1]
    beta2 = constants[2]
    one_minus_beta2 = constants[3]
    eps = constants[4]
    correction1 = numbers[0]
    root2 = numbers[1]
    alpha = numbers[2]
    beta3 = numbers[3]
    one_minus_beta3 = numbers[4]
    decay = numbers[5]
    for i in range(w.shape[0]):
        new_m1 = beta1 * m1[i] + one_minus_beta1 * g[i]
        new_nu = beta2 * nu[i] + one_minus_beta2 * g[i] * g[i]
        new_m2 = beta3 * m2[i] + one_minus_beta3 * g[i]
        rows[0, i] = new_m1
        rows[1, i] = new_nu
        rows[2, i] = new_m2
        rows[3, i] = (new_m1 / correction1 + alpha * new_m2) / (sqrt(new_nu) / root2 + eps) + decay * w[i]
    return rows
