"""Arithmetic in MindSpore's operators: float32 as in the kernels, and writing to parameters.

In a graph on a CPU, MindSpore keeps index tables of 16 to 24 bytes an element, as long as the graph exists, for each
quotient of `/`, each sum or product of integers or of float64, and each operator that broadcasts over rows or selects
numbers. Over whole stacks, :func:`quotient`, :func:`selected`, :func:`expanded` and ``masked_fill`` take their place.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.primitive import constexpr

LARGEST_COUNT = 2**31 - 1
SMALLEST = 2.0**-126  # the smallest normal float32 number
_real_div = ops.RealDiv()


@constexpr
def _keeps_tables():
    return ms.get_context("device_target") == "CPU"


def expanded(x, like):
    """Return x ready for an operator with a stack: in the stack's shape where broadcasting costs memory."""
    return ops.broadcast_to(x, F.shape(like)) if _keeps_tables() else x


def quotient(x, y):
    """Return x / y, in float32; each is of the result's shape, or a number."""
    return _real_div(x, y)


def selected(condition, x, y):
    """Return the elements of x where a condition holds, and those of y elsewhere; both are of one shape."""
    return ops.where(expanded(condition, y), x, y)


def normal(x):
    """Return float32 numbers with magnitudes below 2^-126 replaced by 0; a NaN is kept.

    Some of MindSpore's threads flush denormals to 0 and others do not. They are flushed here, so that results do not
    depend on the thread.
    """
    return ops.masked_fill(x, ops.abs(x) < SMALLEST, 0.0)


def summed(first, *others):
    """Return a sum; terms and sums below 2^-126 in magnitude are treated as 0."""
    total = normal(first)
    for x in others:
        total = normal(total + normal(x))
    return total


def step_dtype(device: str):
    """Return the dtype for values that depend only on the step: float64 if the device supports it."""
    return mstype.float32 if device == "Ascend" else mstype.float64


def moved_along(weight, terms):
    """Return the sum of an update's terms, and the weight minus this sum."""
    update = summed(*terms)
    return update, normal(weight - update)


def clipping(total, most):
    """Return the factor of clipping for a norm `total` and a largest allowed norm `most`."""
    return ops.where(total > most, most / total, ops.ones_like(total))


def power_complement(log_beta: float, t):
    """Return 1 - beta^t in float32, from log(beta) and the step count.

    At small t, 1 - beta^t is a difference of nearly equal numbers, so it is computed in float64. MindSpore's ``expm1``
    does not avoid the cancellation: on CPU it computes exp(x) - 1 literally (``tanh`` and ``pow`` are no better). It is
    used only where there is no float64.
    """
    if t.dtype == mstype.float64:
        return F.cast(1.0 - ops.exp(t * log_beta), mstype.float32)
    return -ops.expm1(t * log_beta)


def trust_ratio(numerator, norm):
    """Return numerator / norm; 1 where either is 0 or the quotient is NaN."""
    usable = ops.logical_and(numerator > 0, norm > 0)
    ratio = numerator / ops.where(usable, norm, ops.ones_like(norm))
    return ops.where(ops.logical_and(usable, ratio > 0), ratio, ops.ones_like(ratio))


def bounded(x, bounds):
    """Clamp x to a pair (low, high) of numbers; high may be infinite."""
    return ops.minimum(ops.maximum(x, bounds[0]), bounds[1])


def largest_of(rows):
    """Return the largest magnitude of each row, of shape (rows, 1); 1 where that is 0 or not finite."""
    largest = ops.amax(ops.abs(rows), 1, True)
    return ops.where(ops.logical_and(largest > 0, ops.isfinite(largest)), largest, ops.ones_like(largest))


def norms(x, dtype):
    """Return the L2 norm of each tensor of a stack.

    Squares are summed in float64, which represents the squares of all float32 numbers. If the device has only float32,
    numbers are divided by the largest one first.
    """
    flat = x.reshape((F.shape(x)[0], -1))
    if dtype == mstype.float64:
        return F.cast(ops.sqrt(ops.sum(ops.square(F.cast(flat, dtype)), 1)), mstype.float32)
    unit = largest_of(flat)
    squares = ops.square(quotient(flat, expanded(unit, flat)))
    # A sum over all elements is computed in parts; a sum over an axis may add one element after the other.
    total = ops.sum(squares).reshape((1,)) if F.shape(x)[0] == 1 else ops.sum(squares, 1)
    return unit[:, 0] * ops.sqrt(total)


def product_roots(x, y, dtype):
    """Return for each tensor of two stacks the root of their inner product, with its sign; it is in float32's range."""
    x, y = (F.cast(stack.reshape((F.shape(stack)[0], -1)), dtype) for stack in (x, y))
    if dtype == mstype.float64:
        return F.cast(signed_root(ops.sum(x * y, 1)), mstype.float32)
    # The product of the units might be out of range.
    units = ops.sqrt(largest_of(x)), ops.sqrt(largest_of(y))
    total = ops.sum((x / ops.square(units[0])) * (y / ops.square(units[1])), 1)
    return signed_root(total) * units[0][:, 0] * units[1][:, 0]


def signed_root(x):
    """Return the root of a magnitude, with its sign."""
    return ops.sign(x) * ops.sqrt(ops.abs(x))


def norm(x, dtype):
    """Return the L2 norm of a whole tensor."""
    return norms(x.reshape((1, -1)), dtype).reshape(())


def centralized(gradients):
    """Subtract from each gradient of a stack its mean over all but the first of its own dimensions."""
    axes = tuple(range(2, gradients.ndim))
    return summed(gradients, -ops.mean(gradients, axes, True))


def rounded(x, dtype):
    """Round float32 to a lower precision and back."""
    return F.cast(F.cast(x, dtype), mstype.float32)


dense = ops.MultitypeFuncGraph("dense")


@dense.register("Tensor")
def _dense_tensor(gradient):
    return gradient


@dense.register("RowTensor")
def _dense_rows(gradient):
    """Make the sparse gradient of an embedding dense; rows that appear more than once are added."""
    zeros = ops.zeros(gradient.dense_shape, gradient.values.dtype)
    return ops.tensor_scatter_add(zeros, gradient.indices.reshape((-1, 1)), gradient.values)


def write(parameter, value):
    """Assign a value, also for bfloat16 on CPU, which has no such operator."""
    value = F.cast(value, parameter.dtype)
    if parameter.dtype == mstype.bfloat16:
        return parameter.copy_(value)
    return F.assign(parameter, value)


def shaped(parameter, output):
    """Return an operator's output in a parameter's shape; a graph would treat a 0-dimensional output as a number."""
    return F.cast(output, mstype.float32).reshape(()) if len(F.shape(parameter)) == 0 else output


def receive(parameter, output):
    """Write an operator's output to a parameter."""
    write(parameter, shaped(parameter, output))
    return 0


def counted(count, more):
    """Return an int32 count plus 0 or 1; it saturates at the largest int32 number."""
    return count + more * F.cast(count < LARGEST_COUNT, mstype.int32)


def usable(gradients):
    """Return for each gradient of a stack whether all its elements are finite."""
    return ops.all(ops.isfinite(gradients.reshape((F.shape(gradients)[0], -1))), 1)


def weights_of(dtype, weights, masters, has_master):
    """Return weights of a dtype in float32: their masters, except where a weight was loaded or set since.

    Args:
        dtype: The dtype of the weights.
        weights: A stack of weights, in float32.
        masters: The stack of their masters.
        has_master: Whether they have masters.
    """
    if not has_master:
        return normal(weights)
    return normal(ops.where(rounded(masters, dtype) == weights, masters, weights))
