"""What is refused, and with which words."""

import re

import pytest


def refused(error, match, make, *arguments):
    """Check that a call raises an error whose words a pattern finds, and return them."""
    with pytest.raises(error) as caught:
        make(*arguments)
    text = str(caught.value)
    assert re.search(match, text), text
    return text
