"""States split over workers: how they are cut, that training is the same, and checkpoints for any number of workers."""

import json
import math

import mindspore as ms
import numpy as np
import pytest
from harness import numbers
from mindspore import Parameter, Tensor
from native import Launch, call
from shares import CONFIGURATIONS, ELEMENTWISE, RESUMED, RUNS, SHAPES, build, checkpoint, gradients

from ms_optim import AdamW, DGCMomentum, Muon, heads, merge_states
from ms_optim.paths.fused.sharded_states import pieces
from ms_optim.rules.orthogonalization import work
from ms_optim.states import shares as states_shares
from ms_optim.states.shares import ENTRY, GRAIN, Peers, Shares, cut

GPT2_LAYER = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768), (3072,)]
GPT2 = [(50257, 768), (1024, 768), *[*GPT2_LAYER, (768, 3072), (768,)] * 12, (768,), (768,)]


def refused(match, error=ValueError):
    return pytest.raises(error, match=match)


# ---- How tensors are cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("coded", [False, True])
def test_shares_of_gpt2_are_even(count, coded):
    sizes = [math.prod(shape) for shape in GPT2]
    costs = [2 if coded and size >= 4096 else 8 for size in sizes]
    ranges = cut(sizes, costs, [GRAIN] * len(sizes), count)
    loads = ((ranges[:, :, 1] - ranges[:, :, 0]) * costs).sum(axis=1)
    assert loads.max() <= 1.001 * loads.mean()
    assert loads.min() >= 0.999 * loads.mean()


@pytest.mark.parametrize("seed", range(20))
def test_shares_hold_every_element_once_and_are_cut_at_grains(seed):
    rng = np.random.default_rng(seed)
    n, count = rng.integers(1, 12), int(rng.integers(1, 9))
    sizes = [int(size) for size in 10 ** rng.uniform(0, 5, n)]
    grains = [int(grain) for grain in rng.choice([256, 1024, 3840], n)]
    ranges = cut(sizes, rng.uniform(1, 12, n), grains, count)
    for i, size in enumerate(sizes):
        own = [(begin, end) for begin, end in ranges[:, i].tolist() if begin < end]
        assert [begin for begin, _ in own] == [0] + [end for _, end in own[:-1]]
        assert own[-1][1] == size
        assert all(begin % grains[i] == 0 for begin, _ in own)


def test_matrices_are_dealt_by_the_work_of_their_splits():
    """Twelve heads of 64 rows take a thirtieth of the work of the whole matrix."""
    params = [Parameter(Tensor(np.zeros((768, 768), np.float32)), name=name) for name in "abc"]
    layout = Muon(params, splits={"a": heads(12), "b": 1})._layout
    rule = Muon.rules[0]._replace(iterations=((3.4445, -4.7750, 2.0315),) * 5)
    matrices = [layout.matrices(i) for i in range(3)]
    assert [len(own) for own in matrices] == [12, 1, 1]
    by_heads, whole, unsplit = states_shares.share_costs(rule, layout.options, layout.shapes, layout.dtypes, matrices)
    held = 4.0  # bytes of a state
    assert whole == unsplit
    assert (by_heads - held) / (whole - held) == pytest.approx(
        12 * work(rule.iterations, 64, 768) / work(rule.iterations, 768, 768)
    )
    assert by_heads < whole / 10


def test_a_centralized_tensor_is_cut_between_rows():
    shares = Shares(Peers(0, 3, None), ("w",), ((1000, 48),), [8], [True], ("m",))
    assert shares.ranges[0, 0, 1] % 48 == 0
    assert shares.ranges[0, 0, 1] % GRAIN == 0


def test_slices_of_different_sizes_are_dealt_alike():
    """All processes that hold slices of a matrix must agree which of their replicas takes it."""
    dealt = []
    for rows in ((60, 60, 4, 4), (4, 4, 60, 60)):
        shapes, alone = [(n, 32) for n in rows], [True] * 4
        shares = Shares(Peers(0, 2, None), "abcd", shapes, [1] * 4, [False] * 4, ("m",), alone, common=[60 * 32] * 4)
        np.testing.assert_array_equal(shares.ranges.max((0, 2)), [32 * n for n in rows])
        dealt.append([np.flatnonzero(of_one.any(1)).tolist() for of_one in shares.ranges])
    assert dealt == [[[0, 1], [2, 3]]] * 2


def test_windows_carry_each_byte_once():
    ranges, sizes = np.array([[1024, 5000], [0, 0], [0, 7]]), [4, 2, 2]
    total = 3976 * 4 + 14
    found = [(k, piece) for k in range(0, total, 1000) for piece in pieces(ranges, sizes, k, min(total, k + 1000))]
    assert sum(size for _, (_, _, size, _) in found) == total
    first = {i: begin * each for i, ((begin, _), each) in enumerate(zip(ranges, sizes))}
    before = {0: 0, 2: 3976 * 4}
    for k, (i, begin, _, place) in found:
        assert k + place == before[i] + begin - first[i]


