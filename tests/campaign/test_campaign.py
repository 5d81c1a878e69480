"""A few programs of each campaign, always the same ones; tests/campaign/run.py searches for as long as one likes."""

import builds
import pytest
from hunt import CAMPAIGNS, hunt

SEED = 0


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_campaign(campaign, tmp_path_factory, monkeypatch):
    if campaign == "launches":
        builds.needs_sanitizers()
    monkeypatch.setenv("MS_OPTIM_TEST_BUILDS", str(builds.shared_folder(tmp_path_factory)))
    assert hunt(campaign, SEED, CAMPAIGNS[campaign][0])["programs"] > 0
