"""MindFormers 2's PyNative trainer: creation of this package's optimizers from YAML, and what it requires of them.

The trainer knows only its own optimizers by name and has no registry for others. Therefore this module wraps its
function ``_build_optimizer``: a section `optimizer` becomes an optimizer of this package if its `type` names one. Every
other section is passed on to the trainer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from ..arguments.checks import fail
from ..arguments.options import STAGES
from ..arguments.params import FORMAT_KEYS
from ..base.optimizer import FusedOptimizer
from ..states.formats import FORMATS
from ..states.in_place import checksum, write
from ..states.split_masters import MAIN_PARAM, MASTER
from ..unregistered import unregistered
from .local_shards import LocalShards, is_distributed, local

if TYPE_CHECKING:
    from ..arguments.checks import Params

# The modules that have the function; the first one defines it.
MODULES = ("mindformers.pynative.trainer.utils", "mindformers.pynative.trainer.trainer")
BUILD = "_build_optimizer"
# The arguments of the trainer's functions.
SIGNATURES = {
    BUILD: ("config", "model", "learning_rate"),
    "get_param_groups": ("model", "weight_decay", "weight_decay_include", "weight_decay_exclude"),
}
# The arguments that the trainer's configuration passes to every optimizer, even if the YAML file does not have them.
ALWAYS_GIVEN = {"betas": [0.9, 0.95], "eps": 1.0e-8}
# What it sets, and from what.
SET_BY_TRAINER = {"learning_rate": "the section 'lr_scheduler'", "params": "the network"}
# Arguments that require sums over all gradients for any rule.
SUMS = tuple(stage.keyword for stage in STAGES if stage.reads_all)
# Arguments that are not supported with parameters sharded over processes.
NOT_IN_SHARDS = {
    # Codes and scales of a shard are not part of those of the whole tensor.
    "state_dtype": tuple(name for name, one in FORMATS.items() if one.has_scales),
    "shard_states": (True,),
    "grad_centralization": (True,),
}


class InTrainer(FusedOptimizer):
    """What the PyNative trainer requires of an optimizer beyond what ``Model`` requires; a base before the optimizer.

    Float32 masters have the names that the trainer's own optimizers give them, so that checkpoints use the same names
    for all optimizers.
    """

    _seen_masters: list[int] | None = None
    _shards: LocalShards | None = None

    def __init__(self, params: Params, **arguments: Any):
        if not any(is_distributed(p) for group in params for p in group["params"]):
            super().__init__(params, **arguments)
            return
        name, rule = type(self).__name__, self.rules[0]
        for key, values in NOT_IN_SHARDS.items():
            for given in (arguments, *(params if key in FORMAT_KEYS else ())):
                if given.get(key) in values:
                    fail(ValueError, name, key, f"none of {values} if parameters are DTensors", given[key])
        if reason := self.refuses.get("shard_group"):
            raise ValueError(f"For '{name}', the parameters must not be DTensors: it {reason}.")
        looks_at_wholes = rule.is_layerwise or rule.has_matrices or not rule.is_elementwise
        sums = looks_at_wholes or any(arguments.get(key) for key in SUMS)
        shards = LocalShards(name, params, sums, rule.has_matrices)
        super().__init__(shards.groups, **arguments)
        shards.distribute(self._held.of_tensors)
        self._shards = shards
        # The trainer reads the gradients from these; steps use the plain Parameters, which are held separately.
        unregistered(self, parameters=shards.whole(self.parameters))

    def _hold_more(self, held):
        super()._hold_more(held)
        if self.shares is None:
            for master in held.masters:
                if master.dtype == mstype.float32:
                    master.name = MAIN_PARAM + master.name.removeprefix(MASTER)

    def parameters_and_names(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield what the optimizer holds, with sharded parameters as DTensors, as checkpoints expect."""
        found = super().parameters_and_names(*args, **kwargs)
        return found if self._shards is None else self._shards.named(found)

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...] | Tensor:
        """Run one step; raise an error that names the parameters without a gradient, which the trainer omits."""
        if isinstance(gradients, (tuple, list)) and len(gradients) < len(self.parameters):
            missing = [p.name for p in self.parameters if _gradient(p) is None]
            if missing:
                raise ValueError(
                    f"For '{type(self).__name__}', every parameter must have a gradient, but {len(missing)} of "
                    f"{len(self.parameters)} have none: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}. Set "
                    "requires_grad to False for parameters that the loss does not depend on."
                )
        self._follow()
        done = super().__call__(gradients if self._shards is None else tuple(local(g) for g in gradients))
        clip = getattr(self, "attention_clip", None)
        if clip is not None:
            clip.after_step()
        return done

    def _clip_with_steps(self):
        """Clip in `__call__`: steps are taken from Python here."""

    def _follow(self):
        """Use the current memory of the DTensors, which loading may have changed."""
        if self._shards is not None:
            self._shards.follow()

    def save_main_params_snapshot(self) -> None:
        """Record the values of the masters before a checkpoint is loaded."""
        self._follow()
        self._seen_masters = [checksum(master) for master in self.masters]

    def reload_main_params_from_model(self) -> None:
        """Set masters to their weights: those unchanged since the snapshot, or all if there is no snapshot."""
        self._follow()
        seen = self._seen_masters or [None] * len(self.masters)
        self._seen_masters = None
        for i, place in enumerate(self._held.master_places):
            if place < 0 or seen[place] not in (None, checksum(self.masters[place])):
                continue
            master = self.masters[place]
            if master.dtype == mstype.float32:
                write(master, self._entries.weight_beside(i, {}, {}).reshape(master.shape))
            else:  # it holds the difference from its weight
                write(master, np.zeros_like(master.asnumpy()))