def test_the_copies_refuse_what_is_out_of_bounds():
    weight, wire = np.arange(10, dtype=np.float32), np.zeros(4, np.int32)
    for piece, status in [
        ((0, 8, 16, 0), 0),
        ((0, 28, 16, 0), 3),
        ((0, -4, 8, 0), 3),
        ((0, 0, 16, 4), 3),
        ((1, 0, 4, 0), 3),
        ((0, 0, 4, -4), 3),
        ((-1, 0, 4, 0), 3),
        ((0, 4, -4, 4), 3),
    ]:
        assert call("ms_optim_pack", [np.array([piece]), weight, wire]) == status
        assert call("ms_optim_unpack", [np.array([piece]), wire, weight, np.zeros(1, np.int32)]) == status
    assert wire.view(np.float32).tolist() == [2.0, 3.0, 4.0, 5.0]
    assert call("ms_optim_pack", [np.array([[0, 0, 4, 0]]), weight, np.zeros(4, np.float32)]) == 2
    for n, dtype, status in ((10, np.int8, 0), (10, np.uint8, 2), (9, np.int8, 3)):
        there = np.zeros(n, dtype)
        assert call("ms_optim_copy", [np.arange(10, dtype=np.int8), there, np.zeros(1, np.int32)]) == status
        assert there.tolist() == (list(range(10)) if status == 0 else [0] * n)


@pytest.mark.parametrize(
    "begin, end, rows, status",
    [(256, 1000, 0, 0), (100, 844, 0, 3), (768, 1512, 0, 3), (-256, 488, 0, 3), (256, 1000, 10, 3)],
)
def test_the_kernel_refuses_ranges_that_cannot_be(begin, end, rows, status):
    """Of 1,000 elements and states for 744: not cut at a block, past the end, within a row of 100."""
    shape = (rows, 1000 // rows) if rows else (1000,)
    weight, gradient = np.ones(shape, np.float32), np.ones(shape, np.float32)
    states = [[np.zeros(744, np.float32)], [np.zeros(744, np.float32)]]
    layout = [[0, -1, rows, 0]]
    launch = Launch("ms_optim_adamw", [weight], [gradient], states, (0.9, 0.999, 1e-8), 4, layout=layout, shared=256)
    launch.arrays.insert(5, np.array([[begin, end]]))
    assert call("ms_optim_adamw", launch.arrays) == status
    if status == 0:
        assert ((weight != 1.0) == (np.arange(1000) >= 256)).all()


# ---- Several processes ---------------------------------------------------------------------------------------------


@pytest.mark.program("shares")
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_train_as_one_that_keeps_all_states(processes, records_of):
    records, folder = records_of(processes)
    for mode, name in RUNS[processes]:
        run = f"{mode}/{name}/share"
        whole = next(record for record in records if f"{name}/whole/w0" in record)
        shares = [ms.load_checkpoint(str(checkpoint(folder / str(rank), run))) for rank in range(processes)]
        check_weights(name, run, records, whole)
        check_reports(name, run, records, whole)
        check_bytes(name, run, records, whole)
        check_merged(name, merge_states(shares), ms.load_checkpoint(str(checkpoint(folder, f"{name}/whole"))))
    if processes == 2:
        for name in RESUMED:
            check_resumed(name, records)
        for mode in ("pynative", "graph"):
            check_trained(mode, records)


def check_weights(name, run, records, whole):
    """They are those without shares, bit for bit where elements are for themselves, and the same on all workers."""
    for i in range(len(SHAPES)):
        actual, expected = records[0][f"{run}/w{i}"], whole[f"{name}/whole/w{i}"]
        tolerance = 0.0 if name in ELEMENTWISE else 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=f"{run} w{i}")
        assert all(record[f"{run}/w{i}"].tobytes() == actual.tobytes() for record in records), f"{run} w{i}"
        average = f"average of w{i}"
        if f"{name}/whole/{average}" in whole:
            expected = whole[f"{name}/whole/{average}"]
            assert (expected != actual).any(), f"{run} {average}"
            assert all((record[f"{run}/{average}"] == expected).all() for record in records), f"{run} {average}"


def check_reports(name, run, records, whole):
    """Every worker reports the statistics of all tensors, and counts steps, as without shares."""
    for record in records:
        for what, tolerance in (("counts", 0.0), ("statistics", 1e-6)):
            actual, expected = record[f"{run}/{what}"], whole[f"{name}/whole/{what}"]
            np.testing.assert_allclose(actual, expected, rtol=tolerance, err_msg=f"{run} {what}")


