"""Interrupts at every line: what Ctrl-C does, at each moment at which Python can see it."""

import gc
import pathlib
import sys

import ms_optim

PACKAGE = str(pathlib.Path(ms_optim.__file__).parent)


def interrupted_at(act, at, files=(PACKAGE,)):
    """Call a function with KeyboardInterrupt at one of its lines; return whether it was reached.

    Args:
        act: Called without arguments; its lines, and those that it calls, count where they are in `files`.
        at: The line, counted from 0.
        files: Beginnings of the files' paths.
    """
    seen = -1

    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.startswith(files):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # Python may free optimizers of earlier tests at any line, and the lines of their finalizers would count, too.
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return seen >= at  # Python drops what is raised where it frees an object


def at_every_line(act, check, files=(PACKAGE,), most=3000):
    """Call a function again and again, interrupted at its first line, at its second, until it ends.

    Args:
        act: As in :func:`interrupted_at`.
        check: Called after each interrupt, with how many lines had run.
        files: As in :func:`interrupted_at`.
        most: The number of lines at which this gives up.

    Returns:
        int, the number of lines.
    """
    for at in range(most):
        if not interrupted_at(act, at, files):
            return at
        check(at)
    raise AssertionError(f"it did not end within {most} lines")
