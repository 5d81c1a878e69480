"""The doctor says what runs and why, and finds a kernel that is wrong; installing works without a compiler."""

import json
import os
import shutil
import subprocess
import sys

import command
import dying
import numpy as np
import pytest
from builds import once, shared_folder
from native import instruction_sets
from sources import ROOT

import ms_optim
from ms_optim import LANS, OPTIMIZERS, AdamW, DGCMomentum, Lion
from ms_optim.cli import checks, doctor
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels

# What the doctor is asked for as a whole: of one kernel, of several, and of one that AKG has none for.
FEW = (AdamW, LANS, DGCMomentum)
ON_ASCEND = (("AdamW", "composite"), ("Lamb", "composite"), ("AdamOffload", "fused"))


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *arguments], **options)


def read(found):
    """Return the checks among what the doctor tells programs."""
    return [checks.Check(**check) for check in found["checks"]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the doctor tells programs of a few optimizers; the tests share it, as it compiles for long."""

    def examine(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ms_optim, "OPTIMIZERS", FEW)
            status, report = command.run("doctor", "--json", "--all")
        assert status == 0
        (folder / "report.json").write_text(report)

    return json.loads((once(shared_folder(tmp_path_factory), "doctor", examine) / "report.json").read_text())


def test_doctor_tells_programs_what_it_found(found):
    assert set(found["missing"]) == {"CPU", "GPU", "Ascend", "AKG"}
    assert ("threads" in found) == (found["missing"]["CPU"] is None)
    by_task = {(check.optimizer, check.backend): check for check in read(found)}
    assert len(by_task) == len(found["checks"]) == 2 * sum(len(cls.trials) for cls in FEW) + 1
    assert all(check.right for check in by_task.values())
    assert by_task["AdamW()", "auto"].check.startswith("agrees") == (found["missing"]["CPU"] is None)
    if found["missing"]["CPU"] is None:
        assert found["instruction_set"].encode() == instruction_sets()[0]
        assert found["products"].startswith(found["instruction_set"]) or found["products"] == "amx"


def test_doctor_reports_each_check_as_it_ends_and_the_verdict_last(found, monkeypatch):
    """As text it says what it tells programs."""
    told = [(check, "") for check in read(found)]
    monkeypatch.setattr(checks, "in_child", lambda tasks: iter(told))
    status, report = command.run("doctor")
    assert status == 0
    assert "instruction set" in report
    assert "in an emulator on x86-64 with AVX2 and without AVX-512" in report
    rows = [line for line in report.splitlines() if line.startswith("  ") and line.split("  ")[1] in str(told)]
    assert [row.split("  ")[1] for row in rows] == [check.optimizer for check, _ in told]
    compared = [check for check, _ in told if check.path in ("fused", "akg")]
    assert report.count("agrees") == len(compared)
    assert report.splitlines()[-1].startswith(f"All {len(compared)} kernels are right.")
    # A reason that the head has, or an earlier row, is not repeated.
    assert all(report.count(check.why) <= 1 for check, _ in told if check.path not in ("fused", "akg"))


def test_doctor_asks_for_akg_when_told(monkeypatch):
    asked = []
    monkeypatch.setattr(checks, "in_child", lambda tasks: iter(asked.append(tasks) or ()))
    for options, backends in (((), {"auto"}), (("--all",), {"auto", "akg"})):
        command.run("doctor", *options)
        assert {task.backend for task in asked.pop()} == backends


def test_doctor_survives_a_kernel_that_ends_the_process(monkeypatch, capfd, tmp_path):
    """Each is a row with what to do, and the checks after it are made. Nothing is left in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "STEPS", 2)
    monkeypatch.setattr(ms_optim, "OPTIMIZERS", (dying.Dies, Lion, dying.Segfaults, dying.Fails, dying.Wrong))
    status, report = command.run("doctor")
    assert status == 1
    rows = {line.split("()")[0].strip(): line for line in report.splitlines() if "()" in line}
    assert "died: SIGILL: this processor lacks an instruction. Set MS_OPTIM_INSTRUCTION_SET=baseline" in rows["Dies"]
    assert 'died: SIGSEGV: use backend="composite", and report it' in rows["Segfaults"]
    assert "failed: TypeError: of the optimizer's own" in rows["Fails"]
    assert ("agrees" in rows["Lion"]) == (kernels.why_not("lion", "CPU") is None)
    assert report.splitlines()[-1].startswith("NOT RIGHT: Dies() (died), Segfaults() (died), Fails() (failed)")
    assert os.listdir() == []
    if kernels.why_not("adamw", "CPU") is None:
        assert "WRONG" in rows["Wrong"]


