"""The C interface, stated by ops/include and by ms_optim/kernels/interface.py: both say the same."""

import ctypes
import re

import numpy as np
import pytest
from sources import ROOT

from ms_optim.kernels import description, interface
from ms_optim.kernels import libraries as kernels_libraries
from ms_optim.kernels import table as kernels

# Enumerations that stay within the native sources.
INTERNAL = {"NoiseUse"}


def libraries():
    return [device for device in ("CPU", "GPU") if kernels_libraries.path_of(device).exists()]


@pytest.mark.parametrize("device", libraries())
def test_python_and_the_library_state_the_same_numbers(device):
    """None differs, and none is stated on one side alone."""
    assert (
        description.exported(kernels_libraries.library(kernels_libraries.LIBRARIES[device].file)) == interface.stated()
    )


def test_every_enumerator_of_the_headers_is_stated():
    stated, found = interface.stated(), 0
    for header in (ROOT / "ops" / "include").glob("*.h"):
        text = re.sub(r"//.*", "", header.read_text())
        for enum in re.finditer(r"enum (?:class )?(\w+)(?: : \w+)? \{(.*?)\}", text, re.S):
            name, body = enum.groups()
            if name in INTERNAL:
                continue
            group = re.findall(r"struct (\w+)", text[: enum.start()])[-1] if name == "Flags" else name
            members = re.findall(r"\b(k\w+)\s*(?:=[^,]*)?(?:,|\s*$)", body)
            assert members, name
            for member in members:
                assert description._renamed(f"{group}::{member}") in stated, (header.name, member)
                found += 1
    assert found > 60


@pytest.mark.parametrize("device", libraries())
def test_the_library_says_what_its_rules_have(device):
    known = kernels_libraries.described(device)
    assert known["adamw"] == (2, 3, False, False, False)
    assert known["adamw_amsgrad"] == (3, 3, False, False, False)
    assert known["lamb"] == (2, 7, False, False, False)
    assert known["lans"] == (2, 6, False, False, False)
    assert known["adam_offload"] == (2, 3, False, False, False)
    assert known["dgc_momentum"] == (2, 4, True, False, False)
    assert known["lion"] == (1, 2, False, False, False)
    assert known["ademamix"] == (3, 6, False, False, False)
    assert known["schedule_free_adamw"] == (2, 6, False, True, False)
    if device == "CPU":
        assert known["muon"] == (2, 7, False, False, True)


def test_a_library_without_these_functions_is_of_another_version(monkeypatch):
    monkeypatch.setattr(kernels_libraries, "library", lambda name: ctypes.CDLL("libm.so.6"))
    kernels_libraries.path_of("CPU").exists() or pytest.skip("there is no library")
    assert "cannot be loaded" in str(kernels.why_not("adamw", "CPU"))
    assert "ms_optim_rules" in str(kernels.why_not("adamw", "CPU"))


def test_the_mask_follows_the_inputs():
    """A share of two tensors: ranges are read, counters written, and so on in the order of step.h."""
    mask = interface.written(counters=3, weights=2, gradients=2, held=4, ranges=True)
    parts = ("flags", "layout", "constants", "rates", "sums", (), ("ranges", 1, 1, 1), (1, 1), ("g", "g"), (1,) * 4)
    assert mask == tuple(part == 1 for part in interface.inputs(*parts))
    assert interface.written(1, 1, 1, 1, exchanges=True) == (False,) * 8 + (True, True, False, True)
    assert interface.written(2, gradients=1, held=1, returned=True) == (False,) * 8 + (True,)


def test_the_layout_has_a_row_for_each_tensor():
    assert interface.layout([0, 1], [-1, 2], [True, False]).tolist() == [[0, -1, 1, 0, 0], [1, 2, 0, 1, 0]]
    assert interface.layout([0], [-1], [False], sent=[5]).tolist() == [[0, -1, 0, 0, 0, 5]]
    assert interface.layout([0], [-1], [False], rows=[7]).tolist() == [[0, -1, 0, 7, 0]]
    assert interface.layout([0], [-1], [False], held=[True]).tolist() == [[0, -1, 0, 0, 1]]
    assert interface.layout([0], [-1], [False]).dtype == np.int32
