"""What to change where nothing fits: options that `plan` was not given, tried one by one and then together."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MOST_HINTS = 4
WORKERS = (2, 4, 8, 16, 32, 64)


def changes(arguments: argparse.Namespace, dtypes: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options that save memory and were not given, as text and as values, the gentlest first.

    Args:
        arguments: What was given.
        dtypes: The parameters' dtypes.
    """
    low = [name for name in ("bfloat16", "8bit") if name not in arguments.state_dtype]
    yield from ((f"--state-dtype {name}", {"state_dtype": [name]}) for name in low)
    if "bfloat16" in dtypes and arguments.master_weights in (None, ["float32"]):
        yield from ((f"--master-weights {kept}", {"master_weights": [kept]}) for kept in ("split", "split8"))
    if arguments.device != "CPU" and not arguments.offload:
        yield "--offload", {"offload": True}
    if arguments.average:
        yield "without --average", {"average": False}
    if arguments.local_steps:
        yield "without --local-steps", {"local_steps": False}
    if "float32" in dtypes:
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
        yield "--dtype bfloat16 --master-weights split8", {"dtype": "bfloat16", "master_weights": ["split8"]}
    if set(dtypes) != {"float32"} and "none" not in (arguments.master_weights or ()):
        yield "--master-weights none", {"master_weights": ["none"]}
    for workers in WORKERS:
        if workers > arguments.workers or (workers == arguments.workers and not arguments.shard_states):
            yield f"--shard-states --workers {workers}", {"shard_states": True, "workers": workers}


def hints(
    arguments: argparse.Namespace,
    dtypes: Sequence[str],
    fitting: Callable[[argparse.Namespace], list[str]],
) -> list[str]:
    """Return lines that say with which options which optimizers fit: of one change each or, if none helps, of two.

    Args:
        arguments: What was given, with which nothing fits.
        dtypes: The parameters' dtypes.
        fitting: Returns the optimizers that fit with other arguments.
    """
    every = list(changes(arguments, dtypes))
    for count in (1, 2):
        lines, sharded = [], False
        for chosen in itertools.combinations(every, count):
            values: dict[str, Any] = {}
            for _, own in chosen:
                values |= own
            if len(values) < sum(len(own) for _, own in chosen) or (sharded and "workers" in values):
                continue  # two values of one option, or more workers than would do
            found = fitting(argparse.Namespace(**{**vars(arguments), **values}))
            if found:
                lines.append(f"{' '.join(text for text, _ in chosen)}: {', '.join(found)}")
                sharded = sharded or "workers" in values
        if lines:
            return lines[:MOST_HINTS]
    return []
