"""Sinkhorn: momentum whose rows and columns are normalized in turn, for embeddings and output layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_at_most, check_count, check_eps, check_momentum, check_positive, fail
from ..arguments.docstrings import documented
from ..base.optimizer import FusedOptimizer, Rule
from ..kernels import table as kernels
from ..rules import matrices
from ..rules.arithmetic import step_dtype, summed
from ..rules.matrices import AXIS
from ..rules.row_column_balance import Balance
from ..rules.sliced_matrices import slicings

if TYPE_CHECKING:
    from mindspore import Tensor
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import SharedButSkipping
    from ..states.layout import Layout

MOST_NORMALIZATIONS = 99


@documented
class Sinkhorn(FusedOptimizer):
    r"""Sinkhorn: momentum whose rows and columns are normalized in turn, for embeddings and output layers.

    DeepSeek-AI, *DeepSeek-V4.1-Flash* (technical report, September 2026), Section 2.5, Algorithm 1, after SinkGD
    (Scetbon et al., `2025 <https://arxiv.org/abs/2502.06742>`_). For a matrix of :math:`m` rows, one for each entry of
    the vocabulary, and :math:`n` columns:

    .. math::
        \begin{aligned}
        M_t &= \beta M_{t-1} + (1 - \beta) G_t, \qquad \hat G_t = \beta M_t + (1 - \beta) G_t \\
        \rho_i &= \lVert \hat G_{t,i} \rVert_2, \qquad
        U_{0,i} = \begin{cases} \hat G_{t,i} & \rho_i > \tau \bar\rho \\ 0 & \text{otherwise} \end{cases} \\
        U_k &= \begin{cases}
        \operatorname{diag}(\lVert U_{k-1,i} \rVert_2 + \epsilon)^{-1}\, U_{k-1} & k \text{ odd} \\
        U_{k-1} \operatorname{diag}(\lVert U_{k-1,\cdot j} \rVert_2 + \epsilon)^{-1} & k \text{ even}
        \end{cases} \qquad 1 \le k \le K \\
        W_t &= W_{t-1} - \gamma_t (s \sqrt n\, U_K + \lambda W_{t-1})
        \end{aligned}

    :math:`G_t` is the gradient after unscaling, centralization and clipping, :math:`\bar\rho` the mean of all
    :math:`\rho_i`, :math:`s` the `scale`, :math:`\gamma_t` the learning rate and :math:`\lambda` the weight decay. Each
    row of an update that is not 0 has the root mean square :math:`s`, whatever the token's frequency, and columns are
    about equally large.

    It takes matrices alone, parameters of two dimensions; give the others to another optimizer. The fused kernels keep
    a factor for each row and each column between the normalizations, and no normalized matrix: temporary memory is
    below 1 % of a matrix of 512 rows and 512 columns or more.

    - **States.** It keeps one state, `sinkhorn_m`. If that is in fewer bits, :math:`\hat G_t` follows from the state as
      it is stored.
    - **Skipped steps.** Steps whose gradients are not finite are skipped unless `skip_nonfinite` is False. Otherwise a
      NaN would spread over the whole matrix.
    - **Sharded states.** With `shard_states`, each matrix belongs to one worker.
    - **Sliced tensors.** With the group key `shard_group`, each process has some of a matrix' rows; a step exchanges
      the sum of the norms of rows, and :math:`n` sums for each column normalization.

    Args:
        {params}
            - shard_axis: Optional, with `shard_group`. The dimension along which the group's tensors are sliced, which
              must be 0, the rows. Default: ``0`` .
        {learning_rate|2.6e-4}
        momentum (Union[float, int]): The momentum :math:`\beta`, in the range [0.0, 1.0). Default: ``0.95`` .
        normalizations (int): The number of normalizations :math:`K`, odd, from 1 to 99. Default: ``11`` .
        tau (Union[float, int]): A row of :math:`\hat G_t` whose norm is at most :math:`\tau` times the mean norm
            becomes 0, from 0 to 1. Default: ``1e-3`` .
        eps (float): Added to norms, greater than 0 and not denormal in float32. Default: ``1e-20`` .
        scale (Union[float, int]): The root mean square of an update's rows, divided by the learning rate; greater than
            0. Default: ``0.18`` .
        {weight_decay}
        {skip_nonfinite|True}
        {loss_scale}
        {grad_clip_norm}
        {precision}
        {backend}
        {shard_states}
        {offload}
        {decay}
        {average_decay}
        {weight_norm}

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        ValueError: If a parameter does not have two dimensions, `normalizations` is not odd or not from 1 to 99, `tau`
            is greater than 1, or a group has a `shard_axis` other than 0, or `shard_axis` without `shard_group`.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import Sinkhorn
        >>> net = nn.Embedding(1000, 64)
        >>> optimizer = Sinkhorn(net.trainable_params(), learning_rate=2.6e-4)
    """

    rules: tuple[Rule, ...] = (
        Rule("sinkhorn", ("sinkhorn_m",), is_elementwise=True, has_matrices=True, reads_stored_states=True),
    )
    dimensions: int | None = 2
    group_keys: ClassVar[tuple[str, ...]] = (AXIS,)
    kernels_lack: ClassVar[dict[str, str]] = {"shard_group": "needs sums that MindSpore's operators exchange"}

    momentum: float
    normalizations: int
    tau: float
    eps: float
    scale: float

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 2.6e-4,
        momentum: float = 0.95,
        normalizations: int = 11,
        tau: float = 1e-3,
        eps: float = 1e-20,
        scale: float = 0.18,
        weight_decay: WeightDecay = 0.0,
        *,
        skip_nonfinite: bool = True,
        **shared: Unpack[SharedButSkipping],
    ):
        name = type(self).__name__
        check_momentum(name, "momentum", momentum)
        check_count(name, "normalizations", normalizations, 1)
        check_at_most(name, "normalizations", normalizations, MOST_NORMALIZATIONS)
        if normalizations % 2 == 0:
            fail(ValueError, name, "normalizations", "odd, because rows are normalized first and last", normalizations)
        self.tau = check_at_most(name, "tau", tau, 1.0)
        check_eps(name, eps)
        check_positive(name, "scale", scale)
        params, self._said = matrices.take_keys(name, params, self.group_keys)
        # 1 - momentum is computed here, in float64; in a graph it would be a difference of float32 numbers.
        self.momentum, self._one_minus_momentum = float(momentum), 1.0 - float(momentum)
        self.normalizations, self.eps, self.scale = int(normalizations), eps, float(scale)
        constants, pairs = (self.momentum, self.tau, self.eps, self.scale), self.normalizations // 2
        rule = self.rules[0]._replace(constants=constants, flags=pairs, reads_between=max(0, pairs - 1))
        super().__init__(params, learning_rate, weight_decay, rule, skip_nonfinite=skip_nonfinite, **shared)

    @classmethod
    def are_matrices(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return for each parameter that it is a matrix."""
        return [True] * len(shapes)

    def with_matrices(self, layout: Layout, shard_groups: Mapping[str, str]) -> Layout:
        """Return the layout with each parameter as a matrix, and make what balances each form."""
        name, axes = layout.optimizer, self._said[AXIS]
        shapes = dict(zip(layout.names, layout.shapes))
        for parameter, shape in shapes.items():
            if len(shape) != self.dimensions:
                raise ValueError(
                    f"For '{name}', each parameter must be a matrix, of two dimensions, such as the weight of an "
                    f"embedding or of an output layer, but '{parameter}' has the shape {shape}: give it to another "
                    "optimizer."
                )
            if axes.get(parameter, 0) != 0:
                raise ValueError(
                    f"For '{name}', 'shard_axis' of the parameter '{parameter}' must be 0, but is {axes[parameter]}: "
                    "it takes slices of rows alone."
                )
        forms = matrices.forms(name, shapes, slicings(name, shapes, shard_groups, axes), {}, {})
        layout = layout.with_matrices([forms[parameter] for parameter in layout.names])
        numbers = (self.normalizations, self.tau, self.eps, step_dtype(kernels.device_target()))
        self._balances = nn.CellList([Balance(*numbers, form.slicing) for form in layout.forms])
        return layout

    def scalars(self, t: Tensor) -> Scalars:
        """Return an empty tuple: no value of the rule depends on the step."""
        return ()

    def matrix_states(self, gradient: Tensor, states: Tensors) -> Tensors:
        """Compute the new momentum."""
        return (summed(self.momentum * states[0], self._one_minus_momentum * gradient),)

    def matrix_directions(
        self, scalars: Scalars, form: int, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Compute the update from the new momentum."""
        u = self._balances[form](summed(self.momentum * states[0], self._one_minus_momentum * gradient))
        move = self.scale * math.sqrt(F.shape(u)[-1]) * u
        direction = self.with_decay(move, weight, weight_decay)
        return (direction,), states, ops.ones((F.shape(u)[0],), mstype.float32)
