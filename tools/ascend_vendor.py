"""Runs the kernels of ops/ascendc on the vendor's own framework for a CPU, and says who finds planted faults.

    python tools/ascend_vendor.py --devkit PATH --tools PATH

The two are checkouts of the public repositories mirror-cann/asc-devkit (headers, and the implementation of the basic
API) and hicann/asc-tools (the CPU framework, with its checks of arguments). Nothing of them is copied. The vendor's
model of the instructions is closed: tools/ascend_vendor has ours, of those that the kernels use.

It needs g++, and what the tests need. It takes about 15 minutes on two processors.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import test_ascendc as cases  # noqa: E402
from ascend_stand_in import DTYPES, OPS, StandIn, WrongError, in_parallel, linked, snake, translated, unit  # noqa: E402
from tolerances import UNIT  # noqa: E402

OWN, STAND_IN = ROOT / "tools" / "ascend_vendor", ROOT / "tests" / "ascendc"

REPOSITORIES = {"devkit": "mirror-cann/asc-devkit", "tools": "hicann/asc-tools"}
# A file of each checkout that tells it from others.
MARKS = {"devkit": "impl/basic_api/kernel_tpipe_impl.h", "tools": "cpudebug/include/kern_fwk.h"}

# The processors that the operators are for, with the cores of vectors that they have. The framework has one table for
# both, that of the 910B1: their architecture is one.
CHIPS = {"910B": 40, "910_93": 48}
FLAGS = ["-std=c++17", "-w", "-fpermissive", "-ffp-contract=off"]
FLAGS += ["-D__CCE_KT_TEST__=1", "-DASCENDC_CPU_DEBUG=1", "-DASCENDC_DEBUG=1"]
FLAGS += ["-D__CCE_AICORE__=220", "-D__DAV_C220__", "-D__NPU_ARCH__=2201"]
# The vendor's build makes this macro.
TILING = f"#define GET_TILING_DATA(name, address) {cases.TILING_DATA}"
# What stands before kernels, and makes them known.
ADDED = (['#include "framework.h"', TILING], "model::Add")
# A name that the vendor's closed header has and ours lacks, in what the compiler says.
MISSING = re.compile(r"error: ‘(\w+)’ was not declared in this scope|error: no matching function for call to ‘(\w+)\(")
# The units that run at once while others wait for flags: each choice is another order of the same instructions.
ORDERS = range(8)

TILES, RULE = "tiles.h", "rule.h"
# A fault: the file, what stands there, and what is put there instead.
FAULTS = {
    "a copy whose length is no multiple of 32 bytes": (
        TILES,
        "Part<float>(out, out_)[kind * kLanes], kLanes);",
        "Part<float>(out, out_)[kind * kLanes], kLanes - 1);",
    ),
    "a queue that is one too shallow": (
        TILES,
        "in_.EnQue(empty);",
        "in_.EnQue(empty); const LocalTensor<uint8_t> next = in_.AllocTensor<uint8_t>();"
        "kernel->Fetch(next, begin, count); in_.EnQue(next);",
    ),
    "a buffer that is one tile too small": (
        RULE,
        "core_.Init(in, out, kMaskPlace + kTile / 8);",
        "core_.Init(in, out, kMaskPlace + kTile / 8 - kTileBytes);",
    ),
    "an EnQue that is missing": (TILES, "in_.EnQue(empty);", ""),
    "two tensors in one buffer": (
        TILES,
        "in_ = Reserve(bytes);",
        "in_ = Reserve(bytes); if (in_ >= kTile * sizeof(T)) in_ -= kTile * sizeof(T);",
    ),
    "a DeQue that is missing": (
        TILES,
        "LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();",
        "LocalTensor<uint8_t> out = made;",
    ),
    "a buffer in the 8 KiB that Select needs": (
        RULE,
        "core_.Init(in, out, kMaskPlace + kTile / 8);",
        "core_.Init(in, out, kMaskPlace + kTile / 8 + 36 * 1024);",
    ),
}


@dataclasses.dataclass
class Vendor:
    """The two checkouts, and a folder to build in."""

    devkit: pathlib.Path
    tools: pathlib.Path
    folder: pathlib.Path

    def headers(self, kernels: pathlib.Path) -> list[str]:
        """Return the options with which kernels include the vendor's headers, and ours where these are closed."""
        of_devkit = ["", "include", "include/basic_api", "impl/basic_api", "include/utils", "impl"]
        of_tools = ["cpudebug/include", "cpudebug/utils"]
        folders = [self.folder, OWN, *(self.devkit / name for name in of_devkit)]
        folders += [*(self.tools / name for name in of_tools), STAND_IN, kernels, ROOT / "ops" / "include"]
        return [f"-I{folder}" for folder in folders]

    def framework(self) -> list[pathlib.Path]:
        """Compile the framework and its checks of arguments with their own headers, and return the objects."""
        source = self.tools / "cpudebug" / "src"
        own = ["include", "src/api_check", "src/api_check/inc", "utils", "utils/include", "utils/include/utils"]
        headers = [f"-I{folder}" for folder in (self.folder, OWN, *(self.tools / "cpudebug" / name for name in own))]
        # stub_reg.cpp binds the closed model's instructions by its table of them.
        regfwk = [source / "regfwk" / name for name in ("stub_base.cpp", "stub_backtrace.cpp", "kernel_print_lock.cpp")]
        sources = [*source.glob("api_check/*.cpp"), *regfwk, source / "acl_stub" / "kernel_fp16.cpp"]
        return in_parallel(lambda path: self.compiled(path, headers), sources)

    def compiled(self, source: pathlib.Path, headers: list[str], folder=None, *flags) -> pathlib.Path:
        """Compile a source file and return the object, or end with what the compiler says."""
        target = (folder or self.folder) / f"{source.stem}.o"
        said = compiler(*FLAGS, *flags, *headers, "-c", source, "-o", target)
        if "error" in said:
            raise SystemExit(f"{source} does not compile:\n{shortened(said)}")
        return target

    def declare_others(self, units: list[pathlib.Path], headers: list[str]) -> int:
        """Write others.h, of what the vendor's headers name besides the instructions that have a model.

        Such a name is declared as a function that ends the launch. Return how many there are.
        """
        path, names = self.folder / "others.h", set()
        while True:
            path.write_text(
                "#define MODEL_NONE(name) \\\n"
                "  template <class... A> inline int64_t name(A &&...) { model::NotModelled(#name); }\n"
                + "".join(f"MODEL_NONE({name})\n" for name in sorted(names))
            )
            said = "\n".join(in_parallel(lambda unit: compiler(*FLAGS, *headers, "-fsyntax-only", unit), units))
            found = {name for match in MISSING.finditer(said) for name in match.groups() if name} - names
            if found:
                names |= found
            elif "error:" in said:
                raise SystemExit(f"The vendor's headers do not accept the kernels:\n{shortened(said)}")
            else:
                return len(names)


