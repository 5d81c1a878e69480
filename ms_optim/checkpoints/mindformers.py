"""Checkpoints of MindFormers' own optimizers: their states under the names that they have here, and the reverse."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ..arguments.checks import check_choice, check_count, fail
from ..base.optimizer import FusedOptimizer
from ..optimizers import AdamW, Muon
from ..states import split_masters
from ..states.formats import FORMATS, OF_DTYPE
from ..states.split_masters import MAIN_PARAM

FROM, TO = "from_mindformers", "to_mindformers"
STEP = "global_step"
# The first words of the states' names in its fused AdamW, and here.
OF_FUSED = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "max_exp_avg_sq": "adam_vhat"}
# Its optimizers that are taken and given: what their step count is short of the steps taken.
ADAMW, FUSED, FUSED_PYNATIVE, MUON = KINDS = ("AdamW", "FusedAdamW", "AdamW with enable_fused_opt", "Muon")
SHORT = {ADAMW: 0, FUSED: 1, FUSED_PYNATIVE: 1, MUON: 0}
# The first words of names that only optimizers without a counterpart have.
WITHOUT_COUNTERPART = {"exp_avg_insta_row_": "Came", "exp_avg_sq_row_": "AdaFactor"}
# What PmaAdamW adds to AdamW: a sum or an average of weights of several steps.
OF_PMA = ("pma_weight_ema.", "pma_weight_sma.")


def from_mindformers(
    saved: Mapping[str, Tensor], optimizer: FusedOptimizer, steps: int | None = None
) -> dict[str, Tensor]:
    """Return a checkpoint of MindFormers' AdamW, PmaAdamW or Muon with the names and the step count of this package.

    Pass the result to ``optimizer.load_state_dict(..., strict=False)`` , which converts states to the `state_dtype` of
    the optimizer. Weights are not loaded: load them into the network.

    The update rules are the same, and so are the numbers in the states: no factor is applied. Its fused AdamW has other
    names, and counts steps from −1. The placeholders of its Muon, of one element, and the averages of PmaAdamW are not
    loaded.

    Args:
        saved (dict[str, Tensor]): What ``mindspore.load_checkpoint`` read from the file of the optimizer, with or
            without the weights. Of several processes, each has its own file.
        optimizer (FusedOptimizer): The optimizer that goes on: :class:`ms_optim.AdamW` or :class:`ms_optim.Muon`, on
            the parameters of that run, of the same names.
        steps (Union[int, None]): The number of steps taken. Required if `saved` has no `global_step`, and for the
            PyNative trainer's AdamW with ``enable_fused_opt=True`` , whose count is one short without any sign of it.
            ``None`` means what `saved` says. Default: ``None`` .

    Returns:
        dict[str, Tensor], the entries for ``load_state_dict``.

    Raises:
        TypeError: If `saved` is not a dict of Tensors, `optimizer` not an optimizer of this package, or `steps` not an
            int.
        ValueError: If `saved` is of an optimizer without a counterpart, such as Came; if it lacks a state of
            `optimizer`, because another rule updated the parameter or its name differs; or if the step count is
            missing.

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import Parameter, Tensor, ops
        >>> from ms_optim import AdamW, from_mindformers
        >>> w = Parameter(Tensor([1.0, 2.0], ms.float32), name="w")
        >>> optimizer = AdamW([w], learning_rate=1e-3)
        >>> saved = {"exp_avg.w": ops.ones(2), "exp_avg_sq.w": ops.ones(2), "global_step": Tensor([9], ms.int32)}
        >>> optimizer.load_state_dict(from_mindformers(saved, optimizer), strict=False)
        >>> print(optimizer.global_step.asnumpy())
        [10]
    """
    if not isinstance(saved, Mapping) or not all(isinstance(value, Tensor) for value in saved.values()):
        fail(TypeError, FROM, "saved", "a dict of Tensors", saved)
    _check_optimizer(FROM, optimizer)
    if steps is not None:
        check_count(FROM, "steps", steps)
    names = names_here({name: tuple(value.shape) for name, value in saved.items()}, FROM)
    found = {here: saved[name] for name, here in names.items()}
    _check_states(optimizer, found)
    if steps is None:
        if STEP not in saved:
            raise ValueError(f"For '{FROM}', 'saved' must have the entry '{STEP}', or 'steps' must be given.")
        steps = int(saved[STEP].asnumpy().reshape(-1)[0]) + SHORT[kind_of(saved)]
    return found | {STEP: Tensor([steps], mstype.int32)}


def to_mindformers(optimizer: FusedOptimizer, kind: str = ADAMW) -> dict[str, Tensor]:
    """Return the weights and states of an optimizer as MindFormers' optimizer of the same rule names them.

    States and masters are float32 there: those of another `state_dtype`, and split masters, are converted. Masters have
    the names `main_param.` of the PyNative trainer; on static graphs MindFormers has none.

    Args:
        optimizer (FusedOptimizer): A :class:`ms_optim.AdamW` or :class:`ms_optim.Muon`, without `normalize_rows`, whose
            states are not shared out to several workers.
        kind (str): For AdamW, the variant: "AdamW"; "FusedAdamW", of static graphs with ``use_fused=True`` ; or "AdamW
            with enable_fused_opt", of the PyNative trainer. For Muon "AdamW" and "Muon" are the same. Default:
            ``"AdamW"`` .

    Returns:
        dict[str, Tensor], for ``mindspore.save_checkpoint`` or ``load_param_into_net``.

    Raises:
        TypeError: If `optimizer` is not an optimizer of this package, or `kind` not a string.
        ValueError: If MindFormers has no optimizer of the rule, `kind` is none of these or not one of the rule, or the
            states are shared out.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, to_mindformers
        >>> optimizer = AdamW(nn.Dense(4, 3).trainable_params())
        >>> print(sorted(to_mindformers(optimizer, "FusedAdamW")))
        ['bias', 'exp_avg.bias', 'exp_avg.weight', 'exp_avg_sq.bias', 'exp_avg_sq.weight', 'global_step', 'weight']
    """
    _check_optimizer(TO, optimizer)
    check_choice(TO, "kind", kind, KINDS)
    own, entries, held = optimizer._entries.own(), optimizer.state_dict(), optimizer._held
    _check_rule(optimizer, kind)
    names = {id(p): name for name, p in own.items()}
    found = {name: entries[name] for name in entries.keys() - own.keys()}
    for state, shape in zip(held.states, held.numbers):
        name = names[id(state)]
        word, _, parameter = name.partition(".")
        scales = entries.get(f"{word}_scale.{parameter}")
        numbers = OF_DTYPE[state.dtype].decode(entries[name], scales, shape)
        found[name] = FORMATS["float32"].encode(numbers, mstype.float32)[0]
    for i, place in enumerate(held.master_places):
        if place >= 0:
            master = entries[names[id(held.masters[place])]]
            numbers = (
                split_masters.converted(
                    master.asnumpy().reshape(-1), np.float32, optimizer._entries.weight_beside(i, {}, {})
                )
                if master.dtype != mstype.float32
                else master.asnumpy()
            )
            found[MAIN_PARAM + optimizer._layout.names[i]] = Tensor(numbers.reshape(master.shape))
    steps = int(entries[STEP].asnumpy()[0])
    found[STEP] = Tensor([steps - SHORT[kind]], mstype.int32)
    return {name_there(name, kind): value for name, value in found.items()}


def kind_of(names: Collection[str]) -> str:
    """Return which of MindFormers' optimizers has states of these names.

    The names of the PyNative trainer's AdamW with `enable_fused_opt` differ from those without it by amsgrad alone.
    """
    words = {name.partition(".")[0] for name in names if "." in name}
    if "exp_avg_sq" in words:
        return FUSED
    if "muon_m" in words:
        return MUON
    return FUSED_PYNATIVE if "max_exp_avg_sq" in words else ADAMW


def names_here(shapes: Mapping[str, tuple[int, ...]], function: str) -> dict[str, str]:
    """Return, for each entry of a checkpoint of MindFormers that is kept, its name in this package.

    Args:
        shapes: The shapes of the entries by name.
        function: Name of the public function, for the errors.
    """
    for beginning, other in WITHOUT_COUNTERPART.items():
        if theirs := next((name for name in shapes if name.startswith(beginning)), None):
            raise ValueError(
                f"For '{function}', the checkpoint is of {other}, by its entry {theirs!r}, which has no counterpart "
                "here: its moments are means of rows and columns, and averages of updates that are scaled already. "
                "Load the weights alone, and begin with new states."
            )
    return {
        name: ".".join((OF_FUSED.get(word, word), *rest))
        for name in shapes
        for word, *rest in [name.split(".")]
        if not name.startswith(OF_PMA) and not _is_placeholder(name, shapes)
    }


def _is_placeholder(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether an entry only fills a place in a list of MindFormers' Muon, for a parameter of the other rule."""
    word, _, parameter = name.partition(".")
    if word not in ("muon_m", "adam_m", "adam_v") or shapes[name] != (1,):
        return False
    # They have the parameter's name in version 1, later none that a state has. What Muon updates has two dimensions or
    # more.
    momentum = shapes.get(f"muon_m.{parameter}")
    return momentum is not None and (word == "muon_m") == (len(momentum) < 2)


