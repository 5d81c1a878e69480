"""What is said of the package in several places is the same."""

import re

from sources import ROOT


def found(pattern, name):
    return re.search(pattern, (ROOT / name).read_text(), re.M)[1]


def test_the_citation_is_of_this_version():
    for key in ("version", "name"):
        cited = found(rf"^{'title' if key == 'name' else key}: (.*)$", "CITATION.cff")
        assert cited == found(rf'^{key} = "(.*)"$', "pyproject.toml")
    assert found(r"^license: (.*)$", "CITATION.cff") == found(r'^license = \{ text = "(.*)" \}$', "pyproject.toml")
