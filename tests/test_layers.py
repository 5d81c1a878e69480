"""Each thing stands in the one place that the design gives it."""

import re

import parity
import recording
from sources import ROOT, TESTS

from ms_optim import _kernels

PACKAGE = sorted((ROOT / "ms_optim").rglob("*.py"))
NATIVE = [p for p in sorted((ROOT / "ops").rglob("*")) if p.suffix in {".h", ".cc", ".cu", ".cuh", ".cpp"}]


def files_with(pattern, files):
    return {p.name for p in files if re.search(pattern, p.read_text())}


def test_there_is_something_to_look_at():
    assert len(PACKAGE) > 5
    assert len(NATIVE) > 5


def test_only_the_kernel_table_names_custom_operators():
    assert files_with(r"\bCustom\(", PACKAGE) == {"_kernels.py"}


def test_no_native_source_includes_a_mindspore_header():
    assert not files_with(r'#include\s*[<"].*(mindspore|custom_aot|ms_)', NATIVE)


def test_only_one_file_imports_mindformers():
    assert files_with(r"^\s*(import|from) mindformers", PACKAGE) <= {"mindformers.py"}


def test_rules_know_nothing_of_devices():
    for header in (ROOT / "ops" / "include").glob("*.h"):
        assert not re.search(r"omp\b|cuda_runtime|immintrin|arm_neon", header.read_text()), header.name


def test_optimizers_are_short():
    for name in ("adamw", "adam_offload", "dgc_momentum", "lamb", "lans"):
        assert len((ROOT / "ms_optim" / f"{name}.py").read_text().splitlines()) <= 200


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
    rules = set(_kernels.rules("CPU"))
    assert {*recording.RULES, "dgc_momentum"} == rules
    assert {rule[0].removeprefix("ms_optim_") for rule in parity.RULES} == rules - {"dgc_momentum"}
