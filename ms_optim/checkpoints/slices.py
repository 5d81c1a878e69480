"""Slices of tensors in a checkpoint: those that some processes saved are cut into those of others.

Each part states which slices it has: the index of its slice of each tensor, and their number. The shapes in the parts
and those of the optimizer tell along which dimension tensors are sliced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor

from ..states.formats import OF_DTYPE
from ..states.inventory import rows_of
from ..states.layout import Slices
from ..workers.residuals import LOCAL_ENTRY
from .header import WEIGHT, SpoiledError

if TYPE_CHECKING:
    from mindspore import Parameter
    from numpy.typing import NDArray

    from ..base.any_optimizer import AnyOptimizer
    from .file import File
    from .parts import Place

    Places = dict[str, list[int]]


def places_of(optimizer: AnyOptimizer | None) -> Places:
    """Return for each sliced tensor the index of this process's slice, and the number of slices."""
    if optimizer is None:
        return {}
    return {name: [slices.own, len(slices.shapes)] for name, slices in optimizer._layout.slices.items()}


def are_others(parts: Sequence[File], place: Place, optimizer: AnyOptimizer | None) -> bool:
    """Return whether the slices in a checkpoint are not those of this process.

    Raises:
        ValueError: If they are not, and the checkpoint does not say which they are, or has what each worker of local
            steps keeps for itself.
    """
    own = places_of(optimizer)
    if len(parts) == place.count and parts[place.rank].slices in (own, None):
        return False
    if any(part.slices for part in parts) and LOCAL_ENTRY in parts[0].entries:
        raise ValueError(
            f"For 'load', the checkpoint {parts[0].path} of local steps with sliced tensors must be loaded on as many "
            f"processes as saved it, {len(parts)}, with the same slices."
        )
    if own and any(part.slices is None for part in parts):
        raise ValueError(
            f"For 'load', the optimizer's tensors are sliced over {place.count} processes, but the checkpoint "
            f"{parts[0].path} has {len(parts)} parts. An earlier version of ms_optim wrote it, and did not save which "
            f"slices they are: load it on {len(parts)} processes, and save it again."
        )
    return bool(own) or any(part.slices for part in parts)


def wanted(optimizer: AnyOptimizer | None, weights: Mapping[str, Parameter]) -> dict[str, Slices]:
    """Return the slices of each weight in the processes that load; without an optimizer, weights are whole."""
    whole = {name: Slices(0, (tuple(p.shape),)) for name, p in weights.items()}
    if optimizer is None:
        return whole
    layout = optimizer._layout
    return {name: Slices(0, (shape,)) for name, shape in zip(layout.names, layout.shapes)} | dict(layout.slices)


def of_saved(parts: Sequence[File], name: str) -> list[int]:
    """Return for each slice of a tensor, in order, the first part that has it; one part for a tensor that is whole.

    Raises:
        SpoiledError: If no part has one of the slices.
    """
    told = [(part.slices or {}).get(name) for part in parts]
    count = next((place[1] for place in told if place is not None), 0)
    if count == 0:
        return [0]
    found = [next((k for k, place in enumerate(told) if place == [i, count]), -1) for i in range(count)]
    if -1 in found:
        raise SpoiledError(
            f"ms_optim: the checkpoint {parts[0].path} lacks slice {found.index(-1)} of {count} of the tensor {name!r}."
        )
    return found


def cuts(
    parts: Sequence[File], weights: Sequence[Mapping[str, Tensor]], slices: Mapping[str, Slices]
) -> dict[str, Cut]:
    """Return how this process's slice of each tensor is cut from those that were saved; no whole tensor is in it.

    Args:
        parts: The files of the checkpoint.
        weights: Their weights by name.
        slices: What :func:`wanted` returned.

    Raises:
        SpoiledError: If no part has one of the slices.
        ValueError: If a tensor's slices do not make the tensor of which this process has a slice.
    """
    found = {}
    for name, own in slices.items():
        holders = of_saved(parts, name)
        is_whole = len(holders) == len(own.shapes) == 1
        if not is_whole and all(name in weights[k] for k in holders):
            found[name] = Cut(name, holders, [weights[k][name].shape for k in holders], own)
    return found


