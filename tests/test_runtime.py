"""The kernels in PyNative mode with MindSpore's threads as they come, which the other tests spare themselves."""

import os
import re
import subprocess
import sys

from runtime import AS_IT_COMES
from sources import TESTS

FILES = ("test_conformance.py", "test_direct.py", "test_programs.py", "test_release.py")
# In Graph mode operators are handed on in another way, and of MindSpore's own the package takes no addresses.
CHOICE = "not graph and not composite and not operators and not plain and AdamW"


# Not with -m, which would import the package from the sources where another is installed.
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def test_a_step_from_python_waits_for_what_other_threads_still_compute(tmp_path):
    command = [sys.executable, "-c", PYTEST, "-q", "-n", "0", "-p", "no:cacheprovider", "-k", CHOICE]
    ran = subprocess.run(
        [*command, *(str(TESTS / name) for name in FILES)],
        env={**os.environ, AS_IT_COMES: "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > 30