def test_what_a_child_printed_is_shown_where_it_is_wrong():
    (check, printed), (right, nothing) = checks.in_child([checks.Task(dying.Dies, {}), checks.Task(Lion, {})])
    assert "the last words" in printed
    assert (check.right, right.right, nothing) == (False, True, "")


def test_without_kernels_the_verdict_says_so():
    def check(path, right):
        return checks.Check("AdamW()", "auto", path, "", "", right)

    assert doctor.verdict([check("composite", True)]).startswith("No kernel runs here")
    assert doctor.verdict([check("fused", True)]) == "All 1 kernels are right."
    assert doctor.verdict([check("fused", True), check("akg", False)]).startswith("NOT RIGHT: AdamW() (akg)")


def test_the_verdict_names_what_runs_without_a_kernel_and_how_to_get_one():
    """As on an Ascend host without a build, where only AdamOffload has a kernel: that of the host."""
    found = [checks.Check(f"{name}()", "auto", path, "", "", True) for name, path in ON_ASCEND]
    said = doctor.verdict(found, "a library is missing: build it")
    assert said.startswith(
        "All 1 kernels are right. Without a kernel, on MindSpore's operators, which is slower: AdamW, Lamb."
    )
    assert said.endswith("Why: a library is missing: build it")
    assert doctor.verdict(found[:2], "a library is missing: build it").endswith(
        "slower. Why: a library is missing: build it"
    )
    assert doctor.verdict(found, None).endswith("AdamW, Lamb.")


def test_doctor_names_the_package_that_akg_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "decorator", None)
    path, why, _, _ = checks.examine(AdamW, {}, "akg")
    assert path == "no akg"
    assert "pip install decorator" in why


@pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there are no kernels")
def test_doctor_checks_every_kernel_of_the_cpu():
    rules = {checks.build(cls, trial, "composite").rule.name for cls in OPTIMIZERS for trial in cls.trials}
    assert rules == set(kernels.rules("CPU"))


def test_doctor_names_the_white_list_that_shuts_the_kernels_out(tmp_path, monkeypatch):
    monkeypatch.setenv(kernels.WHITE_LIST, str(tmp_path))
    # AKG has kernels of the one's rules, not of the other's.
    monkeypatch.setattr(ms_optim, "OPTIMIZERS", (AdamW, DGCMomentum))
    status, report = command.run("doctor")
    assert status == 0
    assert f"set {kernels.WHITE_LIST}={libraries.FOLDER}" in report
    assert "composite" in report


@pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there is no kernel to be wrong")
def test_doctor_finds_a_wrong_kernel(monkeypatch):
    """A rule whose MindSpore form says something else than its kernel is called wrong."""
    path, _, verdict, right = checks.examine(AdamW, {})
    assert (path, right) == ("fused", True)

    def wrong(self, scalars, m, v):
        return m / scalars[0] * 1.001

    monkeypatch.setattr(AdamW, "adam_direction", wrong)
    _, _, verdict, right = checks.examine(AdamW, {})
    assert not right
    assert "WRONG" in verdict


@pytest.mark.skipif(kernels.why_not("adamw", "CPU") is not None, reason="there are no kernels")
def test_doctor_checks_split_masters(monkeypatch):
    path, _, verdict, right = checks.examine_split_masters()
    assert (path, verdict, right) == ("fused", "agrees: masters are bitwise equal to float32 masters", True)
    restored = checks.split_masters.restored

    def off_by_a_bit(weights, remainders):
        return restored(weights, remainders ^ np.int16(1))

    monkeypatch.setattr(checks.split_masters, "restored", off_by_a_bit)
    *_, verdict, right = checks.examine_split_masters()
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