def check_bytes(name, run, records, whole):
    """Each worker holds an even part of the states, and no more than all of them are held."""
    held = [int(record[f"{run}/bytes"]) for record in records]
    assert sum(held) == whole[f"{name}/whole/bytes"], run
    # A matrix is one worker's, and the first is more than half of all.
    if not CONFIGURATIONS[name][0].rules[0].has_matrices:
        assert max(held) <= 1.05 * sum(held) / len(records), run


def check_merged(name, full, whole):
    """The merged shares are the checkpoint without shares."""
    assert full.keys() == whole.keys()
    for key in full.keys() - {"statistics"}:
        assert (full[key].shape, full[key].dtype) == (whole[key].shape, whole[key].dtype)
        if name in ELEMENTWISE:
            assert full[key].asnumpy().tobytes() == whole[key].asnumpy().tobytes(), f"{name} {key}"


def check_resumed(name, records):
    """A run that went on from merged shares came to the same bits."""
    for record in records:
        for i in range(len(SHAPES)):
            unbroken = record[f"pynative/{name}/share/w{i}"]
            assert record[f"{name}/resumed/w{i}"].tobytes() == unbroken.tobytes(), f"{name} w{i}"


def check_trained(mode, records):
    """Data parallel training of a network, each worker on its own data, gives the same bits."""
    for record in records:
        for i in range(4):
            np.testing.assert_array_equal(
                record[f"{mode}/trained/share/w{i}"], records[0][f"{mode}/trained/whole/w{i}"], f"{mode} w{i}"
            )


# ---- Checkpoints for any number of workers, in one process ----------------------------------------------------------


class OneOfMany(Peers):
    """A worker whose peers are not there: it can hold a share, not step."""

    def all_gather(self):
        return None


@pytest.fixture
def split(monkeypatch):
    """Return a function that builds the optimizers of all workers."""

    def build_all(name, count):
        optimizers = []
        for rank in range(count):
            monkeypatch.setattr(states_shares, "peers", lambda rank=rank: OneOfMany(rank, count, None))
            optimizers.append(build(name, shard_states=True)[1])
        return optimizers

    return build_all


def stepped(name):
    """Return the state dict of an optimizer with all states after two steps."""
    _, optimizer = build(name)
    for step in range(2):
        optimizer(gradients(name, step))
    return optimizer.state_dict()


def loaded(optimizers, full):
    for optimizer in optimizers:
        optimizer.load_state_dict(full)
    return [optimizer.state_dict() for optimizer in optimizers]


def assert_same(one, other):
    """Compare all but the weights, which load_state_dict passes over."""
    assert one.keys() == other.keys()
    for key in one.keys() - {f"w{i}" for i in range(len(SHAPES))}:
        assert (one[key].shape, one[key].dtype) == (other[key].shape, other[key].dtype), key
        assert one[key].asnumpy().tobytes() == other[key].asnumpy().tobytes(), key


@pytest.mark.parametrize(
    "name", ["adamw, masters", "adamw, rounded", "adamw, 4bit", "muon, 4bit", "offload", "lamb", "lans, 8bit"]
)
def test_a_checkpoint_of_some_workers_goes_on_on_others(name, split):
    full = stepped(name)
    for count in (2, 3, 5):
        states = loaded(split(name, count), full)
        assert sum(numbers(s[key]).size for s in states for key in s if key.endswith(".w0")) == sum(
            numbers(full[key]).size for key in full if key.endswith(".w0")
        )
        assert_same(merge_states(states[::-1]), full)
        for optimizer, state in zip(split(name, count), states):
            optimizer.load_state_dict(state)
            assert_same(optimizer.state_dict(), state)
    _, whole = build(name)
    whole.load_state_dict(merge_states(states))
    assert_same(whole.state_dict(), full)


def test_states_are_converted_and_cut(split):
    """From codes to float32 or to other codes, and from one state dict to the shares of several workers, at once."""
    for there, here in (("lans, 8bit", "lans"), ("adamw, rounded", "adamw, 4bit"), ("adamw, 4bit", "adamw, rounded")):
        # One of the two keeps the largest second moments, too.
        full = stepped(there)
        converted = build(here)[1]
        converted.load_state_dict(full, strict=False)
        optimizers = split(here, 3)
        for optimizer in optimizers:
            optimizer.load_state_dict(full, strict=False)
        assert_same(merge_states([optimizer.state_dict() for optimizer in optimizers]), converted.state_dict())


def test_there_may_be_more_workers_than_grains(monkeypatch):
    for count in (2, 4):
        params = [Parameter(Tensor(np.ones(k, np.float32)), name=f"w{k}") for k in (3, 5)]
        states = []
        for rank in range(count):
            monkeypatch.setattr(states_shares, "peers", lambda rank=rank, count=count: OneOfMany(rank, count, None))
            states.append(AdamW(params, shard_states=True).state_dict())
        assert_same(merge_states(states), AdamW(params).state_dict())


