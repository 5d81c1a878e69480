"""Muon: orthogonalized momentum for matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Tensor, nn
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it

from ..arguments.checks import check_choice, check_count, check_momentum, check_positive, check_type, fail
from ..arguments.docstrings import documented
from ..arguments.words import warn_once
from ..base.optimizer import Rule
from ..kernels import interface
from ..kernels import table as kernels
from ..kernels.interface import MuonFlag
from ..rules import matrices
from ..rules.arithmetic import step_dtype, summed
from ..rules.coefficients import JORDAN, iterations_of
from ..rules.matrices import ADAMW_NAMES, AXIS, KEY, KEYS, SPLIT
from ..rules.orthogonalization import Moves, Orthogonalize, Rows, UpdateByKernel, UpdateByOperators, work
from ..rules.owners import Owners, dealers
from ..rules.sliced_matrices import slicings
from ..rules.splits import Split, check_splits
from .adam_family import AdamFamily
from .adamw import AdamW

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.checks import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ..arguments.options import Shared, SharedButSkipping
    from ..rules.matrices import Form
    from ..states.layout import Layout

Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

ADJUSTMENTS = ("match_rms_adamw", "original")
PRODUCT_DTYPES = ("float32", "bfloat16")
ROW_BETA = 0.95
# What MindSpore's operators hold for each element of a stack, in bytes: 112 measured in PyNative mode.
BYTES_IN_OPERATORS = 128


@documented
class Muon(AdamFamily):
    r"""Muon: updates matrices along their orthogonalized momentum, and all other parameters by AdamW, in one step.

    Jordan, `Muon: An optimizer for hidden layers in neural networks <https://kellerjordan.github.io/posts/muon/>`_
    (2024), with the weight decay and the scale of Liu et al., `Muon is Scalable for LLM Training
    <https://arxiv.org/abs/2502.16982>`_ (2025). For a matrix of :math:`A` rows and :math:`B` columns:

    .. math::
        \begin{aligned}
        M_t &= \mu M_{t-1} + G_t, \qquad U_t = G_t + \mu M_t \\
        X_0 &= U_t / \left\lVert U_t \right\rVert_F \\
        S_k &= X_k X_k^\top, \qquad X_{k+1} = a_k X_k + (b_k S_k + c_k S_k^2) X_k, \qquad 0 \le k < n \\
        W_t &= W_{t-1} - \gamma_t (s X_n + \lambda W_{t-1})
        \end{aligned}

    :math:`G_t` is the gradient after unscaling, centralization and clipping, :math:`\gamma_t` the learning rate,
    :math:`\lambda` the weight decay and :math:`s` a scale that depends on the matrix' size, see `adjust_lr`. Without
    `nesterov`, :math:`U_t` is :math:`M_t`. A matrix with more rows than columns is transposed for the iterations, which
    bring all singular values of :math:`X` near 1. If :math:`U_t` is 0, :math:`X_n` is 0. With `normalize_rows`, each
    row is then divided by the root of a moving average of its mean square, and the matrix is rescaled to a fixed norm,
    as in NorMuon (Li et al., `2025 <https://arxiv.org/abs/2510.05491>`_), with :math:`O = X_n` and `matched_adamw_rms`
    :math:`\rho`:

    .. math::
        v_i \leftarrow 0.95\, v_i + 0.05 \left\lVert O_i \right\rVert^2 / B, \qquad
        O'_i = O_i / (\sqrt{v_i} + 10^{-8}), \qquad s X_n = \rho \sqrt{A B}\, O' / \left\lVert O' \right\rVert_F

    Matrices are the parameters of two or more dimensions whose name does not match `adamw_names`, unless a group's key
    `muon` states otherwise:

    - A 3-dimensional parameter is a batch of matrices, such as experts. That of a one-dimensional convolution, such as
      `mint.nn.Conv1d`, is not: :func:`ms_optim.muon_groups` finds it by its layer and assigns it to AdamW.
    - With more dimensions, the first dimension is the rows and the others are the columns, as in a convolution.
    - `splits` states which parameters hold several matrices stacked along their rows, such as attention heads.

    All other parameters are updated as by :class:`ms_optim.AdamW`, with `adamw_betas` and `adamw_eps`. Learning rate,
    weight decay and all shared arguments apply to both. Parameters that are not in groups are decayed regardless of
    their names.

    For both kinds of parameters, these rules hold:

    - **States.** A matrix has one state, `muon_m`, and with `normalize_rows` also `muon_v`, which is float32 for every
      `state_dtype` and has one number for each row. Other parameters have `adam_m` and `adam_v`.
    - **Statistics.** For a matrix, the trust ratio in `statistics` is the root mean square of its singular values after
      the iterations, normally 0.9 to 1.0; for other parameters it is 1.
    - **Skipped steps.** Steps whose gradients are not finite are skipped unless `skip_nonfinite` is False. Otherwise an
      infinity would stay permanently in the momentum, and in the norm that divides the whole matrix.
    - **Sharded states.** With `shard_states`, each matrix belongs to one worker, which orthogonalizes it; shares are
      balanced by the work of the iterations.
    - **Sliced tensors.** With the group key `shard_group`, each matrix has an owner among the processes, which
      assembles it from their slices, orthogonalizes it, and returns to each its slice; `splits` and scales apply to
      whole matrices. Where each process holds whole matrices, such as heads, it orthogonalizes its own.

    Args:
        {params}
            - muon: Optional. Whether Muon updates the group's parameters, which then need two or more dimensions, or
              AdamW updates them. Default: determined by the parameter's dimensions and name.
            - split: Optional. How the rows of those that Muon updates are split into matrices, in any form that
              `splits` takes. Default: determined by `splits`.
            - shard_axis: Optional, with `shard_group`. The dimension along which the group's tensors are sliced.
              Default: ``0`` .
        {learning_rate|2e-2}
        {weight_decay|0.1}
        matched_adamw_rms (Union[float, int]): The root mean square of an update's elements, divided by the learning
            rate; greater than 0. For AdamW it is about 0.2. It is ignored with `adjust_lr` "original".
            Default: ``0.2`` .
        momentum (Union[float, int]): The momentum :math:`\mu`, in the range [0.0, 1.0). Default: ``0.95`` .
        nesterov (bool): Whether to use Nesterov momentum. Default: ``True`` .
        ns_steps (Union[int, None]): The number of iterations :math:`n`, from 1 to 100. ``None`` means as many as
            `ns_coefficients` states, and 5 where it fits any number. Default: ``None`` .
        adamw_betas (Union[list[float], tuple[float]]): AdamW's decay rates of the first and second moment, each in the
            range (0.0, 1.0). Default: ``(0.95, 0.95)`` .
        adamw_eps (Union[float, int]): Added to AdamW's denominator, greater than 0 and not denormal in float32.
            Default: ``1e-8`` .
        adjust_lr (str): The scale :math:`s` of a matrix: "match_rms_adamw" is `matched_adamw_rms`
            :math:`\cdot \sqrt{\max(A, B)}`, so that AdamW's learning rates and weight decays can be used; "original" is
            :math:`\sqrt{\max(1, A / B)}`. Default: ``"match_rms_adamw"`` .
        ns_coefficients (Union[str, list, tuple]): The coefficients :math:`(a, b, c)` of all iterations, or a list of
            such triples, one for each iteration, or the name of published ones:

            - "jordan": those of the default, for any number of iterations.
            - "quintic": five triples, Cesista, You and Jordan (2025), as in NVIDIA's Emerging-Optimizers.
            - "polar_express": Amsel et al. (`2025 <https://arxiv.org/abs/2505.16932>`_), eight triples, of which
              further iterations repeat the last one; for any number of iterations.
            - "cans": five triples, Grishina et al. (`2025 <https://arxiv.org/abs/2506.10935>`_); not with `ns_dtype`
              "bfloat16", whose rounding makes them diverge.
            - "deepseek_v4": eight times those of the default and twice (2, -1.5, 0.5), as DeepSeek-V4.
            - "cubic5": five triples with :math:`c = 0` (`2026 <https://arxiv.org/abs/2606.00371>`_), which spares a
              product in each iteration.

            Default: ``(3.4445, -4.7750, 2.0315)`` .
        ns_dtype (str): The dtype of the numbers that the iterations multiply, "float32" or "bfloat16"; sums are
            float32. Default: ``"float32"`` .
        normalize_rows (bool): Whether rows are normalized, as in NorMuon. Requires `adjust_lr` "match_rms_adamw".
            Default: ``False`` .
        adamw_names (Union[list[str], tuple[str]]): Name patterns of parameters that AdamW updates regardless of their
            dimensions, as in :func:`ms_optim.pattern_groups`: embeddings and the output layer. If a pattern of your own
            matches nothing, a warning says so. Default: ``("*embed*", "*lm_head*", "*output_layer*")`` .
        splits (Union[dict, None]): How the rows of a parameter are split into matrices, by pattern of the parameter's
            name; the first pattern that matches is used, unless a group's key `split` states otherwise. Each matrix is
            orthogonalized separately and has its own scale. In a batch of matrices, each matrix is split. A split has
            one of four forms:

            - (4096, 1024, 1024): Consecutive matrices with these numbers of rows.
            - 2: This number of matrices of equal size.
            - ((64, 64, 64), 12): Numbers of rows that repeat 12 times. The first 64 rows of all 12 parts form one
              matrix of 768 rows, the second 64 rows another, and so on, for example if query, key and value are stored
              by head.
            - heads(32), or heads(32, (128, 64)) with blocks of a head: each head, or each block of each head, is a
              matrix, see :func:`ms_optim.heads`. With rows it may stand among numbers of rows: (heads(32, 128),
              heads(8, 128), 1024). In a YAML file write {heads: 32, rows: [128, 64]}.

            Default: ``None`` .
        max_temporary_bytes (Union[int, None]): The most bytes of temporary memory for matrices that a step takes
            together: directions, and copies and products of the iterations. A matrix that needs more by itself is taken
            alone. MindSpore's operators are counted with 128 bytes for each element of what they take together; this
            bounds PyNative mode, as graphs on CPU keep the memory of all operators. ``None`` means 4 million elements.
            Default: ``None`` .
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
        TypeError: If `adamw_betas` is not a list or tuple of two floats, `ns_coefficients` not a name, three numbers or
            a list of these, `adamw_names` not a list or tuple of str, `splits` not a dict of the forms above, a group's
            `muon` not a bool or its `split` of no such form.
        ValueError: If `ns_steps` is not from 1 to 100, or not the number of triples in `ns_coefficients`, or these
            have an unknown name, diverge, or turn singular values to negative numbers.
        ValueError: If `normalize_rows` is True with `adjust_lr` "original".
        ValueError: If a group with `muon` True has a parameter of fewer than two dimensions, a split does not cover
            exactly the rows of a matrix, or its pattern or group holds no matrix.
        ValueError: If a group has the key `shard_axis` without `shard_group`, or a parameter of it has too few
            dimensions, or the slices of a parameter differ in other dimensions.
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import Muon
        >>> net = nn.SequentialCell(nn.Dense(16, 48), nn.ReLU(), nn.Dense(48, 3))
        >>> groups = [{"params": net[0].trainable_params()}, {"params": net[2].trainable_params(), "muon": False}]
        >>> optimizer = Muon(groups, learning_rate=2e-2, weight_decay=0.1, splits={"0.weight": 3})
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    rules: tuple[Rule, ...] = (
        Rule("muon", ("muon_m",), is_elementwise=True, has_matrices=True, others=AdamW.rules[0]),
        Rule(
            "muon",
            ("muon_m", "muon_v"),
            is_elementwise=True,
            state_kinds=("signed", "rows"),
            has_matrices=True,
            others=AdamW.rules[0],
        ),
    )
    trials: tuple[dict[str, Any], ...] = ({}, {"normalize_rows": True})
    decays_every_name = True
    group_keys: ClassVar[tuple[str, ...]] = KEYS
    # MindSpore's parallel optimizer would distribute the parameters without regard to their work.
    _support_parallel_optimizer = False
    kernels_lack: ClassVar[dict[str, str]] = {"shard_group": "needs matrices that MindSpore's operators assemble"}

    matched_adamw_rms: float
    momentum: float
    nesterov: bool
    adjust_lr: str
    max_temporary_bytes: int | None
    normalize_rows: bool
    adamw_names: tuple[str, ...]

    def __init__(
        self,
        params: Params,
        learning_rate: LearningRate = 2e-2,
        weight_decay: WeightDecay = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int | None = None,
        adamw_betas: Sequence[float] = (0.95, 0.95),
        adamw_eps: float = 1e-8,
        *,
        adjust_lr: str = "match_rms_adamw",
        ns_coefficients: Coefficients = JORDAN,
        ns_dtype: str = "float32",
        normalize_rows: bool = False,
        adamw_names: Sequence[str] = ADAMW_NAMES,
        splits: Mapping[str, Split] | None = None,
        max_temporary_bytes: int | None = None,
        skip_nonfinite: bool = True,
        **shared: Unpack[SharedButSkipping],
    ):
        name = type(self).__name__
        check_positive(name, "matched_adamw_rms", matched_adamw_rms)
        check_momentum(name, "momentum", momentum)
        for argument, flag in (("nesterov", nesterov), ("normalize_rows", normalize_rows)):
            check_type(name, argument, flag, bool)
        check_choice(name, "adjust_lr", adjust_lr, ADJUSTMENTS)
        check_choice(name, "ns_dtype", ns_dtype, PRODUCT_DTYPES)
        if normalize_rows and adjust_lr == "original":
            fail(ValueError, name, "adjust_lr", "'match_rms_adamw' with normalize_rows=True", adjust_lr)
        if not isinstance(adamw_betas, (list, tuple)) or len(adamw_betas) != 2:
            fail(TypeError, name, "adamw_betas", "a list or tuple of two floats", adamw_betas)
        check_positive(name, "adamw_eps", adamw_eps)
        if max_temporary_bytes is not None:
            check_count(name, "max_temporary_bytes", max_temporary_bytes, 1, 53)
        iterations = iterations_of(name, ns_steps, ns_coefficients, ns_dtype == "bfloat16")
        self.adamw_names = matrices.check_names(name, "adamw_names", adamw_names)
        self._splits = check_splits(name, splits)
        params, self._said = matrices.take_keys(name, params, KEYS)
        self.momentum, self.nesterov, self.normalize_rows = float(momentum), nesterov, normalize_rows
        self.matched_adamw_rms, self.adjust_lr = float(matched_adamw_rms), adjust_lr
        flags = MuonFlag.NESTEROV * nesterov + MuonFlag.ORIGINAL_SCALE * (adjust_lr == "original")
        flags += MuonFlag.NORMALIZES_ROWS * normalize_rows + MuonFlag.BFLOAT16_PRODUCTS * (ns_dtype == "bfloat16")
        self.max_temporary_bytes = max_temporary_bytes
        constants = (self.momentum, self.matched_adamw_rms, ROW_BETA, float(max_temporary_bytes or 0))
        rule = self.rules[normalize_rows]._replace(constants=constants, flags=flags, iterations=iterations)
        self._dtype, self._multiplies = step_dtype(kernels.device_target()), (iterations, ns_dtype == "bfloat16")
        betas = {f"adamw_betas[{k}]": beta for k, beta in enumerate(adamw_betas)}
        options: Shared = {**shared, "skip_nonfinite": skip_nonfinite}
        super().__init__(params, learning_rate, weight_decay, rule, betas, float(adamw_eps), options)

    @classmethod
    def are_matrices(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
        """Return for each parameter whether it holds matrices, unless its group states otherwise."""
        return [matrices.is_matrix(name, shape, ADAMW_NAMES) for name, shape in zip(names, shapes)]

    def with_matrices(self, layout: Layout, shard_groups: Mapping[str, str]) -> Layout:
        """Return the layout with the matrices of each parameter, and create the update of each form."""
        name, names, shapes = layout.optimizer, layout.names, layout.shapes
        are_muons = matrices.are_muons(name, names, shapes, self._said[KEY], self.adamw_names)
        matrices.warn_of_unmatched(name, self.adamw_names, names)
        own = {names[i]: shapes[i] for i in range(layout.count) if are_muons[i]}
        if not own:
            warn_once(
                f"For '{name}', no parameter is a matrix that it orthogonalizes: AdamW updates all.", stacklevel=5
            )
        slices = slicings(name, own, shard_groups, self._said[AXIS])
        forms = matrices.forms(name, own, slices, self._splits, self._said[SPLIT])
        most_stacked = 0 if self.max_temporary_bytes is None else max(1, self.max_temporary_bytes // BYTES_IN_OPERATORS)
        layout = layout.with_matrices([forms.get(one) for one in names], most_stacked)
        normalizes, dtype, owners = self.normalize_rows, self._dtype, self._owners(layout)
        of_forms = zip(layout.forms, owners)
        moves = [Moves(form, self._update(form), dtype, normalizes, owner) for form, owner in of_forms]
        self._moves = nn.CellList(moves)
        return layout

    def _update(self, form: Form) -> nn.Cell:
        """Return what updates whole tensors of a form where a step runs in MindSpore's operators."""
        device, rule = kernels.device_target(), self.rule
        may_use_kernel = device == "CPU" and self.options.backend in ("auto", "aot")
        if may_use_kernel and (operator := kernels.orthogonalizer(rule.name)) is not None:
            numbers = (np.array(numbers, np.float64) for numbers in (rule.constants, rule.iterations))
            constants, iterations = map(Tensor, numbers)
            table = Tensor(interface.matrices([form.of_owner]))
            description = (kernels.flags(0, 0, rule.flags), constants, table, iterations)
            return UpdateByKernel(operator, description, self.normalize_rows)
        rows = Rows(form.of_owner)
        scales = [self._scale(size, rows.columns) for size in rows.sizes]
        orthogonalize = Orthogonalize(*self._multiplies, device, self._dtype)
        return UpdateByOperators(orthogonalize, rows, scales, ROW_BETA if self.normalize_rows else None)

    def _owners(self, layout: Layout) -> list[Owners | None]:
        """Return for each form what assembles its matrices at their owners; None where no slice cuts a matrix."""
        iterations, bfloat16 = self._multiplies
        found: dict[int, Owners] = {}
        dealt = [(k, form.slicing) for k, form in enumerate(layout.forms) if form.slicing and form.is_dealt]
        for group in dict.fromkeys(slicing.group for _, slicing in dealt):
            own = [(k, slicing) for k, slicing in dealt if slicing.group == group]
            counts = [layout.form_places.count(k) * slicing.batch for k, slicing in own]
            each = [sum(work(iterations, m.rows, m.columns) for m in layout.forms[k].of_owner) for k, _ in own]
            firsts = dealers(counts, each, len(own[0][1].lengths))
            for (k, slicing), first in zip(own, firsts):
                found[k] = Owners(slicing, first, bfloat16, kernels.device_target())
        return [found.get(k) for k in range(len(layout.forms))]

    def _scale(self, rows: int, columns: int) -> float:
        """Return the factor of an orthogonalized matrix of that size."""
        if self.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return self.matched_adamw_rms * math.sqrt(rows * columns if self.normalize_rows else max(rows, columns))

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Compute AdamW's update, for parameters that are not matrices."""
        m, v = self.moments(gradient, states)
        return (self.with_decay(self.adam_direction(scalars, m, v), weight, weight_decay),), (m, v)

    def orthogonalized(self, form: int, u: Tensor, averages: Tensors) -> tuple[Tensor, Tensors, Tensor]:
        """Orthogonalize and scale the matrices of a stack of tensors."""
        return self._moves[form](u, averages)

    def matrix_directions(
        self, scalars: Scalars, form: int, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Compute Muon's update, and the root mean square of the singular values of the orthogonalized matrices."""
        m = summed(self.momentum * states[0], gradient)
        u = summed(gradient, self.momentum * m) if self.nesterov else m
        moves, averages, singular_values = self.orthogonalized(form, u, states[1:])
        direction = self.with_decay(moves, weight, weight_decay)
        return (direction,), (m, *averages), F.cast(singular_values, states[0].dtype)
