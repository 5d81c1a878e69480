"""The table of capabilities says what construction does, and the page says what the table does."""

import importlib.util
import warnings

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from sources import ROOT

from ms_optim import OPTIMIZERS
from ms_optim.base import optimizer as base_optimizer
from ms_optim.dgc import optimizer as dgc_optimizer
from ms_optim.kernels import table as kernels
from ms_optim.kernels.capabilities import DEVICES, FEATURES, LACKS, path_of
from ms_optim.paths import choice
from ms_optim.states import shares

ASKED = {
    "stochastic_rounding": {"stochastic_rounding": True, "master_weights": False},
    "state_dtype": {"state_dtype": "bfloat16"},
    "master_weights": {"master_weights": "split"},
    "shard_states": {"shard_states": True},
    "offload": {"offload": True},
    "grad_clip_norm": {"grad_clip_norm": 1.0},
    "skip_nonfinite": {"skip_nonfinite": True},
    "decay": {"decay": "cautious"},
    "average_decay": {"average_decay": 0.9},
    "weight_norm": {"weight_norm": "relative"},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", ASKED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_construction_does_what_the_table_says(optimizer, feature, device, monkeypatch):
    """With paths that are made of nothing: which one is chosen is all that matters, and no device is needed."""
    made = []
    paths = {name: lambda *_, name=name: made.append(name) or nn.Cell() for name in choice.PATHS}
    monkeypatch.setattr(choice, "PATHS", paths)
    for name in ("CompressedPath", "CompressedCompositePath"):
        monkeypatch.setattr(dgc_optimizer, name, lambda *_, name=name: made.append(name) or nn.Cell())
    monkeypatch.setattr(choice.akg, "why_not", lambda *_: "no reason")
    monkeypatch.setattr(kernels, "device_target", lambda: device)
    known = {"CPU": lambda rule: True, "GPU": lambda rule: True}
    known["Ascend"] = kernels.ON_ASCEND.__contains__
    has_kernel = lambda rule, where: None if known[where](rule) else "no kernel"  # noqa: E731
    monkeypatch.setattr(kernels, "why_not", has_kernel)
    monkeypatch.setattr(shares, "peers", lambda: shares.Peers(0, 2, None))
    params = [Parameter(Tensor(np.ones((2, 3), np.float32)), name="w")]

    def make():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optimizer(params, 0.1, **optimizer.required, **ASKED[feature])

    path, reason = path_of(optimizer, device, [feature])
    if path is None:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as refused:
            make()
        assert feature in str(refused.value)
        assert reason
        return
    assert make().fused == (path != "composite")
    own = "CompressedCompositePath" if path == "composite" else "CompressedPath"
    assert made == [own if issubclass(optimizer, dgc_optimizer.CompressedStep) else path]


def test_every_reason_is_of_a_known_feature():
    assert set(LACKS) == set(choice.PATHS)
    reasons = [*LACKS.values(), *(optimizer.refuses for optimizer in OPTIMIZERS)]
    assert {feature for one in reasons for feature in one} <= set(FEATURES)
    assert base_optimizer.FusedOptimizer.refuses == {}


def test_the_page_is_what_the_table_says():
    specification = importlib.util.spec_from_file_location("capabilities", ROOT / "tools" / "capabilities.py")
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    page = (ROOT / "docs" / "capabilities.md").read_text()
    assert page == tool.page(), "python tools/capabilities.py > docs/capabilities.md"
