"""Parameter groups for Muon: the parameters that it orthogonalizes, and those that AdamW updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import nn

from ..arguments.checks import check_type
from ..arguments.docstrings import documented
from ..rules.matrices import ADAMW_NAMES, KEY, check_names, is_matrix, warn_of_unmatched
from .members import find_not_decayed, parameters_of
from .param_groups import NOT_DECAYED, ParamGroups, collect, settings_of_decayed

if TYPE_CHECKING:
    from ..arguments.checks import Network, WeightDecay


@documented
def muon_groups(
    network: Network,
    *,
    adamw_names: Sequence[str] = ADAMW_NAMES,
    weight_decay: WeightDecay | None = None,
    no_decay: Sequence[str] = (),
    filter_bias_and_norm: bool = False,
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

    Returns:
        {groups}

    Raises:
        {network_raises}
        TypeError: If `adamw_names` or `no_decay` is not a list or tuple of str, `weight_decay` not a number, a Cell or
            None, or `filter_bias_and_norm` not a bool.
        ValueError: If `weight_decay` is less than 0, or a pattern of `no_decay` matches no parameter.

    Examples:
        >>> from mindspore import nn
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
    keys = [
        (p.name not in convolved and is_matrix(p.name, p.shape, adamw_names), p.name in not_decayed) for p in params
    ]
    return collect(params, keys, lambda key: {**(NOT_DECAYED if key[1] else decayed), KEY: key[0]})


def _convolved(network: Any) -> set[str]:
    """Return the names of the 3-dimensional parameters of convolutions."""
    cells = [cell for _, cell in network.cells_and_names()] if isinstance(network, nn.Cell) else []
    convolutions = [cell for cell in cells if any("Conv" in kind.__name__ for kind in type(cell).__mro__)]
    return {p.name for cell in convolutions for p in cell.get_parameters(expand=False) if p.ndim == 3}
