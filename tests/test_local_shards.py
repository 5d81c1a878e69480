"""Parameters that are DTensors: each process updates its shards as the whole tensors would be."""

import pytest
from local_shards_worker import RUNS

from ms_optim.kernels import table as kernels

pytestmark = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))
)
# Rules that look at single elements give the same bits; sums over shards are rounded elsewhere.
TOLERATED = {"AdamW": 0.0, "AdamW, bfloat16": 0.0, "Lion": 0.0}


@pytest.mark.program("local_shards")
@pytest.mark.parametrize("processes", [2])
def test_shards_go_where_the_whole_tensors_go(processes, records_of):
    for record in records_of(processes)[0]:
        assert record.keys() == RUNS.keys()
        for name, difference in record.items():
            assert difference <= TOLERATED.get(name, 2e-6), (name, difference)
