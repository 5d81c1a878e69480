"""Builds the CPU operators: one shared library, with a set of kernels for each instruction set."""

import pathlib
import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

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


# Folders of ops/ that are built where the package is used.
PACKED = ("ascendc",)


class BuildKernels(build_ext):
    """Compiles kernels.cc once for each instruction set; the library does not depend on the Python version."""

    def get_ext_filename(self, fullname):
        """Name the library plainly: it is loaded by MindSpore, not imported."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        """Compile and link; a failure leaves a package that runs without fused kernels."""
        include = ["ops/include", "ops/cpu"]
        flags = [*FLAGS, "-fopenmp", "-Wno-psabi"]
        objects = self.compiler.compile(
            ["ops/cpu/entry.cc"], output_dir=self.build_temp, include_dirs=include, extra_postargs=flags
        )
        for name, options in INSTRUCTION_SETS.get(platform.machine(), {"baseline": []}).items():
            objects += self.compiler.compile(
                ["ops/cpu/kernels.cc"],
                output_dir=f"{self.build_temp}/{name}",
                include_dirs=include,
                macros=[("MS_OPTIM_ISA", name)],
                extra_postargs=flags + options,
            )
        library = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, library, extra_postargs=["-fopenmp", "-s"], target_lang="c++")
        # Python started in a clone finds the package there before the installed one.
        if not self.inplace:
            self.copy_file(library, self.get_ext_filename(ext.name))


class PackSources(build_py):
    """Puts sources of operators into the package that are built where it is used."""

    def run(self):
        """Copy the folders besides the modules; a package that stays in its clone has them beside it."""
        super().run()
        if not self.editable_mode:
            for folder in PACKED:
                self.copy_tree(f"ops/{folder}", str(pathlib.Path(self.build_lib, "ms_optim", "ops", folder)))


sources = ["ops/cpu/entry.cc", "ops/cpu/kernels.cc"]
cpu = Extension("ms_optim.libms_optim_cpu", sources, language="c++", optional=True)
setup(
    ext_modules=[cpu] if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildKernels, "build_py": PackSources},
)
