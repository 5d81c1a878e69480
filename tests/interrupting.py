"""Interrupts at every line: what Ctrl-C does, at each moment at which Python can see it."""

import pathlib
import sys

import ms_optim

PACKAGE = str(pathlib.Path(ms_optim.__file__).parent)


def at_every_line(act, check, files=(PACKAGE,), most=3000):
    """Call a function again and again, with KeyboardInterrupt at its first line, at its second, until it ends.

    Args:
        act: Called without arguments; its lines, and those that it calls, count where they are in `files`.
        check: Called after each interrupt, with how many lines had run.
        files: Beginnings of the files' paths.
        most: The number of lines at which this gives up.

    Returns:
        int, the number of lines.
    """
    for at in range(most):
        seen = -1

        def trace(frame, event, argument, at=at):
            nonlocal seen
            if not frame.f_code.co_filename.startswith(files):
                return None
            if event == "line":
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act()
            return at
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        check(at)
    raise AssertionError(f"it did not end within {most} lines")
