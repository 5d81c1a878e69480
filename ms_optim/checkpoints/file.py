"""One file of a checkpoint, in the safetensors format: writes it atomically, reads and checks it.

The header's metadata holds numbers, strings and checksums: see checkpoints/header.py.
"""

from __future__ import annotations

import os
import pathlib
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from mindspore import Tensor

from .atomic_file import replacing
from .header import VERSION, Draft, Entry, Origin, SpoiledError, numpy_dtype, read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 4096  # bytes that are summed for a checksum
CHUNK = 256 * PAGE  # bytes that are summed and then written while they are in a cache


class File:
    """A file that was read: its entries by name, and the content of its metadata.

    Args:
        path: The file.

    Raises:
        SpoiledError: If the header has changed, or the file is shorter or longer than the header states.
        ValueError: If a later version of the package wrote it.
    """

    path: pathlib.Path
    version: int
    step: int | None
    more: Any
    origin: Origin
    entries: dict[str, Entry]
    slices: dict[str, list[int]] | None

    def __init__(self, path: pathlib.Path):
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = read_header(path, file, size)
            # This maps the file's pages and copies nothing; changes to them stay in this process.
            self._data = np.memmap(file, np.uint8, "c")
        self.version, self.step, self.more, self.origin, self.entries, self.slices = found

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
        data, version = self._data, self.version
        spoiled = [n for n, e in self.entries.items() if checksum(data[e.begin : e.end], version) != e.checksum]
        if spoiled:
            others = f" and of {len(spoiled) - 1} other entries" if spoiled[1:] else ""
            raise SpoiledError(
                f"ms_optim: the checkpoint {self.path} is corrupted: the bytes of {spoiled[0]!r}{others} are not those "
                "that were written."
            )


def checksum(
    data: NDArray[np.uint8], version: int = VERSION, then: Callable[[NDArray[np.uint8]], object] | None = None
) -> str:
    """Return a checksum: the CRC-32 of sums of 64-bit words, and of the bytes that remain.

    The words of a chunk are a matrix with a page in each row; the sums are those of its rows and of its columns. Sums
    are several times as fast as CRC-32. A flipped bit changes two of them by a power of 2. CRC-32 always detects this,
    because a carry changes a run of at most 64 bits. Words that are exchanged within a page change the sums of
    columns, and words of two pages the sums of rows.

    Args:
        data: The bytes.
        version: The version of the content; in version 1, there are no sums of columns.
        then: Called with each chunk after the chunk was summed.
    """
    crc = 0
    for begin in range(0, data.size, CHUNK):
        chunk = data[begin : begin + CHUNK]
        whole = chunk.size - chunk.size % PAGE
        pages = chunk[:whole].view("<u8").reshape(-1, PAGE // 8)
        crc = zlib.crc32(pages.sum(axis=1, dtype="<u8").data, crc)
        if version > 1 and whole:
            crc = zlib.crc32(pages.sum(axis=0, dtype="<u8").data, crc)
        crc = zlib.crc32(chunk[whole:].data, crc)
        if then is not None:
            then(chunk)
    return f"{crc:08x}"


def write_file(
    path: pathlib.Path,
    step: int | None,
    more: Any,
    entries: dict[str, tuple[str, Tensor]],
    origin: Origin,
    slices: dict[str, list[int]],
) -> None:
    """Write a file next to the old one, and replace the old one after all data is on disk."""
    draft, sums = Draft(entries, step, more, origin, slices), ""
    with replacing(path) as file:
        file.seek(draft.size())
        for name in draft.names:
            # This does not copy data that is in host memory.
            data = np.ascontiguousarray(entries[name][1].asnumpy()).reshape(-1).view(np.uint8)
            sums += checksum(data, then=lambda chunk: _write_all(file, chunk))
        file.seek(0)
        _write_all(file, draft.written(sums))


def _write_all(file: BinaryIO, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
