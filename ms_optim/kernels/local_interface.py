"""The constants of the kernels of local steps: see ops/include/local_steps.h."""

from __future__ import annotations

import enum


class LocalNumber(enum.IntEnum):
    """The numbers that a launch of local steps receives in addition to tensors, and their count."""

    LOCAL_WORKERS, LOCAL_RANK, OUTER_RATE, OUTER_MOMENTUM, OUTER_NESTEROV, RESIDUAL_DECAY = range(6)
    VALUE_BITS, CHUNK_ELEMENTS, DENSITY, LOCAL_NUMBERS = range(6, 10)


class LocalMark(enum.IntEnum):
    """The numbers that workers compare before an exchange, and their count."""

    MARK_EVERY, MARK_FRAGMENTS, MARK_RATE, MARK_MOMENTUM, MARK_NESTEROV, MARK_BITS, MARK_CHUNK = range(7)
    MARK_DENSITY, MARK_DECAY, MARK_OPTIMIZER, MARK_TENSORS, MARK_STEP, MARK_START, LOCAL_MARKS = range(7, 14)


class LocalReport(enum.IntEnum):
    """Columns of the report of an exchange, and their number."""

    DIFFERENCE_NORM, RESIDUAL_NORM, MEAN_NORM, AGREEMENT, LOCAL_REPORTS = range(5)
