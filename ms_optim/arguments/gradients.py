"""Checks of gradients against their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor
from mindspore.ops.primitive import constexpr

from ..questions import any_is_view, dtypes_of, shapes_of
from .checks import WEIGHT_DTYPES
from .words import fail


def check_shapes(
    optimizer: str, names: tuple, shapes: tuple, given_shapes: tuple, given_dtypes: tuple, takes_sparse: bool = True
) -> None:
    """Check the shapes and dtypes of gradients against their parameters.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        names: The parameters' names.
        shapes: The parameters' shapes.
        given_shapes: The gradients' shapes. A shape is None while a graph does not know it yet, which happens with
            sparse gradients.
        given_dtypes: The gradients' dtypes.
        takes_sparse: Whether sparse gradients are accepted.

    Raises:
        ValueError: If the number of gradients is wrong, or a gradient does not have the shape of its parameter.
        TypeError: If a gradient is not of floating-point dtype, or is sparse where sparse gradients are not accepted.
    """
    if len(given_shapes) != len(names):
        raise ValueError(
            f"For '{optimizer}', the argument 'gradients' must hold {len(names)} tensors, one for each parameter, "
            f"but got {len(given_shapes)}."
        )
    # Each step that is called from Python comes here: to compare all at once takes a third of the time.
    if given_shapes == shapes and all(dtype in WEIGHT_DTYPES for dtype in given_dtypes):
        return
    for name, shape, given, dtype in zip(names, shapes, given_shapes, given_dtypes):
        if given is None:
            if not takes_sparse:
                raise TypeError(
                    f"For '{optimizer}', the gradient of '{name}' must be a Tensor, but is sparse (a RowTensor): only "
                    "fused kernels accept sparse gradients. Build the embedding with sparse=False and target='DEVICE'."
                )
            continue
        if tuple(given) != tuple(shape):
            rows = len(given) == len(shape) > 1 and tuple(given[1:]) == tuple(shape[1:])
            hint = (
                " If it is the sparse gradient of an embedding: PyNative mode loses its indices, Graph mode keeps them."
            )
            raise ValueError(
                f"For '{optimizer}', the gradient of '{name}' must have the parameter's shape {tuple(shape)}, "
                f"but got {tuple(given)}.{hint if rows else ''}"
            )
        if dtype not in WEIGHT_DTYPES:
            raise TypeError(
                f"For '{optimizer}', the gradient of '{name}' must be float32, float16 or bfloat16, but got {dtype}."
            )


# Runs when a graph is compiled, and when ``construct`` is called from Python.
check_shapes_in_graph = constexpr(check=False)(check_shapes)


def check_tensors(optimizer: str, gradients: Any, kinds: Any) -> None:
    """Check that gradients that come from Python are a tuple or list of Tensors, or of other kinds of tensors."""
    if not isinstance(gradients, (tuple, list)):
        hint = " Pass its values, in the order of optimizer.parameters." if isinstance(gradients, dict) else ""
        fail(TypeError, optimizer, "gradients", "a tuple of Tensors", gradients, hint)
    for i, g in enumerate(gradients):
        if not isinstance(g, kinds):
            fail(TypeError, optimizer, f"gradients[{i}]", "a Tensor", g)


def check_gradients(optimizer: str, names: tuple, shapes: tuple, gradients: Any) -> Sequence[Tensor]:
    """Check gradients that are passed from Python and return them, contiguous in memory.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        names: The parameters' names.
        shapes: The parameters' shapes.
        gradients: The gradients that the optimizer was called with.

    Raises:
        TypeError: If it is not a tuple or list of Tensors.
        ValueError: If :func:`check_shapes` raises it.
    """
    check_tensors(optimizer, gradients, Tensor)
    check_shapes(optimizer, names, shapes, tuple(shapes_of(gradients)), tuple(dtypes_of(gradients)))
    if not any_is_view(gradients):
        return gradients
    return [g if g.is_contiguous() else g.contiguous() for g in gradients]
