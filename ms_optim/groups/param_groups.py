"""Parameter groups from a network: by kind, by name, by layer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ..arguments.checks import check_positive, check_type, is_number
from ..arguments.docstrings import documented
from ..arguments.params import (
    FORMAT_KEYS,
    GROUP_KEYS,
    check_learning_rate,
    check_settings,
    check_weight_decay,
    unknown_key,
)
from ..arguments.words import fail
from ..rules.matrices import KEYS, SPLIT
from ..rules.splits import check_split
from .members import find_not_decayed, first_matches, numbered_layers, parameters_of, stated_layers

if TYPE_CHECKING:
    from rich.table import Table

    from ..arguments.checks import Network, WeightDecay

NOT_DECAYED = {"weight_decay": 0.0}
SETTINGS = (*(key for key in GROUP_KEYS if key not in ("params", "order_params")), *KEYS)
# Settings that have a column in the table only if a group has them.
HEADINGS = {"grad_centralization": "centralized", **{key: key for key in (*FORMAT_KEYS, "shard_group", *KEYS)}}


class ParamGroups(list[dict[str, Any]]):
    """Groups of parameters: the list of dicts that an optimizer takes as `params`, and a table when printed.

    Its last dict keeps the order of the parameters, under `order_params`.
    """

    def __rich__(self) -> Table:
        """Return the table that `rich.print` shows."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        groups = [group for group in self if "params" in group]
        used = [key for key in SETTINGS if key not in HEADINGS or any(key in group for group in groups)]
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("Tensors", "Elements", *(HEADINGS.get(key, key) for key in used)):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("Parameters", overflow="fold")
        for group in groups:
            params = group["params"]
            names = [params[0].name, "…", params[-1].name] if len(params) > 2 else [p.name for p in params]
            row = [f"{len(params):,}", f"{sum(p.size for p in params):,}"]
            row += [_describe(group, key) for key in used]
            table.add_row(*row, Text(" ".join(names)))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), color_system=None, highlight=False)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines).strip("\n")

    def __repr__(self) -> str:
        return str(self)


class _ScaledLR(LearningRateSchedule):
    """A schedule, multiplied by a number."""

    def __init__(self, schedule, scale):
        super().__init__()
        self.schedule, self.scale = schedule, scale

    def construct(self, global_step):
        return self.schedule(global_step) * self.scale


@documented
def no_decay_groups(
    network: Network, weight_decay: WeightDecay | None = None, *, no_decay: Sequence[str] = ()
) -> ParamGroups:
    """Group parameters so that biases and normalization are not decayed.

    Three kinds of parameters are not decayed: those of at most 1 dimension, those named `bias`, and those of a
    normalization layer, regardless of their dimensions. A normalization layer is a Cell whose class, or one of its base
    classes, has a name that ends in Norm, such as LayerNorm, BatchNorm2d or an RMSNorm of your own. A list of
    parameters has no Cells: the third kind is not found there.

    Args:
        {network}
        {no_decay}

    Returns:
        {groups}

    Raises:
        {network_raises}
        TypeError: If `weight_decay` is not a number, a Cell or None, or `no_decay` not a list or tuple of str.
        ValueError: If `weight_decay` is less than 0, or a pattern of `no_decay` matches no parameter.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, no_decay_groups
        >>> net = nn.SequentialCell(nn.Embedding(100, 16), nn.LayerNorm((16,)), nn.Dense(16, 10))
        >>> groups = no_decay_groups(net, weight_decay=0.05, no_decay=["*embedding_table"])
        >>> print(groups)
          Tensors   Elements        lr   weight_decay   Parameters
         ──────────────────────────────────────────────────────────────────────────
                4      1,642   default              0   0.embedding_table … 2.bias
                1        160   default           0.05   2.weight
        >>> optimizer = AdamW(groups, learning_rate=1e-3)
    """
    return groups_by_decay("no_decay_groups", network, weight_decay, no_decay)


