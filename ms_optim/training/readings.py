"""Readings: the numbers that a monitor records of an optimizer's last step, and the two CSV files that hold them."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ..base.around import AroundOptimizer
from ..dgc.optimizer import CompressedStep
from ..kernels.table import STATISTICS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..base.any_optimizer import AnyOptimizer


class Reading(NamedTuple):
    """The numbers of an optimizer's last step.

    Attributes:
        optimizer: Name of its class.
        step: The number of steps so far, including skipped ones.
        totals: Numbers of the whole step by name.
        layers: Columns by name, each with one number per parameter.
        parameters: The parameters' names.
    """

    optimizer: str
    step: int
    totals: dict[str, float]
    layers: dict[str, NDArray[Any]]
    parameters: tuple[str, ...]


def steps_of(optimizer: AnyOptimizer) -> int:
    """Return the number of steps so far, including skipped ones."""
    return int(optimizer.global_step.asnumpy()[0]) + int(optimizer.skipped_steps.asnumpy()[0])


def read(optimizer: AnyOptimizer) -> Reading:
    """Read the numbers of an optimizer's last step."""
    layers: dict[str, NDArray[Any]] = dict(zip(STATISTICS, optimizer.statistics.asnumpy().astype(np.float64).T))
    # A tensor that was not updated has no trust ratio, and the step may not have computed the norm of its weight.
    moved = layers["trust_ratio"] != 0
    for name in ("weight_norm", "trust_ratio"):
        layers[name] = np.where(moved, layers[name], np.nan)
    layers["update_ratio"] = _ratio(layers["update_norm"], layers["weight_norm"])
    skipped = int(optimizer.skipped_steps.asnumpy()[0])
    # A step that updated a tensor has advanced the step count; a skipped step has not.
    done = int(optimizer.global_step.asnumpy()[0])
    last = Tensor([max(done - bool(moved.any()), 0)], mstype.int32)

    # The totals cover the tensors that were updated, or all tensors if none was.
    counted = moved if moved.any() else np.full_like(moved, True)
    weight, ratios = layers["weight_norm"][counted], layers["trust_ratio"][counted]
    norms = {
        "gradient_norm": _norm(layers["gradient_norm"]),
        "weight_norm": _norm(weight),
        "update_norm": _norm(layers["update_norm"]),
    }
    totals = {
        "skipped_steps": skipped,
        "nonfinite_gradients": int((layers["finite"] == 0).sum()),
        **norms,
        "update_ratio": float(_ratio(norms["update_norm"], norms["weight_norm"])),
        "trust_ratio_min": ratios.min(),
        "trust_ratio_median": np.median(ratios),
        "trust_ratio_max": ratios.max(),
    }
    rates = optimizer._rates.at(last)
    places = list(zip(optimizer._layout.rate_places, optimizer._layout.decay_places))
    groups = {place: k for k, place in enumerate(dict.fromkeys(places))}
    for (rate, decay), k in groups.items():
        totals[f"learning_rate.{k}"] = rates[rate]
        totals[f"weight_decay.{k}"] = rates[decay] if decay >= 0 else 0.0
    layers = {"group": np.array([groups[place] for place in places]), **layers}
    layers["finite"] = layers["finite"].astype(int)
    if isinstance(optimizer, CompressedStep):
        sizes = np.array(optimizer._layout.sizes)
        layers["density"], layers["residual_norm"] = optimizer.densities(last), optimizer.residual_norms()
        totals["density"] = float(layers["density"] @ sizes / sizes.sum())
        totals["residual_norm"] = _norm(layers["residual_norm"])
    if report := getattr(optimizer, "exchange_report", None):  # of local steps
        totals |= report()
    return Reading(_name(optimizer), done + skipped, totals, layers, tuple(optimizer._layout.names))


def _name(optimizer):
    inner = [optimizer.optimizer] if isinstance(optimizer, AroundOptimizer) else getattr(optimizer, "optimizers", ())
    names = ", ".join(_name(each) for each in inner)
    return f"{type(optimizer).__name__}({names})" if names else type(optimizer).__name__


def _norm(norms: NDArray[Any]) -> float:
    """Return the norm of all tensors from the norm of each."""
    return float(np.sqrt(np.sum(np.square(norms))))


