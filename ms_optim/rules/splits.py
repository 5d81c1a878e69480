"""How the rows of a tensor are split into matrices: the forms of a split, and `heads`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arguments.checks import check_type
from ..arguments.words import fail

EXPECTED = "a number of equal parts, numbers of rows, ((numbers of rows), times), or heads(count, rows)"


@dataclasses.dataclass(frozen=True)
class Heads:
    """The split that :func:`heads` returns.

    Attributes:
        count: Number of heads.
        rows: The rows of each block of a head; empty if a head is one block and the tensor tells its rows.
    """

    count: int
    rows: tuple[int, ...] = ()

    def __repr__(self) -> str:
        if not self.rows:
            return f"heads({self.count})"
        return f"heads({self.count}, {self.rows[0] if len(self.rows) == 1 else self.rows})"


# Numbers of rows, a number of equal parts, numbers of rows that repeat, or heads.
Split: TypeAlias = "int | Sequence[int | Heads] | tuple[Sequence[int], int] | Heads"


class Cut(NamedTuple):
    """The rows of one matrix: runs of rows at equal distances.

    Attributes:
        first_row: The index of the first row.
        run: Number of consecutive rows in a run.
        runs: Number of runs.
        stride: Distance from the first row of a run to the first row of the next run.
    """

    first_row: int
    run: int
    runs: int
    stride: int


def heads(count: int, rows: int | Sequence[int] | None = None) -> Heads:
    """Split a projection by attention heads, so that :class:`ms_optim.Muon` orthogonalizes each head by itself.

    The rows of a head follow each other. They form one matrix, or, with several numbers in `rows`, as many matrices,
    each with its own scale. So DeepSeek-V4.1, GLM-5 ("Muon split") and Kimi K3 train their queries and keys.

    Args:
        count (int): Number of heads: of keys and values that query heads share (GQA), the number of key heads.
        rows (Union[int, list[int], tuple[int], None]): The rows of a head, or of each block of a head from the first
            row on. In latent attention, `heads(128, (128, 64))` are queries of 128 rows without and 64 with rotary
            embedding, and `heads(128, (128, 128))` 128 rows of keys, then 128 of values. ``None`` means that a head is
            one matrix of all its rows. Default: ``None`` .

    Returns:
        A split, which `splits` of :class:`ms_optim.Muon` and the key `split` of groups take.

    Raises:
        TypeError: If `count` is not an int, or `rows` neither an int, a list or tuple of ints, nor None.
        ValueError: If a number is less than 1, or `rows` is empty.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import Muon, heads
        >>> net = nn.CellDict({"q_proj": nn.Dense(16, 32), "k_proj": nn.Dense(16, 8), "kv_b_proj": nn.Dense(8, 48)})
        >>> splits = {"q_proj*": heads(8), "k_proj*": heads(2), "kv_b_proj*": heads(4, (8, 4))}
        >>> optimizer = Muon(net.trainable_params(), learning_rate=1e-3, splits=splits)
        >>> print(splits["kv_b_proj*"])
        heads(4, (8, 4))
    """
    blocks: tuple[Any, ...] = () if rows is None else tuple(rows) if isinstance(rows, (list, tuple)) else (rows,)
    for argument, value in (("count", count), *(("rows", block) for block in blocks)):
        if not _is_int(value):
            fail(TypeError, "heads", argument, "an int, 1 or greater" + " each" * (argument == "rows"), value)
        if value < 1:
            fail(ValueError, "heads", argument, "an int, 1 or greater" + " each" * (argument == "rows"), value)
    if rows is not None and not blocks:
        fail(ValueError, "heads", "rows", "None or one number of rows for each block", rows)
    return Heads(int(count), tuple(map(int, blocks)))


def check_splits(optimizer: str, splits: Any) -> dict[str, Split]:
    """Check the argument `splits` as far as that is possible without the tensors, and return it."""
    if splits is None:
        return {}
    check_type(optimizer, "splits", splits, dict)
    for pattern in splits:
        check_type(optimizer, "splits", pattern, str)
    return {pattern: check_split(optimizer, f"splits[{pattern!r}]", split) for pattern, split in splits.items()}


def check_split(optimizer: str, argument: str, split: Any) -> Split:
    """Check a split, and return it in tuples, with heads for dicts like {"heads": 8, "rows": 128} of YAML files."""
    split = _with_heads(optimizer, argument, split)
    if isinstance(split, Heads):
        return split
    parts, times = _parts(split)
    for part in parts:
        if isinstance(part, Heads) and not part.rows:
            fail(TypeError, optimizer, argument, "numbers of rows, and heads with rows, as heads(8, 128)", split)
    numbers = [*(part for part in parts if not isinstance(part, Heads)), times]
    if not parts or not all(_is_int(number) and number > 0 for number in numbers):
        fail(TypeError, optimizer, argument, EXPECTED, split)
    return split


def cuts(split: Any, rows: int) -> list[Cut] | None:
    """Return the rows of each matrix of a tensor; None if the split does not cover exactly its rows.

    Args:
        split: The split, checked.
        rows: The rows of the tensor.
    """
    if isinstance(split, Heads):
        split = (split if split.rows else Heads(split.count, (rows // split.count,)),)
    elif not isinstance(split, tuple):
        split = (rows // split,) * split
    parts, times = _parts(split)
    blocks = [n for part in parts for n in (part.rows * part.count if isinstance(part, Heads) else (part,))]
    unit = sum(blocks)
    if unit * times != rows:
        return None
    return [Cut(sum(blocks[:k]), n, times, unit) for k, n in enumerate(blocks)]


def _parts(split: Any) -> tuple[Sequence[Any], Any]:
    """Return the parts of a split, which is no heads, and how often they repeat."""
    if not isinstance(split, tuple):
        return (split,), 1
    return split if len(split) == 2 and isinstance(split[0], tuple) else (split, 1)


def _with_heads(optimizer: str, argument: str, split: Any) -> Any:
    """Return a split with tuples for lists, and heads for dicts."""
    if isinstance(split, (list, tuple)):
        return tuple(_with_heads(optimizer, argument, part) for part in split)
    if not isinstance(split, Mapping):
        return split
    if "heads" not in split or not split.keys() <= {"heads", "rows"}:
        fail(TypeError, optimizer, argument, "a dict with 'heads' and perhaps 'rows', such as {'heads': 8}", split)
    return heads(split["heads"], split.get("rows"))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
