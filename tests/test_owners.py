"""How whole matrices are dealt among processes that hold slices of them: what each gets, its work and its bytes.

Processes take turns here, so that the exchange of Ascend runs here, too.
"""

import math

import mindspore as ms
import numpy as np
import pytest
from collectives import Collectives
from harness import NUMPY, tensor
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor
from runtime import set_mode
from tolerances import ORTHOGONALIZED

from ms_optim import Muon, heads
from ms_optim.kernels import interface, libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import MuonFlag
from ms_optim.paths.operators.stacks import stacked_places
from ms_optim.rules.coefficients import iterations_of
from ms_optim.rules.orthogonalization import UpdateByKernel, UpdateByOperators, work
from ms_optim.rules.owners import Owners, dealers, dealt, elements_sent
from ms_optim.rules.sliced_matrices import Slicing

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


# The shape of a stack of whole tensors, the dimension that is sliced in a tensor, and the lengths of the slices.
SLICED = {
    "rows": ((5, 7, 4), 0, (1, 2, 4)),
    "columns": ((5, 3, 9), 1, (2, 3, 4)),
    "rows of experts": ((2, 3, 6, 5), 1, (3, 2, 1)),
    "columns of experts": ((2, 3, 4, 6), 2, (2, 2, 2)),
    "channels": ((4, 5, 6, 3, 3), 1, (1, 2, 3)),
    "fewer matrices than processes": ((2, 6, 4), 0, (2, 2, 2)),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", ["world", "another"])
@pytest.mark.parametrize("device", ["Ascend", "GPU", "CPU"])
@pytest.mark.parametrize("case", SLICED)
def test_owners_get_whole_matrices_and_all_get_their_slices_back(case, device, world, wire, first, monkeypatch):
    """Each number is rounded to the format in which it travels, once, and sums of squares are not."""
    shape, axis, lengths = SLICED[case]
    whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rounded = whole.astype(NUMPY[wire]).astype(np.float32)
    is_batch = len(shape) == 4
    items, expected = (x.reshape(-1, *shape[2:]) if is_batch else x for x in (whole, rounded))
    slices = np.split(items, np.cumsum(lengths)[:-1], axis if is_batch else axis + 1)
    owned = dealt(len(items), 3, first)
    collectives = Collectives(monkeypatch, world)

    def process(own):
        slicing = Slicing("world", axis, lengths, own, True, True, shape[1] if is_batch else 1)
        exchange = Owners(slicing, first, wire == "bfloat16", device)

        def step():
            matrices, received = exchange(tensor(slices[own], "float32"))
            assert len(matrices) == len(owned[own])
            if len(owned[own]) > 0:
                np.testing.assert_array_equal(matrices.asnumpy(), expected[owned[own]])
                matrices = 1.1 * matrices
            back = exchange.back(matrices, slices[own].shape, received)
            indices = Tensor(np.array(owned[own], np.float32)) if owned[own] else ()
            return back.asnumpy(), exchange.of_all(indices, (len(items),), back).asnumpy()

        return step

    returned = (np.float32(1.1) * expected).astype(NUMPY[wire]).astype(np.float32)
    returned = np.split(returned, np.cumsum(lengths)[:-1], axis if is_batch else axis + 1)
    for own, (back, indices) in enumerate(collectives.run([process(own) for own in range(3)])):
        np.testing.assert_array_equal(back, returned[own])
        np.testing.assert_array_equal(indices, np.arange(len(items)))
    assert (ms.bfloat16 in collectives.formats) == (wire == "bfloat16" and device == "Ascend")


# The shape of a stack of whole tensors, how each is split, and the arguments.
STACKS = {
    "tall": ((3, 12, 5), None, {}),
    "split": ((2, 12, 7), (5, 7), {"normalize_rows": True}),
    "heads": ((3, 12, 4), heads(3, (1, 3)), {"normalize_rows": True}),
    "experts": ((2, 3, 6, 5), None, {"normalize_rows": True, "nesterov": False}),
    "original scale": ((2, 9, 4), None, {"adjust_lr": "original"}),
    "rounded products": ((2, 8, 16), None, {"ns_dtype": "bfloat16"}),
}


@pytest.mark.skipif(kernels.why_not("muon", "CPU") is not None, reason=str(kernels.why_not("muon", "CPU")))
@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("case", STACKS)
def test_the_kernel_of_owners_gives_what_operators_give(case, mode):
    """Updates, averages of rows, and sums of squares of a stack."""
    set_mode(mode)
    shape, split, arguments = STACKS[case]
    whole = Parameter(tensor(np.ones(shape[1:]), "float32"), name="w")
    splits = None if split is None else {"w": split}
    made = [Muon([whole], splits=splits, backend=backend, **arguments) for backend in ("auto", "composite")]
    by_kernel, by_operators = (one._update(one._layout.forms[0]) for one in made)
    assert isinstance(by_kernel, UpdateByKernel)
    assert isinstance(by_operators, UpdateByOperators)
    rng = np.random.default_rng(0)
    stack = tensor(rng.standard_normal(shape), "float32")
    averages = (tensor(rng.uniform(0.1, 1.0, (*shape[:-1], 1)), "float32"),)
    found = [update(stack, averages if made[0].normalize_rows else ()) for update in (by_kernel, by_operators)]
    within = ORTHOGONALIZED[arguments.get("ns_dtype", "float32")]
    for k, what in enumerate(("updates", "averages", "squares")):
        if what == "averages" and not made[0].normalize_rows:
            continue
        ours, expected = (one[k].asnumpy() for one in found)
        assert ours.shape == expected.shape, what
        np.testing.assert_allclose(ours, expected, rtol=within, atol=within * np.abs(expected).max(), err_msg=what)


@pytest.mark.skipif(kernels.why_not("muon", "CPU") is not None, reason=str(kernels.why_not("muon", "CPU")))
def test_the_kernel_of_owners_refuses_what_does_not_fit():
    def status(**other):
        given = {
            "flags": np.zeros((1, 1, 1 + MuonFlag.NORMALIZES_ROWS), np.int8),
            "constants": np.ones(7),
            "matrices": interface.matrices([[(0, 4, 1, 4, 3)]]),
            "iterations": np.ones((5, 3)),
            "tensors": np.ones((2, 4, 3), np.float32),
            "averages": np.ones((2, 4), np.float32),
            "updates": np.zeros((2, 4, 3), np.float32),
            "after": np.zeros((2, 4), np.float32),
            "squares": np.zeros(2),
        }
        arrays = list({**given, **other}.values())
        library = libraries.library(libraries.LIBRARIES["CPU"].file)
        return libraries.call_of(library, "ms_optim_orthogonalize", arrays, [x.ctypes.data for x in arrays])()

    wrong_dtype, wrong_size = 2, 3
    assert status() == 0
    assert status(tensors=np.ones((2, 4, 3))) == wrong_dtype
    assert status(constants=np.ones(6)) == wrong_size
    assert status(averages=np.ones((2, 3), np.float32), after=np.ones((2, 3), np.float32)) == wrong_size
    assert status(matrices=interface.matrices([[(0, 4, 1, 4, 4)]])) == wrong_size
    assert status(matrices=interface.matrices([[(1, 4, 1, 4, 3)]])) == wrong_size
    assert status(iterations=np.ones((0, 3))) == wrong_size
    assert status(squares=np.zeros(3)) == wrong_size
