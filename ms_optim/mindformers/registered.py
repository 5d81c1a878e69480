"""MindFormers: registers the optimizers, so that YAML files can use them and all their arguments.

Importing this module creates and registers a class for each optimizer: ``MsOptimAdamW`` for ``AdamW``, and so on. Each
is also registered under the optimizer's own name if MindFormers has no optimizer of that name. ``WarmUpHoldDecayLR``
and ``PowerCoolLR`` are registered as learning rates. The PyNative trainer of MindFormers 2 gets the same names: see
``in_trainer.py``. No other module needs MindFormers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

try:
    # MindFormers may not be installed where type checkers run.
    from mindformers.tools.logger import logger  # pyright: ignore[reportMissingImports]
    from mindformers.tools.register import (  # pyright: ignore[reportMissingImports]
        MindFormerModuleType,
        MindFormerRegister,
    )
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"{_error}; ms_optim.mindformers needs MindFormers: pip install 'ms_optim[mindformers]'",
        name=_error.name,
    ) from _error

from .. import OPTIMIZERS, Muon, schedules
from ..arguments.checks import check_type
from ..arguments.words import closest, described
from ..base.optimizer import FusedOptimizer
from ..dtensors.in_trainer import InTrainer, install, refuse_keys
from ..dtensors.local_shards import is_distributed
from ..local_steps.compression import Quantized, SparseTopK
from ..local_steps.optimizer import LocalSteps
from ..unregistered import unregistered
from .attention_clip import AttentionClip, taken_threshold
from .their_keys import translated

if TYPE_CHECKING:
    from ..arguments.checks import Params

PREFIX = "MsOptim"
OPTIMIZER: str = MindFormerModuleType.OPTIMIZER
OF_LOCAL_STEPS = [name for name in inspect.signature(LocalSteps).parameters if name != "optimizer"]
SCHEDULE, CENTRALIZATION = "weight_decay_schedule", "grad_centralization"
OF_SCHEDULE = "the section of the learning rate schedule"
SET_FOR_INNER = {"weight_decay": "the outer section", "learning_rate": OF_SCHEDULE, "params": "the network"}
# The weight decay schedules, and the argument of each that defaults to `weight_decay`.
SCHEDULES: dict[str, str | None] = {
    "ConstantWeightDecay": "weight_decay",
    "CosineWeightDecay": "max_weight_decay",
    "ExponentialWeightDecay": "weight_decay",
    "LinearWeightDecay": "weight_decay",
    "PiecewiseConstantWeightDecay": None,
    "PolynomialWeightDecay": "weight_decay",
    "WarmUpWeightDecay": "weight_decay",
}


class FromYaml(FusedOptimizer):
    """Takes what MindFormers passes from the section `optimizer` of a YAML file; a base before the optimizer.

    The section takes the optimizer's own arguments by name, and two more:

    - weight_decay_schedule (dict): `type` names a weight decay schedule of this package. The other keys are the
      schedule's arguments. The schedule starts from `weight_decay` unless these keys state otherwise. `weight_decay`
      must not be 0, because MindFormers uses it to tell parameters that decay from those that do not.
    - grad_centralization (bool): Whether gradients of 2 or more dimensions are centralized. Default: ``False`` .
    """

    # Whether MindFormers gives it the model.
    takes_model = False
    attention_clip: AttentionClip | None = None

    def __init__(self, params: Params, **arguments: Any):
        name = type(self).__name__
        refuse_keys(name, "the section 'optimizer'", arguments, {"lr": OF_SCHEDULE})
        arguments = translated(name, name.removeprefix(PREFIX), arguments)
        models, threshold = None, None
        if self.takes_model:
            models, threshold = arguments.pop("model", None), taken_threshold(name, arguments)
        schedule = arguments.pop(SCHEDULE, None)
        centralization = arguments.pop(CENTRALIZATION, False)
        check_type(name, CENTRALIZATION, centralization, bool)
        if arguments.get("weight_decay", 0.0) is None:
            # MindFormers treats None as 0.
            arguments["weight_decay"] = 0.0
        for argument, value in arguments.items():
            _check_number(name, argument, value)
        if schedule is not None:
            params, arguments["weight_decay"] = _scheduled(name, params, arguments.get("weight_decay", 0.0), schedule)
        if centralization:
            params = [{**group, CENTRALIZATION: True} for group in _groups(params)]
        super().__init__(params, **arguments)
        if threshold is not None:
            unregistered(self, attention_clip=AttentionClip(name, models, threshold, self.global_step))
            self._clip_with_steps()
        logger.info("ms_optim: %s", self._described())

    def _clip_with_steps(self):
        """Clip after each step; where steps are taken in a graph, MindFormers' reset of the logits follows them."""
        if self.attention_clip is not None:
            self.attention_clip.before_reset()

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the keys that the section takes."""
        return [*super().keywords(), SCHEDULE, CENTRALIZATION]

    @classmethod
    def get_actual_adamw_cls(cls, use_fused: bool) -> type[FromYaml]:
        """Return the class itself: MindFormers asks the class that is registered as "AdamW" which one to use."""
        return cls

    def _described(self) -> str:
        path = f"the fused kernel {self.rule.name!r}"
        if not self.fused:
            path = f"MindSpore's operators, because {self.backend_reason}"
        held = (*self.states, *self.masters, *self.scales)
        megabytes = sum(p.nbytes for p in held) / 1e6
        dtypes = ", ".join(sorted({str(p.dtype).lower() for p in held}))
        return (
            f"{type(self).__name__} updates {self.param_length} parameters by {path}; its states ({dtypes}) take "
            f"{megabytes:.1f} MB"
        )


def _groups(params):
    return params if all(isinstance(group, dict) for group in params) else [{"params": params}]


def _check_number(name: str, argument: str, value: Any) -> None:
    """Raise a TypeError for a number that YAML has read as a string."""
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(number, str):
            continue
        try:
            float(number)
        except ValueError:
            continue
        raise TypeError(
            f"For '{name}', the argument {argument!r} must be a number, but got the string {number!r}: YAML reads a "
            "number with an exponent as a string unless it has a point, as in 1.0e-8, and no quotes."
        )


def _made(name: str, argument: str, kind: Callable[..., Any], section: dict[str, Any]):
    """Return what a section with a `type` describes; its other keys are arguments."""
    arguments = {key: value for key, value in section.items() if key != "type"}
    for key, value in arguments.items():
        _check_number(name, f"{argument}.{key}", value)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise TypeError(f"For '{name}', the argument '{argument}': {error}") from error


def _scheduled(name: str, params, weight_decay: Any, schedule: Any):
    """Return the groups, with each weight decay other than 0 replaced by a schedule, and the schedule."""
    if not isinstance(schedule, dict) or str(schedule.get("type")) not in SCHEDULES:
        got = schedule.get("type") if isinstance(schedule, dict) else schedule
        raise ValueError(
            f"For '{name}', the argument '{SCHEDULE}' must be a dict with a 'type' of {sorted(SCHEDULES)}, but got "
            f"{described(got)}.{closest(got, SCHEDULES)}"
        )
    groups = _groups(params)
    if not weight_decay and not any(group.get("weight_decay") for group in groups):
        raise ValueError(
            f"For '{name}', the argument 'weight_decay' must be greater than 0 with '{SCHEDULE}', because "
            f"MindFormers uses it to select the parameters that are decayed, but got {weight_decay!r}."
        )
    start = SCHEDULES[schedule["type"]]
    section = schedule if start is None else {start: weight_decay, **schedule}
    made = _made(name, SCHEDULE, getattr(schedules, schedule["type"]), section)
    given = [{**group, "weight_decay": made} if group.get("weight_decay", weight_decay) else group for group in groups]
    return given, made


def _for_yaml(optimizer: type[FusedOptimizer]) -> type[FromYaml]:
    """Create the class that is registered for an optimizer."""
    name = f"{PREFIX}{optimizer.__name__}"
    doc = f":class:`ms_optim.{optimizer.__name__}` as MindFormers makes it from a YAML file."
    attributes = {"__doc__": doc, "__module__": __package__, "takes_model": optimizer is Muon}
    return type(name, (FromYaml, optimizer), attributes)


class MsOptimLocalSteps(LocalSteps):
    """:class:`ms_optim.LocalSteps` as MindFormers makes it from a YAML file.

    The section `optimizer` takes the arguments of LocalSteps by name. Its key `optimizer` is the section of the inner
    optimizer, whose `type` is one of the names with the prefix `MsOptim`. The inner optimizer gets the groups and the
    learning rate, which MindFormers adds. `weight_decay` belongs in the outer section, where MindFormers reads it.
    `compress` is also a section, with the `type` "SparseTopK" or "Quantized".
    """

    @classmethod
    def inner(cls) -> Mapping[str, type[FromYaml]]:
        """Return the classes of inner optimizers by their types."""
        return CLASSES

    def __init__(self, params: Params, optimizer: dict[str, Any], **arguments: Any):
        name, classes = type(self).__name__, self.inner()
        if not isinstance(optimizer, dict) or str(optimizer.get("type")) not in classes:
            got = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
            raise ValueError(
                f"For '{name}', the argument 'optimizer' must be a section with a 'type' of {sorted(classes)}, but got "
                f"{described(got)}.{closest(got, classes)}"
            )
        if any(is_distributed(p) for group in _groups(params) for p in group["params"]):
            raise ValueError(
                f"For '{name}', the parameters must not be DTensors: workers exchange whole tensors. Train without the "
                "parallelism that shards parameters, or without LocalSteps."
            )
        refuse_keys(name, "the inner section 'optimizer'", optimizer, SET_FOR_INNER)
        outer = {key: arguments.pop(key) for key in list(arguments) if key in OF_LOCAL_STEPS}
        for argument, value in outer.items():
            _check_number(name, argument, value)
        if isinstance(outer.get("compress"), dict):
            outer["compress"] = _compression(name, outer["compress"])
        inner = {key: value for key, value in optimizer.items() if key != "type"}
        super().__init__(classes[optimizer["type"]](params, **{**arguments, **inner}), **outer)

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the keys that the section takes."""
        return ["optimizer", *OF_LOCAL_STEPS]


