"""Which tensors Muon treats as matrices, and which rows of a tensor form a matrix."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mindspore import Parameter

from ..arguments.checks import check_type
from ..arguments.params import check_settings, ordered
from ..arguments.words import described, fail, shortened, warn_once
from .sliced_matrices import Slicing

KEY, AXIS = KEYS = ("muon", "shard_axis")  # of param groups
ADAMW_NAMES = ("*embed*", "*lm_head*", "*output_layer*")
# Numbers of rows, a number of equal parts, or numbers of rows that repeat.
Split: TypeAlias = "int | Sequence[int] | tuple[Sequence[int], int]"


class Matrix(NamedTuple):
    """The rows of a tensor that form a matrix: runs of rows at equal distances.

    Attributes:
        first_row: The index of the first row.
        run: Number of consecutive rows in a run.
        runs: Number of runs.
        stride: Distance from the first row of a run to the first row of the next run.
        columns: Number of elements of a row.
    """

    first_row: int
    run: int
    runs: int
    stride: int
    columns: int

    @property
    def rows(self) -> int:
        """Number of rows of the matrix."""
        return self.run * self.runs


class Form(NamedTuple):
    """The matrices that a tensor holds.

    Attributes:
        matrices: The rows of each matrix in the tensor, or in the whole tensor if slices cut matrices.
        slicing: How processes slice the tensor; None if they do not.
    """

    matrices: tuple[Matrix, ...]
    slicing: Slicing | None


def take_keys(optimizer: str, params: Any, keys: Sequence[str]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Remove the keys that only a rule of matrices knows from parameter groups.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        params: What the user passed as ``params``, not checked yet.
        keys: The keys that the optimizer takes, of :data:`KEYS`.

    Returns:
        The groups without the keys; and for each key, its value by parameter name.
    """
    found: dict[str, dict[str, Any]] = {key: {} for key in keys}
    groups = ordered(params)
    if not groups or not all(isinstance(group, dict) for group in groups):
        return params, found
    taken = []
    for i, group in enumerate(groups):
        own = {key: group[key] for key in keys if key in group}
        check_settings(optimizer, f"params[{i}]", own)
        if AXIS in own and "shard_group" not in group:
            fail(ValueError, optimizer, f"params[{i}]['{AXIS}']", "omitted without 'shard_group'", own[AXIS])
        members = ordered(group.get("params"))
        for key, value in own.items():
            found[key] |= {p.name: value for p in members or () if isinstance(p, Parameter)}
        # An iterator is read only once.
        again = {} if members is None else {"params": members}
        taken.append({**{key: value for key, value in group.items() if key not in keys}, **again} if own else group)
    return taken, found


