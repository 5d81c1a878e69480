"""Merges the shares of all workers into one state dict; each share states which parts of the states it has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ..states.shares import ENTRY, _description


def merge_states(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the shares of all workers into one full state dict.

    Any optimizer of the same rule can load it: one that keeps all states, or one that shards them over any number of
    workers, where each worker takes its share.

    Args:
        states (list[dict[str, Tensor]]): What ``state_dict()`` returned on each worker of an optimizer with
            ``shard_states=True``, or what ``load_checkpoint`` read from a file of it, in any order.

    Returns:
        dict[str, Tensor], the states by name in the shapes of the parameters; entries that are not sharded come from
        the first dict.

    Raises:
        TypeError: If `states` is not a list of dicts.
        ValueError: If it is empty, or one is not a share, or shares are missing, appear more than once, are of
            different steps, or do not fit together.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, merge_states
        >>> net = nn.Dense(4, 3)
        >>> optimizer = AdamW(net.trainable_params(), shard_states=True)
        >>> full = optimizer.state_dict()  # with several processes: merge_states([...])
        >>> optimizer.load_state_dict(full)
    """
    if not isinstance(states, (list, tuple)) or not all(isinstance(state, dict) for state in states):
        raise TypeError(f"For 'merge_states', 'states' must be a list of dicts, but got {type(states).__name__}.")
    for key, value in (entry for state in states for entry in state.items()):
        if not isinstance(value, Tensor):
            raise TypeError(f"For 'merge_states', the entry {key!r} must be a Tensor, but got {type(value).__name__}.")
    if not states or not all(ENTRY in state for state in states):
        which = [k for k, state in enumerate(states) if ENTRY not in state]
        what = f"states[{which[0]}] has none" if which else "it is empty"
        raise ValueError(
            f"For 'merge_states', each of 'states' must have the entry '{ENTRY}', which optimizers with "
            f"shard_states=True on several workers write, but {what}."
        )
    told = [_description("merge_states", state) for state in states]
    count, found = told[0]["workers"], sorted(one["worker"] for one in told)
    if any(one["workers"] != count for one in told) or found != list(range(count)):
        raise ValueError(
            f"For 'merge_states', 'states' must be the shares of workers 0 to {count - 1} of {count}, but got those of "
            f"{[(one['worker'], one['workers']) for one in told]}."
        )
    steps = [int(state["global_step"].asnumpy().reshape(-1)[0]) for state in states if "global_step" in state]
    if len(set(steps)) > 1:
        raise ValueError(f"For 'merge_states', all shares must be of the same step, but got those of steps {steps}.")
    sharded = {key for one in told for key in one["parts"]} | {ENTRY}
    full = {key: Tensor(value.asnumpy(), value.dtype) for key, value in states[0].items() if key not in sharded}
    parts: dict[str, list] = {}
    for state, one in zip(states, told):
        for key, (ends, shape) in one["parts"].items():
            if key not in state or state[key].shape != (ends[1] - ends[0],):
                came = f"has the shape {state[key].shape}" if key in state else "is missing"
                raise ValueError(
                    f"For 'merge_states', the entry {key!r} of worker {one['worker']} must have the shape "
                    f"{(ends[1] - ends[0],)}, but {came}."
                )
            parts.setdefault(key, []).append((ends, shape, state[key]))
    for key, found in parts.items():
        found.sort(key=lambda part: part[0])
        ranges, shapes, tensors = zip(*found)
        begins, ends = zip(*ranges)
        agree = all(shape == shapes[0] for shape in shapes) and len({part.dtype for part in tensors}) == 1
        if not agree or begins != (0, *ends[:-1]) or ends[-1] != math.prod(shapes[0]):
            raise ValueError(
                f"For 'merge_states', the parts of the entry {key!r} must form a tensor of shape {tuple(shapes[0])} "
                f"and of one dtype, but are the elements {list(ranges)}."
            )
        full[key] = Tensor(np.concatenate([part.asnumpy() for part in tensors]).reshape(shapes[0]), tensors[0].dtype)
    return full
