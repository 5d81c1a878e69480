"""What is said of the package in several places is the same, and the library that tests need is there."""

import pathlib
import re
import shutil
import subprocess
import sys

import mindspore as ms
import pytest
from sources import ROOT

import ms_optim
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


def newest(library, name):
    """Return the newest version of a library that a library asks for, such as GLIBC_2.17."""
    told = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    needed = told.partition("Version References")[2]
    return max((tuple(map(int, v.split("."))) for v in re.findall(rf"\b{name}_([0-9.]+)", needed)), default=(0,))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed (Debian: apt install binutils)")
@pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there is no library")
def test_the_library_runs_wherever_mindspore_does():
    """It asks for no newer C or C++ library; build_wheels.sh names the wheel by the version of MindSpore's."""
    ours = pathlib.Path(ms_optim.__path__[0], "libms_optim_cpu.so")
    theirs = pathlib.Path(ms.__path__[0], "lib", "libmindspore_core.so")
    for name in ("GLIBC", "GLIBCXX"):
        assert newest(ours, name) <= newest(theirs, name), name
    script = (ROOT / "tools" / "build_wheels.sh").read_text()
    assert newest(theirs, "GLIBC") == tuple(map(int, re.search(r"^oldest=([0-9.]+)", script, re.M)[1].split(".")))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed (Debian: apt install g++)")
def test_where_a_compiler_is_the_kernels_are_built():
    """Tests of the kernels are skipped where there are none."""
    stated, _ = (ROOT / "ops" / "include" / "rules.h").read_text().split("#define MS_OPTIM_GPU_RULES")
    rows = re.findall(r"^[ #].* RULE\((\w+), \w", stated, re.M)
    assert len(rows) >= 10
    assert [kernels.why_not(rule, "CPU") for rule in rows] == [None] * len(rows)
