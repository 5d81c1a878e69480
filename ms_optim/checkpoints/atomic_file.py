"""Writes a file atomically: beside the old one, under a name that nobody can foresee, and then in its place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 200  # bytes of a name that a temporary name repeats; file systems allow 255 for the whole name


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a new file, which takes the place of `path` at the end, after all data is on disk.

    After an error or an interrupt, `path` is as it was. Files that killed processes left beside it are removed.
    """
    # A symbolic link remains and points to the new file.
    path = pathlib.Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # raises an error now, and not after all is written, if the file system cannot have this name
    remove_unfinished(path.parent, re.escape(_shortened(path.name)))
    beside = path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(8)}.tmp")
    try:
        # In a folder that others can write to, no link or file of theirs is opened.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o666), "w+b", buffering=0) as file:
            # The lock ends with the process and tells others that the file is being written.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file  # type: ignore[misc]
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_unfinished(folder: pathlib.Path, names: str) -> None:
    """Remove the temporary files of killed processes.

    Args:
        folder: The folder.
        names: A regular expression for the names of the files that they would have become.
    """
    temporary = re.compile(rf"\.(?:{names})(?:\.[0-9a-f]{{16}})?\.tmp", re.DOTALL)
    for name in os.listdir(folder):
        if temporary.fullmatch(name) and _is_left(folder / name):
            with contextlib.suppress(OSError):  # it belongs to another user, or another process removed it
                (folder / name).unlink()


def _shortened(name: str) -> str:
    """Return a name, or the beginning of a long one and its hash."""
    raw = os.fsencode(name)
    if len(raw) <= LONGEST:
        return name
    return f"{os.fsdecode(raw[: LONGEST // 2])}.{hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def _is_left(path: pathlib.Path) -> bool:
    """Return whether a path is a file that no process is writing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(descriptor)
    return True


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
