"""The keyword arguments that optimizers share: their types, defaults and checks, and the stages of a step.

A stage is what a step does to every rule's gradients, decay or weights because a keyword asks for it. A row of STAGES
says all that Python passes on about it: kernels, MindSpore's operators, `plan` and the pages read the row.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypedDict

from mindspore import dtype as mstype

from .checks import SPLIT_MASTERS, check_choice, check_open_unit, check_positive, check_type
from .params import FORMAT_KEYS
from .weight_norms import RadialBrake, check_weight_norm, constants_of
from .words import closest, fail

BACKENDS = ("auto", "aot", "akg", "composite")
DECAYS = ("decoupled", "cautious")


class Formats(TypedDict, total=False):
    """How states and weights are stored, and what computes a step."""

    state_dtype: str | mstype.Type
    master_weights: bool | str
    stochastic_rounding: bool
    backend: str


class Skipping(TypedDict, total=False):
    """Whether steps with gradients that are not finite are skipped."""

    skip_nonfinite: bool


class Averaging(TypedDict, total=False):
    """The average of the weights."""

    average_decay: float | None
    average_warmup: bool


class Clipping(TypedDict, total=False):
    """The bound of the gradients' norm, and the sharing of states."""

    grad_clip_norm: float | None
    shard_states: bool


class Scaling(TypedDict, total=False):
    """The loss scale, and where states are."""

    offload: bool
    loss_scale: float


class Holding(TypedDict, total=False):
    """What holds the norm of the weights."""

    weight_norm: str | RadialBrake | None


class Decaying(TypedDict, total=False):
    """The form of the decoupled decay."""

    decay: str


class Common(Formats, Skipping, total=False):
    """Shared keyword arguments that every optimizer takes and that no optimizer defines itself."""


class CommonAndAverage(Common, Averaging, total=False):
    """The same, and the arguments of the average of the weights."""


class SharedButLossScale(CommonAndAverage, Clipping, Holding, total=False):
    """Shared keyword arguments of an optimizer that defines `loss_scale` itself and has no decoupled decay."""


class SharedButSkipping(Formats, Averaging, Clipping, Scaling, Decaying, Holding, total=False):
    """Shared keyword arguments of an optimizer that defines `skip_nonfinite` itself, with another default."""


class Shared(SharedButSkipping, Skipping, total=False):
    """Keyword arguments that the optimizers share; each takes them after its own."""


class SharedButAverage(Common, Clipping, Scaling, total=False):
    """Shared keyword arguments of an optimizer that averages its iterates itself."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The shared keyword arguments with their defaults, checked."""

    loss_scale: float = 1.0
    grad_clip_norm: float | None = None
    state_dtype: str = "float32"
    master_weights: bool | str = True
    stochastic_rounding: bool = False
    skip_nonfinite: bool = False
    backend: str = "auto"
    shard_states: bool = False
    offload: bool = False
    decay: str = "decoupled"
    average_decay: float | None = None
    average_warmup: bool = False
    weight_norm: str | RadialBrake | None = None

    @classmethod
    def of(cls, of_class: Any, given: dict[str, Any], state_dtypes: Collection[str]) -> Options:
        """Check the keyword arguments given to an optimizer.

        Args:
            of_class: The optimizer's class.
            given: Keyword arguments by name.
            state_dtypes: The formats of states.

        Raises:
            TypeError: If a name is unknown or a value has the wrong type.
            ValueError: If a value is out of range.
        """
        optimizer, accepted = of_class.__name__, of_class.keywords()
        unknown = [name for name in given if name not in accepted]
        if unknown:
            takers = ", ".join(other.__name__ for other in of_class.all_optimizers if unknown[0] in other.keywords())
            others = f" Optimizers that take it: {takers}." if takers else ""
            reason = of_class.refuses.get(unknown[0])
            hint = f" It {reason}.{others}" if reason else closest(unknown[0], accepted) or others
            raise TypeError(
                f"For '{optimizer}', unknown keyword argument {unknown[0]!r}.{hint} It takes {sorted(accepted)}."
            )
        options = cls(**given | {"state_dtype": name_of_dtype(given.get("state_dtype", "float32"))})
        check_positive(optimizer, "loss_scale", options.loss_scale)
        for name in ("stochastic_rounding", "shard_states", "offload"):
            check_type(optimizer, name, getattr(options, name), bool)
        options.check_formats(optimizer, state_dtypes)
        check_choice(optimizer, "backend", options.backend, BACKENDS)
        for stage in STAGES:
            stage.check(optimizer, options)
        # MindSpore's operators take no int of more than 64 bits.
        clip = options.grad_clip_norm
        floats = {"loss_scale": float(options.loss_scale), "grad_clip_norm": None if clip is None else float(clip)}
        return dataclasses.replace(options, **floats)

    def check_formats(self, optimizer: str, state_dtypes: Collection[str], where: str = "{}") -> None:
        """Check the formats of states and masters.

        Args:
            optimizer: The name of the optimizer's class.
            state_dtypes: The formats of states.
            where: What the user wrote, with {} for the name of the argument or key.
        """
        check_masters(optimizer, self.master_weights, where.format("master_weights"))
        check_choice(optimizer, where.format("state_dtype"), self.state_dtype, state_dtypes)
        if self.stochastic_rounding and self.master_weights:
            raise ValueError(
                f"For '{optimizer}', stochastic_rounding=True requires {where.format('master_weights')}=False, "
                f"but got {where.format('master_weights')}={self.master_weights!r}."
            )


