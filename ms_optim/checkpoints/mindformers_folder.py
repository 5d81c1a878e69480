"""Folders of checkpoints that MindFormers' trainers write: the states of its fused AdamW renamed, and the reverse.

The trainers load a state by its name and pass over a name that is missing. A folder has a file of the optimizer for
each process, ``*-opt-*.safetensors`` ; of several processes, ``metadata.json`` says which file has which tensor.
"""

from __future__ import annotations

import ast
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from .header import numpy_dtype
from .mindformers import ADAMW, FUSED, FUSED_PYNATIVE, OF_FUSED, SHORT, STEP, kind_of, name_there, names_here

FUNCTION = "mindformers-checkpoint"
HERE = "MsOptimAdamW"
COMMON, METADATA, OF_OPTIMIZER = "common.json", "metadata.json", "*-opt-*.safetensors"


def convert(source: pathlib.Path, target: pathlib.Path, to: str) -> int:
    """Write a folder with the states of AdamW under the names, and with the step count, of another AdamW.

    Args:
        source: The folder ``iteration_...`` of a checkpoint.
        target: The folder to write, which must not exist.
        to: The optimizer that will load it: "MsOptimAdamW", "FusedAdamW" or "AdamW with enable_fused_opt".

    Returns:
        The number of steps taken.

    Raises:
        ValueError: If there is nothing to convert, or the states are not float32 moments of AdamW.
        FileExistsError: If `target` exists.
    """
    headers = {path: _header(path) for path in sorted(source.glob(OF_OPTIMIZER))}
    if not headers:
        raise ValueError(f"For '{FUNCTION}', the folder {source} has no file {OF_OPTIMIZER}.")
    if target.exists():
        raise FileExistsError(f"For '{FUNCTION}', the folder {target} must not exist.")
    entries = {name: entry for header in headers.values() for name, entry in header.items() if name != "__metadata__"}
    rename, change = _of(source, headers, entries, to)
    unfinished = target.with_name(target.name + ".tmp")
    unfinished.mkdir(parents=True)
    steps = 0
    for path in source.iterdir():
        copy = unfinished / path.name
        if path in headers:
            steps = max(steps, _write(path, copy, headers[path], rename, change))
        elif path.name == METADATA:
            copy.write_text(json.dumps(_metadata(json.loads(path.read_text()), rename)))
        elif path.is_file():
            shutil.copyfile(path, copy)
    unfinished.rename(target)
    return steps + SHORT.get(to, 0)


def _of(source, headers, entries, to) -> tuple[Callable[[str], str], int]:
    """Return how names change, and what is added to the step count."""
    here = names_here({name: tuple(entry["shape"]) for name, entry in entries.items()}, FUNCTION)
    kind = kind_of(entries)
    if to == HERE:
        counted = [_step(path, header) for path, header in headers.items() if STEP in header]
        if kind == ADAMW and counted and _steps_said(source) - counted[0] == SHORT[FUSED_PYNATIVE]:
            kind = FUSED_PYNATIVE
        if kind not in (FUSED, FUSED_PYNATIVE):
            raise ValueError(
                f"For '{FUNCTION}', the folder {source} has the states of {kind}, which have the same names and step "
                "count here: load it as it is."
            )
        return lambda name: here.get(name, name), SHORT[kind]
    dtypes = {entry["dtype"] for name, entry in entries.items() if name.partition(".")[0] in OF_FUSED.values()}
    if kind != ADAMW or dtypes != {"F32"}:
        raise ValueError(
            f"For '{FUNCTION}', the folder {source} must have float32 states of MsOptimAdamW. To convert others, load "
            "them into the optimizer, and save what to_mindformers returns."
        )
    return lambda name: name_there(name, to), -SHORT[to]


def _steps_said(source: pathlib.Path) -> int:
    """Return how many steps the trainer says it has taken."""
    path = source / COMMON
    return int(json.loads(path.read_text())[STEP]) if path.exists() else 0


def _begin(file: BinaryIO) -> int:
    """Return where the data of a file begins; its header comes next."""
    return 8 + int.from_bytes(file.read(8), "little")


def _header(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return json.loads(file.read(_begin(file) - 8))


def _step(path: pathlib.Path, header: dict[str, Any]) -> int:
    """Return the step count in a file of the optimizer."""
    begin, end = header[STEP]["data_offsets"]
    with path.open("rb") as file:
        file.seek(_begin(file) + begin)
        return int(np.frombuffer(file.read(end - begin), numpy_dtype(header[STEP]["dtype"]))[0])


def _write(path, target, header, rename, change) -> int:
    """Copy a file with other names, and with another step count, which is returned."""
    renamed = json.dumps({rename(name): entry for name, entry in header.items()}).encode()
    renamed += b" " * (-len(renamed) % 8)
    with path.open("rb") as file, target.open("wb") as copy:
        file.seek(_begin(file))
        copy.write(len(renamed).to_bytes(8, "little") + renamed)
        shutil.copyfileobj(file, copy, 2**24)
        if STEP not in header:
            return 0
        step = np.array([_step(path, header) + change], numpy_dtype(header[STEP]["dtype"]))
        copy.seek(8 + len(renamed) + header[STEP]["data_offsets"][0])
        copy.write(step.tobytes())
        return int(step[0])


def _metadata(content: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the content of metadata.json with other names; a key of `storage_data` is a name and an offset."""
    tensors = {rename(name): value for name, value in content["state_dict_metadata"].items()}
    stored = {}
    for key, value in content["storage_data"].items():
        name, offset = ast.literal_eval(key)
        stored[str((rename(name), offset))] = value
    return {**content, "state_dict_metadata": tensors, "storage_data": stored}