@documented
def pattern_groups(
    network: Network, patterns: dict[str, dict[str, Any]], *, filter_bias_and_norm: bool = False
) -> ParamGroups:
    """Group parameters by patterns of their names.

    A pattern is matched against the whole name, with ``*`` for any characters, including dots, ``?`` for one, and
    ``[...]`` for one of several, as in a shell. The first pattern that matches is used. Parameters that match no
    pattern use the optimizer's defaults.

    Args:
        {network}
        patterns (dict[str, dict]): For each pattern, the settings of its group: any of `lr`, `weight_decay`,
            `grad_centralization`, `state_dtype`, `master_weights` and `shard_group`, as in the groups that optimizers
            take, and, only for :class:`ms_optim.Muon`, `muon`, `split` and `shard_axis`.
        filter_bias_and_norm (bool): Whether biases and normalization, as :func:`no_decay_groups` finds them, are not
            decayed if the settings do not set `weight_decay`. Default: ``False`` .

    Returns:
        {groups}

    Raises:
        {network_raises}
        TypeError: If `patterns` is not a dict from str to dict, a setting has the wrong type, or
            `filter_bias_and_norm` is not a bool.
        KeyError: If a setting has an unknown name.
        ValueError: If a setting is out of range, or a pattern matches no parameter, or matches only parameters that
            earlier patterns match.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import Lamb, pattern_groups
        >>> net = nn.SequentialCell(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dense(8, 10))
        >>> groups = pattern_groups(net, {"0.*": {"grad_centralization": True}, "3.*": {"lr": 0.01}})
        >>> optimizer = Lamb(groups, learning_rate=0.001, weight_decay=0.02)
    """
    name = "pattern_groups"
    params = parameters_of(name, network)
    check_type(name, "patterns", patterns, dict)
    check_type(name, "filter_bias_and_norm", filter_bias_and_norm, bool)
    checked = []
    for pattern, settings in patterns.items():
        check_type(name, "patterns", pattern, str)
        where = f"patterns[{pattern!r}]"
        check_type(name, where, settings, dict)
        for key in settings:
            if key not in SETTINGS:
                raise KeyError(unknown_key(name, where, key, SETTINGS))
        checked.append(check_settings(name, where, settings))
        if SPLIT in settings:
            checked[-1][SPLIT] = check_split(name, f"{where}['{SPLIT}']", settings[SPLIT])
    first = first_matches(name, "patterns", list(patterns), params)
    not_decayed = find_not_decayed(name, network, params) if filter_bias_and_norm else set()

    # Parameters that match no pattern are in an additional last group without settings.
    checked.append({})
    matched = [first.get(p.name, -1) for p in params]
    keys = [(i, p.name in not_decayed and "weight_decay" not in checked[i]) for i, p in zip(matched, params)]
    return collect(params, keys, lambda key: {**checked[key[0]], **(NOT_DECAYED if key[1] else {})})


