"""The C interface of the kernels: its constants by name, and the inputs of a launch in order.

Names are those of ops/include/step.h. Both sides define the constants, because Python also runs without a library; a
test compares them with those that a library reports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .local_interface import LocalMark, LocalNumber, LocalReport

# ---- Numbers ------------------------------------------------------------------------------------------------------

MAX_STATES, MAX_DIRECTIONS, CODE_BLOCK = 3, 2, 256  # CODE_BLOCK is the number of codes that share one scale
MOST_ELEMENTS = 1 << 31  # of a tensor that is sent in parts
# The mark at a wire's end: see ops/include/dgc.h.
LIMB_BITS, LIMBS = 6, 10
MARK_WORDS = 2 * LIMBS


class DType(enum.IntEnum):
    """How tensors are stored."""

    FLOAT32, FLOAT16, BFLOAT16, INT8, UINT8, INT16, UINT16, OTHER = range(8)


class Stage(enum.IntFlag):
    """What a launch does, in this order."""

    GRADIENT_STAGE = 1
    MOMENTS_STAGE = 2
    APPLY_STAGE = 4
    COMMIT_STAGE = 8


class SharedFlag(enum.IntFlag):
    """Options of a launch that do not depend on its rule."""

    SKIP_NONFINITE = 1
    MASTERS = 2
    STOCHASTIC_ROUNDING = 4
    CENTRALIZES = 8
    BY_ADDRESS = 16
    BETA_POWERS = 32
    LOCKS = 64
    RETURNED = 128
    SHARES = 256
    CLIPS = 512
    AVERAGES = 1024
    BESIDE = 2048
    HOLDS_NORMS = 4096
    KEEPS_RADII = 8192


class AdamWFlag(enum.IntFlag):
    """Variants of AdamW."""

    AMSGRAD = 1
    MAXIMIZE = 2
    BIAS_CORRECTION = 4


class LambFlag(enum.IntFlag):
    """Variants of LAMB."""

    BIAS_CORRECTION = 1
    ALWAYS_ADAPT = 2


class AdamFlag(enum.IntFlag):
    """Variants of Adam."""

    NESTEROV = 1
    CORRECTS_EPS = 2


class MomentumFlag(enum.IntFlag):
    """Variants of Momentum."""

    NESTEROV = 1


class DgcMomentumFlag(enum.IntFlag):
    """Variants of DGCMomentum."""

    NESTEROV = 1
    L1 = 2
    HALF_VALUES = 4


class MuonFlag(enum.IntFlag):
    """Variants of Muon."""

    NESTEROV = 1
    ORIGINAL_SCALE = 2
    NORMALIZES_ROWS = 4
    BFLOAT16_PRODUCTS = 8


class Sum(enum.IntEnum):
    """Columns of the sums, and their number."""

    GRADIENT_SUM, WEIGHT_SUM, DIRECTION_SUM, DIRECTION2_SUM, DIRECTIONS_DOT, SUMS = range(6)


class Statistic(enum.IntEnum):
    """Columns of the statistics, and their number."""

    GRADIENT_NORM, WEIGHT_NORM, UPDATE_NORM, TRUST_RATIO, FINITE, STATISTICS = range(6)


class Constant(enum.IntEnum):
    """Indices of the constants that every rule has; the rule's own constants follow."""

    UNSCALE, CLIP_NORM, SEED, CAUTIOUS, AVERAGE_DECAY, AVERAGE_WARMUP = range(6)
    HELD_BY, OUTWARD_KEPT, INWARD_KEPT, RULE_CONSTANTS = range(6, 10)


class WeightNorm(enum.IntEnum):
    """What holds norms of weights."""

    FREE, HYPERBALL, RELATIVE, RADIAL_BRAKE = range(4)


