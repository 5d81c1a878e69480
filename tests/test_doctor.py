"""The doctor says what runs and why, and finds a kernel that is wrong; installing works without a compiler."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings

import command
import numpy as np
import pytest
from builds import once, shared_folder
from sources import ROOT

import ms_optim
from ms_optim import LANS, OPTIMIZERS, AdamW, DGCMomentum, _kernels, _libraries
from ms_optim.cli import doctor
from ms_optim.paths import choice

# What the doctor is asked for as a whole: of one kernel, of several, and of one that AKG has none for.
FEW = (AdamW, LANS, DGCMomentum)


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *arguments], **options)


def read(found):
    """Return the checks among what the doctor tells programs."""
    return [doctor.Check(**check) for check in found["checks"]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the doctor tells programs of a few optimizers; the tests share it, as it compiles for long."""

    def examine(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ms_optim, "OPTIMIZERS", FEW)
            status, report = command.run("doctor", "--json")
        assert status == 0
        (folder / "report.json").write_text(report)

    return json.loads((once(shared_folder(tmp_path_factory), "doctor", examine) / "report.json").read_text())


def test_doctor_tells_programs_what_it_found(found):
    assert set(found["missing"]) == {"CPU", "GPU", "Ascend", "AKG"}
    assert ("threads" in found) == (found["missing"]["CPU"] is None)
    checks = {(check.optimizer, check.backend): check for check in read(found)}
    assert len(checks) == len(found["checks"]) == 2 * sum(len(cls.trials) for cls in FEW) + 1
    assert all(check.right for check in checks.values())
    assert checks["AdamW()", "auto"].check.startswith("agrees") == (found["missing"]["CPU"] is None)


def test_doctor_reports_paths_and_checks(found, monkeypatch):
    """As text it says what it tells programs."""
    by_optimizer = {cls: [c for c in read(found) if c.optimizer.startswith(f"{cls.__name__}(")] for cls in FEW}
    monkeypatch.setattr(ms_optim, "OPTIMIZERS", FEW)
    monkeypatch.setattr(doctor, "checked", by_optimizer.__getitem__)
    status, report = command.run("doctor")
    assert status == 0
    assert "instruction set" in report
    assert "threads" in report
    for optimizer in FEW:
        assert optimizer.__name__ in report
    has_kernels = _kernels.why_not("adamw", "CPU") is None
    rules = [trial for cls in FEW for trial in cls.trials] if has_kernels else []
    rules += [rule.name for cls in FEW for rule in cls.rules if _kernels.why_not_akg(rule.name) is None]
    assert report.count("agrees") == len(rules) + has_kernels  # and split masters


def test_doctor_fails_where_a_kernel_is_wrong(found, monkeypatch):
    wrong = [dataclasses.replace(check, right=False) for check in read(found)[:1]]
    for checks, status in ((wrong, 1), ([], 0)):
        monkeypatch.setattr(doctor, "checked", lambda optimizer, checks=checks: checks)
        assert command.run("doctor")[0] == command.run("doctor", "--json")[0] == status


def test_doctor_names_the_package_that_akg_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "decorator", None)
    path, why, _, _ = doctor.examine(AdamW, {}, "akg")
    assert path == "no akg"
    assert "pip install decorator" in why


@pytest.mark.skipif(_kernels.why_not("adamw", "CPU") is not None, reason="there are no kernels")
def test_doctor_checks_every_kernel_of_the_cpu():
    rules = {doctor.build(cls, trial, "composite").rule.name for cls in OPTIMIZERS for trial in cls.trials}
    assert rules == set(_kernels.rules("CPU"))


