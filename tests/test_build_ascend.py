"""The command that builds the operators for Ascend, and their registration with MindSpore on a faked processor."""

import json
import re
import shutil
import subprocess
import sys
import types

import mindspore as ms
import pytest
from ascend_stand_in import OPS, Host, needs_compiler, snake
from mindspore.ops.operations import _custom_ops_utils, custom_ops
from sources import ROOT

from ms_optim.cli import build_ascend
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.paths.ascend import operators as _ascend

BUILDER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
for name in ("-o", "-k", "--soc_version", "--vendor_name", "--install_path", "--ascend_cann_package_path"):
    parser.add_argument(name, required=True)
given = parser.parse_args()
assert (given.soc_version, given.vendor_name) == ("ascend910b", "ms_optim")
pathlib.Path("build.log").write_text("what the compiler said")
assert list(pathlib.Path(given.o).glob("*.cpp")) and list(pathlib.Path(given.k).glob("*.cpp"))
library = pathlib.Path(given.install_path, "vendors/ms_optim/op_api/lib/libcust_opapi.so")
library.parent.mkdir(parents=True)
library.write_text("built")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package without operators, a CANN and a builder."""
    folder = tmp_path / "ms_optim"
    for made in (folder, tmp_path / "cann", tmp_path / "builder"):
        made.mkdir()
    (tmp_path / "builder" / "setup.py").write_text(BUILDER)
    shutil.copytree(OPS, tmp_path / "ops" / "ascendc")
    monkeypatch.setattr(libraries, "FOLDER", folder)
    monkeypatch.setattr(build_ascend, "BUILDER", tmp_path / "builder")
    monkeypatch.setattr(build_ascend.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.delenv(build_ascend.CANN_VARIABLE, raising=False)
    monkeypatch.delenv(kernels.OPP_PATH, raising=False)
    monkeypatch.setenv(kernels.CUSTOM_OPP_PATH, "/others")
    return folder


def test_the_command_builds_where_the_package_looks(package, tmp_path, monkeypatch):
    assert "build-ascend" in str(kernels.why_not("adamw", "Ascend"))
    for _ in range(2):  # the second time in place of the first
        assert build_ascend.build("Ascend910B1", str(tmp_path / "cann")) == 0
    assert f"{kernels.OPP_PATH} is not set" in str(kernels.why_not("adamw", "Ascend"))
    monkeypatch.setenv(kernels.OPP_PATH, "/opp")
    assert kernels.why_not("adamw", "Ascend") is None


def test_the_command_shows_what_a_build_says_that_fails(package, tmp_path, capsys):
    for source in (tmp_path / "ops").rglob("op_kernel/*.cpp"):
        source.unlink()
    assert build_ascend.build("Ascend910B1", str(tmp_path / "cann")) == 1
    said = capsys.readouterr().out
    assert "what the compiler said" in said
    assert "were not built" in said
    assert not (package / "ascend").exists()


@pytest.mark.parametrize(
    "taken, said",
    [
        ("Ascend910B1", "--soc-version must be one of the processors ascend910b and ascend910_93, .* 'Ascend310P'"),
        ("ops", "has no sources"),
        ("builder", "has no builder"),
        ("cann", "CANN is not in .*/cann: .*--cann"),
        ("cmake", "cmake is not installed"),
    ],
)
def test_the_command_says_what_is_missing(package, tmp_path, monkeypatch, capsys, taken, said):
    if taken == "cmake":
        monkeypatch.setattr(build_ascend.shutil, "which", lambda program: None)
    elif (tmp_path / taken).exists():
        shutil.rmtree(tmp_path / taken)
    name = "Ascend310P" if taken == "Ascend910B1" else "Ascend910B1"
    assert build_ascend.build(name, str(tmp_path / "cann")) == 1
    assert re.search(said, capsys.readouterr().out)


def test_a_wheel_has_the_sources(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path / "made"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packed = tmp_path / "made" / "ms_optim" / "ops" / "ascendc"
    names = {path.relative_to(packed) for path in packed.rglob("*") if path.is_file()}
    assert names == {path.relative_to(OPS) for path in OPS.rglob("*") if path.is_file()}


@pytest.fixture
def vendor(package, tmp_path_factory, monkeypatch):
    """What a build leaves for MindSpore to read, from the operators' own definitions, and an Ascend processor."""
    definitions = Host.build(tmp_path_factory).definitions
    own = package / "ascend" / "vendors" / "ms_optim"
    info = own / "op_impl" / "ai_core" / "tbe" / "config" / "ascend910b" / "aic-ascend910b-ops-info.json"
    api = own / "op_api" / "include"
    for folder in (info.parent, api):
        folder.mkdir(parents=True)
    info.write_text(json.dumps(definitions))
    for operator, definition in definitions.items():
        names = [p["name"] for key, p in definition.items() if key.startswith(("input", "output"))]
        parameters = ", ".join(f"const aclTensor *{name}" for name in names)
        text = f"aclnnStatus aclnn{operator}GetWorkspaceSize({parameters}, uint64_t *size, aclOpExecutor **executor);"
        (api / f"aclnn_{snake(operator)}.h").write_text(text)
    get = custom_ops.context.get_context
    context = types.SimpleNamespace(get_ascend_soc_version=lambda: "ascend910b")
    monkeypatch.setattr(
        custom_ops.context, "get_context", lambda name: "Ascend" if name == "device_target" else get(name)
    )
    monkeypatch.setattr(_custom_ops_utils, "MSContext", types.SimpleNamespace(get_instance=lambda: context))
    monkeypatch.setattr(custom_ops, "_compile_aot", lambda file: file)
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(package))
    monkeypatch.setenv(kernels.OPP_PATH, str(package))
    return definitions


@needs_compiler
def test_every_operator_is_registered(vendor, package, monkeypatch):
    monkeypatch.chdir(package)
    launches = [launch for phases in kernels.ON_ASCEND.values() for launch in phases]
    made = {
        launch.function: (
            kernels.ascend_operator(launch.function, (), _ascend.tile_sums(launch.kinds, 2)),
            launch.kinds,
        )
        for launch in launches
    }
    made["MsOptimDelta"] = (kernels.ascend_operator("MsOptimDelta", (), _ascend.tile_sums(1, 0)), 1)
    made["MsOptimSums"] = (_ascend.total_of_tiles(), 2)
    assert made.keys() == vendor.keys()
    assert {one.function for launches in kernels.ON_ASCEND.values() for one in launches} <= made.keys()
    for operator, (primitive, kinds) in made.items():
        inputs = [p for key, p in vendor[operator].items() if key.startswith("input")]
        assert primitive.func == f"aclnn{operator}"
        assert [p["name"] for p in primitive.reg_info["inputs"]] == [p["name"] for p in inputs]
        assert len(primitive.reg_info["dtype_format"]) == len(inputs[0]["dtype"].split(","))
        assert primitive.get_attr_dict()["custom_inputs_type"] == ["aclTensor*"] * (len(inputs) + 1)
        shapes = [{"shape": (2, 5000) if operator == "MsOptimSums" else (50, 100), "dtype": ms.float32}] * len(inputs)
        inferred = primitive.__infer__(*shapes)
        assert (tuple(inferred["shape"]), inferred["dtype"]) == (
            (kinds, 8 if operator == "MsOptimSums" else 24),
            ms.float32,
        )
    own = str(package / "ascend" / "vendors" / "ms_optim")
    assert kernels.os.environ[kernels.CUSTOM_OPP_PATH] == f"{own}:/others"
