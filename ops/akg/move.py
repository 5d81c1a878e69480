"""The apply stage of every rule: the weight moves along its directions."""

from mindspore.ops import kernel


@kernel
def along_one(coefficients, w, d):
    """Return the update and the new weight."""
    rows = output_tensor((2, w.shape[0]), w.dtype)
    for i in range(w.shape[0]):
        update = coefficients[0] * d[i]
        rows[0, i] = update
        rows[1, i] = w[i] - update
    return rows


@kernel
def along_two(coefficients, w, c, s):
    """Return the update along two directions and the new weight."""
    rows = output_tensor((2, w.shape[0]), w.dtype)
    for i in range(w.shape[0]):
        update = coefficients[0] * c[i] + coefficients[1] * s[i]
        rows[0, i] = update
        rows[1, i] = w[i] - update
    return rows