def cut_weights(weights: Sequence[Mapping[str, Tensor]], first: int, cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """Return this process's weights from those in each part; whole ones from the part `first`."""
    sliced = {name: _tensor(cut([each[name].asnumpy() for each in cut.of(weights)])) for name, cut in cuts.items()}
    return {**weights[first], **sliced}


def cut_states(states: Sequence[Mapping[str, Tensor]], first: int, cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """Return this process's states from those in each part; those of whole tensors from the part `first`.

    Codes are decoded, because the blocks of other slices begin elsewhere.
    """
    found = dict(states[first])
    for entry in states[first]:
        prefix, _, name = entry.partition(".")
        is_scale = prefix.endswith("_scale") and f"{prefix.removesuffix('_scale')}.{name}" in states[first]
        if is_scale or name not in cuts:
            continue
        cut, arrays, scale = cuts[name], [], f"{prefix}_scale.{name}"
        for each, shape in zip(cut.of(states), cut.saved):
            state, has_codes = each[entry], scale in each
            arrays.append(OF_DTYPE[state.dtype].decode(state, each[scale], shape) if has_codes else state.asnumpy())
        found[entry] = _tensor(cut(arrays))
        found.pop(scale, None)
    return found


def _tensor(array: NDArray[Any]) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))


class Cut:
    """Puts a tensor together from the slices that were saved, and cuts this process's slice from it.

    Args:
        name: The tensor's name, for the error.
        holders: The parts with the slices that were saved.
        saved: The shapes of the slices that were saved.
        own: The slices of the processes that load.
    """

    def __init__(self, name: str, holders: Sequence[int], saved: Sequence[tuple[int, ...]], own: Slices):
        self.holders, self.saved, self.own = holders, list(saved), own
        self.are_the_same = self.saved == list(own.shapes)
        # With other numbers of slices, or slices of other lengths, at most one dimension fits.
        axes = [axis for axis in range(len(saved[0])) if _fits(self.saved, own.shapes, axis)]
        if not axes and not self.are_the_same:
            raise ValueError(
                f"For 'load', the slices of {name!r} must make one tensor, sliced along one dimension, but those of "
                f"the checkpoint have the shapes {self.saved}, and those to load {list(own.shapes)}. "
                "Without an optimizer, weights are whole tensors."
            )
        self.axis = axes[0] if axes else 0

    def of(self, entries: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """Return the entries of the parts that have the slices, in the order of the slices."""
        return [entries[k] for k in self.holders]

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return this process's slice of a weight or state."""
        if self.are_the_same:
            return arrays[self.own.own]
        shapes = [x.shape for x in arrays]
        if shapes == self.saved:
            return self._of_whole(arrays)
        # A state with one number for each row.
        dimensions = 2 if len(self.saved[0]) == 3 else 1
        if self.axis < dimensions and shapes == [(rows_of(shape),) for shape in self.saved]:
            rows = [x.reshape(shape[:dimensions]) for x, shape in zip(arrays, self.saved)]
            return self._of_whole(rows).reshape(-1)
        return arrays[0]

    def _of_whole(self, arrays):
        begin = sum(shape[self.axis] for shape in self.own.shapes[: self.own.own])
        end = begin + self.own.shapes[self.own.own][self.axis]
        return np.concatenate(arrays, self.axis).take(range(begin, end), self.axis)


def _fits(saved, own, axis):
    """Return whether slices along an axis make the same tensor."""
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in (*saved, *own)}
    same_rank = {len(shape) for shape in (*saved, *own)} == {len(saved[0])}
    return same_rank and len(others) == 1 and sum(s[axis] for s in saved) == sum(s[axis] for s in own)


def check_others(parts: Sequence[File], slices: Mapping[str, Slices]) -> None:
    """Check that all parts agree on the weights that the optimizer does not know, and so may be slices.

    Raises:
        ValueError: If one differs.
    """
    names = {name for part in parts for name, entry in part.entries.items() if entry.kind == WEIGHT} - slices.keys()
    sums = {n: {part.entries[n].checksum if n in part.entries else "" for part in parts} for n in names}
    if differing := sorted(name for name in names if len(sums[name]) > 1):
        raise ValueError(
            f"For 'load', the weight {differing[0]!r} differs between the processes that saved it ({len(differing)} "
            "such weights), and cannot be cut into other slices, because the optimizer does not know it: load the "
            f"checkpoint on {len(parts)} processes, or leave such weights out by a 'net' without them."
        )
