"""What is said of the package in several places is the same, and the library that tests need is there."""

import re
import shutil
import subprocess
import sys

import pytest
from sources import ROOT

from ms_optim.kernels import table as kernels


def found(pattern, name):
    return re.search(pattern, (ROOT / name).read_text(), re.M)[1]


def test_the_citation_is_of_this_version():
    for key in ("version", "name"):
        cited = found(rf"^{'title' if key == 'name' else key}: (.*)$", "CITATION.cff")
        assert cited == found(rf'^{key} = "(.*)"$', "pyproject.toml")
    assert found(r"^license: (.*)$", "CITATION.cff") == found(r'^license = \{ text = "(.*)" \}$', "pyproject.toml")


def test_the_package_imports_no_more_than_it_needs():
    """What prints tables is imported when something is printed."""
    program = "import sys, ms_optim; assert not {'rich', 'matplotlib'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed (Debian: apt install g++)")
def test_where_a_compiler_is_the_kernels_are_built():
    """Tests of the kernels are skipped where there are none."""
    stated, _ = (ROOT / "ops" / "include" / "rules.h").read_text().split("#define MS_OPTIM_GPU_RULES")
    rows = re.findall(r"^[ #].* RULE\((\w+), \w", stated, re.M)
    assert len(rows) >= 10
    assert [kernels.why_not(rule, "CPU") for rule in rows] == [None] * len(rows)
