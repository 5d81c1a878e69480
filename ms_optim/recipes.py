"""Recipes: the published settings that large models were trained with, as data, and the optimizer made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments.checks import check_type
from .arguments.docstrings import documented
from .arguments.words import closest, fail
from .groups import ParamGroups, groups_by_decay, muon_groups
from .groups.members import first_matches, parameters_of
from .optimizers import AdEMAMix, Muon
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
    no_decay: Sequence[str]
    filter_bias_and_norm: bool


def by_matrices(network: Network, asked: Asked) -> ParamGroups:
    """Return groups of matrices, and of embeddings, output layer and all else, which AdamW updates."""
    names: list[str] = []
    for argument, given in (("embeddings", asked.embeddings), ("head", asked.head)):
        if given is None:
            fail(TypeError, FUNCTION, argument, "given: name patterns, or () if there is none", given)
        own = check_names(FUNCTION, argument, [given] if isinstance(given, str) else given)
        first_matches(FUNCTION, argument, own, parameters_of(FUNCTION, network))
        names += own
    rest = {"no_decay": asked.no_decay, "filter_bias_and_norm": asked.filter_bias_and_norm}
    return muon_groups(network, adamw_names=names, **rest, **asked.muon)


def alike(network: Network, asked: Asked) -> ParamGroups:
    """Return groups of all parameters by their decay."""
    for argument, given in {"embeddings": asked.embeddings, "head": asked.head, **asked.muon}.items():
        if given is not None:
            fail(ValueError, FUNCTION, argument, "None for a recipe that updates all parameters alike", given)
    return groups_by_decay(FUNCTION, network, None, asked.no_decay, asked.filter_bias_and_norm)


class Recipe(NamedTuple):
    """Published settings.

    Attributes:
        model: What was trained with them.
        source: Where they are published.
        groups: Makes the groups of a network.
        optimizer: Makes the optimizer of groups, a learning rate and settings.
        stated: Its arguments that the source states.
        chosen: Those that the source leaves open and this package chooses. `filter_bias_and_norm`, in either, is an
            argument of the groups.
        rates: The learning rates that the source states.
        beside: What the source does beside the optimizer.
    """

    model: str
    source: str
    groups: Callable[[Network, Asked], ParamGroups]
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
        {
            "weight_decay": 0.1,
            "momentum": 0.95,
            "matched_adamw_rms": 0.18,
            "ns_coefficients": "deepseek_v4",
            "adamw_betas": (0.9, 0.95),
            "adamw_eps": 1e-20,
            "filter_bias_and_norm": False,
        },
        {"nesterov": True, "ns_dtype": "float32"},
        "2.7e-4, at the end 2.7e-5 (DeepSeek-V4-Flash)",
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
    - "apertus": Apertus 8B and 70B, :class:`ms_optim.AdEMAMix`.

    A setting that the source states is that of the recipe, unless it is given here. What the source leaves open is
    required, or is this package's choice, which the printed text names.

    Args:
        name (str): The recipe, one of the names above. Case, underscores and hyphens do not matter.
        {network}
        learning_rate (Union[float, int, Tensor, Iterable, LearningRateSchedule]): The learning rate, as optimizers take
            it. Published rates belong to a number of steps and a batch size; the printed text shows them.
        embeddings (Union[str, list[str], tuple[str], None]): Name patterns of the embeddings, as in
            :func:`pattern_groups`. Required for recipes of Muon, where AdamW updates them. Default: ``None`` .
        head (Union[str, list[str], tuple[str], None]): The same for the output layer; ``()`` if there is none, as with
            tied weights. Required for recipes of Muon. Default: ``None`` .
        heads (Union[int, Heads, None]): The number of attention heads, for Muon by heads, as in :func:`muon_groups`.
            ``None`` means whole matrices, as in all recipes above. Default: ``None`` .
        key_heads (Union[int, Heads, None]): The same for keys, as in :func:`muon_groups`. Default: ``None`` .
        query_names (Union[list[str], tuple[str], None]): Name patterns of queries, as in :func:`muon_groups`, whose
            default ``None`` means. Default: ``None`` .
        key_names (Union[list[str], tuple[str], None]): The same for keys. Default: ``None`` .
        no_decay (Union[list[str], tuple[str]]): Name patterns of further parameters that are not decayed. Default:
            ``()`` .
        filter_bias_and_norm (Union[bool, None]): Whether biases and normalization are not decayed. ``None`` means what
            the recipe states or chooses. Default: ``None`` .
        verbose (bool): Whether to print the source, settings and groups. Default: ``True`` .
        arguments: Further arguments of the optimizer, in place of the recipe's or besides them.

    Returns:
        The optimizer, of the class that the recipe states.

    Raises:
        TypeError: If an argument is of the wrong type, or `embeddings` or `head` is missing where it is required.
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
    asked = Asked(embeddings, head, muon, no_decay, settings["filter_bias_and_norm"])
    groups = found.groups(network, asked)
    optimizer = found.optimizer(groups, learning_rate, **of_optimizer)
    if verbose:
        print(found.described(settings))
        print(groups)
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
