"""Runs the command line inside the test's process."""

import contextlib
import io
import re
import sys
from unittest import mock

from ms_optim import __main__


def run(*arguments):
    """Return the exit status and what was printed, where it succeeds to standard output, else to standard error."""
    printed, complained = io.StringIO(), io.StringIO()
    words = [str(argument) for argument in arguments]
    with (
        mock.patch.object(sys, "argv", ["ms_optim", *words]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
    ):
        try:
            return __main__.main(), printed.getvalue()
        except SystemExit as stopped:
            return stopped.code, complained.getvalue()


def refused(said, *arguments):
    """Check that arguments are refused with words that a pattern finds."""
    status, complaint = run(*arguments)
    assert status == 2
    assert re.search(said, complaint), complaint
