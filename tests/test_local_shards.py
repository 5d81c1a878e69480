"""Parameters that are DTensors: each process updates its shards as the whole tensors would be."""

import numpy as np
import pytest
from local_shards_worker import RUNS
from processes import launched

from ms_optim import _kernels

pytestmark = pytest.mark.skipif(
    _kernels.why_not("adamw", "CPU") is not None, reason=str(_kernels.why_not("adamw", "CPU"))
)
# Rules that look at single elements give the same bits; sums over shards are rounded elsewhere.
TOLERATED = {"AdamW": 0.0, "AdamW, bfloat16": 0.0, "Lion": 0.0}


def test_shards_go_where_the_whole_tensors_go(tmp_path):
    _, said = launched(2, tmp_path, "local_shards_worker.py", tmp_path)
    paths = [tmp_path / f"{rank}.npz" for rank in range(2)]
    assert all(path.exists() for path in paths), said
    for path in paths:
        record = dict(np.load(path))
        assert record.keys() == RUNS.keys()
        for name, difference in record.items():
            assert difference <= TOLERATED.get(name, 2e-6), (name, difference)
