"""Normalizes the rows and columns of matrices in turn, in MindSpore's operators, as a rule for embeddings needs it."""

from __future__ import annotations

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from .arithmetic import expanded, quotient
from .sliced_matrices import Slicing


class Balance(nn.Cell):
    """Divides the rows and columns of matrices by their norms in turn, rows first and last.

    Args:
        normalizations: The number of divisions, odd.
        tau: Rows whose norm is at most this part of the mean norm of a row become 0.
        eps: Added to each norm.
        dtype: The dtype in which squares are summed.
        slicing: How processes slice the rows of the matrices; None if they do not. The processes then exchange the sum
            of the norms of rows once, and the sums of squares of columns for each pair of divisions.
    """

    def __init__(self, normalizations: int, tau: float, eps: float, dtype, slicing: Slicing | None):
        super().__init__(auto_prefix=False)
        self.pairs, self.tau, self.eps, self.dtype = normalizations // 2, tau, eps, dtype
        self.rows, self.is_sliced = 0, slicing is not None
        if slicing is not None:
            self.rows = sum(slicing.lengths)
            self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, slicing.group)

    def construct(self, matrices):
        """Return the balanced matrices of a stack, of shape (tensors, rows, columns)."""
        norms = ops.sqrt(self.squares(matrices, 2))
        mean = self.of_whole(ops.sum(norms, 1, True)) / (self.rows if self.is_sliced else F.shape(matrices)[1])
        x = ops.masked_fill(matrices, expanded(norms <= self.tau * mean, matrices), 0.0)
        for _ in range(self.pairs):
            x = self.divided(x, self.squares(x, 2))
            x = self.divided(x, self.of_whole(self.squares(x, 1)))
        return self.divided(x, self.squares(x, 2))

    def squares(self, x, axis):
        """Return the sums of squares along an axis, which stays with the length 1."""
        return ops.sum(ops.square(F.cast(x, self.dtype)), axis, True)

    def divided(self, x, squares):
        """Return matrices divided by the norms of their rows or columns."""
        return quotient(x, expanded(F.cast(ops.sqrt(squares) + self.eps, mstype.float32), x))

    def of_whole(self, sums):
        """Return sums over all rows of whole matrices."""
        if not self.is_sliced:
            return sums
        return F.cast(self.all_reduce(F.cast(sums, mstype.float32)), sums.dtype)
