"""The script that runs the kernels on the vendor's framework says what it lacks; what it does is outside CI."""

import subprocess
import sys

import pytest
from sources import ROOT


@pytest.mark.parametrize("given", ["none", "another"])
def test_a_checkout_that_is_missing_is_named(tmp_path, given):
    options = [] if given == "none" else ["--devkit", tmp_path]
    command = [sys.executable, ROOT / "tools" / "ascend_vendor.py", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    came = "none was given" if given == "none" else f"{tmp_path} has no impl/basic_api/kernel_tpipe_impl.h"
    expected = "--devkit: a checkout of github.com/mirror-cann/asc-devkit was expected"
    assert f"{expected}, and {came}. Give the path of a clone." in done.stderr
