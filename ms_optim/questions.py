"""What every step asks of many tensors, in as few calls from Python as MindSpore allows.

A property such as Tensor.dtype is a function in Python around one in C++. Over many small tensors, half of a step was
spent on such calls. These are the functions in C++ themselves, where a version of MindSpore has them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from mindspore import Parameter, Tensor

_dtype_of = operator.attrgetter("_dtype" if hasattr(Tensor, "_dtype") else "dtype")
_size_of = operator.attrgetter("_size" if hasattr(Tensor, "_size") else "size")
_shape_of = operator.attrgetter("_shape" if hasattr(Tensor, "_shape") else "shape")
_requires_grad = operator.attrgetter("_param_info.requires_grad")


def _bare(name: str) -> Any:
    """Return a method as the class states it that Tensor derives from, or as Tensor does."""
    return getattr(Tensor.__base__, name, getattr(Tensor, name))


_data_ptr, _need_contiguous = _bare("_data_ptr"), _bare("_need_contiguous")


def dtypes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the tensors' dtypes."""
    return list(map(_dtype_of, tensors))


def sizes_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the tensors' numbers of elements."""
    return list(map(_size_of, tensors))


def shapes_of(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Return the tensors' shapes."""
    return list(map(_shape_of, tensors))


def all_require_gradients(parameters: Sequence[Parameter]) -> bool:
    """Tell whether no parameter is frozen."""
    try:
        return all(map(_requires_grad, parameters))
    except AttributeError:  # a version that keeps it elsewhere
        return all(p.requires_grad for p in parameters)


def data_pointers_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return where the tensors' data is, 0 where there is none yet; this waits until their values are computed."""
    return list(map(_data_ptr, tensors))


def any_is_view(tensors: Iterable[Tensor]) -> bool:
    """Tell whether the elements of a tensor lie apart in memory."""
    return any(map(_need_contiguous, tensors))
