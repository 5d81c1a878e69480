"""Which MindSpore is taken without a word."""

import warnings

import pytest
from sources import ROOT

from ms_optim.versions import NEWEST, OLDEST, check_version


@pytest.mark.parametrize("found", ["2.9.0", "2.10.0", "2.10.1rc2", "2.8.0", "unknown"])
def test_what_was_tested_is_taken_without_a_word(found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(found)


@pytest.mark.parametrize("found", ["2.11.0", "2.11.0rc1", "3.0.0"])
def test_what_is_newer_gives_one_warning(found):
    with pytest.warns(UserWarning, match=f"tested with MindSpore 2.9 and 2.10, but this is {found}. .* doctor") as said:
        check_version(found)
    assert len(said) == 1


def test_the_oldest_is_that_of_the_requirements():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert f'  "mindspore>={".".join(map(str, OLDEST))}.0",' in lines
    assert OLDEST < NEWEST
