"""The content of a checkpoint: collects weights, states and the user's own values, and restores them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, Tensor, nn

from ..arguments.checks import fail
from ..base.entries import EntryError, written_together
from ..states.shares import ENTRY
from ..workers.residuals import ENTRIES, LOCAL_ENTRY
from . import slices
from .file import File
from .fold import fold_residuals
from .header import DTYPES, MORE, NAMES, STATE, WEIGHT, SpoiledError
from .merge import merge_states
from .parts import Place, place_of

if TYPE_CHECKING:
    from ..base.any_optimizer import AnyOptimizer

DEEPEST = 100  # levels of nested values
OF_OPTIMIZER = "optimizer."  # before the name of a state that a weight of the network has, too


def gathered(
    net: nn.Cell | None, optimizer: AnyOptimizer | None, more: dict[str, Any]
) -> tuple[Any, dict[str, tuple[str, Tensor]]]:
    """Return the user's values as JSON, and all tensors of a checkpoint by name, with their kinds."""
    found: list[tuple[str, Tensor]] = []
    packed = _packed(more, MORE, found)
    everything = [(WEIGHT, name, p) for name, p in _weights("save", net, optimizer).items()]
    if optimizer is not None:
        optimizer._entries.swap.check_outside("save(..., optimizer)")
        weights = {name for _, name, _ in everything}
        states = optimizer._entries.own().items()
        everything += [(STATE, f"{OF_OPTIMIZER}{name}" if name in weights else name, p) for name, p in states]
    everything += [(MORE, name, tensor) for name, tensor in found]
    entries: dict[str, tuple[str, Tensor]] = {}
    for kind, name, tensor in everything:
        if name in entries or name == "__metadata__":
            raise ValueError(f"For 'save', each tensor must have a unique name, but two have the name {name!r}.")
        if tensor.dtype not in NAMES:
            raise TypeError(f"For 'save', {name!r} must have one of the dtypes {list(NAMES)}, but has {tensor.dtype}.")
        if isinstance(tensor, Parameter) and tensor.has_init:
            tensor.init_data()
        entries[name] = kind, tensor
    return packed, entries


def take(
    parts: list[File], net: nn.Cell | None, optimizer: AnyOptimizer | None, strict: bool, learning_rate: str
) -> tuple[int | None, dict[str, Any]]:
    """Load a checkpoint whose checksums are correct, and return its step and the user's values."""
    place = place_of(optimizer)
    own = parts[place.rank if len(parts) == place.count else 0]
    weights = _weights("load", net, optimizer)
    own_weights, own_states = _converted(parts, place, own, optimizer, weights)
    given = {name for name, entry in own.entries.items() if entry.kind == WEIGHT}
    missing, unknown = sorted(weights.keys() - given), sorted(given - weights.keys()) if net is not None else []
    if strict and (missing or unknown):
        what = f"lacks the weight {missing[0]!r}" if missing else f"has the weight {unknown[0]!r}, which is unknown"
        raise EntryError(
            f"For 'load', the checkpoint {own.path} {what} ({len(missing or unknown)} such weights). "
            "strict=False ignores weights that only one of the two has."
        )
    written = []
    for name in weights.keys() & given:
        p, entry = weights[name], own.entries[name]
        value = own_weights[name].asnumpy() if name in own_weights else own.array(name)
        if tuple(p.shape) != value.shape:
            raise ValueError(
                f"For 'load', the weight {name!r} must have the shape {p.shape}, but has {value.shape} in {own.path}."
            )
        if p.dtype != DTYPES[entry.dtype]:
            raise TypeError(
                f"For 'load', the weight {name!r} must be of dtype {p.dtype}, but is {DTYPES[entry.dtype]} in "
                f"{own.path}."
            )
        written.append((p, value))
    if optimizer is not None:
        states = _states(parts, own, optimizer, own_states)
        try:
            written += optimizer._entries.fitting(states, strict, written, learning_rate)
        except EntryError as error:
            raise EntryError(f"{error} The checkpoint is {own.path}.") from None
    more = unpacked(own)
    written_together(written)
    if optimizer is not None:
        optimizer._run = parts[0].origin.run
    return own.step, more


def _states_in(part: File) -> dict[str, Tensor]:
    """Return the states in a file by their names in the optimizer."""

    def name_of(entry):
        name = entry.removeprefix(OF_OPTIMIZER)
        return name if name in part.entries and part.entries[name].kind == WEIGHT else entry

    return {name_of(entry): tensor for entry, tensor in part.tensors(STATE).items()}


