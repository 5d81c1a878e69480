"""Distributed tensors (DTensors): the optimizer updates this process's shards and exposes states as DTensors.

A DTensor of the package hyper_parallel is also a Parameter. Its `shape` is that of the whole tensor. `to_local()`
returns the shard that this process holds; `device_mesh` and `placements` state how the whole tensor is sharded. This
module imports nothing from that package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Parameter, Tensor

from ..arguments.checks import fail
from ..states.inventory import rows_of


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """Return this process's shard of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if is_distributed(tensor) else tensor


class LocalShards:
    """Plain Parameters in the memory of this process's shards.

    Args:
        optimizer: Name of the optimizer's class, for errors.
        groups: The groups of parameters, as dicts.
        sums_over_shards: Whether a step needs sums over whole tensors, such as norms. Then sharded parameters get the
            group key `shard_group`.
        has_axis: Whether they also get the key `shard_axis`.

    Attributes:
        groups: The groups with plain Parameters instead of DTensors, in the same order.
    """

    groups: list[dict[str, Any]]

    def __init__(
        self, optimizer: str, groups: Sequence[Mapping[str, Any]], sums_over_shards: bool, has_axis: bool = False
    ):
        self._optimizer = optimizer
        self._whole: dict[str, Any] = {}
        self._pairs: list[tuple[Parameter, Any]] = []
        self.groups = []
        for group in groups:
            for p in group["params"]:
                keys = divided(optimizer, p, has_axis) if sums_over_shards and is_distributed(p) else {}
                settings = {key: value for key, value in group.items() if key != "params"} | keys
                last = self.groups[-1] if self.groups else {}
                # Parameters keep their order, which is the order of the gradients.
                if {key: value for key, value in last.items() if key != "params"} != settings or not last:
                    self.groups.append(settings | {"params": []})
                self.groups[-1]["params"].append(self._plain(p))

    def _plain(self, p: Any) -> Parameter:
        if not is_distributed(p):
            return p
        shard = p.to_local()
        plain = Parameter(Tensor(shard.asnumpy(), shard.dtype), name=p.name, requires_grad=p.requires_grad)
        plain.set_data(shard)
        self._whole[p.name] = p
        self._pairs.append((plain, p))
        return plain

    def follow(self) -> None:
        """Point the plain Parameters to the current memory of the shards."""
        for plain, whole in self._pairs:
            shard = whole.to_local()
            if plain.data_ptr() != shard.data_ptr():
                plain.set_data(shard)

    def whole(self, parameters: Iterable[Parameter]) -> tuple[Any, ...]:
        """Return parameters of the network, with DTensors instead of plain Parameters."""
        return tuple(self._whole.get(p.name, p) for p in parameters)

    def distribute(self, states: Iterable[Parameter]) -> None:
        """Create DTensors for the states of elements and of rows; checkpoints read and write these."""
        for state in states:
            p = self._whole.get(state.name.partition(".")[2])
            if p is None or (placements := self._placements(state, p)) is None:
                continue
            kind = next(base for base in type(p).__mro__ if base.__name__ == "DTensor")
            if state.has_init:
                state.init_data()
            whole = Parameter(kind.from_local(state, p.device_mesh, placements), name=state.name, requires_grad=False)
            self._whole[state.name] = whole
            self._pairs.append((state, whole))

    def _placements(self, state: Parameter, p: Any) -> tuple[Any, ...] | None:
        """Return how a state of a DTensor is sharded; None if it has neither its elements nor its rows."""
        shape, own = tuple(state.shape), tuple(p.to_local().shape)
        if shape == own:
            return tuple(p.placements)
        if shape != (rows_of(own),):
            return None
        if any(is_shard(placement) and placement.dim == 1 for placement in p.placements) and len(own) == 3:
            what = f"sharded along another dimension than 1 for a state of the rows of {p.name!r}, a batch of matrices"
            fail(ValueError, self._optimizer, "params", what, tuple(p.placements))
        return tuple(_of_rows(placement) for placement in p.placements)

    def named(self, parameters: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Any]]:
        """Yield the path and parameter of all that an optimizer holds, with DTensors instead of plain Parameters."""
        for path, p in parameters:
            yield path, self._whole.get(p.name, p)


def is_shard(placement: Any) -> bool:
    """Return whether a placement divides a tensor along one of its dimensions."""
    return type(placement).__name__ == "Shard"


def _of_rows(placement: Any) -> Any:
    """Return the placement of one number for each row; each process has those of all rows that it has a part of."""
    if is_shard(placement) and placement.dim > 0:
        return sys.modules[type(placement).__module__].Replicate()
    return placement


def divided(optimizer: str, p: Any, has_axis: bool) -> dict[str, Any]:
    """Return the group keys of a sharded DTensor; none if this process holds the whole tensor."""
    along = [k for k, placement in enumerate(p.placements) if type(placement).__name__ != "Replicate"]
    if not along:
        return {}
    placement = p.placements[along[0]]
    if len(along) > 1 or not is_shard(placement):
        what = f"sharded by Shard along at most one dimension of the device mesh, for sums over {p.name!r}"
        fail(ValueError, optimizer, "params", what, tuple(p.placements))
    keys = {"shard_group": p.device_mesh.get_group(along[0])}
    return keys | {"shard_axis": placement.dim} if has_axis else keys
