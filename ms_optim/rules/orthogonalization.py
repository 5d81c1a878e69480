"""Muon's orthogonalization in MindSpore's operators: for devices without a kernel, and to check the kernel against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .arithmetic import normal, rounded
from .coefficients import Triple
from .sliced_matrices import Whole

if TYPE_CHECKING:
    from .matrices import Form, Matrix

ROW_EPS = 1e-8
# How much singular values may grow in a run of iterations on a Gram matrix, in which rounding grows by the square of
# that: by the product of the iterations' first coefficients. ops/include/muon.h states the same.
MOST_GROWTH = {"float32": 42.0, "bfloat16": 16.0}


class Rows(nn.Cell):
    """Extracts the matrices of a form from stacked tensors, grouped by size, and puts them back.

    Args:
        form: The matrices that each tensor holds.
    """

    def __init__(self, form: Sequence[Matrix]):
        super().__init__(auto_prefix=False)
        sizes = list(dict.fromkeys(matrix.rows for matrix in form))
        rows = [[_rows(matrix) for matrix in form if matrix.rows == size] for size in sizes]
        order = np.concatenate([row for same in rows for row in same])
        self.columns, self.total, self.sizes = form[0].columns, len(order), tuple(sizes)
        self.counts = tuple(len(same) for same in rows)
        self.ends = tuple(np.cumsum([size * count for size, count in zip(self.sizes, self.counts)]).tolist())
        self.in_order = bool((order == np.arange(len(order))).all())
        self.order = Tensor(order.astype(np.int32))
        self.back = Tensor(np.argsort(order).astype(np.int32))

    def construct(self, tensors):
        """Return, for each size, the matrices of all tensors, of shape (tensors, matrices, rows, columns)."""
        n = F.shape(tensors)[0]
        rows = tensors.reshape((n, self.total, -1))
        if not self.in_order:
            rows = ops.gather(rows, self.order, 1)
        taken, begin = (), 0
        for k in range(len(self.sizes)):
            part = rows[:, begin : self.ends[k]]
            taken += (part.reshape((n, self.counts[k], self.sizes[k], -1)),)
            begin = self.ends[k]
        return taken

    def joined(self, matrices, shape):
        """Return tensors of a shape from the matrices that :meth:`construct` extracted."""
        parts = ()
        for part in matrices:
            parts += (part.reshape((shape[0], -1, F.shape(part)[-1])),)
        rows = parts[0] if len(parts) == 1 else ops.concat(parts, 1)
        if not self.in_order:
            rows = ops.gather(rows, self.back, 1)
        return rows.reshape(shape)


def _rows(matrix: Matrix) -> np.ndarray:
    runs = matrix.first_row + matrix.stride * np.arange(matrix.runs)
    return (runs[:, None] + np.arange(matrix.run)).reshape(-1)


class Orthogonalize(nn.Cell):
    """Replaces matrices by nearby orthogonal matrices: the Newton-Schulz iteration, with odd polynomials.

    Where a matrix X of a rows has more columns, iterations on X X^T, of a by a, take less work (Dao-AILab, "Gram
    Newton-Schulz", 2026): X enters at the beginning and at the end of a run of iterations alone.

    Args:
        iterations: The coefficients (a, b, c) of each iteration.
        bfloat16: Whether the factors of products are bfloat16.
        device: The device; on "CPU", factors are rounded to bfloat16 and multiplied as float32 numbers.
        dtype: The dtype in which squares are summed.
    """

    def __init__(self, iterations: Sequence[Triple], bfloat16: bool, device: str, dtype):
        super().__init__(auto_prefix=False)
        self.runs, self.bfloat16, self.dtype = runs_of(iterations, bfloat16), bfloat16, dtype
        self.on_host = device == "CPU"

    def construct(self, matrices):
        """Return the orthogonal matrices of a stack, of shape (..., rows, columns)."""
        shape = F.shape(matrices)
        squares = ops.square(F.cast(matrices, self.dtype))
        norms = ops.sqrt(ops.sum(squares.reshape((*shape[:-2], -1)), -1)).reshape((*shape[:-2], 1, 1))
        inverse = ops.where(norms > 0, 1.0 / ops.where(norms > 0, norms, ops.ones_like(norms)), norms)
        x = F.cast(F.cast(matrices, self.dtype) * inverse, mstype.float32)
        x = x.reshape((-1, shape[-2], shape[-1]))
        is_tall = shape[-2] > shape[-1]
        x = self.stored(x.swapaxes(1, 2) if is_tall else x)
        for run in self.runs:
            x = self.run_on_gram(x, run) if is_on_gram(shape[-2], shape[-1], run) else self.run(x, run)
        x = F.cast(x.swapaxes(1, 2) if is_tall else x, mstype.float32)
        return x.reshape(shape)

    def run(self, x, iterations):
        """Return matrices after iterations."""
        for a, b, c in iterations:
            gram = self.stored(self.product(x, x.swapaxes(1, 2)))
            x = self.stored(a * x + self.product(self.polynomial(gram, b, c), x))
        return x

    def run_on_gram(self, x, iterations):
        """Return the same from the iterations' product, which is a polynomial of the Gram matrix."""
        gram = self.stored(self.product(x, x.swapaxes(1, 2)))
        a, b, c = iterations[0]
        factor = self.polynomial(gram, b, c)
        product = self.stored(factor + a * ops.eye(F.shape(gram)[-1], F.shape(gram)[-1], factor.dtype))
        for k in range(1, len(iterations)):
            half = self.stored(self.product(gram, factor) + a * gram)
            gram = self.stored(self.product(factor, half) + a * half)
            a, b, c = iterations[k]
            factor = self.polynomial(gram, b, c)
            product = self.stored(self.product(product, factor) + a * product)
        return self.stored(self.product(product, x))

    def polynomial(self, gram, b: float, c: float):
        """Return b S + c S S of symmetric matrices S."""
        return self.stored(b * gram if c == 0.0 else b * gram + c * self.product(gram, gram))

    def stored(self, x):
        """Return numbers in the format of the products' factors."""
        if not self.bfloat16:
            return x
        return rounded(x, mstype.bfloat16) if self.on_host else F.cast(x, mstype.bfloat16)

    def product(self, left, right):
        """Return products of matrices."""
        return ops.bmm(left, right)


class UpdateByOperators(nn.Cell):
    """The update of a stack of whole tensors of one form: their matrices, orthogonalized and scaled.

    Args:
        orthogonalize: Orthogonalizes matrices.
        rows: Extracts the matrices of a tensor.
        scales: For each matrix size in :attr:`Rows.sizes`, the factor of an orthogonalized matrix.
        row_beta: The decay rate of NorMuon's averages; None if rows are not normalized.
    """

    def __init__(self, orthogonalize: Orthogonalize, rows: Rows, scales: Sequence[float], row_beta: float | None):
        super().__init__(auto_prefix=False)
        self.orthogonalize, self.rows, self.scales, self.row_beta = orthogonalize, rows, tuple(scales), row_beta
        self.dtype = orthogonalize.dtype

    def construct(self, whole, averages) -> Any:
        """Return the updates, the new averages of rows, and the sum of squares of each tensor's orthogonal matrices.

        Args:
            whole: The tensors.
            averages: The averages of their rows, of shape (tensors, rows, 1), in a tuple; () if there are none.
        """
        shape = F.shape(whole)
        matrices, before = self.rows(whole), ()
        if self.row_beta is not None:
            before = self.rows(averages[0])
        moved, after, squares = (), (), ops.zeros((shape[0],), self.dtype)
        for k in range(len(matrices)):
            x = self.orthogonalize(matrices[k])
            squares = squares + ops.sum(ops.square(F.cast(x, self.dtype)).reshape((shape[0], -1)), 1)
            if self.row_beta is not None:
                x, average = normalized_rows(x, before[k][..., 0], self.row_beta, self.dtype)
                after += (ops.expand_dims(average, -1),)
            moved += (self.scales[k] * x,)
        moves = self.rows.joined(moved, shape)
        return moves, (self.rows.joined(after, of_rows(shape)) if self.row_beta is not None else ()), squares


class UpdateByKernel(nn.Cell):
    """The same by the kernel for CPU.

    Args:
        operator: The kernel.
        description: Its inputs before the tensors: flags, constants, matrices and coefficients.
        normalizes_rows: Whether rows are normalized.
    """

    def __init__(self, operator: Any, description: Sequence[Tensor], normalizes_rows: bool):
        super().__init__(auto_prefix=False)
        self.operator, self.description, self.normalizes_rows = operator, tuple(description), normalizes_rows
        self.no_averages = Tensor(np.zeros(1, np.float32))

    def construct(self, whole, averages) -> Any:
        """Return the updates, the new averages of rows, and the sum of squares of each tensor's orthogonal matrices."""
        before = averages[0] if self.normalizes_rows else self.no_averages
        return self.operator(*self.description, F.cast(whole, mstype.float32), before)


class Moves(nn.Cell):
    """The update of tensors of one form, whose matrices processes may have to assemble.

    Args:
        form: The matrices that each tensor holds.
        update: Updates whole tensors.
        dtype: The dtype in which squares are summed.
        normalizes_rows: Whether rows are normalized.
        owners: Assembles matrices at their owners; None if no slice cuts a matrix.
    """

    def __init__(self, form: Form, update: nn.Cell, dtype, normalizes_rows: bool, owners: Any):
        super().__init__(auto_prefix=False)
        self.update, self.dtype, self.normalizes_rows = update, dtype, normalizes_rows
        self.whole, self.owners = Whole(form.slicing), owners
        self.cuts_rows = form.slicing is not None and form.slicing.cuts_rows
        self.batch = form.batch
        self.singular_values = form.singular_values

    def construct(self, u, averages):
        """Return the update of a stack of tensors.

        Args:
            u: The tensors to orthogonalize.
            averages: The state of NorMuon, in a tuple, or ().

        Returns:
            The updates; the new state, in a tuple, or (); and for each tensor, the root mean square of its singular
            values.
        """
        if self.owners is not None:
            return self.by_owners(u, averages)
        before = () if not self.normalizes_rows else (averages[0].reshape(of_rows(F.shape(u))),)
        moves, after, squares = self.update(u, before)
        singular_values = ops.sqrt(self.whole.mean(squares, self.singular_values))
        if not self.normalizes_rows:
            return moves, (), singular_values
        return moves, (normal(after.reshape(F.shape(averages[0]))),), singular_values

    def by_owners(self, u, averages):
        """Return the same if each process holds a slice of every matrix, and whole matrices are dealt among them."""
        shape = F.shape(u)
        slices = u.reshape((shape[0] * self.batch, *shape[2:])) if self.batch > 1 else u
        count, of_slices = F.shape(slices)[0], F.shape(slices)
        before: Any = ()
        moves: Any = ()
        after: Any = ()
        squares: Any = ()
        known: Any = ()
        if self.normalizes_rows:
            known = self.whole_averages(averages[0], shape)
            slices = F.depend(slices, known)
            before = (self.owners.mine(known.reshape((count, -1, 1))),)
        whole, received = self.owners(slices)
        if len(whole) > 0:
            moves, after, squares = self.update(whole, before)
        moves = self.owners.back(moves, of_slices, received)
        squares = F.cast(self.owners.of_all(squares, (count,), moves), self.dtype)
        moves = moves.reshape(shape)
        squares = ops.sum(squares.reshape((shape[0], self.batch)), 1)
        singular_values = ops.sqrt(self.whole.mean(squares, self.singular_values))
        if not self.normalizes_rows:
            return moves, (), singular_values
        of_each = F.shape(known.reshape((count, -1, 1)))
        after = self.owners.of_all(after, of_each, squares).reshape(F.shape(known))
        after = self.whole.own(after) if self.cuts_rows else after
        return moves, (normal(after.reshape(F.shape(averages[0]))),), singular_values

    def whole_averages(self, averages, shape):
        """Return the averages of all rows of whole matrices, from the averages of the rows of stacked slices."""
        averages = averages.reshape(of_rows(shape))
        return self.whole(averages) if self.cuts_rows else averages


def of_rows(shape):
    """Return the shape of one number per row of stacked tensors; each tensor may be a batch of matrices."""
    return (*shape[: 3 if len(shape) == 4 else 2], 1)


def normalized_rows(matrices, average, beta: float, dtype):
    """Return NorMuon's matrices, scaled to norm 1, and the moving averages of their rows' mean squares.

    Args:
        matrices: Orthogonal matrices, of shape (..., rows, columns).
        average: The averages so far, of shape (..., rows).
        beta: The decay rate of the averages.
        dtype: The dtype in which squares are summed.
    """
    wide = F.cast(matrices, dtype)
    sums = ops.sum(ops.square(wide), -1)
    kept = F.cast(average, dtype) * beta + sums * ((1.0 - beta) / F.shape(matrices)[-1])
    average = F.cast(kept, mstype.float32)
    factors = 1.0 / (ops.sqrt(F.cast(average, dtype)) + ROW_EPS)
    norms = ops.sqrt(ops.sum(ops.square(factors) * sums, -1, True))
    factors = ops.where(norms > 0, factors / ops.where(norms > 0, norms, ops.ones_like(norms)), norms)
    return F.cast(wide * ops.expand_dims(factors, -1), mstype.float32), average


def is_on_gram(rows: int, columns: int, run: Sequence[Triple]) -> bool:
    """Return whether a run of n iterations is one on a Gram matrix.

    If r is the ratio of the sides, such a run takes 4 r + 8 n - 6 products of squares in place of n (4 r + 2).
    """
    return 2 * max(rows, columns) >= 3 * min(rows, columns) and len(run) > 1


def work(iterations: Sequence[Triple], rows: int, columns: int) -> float:
    """Return the operations that the kernel needs for a matrix. Of symmetric products it computes one half.

    An iteration with c = 0 takes no product of S with itself. Runs are those of float32: bfloat16 ends them sooner, and
    takes up to two fifths more.
    """
    a, b = min(rows, columns), max(rows, columns)
    total = 0.0
    for run in runs_of(iterations, False):
        n = len(run)
        squares = 3 * b / a + 4 * n - 3 if is_on_gram(rows, columns, run) else n * (3 * b / a + 1)
        total += (squares - sum(c == 0.0 for _, _, c in run)) * a**3
    return total


def runs_of(iterations: Sequence[Triple], bfloat16: bool) -> tuple[tuple[Triple, ...], ...]:
    """Cut iterations into runs in which singular values grow by no more than MOST_GROWTH.

    Args:
        iterations: The coefficients (a, b, c) of each iteration.
        bfloat16: Whether the factors of products are bfloat16.
    """
    most, runs, growth = MOST_GROWTH["bfloat16" if bfloat16 else "float32"], [], math.inf
    for triple in iterations:
        growth *= abs(triple[0])
        if not growth <= most:
            growth = abs(triple[0])
            runs.append(())
        runs[-1] += (triple,)
    return tuple(runs)
