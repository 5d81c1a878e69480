"""The examples know every optimizer."""

import ast

from sources import ROOT

import ms_optim


def test_the_example_trains_with_every_optimizer():
    tree = ast.parse((ROOT / "examples" / "train.py").read_text())
    settings = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    )
    assert {ast.literal_eval(key) for key in settings.keys} == {optimizer.__name__ for optimizer in ms_optim.OPTIMIZERS}
