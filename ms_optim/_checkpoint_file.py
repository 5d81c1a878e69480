"""One file of a checkpoint, in the safetensors format: writes it atomically, reads and checks it.

The header's metadata holds numbers, strings and checksums.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
HEADER_CHECKSUM = '"header_crc32": "'
NO_CHECKSUM = "0" * 8
VERSION = 1  # of the metadata's content
PAGE = 4096  # bytes that are summed for a checksum
CHUNK = 256 * PAGE  # bytes that are summed and then written while they are in a cache


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype for a dtype name of the format; MindSpore's own function logs a deprecation."""
    return Tensor(0, DTYPES[name]).asnumpy().dtype


class SpoiledError(ValueError):
    """A checkpoint is truncated, or some of its bits have changed since it was written."""


class Entry(NamedTuple):
    """A tensor of a file: its kind, its dtype name in the format, its shape, its byte range and its checksum."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


class File:
    """A file that was read: its entries by name, and the content of its metadata.

    Args:
        path: The file.

    Raises:
        SpoiledError: If the header has changed, or the file is shorter or longer than the header states.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            raw = file.read(min(length, size))
            header = _checked_header(path, length, raw)
            content = json.loads(header["__metadata__"]["ms_optim"])
            if content["version"] > VERSION:
                raise ValueError(f"ms_optim: the checkpoint {path} was written by a later version of ms_optim.")
            sums = header.pop("__metadata__")["checksums"]
            self.step: int | None = content["step"]
            self.more: Any = content["more"]
            self.entries: dict[str, Entry] = {}
            begin = 8 + length
            for k, (name, tensor) in enumerate(header.items()):
                low, high = tensor["data_offsets"]
                place = (begin + low, begin + high, sums[8 * k : 8 * k + 8])
                self.entries[name] = Entry(content["kinds"][k], tensor["dtype"], tuple(tensor["shape"]), *place)
            end = max((entry.end for entry in self.entries.values()), default=begin)
            if size != end:
                what = "truncated" if size < end else "too long"
                raise SpoiledError(f"ms_optim: the checkpoint {path} is {what}: it has {size} bytes, not {end}.")
            # This maps the file's pages and copies nothing; changes to them stay in this process.
            self._data = np.memmap(file, np.uint8, "c")

    def array(self, name: str) -> NDArray[Any]:
        """Return the values of an entry."""
        _, dtype, shape, begin, end, _ = self.entries[name]
        data = np.asarray(self._data[begin:end])
        if begin % numpy_dtype(dtype).itemsize:
            data = data.copy()
        return data.view(numpy_dtype(dtype)).reshape(shape)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the entries of a kind as Tensors, which share the file's pages."""
        return {n: Tensor.from_numpy(self.array(n)) for n, entry in self.entries.items() if entry.kind == kind}

    def check(self) -> None:
        """Compare the checksums of all entries.

        Raises:
            SpoiledError: If a checksum differs.
        """
        spoiled = [n for n, e in self.entries.items() if _checksum(self._data[e.begin : e.end]) != e.checksum]
        if spoiled:
            others = f" and of {len(spoiled) - 1} other entries" if spoiled[1:] else ""
            raise SpoiledError(
                f"ms_optim: the checkpoint {self.path} is corrupted: the bytes of {spoiled[0]!r}{others} are not those "
                "that were written."
            )


def _checksum(data: NDArray[np.uint8], then: Callable[[NDArray[np.uint8]], object] | None = None) -> str:
    """Return a checksum: the CRC-32 of the sums of all pages, in 64-bit words, and of the remaining bytes.

    A sum is ten times as fast as CRC-32. A flipped bit changes the sum of its page by a power of 2. CRC-32 always
    detects this, because a carry changes a run of at most 64 bits.

    Args:
        data: The bytes.
        then: Called with each chunk after the chunk was summed.
    """
    checksum = 0
    for begin in range(0, data.size, CHUNK):
        chunk = data[begin : begin + CHUNK]
        whole = chunk.size - chunk.size % PAGE
        pages = chunk[:whole].view("<u8").reshape(-1, PAGE // 8)
        checksum = zlib.crc32(chunk[whole:].data, zlib.crc32(pages.sum(axis=1, dtype="<u8").data, checksum))
        if then is not None:
            then(chunk)
    return f"{checksum:08x}"


def _header_text(tensors: dict[str, dict[str, Any]], content: str, sums: str, checksum: str) -> bytes:
    """Return the length and the header; the length does not depend on the checksums."""
    metadata = {"format": "ms", "ms_optim": content, "checksums": sums, "header_crc32": checksum}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_checksum(header: bytes) -> bytes:
    return f"{zlib.crc32(header):08x}".encode()


def _checked_header(path: pathlib.Path, length: int, raw: bytes) -> dict[str, Any]:
    before, key, after = raw.partition(HEADER_CHECKSUM.encode())
    blank = length.to_bytes(8, "little") + before + key + NO_CHECKSUM.encode() + after[8:]
    if len(raw) < length or not key or after[:8] != _header_checksum(blank):
        raise SpoiledError(
            f"ms_optim: {path} is not a checkpoint of ms_optim.save, or its header is truncated or corrupted."
        )
    return json.loads(raw)


def write_file(path: pathlib.Path, step: int | None, more: Any, entries: dict[str, tuple[str, Tensor]]) -> None:
    """Write a file next to the old one, and replace the old one after all data is on disk."""
    tensors, kinds, end = {}, [], 0
    # Large dtypes come first, so that each tensor begins at a multiple of its item size.
    for name, (kind, tensor) in sorted(entries.items(), key=lambda entry: -entry[1][1].itemsize):
        begin, end = end, end + tensor.nbytes
        tensors[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        kinds.append(kind)
    content = json.dumps({"version": VERSION, "step": step, "more": more, "kinds": kinds})
    # A symbolic link remains and points to the new file.
    path = pathlib.Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb", buffering=0) as file:
            file.seek(len(_header_text(tensors, content, NO_CHECKSUM * len(tensors), NO_CHECKSUM)))
            sums = ""
            for name in tensors:
                # This does not copy data that is in host memory.
                data = np.ascontiguousarray(entries[name][1].asnumpy()).reshape(-1).view(np.uint8)
                sums += _checksum(data, lambda chunk: _write_all(file, chunk))
            checksum = _header_checksum(_header_text(tensors, content, sums, NO_CHECKSUM)).decode()
            file.seek(0)
            _write_all(file, _header_text(tensors, content, sums, checksum))
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write_all(file, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