def name_there(name: str, kind: str) -> str:
    """Return the name of an entry in one of MindFormers' optimizers."""
    word, dot, parameter = name.partition(".")
    renamed = {here: there for there, here in OF_FUSED.items() if kind == FUSED or there == "max_exp_avg_sq"}
    return renamed.get(word, word) + dot + parameter


def _check_optimizer(function: str, optimizer: Any) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        what = "an optimizer of this package; of LocalSteps, the optimizer inside it"
        fail(TypeError, function, "optimizer", what, optimizer)


def _check_states(optimizer: FusedOptimizer, found: Mapping[str, Any]) -> None:
    """Raise an error if a state of the optimizer is missing."""
    states = {id(state) for state in optimizer._held.states}
    for name in (name for name, p in optimizer._entries.own().items() if id(p) in states and name not in found):
        word, _, parameter = name.partition(".")
        others = [other for other in ("muon_m", "adam_m") if f"{other}.{parameter}" in found]
        why, remedy = "", "Check that the optimizer has the rule, the options and the parameters of that run."
        if isinstance(optimizer, Muon) and others and word in ("muon_m", "adam_m"):
            rules = {"muon_m": "Muon", "adam_m": "AdamW"}
            why = f": {rules[others[0]]} updated {parameter!r} there, and {rules[word]} does here"
            remedy = "Assign it by 'adamw_names', or by a group with the key 'muon'."
        raise ValueError(f"For '{FROM}', 'saved' must have the state {name!r}{why}. {remedy}")


def _check_rule(optimizer: FusedOptimizer, kind: str) -> None:
    """Raise an error if MindFormers has no optimizer of the rule, or the states are not those of whole tensors."""
    kinds: Iterable[str] = ()
    if isinstance(optimizer, AdamW):
        kinds = (ADAMW, FUSED, FUSED_PYNATIVE)
    elif isinstance(optimizer, Muon) and not optimizer.normalize_rows:
        kinds = (ADAMW, MUON)
    if not kinds:
        raise ValueError(
            f"For '{TO}', MindFormers must have an optimizer of the same rule: it has AdamW, and Muon without "
            f"normalize_rows, but got {type(optimizer).__name__}."
        )
    if kind not in kinds:
        fail(ValueError, TO, "kind", f"one of {list(kinds)} for {type(optimizer).__name__}", kind)
    if optimizer.shares is not None:
        raise ValueError(
            f"For '{TO}', the states must not be shared out to several workers: load what merge_states returns into an "
            "optimizer without shard_states."
        )
