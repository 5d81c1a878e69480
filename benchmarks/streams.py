"""Loops that pass over arrays and do nothing else: the least time that a step over as many bytes can take."""

import ctypes
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np


@cache
def streams():
    """Compile and load streams.cc."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "streams.so")
        source = Path(__file__).with_name("streams.cc")
        options = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["c++", *options, str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found["pass"].argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found["pass"].restype = ctypes.c_float
    return found["pass"]


def passing(read, updated, writes, size):
    """Return a loop that reads arrays, updates others, and writes one without reading it; it was checked once."""
    arrays = [np.ones(size // 16 * 16, np.float32) for _ in range(read + updated + writes)]
    addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    if streams()(addresses, read, updated, writes, len(arrays[0])) < 0:
        raise ValueError(f"streams.cc has no loop that reads {read} arrays and updates {updated}")
    values = [1.0] * read + [0.5 + read] * updated + [read] * writes
    if not all((a == value).all() for a, value in zip(arrays, values, strict=True)):
        raise ValueError("a loop of streams.cc left out elements")
    return lambda: streams()(addresses, read, updated, writes, len(arrays[0]))


def timed(work):
    """Return the seconds that work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
