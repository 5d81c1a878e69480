"""Where the sources are: beside these tests, or, for tests of an installed wheel, where MS_OPTIM_SOURCE says."""

import os
import pathlib

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = pathlib.Path(os.environ.get("MS_OPTIM_SOURCE", TESTS.parent))
