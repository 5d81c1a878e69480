"""The composite path uses operators that every device has, and its page lists them."""

import ast
import re

from mindspore import ops
from sources import ROOT

PACKAGE = ROOT / "ms_optim"
FILES = [
    *(file for file in (PACKAGE / "paths" / "operators").glob("*.py") if file.name != "akg.py"),
    *(PACKAGE / "rules").glob("*.py"),
    *(PACKAGE / "optimizers").glob("*.py"),
    *(PACKAGE / "states" / f"{name}.py" for name in ("bits", "formats", "split_masters")),
    PACKAGE / "dgc" / "composite.py",
]
# No operators: names of MindSpore's for operations, and what a graph computes when it is compiled.
NO_OPERATORS = {"ReduceOp", "MultitypeFuncGraph", "depend", "dtype", "shape"}
# Other names of operators, whose documents say no device.
SAME = {"Assign": "assign", "concat": "cat"}
# On CPU it has no document, but the group of all processes: test_sharding.py exchanges by it.
NOT_ON_CPU = {"AllGather"}


def used():
    """Return the names of all operators that the path calls."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("ops", "F"):
                found.add(SAME.get(node.attr, node.attr))
    return found - NO_OPERATORS


def test_every_operator_is_documented_for_every_device():
    names = used()
    assert len(names) > 30
    for name in sorted(names):
        said = re.search(r"Supported Platforms:\s*\n\s*(.*)", getattr(ops, name).__doc__)
        assert said is not None, name
        devices = ("Ascend", "GPU", *(() if name in NOT_ON_CPU else ("CPU",)))
        assert all(device in said[1] for device in devices), (name, said[1])


def test_the_page_lists_them():
    _, _, listed = (ROOT / "docs" / "composite.md").read_text().partition("## Operators")
    assert sorted(re.findall(r"`ops\.(\w+)`", listed)) == sorted(used())