@documented
def layerwise_groups(
    network: Network,
    learning_rate: float | nn.Cell,
    decay: float,
    *,
    layers: Sequence[str] | None = None,
    weight_decay: WeightDecay | None = None,
    no_decay: Sequence[str] = (),
) -> ParamGroups:
    r"""Group parameters by layer, with a learning rate that falls from the output to the input.

    Of :math:`n` layers, counted from 0 at the input, layer :math:`k` gets the rate :math:`\eta d^{n - 1 - k}`, where
    :math:`\eta` is `learning_rate` and :math:`d` is `decay`. ELECTRA is fine-tuned in this way (Clark et al., `2020
    <https://arxiv.org/abs/2003.10555>`_). Biases and normalization are not decayed, as in :func:`no_decay_groups`.

    Unless `layers` is given, layers are found by the numbers in the parameters' names. The names in a layer are equal
    up to the first part that is a number, such as ``blocks.3`` or ``encoder.layer2.0`` . Consecutive parameters whose
    names have no number, such as embeddings before the blocks or the head after them, also form a layer.

    Args:
        {network}
        learning_rate (Union[float, int, LearningRateSchedule]): The learning rate of the last layer, 0 or greater.
        decay (float): The factor from each layer to the one before it, greater than 0 and at most 1.
        layers (Union[list[str], tuple[str], None]): A pattern for each layer, as in :func:`pattern_groups`, from the
            input to the output; together they match every parameter. Default: ``None`` .
        {no_decay}

    Returns:
        {groups}

    Raises:
        {network_raises}
        TypeError: If `learning_rate` is neither a number nor a LearningRateSchedule, or `decay` is not a number.
        TypeError: If `weight_decay` is not a number, a Cell or None, or `layers` or `no_decay` not a list or tuple of
            str.
        ValueError: If `learning_rate` or `weight_decay` is less than 0, or `decay` is not in the range (0.0, 1.0].
        ValueError: If a pattern matches no parameter, or one of `layers` matches only parameters that earlier ones
            match, or a parameter matches none of `layers`.
        ValueError: If `layers` is None and no parameter has a number in its name.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, layerwise_groups
        >>> net = nn.SequentialCell(nn.Embedding(100, 16), nn.LayerNorm((16,)), nn.Dense(16, 10))
        >>> groups = layerwise_groups(net, learning_rate=1e-3, decay=0.75, weight_decay=0.05)
        >>> print(groups)
          Tensors   Elements          lr   weight_decay   Parameters
         ───────────────────────────────────────────────────────────────────
                1      1,600   0.0005625           0.05   0.embedding_table
                2         32     0.00075              0   1.gamma 1.beta
                1        160       0.001           0.05   2.weight
                1         10       0.001              0   2.bias
        >>> optimizer = AdamW(groups, learning_rate=1e-3)
    """
    name = "layerwise_groups"
    params = parameters_of(name, network)
    scheduled = isinstance(learning_rate, LearningRateSchedule)
    if not scheduled and not is_number(learning_rate):
        fail(TypeError, name, "learning_rate", "a number or a LearningRateSchedule", learning_rate)
    learning_rate = check_learning_rate(name, "learning_rate", learning_rate)
    check_positive(name, "decay", decay)
    if decay > 1:
        fail(ValueError, name, "decay", "in the range (0.0, 1.0]", decay)
    decayed = settings_of_decayed(name, weight_decay)
    not_decayed = find_not_decayed(name, network, params, no_decay)
    layer = numbered_layers(name, params) if layers is None else stated_layers(name, layers, params)

    last = max(layer.values())
    scales = [float(decay) ** (last - k) for k in range(last + 1)]
    if scheduled:
        rates = [_ScaledLR(learning_rate, scale) if scale != 1 else learning_rate for scale in scales]
    else:
        rates = [learning_rate * scale for scale in scales]

    keys = [(layer[p.name], p.name in not_decayed) for p in params]
    return collect(params, keys, lambda key: {"lr": rates[key[0]], **(NOT_DECAYED if key[1] else decayed)})


def groups_by_decay(
    function: str, network: Any, weight_decay: Any, no_decay: Any, filter_bias_and_norm: bool = True
) -> ParamGroups:
    """Group parameters into those that are decayed and those that are not.

    Args:
        function: Name of the public function, for the errors.
        network: The network, or a list of parameters.
        weight_decay: The weight decay of those that are decayed, or None for the optimizer's own.
        no_decay: Patterns of names that are not decayed.
        filter_bias_and_norm: Whether biases and normalization are not decayed either.
    """
    params = parameters_of(function, network)
    decayed = settings_of_decayed(function, weight_decay)
    not_decayed = find_not_decayed(function, network, params, no_decay, filter_bias_and_norm)
    return collect(params, [p.name in not_decayed for p in params], lambda is_not: NOT_DECAYED if is_not else decayed)


def settings_of_decayed(function: str, weight_decay: Any) -> dict[str, Any]:
    """Return the settings of the parameters that are decayed."""
    if weight_decay is None:
        return {}
    check_weight_decay(function, "weight_decay", weight_decay)
    return {"weight_decay": weight_decay}


def collect(params: list[Parameter], keys: list[Any], settings: Callable[[Any], dict[str, Any]]) -> ParamGroups:
    """Put parameters of the same key into one group, with the settings that belong to the key."""
    members: dict[Any, list[Parameter]] = {}
    for p, key in zip(params, keys):
        members.setdefault(key, []).append(p)
    groups: list[dict[str, Any]] = [{"params": group, **settings(key)} for key, group in members.items()]
    return ParamGroups([*groups, {"order_params": params}])


def _describe(group: dict[str, Any], key: str) -> str:
    """Return a setting as the table shows it."""
    value = group.get(key, "default")
    if isinstance(value, _ScaledLR):
        return f"{value.scale:.4g} × {type(value.schedule).__name__}"
    if is_number(value):
        return f"{value:.4g}"
    return str(value) if isinstance(value, (str, bool)) or key == SPLIT else type(value).__name__
