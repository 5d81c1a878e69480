"""Optimizers by name: lists the names, and creates the optimizer of a name for a network."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import nn

from ..arguments.checks import check_type
from ..arguments.docstrings import documented
from ..arguments.params import check_params, ordered
from ..arguments.words import closest, fail
from ..groups.param_groups import ParamGroups, groups_by_decay
from . import OPTIMIZERS

if TYPE_CHECKING:
    from ..arguments.checks import LearningRate, Network, Params, WeightDecay
    from ..base.optimizer import FusedOptimizer

FACTORY = "create_optimizer"


@documented
def create_optimizer(
    name: str,
    network: Network | Params,
    learning_rate: LearningRate | None = None,
    weight_decay: WeightDecay | None = None,
    *,
    no_decay: Sequence[str] = (),
    filter_bias_and_norm: bool = True,
    verbose: bool = False,
    **arguments: Any,
) -> FusedOptimizer:
    """Create an optimizer by its name.

    By default biases and normalization are not decayed: the parameters are grouped as :func:`no_decay_groups` groups
    them. For other groups, create the groups first and pass them as `network`.

    Args:
        name (str): The optimizer's name, one of those that :func:`list_optimizers` returns, or the name of its class.
            Case, underscores and hyphens do not matter.
        network (Union[Cell, list[Parameter], list[dict]]): The network whose trainable parameters are optimized, or a
            list of parameters, or parameter groups. Groups are used unchanged, and `filter_bias_and_norm` is ignored.
        learning_rate (Union[float, int, Tensor, Iterable, LearningRateSchedule, None]): The learning rate, as the
            optimizer takes it. ``None`` means the optimizer's default; it is required for an optimizer without a
            default. Default: ``None`` .
        {no_decay}
        filter_bias_and_norm (bool): Whether biases and normalization are not decayed. If ``False`` , all parameters are
            decayed except those that `no_decay` matches. Default: ``True`` .
        verbose (bool): Whether to print the table of the groups. Default: ``False`` .
        arguments: Further keyword arguments of the optimizer, which checks them, such as `betas` or `state_dtype`.

    Returns:
        The optimizer, of the class that has this name.

    Raises:
        TypeError: If `name` is not a str, or `network` is neither a Cell nor a list of Parameters or of groups.
        TypeError: If `filter_bias_and_norm` or `verbose` is not a bool, or `no_decay` not a list or tuple of str.
        TypeError: If a required argument of the optimizer is missing, or the optimizer does not have a keyword
            argument.
        ValueError: If no optimizer has the name. The error lists the names and the closest one.
        ValueError: If `network` has no trainable parameters, or a pattern of `no_decay` matches no parameter, or
            `no_decay` is given with groups.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import create_optimizer
        >>> net = nn.SequentialCell(nn.Embedding(100, 16), nn.LayerNorm((16,)), nn.Dense(16, 10))
        >>> optimizer = create_optimizer("lion", net, learning_rate=1e-4, weight_decay=0.1, verbose=True)
          Tensors   Elements        lr   weight_decay   Parameters
         ──────────────────────────────────────────────────────────────────────────
                2      1,760   default            0.1   0.embedding_table 2.weight
                3         42   default              0   1.gamma … 2.bias
        >>> optimizer = create_optimizer("adamw", net, weight_decay=0.05, betas=(0.9, 0.95), state_dtype="8bit")
    """
    optimizer = _find(name)
    check_type(FACTORY, "filter_bias_and_norm", filter_bias_and_norm, bool)
    check_type(FACTORY, "verbose", verbose, bool)
    given = network if isinstance(network, nn.Cell) else ordered(network)
    if isinstance(given, list) and given and isinstance(given[0], dict):
        if not isinstance(no_decay, (list, tuple)) or no_decay:
            fail(ValueError, FACTORY, "no_decay", "() if 'network' is a list of groups", no_decay)
        groups = ParamGroups(check_params(FACTORY, given, "network", optimizer.group_keys))
    else:
        groups = groups_by_decay(
            FACTORY, network if given is None else given, weight_decay, no_decay, filter_bias_and_norm
        )
    rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    arguments |= {key: value for key, value in rates.items() if value is not None}
    _check_required(name, optimizer, arguments)
    if verbose:
        print(groups)
    return optimizer(groups, **arguments)


@documented
def list_optimizers(patterns: str | Sequence[str] | None = None) -> list[str]:
    """List the names of the optimizers, which :func:`create_optimizer` takes.

    Args:
        patterns (Union[str, list[str], tuple[str], None]): A pattern or several, as in a shell: ``*`` matches any
            characters, ``?`` one, and ``[...]`` one of several. A name is listed if a pattern matches the whole name;
            ``None`` means that all names are listed. Default: ``None`` .

    Returns:
        list[str], the names in alphabetical order. The list is empty if no name matches.

    Raises:
        TypeError: If `patterns` is not a str, a list or tuple of str, or None.

    Examples:
        >>> from ms_optim import list_optimizers
        >>> print(list_optimizers("la*"))
        ['lamb', 'lans']
        >>> print(list_optimizers(["lion", "*adamw"]))
        ['adamw', 'lion', 'schedule_free_adamw']
    """
    names = sorted(_by_name())
    if patterns is None:
        return names
    wanted = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(pattern, str) for pattern in wanted):
        fail(TypeError, "list_optimizers", "patterns", "a str, a list or tuple of str, or None", patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]


def named(name: str) -> type[FusedOptimizer] | None:
    """Return the optimizer of a name in any form, such as "adam_offload", "AdamOffload" or "adam-offload", if any."""
    return {_bare(key): optimizer for key, optimizer in _by_name().items()}.get(_bare(name))


def _bare(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _by_name() -> dict[str, type[FusedOptimizer]]:
    """Return the optimizers by name, which is the name of their first rule."""
    return {optimizer.rules[0].name: optimizer for optimizer in OPTIMIZERS}


def _find(name: Any) -> type[FusedOptimizer]:
    """Return the optimizer of a name."""
    names = sorted(_by_name())
    if not isinstance(name, str):
        fail(TypeError, FACTORY, "name", f"a str, one of {names}", name)
    optimizer = named(name)
    if optimizer is None:
        fail(ValueError, FACTORY, "name", f"one of {names}", name, closest(name, names))
    return optimizer


def _check_required(name: str, optimizer: type[FusedOptimizer], arguments: dict[str, Any]) -> None:
    """Check that all arguments without a default are given."""
    own = list(inspect.signature(optimizer).parameters.values())[1:]
    missing = [p.name for p in own if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in arguments]
    if missing:
        raise TypeError(
            f"For '{FACTORY}', the optimizer '{name}' requires the arguments {missing}, but got {sorted(arguments)}."
        )
