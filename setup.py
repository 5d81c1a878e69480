"""Builds the native operators: a library for the CPU always, one for GPUs with MS_OPTIM_CUDA=1."""

import concurrent.futures
import os
import pathlib
import platform
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

INSTRUCTION_SETS = {
    "x86_64": {
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
        "avx2": ["-mavx2"],
        "baseline": [],
    }
}
# Products are not contracted into fused multiply-adds, so that every instruction set gives the same bits; sqrt need
# not set errno and selects need not trap, else loops with them are not vectorized.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
FLAGS += ["-fno-lto"]  # what is compiled for an instruction set is isolated as machine code
FLAGS += ["-fno-wrapv"]  # Python's own flags say otherwise, which takes the shortest addressing from loops
FLAGS += ["-g0"]  # Python's own flags ask for debug information, a quarter of the time, which is stripped again
# Products of matrices are contracted, and some processors have instructions for those of bfloat16.
PRODUCT_FLAGS = ["-ffp-contract=fast"]
PRODUCT_SETS = {
    "x86_64": {
        "amx": [*INSTRUCTION_SETS["x86_64"]["avx512"], "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
        "avx512bf16": [*INSTRUCTION_SETS["x86_64"]["avx512"], "-mavx512bf16"],
        "avx512": INSTRUCTION_SETS["x86_64"]["avx512"],
        "avx2": ["-mavx2", "-mfma"],
        "baseline": [],
    }
}
# What older compilers do not know is left out.
FOR_BFLOAT16 = ("amx", "avx512bf16")
EXPORTS = "ops/exports.map"
# A GPU gives these bits too: see ops/include/denormals.h.
CUDA_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=true", "-prec-div=true", "-prec-sqrt=true"]
CUDA_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden", "--threads=0"]
# Compute capabilities, without the point: one for those of each generation. What the toolkit does not know is left out;
# generations to come compile the last for themselves.
CUDA_ARCHITECTURES = os.environ.get("MS_OPTIM_CUDA_ARCHITECTURES", "70 75 80 90").split()


# What is compiled once for each instruction set, with flags of its own, and the table of functions that comes of it.
CPU_UNITS = (
    ("ops/cpu/kernels.cc", INSTRUCTION_SETS, [], "kernels"),
    ("ops/cpu/products.cc", PRODUCT_SETS, PRODUCT_FLAGS, "products"),
)


def run_binutil(compiler, name, *arguments) -> str:
    """Run a program that comes with a compiler, `ld`, `objcopy` or `readelf`; return what it prints."""
    try:
        path = subprocess.run(
            [*compiler, f"-print-prog-name={name}"], check=True, capture_output=True, text=True
        ).stdout
        return subprocess.run([path.strip(), *arguments], check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise CompileError(f"the kernels are built with GNU binutils, and {name} cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{' '.join(map(str, error.cmd))} failed: {error.stderr}") from error


def machine_of(compiler) -> str:
    """Return the machine that a compiler compiles for, which for a cross compiler is not this one."""
    try:
        command = [*compiler, "-dumpmachine"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("-")[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the compiler does not name its machine: {error}") from error


def symbol_of(instruction_set, table) -> str:
    """Return the symbol of a table, which C++ calls ms_optim::instruction_set::table."""
    return f"_ZN8ms_optim{len(instruction_set)}{instruction_set}{len(table)}{table}E"


def isolate(compiler, compiled, symbol) -> str:
    """Make an object of which the linker sees one symbol alone, and return the object's name.

    A linker keeps one copy for all objects of an inline function or of a template of the standard library. It may keep
    that of a wider instruction set, which then ends the process on a processor without it.
    """
    whole, isolated = (f"{compiled.removesuffix('.o')}.{kind}.o" for kind in ("whole", "isolated"))
    # The linker keeps one of the groups of the same name, even if their symbols are local.
    run_binutil(compiler, "ld", "-r", "--force-group-allocation", "-o", whole, compiled)
    run_binutil(compiler, "objcopy", f"--keep-global-symbol={symbol}", whole, isolated)
    return isolated


def check_isolation(compiler, compiled, symbol):
    """Raise an error if an object shares anything else, or runs anything as soon as the library is loaded."""
    lines = run_binutil(compiler, "readelf", "--wide", "--symbols", "--section-headers", compiled).splitlines()
    # A symbol's row: number, value, size, type, binding, visibility, section, name. Local ones concern nobody.
    rows = [row for row in map(str.split, lines) if len(row) == 8 and row[0].removesuffix(":").isdigit()]
    seen = {row[7] for row in rows if row[4] != "LOCAL" and row[6] != "UND"}
    seen |= {section for section in (".init_array", ".ctors", ".group") for line in lines if f" {section}" in line}
    if seen != {symbol}:
        raise RuntimeError(f"{compiled}: must define {symbol} alone for other objects, but has {', '.join(seen)}")


def cuda_command(nvcc, library) -> list:
    """Return the command that builds the library for GPUs."""
    if nvcc is None:
        raise CompileError("MS_OPTIM_CUDA=1 needs nvcc of CUDA 11.8 or later on the PATH")
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    chosen = [a for a in CUDA_ARCHITECTURES if f"compute_{a}" in known]
    if not chosen:
        raise RuntimeError(f"{nvcc} knows none of the compute capabilities {CUDA_ARCHITECTURES}, but {known}")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in chosen]
    targets.append(f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")
    include = ["-Iops/include", "-Iops/cuda"]
    exports = ["-Xlinker", f"--version-script={EXPORTS}"]
    return [nvcc, *CUDA_FLAGS, *targets, *include, *exports, "-shared", "-o", library, "ops/cuda/entry.cu"]


# Folders of ops/ that are built where the package is used.
PACKED = ("ascendc",)


class BuildKernels(build_ext):
    """Builds the libraries, which do not depend on the Python version; a failure leaves a package that lacks one."""

    def finalize_options(self):
        """Build the libraries at the same time."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname):
        """Name the library plainly: it is loaded by MindSpore, not imported."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        """Build one library."""
        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        if ext is cuda:
            self.spawn(cuda_command(shutil.which("nvcc"), library))
        else:
            self.build_cpu(library)
        # Python started in a clone finds the package there before the installed one. It runs on this machine.
        if not self.inplace and machine_of(self.compiler.compiler_cxx) == platform.machine():
            self.copy_file(library, self.get_ext_filename(ext.name))

    def build_cpu(self, library):
        """Compile what is compiled once for each instruction set, and link."""
        include = ["ops/include", "ops/cpu"]
        flags = [*FLAGS, "-fopenmp", "-Wno-psabi"]

        def compiled(source, name, own=(), macros=()):
            folder = f"{self.build_temp}/{name}"
            arguments = {"include_dirs": include, "macros": list(macros), "extra_postargs": [*flags, *own]}
            return self.compiler.compile([source], output_dir=folder, **arguments)

        def isolated(source, name, own, table):
            (unit,) = compiled(source, name, own, [("MS_OPTIM_ISA", name)])
            return isolate(self.compiler.compiler_cxx, unit, symbol_of(name, table))

        machine = machine_of(self.compiler.compiler_cxx)
        objects, lacking = [], []
        with concurrent.futures.ThreadPoolExecutor(self.parallel) as threads:
            jobs = [
                (name, table, threads.submit(isolated, source, name, [*own, *options], table))
                for source, sets, own, table in CPU_UNITS
                for name, options in sets.get(machine, {"baseline": []}).items()
            ]
        for name, table, job in jobs:
            try:
                objects.append(job.result())
                check_isolation(self.compiler.compiler_cxx, objects[-1], symbol_of(name, table))
            except CompileError:
                if name not in FOR_BFLOAT16:
                    raise
                lacking.append((f"MS_OPTIM_LACKS_{name.upper()}", None))
        objects += compiled("ops/cpu/entry.cc", "entry", macros=lacking)
        options = ["-fopenmp", "-s", f"-Wl,--version-script={EXPORTS}"]
        self.compiler.link_shared_object(objects, library, extra_postargs=options, target_lang="c++")


class PackSources(build_py):
    """Puts sources of operators into the package that are built where it is used."""

    def run(self):
        """Copy the folders besides the modules; a package that stays in its clone has them beside it."""
        super().run()
        if not self.editable_mode:
            for folder in PACKED:
                self.copy_tree(f"ops/{folder}", str(pathlib.Path(self.build_lib, "ms_optim", "ops", folder)))


CPU_SOURCES = [f"ops/cpu/{name}.cc" for name in ("entry", "kernels", "products")]
cpu = Extension("ms_optim.libms_optim_cpu", CPU_SOURCES, language="c++", optional=True)
cuda = Extension("ms_optim.libms_optim_cuda", ["ops/cuda/entry.cu"], optional=True)
# It takes minutes, so that nobody gets it without asking.
libraries = [cpu, cuda] if os.environ.get("MS_OPTIM_CUDA") == "1" else [cpu]
setup(
    ext_modules=libraries if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildKernels, "build_py": PackSources},
)
