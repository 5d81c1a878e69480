"""Recipes: the published settings that large models were trained with, as data, and the optimizer made of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments.checks import check_type
from .arguments.docstrings import documented
from .arguments.options import Options
from .arguments.words import closest, fail
from .groups import ParamGroups, groups_by_decay, muon_groups
from .groups.members import first_matches, parameters_of
from .multi import MultiOptimizer
from .optimizers import AdEMAMix, Muon, Sinkhorn
from .rules.matrices import check_names

if TYPE_CHECKING:
    from .arguments.checks import LearningRate, Network
    from .base.optimizer import FusedOptimizer
    from .rules.splits import Heads


class Asked(NamedTuple):
    """What :func:`recipe` was asked for besides settings of the optimizer; None where an argument was not given."""

    embeddings: Any
    head: Any
    muon: dict[str, Any]  # arguments of muon_groups
    is_split: bool  # whether Muon's argument `splits` was given
    no_decay: Sequence[str]
    filter_bias_and_norm: bool


def by_matrices(network: Network, asked: Asked) -> tuple[ParamGroups, ...]:
    """Return groups of matrices, and of embeddings, output layer and all else, which AdamW updates."""
    names: list[str] = []
    for argument, given in (("embeddings", asked.embeddings), ("head", asked.head)):
        if given is None:
            fail(TypeError, FUNCTION, argument, "given: name patterns, or () if there is none", given)
        own = check_names(FUNCTION, argument, [given] if isinstance(given, str) else given)
        first_matches(FUNCTION, argument, own, parameters_of(FUNCTION, network))
        names += own
    rest = {"no_decay": asked.no_decay, "filter_bias_and_norm": asked.filter_bias_and_norm}
    return (muon_groups(network, adamw_names=names, **rest, **asked.muon),)


def by_rules(network: Network, asked: Asked) -> tuple[ParamGroups, ...]:
    """Return groups of matrices, by heads, and of what AdamW updates; and those of embeddings and output layer.

    Biases and scales are not decayed, as their names tell them.
    """
    for argument in () if asked.is_split else ("heads", "key_heads"):
        if argument not in asked.muon:
            expected = "given: the number of heads of queries, and of keys; or 'splits', for fused projections"
            fail(TypeError, FUNCTION, argument, expected, None)
    params = parameters_of(FUNCTION, network)
    not_decayed = [p.name for p in params if NOT_DECAYED_NAMES.search(p.name)]
    (groups,) = by_matrices(network, asked._replace(no_decay=[*asked.no_decay, *not_decayed]))
    patterns = [[given] if isinstance(given, str) else given for given in (asked.embeddings, asked.head)]
    tables = first_matches(FUNCTION, "embeddings", [pattern for own in patterns for pattern in own], params)
    if not tables:
        fail(ValueError, FUNCTION, "embeddings", "name patterns, because Sinkhorn updates what they match", ())
    return _selected(groups, lambda name: name not in tables), _selected(groups, lambda name: name in tables, ("muon",))


def _selected(groups: ParamGroups, is_meant: Callable[[str], bool], without: Sequence[str] = ()) -> ParamGroups:
    """Return the groups of some of their parameters, without some of their settings."""
    kept = []
    for group in groups:
        of = next(key for key in ("params", "order_params") if key in group)
        params = [p for p in group[of] if is_meant(p.name)]
        if params:
            kept.append({key: value for key, value in {**group, of: params}.items() if key not in without})
    return ParamGroups(kept)


def alike(network: Network, asked: Asked) -> tuple[ParamGroups, ...]:
    """Return groups of all parameters by their decay."""
    for argument, given in {"embeddings": asked.embeddings, "head": asked.head, **asked.muon}.items():
        if given is not None:
            fail(ValueError, FUNCTION, argument, "None for a recipe that updates all parameters alike", given)
    return (groups_by_decay(FUNCTION, network, None, asked.no_decay, asked.filter_bias_and_norm),)


def with_sinkhorn(
    others: ParamGroups, tables: ParamGroups, learning_rate: LearningRate, **settings: Any
) -> MultiOptimizer:
    """Return Muon, and Sinkhorn for tables, as one optimizer.

    Settings of Sinkhorn are those named `sinkhorn_...`, and the keywords that all optimizers share.
    """
    clip = settings.pop("grad_clip_norm", None)
    own = {key: settings.pop(key) for key in list(settings) if key.startswith(OF_SINKHORN)}
    shared = {field.name for field in dataclasses.fields(Options)}
    of_tables = {key.removeprefix(OF_SINKHORN): value for key, value in own.items()}
    of_tables |= {key: value for key, value in settings.items() if key in shared}
    return MultiOptimizer([Muon(others, learning_rate, **settings), Sinkhorn(tables, learning_rate, **of_tables)], clip)


class Recipe(NamedTuple):
    """Published settings.

    Attributes:
        model: What was trained with them.
        source: Where they are published.
        groups: Makes the groups of a network, for each optimizer.
        optimizer: Makes the optimizer of these groups, a learning rate and settings.
        stated: Its arguments that the source states.
        chosen: Those that the source leaves open and this package chooses. `filter_bias_and_norm`, in either, is an
            argument of the groups.
        rates: The learning rates that the source states.
        beside: What the source does beside the optimizer.
    """

    model: str
    source: str
    groups: Callable[[Network, Asked], tuple[ParamGroups, ...]]
    optimizer: Callable[..., FusedOptimizer]
    stated: Mapping[str, Any]
    chosen: Mapping[str, Any]
    rates: str
    beside: str = ""

    def described(self, settings: Mapping[str, Any]) -> str:
        """Return the text that is printed, with the settings that are used."""
        lines = [f"{self.model}: {self.source}"]
        for key, value in settings.items():
            known = {**self.stated, **self.chosen}.get(key)
            origin = "published" if key in self.stated else "our choice"
            told = origin if known == value else "given" if known is None else f"given; {origin}: {known!r}"
            lines.append(f"  {key} = {value!r} ({told})")
        lines.append(f"  published learning rates: {self.rates}")
        return "\n".join([*lines, f"  beside the optimizer: {self.beside}"] if self.beside else lines)


FUNCTION = "recipe"
OF_SINKHORN = "sinkhorn_"
# What is not decayed where normalization is: biases, that of a normalization layer included, and learned scales.
NOT_DECAYED_NAMES = re.compile(r"(^|[._])(bias|beta|scales?)$")
DEEPSEEK = {
    "weight_decay": 0.1,
    "momentum": 0.95,
    "matched_adamw_rms": 0.18,
    "ns_coefficients": "deepseek_v4",
    "adamw_eps": 1e-20,
    "filter_bias_and_norm": False,
}
DEEPSEEK_BETAS = {"adamw_betas": (0.9, 0.95)}
ADAMW = {"adamw_betas": (0.95, 0.95), "adamw_eps": 1e-8}
ITERATIONS = {"nesterov": True, "ns_coefficients": "jordan"}
NOT_DECAYED = {"filter_bias_and_norm": True}
RECIPES: dict[str, Recipe] = {
    "kimi-k2": Recipe(
        "Kimi K2",
        "https://arxiv.org/abs/2507.20534, sections 2.1 and 2.5",
        by_matrices,
        Muon,
        {"weight_decay": 0.1, "matched_adamw_rms": 0.2},
        {"momentum": 0.95, **ITERATIONS, **ADAMW, **NOT_DECAYED},
        "2e-4, constant after 500 steps of warm-up for 10 of 15.5 trillion tokens, then a cosine to 2e-5; batches of "
        "67 million tokens",
        "QKClip with threshold=100.0",
    ),
    "glm-4.5": Recipe(
        "GLM-4.5",
        "https://arxiv.org/abs/2508.06471",
        by_matrices,
        Muon,
        {"weight_decay": 0.1, "momentum": 0.95, "ns_steps": 5, "matched_adamw_rms": 0.2},
        {**ITERATIONS, **ADAMW, **NOT_DECAYED},
        "warm-up to 2.5e-4, then a cosine to 2.5e-5",
    ),
    "deepseek-v4": Recipe(
        "DeepSeek-V4",
        "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/DeepSeek_V4.pdf",
        by_matrices,
        Muon,
        {**DEEPSEEK, **DEEPSEEK_BETAS},
        {"nesterov": True, "ns_dtype": "float32"},
        "2.7e-4, at the end 2.7e-5 (DeepSeek-V4-Flash)",
    ),
    "deepseek-v4.1": Recipe(
        "DeepSeek-V4.1-Flash",
        "technical report of September 2026, section 2.5",
        by_rules,
        with_sinkhorn,
        {
            **DEEPSEEK,
            "sinkhorn_momentum": 0.95,
            "sinkhorn_normalizations": 11,
            "sinkhorn_tau": 1e-3,
            "sinkhorn_eps": 1e-20,
            "sinkhorn_scale": 0.18,
            "sinkhorn_weight_decay": 0.0,
        },
        {**DEEPSEEK_BETAS, "nesterov": True, "ns_dtype": "float32"},
        "2.6e-4, then a cosine to 2.6e-5",
    ),
    "apertus": Recipe(
        "Apertus 8B and 70B",
        "https://arxiv.org/abs/2509.14233, https://github.com/swiss-ai/pretrain-code",
        alike,
        AdEMAMix,
        {
            "weight_decay": 0.1,
            "betas": (0.9, 0.999, 0.9999),
            "alpha": 8.0,
            "warmup_steps": 100_000,
            "grad_clip_norm": 0.1,
        },
        {"eps": 1e-8, **NOT_DECAYED},
        "1.1e-4 (8B), 1.0e-5 (70B), constant after a warm-up of 17 billion tokens; in the end 1 - sqrt to a tenth",
    ),
}


@documented
def recipe(
    name: str,
    network: Network,
    learning_rate: LearningRate,
    *,
    embeddings: str | Sequence[str] | None = None,
    head: str | Sequence[str] | None = None,
    heads: int | Heads | None = None,
    key_heads: int | Heads | None = None,
    query_names: Sequence[str] | None = None,
    key_names: Sequence[str] | None = None,
    no_decay: Sequence[str] = (),
    filter_bias_and_norm: bool | None = None,
    verbose: bool = True,
    **arguments: Any,
) -> FusedOptimizer:
    """Create an optimizer with the published settings of a large model.

    - "kimi-k2": Kimi K2, :class:`ms_optim.Muon`.
    - "glm-4.5": GLM-4.5, Muon.
    - "deepseek-v4": DeepSeek-V4, Muon in eight and two iterations, AdamW with eps 1e-20.
    - "deepseek-v4.1": DeepSeek-V4.1-Flash, Muon by heads for queries and keys, :class:`ms_optim.Sinkhorn` for
      embeddings and output layer, AdamW for the rest, in a :class:`ms_optim.MultiOptimizer`. Normalization is decayed;
      parameters whose names end in `bias`, `beta`, `scale` or `scales` are not.
    - "apertus": Apertus 8B and 70B, :class:`ms_optim.AdEMAMix`.

    A setting that the source states is that of the recipe, unless it is given here. What the source leaves open is
    required, or is this package's choice, which the printed text names.

    Args:
        name (str): The recipe, one of the names above. Case, underscores and hyphens do not matter.
        {network}
        learning_rate (Union[float, int, Tensor, Iterable, LearningRateSchedule]): The learning rate, as optimizers take
            it. Published rates belong to a number of steps and a batch size; the printed text shows them.
        embeddings (Union[str, list[str], tuple[str], None]): Name patterns of the embeddings, as in
            :func:`pattern_groups`. Required for recipes of Muon, where AdamW or Sinkhorn updates them. Default:
            ``None`` .
        head (Union[str, list[str], tuple[str], None]): The same for the output layer; ``()`` if there is none, as with
            tied weights. Required for recipes of Muon. Default: ``None`` .
        heads (Union[int, Heads, None]): The number of attention heads, for Muon by heads, as in :func:`muon_groups`.
            ``None`` means whole matrices. Required for "deepseek-v4.1", unless Muon's argument `splits` is given, which
            states the heads of a fused projection. Default: ``None`` .
        key_heads (Union[int, Heads, None]): The same for keys, as in :func:`muon_groups`. Required like `heads`.
            Default: ``None`` .
        query_names (Union[list[str], tuple[str], None]): Name patterns of queries, as in :func:`muon_groups`, whose
            default ``None`` means. Default: ``None`` .
        key_names (Union[list[str], tuple[str], None]): The same for keys. Default: ``None`` .
        no_decay (Union[list[str], tuple[str]]): Name patterns of further parameters that are not decayed. Default:
            ``()`` .
        filter_bias_and_norm (Union[bool, None]): Whether biases and normalization are not decayed. ``None`` means what
            the recipe states or chooses. Default: ``None`` .
        verbose (bool): Whether to print the source, settings and groups. Default: ``True`` .
        arguments: Further arguments of the optimizer, in place of the recipe's or besides them. For "deepseek-v4.1",
            those of Sinkhorn begin with `sinkhorn_`, those that optimizers share are of both, and `grad_clip_norm`
            bounds the norm of all gradients together; others are Muon's.

    Returns:
        The optimizer, of the class that the recipe states.

    Raises:
        TypeError: If an argument is of the wrong type, or `embeddings`, `head`, `heads` or `key_heads` is missing where
            it is required.
        ValueError: If no recipe has the name, a pattern matches no parameter, or `embeddings`, `head`, `heads`,
            `key_heads` or names of queries or keys are given for a recipe that updates all parameters alike.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import recipe
        >>> net = nn.SequentialCell(nn.Embedding(100, 16), nn.Dense(16, 16), nn.Dense(16, 100))
        >>> optimizer = recipe("deepseek-v4", net, 2.7e-4, embeddings="0.*", head="2.weight", verbose=False)
        >>> print(optimizer.matched_adamw_rms, optimizer.eps)
        0.18 1e-20
    """
    found = _find(name)
    check_type(FUNCTION, "verbose", verbose, bool)
    if "adamw_names" in arguments:
        fail(TypeError, FUNCTION, "adamw_names", "stated as 'embeddings' and 'head'", arguments["adamw_names"])
    of_heads = {"heads": heads, "key_heads": key_heads, "query_names": query_names, "key_names": key_names}
    muon = {argument: value for argument, value in of_heads.items() if value is not None}
    settings = {**found.stated, **found.chosen, **arguments}
    if filter_bias_and_norm is not None:
        settings["filter_bias_and_norm"] = filter_bias_and_norm
    of_optimizer = {key: value for key, value in settings.items() if key != "filter_bias_and_norm"}
    is_split = arguments.get("splits") is not None
    asked = Asked(embeddings, head, muon, is_split, no_decay, settings["filter_bias_and_norm"])
    groups = found.groups(network, asked)
    optimizer = found.optimizer(*groups, learning_rate, **of_optimizer)
    if verbose:
        print(found.described(settings))
        for each, own in zip(getattr(optimizer, "optimizers", (optimizer,)), groups):
            print(f"{type(each).__name__}:\n{own}")
    return optimizer


def _find(name: Any) -> Recipe:
    """Return the recipe of a name."""
    check_type(FUNCTION, "name", name, str)
    found = {_bare(known): made for known, made in RECIPES.items()}.get(_bare(name))
    if found is None:
        fail(ValueError, FUNCTION, "name", f"one of {list(RECIPES)}", name, closest(name, RECIPES))
    return found


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