class AddressColumn(enum.IntEnum):
    """Columns of a tensor's row in a table of addresses, and their number."""

    WEIGHT_ADDRESS, GRADIENT_ADDRESS, MASTER_ADDRESS, AVERAGE_ADDRESS, STATE_ADDRESS = range(5)
    SCALE_ADDRESS = STATE_ADDRESS + MAX_STATES
    ELEMENTS = SCALE_ADDRESS + MAX_STATES
    FIRST_DIMENSION, WEIGHT_TYPE, GRADIENT_TYPE, MASTER_TYPE, STATE_TYPE = range(ELEMENTS + 1, ELEMENTS + 6)
    ADDRESS_COLUMNS = STATE_TYPE + MAX_STATES


class SharedAddressColumn(enum.IntEnum):
    """Columns of the last row of such a table, for what all tensors share."""

    GLOBAL_STEP_ADDRESS, SKIPPED_STEPS_ADDRESS, STATISTICS_ADDRESS, STATISTICS_ROWS, BETA_POWER_ADDRESS = range(5)
    STEP_WEIGHTS_ADDRESS = BETA_POWER_ADDRESS + 2
    RADII_ADDRESS = STEP_WEIGHTS_ADDRESS + 1


class LayoutColumn(enum.IntEnum):
    """Columns of the layout; only rules that exchange have the last one."""

    RATE_INDEX, DECAY_INDEX, CENTRALIZED, ROW, IS_HELD, SENT = range(6)
    LAYOUT_COLUMNS = SENT


class MatrixColumn(enum.IntEnum):
    """Columns of a table of matrices: the tensor, and which of its rows; and their number."""

    MATRIX_TENSOR, FIRST_ROW, RUN, RUNS, STRIDE, COLUMNS, MATRIX_COLUMNS = range(7)


class Status(enum.IntEnum):
    """What a launch returns."""

    OK, WRONG_COUNT, WRONG_DTYPE, WRONG_SIZE, WRONG_FLAGS = range(5)
    NO_MEMORY, NO_LAUNCH, OUT_OF_STEP, NEGATIVE_STEP, NOT_ITS_OWN = range(5, 10)


_COLUMNS = (AddressColumn, SharedAddressColumn, MatrixColumn)
_LOCAL = (LocalNumber, LocalMark, LocalReport)
_INTERFACE = (DType, Stage, SharedFlag, Sum, Statistic, Constant, WeightNorm, *_COLUMNS, *_LOCAL, Status)
_RULES = (AdamWFlag, LambFlag, AdamFlag, MomentumFlag, DgcMomentumFlag, MuonFlag)
# By the names that the library uses.
GROUPS: dict[str, type[enum.IntEnum | enum.IntFlag]] = {
    **{kind.__name__: kind for kind in _INTERFACE},
    "Layout": LayoutColumn,
    **{kind.__name__.removesuffix("Flag"): kind for kind in _RULES},
}
ALONE = ("MAX_STATES", "MAX_DIRECTIONS", "CODE_BLOCK", "MOST_ELEMENTS", "LIMB_BITS", "LIMBS", "MARK_WORDS")


def stated() -> dict[str, int]:
    """Return all constants of this module by name; the name of a group's member begins with the group's name."""
    numbers = {name: globals()[name] for name in ALONE}
    for group, members in GROUPS.items():
        numbers |= {f"{group}.{name}": int(value) for name, value in members.__members__.items()}
    return numbers


# ---- A launch -----------------------------------------------------------------------------------------------------