def check_names(function: str, argument: str, names: Any) -> tuple[str, ...]:
    """Check a list or tuple of name patterns, and return it as a tuple."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        fail(TypeError, function, argument, "a list or tuple of str", names)
    return tuple(names)


def warn_of_unmatched(function: str, adamw_names: Sequence[str], names: Sequence[str]) -> None:
    """Warn of name patterns that match nothing, other than those that are there by default."""
    for pattern in adamw_names:
        if pattern not in ADAMW_NAMES and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            warn_once(
                f"For '{function}', the pattern {shortened(pattern)} of 'adamw_names' matches no parameter, such as "
                f"'{names[0]}' or '{names[-1]}'.",
                stacklevel=6,
            )


def is_matrix(name: str, shape: Sequence[int], adamw_names: Sequence[str]) -> bool:
    """Return whether Muon updates a tensor, unless its group states otherwise."""
    return len(shape) > 1 and not any(fnmatch.fnmatchcase(name, pattern) for pattern in adamw_names)


def check_splits(optimizer: str, splits: Any) -> dict[str, Split]:
    """Check the argument `splits` as far as that is possible without the tensors."""
    if splits is None:
        return {}
    check_type(optimizer, "splits", splits, dict)
    for pattern, split in splits.items():
        check_type(optimizer, "splits", pattern, str)
        rows, times = split_rows(split)
        if not rows or not all(map(_is_count, (*rows, times))):
            expected = "a number of equal parts, numbers of rows, or ((numbers of rows), times)"
            fail(TypeError, optimizer, f"splits[{pattern!r}]", expected, split)
    return splits


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0


def split_rows(split: Any) -> tuple[Sequence[Any], Any]:
    """Return the numbers of rows of a split and how often they repeat; (count,) and 1 for equal parts."""
    if not isinstance(split, (list, tuple)):
        return (split,), 1
    if len(split) == 2 and isinstance(split[0], (list, tuple)):
        return split[0], split[1]
    return split, 1


def are_muons(
    optimizer: str,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    chosen: Mapping[str, bool],
    adamw_names: Sequence[str],
) -> list[bool]:
    """Return for each tensor whether Muon updates it; AdamW updates the others.

    Args:
        optimizer: Name of the optimizer's class, for the error.
        names: The tensors' names.
        shapes: Their shapes.
        chosen: The values that groups state, by name.
        adamw_names: Name patterns of tensors that AdamW updates, unless a group states otherwise.

    Raises:
        ValueError: If a tensor that a group assigns to Muon has fewer than two dimensions.
    """
    found = [chosen.get(name, is_matrix(name, shape, adamw_names)) for name, shape in zip(names, shapes)]
    for name, shape, is_muons in zip(names, shapes, found):
        if is_muons and len(shape) < 2:
            raise ValueError(
                f"For '{optimizer}', a parameter of a group with '{KEY}': True must have two or more dimensions, but "
                f"'{name}' has the shape {shape}."
            )
    return found


def forms(
    optimizer: str, shapes: Mapping[str, tuple[int, ...]], slicings: Mapping[str, Slicing], splits: Mapping[str, Split]
) -> dict[str, Form]:
    """Return by name the matrices that tensors hold.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        shapes: The shapes of the tensors, or of this process's slices of them, by name.
        slicings: How processes slice them, by name.
        splits: How whole tensors are split into matrices, by name pattern; the first pattern that matches is used.

    Raises:
        ValueError: If a split does not fit a tensor, or a pattern of `splits` matches no tensor.
    """
    found, used = {}, set()
    for name, shape in shapes.items():
        pattern = next((pattern for pattern in splits if fnmatch.fnmatchcase(name, pattern)), None)
        used.add(pattern)
        slicing = slicings.get(name)
        shape = slicing.whole(shape) if slicing is not None and slicing.cuts_matrices else shape
        split = splits.get(pattern) if pattern else None
        found[name] = Form(_matrices(optimizer, name, shape, pattern, split), slicing)
    unused = [pattern for pattern in splits if pattern not in used]
    if unused:
        raise ValueError(
            f"For '{optimizer}', the pattern {unused[0]!r} of 'splits' must match a matrix that Muon updates and that "
            "no earlier pattern matches, but matches none."
        )
    return found


def size_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of matrices in a tensor, their rows and columns; three dimensions are a batch of matrices."""
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])


def _matrices(optimizer, name, shape, pattern, split):
    batch, rows, columns = size_of(shape)
    cuts = [(0, rows, 1, rows)]
    if split is not None:
        numbers, times = split_rows(split)
        if not isinstance(split, (list, tuple)):
            numbers = (rows // split,) * split
        unit = sum(numbers)
        if unit * times != rows:
            raise ValueError(
                f"For '{optimizer}', 'splits[{pattern!r}]' must cover exactly the rows of a matrix, but is "
                f"{described(split)}, and '{name}' of shape {shape} has matrices of {rows} rows."
            )
        cuts = [(sum(numbers[:k]), n, times, unit) for k, n in enumerate(numbers)]
    return tuple(Matrix(i * rows + cut[0], *cut[1:], columns) for i in range(batch) for cut in cuts)
