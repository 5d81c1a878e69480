"""Runs programs of campaigns, one a line of standard input, and answers each on a pipe.

    python child.py PIPE

A program may end this process, or stop it for good: the process that started it sees either.
"""

import faulthandler
import importlib
import json
import os
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from runtime import spare_operators


def answered(request):
    """Run a program; return what it counted, or what it found."""
    attack = importlib.import_module(request["campaign"]).attack
    try:
        return {"counts": attack(request["program"]) or {}}
    except BaseException as error:
        text = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
        return {"found": text}


def main():
    faulthandler.enable()
    spare_operators()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(answered(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
