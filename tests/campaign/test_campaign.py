"""A few programs of each campaign, always the same ones; tests/campaign/run.py searches for as long as one likes."""

import builds
import pytest
from hunt import CAMPAIGNS, hunt
from proofs import BUILT

SEED = 0


def param(campaign):
    """Return the campaign's name; that of launches tests what is built, and nothing of MindSpore."""
    return pytest.param(campaign, marks=[pytest.mark.proof(*BUILT)] if campaign == "launches" else [])


@pytest.mark.parametrize("campaign", map(param, CAMPAIGNS))
def test_campaign(campaign, tmp_path_factory, monkeypatch):
    if campaign == "launches":
        builds.needs_sanitizers()
    monkeypatch.setenv("MS_OPTIM_TEST_BUILDS", str(builds.shared_folder(tmp_path_factory)))
    assert hunt(campaign, SEED, CAMPAIGNS[campaign][0])["programs"] > 0