def take_formats(
    optimizer: str, params: list[Any], options: Options, state_dtypes: Collection[str]
) -> tuple[list[Any], dict[str, Options]]:
    """Remove the keys `state_dtype` and `master_weights`, which nn.Optimizer does not know, from parameter groups.

    Args:
        optimizer: The name of the optimizer's class.
        params: Parameters or parameter groups, checked.
        options: The shared arguments.
        state_dtypes: The formats of states.

    Returns:
        The groups without the keys; and for the parameters of groups with such a key, by name, the shared arguments
        with the group's formats.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is none of those that the argument of the same name takes.
    """
    taken, found = [], {}
    for i, group in enumerate(params):
        formats = {key: group[key] for key in FORMAT_KEYS if key in group} if isinstance(group, dict) else {}
        if formats:
            if "state_dtype" in formats:
                formats["state_dtype"] = name_of_dtype(formats["state_dtype"])
            own = dataclasses.replace(options, **formats)
            own.check_formats(optimizer, state_dtypes, f"params[{i}]['{{}}']")
            found |= {p.name: own for p in group["params"]}
            group = {key: value for key, value in group.items() if key not in formats}
        taken.append(group)
    return taken, found


def check_masters(optimizer: str, value: Any, name: str = "master_weights") -> None:
    """Check the argument `master_weights`."""
    if not isinstance(value, (bool, str)) or (isinstance(value, str) and value not in SPLIT_MASTERS):
        error = ValueError if isinstance(value, str) else TypeError
        hint = " Masters are float32 with True." if name_of_dtype(value) in ("float32", "fp32") else ""
        fail(error, optimizer, name, f"True, False or one of {SPLIT_MASTERS}", value, hint)


def name_of_dtype(value: Any) -> Any:
    """Return the name of a dtype of MindSpore; anything else as it is."""
    return str(value).lower() if isinstance(value, mstype.Type) else value


def choose_backend(optimizer: str, name: str, fused: Any, shared: Shared) -> Shared:
    """Set `backend` by an argument that chooses between the fused kernel and MindSpore's operators."""
    check_type(optimizer, name, fused, bool)
    if fused:
        return shared
    if shared.get("backend", "auto") not in ("auto", "composite"):
        fail(ValueError, optimizer, "backend", f"'auto' or 'composite' with {name}=False", shared.get("backend"))
    return {**shared, "backend": "composite"}


def keywords_of(optimizer: Any) -> list[str]:
    """Return the names of the arguments that an optimizer's class takes, except its parameters."""
    signatures = (inspect.signature(base.__init__).parameters for base in optimizer.__mro__)
    own = next(names for names in signatures if "learning_rate" in names)
    kept = [name for name, p in own.items() if p.kind is not p.VAR_KEYWORD and name not in ("self", "params")]
    refused = {"shard_states", "offload"} & optimizer.refuses.keys()
    for stage in STAGES:
        refused |= {stage.keyword, *stage.others} if stage.keyword in optimizer.refuses else set()
    shared = [field.name for field in dataclasses.fields(Options)]
    return kept + [name for name in shared if name not in kept and name not in refused]


