"""The header of a checkpoint's file: the entries, and the metadata with numbers, strings and checksums."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import zlib
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

DTYPES = {
    "BOOL": mstype.bool_,
    "U8": mstype.uint8,
    "I8": mstype.int8,
    "U16": mstype.uint16,
    "I16": mstype.int16,
    "F16": mstype.float16,
    "BF16": mstype.bfloat16,
    "U32": mstype.uint32,
    "I32": mstype.int32,
    "F32": mstype.float32,
    "U64": mstype.uint64,
    "I64": mstype.int64,
    "F64": mstype.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The kinds of tensors in a checkpoint.
KINDS = WEIGHT, STATE, MORE = "weight", "state", "more"
HEADER_BEGIN = b'{"__metadata__": {"format": "ms", "ms_optim": "'
HEADER_CHECKSUM = '"header_crc32": "'
NO_CHECKSUM = "0" * 8
# The version of the metadata's content. In version 1, a checksum does not depend on the order of a page's words, and
# a file does not say which save and run it is of.
VERSION = 2


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype for a dtype name of the format; MindSpore's own function logs a deprecation."""
    return Tensor(0, DTYPES[name]).asnumpy().dtype


class SpoiledError(ValueError):
    """A checkpoint is truncated, or some of its bits have changed since it was written."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a file comes from; a file of version 1 does not say.

    Attributes:
        save: Identifies the save: the parts of all workers have the same value, and no other save has it. Empty if
            the workers could not agree on one.
        run: Identifies the run, likewise. A run that resumes from a checkpoint is the same run.
        time: When it was saved, in ns since 1970; 0 if it is not known.
        rank: The worker whose part it is.
        count: Number of parts; 0 if it is not known.
    """

    save: str = ""
    run: str = ""
    time: int = 0
    rank: int = 0
    count: int = 0

    @classmethod
    def of(cls, told: Any) -> Origin | None:
        """Return an origin from the metadata; None if it is malformed."""
        types = {field.name: str if field.name in ("save", "run") else int for field in dataclasses.fields(cls)}
        if not isinstance(told, dict) or told.keys() != types.keys():
            return None
        if any(type(told[name]) is not kind for name, kind in types.items()):
            return None
        origin = cls(**told)
        return origin if 0 <= origin.rank < origin.count and origin.time >= 0 else None


