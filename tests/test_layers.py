"""Each thing stands in the one place that the design gives it."""

import ast
import importlib
import inspect
import re

import cases
import numpy as np
import parity
import pytest
import recording
import sharding
import shares
from mindspore import Parameter, Tensor
from sources import ROOT, TESTS

import ms_optim
from ms_optim import OPTIMIZERS, former_modules
from ms_optim.kernels import table as kernels

PACKAGE = sorted((ROOT / "ms_optim").rglob("*.py"))
NATIVE = [p for p in sorted((ROOT / "ops").rglob("*")) if p.suffix in {".h", ".cc", ".cu", ".cuh", ".cpp"}]


# The folders and files of the package from the lowest to the highest: an import goes to a lower one.
ORDER = (
    *(
        "versions",
        "unregistered",
        "questions",
        "arguments",
        "schedules",
        "rules",
        "kernels",
        "states",
        "paths",
        "workers",
        "base",
        "dgc",
        "groups",
    ),
    *(
        "optimizers",
        "multi",
        "recipes",
        "local_steps",
        "checkpoints",
        "training",
        "dtensors",
        "former_modules",
        "__init__",
        "mindformers",
    ),
    *("cli", "__main__"),
)


def files_with(pattern, files):
    return {p.name for p in files if re.search(pattern, p.read_text())}


def test_there_is_something_to_look_at():
    assert len(PACKAGE) > 5
    assert len(NATIVE) > 5


def imported(path):
    """The folders and files of the package that a file imports, by the names in ORDER."""
    inside = path.relative_to(ROOT / "ms_optim").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = [*inside[: len(inside) - node.level], *(node.module or "").split(".")]
            first = next((part for part in module if part), "__init__")
            for name in [alias.name for alias in node.names] if first == "__init__" else [first]:
                yield name if name in ORDER or name == "akg" else "__init__"


def test_imports_run_downwards():
    """Also those that only type checkers read: they show what a file knows of."""
    for path in PACKAGE:
        place = path.relative_to(ROOT / "ms_optim").parts[0].removesuffix(".py")
        if place != "akg":  # kernels that AKG compiles
            for other in set(imported(path)) - {"akg"}:
                assert ORDER.index(other) <= ORDER.index(place), (path, other)


def test_former_modules_can_be_imported():
    for former, today in former_modules.FORMER.items():
        assert importlib.import_module(f"ms_optim.{former}") is importlib.import_module(f"ms_optim.{today}")
    assert inspect.isfunction(ms_optim.qk_clip)
    assert inspect.isclass(importlib.import_module("ms_optim.groups").ParamGroups)


def test_only_the_kernel_table_names_custom_operators():
    assert files_with(r"\bCustom\(", PACKAGE) == {"table.py"}


def test_no_native_source_includes_a_mindspore_header():
    assert not files_with(r'#include\s*[<"].*(mindspore|custom_aot|ms_)', NATIVE)


def test_only_one_file_imports_mindformers():
    assert files_with(r"^\s*(import|from) mindformers", PACKAGE) <= {"registered.py"}


def test_rules_know_nothing_of_devices():
    for header in (ROOT / "ops" / "include").glob("*.h"):
        assert not re.search(r"omp\b|cuda_runtime|immintrin|arm_neon", header.read_text()), header.name


def lines_of_code(path):
    """The number of lines of a file without documentation, comments and empty lines."""
    source = path.read_text()
    documents = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    ]
    documented = {line for text in documents for line in range(text.lineno, text.end_lineno + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and i not in documented for i, line in lines)


def test_files_are_short():
    for path in PACKAGE:
        assert lines_of_code(path) <= 250, path


def test_optimizers_are_short():
    """Their documentation is not counted: it is as long as the list of their arguments."""
    for optimizer in OPTIMIZERS:
        source = inspect.getsource(inspect.getmodule(optimizer)).splitlines()
        assert len(source) - len(optimizer.__doc__.splitlines()) <= 190, optimizer.__name__


def test_the_list_of_optimizers_is_whole():
    public = [getattr(ms_optim, name) for name in ms_optim.__all__]
    classes = {x for x in public if inspect.isclass(x) and issubclass(x, ms_optim.FusedOptimizer)}
    assert {*OPTIMIZERS, ms_optim.FusedOptimizer, ms_optim.MultiOptimizer} == classes
    assert len(set(OPTIMIZERS)) == len(OPTIMIZERS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_a_class_states_what_its_constructor_makes(optimizer):
    weight = Parameter(Tensor(np.ones((3, 4), np.float32)), name="w")
    assert len(optimizer.rules) == len(optimizer.trials)
    assert optimizer([weight], 0.1, **optimizer.required).rule.name == optimizer.rules[0].name
    for stated, trial in zip(optimizer.rules, optimizer.trials):
        made = optimizer([weight], 0.1, backend="composite", **trial)
        numbers = ("constants", "flags", "shared_flags", "at_most", "rescale", "iterations", "reads_between")
        assert made.rule._replace(**{name: getattr(stated, name) for name in numbers}) == stated
        others = {p.name for p in made.get_parameters()} - {p.name for p in (weight, *made.states, *made.masters)}
        assert others == set(optimizer.counters)


def test_every_optimizer_is_in_the_tables_of_the_tests():
    """An optimizer that is in no table would miss the float64 references, split tensors and split states silently."""
    assert [case.cls for case in cases.CASES] == list(OPTIMIZERS)
    assert {c.optimizer for n in (2, 4) for c in sharding.configurations(n)} == set(sharding.REFERENCES)
    assert {cls for cls, *_ in shares.CONFIGURATIONS.values()} == {
        cls for cls in OPTIMIZERS if "shard_states" not in cls.refuses
    }
    assert {rule.name for cls in OPTIMIZERS for rule in cls.rules} >= set(kernels.rules("CPU"))


def test_references_import_neither_the_package_nor_mindspore():
    for path in (TESTS / "reference").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (ms_optim|mindspore)", path.read_text(), re.M), path.name


def test_the_build_forbids_what_would_change_bits_or_machines():
    text = (ROOT / "setup.py").read_text()
    assert "-march=native" not in text
    assert "-ffast-math" not in text
    assert "-ffp-contract=off" in text


def test_every_kernel_of_the_table_is_recorded_and_held_against_the_reference():
    """A kernel that is in no table of launches would miss the sanitizers, other processors and drawn arguments."""
    rules = set(kernels.rules("CPU"))
    assert {*recording.RULES, "dgc_momentum"} == rules
    assert {rule[0].removeprefix("ms_optim_") for rule in parity.RULES} == rules - {"dgc_momentum"}
