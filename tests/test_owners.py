"""How whole matrices are dealt among processes that hold slices of them: work and bytes of each, by counting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_optim.paths.operators.stacks import stacked_places
from ms_optim.rules.coefficients import iterations_of
from ms_optim.rules.orthogonalization import work
from ms_optim.rules.owners import dealers, dealt, elements_sent

ITERATIONS = iterations_of("Muon", None, "jordan", False)
# Kinds of tensors: their number, the matrices of each, their rows and columns, and into how many each is split.
GPT2 = [(12, 1, 2304, 768, 3), (12, 1, 768, 768, 1), (12, 1, 3072, 768, 1), (12, 1, 768, 3072, 1)]
EXPERTS = [(1, 16, 1024, 512, 1), (1, 16, 512, 1024, 1), (1, 1, 512, 512, 1)]


def work_of(kind):
    """Return the operations for one matrix of a kind before it is split."""
    _, _, rows, columns, parts = kind
    return parts * work(ITERATIONS, rows // parts, columns)


def shares(kinds, processes):
    """Return the operations of each process, and the elements that it sends in a step, to others alone."""
    counts = [tensors * batch for tensors, batch, *_ in kinds]
    firsts = dealers(counts, [work_of(kind) for kind in kinds], processes)
    operations, sent = np.zeros(processes), np.zeros(processes)
    for kind, first in zip(kinds, firsts):
        tensors, batch, rows, columns, _ = kind
        sizes = (math.ceil(batch * rows * columns / processes), processes // math.gcd(processes, batch))
        for stack in stacked_places([0] * tensors, [sizes] * tensors):
            owned = [len(own) for own in dealt(len(stack) * batch, processes, first)]
            operations += np.array(owned) * work_of(kind)
            there = np.array(elements_sent(owned, [rows // processes] * processes, columns))
            for table in (there, there.T):
                sent += table.sum(1) - np.diag(table)
    return operations, sent


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kinds", [GPT2, EXPERTS], ids=["GPT-2 small", "16 experts"])
def test_each_process_has_its_share_of_the_work_and_sends_no_more_than_needed(kinds, processes):
    operations, sent = shares(kinds, processes)
    whole = sum(tensors * batch * work_of((tensors, batch, *rest)) for tensors, batch, *rest in kinds)
    assert sum(operations) == pytest.approx(whole)
    assert max(operations) <= 1.15 * whole / processes
    elements = sum(tensors * batch * rows * columns for tensors, batch, rows, columns, _ in kinds)
    assert max(sent) <= 1.1 * 2 * elements * (processes - 1) / processes**2


def test_what_is_left_goes_to_those_that_have_the_least():
    # Eight processes and 12 matrices of each kind: 4 of each kind are left. The heaviest go to the first four.
    operations, _ = shares(GPT2, 8)
    assert max(operations) <= 1.15 * sum(operations) / 8
    assert dealers([12, 12], [2.0, 1.0], 8) == (0, 4)
    assert dealers([12, 12], [1.0, 2.0], 8) == (4, 0)
    assert dealers([8, 3], [1.0, 1.0], 4) == (0, 0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 8))
def test_every_matrix_has_one_owner(count, processes, first):
    owned = dealt(count, processes, first % processes)
    assert sorted(i for own in owned for i in own) == list(range(count))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert 0 in owned[first % processes]


def test_stacks_make_equal_shares_where_there_are_enough():
    size = 1 << 20  # of which four make a stack
    assert [len(stack) for stack in stacked_places([0] * 12, [(size, 3)] * 12)] == [3, 3, 3, 3]
    assert [len(stack) for stack in stacked_places([0] * 7, [(size, 8)] * 7)] == [7]
    assert [len(stack) for stack in stacked_places([0] * 20, [(size, 8)] * 20)] == [8, 8, 4]