class Entry(NamedTuple):
    """A tensor of a file: its kind, its dtype name in the format, its shape, its byte range and its checksum."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


class Header(NamedTuple):
    """What a header says: its version, the optimizer's step, the user's values, the file's origin, and the entries.

    `slices` has for each sliced tensor the index of the slice in this file and the number of slices; None in files of
    earlier versions of the package, which did not write it.
    """

    version: int
    step: int | None
    more: Any
    origin: Origin
    entries: dict[str, Entry]
    slices: dict[str, list[int]] | None


class Draft:
    """The header of a file that is being written.

    Args:
        entries: The tensors by name, with their kinds.
        step: The optimizer's step.
        more: The user's values as JSON.
        origin: Where the file comes from.
        slices: For each sliced tensor, the index of the slice in this file and the number of slices.

    Attributes:
        names: The names in the order of the file. Large dtypes come first, so that each tensor begins at a multiple
            of its item size.
    """

    names: list[str]

    def __init__(
        self,
        entries: dict[str, tuple[str, Tensor]],
        step: int | None,
        more: Any,
        origin: Origin,
        slices: dict[str, list[int]],
    ):
        self.names = sorted(entries, key=lambda name: -entries[name][1].itemsize)
        self._tensors, kinds, end = {}, [], 0
        for name in self.names:
            kind, tensor = entries[name]
            begin, end = end, end + tensor.nbytes
            layout = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            self._tensors[name] = layout
            kinds.append(kind)
        told = {"version": VERSION, "step": step, "more": more, "kinds": kinds, "from": dataclasses.asdict(origin)}
        told["slices"] = slices
        self._content = json.dumps(told)

    def size(self) -> int:
        """Return the number of bytes, which does not depend on the checksums."""
        return len(self._text(NO_CHECKSUM * len(self.names), NO_CHECKSUM))

    def written(self, sums: str) -> bytes:
        """Return the bytes with the checksums of the tensors, one after the other, and that of the header."""
        return self._text(sums, _header_checksum(self._text(sums, NO_CHECKSUM)))

    def _text(self, sums: str, own: str) -> bytes:
        metadata = {"format": "ms", "ms_optim": self._content, "checksums": sums, "header_crc32": own}
        text = json.dumps({"__metadata__": metadata, **self._tensors}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_header(path: pathlib.Path, file: BinaryIO, size: int) -> Header:
    """Read and check the header at the beginning of a file of `size` bytes.

    Raises:
        SpoiledError: If it has changed, or states another size.
        ValueError: If a later version of the package wrote it.
    """
    header, begin = _checked(path, file, size)
    told = _told(path, header)
    entries = None if told is None else _entries(header, told["kinds"], begin)
    if told is None or entries is None:
        raise SpoiledError(f"ms_optim: the header of the checkpoint {path} is not as ms_optim.save writes it.")
    end = max((entry.end for entry in entries.values()), default=begin)
    if size != end:
        what = "truncated" if size < end else "too long"
        raise SpoiledError(f"ms_optim: the checkpoint {path} is {what}: it has {size} bytes, not {end}.")
    return Header(told["version"], told["step"], told["more"], told["from"], entries, told.get("slices"))


def _header_checksum(header: bytes) -> str:
    return f"{zlib.crc32(header):08x}"


def _checked(path: pathlib.Path, file: BinaryIO, size: int) -> tuple[Any, int]:
    """Return the header and where the data begins; the header's checksum is correct."""
    length = int.from_bytes(file.read(8), "little")
    # Of a file of another kind, which may be large, only the beginning is read.
    raw = file.read(len(HEADER_BEGIN))
    is_ours = raw == HEADER_BEGIN
    raw += file.read(max(0, length - len(raw))) if is_ours and length <= size else b""
    before, key, after = raw.partition(HEADER_CHECKSUM.encode())
    blank = length.to_bytes(8, "little") + before + key + NO_CHECKSUM.encode() + after[8:]
    if len(raw) != length or not key or after[:8] != _header_checksum(blank).encode():
        hint = "" if is_ours else " Files of MindSpore are read by mindspore.load_checkpoint."
        raise SpoiledError(
            f"ms_optim: {path} is not a checkpoint of ms_optim.save, or its header is truncated or corrupted.{hint}"
        )
    try:
        return json.loads(raw), 8 + length
    except (ValueError, RecursionError):
        return None, 8 + length


def _told(path: pathlib.Path, header: Any) -> dict[str, Any] | None:
    """Return the content of the metadata; None if it is malformed."""
    match header:
        case {"__metadata__": {"ms_optim": str(text), "checksums": str()}}:
            pass
        case _:
            return None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or type(told.get("version")) is not int or told["version"] < 1:
        return None
    if told["version"] > VERSION:
        raise ValueError(f"ms_optim: the checkpoint {path} was written by a later version of ms_optim: update it.")
    step = told.get("step")
    if "more" not in told or not (step is None or _is_size(step)) or not isinstance(told.get("kinds"), list):
        return None
    if not _are_slices(told.get("slices", {})):
        return None
    told["from"] = Origin() if told["version"] == 1 else Origin.of(told.get("from"))
    return None if told["from"] is None else {**told, "step": step}


def _entries(header: dict[str, Any], kinds: list[Any], begin: int) -> dict[str, Entry] | None:
    """Return the entries by name; None if the header is malformed."""
    sums = header["__metadata__"]["checksums"]
    tensors = [(name, tensor) for name, tensor in header.items() if name != "__metadata__"]
    if len(kinds) != len(tensors) or len(sums) != 8 * len(tensors):
        return None
    entries, last = {}, 0
    for k, (name, tensor) in enumerate(tensors):
        match tensor:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [low, high]}:
                pass
            case _:
                return None
        if kinds[k] not in KINDS or dtype not in DTYPES or not all(map(_is_size, (low, high, *shape))):
            return None
        # The data of tensors follow each other without gaps.
        if low != last or high - low != math.prod(shape) * numpy_dtype(dtype).itemsize:
            return None
        entries[name] = Entry(kinds[k], dtype, tuple(shape), begin + low, begin + high, sums[8 * k : 8 * k + 8])
        last = high
    return entries


def _are_slices(value: Any) -> bool:
    """Return whether a value has the index of a slice and the number of slices by name."""
    places = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(p, list) and len(p) == 2 and all(map(_is_size, p)) and p[0] < p[1] for p in places)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