# ---- Stages of a step ----------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of the step that a keyword asks for.

    Attributes:
        keyword: The keyword.
        check: Raises an error if the keyword's value, or that of another keyword of the stage, is wrong.
        is_asked: Whether options ask for it.
        document: The keyword's text in docstrings.
        others: Further keywords that change it.
        words: How a user asks for it.
        flag: The name of its flag for kernels, a member of SharedFlag; "" if its constants tell.
        constants: Its constants for kernels, by their names in Constant.
        reads_all: Whether all gradients must be read before the first weight moves.
        lacking: The paths that do not support it, of :data:`ms_optim.kernels.capabilities.LACKS`.
    """

    keyword: str
    check: Callable[[str, Options], None]
    is_asked: Callable[[Options], bool]
    document: str
    others: tuple[str, ...] = ()
    words: str = ""
    flag: str = ""
    constants: Callable[[Options], dict[str, float]] = lambda options: {}
    reads_all: bool = False
    lacking: tuple[str, ...] = ()


def _check_clip(optimizer: str, options: Options) -> None:
    if options.grad_clip_norm is not None:
        check_positive(optimizer, "grad_clip_norm", options.grad_clip_norm)


def _check_average(optimizer: str, options: Options) -> None:
    check_type(optimizer, "average_warmup", options.average_warmup, bool)
    if options.average_decay is not None:
        check_open_unit(optimizer, "average_decay", options.average_decay)
    elif options.average_warmup:
        fail(ValueError, optimizer, "average_warmup", "False without 'average_decay'", True)


STAGES = (
    Stage(
        "grad_clip_norm",
        _check_clip,
        lambda options: options.grad_clip_norm is not None,
        """\
grad_clip_norm (Union[float, None]): Largest global L2 norm of the gradients, over all groups, after unscaling and
    centralization; larger gradients are scaled down to it. Default: ``None`` .
""",
        flag="CLIPS",
        constants=lambda options: {"CLIP_NORM": options.grad_clip_norm or 0.0},
        reads_all=True,
    ),
    Stage(
        "skip_nonfinite",
        lambda optimizer, options: check_type(optimizer, "skip_nonfinite", options.skip_nonfinite, bool),
        lambda options: options.skip_nonfinite,
        """\
skip_nonfinite (bool): Whether a step is skipped if an unscaled gradient contains an infinity or NaN; in the fused
    kernels also if its norm is too large for float32. A skipped step changes nothing, not even the step count;
    `skipped_steps` counts it. Default: ``False`` .
""",
        flag="SKIP_NONFINITE",
        reads_all=True,
    ),
    Stage(
        "decay",
        lambda optimizer, options: check_choice(optimizer, "decay", options.decay, DECAYS),
        lambda options: options.decay == "cautious",
        """\
decay (str): "decoupled" decays every weight; "cautious" does not decay weights that the step moves away from zero: a
    weight is decayed only where it has the same sign as the direction without decay, or where either is 0 (Chen et al.,
    2025, arXiv 2510.12402). Default: ``"decoupled"`` .
""",
        words="decay='cautious'",
        constants=lambda options: {"CAUTIOUS": float(options.decay == "cautious")},
        lacking=("Ascend", "akg"),
    ),
    Stage(
        "average_decay",
        _check_average,
        lambda options: options.average_decay is not None,
        """\
average_decay (Union[float, None]): The decay rate :math:`d` of an exponential moving average of the weights,
    :math:`a_t = d\\, a_{t-1} + (1 - d) w_t`, in the range (0.0, 1.0). It starts as a copy of the weights and is kept in
    float32; :meth:`averaged` puts it into the parameters. ``None`` means that no average is kept. Default: ``None`` .
average_warmup (bool): Whether the decay rate is limited to :math:`(1 + t) / (10 + t)` in step :math:`t`, counted from
    1, so that the average follows the first steps. Default: ``False`` .
""",
        others=("average_warmup",),
        flag="AVERAGES",
        constants=lambda options: {
            "AVERAGE_DECAY": options.average_decay or 0.0,
            "AVERAGE_WARMUP": float(options.average_warmup),
        },
        lacking=("Ascend", "offload"),
    ),
    Stage(
        "weight_norm",
        lambda optimizer, options: check_weight_norm(optimizer, options.weight_norm),
        lambda options: options.weight_norm is not None,
        """\
weight_norm (Union[str, RadialBrake, None]): What holds the norm of each weight of two or more dimensions. "hyperball"
    keeps it as it was before the first step, and a step moves the weight by the learning rate times this norm;
    "relative" moves the weight by the learning rate times its norm; "radial_brake" keeps half of a step's growth of the
    norm, or a :class:`ms_optim.RadialBrake` other parts. Default: ``None`` .
""",
        flag="HOLDS_NORMS",
        constants=lambda options: constants_of(options.weight_norm),
        lacking=("GPU", "passes", "Ascend", "akg", "offload"),
    ),
)


def asked_stages(options: Options) -> tuple[Stage, ...]:
    """Return the stages that options ask for."""
    return tuple(stage for stage in STAGES if stage.is_asked(options))


def stage_reading_all(options: Options) -> str | None:
    """Return the keyword of a stage that reads all gradients before the first weight moves; None without one."""
    return next((stage.keyword for stage in asked_stages(options) if stage.reads_all), None)


def stage_constants(options: Options) -> dict[str, float]:
    """Return the constants of all stages for kernels, by their names in Constant."""
    return {name: value for stage in STAGES for name, value in stage.constants(options).items()}
