"""Checkpoints that are written atomically, so that they survive a killed process, and that detect flipped bits.

A checkpoint is a safetensors file with checksums in its metadata. Its tensors are weights, states and the user's own
Tensors. Numbers, strings and dicts are stored as JSON in the metadata.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import nn

from ..arguments.checks import check_choice, check_type, fail
from ..base.any_optimizer import AnyOptimizer, is_any_optimizer
from ..base.state_dict import LEARNING_RATE
from .content import gathered, take, unpacked
from .file import write_file
from .header import SpoiledError
from .parts import checkpoints_in, origin_of, part_path, place_of, step_of
from .slices import places_of

if TYPE_CHECKING:
    from ..arguments.checks import FilePath
    from ..base.any_optimizer import AnyOptimizer


class Loaded(NamedTuple):
    """The content of a checkpoint other than weights and states.

    Attributes:
        step: The optimizer's `global_step`, which does not count skipped steps; None if no optimizer was saved.
        more: The further values that were passed to :func:`save`, by name. Its Tensors are new objects.
    """

    step: int | None
    more: dict[str, Any]


def save(path: FilePath, net: nn.Cell | None = None, optimizer: AnyOptimizer | None = None, **more: Any) -> None:
    """Save weights, states and all other values that a run needs to resume.

    The new file is written next to the old one and replaces it after all data is on disk. A process that is killed at
    any time leaves either the old or the new file. Every tensor and the header have a checksum. No data is copied in
    host memory. The file has the safetensors format, so ``mindspore.load_checkpoint(path, format="safetensors")`` can
    also read its tensors.

    Call it on all processes. If states differ between workers, each worker saves a part: `run.0-of-4.safetensors` for
    `run.safetensors`. States differ with ``shard_states=True``, with a `shard_group`, with DGCMomentum and with
    LocalSteps; the workers then wait for each other and agree on a value that identifies the save. Otherwise the first
    process saves for all. A killed run may leave old and new parts, which :func:`load` does not mix: give each step a
    unique file name, as :class:`CheckpointSaver` does, so that a complete checkpoint exists at any time.

    Args:
        path (Union[str, PathLike]): The file; its folder must exist. Its name should end with `.safetensors`.
        net (Union[Cell, None]): The network, whose parameters are saved by name; it may be ``model.train_network``.
            Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Its states are saved by their names from
            construction, and so are its weights that are not in `net`. Default: ``None`` .
        more: Further values to save, by name: numbers, strings, bools, None, Tensors, and lists, tuples and dicts of
            these.

    Returns:
        None.

    Raises:
        TypeError: If an argument has the wrong type, or a tensor has a dtype that the format lacks.
        ValueError: If two tensors have the same name, or values are nested more than 100 levels deep.
        OSError: If `path` is a folder, its folder does not exist, or the file cannot be written. The old file is kept.

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, load, save
        >>> net, folder = nn.Dense(4, 3), tempfile.TemporaryDirectory()
        >>> optimizer = AdamW(net.trainable_params())
        >>> save(folder.name + "/run.safetensors", net, optimizer, epoch=3, best={"accuracy": 0.5})
        >>> step, more = load(folder.name + "/run.safetensors", net, optimizer)
        >>> print(step, more)
        0 {'epoch': 3, 'best': {'accuracy': 0.5}}
    """
    _check_arguments("save", path, net, optimizer)
    path = pathlib.Path(path)
    _check_place(path)
    place = place_of(optimizer)
    origin = origin_of(place, optimizer)
    packed, entries = gathered(net, optimizer, more)
    if place.saves:
        write_file(
            part_path(path, place.rank, place.count), step_of(optimizer), packed, entries, origin, places_of(optimizer)
        )
        if optimizer is not None:
            optimizer._run = origin.run


def load(
    path: FilePath,
    net: nn.Cell | None = None,
    optimizer: AnyOptimizer | None = None,
    strict: bool = True,
    learning_rate: str = "load",
) -> Loaded:
    """Load what :func:`save` wrote.

    Everything is checked before anything is changed: the header, the checksum of every tensor, names, shapes and
    dtypes. If an error is raised, nothing is changed. Values are written in place, so that compiled graphs also use
    them. An interrupt (Ctrl-C) leaves either all old values or all new ones.

    If checkpoints of several numbers of workers have the name `path`, the one that was saved last is loaded; if it is
    corrupted or incomplete, the one before, with a warning. If the number of workers has changed, sharded states and
    DGCMomentum's residuals are merged and redistributed, and slices of a `shard_group` are cut anew. If `state_dtype`
    has changed, states are converted.

    Args:
        path (Union[str, PathLike]): The file, or the folder of a :class:`CheckpointSaver`. From a folder, the last
            checkpoint that is neither corrupted nor incomplete is loaded, with a warning for each later one.
        net (Union[Cell, None]): The network. Default: ``None`` .
        optimizer (Union[FusedOptimizer, LocalSteps, None]): The optimizer. Its weights that are not in `net` are also
            loaded. Default: ``None`` .
        strict (bool): Whether it is an error if the checkpoint lacks a name, or has a name that neither `net` nor
            `optimizer` has; if ``False`` , such names are ignored. Default: ``True`` .
        learning_rate (str): ``"load"`` loads the learning rates, if they are numbers or Iterables; ``"keep"`` keeps
            those that `optimizer` was made with, numbers or schedules. Default: ``"load"`` .

    Returns:
        Loaded, the step and the further values.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        SpoiledError: If it is truncated or corrupted, or a worker's part is missing or from another save. It is a
            ValueError.
        TypeError: If an argument has the wrong type, or a tensor another dtype.
        ValueError: If a tensor has another shape, slices do not fit together, or `learning_rate` is not one of these.
        KeyError: If `strict` and a name is missing or unknown. It is also a ValueError.

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from ms_optim import LANS, load, save
        >>> net, folder = nn.Dense(4, 3), tempfile.TemporaryDirectory()
        >>> optimizer = LANS(net.trainable_params(), 0.1)
        >>> save(folder.name + "/run.safetensors", net, optimizer, seed=1)
        >>> step, more = load(folder.name + "/run.safetensors", net, optimizer)
        >>> print(step, more)
        0 {'seed': 1}
    """
    return loaded_from(path, net, optimizer, strict, learning_rate)[0]


def loaded_from(
    path: FilePath, net: nn.Cell | None, optimizer: AnyOptimizer | None, strict: bool, learning_rate: str
) -> tuple[Loaded, pathlib.Path]:
    """Load a checkpoint; return what :func:`load` returns, and the checkpoint's path."""
    _check_arguments("load", path, net, optimizer)
    check_type("load", "strict", strict, bool)
    check_choice("load", "learning_rate", learning_rate, LEARNING_RATE)
    path = pathlib.Path(path)
    found = checkpoints_in(path)
    if not found:
        what = f"no checkpoint of a CheckpointSaver in the folder {path}" if path.is_dir() else f"no checkpoint {path}"
        raise FileNotFoundError(f"ms_optim: there is {what}.")
    spoiled: list[SpoiledError] = []
    for one in found:
        try:
            # Every worker checks all parts, so that all workers resume from the same checkpoint.
            for part in (parts := one.parts()):
                part.check()
                unpacked(part)
        except SpoiledError as error:
            spoiled.append(error)
            continue
        for error in spoiled:
            warnings.warn(f"{error} The run resumes from {one.path}.", stacklevel=3)
        return Loaded(*take(parts, net, optimizer, strict, learning_rate)), one.path
    raise spoiled[0]


def _check_arguments(function: str, path: Any, net: Any, optimizer: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        fail(TypeError, function, "path", "a path", path)
    if net is not None and not isinstance(net, nn.Cell):
        fail(TypeError, function, "net", "a Cell or None", net)
    if optimizer is not None and not is_any_optimizer(optimizer):
        fail(TypeError, function, "optimizer", "an optimizer of ms_optim or None", optimizer)


def _check_place(path: pathlib.Path) -> None:
    """Check that a file can be saved at a path."""
    if path.is_dir():
        raise IsADirectoryError(f"For 'save', the argument 'path' must be a file, but {str(path)!r} is a folder.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"For 'save', the folder {str(path.parent)!r} of 'path' does not exist: create it first."
        )