def _gradient(parameter: Parameter) -> Tensor | None:
    """Return the gradient that the trainer passes on, which with several devices is in a separate attribute."""
    main = getattr(parameter, "main_grad", None)
    return getattr(parameter, "grad", None) if main is None else main


# ---- Making an optimizer from the YAML file --------------------------------------------------------------------------


_wrappers: list[Callable[..., Any]] = []


def install(classes: Mapping[str, Callable[..., Any]], warn: Callable[[str], None]) -> None:
    """Let the trainer create optimizers of these types, if MindFormers has the trainer and it can be imported.

    Args:
        classes: By `type`, the callable that creates an optimizer from groups, a learning rate and the section's
            arguments.
        warn: Reports to the user why the trainer cannot create them.
    """
    if not all(importlib.util.find_spec(name) for name in ("mindformers.pynative", "hyper_parallel")):
        return
    try:
        modules = [importlib.import_module(name) for name in MODULES]
    except ImportError as error:
        warn(f"ms_optim: MindFormers' PyNative trainer cannot be imported: {error}; its other trainer is not affected.")
        return
    if reason := _why_not(modules):
        warn(f"ms_optim: MindFormers' PyNative trainer does not know {', '.join(sorted(classes))}, because {reason}.")
        return
    theirs = getattr(modules[0], BUILD)
    if theirs in _wrappers:
        return

    @functools.wraps(theirs)
    def build(config: Any, model: Any, learning_rate: Any) -> Any:
        section = config.to_dict()
        cls = classes.get(section.get("type"))
        if cls is None:
            return theirs(config, model, learning_rate)
        return _made(modules[0], cls, section, model, learning_rate)

    _wrappers.append(build)
    for module in modules:
        setattr(module, BUILD, build)


def _why_not(modules: Sequence[ModuleType]) -> str | None:
    """Return how the trainer differs from the version that this module was written for, or None."""
    for name, expected in SIGNATURES.items():
        function = getattr(modules[0], name, None)
        if function is None:
            return f"{modules[0].__name__} has no {name}"
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            return f"{modules[0].__name__}.{name} takes {found} instead of {expected}"
    if getattr(modules[1], BUILD, None) is not getattr(modules[0], BUILD):
        return f"{modules[1].__name__} has another {BUILD} than {modules[0].__name__}"
    return None


def _made(utils: ModuleType, cls: Callable[..., Any], section: dict[str, Any], models: Any, learning_rate: Any) -> Any:
    """Return the optimizer of a section for the models of this process."""
    refuse_keys(cls.__name__, "the section 'optimizer'", section, SET_BY_TRAINER)
    rules = {key: section.pop(key, None) for key in ("weight_decay_include", "weight_decay_exclude")}
    weight_decay = section.get("weight_decay", 0.0)
    groups = [group for model in models for group in utils.get_param_groups(model, weight_decay, **rules)]
    for key in ("type", "auto_register"):
        section.pop(key, None)
    model = {"model": models} if getattr(cls, "takes_model", False) else {}
    return cls(groups, learning_rate=learning_rate, **model, **without_defaults(cls, section))


def refuse_keys(name: str, where: str, section: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise an error if a section has a key that MindFormers sets itself; `sources` says from what, by key."""
    for key, source in sources.items():
        if key in section:
            raise ValueError(
                f"For '{name}', {where} must not have the key {key!r}: MindFormers sets it, from {source}."
            )


def without_defaults(cls: Any, section: dict[str, Any]) -> dict[str, Any]:
    """Return a section without the arguments that only the trainer's configuration adds and the optimizer lacks."""
    makers = filter(inspect.isfunction, [vars(base).get("__init__") for base in reversed(cls.__mro__)])
    defaults = {name: p.default for make in makers for name, p in inspect.signature(make).parameters.items()}
    taken = cls.keywords()

    def fits(key, value):
        if key not in ALWAYS_GIVEN or value != ALWAYS_GIVEN[key]:
            return True
        # AdEMAMix has three betas.
        return key in taken and (key != "betas" or len(defaults[key]) == len(value))

    return {key: value for key, value in section.items() if fits(key, value)}
