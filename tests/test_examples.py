"""The examples know every optimizer that trains a whole network."""

import ast

from cases import OF_ANY_SHAPE
from sources import ROOT


def test_the_example_trains_with_every_optimizer():
    tree = ast.parse((ROOT / "examples" / "train.py").read_text())
    settings = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    )
    assert {ast.literal_eval(key) for key in settings.keys} == {optimizer.__name__ for optimizer in OF_ANY_SHAPE}
