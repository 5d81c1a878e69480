"""Interrupts at a chosen place: every line of the package that a call runs is a moment at which Ctrl-C may come."""

import sys

from sources import ROOT

PACKAGE = str(ROOT / "ms_optim")


def interrupted(call, moment):
    """Call, and raise KeyboardInterrupt before the package's `moment`-th line; return whether the call ended before."""
    left = moment

    def on_line(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame, event, argument):
        return on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True