def _converted(
    parts: list[File], place: Place, own: File, optimizer: AnyOptimizer | None, weights: dict[str, Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the states of this worker, if others saved their own ones; empty if its part has them."""
    if slices.are_others(parts, place, optimizer):
        wanted = slices.wanted(optimizer, weights)
        if slices.places_of(optimizer):
            slices.check_others(parts, wanted)
        saved, first = [part.tensors(WEIGHT) for part in parts], parts.index(own)
        cuts = slices.cuts(parts, saved, wanted)
        states = {} if optimizer is None else slices.cut_states(_states_of_slices(parts), first, cuts)
        return slices.cut_weights(saved, first, cuts), states
    if optimizer is None or len(parts) == place.count or not any(entry in parts[0].entries for entry in ENTRIES):
        return {}, {}
    # With local steps, the weights differ, too.
    has_weights = LOCAL_ENTRY in parts[0].entries
    folded = fold_residuals(
        [(part.tensors(WEIGHT) if has_weights else {}) | _states_in(part) for part in parts], place.count
    )
    given, worker = _states_in(own), folded[place.rank]
    return worker, {name: value for name, value in worker.items() if name in given}


def _states_of_slices(parts: list[File]) -> list[dict[str, Tensor]]:
    """Return for each part all states of its slices, which those with the same slices may have shared."""
    states = [_states_in(part) for part in parts]
    if ENTRY not in states[0]:
        return states
    alike = [[k for k, other in enumerate(parts) if other.slices == part.slices] for part in parts]
    merged = {those[0]: merge_states([states[k] for k in those]) for those in alike}
    return [merged[those[0]] for those in alike]


def _states(parts: list[File], own: File, optimizer: AnyOptimizer, converted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the states that this worker loads: those that were converted, if there are any."""
    if converted:
        return converted
    given = _states_in(own)
    if ENTRY in given:
        same = optimizer.shares and given[ENTRY].asnumpy().tobytes() == optimizer.state_shares.asnumpy().tobytes()
        return given if same else merge_states([_states_in(part) for part in parts])
    return given


def _weights(function: str, net: nn.Cell | None, optimizer: AnyOptimizer | None) -> dict[str, Parameter]:
    """Return each weight once: the parameters of the network, then further parameters that the optimizer updates."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    named: Iterable[tuple[str, Parameter]] = ()
    if optimizer is not None:
        own = optimizer._entries.own()
        seen = {id(p) for p in (*own.values(), optimizer.statistics)}
        named = [(name, p) for name, p in optimizer._entries.named().items() if name not in own]
    placed = [] if net is None else [(p.name, p) for p in net.get_parameters()]
    for name, p in (*placed, *named):
        if id(p) in seen:
            continue
        if name in found:
            raise ValueError(f"For '{function}', two parameters have the name {name!r}: give each a unique name.")
        seen.add(id(p))
        found[name] = p
    return found


def _packed(value: Any, place: str, tensors: list[tuple[str, Tensor]], depth: int = 0) -> Any:
    """Return a value as JSON, and append the Tensors in it to a list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append((place, value))
        return {"tensor": place}
    name = place.removeprefix(f"{MORE}.")
    if depth > DEEPEST:
        top = name.partition(".")[0]
        raise ValueError(f"For 'save', {top!r} must be nested at most {DEEPEST} levels deep, but is nested deeper.")
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(v, f"{place}.{k}", tensors, depth + 1) for k, v in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(v, f"{place}.{key}", tensors, depth + 1) for key, v in value.items()}}
    what = "a number, string, bool, None, Tensor, or a list, tuple or dict of these with strings as keys"
    return fail(TypeError, "save", name, what, value)


def unpacked(file: File) -> dict[str, Any]:
    """Return the user's values in a file.

    Raises:
        SpoiledError: If they are not in the form that they are saved in.
    """
    try:
        values = _unpacked(file.more, file)
    except (LookupError, RecursionError, TypeError):
        values = None
    if not isinstance(values, dict):
        raise SpoiledError(f"ms_optim: the further values of the checkpoint {file.path} are not as they are saved.")
    return values


def _unpacked(value: Any, file: File) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case {"tensor": str(held), **rest} if not rest and file.entries[held].kind == MORE:
            return Tensor(file.array(held), DTYPES[file.entries[held].dtype])
        case {"dict": dict(held), **rest} if not rest:
            return {key: _unpacked(v, file) for key, v in held.items()}
        case {"list": list(held), **rest} if not rest:
            return [_unpacked(v, file) for v in held]
        case {"tuple": list(held), **rest} if not rest:
            return tuple(_unpacked(v, file) for v in held)
    raise TypeError(value)
