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
    found["pass"].argtypes = [ctypes.c_void_p, *3 * [ctypes.c_int], ctypes.c_long, ctypes.c_int]
    found["pass"].restype = ctypes.c_float
    return found["pass"]


def passing_over(arrays, read, updated, writes):
    """Return a loop, forwards or backwards, over float32 arrays of NumPy or tensors of MindSpore, all of one size.

    It reads the first arrays, updates those that follow, and writes one without reading it. Elements past a multiple of
    16 are left out.
    """
    addresses = [a.ctypes.data if isinstance(a, np.ndarray) else a.data_ptr() for a in arrays]
    pointers = (ctypes.c_void_p * len(arrays))(*addresses)

    def run(backwards=False):
        if streams()(pointers, read, updated, writes, arrays[0].size // 16 * 16, backwards) < 0:
            raise ValueError(f"streams.cc has no loop that reads {read} arrays and updates {updated}")

    return run


def passing(read, updated, writes, size):
    """Return a loop over arrays of its own, which are on huge pages where the system has them; it was checked once."""
    arrays = [np.ones(size // 16 * 16, np.float32) for _ in range(read + updated + writes)]
    run = passing_over(arrays, read, updated, writes)
    run()
    values = [1.0] * read + [0.5 + read] * updated + [read] * writes
    if not all((a == value).all() for a, value in zip(arrays, values, strict=True)):
        raise ValueError("a loop of streams.cc left out elements")
    return run


def timed(work):
    """Return the seconds that work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
