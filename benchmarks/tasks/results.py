"""The file of finished trials: one JSON object a line, appended as soon as a trial ends."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

# What tells trials apart: a file may hold several budgets, and the trials of an optimizer before and after a change.
KEYS = ("budget", "task", "data", "optimizer", "version", "kind", "rate", "decay", "seed", "lengths")


class Results:
    """Trials that are done, and the file that they are in.

    A line that was cut off at the end, by a full disk or a killed process, is dropped: its trial runs again.

    Args:
        path: The file; it need not exist.

    Raises:
        ValueError: If a line other than the last is not a trial.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self.trials = path, []
        self._done: dict[tuple, dict] = {}
        whole = 0
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                trial = json.loads(line)
                key = key_of(trial)
            except (ValueError, TypeError, KeyError):
                if number == len(lines):
                    break
                raise ValueError(f"Line {number} of {path} is not a trial: mend or remove it.") from None
            if not line.endswith(b"\n"):
                break
            self._add(key, trial)
            whole += len(line)
        if whole < sum(map(len, lines)):
            with path.open("r+b") as file:
                file.truncate(whole)

    def _add(self, key, trial):
        """Keep a trial; of two with one key, as files joined from two processes have them, the first counts."""
        if key not in self._done:
            self.trials.append(trial)
            self._done[key] = trial

    def get(self, run: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """Return a trial: from the file if it is there, else by running it and appending it to the file."""
        found = self._done.get(key_of(key))
        if found is None:
            found = {**key, **run()}
            with self.path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            self._add(key_of(key), found)
        return found


def key_of(trial: dict) -> tuple:
    """Return what tells a trial from others."""
    return tuple(json.dumps(trial[name]) for name in KEYS)


def to_json(losses: list[float]) -> list[float | None]:
    """Return losses as JSON has them: None where a run diverged."""
    return [round(loss, 6) if math.isfinite(loss) else None for loss in losses]


def from_json(losses: list[float | None]) -> list[float]:
    """Return losses as numbers: infinity where a run diverged."""
    return [math.inf if loss is None else loss for loss in losses]