def _compression(name, section):
    kinds = {"SparseTopK": SparseTopK, "Quantized": Quantized}
    if str(section.get("type")) not in kinds:
        raise ValueError(
            f"For '{name}', the argument 'compress' must be a section with a 'type' of {sorted(kinds)}, but got "
            f"{described(section.get('type'))}."
        )
    return _made(name, "compress", kinds[section["type"]], section)


def _in_trainer(cls: type[Any], *bases: type[Any], **attributes: Any) -> type[Any]:
    """Create the class that the PyNative trainer uses instead of a class of the same name."""
    return type(cls.__name__, (*bases, cls), {"__doc__": cls.__doc__, "__module__": __package__, **attributes})


CLASSES: dict[str, type[FromYaml]] = {cls.__name__: cls for cls in map(_for_yaml, OPTIMIZERS)}
IN_TRAINER: dict[str, type[Any]] = {name: _in_trainer(cls, InTrainer) for name, cls in CLASSES.items()}
IN_TRAINER[MsOptimLocalSteps.__name__] = _in_trainer(MsOptimLocalSteps, inner=classmethod(lambda _: IN_TRAINER))
globals().update(CLASSES)
MsOptimLocalSteps.__module__ = str(__package__)  # where users find it, as the others


def register(override: bool = False) -> None:
    """Register the optimizers in MindFormers; importing this module has already done so, without `override`.

    Args:
        override: Whether to replace optimizers of MindFormers and MindSpore that have the same name, such as "AdamW".
            Default: ``False`` .
    """
    for cls in CLASSES.values():
        MindFormerRegister.register_cls(cls, OPTIMIZER)
        name = cls.__name__.removeprefix(PREFIX)
        if override or not MindFormerRegister.is_exist(OPTIMIZER, name):
            MindFormerRegister.register_cls(cls, OPTIMIZER, alias=name)
    MindFormerRegister.register_cls(MsOptimLocalSteps, OPTIMIZER)
    install(IN_TRAINER, logger.warning)
    for schedule in (schedules.WarmUpHoldDecayLR, schedules.PowerCoolLR):
        MindFormerRegister.register_cls(schedule, MindFormerModuleType.LR)


register()
