"""The planted mistakes fit the package as it is today."""

import ast
import re
import shlex

import pytest
from planted_mistakes import MISTAKES
from sources import ROOT, TESTS


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(1, 1 + len(MISTAKES)))
def test_a_mistake_can_be_planted(mistake):
    text = (ROOT / mistake.path).read_text()
    assert text.count(mistake.right) == 1
    assert mistake.wrong != mistake.right
    planted = text.replace(mistake.right, mistake.wrong)
    assert mistake.is_native or ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text)), (
        "it changes no more than the look"
    )


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(1, 1 + len(MISTAKES)))
def test_the_tests_that_must_notice_it_exist(mistake):
    """The names that choose them stand in their file, or where its tests get their names from."""
    file, *options = shlex.split(mistake.tests)
    text = "".join((TESTS / name).read_text() for name in (file, "cases.py", "conftest.py")).lower()
    words = re.findall(r"\w+", " ".join(options).removeprefix("-k "))
    assert [word for word in words if word.lower() not in text] == []


def test_each_mistake_is_another_one():
    assert len({(mistake.file, mistake.right) for mistake in MISTAKES}) == len(MISTAKES)