def _ratio(one, other):
    """Return one / other; NaN where `other` is not greater than 0."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return np.divide(one, other, out=np.full(other.shape, np.nan), where=other > 0)


class ReadingFiles:
    """Two CSV files: one with a row for each reading, one with a row for each parameter of each reading."""

    totals: pathlib.Path
    layers: pathlib.Path

    def __init__(self, path: pathlib.Path):
        self.totals, self.layers = path, path.with_suffix(".layers.csv")

    def prepare(self, reading: Reading) -> None:
        """Create the files, or check that they belong to this optimizer and remove an incomplete last line.

        Raises:
            ValueError: If a file belongs to another optimizer or is not a file of readings.
        """
        self.totals.parent.mkdir(parents=True, exist_ok=True)
        for path, (header, rows) in self._tables(reading).items():
            if not path.exists() or path.stat().st_size == 0:
                path.write_text(_text([header]))
                continue
            with path.open(newline="") as file:
                lines = csv.reader(file)
                held = next(lines, [])
                first = [line for _, line in zip(rows, lines)]
            if held != header:
                odd = next((name for name in [*header, *held] if (name in header) != (name in held)), None)
                what = f"only one of the two has the column {odd!r}" if odd else "its columns are in another order"
                raise ValueError(_refusal(path, reading, what))
            # The second column is the name of the optimizer or of the parameter.
            for line, row in zip(first, rows):
                if len(line) == len(header) and line[1] != row[1]:
                    raise ValueError(_refusal(path, reading, f"it has {line[1]!r} instead of {row[1]!r}"))
            _cut_incomplete_line(path)

    def append(self, reading: Reading) -> None:
        """Append the rows of a reading."""
        for path, (_, rows) in self._tables(reading).items():
            with path.open("a", newline="") as file:
                file.write(_text(rows))

    def _tables(self, reading):
        """Return the header and the rows of a reading for each file; the totals come last, because they complete it."""
        columns = [[_number(x) for x in column] for column in reading.layers.values()]
        layers = [[reading.step, *row] for row in zip(reading.parameters, *columns)]
        totals = [reading.step, reading.optimizer, *map(_number, reading.totals.values())]
        return {
            self.layers: (["step", "parameter", *reading.layers], layers),
            self.totals: (["step", "optimizer", *reading.totals], [totals]),
        }


def _number(x) -> str:
    """Return an int, or a float32 with the fewest digits that identify it."""
    return str(x) if isinstance(x, (int, np.integer)) else str(np.float32(x))


def _text(rows: Iterable[Iterable]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _refusal(path, reading, what):
    return (
        f"For 'OptimizerMonitor', the file '{path}' exists, but belongs to another optimizer than this "
        f"{reading.optimizer} or to other parameters: {what}. Pass another file as 'csv', or remove this file."
    )


def _cut_incomplete_line(path):
    """Remove an incomplete last line, which a killed process may leave."""
    with path.open("rb+") as file:
        size = file.seek(0, io.SEEK_END)
        begin = file.seek(max(0, size - (1 << 20)))
        file.truncate(begin + file.read().rfind(b"\n") + 1)


class Record(NamedTuple):
    """A run, read from its two files. The first dimension of each array is the reading.

    Attributes:
        optimizer: Name of the optimizer's class.
        totals: Columns of the first file by name; ``step`` increases.
        parameters: The parameters' names.
        layers: The requested columns of the second file, by reading and parameter.
    """

    optimizer: str
    totals: dict[str, NDArray[np.float64]]
    parameters: tuple[str, ...]
    layers: dict[str, NDArray[np.float64]]


def load(path: pathlib.Path, wanted: tuple[str, ...]) -> Record:
    """Read both files.

    A run that was resumed at an earlier step has written some steps twice; the later rows are used.

    Args:
        path: The first file.
        wanted: Names of the columns to read from the second file.

    Raises:
        ValueError: If the files were not written by a monitor, or hold no readings.
    """
    files = ReadingFiles(path)
    with files.totals.open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    rows = [row for row in rows if len(row) == len(header)]
    ours = header[:2] == ["step", "optimizer"]
    if not ours or not rows:
        raise ValueError(
            f"For 'plot', the argument 'csv' must be a file of totals that an OptimizerMonitor wrote, but '{path}' has "
            f"{'no readings yet' if ours else 'other columns'}."
        )
    kept, before = [], float("inf")
    for row in reversed(rows):
        if int(row[0]) < before:
            before = int(row[0])
            kept.append(row)
    kept.reverse()
    totals = {name: np.array(column, float) for name, column in zip(header, zip(*kept)) if name != "optimizer"}

    places = {row[0]: k for k, row in enumerate(kept)}
    layers: dict[str, dict[str, NDArray[np.float64]]] = {name: {} for name in wanted}
    with files.layers.open(newline="") as file:
        lines = csv.reader(file)
        header = next(lines, [])
        columns = [(header.index(name), layers[name]) for name in wanted]
        for line in lines:
            if len(line) == len(header) and line[0] in places:
                for column, series in columns:
                    series.setdefault(line[1], np.full(len(kept), np.nan))[places[line[0]]] = float(line[column])
    parameters = tuple(layers[wanted[0]])
    arrays = {name: np.stack(list(series.values()), axis=1) for name, series in layers.items()}
    return Record(kept[0][1], totals, parameters, arrays)