def test_what_akg_prints_and_leaves_is_put_away(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    log, key, folder = (tmp_path / name for name in ("dsa_transfrom.log", "kernel_build_tmp.key", "akg_kernel_meta"))
    log.write_text("the user's own")
    with doctor.others_put_away() as said:
        os.system("echo noise")
        folder.mkdir()
        for path in (folder / "kernel.json", log, key):
            path.touch()
        said.seek(0)
        assert said.read() == b"noise\n"
    assert [path.name for path in tmp_path.iterdir()] == [log.name]
    assert capfd.readouterr().out == ""


def test_doctor_names_the_white_list_that_shuts_the_kernels_out(tmp_path, monkeypatch):
    monkeypatch.setenv(_kernels.WHITE_LIST, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    # AKG has kernels of the one's rules, not of the other's.
    monkeypatch.setattr(ms_optim, "OPTIMIZERS", (AdamW, DGCMomentum))
    monkeypatch.setattr(doctor, "STEPS", 2)
    monkeypatch.setattr(choice, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status, report = command.run("doctor")
    assert status == 0
    assert f"set {_kernels.WHITE_LIST}={_libraries.FOLDER}" in report
    assert "composite" in report
    said = [str(warning.message) for warning in caught]
    assert sum("ms_optim runs in AKG's kernels" in words for words in said) == 1
    assert sum("ms_optim runs on the slower composite path" in words for words in said) == 1


@pytest.mark.skipif(_kernels.why_not("adamw", "CPU") is not None, reason="there is no kernel to be wrong")
def test_doctor_finds_a_wrong_kernel(monkeypatch):
    """A rule whose MindSpore form says something else than its kernel is called wrong."""
    path, _, verdict, right = doctor.examine(AdamW, {})
    assert (path, right) == ("fused", True)

    def wrong(self, scalars, m, v):
        return m / scalars[0] * 1.001

    monkeypatch.setattr(AdamW, "adam_direction", wrong)
    _, _, verdict, right = doctor.examine(AdamW, {})
    assert not right
    assert "WRONG" in verdict


@pytest.mark.skipif(_kernels.why_not("adamw", "CPU") is not None, reason="there are no kernels")
def test_doctor_checks_split_masters(monkeypatch):
    path, _, verdict, right = doctor.examine_split_masters()
    assert (path, verdict, right) == ("fused", "agrees: masters are bitwise equal to float32 masters", True)
    restored = doctor._masters.restored

    def off_by_a_bit(weights, remainders):
        return restored(weights, remainders ^ np.int16(1))

    monkeypatch.setattr(doctor._masters, "restored", off_by_a_bit)
    *_, verdict, right = doctor.examine_split_masters()
    assert not right
    assert verdict.startswith("WRONG")


WITHOUT_COMPILER = """
import sys, warnings
if "hidden" in sys.argv:
    sys.modules["decorator"] = None
warnings.simplefilter("always")
import numpy as np
from mindspore import Parameter, Tensor
import ms_optim
w = Parameter(Tensor(np.ones(3, np.float32)), name="w")
for _ in range(2):
    optimizer = ms_optim.AdamW([w], 0.1)
    optimizer((Tensor(np.ones(3, np.float32)),))
assert abs(w.asnumpy()[0] - 0.8) < 1e-5, w.asnumpy()
print("akg:", optimizer.akg)
try:
    ms_optim.AdamW([w], backend="aot")
except RuntimeError as error:
    print("refused:", error)
print(ms_optim.__file__)
"""


def test_without_a_compiler_it_installs_and_runs_with_one_warning(tmp_path):
    """In AKG's kernels, which are in the package, or where these cannot run in MindSpore's operators."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "*.so", "build", "*.egg-info", ".venv"))
    target = tmp_path / "target"
    installed = run(
        *("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(target), str(source)),
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "PATH": os.path.dirname(sys.executable)},
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert not list(target.rglob("*.so"))
    for hidden, path in (("hidden", "on the slower composite path"), ("", "in AKG's kernels")):
        environment = {**os.environ, "PYTHONPATH": str(target)}
        ran = run("-c", WITHOUT_COMPILER, hidden, cwd=tmp_path, env=environment)
        assert ran.returncode == 0, ran.stderr
        assert str(target) in ran.stdout
        assert ran.stderr.count("ms_optim runs") == ran.stderr.count(f"ms_optim runs {path}") == 1
        assert f"akg: {not hidden}" in ran.stdout
        assert "a C++17 compiler with OpenMP" in ran.stderr
        assert "refused: For 'AdamW', backend='aot' has no fused kernel" in ran.stdout
