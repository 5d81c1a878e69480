"""AKG kernels of AdamW that are wrong: one by its arithmetic, one as compiled."""

from mindspore.ops import kernel


@kernel
def mistaken(constants, numbers, w, g, m, v):
    """Add eps under the root."""
    rows = output_tensor((3, w.shape[0]), w.dtype)
    for i in range(w.shape[0]):
        new_m = constants[0] * m[i] + constants[1] * g[i]
        new_v = constants[2] * v[i] + constants[3] * g[i] * g[i]
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = (new_m / numbers[0]) / (sqrt(new_v + constants[4]) / numbers[1]) + numbers[2] * w[i]
    return rows


@kernel
def reducing(constants, numbers, w, g, m, v):
    """Form the decay as a sum over 64 elements: right as Python, but AKG compiles no such sum for CPU."""
    rows = output_tensor((3, w.shape[0]), w.dtype)
    decay = allocate((1,), w.dtype)
    decay[0] = float32(0.0)
    for i in range(w.shape[0]):
        decay[0] = decay[0] + numbers[2] * float32(0.015625) * v[i] / v[i]
    for i in range(w.shape[0]):
        new_m = constants[0] * m[i] + constants[1] * g[i]
        new_v = constants[2] * v[i] + constants[3] * g[i] * g[i]
        rows[0, i] = new_m
        rows[1, i] = new_v
        rows[2, i] = (new_m / numbers[0]) / (sqrt(new_v) / numbers[1] + constants[4]) + decay[0] * w[i]
    return rows
