"""The query and key projections of attention by head, and the scaling of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from ..arguments.checks import WEIGHT_DTYPES, check_count, fail, is_number
from ..arguments.params import ordered
from .scaled_rows import scale_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Form(NamedTuple):
    """Which rows of the projections belong to which head, as stated by the user.

    Attributes:
        key_heads: Number of key heads; None means as many as query heads.
        query_rope: Rows at the end of each query head that are multiplied by a key which all heads share.
        key_values: Rows after each head's keys that are not keys.
        query_rows: The rows of the queries; None means all.
        key_rows: The rows of the keys; None means all.
    """

    key_heads: int | None
    query_rope: int
    key_values: int
    query_rows: Sequence[int] | None
    key_rows: Sequence[int] | None


class Layer:
    """The projections of a layer, checked.

    Args:
        function: Name of the public function or class, for the errors.
        prefix: The prefix of the argument names in errors.
        query: The Parameter or Parameters that project queries.
        key: The Parameter or Parameters that project keys.
        form: Which rows belong to which head.
    """

    def __init__(self, function: str, prefix: str, query: Any, key: Any, form: Form):
        self.function, self.form = function, form
        self.name = f"{prefix}max_logits" if prefix else "max_logits"
        if form.key_heads is not None:
            check_count(function, "key_heads", form.key_heads, 1)
        check_count(function, "query_rope", form.query_rope)
        check_count(function, "key_values", form.key_values)
        self.query, self.key = self._parameters(f"{prefix}query", query), self._parameters(f"{prefix}key", key)
        self.query_rows = self._rows("query_rows", form.query_rows, self.query)
        self.key_rows = self._rows("key_rows", form.key_rows, self.key)
        both = {id(p) for p in self.query} & {id(p) for p in self.key}
        if both and np.intersect1d(self.query_rows, self.key_rows).size:
            raise ValueError(
                f"For '{function}', 'query_rows' and 'key_rows' must have no row in common where '{prefix}query' and "
                f"'{prefix}key' are one Parameter."
            )

    def clip(self, max_logits: Any, threshold: float) -> int:
        """Scale the heads whose largest logit is above the threshold, and return their number."""
        logits = self._logits(max_logits)
        heads, form = len(logits), self.form
        key_heads = heads if form.key_heads is None else form.key_heads
        if heads % key_heads:
            fail(ValueError, self.function, "key_heads", f"a divisor of the number of heads, {heads}", key_heads)
        query_rows = self._by_head("query", self.query_rows, heads, "query_rope", form.query_rope)
        key_rows = self._by_head("key", self.key_rows, key_heads, "key_values", form.key_values)
        if query_rows[0].shape[1] != key_rows[0].shape[1]:
            raise ValueError(
                f"For '{self.function}', queries and keys of a head must have equally many rows, but 'query' has "
                f"{query_rows[0].shape[1]} rows for each of {heads} heads, and 'key' {key_rows[0].shape[1]} for each "
                f"of {key_heads} ('key_heads'), without 'query_rope' and 'key_values'."
            )
        above = logits > threshold
        if not above.any():
            return 0
        gamma = np.where(above, threshold / np.where(above, logits, 1.0), 1.0)
        of_key = np.sqrt(gamma.reshape(key_heads, -1).min(1))
        of_query = gamma / np.repeat(of_key, heads // key_heads)
        _scale(self.query, ((query_rows[0], of_query), (query_rows[1], gamma)))
        _scale(self.key, ((key_rows[0], of_key),))
        return int(above.sum())

    def _parameters(self, name: str, given: Any) -> list[Parameter]:
        found = [given] if isinstance(given, Parameter) else ordered(given)
        if not found or not all(isinstance(p, Parameter) for p in found):
            fail(TypeError, self.function, name, "a Parameter, or a list of Parameters", given)
        for p in found:
            if p.dtype not in WEIGHT_DTYPES:
                raise TypeError(
                    f"For '{self.function}', the parameter '{p.name}' of '{name}' must be float32, float16 or "
                    f"bfloat16, but is {p.dtype}."
                )
            if p.ndim == 0 or p.shape[0] != found[0].shape[0]:
                raise ValueError(
                    f"For '{self.function}', all parameters of '{name}' must have the same number of rows, but have "
                    f"the shapes {[tuple(p.shape) for p in found]}."
                )
        return found

    def _rows(self, name: str, given: Any, parameters: list[Parameter]) -> NDArray[np.int64]:
        count = parameters[0].shape[0]
        if given is None:
            return np.arange(count)
        rows = ordered(given)
        if not rows or not all(isinstance(row, (int, np.integer)) and not isinstance(row, bool) for row in rows):
            fail(TypeError, self.function, name, "a range or a list of int, or None", given)
        if min(rows) < 0 or max(rows) >= count or len(set(rows)) != len(rows):
            raise ValueError(
                f"For '{self.function}', the argument '{name}' must hold distinct rows from 0 to {count - 1}, but "
                f"has {len(rows)} from {min(rows)} to {max(rows)}, {len(set(rows))} of them distinct."
            )
        return np.asarray(rows, np.int64)

    def _logits(self, given: Any) -> NDArray[np.float64]:
        values = ops.cast(given, mstype.float32).asnumpy() if isinstance(given, Tensor) else given
        if not isinstance(values, np.ndarray):
            numbers = ordered(values)
            if not numbers or not all(map(is_number, numbers)):
                fail(TypeError, self.function, self.name, "a Tensor or a list of one number for each head", given)
            values = np.asarray(numbers)
        values = values.astype(np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ValueError(
                f"For '{self.function}', the argument '{self.name}' must have one number for each head, but has the "
                f"shape {values.shape}."
            )
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise ValueError(
                f"For '{self.function}', the argument '{self.name}' must be finite, but is {values[wrong[0]]} for head "
                f"{wrong[0]}."
            )
        return values

    def _by_head(
        self, name: str, rows: NDArray[np.int64], heads: int, rest: str, count: int
    ) -> list[NDArray[np.int64]]:
        """Return the rows of each head, split into the rows of its queries or keys, and the rest at the end."""
        if len(rows) % heads:
            raise ValueError(
                f"For '{self.function}', the number of rows of '{name}' must be a multiple of the number of heads, "
                f"{heads}, but is {len(rows)}."
            )
        each = len(rows) // heads
        if count >= each:
            fail(ValueError, self.function, rest, f"less than the number of rows of a head in '{name}', {each}", count)
        return np.split(rows.reshape(heads, each), [each - count], 1)


def _scale(parameters: list[Parameter], parts: Iterable[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> None:
    """Multiply the rows of each head by its factor, if this is not 1."""
    of_rows = np.ones(parameters[0].shape[0])
    for rows, factors in parts:
        of_rows[rows] = factors[:, np.newaxis]
    for p in parameters:
        scale_rows(p, of_rows)
