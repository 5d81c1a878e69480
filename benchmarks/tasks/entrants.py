"""The optimizers that are compared: how each is made for a task, and where its tuning starts."""

import importlib.util
import inspect
import pathlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import ms_optim
from ms_optim import AdamW, FusedOptimizer, MultiOptimizer, Muon, Sinkhorn, no_decay_groups

BASELINE = "AdamW"


@dataclass(frozen=True)
class Entrant:
    """An optimizer.

    Attributes:
        name: In the tables.
        cls: Its class.
        rate: The learning rate that its tuning starts with; the same for all tasks.
        decay: The weight decay that the budget's decays are multiples of.
        settings: From the number of warm-up steps and of all steps to further arguments.
        make: From the task, the rate, the decay and these arguments to the optimizer.
        version: Of the package, or a checksum of the file that it comes from.
    """

    name: str
    cls: Any
    rate: float
    decay: float = 0.1
    settings: Callable[[int, int], dict[str, Any]] = lambda warm_up, steps: {}
    make: Callable[..., Any] | None = None
    version: str = ms_optim.__version__

    def made(self, task: Any, rate: float, decay: float, warm_up: int, steps: int) -> Any:
        """Return the optimizer of a task's parameters; biases and scales are not decayed."""
        settings = self.settings(warm_up, steps)
        if self.make is not None:
            return self.make(task, rate, decay, **settings)
        return self.cls(no_decay_groups(task.params, decay), rate, **settings)

    def defaults(self) -> tuple[float, float] | None:
        """Return the learning rate and the decay that the class has by default; None if it has none."""
        arguments = inspect.signature(self.cls.__init__).parameters
        values = [arguments[name].default for name in ("learning_rate", "weight_decay") if name in arguments]
        if len(values) < 2 or not all(isinstance(value, (int, float)) for value in values):
            return None
        return float(values[0]), float(values[1])


def muon(task, rate, decay, **settings):
    """Make Muon: AdamW updates embedding and output layer, where there are any besides matrices."""
    names = task.tables if len(task.params) > 1 else ()
    return Muon(no_decay_groups(task.params, decay), rate, adamw_names=names, splits=task.splits, **settings)


def sinkhorn(task, rate, decay, **settings):
    """Make Sinkhorn for embedding and output layer, and AdamW for all else."""
    tables = [p for p in task.params if p.name in task.tables]
    rest = [p for p in task.params if p.name not in task.tables]
    of_tables = Sinkhorn(tables, rate, weight_decay=decay, **settings)
    return MultiOptimizer([of_tables, AdamW(no_decay_groups(rest, decay), rate)]) if rest else of_tables


# Rates as docs/tuning.md relates them to AdamW's. The decay of Adam, AdamOffload, Momentum and DGCMomentum is added to
# the gradient, where a hundredth has a similar effect.
ENTRANTS = (
    Entrant(BASELINE, AdamW, 3e-3),
    Entrant("Lamb", ms_optim.Lamb, 1e-2, 0.01),
    Entrant("LANS", ms_optim.LANS, 1e-2, 0.01),
    Entrant("AdamOffload", ms_optim.AdamOffload, 3e-3, 1e-3),
    Entrant("DGCMomentum", ms_optim.DGCMomentum, 0.05, 5e-4, lambda *_: {"momentum": 0.9, "rampup_begin_step": 0}),
    Entrant("Lion", ms_optim.Lion, 6e-4, 0.5),
    Entrant("AdEMAMix", ms_optim.AdEMAMix, 3e-3, settings=lambda _, steps: {"warmup_steps": steps}),
    Entrant(
        "ScheduleFreeAdamW", ms_optim.ScheduleFreeAdamW, 1e-2, settings=lambda warm_up, _: {"warmup_steps": warm_up}
    ),
    Entrant("Muon", Muon, 3e-3, make=muon),
    Entrant("Sinkhorn", Sinkhorn, 3e-3, make=sinkhorn),
    Entrant("Adam", ms_optim.Adam, 3e-3, 1e-3),
    Entrant("Momentum", ms_optim.Momentum, 0.05, 5e-4),
)


def entrants(asked: list[str]) -> list[Entrant]:
    """Return the optimizers that were asked for, AdamW before all others.

    Args:
        asked: Names of optimizers of the package, or ``FILE.py:CLASS`` for one of your own.

    Raises:
        ValueError: If a name is unknown, a file is missing or has no such class, or the class is no optimizer.
    """
    known = {entrant.name: entrant for entrant in ENTRANTS}
    found = [known[BASELINE]]
    for name in asked:
        if ":" in name:
            found.append(own(name))
        elif name in known:
            found.append(known[name])
        else:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}."
            raise ValueError(f"'{name}' is no optimizer of the package: {hint} One of your own is FILE.py:CLASS.")
    return list(dict.fromkeys(found))


def own(asked: str) -> Entrant:
    """Return an optimizer from a file. Its tuning starts with the learning rate that is its class's default."""
    file, _, name = asked.rpartition(":")
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(f"There is no file '{file}': expected FILE.py:CLASS, but got '{asked}'.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"'{file}' is no Python file: expected FILE.py:CLASS, but got '{asked}'.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = getattr(module, name, None)
    if not isinstance(cls, type) or not issubclass(cls, FusedOptimizer):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, FusedOptimizer) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"'{file}' has no optimizer '{name}', a subclass of ms_optim.FusedOptimizer: "
            f"it has {', '.join(classes) or 'none'}."
        )
    entrant = Entrant(f"{name} ({path.name})", cls, 1e-3, version=f"{zlib.crc32(path.read_bytes()):08x}")
    defaults = entrant.defaults()
    return Entrant(entrant.name, cls, defaults[0] if defaults else 1e-3, version=entrant.version)