def launch(
    kernel: Callable[..., Any],
    flags: Any,
    layout: Any,
    constants: Any,
    rates: Any,
    sums: Any,
    exchanged: tuple[Any, ...],
    before: tuple[Any, ...],
    weights: tuple[Any, ...],
    gradients: tuple[Any, ...],
    held: tuple[Any, ...],
) -> Any:
    """Call a kernel with the inputs of a launch in their order; usable in graphs.

    Args:
        kernel: The operator.
        flags: What the launch does, as :func:`flags` returns it.
        layout: As :func:`layout` returns it.
        constants: As :func:`constants` returns them.
        rates: Learning rates and weight decays.
        sums: The sums of an earlier launch.
        exchanged: For a rule that exchanges: whether the step is skipped, the wires, and which worker the states belong
            to. For a rule of matrices: the table of matrices, and the coefficients of the iterations.
        before: The ranges, if it is a launch for a share; then the counters.
        weights: The weights.
        gradients: The gradients; or the table of addresses, if it replaces all inputs from the counters on.
        held: States, masters and scales.
    """
    return kernel(flags, layout, constants, rates, sums, *exchanged, *before, *weights, *gradients, *held)


def inputs(*parts: Any) -> tuple[Any, ...]:
    """Return the inputs of a launch in order, from the arguments of :func:`launch` except the kernel."""
    return launch(lambda *inputs: inputs, *parts)


def written(
    counters: int = 0,
    weights: int = 0,
    gradients: int = 0,
    held: int = 0,
    exchanges: bool = False,
    ranges: bool = False,
    returned: bool = False,
    matrices: bool = False,
) -> tuple[bool, ...]:
    """Return for each input of a launch whether the kernel writes it.

    Args:
        counters: Number of counters.
        weights: Number of weights.
        gradients: Number of gradients, or 1 for a table of addresses.
        held: Number of states, masters and scales.
        exchanges: Whether the rule exchanges.
        ranges: Whether it is a launch for a share.
        returned: Whether it returns the new weights and leaves the counters unchanged.
        matrices: Whether it is a rule of matrices.
    """
    before = (*(False,) * ranges, *(not returned,) * counters)
    exchanged = (False,) * (3 * exchanges + 2 * matrices)
    return inputs(*(False,) * 5, exchanged, before, (True,) * weights, (False,) * gradients, (True,) * held)


def flags(stages: int, shared: int, rule: int) -> np.ndarray:
    """Return what a launch does, encoded in the shape of an array."""
    return np.zeros((1 + stages, 1 + shared, 1 + rule), np.int8)


def layout(
    rates: Sequence[int],
    decays: Sequence[int],
    centralized: Sequence[bool],
    sent: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    held: Sequence[bool] | None = None,
) -> np.ndarray:
    """Return the layout of a launch's tensors.

    Args:
        rates: For each tensor, the index of its learning rate.
        decays: The index of its weight decay; -1 if it has none.
        centralized: Whether its gradient is centralized.
        sent: For a rule that exchanges: how many of its elements are sent; 0 means all.
        rows: Its row in the statistics; by default, the launch has all tensors.
        held: Whether its norm is held, if the launch holds norms; by default, none is.
    """
    rows = range(len(rates)) if rows is None else rows
    held = [False] * len(rates) if held is None else held
    columns = [rates, decays, centralized, rows, held, *([] if sent is None else [sent])]
    return np.ascontiguousarray(np.array(columns, np.int32).T)


def matrices(forms: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Return the table of a launch's matrices.

    Args:
        forms: For each tensor its matrices, in the columns of :class:`MatrixColumn` except the tensor; () if it has
            none.
    """
    rows = [(i, *matrix) for i, form in enumerate(forms) for matrix in form]
    return np.array(rows or [(-1,) * MatrixColumn.MATRIX_COLUMNS], np.int64)


def constants(unscale: float, seed: float, own: Sequence[float], **stages: float) -> np.ndarray:
    """Return the constants of a launch.

    Args:
        unscale: The factor of the gradients.
        seed: The seed of the noise.
        own: The rule's own constants.
        **stages: The constants of stages, by their names in :class:`Constant`; 0 means that a stage is not asked for.
    """
    shared = np.zeros(Constant.RULE_CONSTANTS)
    for name, value in {"UNSCALE": unscale, "SEED": seed, **stages}.items():
        shared[Constant[name]] = value
    return np.array((*shared, *own), np.float64)
