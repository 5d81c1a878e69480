"""Fails where a name that users can reach lacks a type: py.typed promises that all have one.

    python tools/check_types.py

It asks pyright about the package that Python imports.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import ms_optim

# MindSpore ships no types, so that pyright knows none of its classes. In an annotation it takes such a class for Any.
# That leaves four complaints, which no annotation of ours can answer; whatever else a class lacks is named apart.
OF_MINDSPORE = re.compile(
    # A class that is made from one of MindSpore's,
    r"Type of (base class|metaclass) unknown"
    # or from such a one of ours,
    r'|Type of base class "ms_optim\.[\w.]+" is partially unknown'
    # and an argument or a result that is such a class of ours, or an instance of one.
    r'|Type of parameter "\w+" is partially unknown\s+Parameter type is "(type\[\w+\]|\w+)( \| \w+)*"'
    r'|Return type is partially unknown\s+Return type is "(type\[\w+\]|\w+)( \| \w+)*"'
)


def public() -> tuple[str, ...]:
    """Return where the public names are defined, with those of the package that their classes derive from."""
    named = [getattr(ms_optim, name) for name in ms_optim.__all__]
    of_package = {
        c for x in named for c in getattr(x, "__mro__", (x,)) if c.__module__.partition(".")[0] == ms_optim.__name__
    }
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in of_package)


def main() -> int:
    """Print the names that lack a type; return 1 if there are any."""
    package = importlib.util.find_spec("ms_optim")
    if package is None or package.origin is None:
        sys.exit("ms_optim is not installed")
    command = ["pyright", "--pythonpath", sys.executable, "--verifytypes", "ms_optim", "--ignoreexternal"]
    path = {"PYTHONPATH": str(pathlib.Path(package.origin).parents[1])}
    # Away from the clone, whose sources pyright would take for what is installed.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--outputjson"], cwd=folder, env=os.environ | path, stdout=subprocess.PIPE, text=True
        )
    found = json.loads(done.stdout)
    symbols = found["typeCompleteness"]["symbols"]
    if not symbols:
        sys.exit(f"pyright found nothing to look at: {found['generalDiagnostics']}")
    lacking, prefixes = {}, (*(f"{name}." for name in public()), "ms_optim.mindformers.")
    for symbol in symbols:
        errors = [said["message"] for said in symbol["diagnostics"] if said["severity"] == "error"]
        errors = [error for error in errors if not OF_MINDSPORE.fullmatch(error)]
        if errors and f"{symbol['name']}.".startswith(prefixes):
            lacking[symbol["name"]] = errors
    for name, errors in lacking.items():
        print(name, *errors, sep="\n  ")
    print(f"Of {len(symbols)} names {len(lacking)} lack a type")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
