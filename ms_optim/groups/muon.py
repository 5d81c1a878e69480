"""Parameter groups for Muon: the parameters that it orthogonalizes, and those that AdamW updates."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, nn

from ..arguments.checks import check_count, check_type
from ..arguments.docstrings import documented
from ..arguments.words import fail, listed
from ..rules.matrices import ADAMW_NAMES, KEY, SPLIT, check_names, is_matrix, size_of, warn_of_unmatched
from ..rules.splits import Heads, cuts
from ..rules.splits import heads as as_heads
from .members import find_not_decayed, parameters_of
from .param_groups import NOT_DECAYED, ParamGroups, collect, settings_of_decayed

if TYPE_CHECKING:
    from ..arguments.checks import Network, WeightDecay

# Projections of queries, and of keys or of keys and values together: of Hugging Face, MindFormers, Llama, MindSpore.
QUERY_NAMES = ("*q_proj*", "*q_b_proj*", "*linear_q.*", "*linear_q_up_proj*", "*.wq.*", "*.query.*")
KEY_NAMES = ("*k_proj*", "*kv_b_proj*", "*linear_k.*", "*linear_kv_up_proj*", "*.wk.*", "*.key.*")


@documented
def muon_groups(
    network: Network,
    *,
    adamw_names: Sequence[str] = ADAMW_NAMES,
    weight_decay: WeightDecay | None = None,
    no_decay: Sequence[str] = (),
    filter_bias_and_norm: bool = False,
    heads: int | Heads | None = None,
    key_heads: int | Heads | None = None,
    query_names: Sequence[str] = QUERY_NAMES,
    key_names: Sequence[str] = KEY_NAMES,
) -> ParamGroups:
    """Group parameters into the matrices that Muon orthogonalizes and those that AdamW updates.

    The division is the one that :class:`ms_optim.Muon` makes by default, with one exception: a 3-dimensional weight of
    a convolution, such as `mint.nn.Conv1d`, is assigned to AdamW. Muon alone does not see the layer, and would take the
    weight for a batch of matrices. Print the groups to see the division; edit them to change it.

    Args:
        {network}
        adamw_names (Union[list[str], tuple[str]]): Name patterns of parameters that AdamW updates regardless of their
            dimensions, as in :func:`pattern_groups`. If a pattern of your own matches nothing, a warning says
            so. Default:
            ``("*embed*", "*lm_head*", "*output_layer*")`` .
        {no_decay}
        filter_bias_and_norm (bool): Whether biases and normalization, as :func:`no_decay_groups` finds them, are not
            decayed. They then form a separate group. Default: ``False`` .
        heads (Union[int, Heads, None]): The number of attention heads, or what :func:`ms_optim.heads` returns for
            latent attention. Projections of queries and keys then form groups with the key `split`, by which
            :class:`ms_optim.Muon` orthogonalizes each head by itself. ``None`` means that nothing is split.
            Default: ``None`` .
        key_heads (Union[int, Heads, None]): The same for keys that query heads share (GQA), or the blocks of keys and
            values in latent attention. ``None`` means `heads`. Default: ``None`` .
        query_names (Union[list[str], tuple[str]]): Name patterns of the projections that `heads` splits. Default:
            ``("*q_proj*", "*q_b_proj*", "*linear_q.*", "*linear_q_up_proj*", "*.wq.*", "*.query.*")`` .
        key_names (Union[list[str], tuple[str]]): Name patterns of the projections that `key_heads` splits; add those of
            values to split them, too. Default:
            ``("*k_proj*", "*kv_b_proj*", "*linear_k.*", "*linear_kv_up_proj*", "*.wk.*", "*.key.*")`` .

    Returns:
        {groups}

    Raises:
        {network_raises}
        TypeError: If `adamw_names`, `no_decay`, `query_names` or `key_names` is not a list or tuple of str,
            `weight_decay` not a number, a Cell or None, `filter_bias_and_norm` not a bool, or `heads` or `key_heads`
            neither an int nor what :func:`ms_optim.heads` returns.
        ValueError: If `weight_decay` is less than 0, or a pattern of `no_decay` matches no parameter.
        ValueError: If `key_heads` is given without `heads`, or no projection has a name of `query_names`, or heads do
            not cover exactly the rows of a projection.

    Examples:
        >>> from mindspore import Parameter, nn
        >>> from ms_optim import Muon, muon_groups
        >>> net = nn.SequentialCell(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dense(8, 10))
        >>> groups = muon_groups(net, adamw_names=["3.*"], filter_bias_and_norm=True)
        >>> print(groups)
          Tensors   Elements        lr   weight_decay    muon   Parameters
         ────────────────────────────────────────────────────────────────────────
                1         72   default        default    True   0.weight
                3         26   default              0   False   1.gamma … 3.bias
                1         80   default        default   False   3.weight
        >>> optimizer = Muon(groups, learning_rate=2e-2)
    """
    name = "muon_groups"
    params = parameters_of(name, network)
    check_names(name, "adamw_names", adamw_names)
    check_type(name, "filter_bias_and_norm", filter_bias_and_norm, bool)
    decayed = settings_of_decayed(name, weight_decay)
    not_decayed = find_not_decayed(name, network, params, no_decay, filter_bias_and_norm)
    warn_of_unmatched(name, adamw_names, [p.name for p in params])
    convolved = _convolved(network)
    are_muons = [p.name not in convolved and is_matrix(p.name, p.shape, adamw_names) for p in params]
    matrices = [p for p, is_muons in zip(params, are_muons) if is_muons]
    split = _by_heads(name, matrices, heads, key_heads, query_names, key_names)
    keys = [(is_muons, p.name in not_decayed, split.get(p.name)) for p, is_muons in zip(params, are_muons)]

    def settings(key: tuple[bool, bool, Heads | None]) -> dict[str, Any]:
        by_heads = {} if key[2] is None else {SPLIT: key[2]}
        return {**(NOT_DECAYED if key[1] else decayed), KEY: key[0], **by_heads}

    return collect(params, keys, settings)


def _by_heads(
    function: str, matrices: Sequence[Parameter], heads: Any, key_heads: Any, query_names: Any, key_names: Any
) -> dict[str, Heads]:
    """Return by name the heads of projections of queries and keys."""
    names = {"heads": check_names(function, "query_names", query_names)}
    names["key_heads"] = check_names(function, "key_names", key_names)
    if heads is None:
        if key_heads is not None:
            fail(ValueError, function, "key_heads", "None without 'heads'", key_heads)
        return {}
    found: dict[str, Heads] = {}
    for argument, given in (("heads", heads), ("key_heads", key_heads)):
        split = _heads_of(function, argument, heads if given is None else given)
        own = [p for p in matrices if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in names[argument])]
        if not own and given is not None:
            known = listed([p.name for p in matrices])
            expected = f"None if no matrix of {known} has a name like one of {list(names[argument])}"
            fail(ValueError, function, argument, expected, given)
        for p in own:
            rows = size_of(p.shape)[1]
            if p.name in found:
                raise ValueError(
                    f"For '{function}', the patterns of 'query_names' and 'key_names' must match different parameters, "
                    f"but both match '{p.name}'. State the split of a fused projection in 'splits' of Muon."
                )
            if cuts(split, rows) is None:
                fail(ValueError, function, argument, f"heads that cover exactly the {rows} rows of '{p.name}'", given)
            found[p.name] = split
    return found


def _heads_of(function: str, argument: str, given: Any) -> Heads:
    if isinstance(given, Heads):
        return given
    check_count(function, argument, given, 1)
    return as_heads(given)


def _convolved(network: Any) -> set[str]:
    """Return the names of the 3-dimensional parameters of convolutions."""
    cells = [cell for _, cell in network.cells_and_names()] if isinstance(network, nn.Cell) else []
    convolutions = [cell for cell in cells if any("Conv" in kind.__name__ for kind in type(cell).__mro__)]
    return {p.name for cell in convolutions for p in cell.get_parameters(expand=False) if p.ndim == 3}
