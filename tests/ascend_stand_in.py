"""Builds the operators of ops/ascendc on the stand-in of tests/ascendc, and runs them."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import ml_dtypes
import numpy as np
import pytest
from builds import once, shared_folder
from sources import ROOT, TESTS

OPS = ROOT / "ops" / "ascendc"
C_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def _why_not() -> str | None:
    """Say why the stand-in cannot be built."""
    if shutil.which("g++") is None:
        return "g++ is not installed (Debian: apt install g++)"
    for library in ("libasan.so", "libubsan.so"):
        found = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()
        if not pathlib.Path(found).is_absolute():
            return f"g++ has no {library} (Debian: apt install g++)"
    return None


needs_compiler = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


class WrongError(Exception):
    """The stand-in or a sanitizer ended a launch; the message is what it said."""


def snake(operator: str) -> str:
    """Return the name of an operator's kernel."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operator).lower()


def compiled(*arguments):
    done = subprocess.run(["g++", *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def translated(source: pathlib.Path, folder: pathlib.Path, *include, flags=SANITIZE) -> pathlib.Path:
    """Compile a source file and return the object file."""
    target = folder / f"{source.stem}.o"
    include = [f"-I{path}" for path in (*include, TESTS / "ascendc", ROOT / "ops" / "include")]
    # Kernels do no arithmetic of their own: the stand-in's instructions are where time goes.
    optimized = ["-O2"] if source.parent == TESTS / "ascendc" else []
    compiled(*flags, *include, *optimized, "-c", source, "-o", target)
    return target


def linked(objects, program: pathlib.Path, flags=SANITIZE) -> pathlib.Path:
    compiled(*flags, *objects, "-o", program)
    return program


def in_parallel(function, items):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


def unit(operator: str, definition: dict, head: list[str], add: str, columns=None) -> str:
    """Return C++ that compiles an operator's kernel for each column of dtypes, and makes the kernels known.

    Args:
        operator: The operator's type.
        definition: What its definition says of it.
        head: Lines that stand before the kernels.
        add: The function that makes a kernel known by a name.
        columns: The columns; all if None.
    """
    inputs = [definition[f"input{i}"] for i in range(sum(key.startswith("input") for key in definition))]
    dtypes = {parameter["name"]: parameter["dtype"].split(",") for parameter in inputs}
    kernel, lines = snake(operator), ['#include "kernel_operator.h"', *head]
    for column in range(len(inputs[0]["dtype"].split(","))) if columns is None else columns:
        macros = {f"DTYPE_{name.upper()}": C_TYPES[of[column]] for name, of in dtypes.items()}
        macros[kernel] = f"{kernel}_{column}"
        lines += [f"#define {name} {value}" for name, value in macros.items()]
        lines.append(f'#include "{kernel}.cpp"')
        lines += [f"#undef {name}" for name in macros]
        key = f"{operator}/{','.join(of[column] for of in dtypes.values())}"
        lines.append(f'static const bool {kernel}_is_known_{column} = {add}("{key}", {kernel}_{column});')
    return "\n".join([*lines, ""])


@dataclasses.dataclass
class Host:
    """The operators' definitions, compiled, and what they say of themselves."""

    objects: list
    definitions: dict

    @classmethod
    def build(cls, factory):
        def make(folder):
            linked(cls.compiled(folder, SANITIZE, ["launch"]), folder / "describe")

        folder = once(shared_folder(factory), "ascend_host", make)
        said = subprocess.run([folder / "describe", "describe"], capture_output=True, text=True, check=True).stdout
        return cls(sorted(folder.glob("*.o")), json.loads(said))

    @staticmethod
    def compiled(folder, flags, more=()):
        own = [TESTS / "ascendc" / f"{name}.cc" for name in ("stand_in", "operators", *more)]
        sources = [*own, OPS / "op_host" / "ms_optim.cpp"]
        return in_parallel(lambda source: translated(source, folder, flags=flags), sources)

    def kernels(self, folder, operators, columns=None, sources=OPS / "op_kernel", flags=SANITIZE):
        """Compile the kernels of some operators, for all dtypes or for some columns of them."""

        def make(operator):
            source = folder / f"{snake(operator)}.cc"
            head = ['#include "aot.h"', f"STAND_IN_AOT({operator})"]
            source.write_text(unit(operator, self.definitions[operator], head, "stand_in::Add", columns))
            return translated(source, folder, sources, flags=flags)

        return in_parallel(make, operators)

    def program(self, folder, operators, *choice) -> pathlib.Path:
        """Build a program with the kernels of some operators."""
        return linked([*self.objects, *self.kernels(folder, operators, *choice)], folder / "launch")

    def library(self, folder) -> pathlib.Path:
        """Build all operators as operators of MindSpore on a CPU, without sanitizers."""
        objects = self.compiled(folder, ["-fPIC"]) + self.kernels(folder, list(self.definitions), flags=["-fPIC"])
        return linked(objects, folder / "libascend_on_cpu.so", ["-shared"])


class StandIn:
    """A process that runs operators on the stand-in, for as long as none is found wrong."""

    def __init__(self, program: pathlib.Path):
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def launch(self, operator: str, inputs: list, cores: int = 4):
        """Run an operator; what it writes of its inputs is changed in place. Return its output, in one dimension."""
        assert all(array.flags.c_contiguous for array in inputs)
        self.write(self.text(operator), self.text(",".join(str(array.dtype) for array in inputs)))
        self.write(self.number(cores), self.number(len(inputs)))
        for array in inputs:
            self.write(self.number(array.ndim), *map(self.number, array.shape), self.number(array.nbytes))
            self.write(array.tobytes())
        self.flush()
        for array in inputs:
            array[...] = np.frombuffer(self.read(array.nbytes), array.dtype).reshape(array.shape)
        return np.frombuffer(self.read(4 * struct.unpack("q", self.read(8))[0]), np.float32)

    number = staticmethod(lambda value: struct.pack("q", value))

    @classmethod
    def text(cls, value):
        return cls.number(len(value)) + value.encode()

    def write(self, *pieces):
        for piece in pieces:
            self.process.stdin.write(piece)

    def flush(self):
        self.process.stdin.flush()

    def read(self, size):
        data = self.process.stdout.read(size)
        if len(data) != size:
            self.failed()
        return data

    def failed(self):
        raise WrongError(self.process.communicate()[1].decode(errors="replace")[-4000:])

    def close(self):
        self.process.stdin.close()
        self.process.wait()