def compiler(*arguments) -> str:
    """Run g++ and return what it says."""
    command = ["g++", "-fmax-errors=0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}).stderr


def shortened(text: str) -> str:
    """Return the lines of errors alone, 20 at most."""
    return "\n".join([line for line in text.splitlines() if "error" in line][:20])


# ---- Programs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Builder:
    """The objects that all programs share, and what the operators say of themselves."""

    vendor: Vendor
    objects: list[pathlib.Path]
    definitions: dict

    @classmethod
    def build(cls, vendor: Vendor, definitions: dict, host: list[pathlib.Path]):
        """Compile the framework, the model of the instructions, and what asks for launches."""
        headers = vendor.headers(OPS / "op_kernel")
        own = [vendor.compiled(OWN / f"{name}.cc", headers, None, "-O2") for name in ("framework", "instructions")]
        return cls(vendor, [*host, *own, *vendor.framework()], definitions)

    def program(self, folder: pathlib.Path, operators, columns=None, kernels=OPS / "op_kernel") -> pathlib.Path:
        """Build a program with the kernels of some operators."""
        folder.mkdir()
        headers = self.vendor.headers(kernels)

        def make(operator):
            source = folder / f"{snake(operator)}.cc"
            source.write_text(unit(operator, self.definitions[operator], *ADDED, columns))
            return self.vendor.compiled(source, headers, folder)

        said = compiler(*self.objects, *in_parallel(make, operators), "-pthread", "-ldl", "-o", folder / "launch")
        if not (folder / "launch").exists():
            raise SystemExit(f"The program does not link:\n{said[:4000]}")
        return folder / "launch"


def host(folder: pathlib.Path) -> tuple[dict, list[pathlib.Path]]:
    """Return the operators' definitions, and the objects that ask for launches and compute tilings."""
    folder.mkdir()
    sources = [*(STAND_IN / f"{name}.cc" for name in ("operators", "launch", "stand_in")), OPS / "op_host/ms_optim.cpp"]
    objects = in_parallel(lambda source: translated(source, folder, flags=[]), sources)
    described = linked(objects, folder / "describe", flags=[])
    said = subprocess.run([described, "describe"], capture_output=True, text=True, check=True).stdout
    return json.loads(said), [path for path in objects if path.stem != "stand_in"]


# ---- Runs -------------------------------------------------------------------------------------------------------


class Largest:
    """The largest errors that the tests' comparisons met: in 2^-24 of the element's peak, and in units of storage."""

    def __init__(self):
        self.close = self.units = 0.0

    @contextlib.contextmanager
    def recorded(self):
        """Record while the tests compare."""
        close, units = cases.check_close, cases.check_units

        def check_close(actual, expected, tolerance, peak, what):
            error = np.abs(actual - expected) / np.maximum(peak, 1e-300) * 2.0**24
            self.close = max(self.close, float(np.max(np.where(actual == expected, 0.0, error), initial=0.0)))
            close(actual, expected, tolerance, peak, what)

        def check_units(actual, expected, dtype, allowed, peak, what):
            unit = UNIT[dtype] * 2.0 ** np.floor(np.log2(np.maximum(peak, 2.0**-14)))
            self.units = max(self.units, float(np.max(np.abs(actual - expected) / unit, initial=0.0)))
            units(actual, expected, dtype, allowed, peak, what)

        cases.check_close, cases.check_units = check_close, check_units
        try:
            yield self
        finally:
            cases.check_close, cases.check_units = close, units


def kinds_of(definition: dict, places) -> list[tuple]:
    """Return the dtypes of some inputs of an operator, for each of its kernels."""
    return list(zip(*(definition[f"input{i}"]["dtype"].split(",") for i in places)))


def line(chip: str, kernel: str, kind, sizes: list[int], largest: Largest) -> None:
    """Print the largest errors of some launches."""
    stored = f", {largest.units:.2f} units of {kind[0]}" if largest.units else ""
    errors = f"{largest.close:.2f} * 2^-24{stored}"
    of = f"{min(sizes)} to {max(sizes)}" if len(sizes) > 1 else str(*sizes)
    print(f"{chip:7} {kernel:16} {' '.join(kind):26} {of} elements: {errors}", flush=True)


def run_rules(program: StandIn, definitions: dict, chip: str) -> None:
    """Run a step of each rule for all dtypes on the sizes of tests/test_ascendc.py, and compare with float64."""
    kinds = kinds_of(definitions["MsOptimAdamw"], (0, 1, 4))
    for rule in cases.RULES:
        for kind in kinds:
            sizes = [*cases.SIZES, 1_000_000] if kind == kinds[0] else [1, 7, 4097]
            with Largest().recorded() as largest:
                for size in sizes:
                    arrays = cases.Arrays(rule, size, *kind)
                    expected = arrays.reference()
                    cases.check_step(arrays, expected, arrays.step(program, CHIPS[chip]), f"{rule}, {size}, {kind}")
            line(chip, rule, kind, sizes, largest)


def run_others(program: StandIn, definitions: dict, chip: str) -> None:
    """Run the passes of Muon and AdamOffload's update likewise."""
    kinds = kinds_of(definitions["MsOptimMuonApply"], (0, 1))
    for kind in kinds:
        sizes = cases.SIZES if kind == kinds[0] else [4097]
        with Largest().recorded() as largest:
            for size in sizes:
                cases.muon(program, size, *kind, cores=CHIPS[chip])
        line(chip, "Muon", kind, sizes, largest)
    for dtype in DTYPES:
        cases.test_the_delta_of_the_host_is_added(program, dtype)
        line(chip, "Delta", (dtype, "float32"), cases.SIZES, Largest())


def run_orders(launch: pathlib.Path, definitions: dict) -> None:
    """Run a core's tiles in each order that flags allow: no bit changes."""
    kinds = kinds_of(definitions["MsOptimAdamw"], (0, 1, 4))
    results: dict = {}
    for order in ORDERS:
        with started(launch, order) as program:
            for rule in cases.RULES:
                for kind in kinds:
                    arrays = cases.Arrays(rule, 5 * cases.TILE + 1, *kind)
                    sums = arrays.step(program, 1)
                    now = [a.tobytes() for a in (arrays.weight, arrays.master, *arrays.states, *sums.values())]
                    assert results.setdefault((rule, kind), now) == now, f"{rule}, {kind}: order {order} changes bits"
    print(f"{len(ORDERS)} orders of instructions, {len(results)} kernels' steps of 5 tiles on a core: no bit changes")


class Program(StandIn):
    """A process that runs operators on the framework; an error has all that was said."""

    def __init__(self, launch: pathlib.Path, said):
        """Start the process. It says something for each core: to a file, since nobody would empty a pipe."""
        self.said = said
        self.process = subprocess.Popen([launch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)

    def failed(self):
        """Raise all that the process said."""
        self.process.wait()
        self.said.seek(0)
        raise WrongError(self.said.read().decode(errors="replace"))


@contextlib.contextmanager
def started(launch: pathlib.Path, order: int = 7):
    """Start a program whose units run in some order."""
    os.environ["MS_OPTIM_EAGER"] = str(order)
    with tempfile.TemporaryFile() as said:
        program = Program(launch, said)
        try:
            yield program
        finally:
            program.process.kill()
            program.process.communicate()


def found(launch: pathlib.Path) -> str:
    """Run a step of AdamW with a fault, in each order until it is found, and say by whom."""
    for order in reversed(ORDERS):
        with started(launch, order) as program:
            try:
                cases.attempt(program)
            except WrongError as error:
                return who(str(error))
            except AssertionError as error:
                return f"our comparison with float64: {str(error).splitlines()[0]}"
    return "nobody"


def who(said: str) -> str:
    """Return who ended a launch, from what was said first."""
    for text in said.splitlines():
        if text.startswith("ours: "):
            return f"our model: {text.split(': ', 2)[2]}"
        if text.startswith("[ERROR]") and "error happened" not in text:
            # The place in the source and the process come first.
            return f"the vendor's framework: {re.sub(r'^.ERROR.(.*?].[0-9]+. )?', '', text)}"
        if "catched" in text:
            return f"the vendor's framework: {text.partition(',')[0]}"
    return said


def run_faults(builder: Builder, folder: pathlib.Path) -> bool:
    """Plant each fault in AdamW for float16 weights with masters, and print who finds it."""
    every = True
    for i, (fault, (file, before, after)) in enumerate(FAULTS.items()):
        kernels = shutil.copytree(OPS / "op_kernel", folder / f"kernels_{i}")
        text = (kernels / file).read_text()
        assert text.count(before) == 1, f"{file} no longer says what the fault is put in place of"
        (kernels / file).write_text(text.replace(before, after))
        finder = found(builder.program(folder / f"fault_{i}", ["MsOptimAdamw"], [1], kernels))
        every &= finder != "nobody"
        print(f"{fault}: found by {finder}", flush=True)
    return every


def checkout(name: str, path: pathlib.Path | None) -> pathlib.Path:
    """Return the checkout of a repository, or end with what is missing."""
    of = f"github.com/{REPOSITORIES[name]}"
    if path is None:
        fault = f"--{name}: a checkout of {of} was expected, and none was given. Give the path of a clone."
    elif not (path / MARKS[name]).is_file():
        fault = f"--{name}: a checkout of {of} was expected, and {path} has no {MARKS[name]}. Give the path of a clone."
    else:
        return path.resolve()
    print(fault, file=sys.stderr)
    raise SystemExit(2)


def main() -> int:
    """Compile, run, compare and plant faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devkit", type=pathlib.Path, help=f"a checkout of github.com/{REPOSITORIES['devkit']}")
    parser.add_argument("--tools", type=pathlib.Path, help=f"a checkout of github.com/{REPOSITORIES['tools']}")
    given = parser.parse_args()
    devkit, tools = checkout("devkit", given.devkit), checkout("tools", given.tools)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        vendor = Vendor(devkit, tools, folder)
        definitions, objects = host(folder / "host")
        probe = folder / "probe.cc"
        probe.write_text("\n".join(unit(operator, definition, *ADDED) for operator, definition in definitions.items()))
        others = vendor.declare_others([probe], vendor.headers(OPS / "op_kernel"))
        wrong = folder / "wrong.cc"
        wrong.write_text(f"{probe.read_text()}float wrong = AscendC::GlobalTensor<float>();\n")
        refused = compiler(*FLAGS, *vendor.headers(OPS / "op_kernel"), "-fsyntax-only", wrong)
        assert "error:" in refused, "the headers accept what is wrong"
        kernels = sum(len(kinds_of(definition, (0,))) for definition in definitions.values())
        print(
            f"The headers accept {kernels} kernels; {others} of the functions that they name have no model.", flush=True
        )
        builder = Builder.build(vendor, definitions, objects)
        launch = builder.program(folder / "kernels", list(definitions))
        for chip in CHIPS:
            with started(launch) as program:
                run_rules(program, definitions, chip)
                run_others(program, definitions, chip)
        run_orders(launch, definitions)
        return 0 if run_faults(builder, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