# ---- What is refused -----------------------------------------------------------------------------------------------


def test_shares_of_others_are_refused(split):
    two, three = split("lamb", 2), split("lamb", 3)
    share = two[0].state_dict()
    merging = r"merge the shares of all 2 with ms_optim.merge_states"
    for optimizer, this in [
        (three[0], "worker 0 of 3"),
        (two[1], "worker 1 of 2"),
        (build("lamb", shard_states=False)[1], "an optimizer that keeps all states"),
    ]:
        with refused(f"is the share of worker 0 of 2, but this is {this}: {merging}"):
            optimizer.load_state_dict(share)


def test_a_wrong_shape_is_refused(split):
    full = stepped("lamb")
    full["lamb_m.w0"] = Tensor(np.zeros((256, 300), np.float32))
    with refused(r"'lamb_m.w0' must have the shape \(300, 256\), but got \(256, 300\)"):
        split("lamb", 2)[0].load_state_dict(full)


def test_merging_wants_all_shares_of_one_step(split):
    two, three = ([optimizer.state_dict() for optimizer in split("lamb", count)] for count in (2, 3))
    for states, match in [
        ([], "it is empty"),
        ([two[0], build("lamb")[1].state_dict()], r"entry 'state_shares', .* but states\[1\] has none"),
        (two[:1], r"must be the shares of workers 0 to 1 of 2, but got those of \[\(0, 2\)\]"),
        ([two[0], two[0]], r"workers 0 to 1 of 2"),
        ([two[0], three[1]], r"workers 0 to 1 of 2"),
        ([two[0], {**two[1], "global_step": Tensor([3], ms.int32)}], r"of the same step, but got .* \[0, 3\]"),
    ]:
        with refused(match):
            merge_states(states)
    with refused("must be a list of dicts", TypeError):
        merge_states(two[0])
    with refused("the entry 'skipped_steps' must be a Tensor, but got int", TypeError):
        merge_states([two[0], {**two[1], "skipped_steps": 0}])


def spoiled(text):
    return Tensor(np.frombuffer(text if isinstance(text, bytes) else json.dumps(text).encode(), np.uint8))


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"\xff",
        [],
        {"worker": 0, "workers": 2},
        {"worker": 2, "workers": 2, "parts": {}},
        {"worker": -1, "workers": 2, "parts": {}},
        {"worker": "0", "workers": 2, "parts": {}},
        {"worker": 0, "workers": 2, "parts": {"lamb_m.w0": [0, 1]}},
        {"worker": 0, "workers": 2, "parts": {"lamb_m.w0": [[5, 1], [6]]}},
        {"worker": 0, "workers": 2, "parts": {"lamb_m.w0": [[0, 1], ["6"]]}},
    ],
    ids=str,
)
def test_a_spoiled_entry_is_refused_by_name(split, text):
    two = split("lamb", 2)
    states = [{**two[0].state_dict(), ENTRY: spoiled(text)}, two[1].state_dict()]
    words = f"the entry '{ENTRY}' must state in JSON which worker's share it is, but is corrupted"
    with refused(f"For 'merge_states', {words}"):
        merge_states(states)
    for optimizer in (two[0], build("lamb", shard_states=False)[1]):
        with refused(words):
            optimizer.load_state_dict(states[0])


def test_parts_that_do_not_fit_together_are_refused(split):
    first, second = (optimizer.state_dict() for optimizer in split("lamb", 2))
    told = json.loads(second[ENTRY].asnumpy().tobytes())
    key = next(iter(told["parts"]))
    lacking = {k: v for k, v in second.items() if k != key}
    with refused(f"the entry '{key}' of worker 1 must have the shape .*, but is missing"):
        merge_states([first, lacking])
    with refused(f"the entry '{key}' of worker 1 must have the shape .*, but has the shape \\(3,\\)"):
        merge_states([first, {**second, key: Tensor(np.zeros(3, np.float32))}])
    (begin, end), shape = told["parts"][key]
    told["parts"][key] = [begin + 1, end + 1], shape
    with refused(f"the parts of the entry '{key}' must form a tensor of shape"):
        merge_states([first, {**second, ENTRY: spoiled(told)}])


def test_one_process_keeps_all_states():
    _, optimizer = build("lamb", shard_states=True)
    _, whole = build("lamb")
    assert ENTRY not in optimizer.state_dict()
    assert_same(optimizer.state_dict(), whole.state_dict())


def test_arguments_are_checked():
    w = [Parameter(Tensor(np.ones(3, np.float32)), name="w")]
    with refused("'shard_states' must be of type bool", TypeError):
        AdamW(w, shard_states=1)
    with refused("unknown keyword argument 'shard_states'", TypeError):
        DGCMomentum(w, 0.1, 0.9, 0, shard_states=True)
