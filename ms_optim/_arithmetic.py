"""Arithmetic in MindSpore's operators: float32 as the kernels have it, and how parameters are written."""

from __future__ import annotations

from mindspore import dtype as mstype
from mindspore import ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

LARGEST_COUNT = 2**31 - 1
SMALLEST = 2.0**-126  # the least float32 number that is not denormal


def normal(x):
    """Return float32 numbers with 0 in place of those below 2^-126 in magnitude; a NaN stays.

    Some of MindSpore's threads take these for 0 and others do not: it is done here, so that bits do not depend on them.
    """
    return ops.where(ops.abs(x) < SMALLEST, ops.zeros_like(x), x)


def summed(first, *others):
    """Return a sum whose terms count as 0 below 2^-126, as the sum does."""
    total = normal(first)
    for x in others:
        total = normal(total + normal(x))
    return total


def step_dtype(device: str):
    """Return the dtype in which what depends on the step alone is formed: float64 where the device has it."""
    return mstype.float32 if device == "Ascend" else mstype.float64


def moved_along(weight, terms):
    """Return the sum of an update's terms, and the weight without it."""
    update = summed(*terms)
    return update, normal(weight - update)


def clipping(total, most):
    """Return what clipping scales by where a norm is `total` and at most `most` is allowed."""
    return ops.where(total > most, most / total, ops.ones_like(total))


def power_complement(log_beta: float, t):
    """Return 1 - beta^t in float32, from log(beta) and the step count.

    At small t, 1 - beta^t is a difference of nearly equal numbers: it is formed in float64. MindSpore's ``expm1`` would
    spare that, but on CPU it is exp(x) - 1 to the letter (``tanh`` and ``pow`` there are no better); it serves where
    there is no float64.
    """
    if t.dtype == mstype.float64:
        return F.cast(1.0 - ops.exp(t * log_beta), mstype.float32)
    return -ops.expm1(t * log_beta)


def trust_ratio(numerator, norm):
    """Return numerator / norm, 1 where either is 0 or the quotient is not a number."""
    usable = ops.logical_and(numerator > 0, norm > 0)
    ratio = numerator / ops.where(usable, norm, ops.ones_like(norm))
    return ops.where(ops.logical_and(usable, ratio > 0), ratio, ops.ones_like(ratio))


def bounded(x, bounds):
    """Limit x to a pair (low, high) of numbers, high possibly infinite."""
    return ops.minimum(ops.maximum(x, bounds[0]), bounds[1])


def norms(x, dtype):
    """Return the L2 norm of each tensor of a stack.

    Squares are added up in float64, which holds those of all float32 numbers. Where the device has float32 alone,
    numbers are taken relative to the largest.
    """
    flat = x.reshape((F.shape(x)[0], -1))
    if dtype == mstype.float64:
        return F.cast(ops.sqrt(ops.sum(ops.square(F.cast(flat, dtype)), 1)), mstype.float32)
    largest = ops.amax(ops.abs(flat), 1, True)
    unit = ops.where(ops.logical_and(largest > 0, ops.isfinite(largest)), largest, ops.ones_like(largest))
    squares = ops.square(flat / unit)
    # A sum over all elements is formed in parts, one over an axis may be formed one element after the other.
    total = ops.sum(squares).reshape((1,)) if F.shape(x)[0] == 1 else ops.sum(squares, 1)
    return unit[:, 0] * ops.sqrt(total)


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
    """Spread the sparse gradient of an embedding; rows that stand twice are added."""
    zeros = ops.zeros(gradient.dense_shape, gradient.values.dtype)
    return ops.tensor_scatter_add(zeros, gradient.indices.reshape((-1, 1)), gradient.values)


def write(parameter, value):
    """Assign, also where the CPU has no such operator for bfloat16."""
    value = F.cast(value, parameter.dtype)
    if parameter.dtype == mstype.bfloat16:
        return parameter.copy_(value)
    return F.assign(parameter, value)


def shaped(parameter, output):
    """Return an operator's output in a parameter's shape; of no dimensions, it would be a number to a graph."""
    return F.cast(output, mstype.float32).reshape(()) if len(F.shape(parameter)) == 0 else output


def receive(parameter, output):
    """Write an operator's output to a parameter."""
    write(parameter, shaped(parameter, output))
    return 0


def counted(count, more):
    """Return a count, an int32 tensor, and 0 or 1 more; at the largest number that it can hold it stays."""
    return count + more * F.cast(count < LARGEST_COUNT, mstype.int32)


def usable(gradients):
    """Tell of each gradient of a stack whether all of it is finite."""
    return ops.all(ops.isfinite(gradients.reshape((F.shape(gradients)[0], -1))), 1)


def weights_of(dtype, weights, masters, has_master):
    """Return weights of a dtype in float32: their masters, unless a weight was loaded or set since then.

    Args:
        dtype: What the weights are held in.
        weights: A stack of weights, in float32.
        masters: The stack of their masters.
        has_master: Whether they have masters.
    """
    if not has_master:
        return normal(weights)
    return normal(ops.where(rounded(masters, dtype) == weights, masters, weights))
