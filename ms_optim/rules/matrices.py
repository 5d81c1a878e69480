"""Which tensors Muon treats as matrices, and which rows of a tensor form a matrix."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspore import Parameter

from ..arguments.params import check_settings, ordered
from ..arguments.words import fail, listed, shortened, warn_once
from .sliced_matrices import Slicing
from .splits import Split, check_split, cuts

KEY, AXIS, SPLIT = KEYS = ("muon", "shard_axis", "split")  # of param groups
ADAMW_NAMES = ("*embed*", "*lm_head*", "*output_layer*")


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

    @property
    def span(self) -> int:
        """Number of rows of the tensor from the first row of the matrix to its last one."""
        return (self.runs - 1) * self.stride + self.run


class Form(NamedTuple):
    """The matrices that a tensor holds.

    Attributes:
        matrices: The rows of each matrix in the tensor, or in the whole tensor if slices cut matrices.
        slicing: How processes slice the tensor; None if they do not.
        whole: The rows of each matrix in the whole tensor.
    """

    matrices: tuple[Matrix, ...]
    slicing: Slicing | None
    whole: tuple[Matrix, ...]

    @property
    def is_dealt(self) -> bool:
        """Whether slices cut matrices, each of which then has an owner among the processes."""
        return self.slicing is not None and self.slicing.cuts_matrices

    @property
    def batch(self) -> int:
        """The number of parts of a tensor that are dealt, one by one."""
        return self.slicing.batch if self.slicing is not None and self.is_dealt else 1

    @property
    def of_owner(self) -> tuple[Matrix, ...]:
        """The rows of each matrix in what one process computes with: a whole tensor, or each tensor in a batch."""
        return self.matrices[: len(self.matrices) // self.batch]

    @property
    def singular_values(self) -> int:
        """Number of singular values of all matrices of the whole tensor."""
        return sum(min(matrix.rows, matrix.columns) for matrix in self.whole)


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
        if SPLIT in own:
            own[SPLIT] = check_split(optimizer, f"params[{i}]['{SPLIT}']", own[SPLIT])
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
    optimizer: str,
    shapes: Mapping[str, tuple[int, ...]],
    slicings: Mapping[str, Slicing],
    splits: Mapping[str, Split],
    chosen: Mapping[str, Split],
) -> dict[str, Form]:
    """Return by name the matrices that tensors hold.

    Args:
        optimizer: Name of the optimizer's class, for the errors.
        shapes: The shapes of the tensors, or of this process's slices of them, by name.
        slicings: How processes slice them, by name.
        splits: How whole tensors are split into matrices, by name pattern; the first pattern that matches is used.
        chosen: The splits that groups state, by name, which count before `splits`.

    Raises:
        ValueError: If a split does not fit a tensor, or a pattern of `splits` or a group with a split holds none.
    """
    for split in dict.fromkeys(chosen.values()):
        members = [name for name in chosen if chosen[name] == split]
        if not shapes.keys() & members:
            raise ValueError(
                f"For '{optimizer}', a group with '{SPLIT}' must hold a matrix that Muon updates, but holds "
                f"{listed(members)}."
            )
    found, used = {}, set()
    for name, shape in shapes.items():
        pattern = next((pattern for pattern in splits if fnmatch.fnmatchcase(name, pattern)), None)
        used.add(pattern)
        where, split = f"splits[{pattern!r}]", splits.get(pattern) if pattern else None
        if name in chosen:
            where, split = f"the key '{SPLIT}' of its group", chosen[name]
        found[name] = _form(optimizer, name, shape, slicings.get(name), where, split)
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


def unsplit(shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    """Return the matrices of a tensor that is not split."""
    batch, rows, columns = size_of(shape)
    return tuple(Matrix(i * rows, rows, 1, rows, columns) for i in range(batch))


def _form(optimizer, name, shape, slicing, where, split):
    shape = shape if slicing is None else slicing.whole(shape)
    whole = unsplit(shape)
    if split is not None:
        found = cuts(split, whole[0].rows)
        if found is None:
            raise ValueError(
                f"For '{optimizer}', '{where}' must cover exactly the rows of a matrix, but is {split!r}, and "
                f"'{name}' of shape {shape} has matrices of {whole[0].rows} rows."
            )
        whole = tuple(Matrix(each.first_row + cut[0], *cut[1:], each.columns) for each in whole for cut in found)
    if slicing is None:
        return Form(whole, None, whole)
    own = _own(whole, slicing, size_of(shape)[1])
    if own is None:
        return Form(whole, slicing, whole)
    return Form(own, slicing._replace(cuts_matrices=False, cuts_rows=False), whole)


def _own(whole: Sequence[Matrix], slicing: Slicing, rows: int) -> tuple[Matrix, ...] | None:
    """Return the matrices in this process's slice, such as its heads; None if any process's slice cuts a matrix.

    Args:
        whole: The matrices of the whole tensor.
        slicing: How processes slice it.
        rows: The rows of the tensor, or of each tensor in a batch.
    """
    if slicing.cuts_matrices and not slicing.cuts_rows:
        return None  # slices of columns
    unit = 1 if slicing.cuts_rows else rows  # otherwise a slice holds some tensors of a batch
    *bounds, period = (unit * sum(slicing.lengths[: k + 1]) for k in range(len(slicing.lengths)))
    places = [divmod(matrix.first_row, period) for matrix in whole]
    spans = {(row, row + matrix.span) for (_, row), matrix in zip(places, whole)}
    if any(first < bound < end for first, end in spans for bound in bounds):
        return None
    begin, length = unit * slicing.begin, unit * slicing.lengths[slicing.own]
    return tuple(
        matrix._replace(first_row=i * length + row - begin)
        for (i, row), matrix in zip(places, whole)
        if begin <= row < begin + length
    )
