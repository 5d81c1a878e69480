"""The planted mistakes fit the package as it is today."""

import ast
import shlex

import pytest
from planted_mistakes import MISTAKES
from sources import ROOT, TESTS


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(1, 1 + len(MISTAKES)))
def test_a_mistake_can_be_planted(mistake):
    text = (ROOT / "ms_optim" / mistake.file).read_text()
    assert text.count(mistake.right) == 1
    assert mistake.wrong != mistake.right
    planted = text.replace(mistake.right, mistake.wrong)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text)), "it changes no more than the look"
    assert (TESTS / shlex.split(mistake.tests)[0]).exists()


def test_each_mistake_is_another_one():
    assert len({(mistake.file, mistake.right) for mistake in MISTAKES}) == len(MISTAKES)
