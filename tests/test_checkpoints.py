"""Checkpoints: everything comes back, nothing spoiled is taken, a process that is killed leaves a whole one."""

import os
import random

import mindspore as ms
import numpy as np
import pytest
from campaign.checkpoints import cut, flip, kill
from cases import MIXED, every_case
from harness import Around, Pair, digest, numbers, tensor
from mindspore import Parameter, Tensor, nn
from refusals import refused
from safetensors import safe_open

import ms_optim
from ms_optim import AdamW, CheckpointSaver, DGCMomentum, SimulatedWorkers, SpoiledError, _kernels, _shares

needs_kernel = pytest.mark.skipif(
    _kernels.why_not("adamw", "CPU") is not None, reason=str(_kernels.why_not("adamw", "CPU"))
)


class Net(nn.Cell):
    """Parameters that an optimizer moves, and some that it does not."""

    def __init__(self, params):
        super().__init__(auto_prefix=False)
        self.params = ms.ParameterTuple(params)
        self.mean = Parameter(Tensor(np.full(3, 2.5), ms.float32), name="mean", requires_grad=False)
        self.count = Parameter(Tensor(7, ms.int64), name="count", requires_grad=False)


def file(folder):
    return folder / "run.safetensors"


def fresh(size=5000, **arguments):
    """Return a network of two parameters and its optimizer."""
    params = [Parameter(tensor(np.ones(n), "float32"), name=name) for name, n in (("w", size), ("b", 3))]
    return Net(params), AdamW(params, 0.01, **arguments)


def some(size=5000, **arguments):
    """Return a network of two parameters and its optimizer, after a step."""
    net, optimizer = fresh(size, **arguments)
    optimizer(tuple(tensor(np.arange(p.size), "float32") for p in optimizer.parameters))
    return net, optimizer


def all_bytes(net, optimizer):
    """Return the bytes of all parameters."""
    return {p.name: p.asnumpy().tobytes() for p in (*net.get_parameters(), *optimizer.get_parameters())}


# ---- What is saved is there again ----------------------------------------------------------------------------------


@every_case(dtype=MIXED, wrapped=[False, True])
def test_a_run_goes_on_bit_for_bit(case, dtype, wrapped, tmp_path):
    unbroken, resumed = (Pair(case, MIXED[dtype]) for _ in range(2))
    nets = [Net(pair.params) for pair in (unbroken, resumed)]
    unbroken.run("pynative", 2)
    nets[0].mean.set_data(tensor([1, 2, 3], "float32"))
    if wrapped:
        Around(resumed.optimizer)
        for p in resumed.params:
            p.name = p.name.removeprefix("opt.")
    ms_optim.save(file(tmp_path), nets[0], unbroken.optimizer, seed=3)
    step, more = ms_optim.load(file(tmp_path), nets[1], resumed.optimizer)
    assert (step, more) == (2, {"seed": 3})
    np.testing.assert_array_equal(nets[1].mean.asnumpy(), [1, 2, 3])
    state = unbroken.rng.bit_generator.state
    unbroken.run("pynative", 2)
    resumed.rng.bit_generator.state = state
    resumed.run("pynative", 2)
    assert digest(resumed) == digest(unbroken)


def test_a_compiled_graph_goes_on_from_a_checkpoint(tmp_path):
    net, optimizer = fresh()
    gradient = tuple(tensor(np.ones(p.shape), "float32") for p in optimizer.parameters)

    @ms.jit
    def step(x):
        optimizer(gradient)
        return x + 1

    step(Tensor(1.0))
    ms_optim.save(file(tmp_path), net, optimizer)
    step(Tensor(1.0))
    expected = all_bytes(net, optimizer)
    ms_optim.load(file(tmp_path), net, optimizer)
    assert all_bytes(net, optimizer) != expected
    step(Tensor(1.0))
    assert all_bytes(net, optimizer) == expected


def test_what_else_is_handed_over_comes_back(tmp_path):
    more = {
        "epoch": 3,
        "rate": 0.1,
        "never": float("inf"),
        "on": True,
        "nothing": None,
        "text": "läuft",
        "nested": {"a": [1, (2.5, "x")], "tensor": 5, "empty": {}},
        "tensors": {
            str(dtype): Tensor(np.array(value), dtype)
            for dtype, value in [
                (ms.bfloat16, [1.5, -2]),
                (ms.float16, 0.5),
                (ms.float64, [[1e300]]),
                (ms.int8, [-128, 127, 3]),
                (ms.uint8, 255),
                (ms.int64, [2**62]),
                (ms.bool_, [True, False, True]),
                (ms.float32, np.zeros((0, 3))),
            ]
        },
    }
    ms_optim.save(file(tmp_path), **more)
    step, back = ms_optim.load(file(tmp_path))
    assert step is None
    tensors, expected = back.pop("tensors"), more.pop("tensors")
    assert back == more
    assert type(back["nested"]["a"][1]) is tuple
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape), name
        assert tensors[name].asnumpy().tobytes() == value.asnumpy().tobytes(), name


def test_others_read_the_file_and_find_each_tensor_once(tmp_path):
    net, optimizer = some(state_dtype="8bit")
    ms_optim.save(file(tmp_path), net, optimizer, extra=Tensor([1.0]))
    own = {name: value for name, value in optimizer.state_dict().items() if name not in ("w", "b")}
    expected = {**{p.name: p for p in net.get_parameters()}, **own, "more.extra": Tensor([1.0])}
    with safe_open(file(tmp_path), framework="np") as read:
        assert set(read.keys()) == expected.keys()
        for name, value in expected.items():
            assert read.get_tensor(name).tobytes() == value.asnumpy().tobytes(), name
    theirs = ms.load_checkpoint(str(file(tmp_path)), format="safetensors")
    assert theirs.keys() == expected.keys()
    size = sum(value.nbytes for value in expected.values())
    assert file(tmp_path).stat().st_size - size < 300 * (len(expected) + 4)


def test_states_are_converted_and_parts_are_loaded_alone(tmp_path):
    net, optimizer = some()
    ms_optim.save(file(tmp_path), net, optimizer)
    other, coded = some(state_dtype="8bit")
    ms_optim.load(file(tmp_path), other, coded)
    expected = AdamW([Parameter(p.asnumpy(), name=p.name) for p in optimizer.parameters], 0.01, state_dtype="8bit")
    expected.load_state_dict(optimizer.state_dict())
    assert [s.asnumpy().tobytes() for s in coded.states] == [s.asnumpy().tobytes() for s in expected.states]
    other, alone = fresh()
    before = alone.states[0].asnumpy().copy()
    other.mean.set_data(tensor([0, 0, 0], "float32"))
    ms_optim.load(file(tmp_path), other)
    np.testing.assert_array_equal(other.mean.asnumpy(), net.mean.asnumpy())
    np.testing.assert_array_equal(alone.states[0].asnumpy(), before)
    # The weights that an optimizer moves come with it.
    for p in alone.parameters:
        p.asnumpy()[...] = 0
    ms_optim.load(file(tmp_path), optimizer=alone)
    np.testing.assert_array_equal(alone.parameters[0].asnumpy(), optimizer.parameters[0].asnumpy())


# ---- What is refused -----------------------------------------------------------------------------------------------


def renamed(net, old, new):
    next(p for p in net.get_parameters() if p.name == old).name = new


def forgotten(net, name):
    delattr(net, name)


@pytest.mark.parametrize(
    "error, match, change",
    [
        (KeyError, "lacks the weight 'mean'", lambda saved, loaded: renamed(saved, "mean", "other")),
        (KeyError, "has the weight 'mean', which is unknown", lambda saved, loaded: forgotten(loaded, "mean")),
        (
            TypeError,
            "'mean' must be of dtype Float32, but is Float16",
            lambda saved, _: saved.mean.set_dtype(ms.float16),
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(error, match, change, tmp_path):
    (saved, optimizer), (net, other) = some(), some()
    change(saved, net)
    ms_optim.save(file(tmp_path), saved, optimizer)
    other.states[0].asnumpy()[...] = 5
    before = all_bytes(net, other)
    text = refused(error, match, lambda: ms_optim.load(file(tmp_path), net, other))
    assert str(file(tmp_path)) in text
    assert all_bytes(net, other) == before


def test_another_shape_changes_nothing(tmp_path):
    ms_optim.save(file(tmp_path), *some())
    net, optimizer = some(6000)
    before = all_bytes(net, optimizer)
    match = r"'w' must have the shape \(6000,\), but has \(5000,\)"
    refused(ValueError, match, lambda: ms_optim.load(file(tmp_path), net, optimizer))
    refused(KeyError, "'amsgrad|adam_vhat", lambda: ms_optim.load(file(tmp_path), *fresh(amsgrad=True)))
    assert all_bytes(net, optimizer) == before


def test_a_name_that_is_not_known_is_passed_over_on_request(tmp_path):
    net, optimizer = some()
    renamed(net, "mean", "other")
    ms_optim.save(file(tmp_path), net, optimizer)
    net, optimizer = some()
    optimizer.states[0].asnumpy()[...] = 5
    ms_optim.load(file(tmp_path), net, optimizer, strict=False)
    assert not (optimizer.states[0].asnumpy() == 5).all()


def test_arguments_are_checked(tmp_path):
    net, _ = some()
    twice = nn.SequentialCell([Net([]), Net([])])
    for p in twice.get_parameters():
        p.name = p.name.partition(".")[2]
    for error, match, call in [
        (TypeError, "'path' must be a path", lambda: ms_optim.save(3, net)),
        (TypeError, "'net' must be a Cell or None", lambda: ms_optim.save(file(tmp_path), [net])),
        (TypeError, "'optimizer' must be an optimizer of ms_optim", lambda: ms_optim.load(file(tmp_path), net, net)),
        (TypeError, "'a.0' must be a number", lambda: ms_optim.save(file(tmp_path), a=[{1, 2}])),
        (TypeError, "'a' must be a number", lambda: ms_optim.save(file(tmp_path), a={1: 2})),
        (ValueError, "two parameters have the name 'mean'", lambda: ms_optim.save(file(tmp_path), twice)),
        (TypeError, "one of the dtypes", lambda: ms_optim.save(file(tmp_path), a=Tensor([1j], ms.complex64))),
        (
            ValueError,
            "two have the name 'more.a.b'",
            lambda: ms_optim.save(file(tmp_path), **{"a": {"b": Tensor(1)}, "a.b": Tensor(2)}),
        ),
        (FileNotFoundError, "there is no checkpoint", lambda: ms_optim.load(file(tmp_path), net)),
        (ValueError, "'keep'", lambda: CheckpointSaver(tmp_path, keep=0)),
        (ValueError, "'every'", lambda: CheckpointSaver(tmp_path, every=0)),
        (TypeError, "'more' must be a function", lambda: CheckpointSaver(tmp_path, more={})),
    ]:
        refused(error, match, call)
    assert not list(tmp_path.iterdir())


# ---- What is spoiled, and what is left by a kill -------------------------------------------------------------------


def test_flipped_bits_are_named(tmp_path):
    flip(tmp_path, 60, random.Random(1))


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    cut(tmp_path, 30, random.Random(2))


def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    kill(file(tmp_path), 4, random.Random(3))


def test_the_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    net, optimizer = some()
    ms_optim.save(file(tmp_path), net, optimizer)
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*arguments, name=name, real=real):
            where = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else os.fspath(arguments[1])
            calls.append((name, where, file(tmp_path).stat().st_ino))
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    old = file(tmp_path).stat().st_ino
    ms_optim.save(file(tmp_path), net, optimizer)
    beside = str(tmp_path / ".run.safetensors.tmp")
    assert calls[:2] == [("fsync", beside, old), ("replace", str(file(tmp_path)), old)]
    assert [call[:2] for call in calls[2:]] == [("fsync", str(tmp_path))]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    net, optimizer = some()
    ms_optim.save(file(tmp_path), net, optimizer)
    before = file(tmp_path).read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        ms_optim.save(file(tmp_path), net, optimizer, more=3)
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]
    assert file(tmp_path).read_bytes() == before


# ---- In Model.train ------------------------------------------------------------------------------------------------


def trained(folder, epochs, **arguments):
    """Train by Model.train; return the callback, the weights and the optimizer."""
    rng = np.random.default_rng(0)
    net = nn.Dense(6, 3, weight_init="ones", bias_init="zeros")
    optimizer = AdamW(net.trainable_params(), 0.05)
    x, y = rng.standard_normal((32, 6)).astype(np.float32), rng.integers(0, 3, 32).astype(np.int32)
    data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
    saver = CheckpointSaver(folder, **arguments)
    ms.Model(net, nn.CrossEntropyLoss(), optimizer).train(epochs, data, callbacks=[saver], dataset_sink_mode=False)
    return saver, net.weight.asnumpy().copy(), optimizer


def test_a_training_goes_on_where_it_was_left(tmp_path):
    _, unbroken, _ = trained(tmp_path / "unbroken", 4, every=100)
    saver, _, _ = trained(tmp_path / "run", 2, every=3, more=lambda: {"seed": 5})
    assert saver.loaded is None
    assert sorted(p.name for p in saver.folder.iterdir()) == [f"step-{k:010d}.safetensors" for k in (6, 8)]
    (saver.folder / ".step-0000000007.safetensors.tmp").write_bytes(b"unfinished")
    saver, resumed, optimizer = trained(tmp_path / "run", 2, every=100)
    assert saver.loaded == (8, {"seed": 5})
    assert int(optimizer.global_step.asnumpy()[0]) == 16
    np.testing.assert_array_equal(resumed, unbroken)
    assert sorted(p.name for p in saver.folder.iterdir()) == [f"step-{k:010d}.safetensors" for k in (8, 16)]


def test_a_spoiled_checkpoint_gives_way_to_the_one_before(tmp_path):
    net, optimizer = some()
    for step in (1, 2, 3):
        optimizer.global_step.asnumpy()[...] = step
        ms_optim.save(tmp_path / f"step-{step:010d}.safetensors", net, optimizer)
    data = bytearray((tmp_path / "step-0000000003.safetensors").read_bytes())
    data[-20] ^= 1
    (tmp_path / "step-0000000003.safetensors").write_bytes(data)
    (tmp_path / "step-0000000002.safetensors").write_bytes(data[:50])
    with pytest.warns(UserWarning, match="The run resumes from .*step-0000000001") as warned:
        assert ms_optim.load(tmp_path, net, optimizer).step == 1
    assert ["step-0000000003" in str(w.message) for w in warned] == [True, False]
    (tmp_path / "step-0000000001.safetensors").unlink()
    before = all_bytes(net, optimizer)
    refused(SpoiledError, "step-0000000003.* the bytes of", lambda: ms_optim.load(tmp_path, net, optimizer))
    assert all_bytes(net, optimizer) == before


# ---- Several workers -----------------------------------------------------------------------------------------------


class OneOfMany(_shares.Peers):
    """A worker whose peers are not there: it can hold a share, not step."""

    def all_gather(self):
        return None


def split(monkeypatch, count):
    """Return networks and optimizers of all workers."""
    made = []
    for rank in range(count):
        monkeypatch.setattr(_shares, "peers", lambda rank=rank: OneOfMany(rank, count, None))
        made.append(fresh(shard_states=True))
    return made


@needs_kernel
def test_sharded_states_go_on_on_any_number_of_workers(tmp_path, monkeypatch):
    _, whole = some()
    for _, optimizer in (two := split(monkeypatch, 2)):
        optimizer.load_state_dict(whole.state_dict())
    for part, optimizer in two:
        ms_optim.save(file(tmp_path), part, optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.0-of-2.safetensors", "run.1-of-2.safetensors"]
    expected = whole.state_dict()
    for count in (2, 3):
        loaded = split(monkeypatch, count)
        for part, optimizer in loaded:
            assert ms_optim.load(file(tmp_path), part, optimizer).step == 1
        merged = ms_optim.merge_states([optimizer.state_dict() for _, optimizer in loaded])
        for name in expected.keys() - {"w", "b"}:
            assert merged[name].asnumpy().tobytes() == expected[name].asnumpy().tobytes(), name
    alone_net, alone = some()
    ms_optim.load(file(tmp_path), alone_net, alone)
    assert [s.asnumpy().tobytes() for s in alone.states] == [s.asnumpy().tobytes() for s in whole.states]
    two[1][1].global_step.asnumpy()[...] = 2
    ms_optim.save(file(tmp_path), *two[1])
    refused(
        SpoiledError,
        r"inconsistent: its parts are of the steps \[1, 2\]",
        lambda: ms_optim.load(file(tmp_path), *two[0]),
    )
    (tmp_path / "run.1-of-2.safetensors").unlink()
    refused(SpoiledError, r"lacks the parts of workers \[1\]", lambda: ms_optim.load(file(tmp_path), *two[0]))


class Arguments(dict):
    """What a callback is told of a training."""

    __getattr__ = dict.__getitem__

    def original_args(self):
        return self


@needs_kernel
def test_a_whole_checkpoint_is_there_while_workers_save(tmp_path, monkeypatch):
    """One worker has saved a step that another has not."""
    two = split(monkeypatch, 2)
    savers = [CheckpointSaver(tmp_path, every=1, keep=1) for _ in two]
    for step in (1, 2, 3):
        for rank, (saver, (net, optimizer)) in enumerate(zip(savers, two)):
            optimizer.global_step.asnumpy()[...] = step
            saver.on_train_step_end(Arguments(cur_step_num=step, train_network=net, optimizer=optimizer))
            if step == 3 and rank == 0:
                with pytest.warns(UserWarning, match=r"lacks the parts of workers \[1\]"):
                    assert ms_optim.load(tmp_path, *two[1]).step == 2
    assert sorted({path.name[:15] for path in tmp_path.iterdir()}) == ["step-0000000002", "step-0000000003"]


def simulated(count):
    def make(params, group):
        return DGCMomentum(params, 0.1, 0.9, 0, sparsity=[0.9], min_compress_numel=1, group=group)

    return SimulatedWorkers(count, [Parameter(tensor(np.ones(300), "float32"), name="w")], make)


@needs_kernel
@pytest.mark.parametrize("new", [2, 3])
def test_residuals_go_on_on_any_number_of_workers(new, tmp_path):
    old, workers = simulated(2), simulated(new)
    rng = np.random.default_rng(0)
    for _ in range(3):
        old([(tensor(rng.standard_normal(300), "float32"),) for _ in range(2)])
    for rank, optimizer in enumerate(old.optimizers):
        ms_optim.save(file(tmp_path), optimizer=optimizer, rank=rank)
    for rank, optimizer in enumerate(workers.optimizers):
        step, more = ms_optim.load(file(tmp_path), optimizer=optimizer)
        assert (step, more) == (3, {"rank": rank if new == 2 else 0})
        np.testing.assert_array_equal(optimizer.parameters[0].asnumpy(), old.optimizers[0].parameters[0].asnumpy())
    sums = [sum(numbers(o.states[1]) for o in each.optimizers) for each in (old, workers)]
    np.testing.assert_allclose(sums[0], sums[1], rtol=0, atol=1e-6)
    if new == 2:
        for a, b in zip(old.optimizers, workers.optimizers):
            np.testing.assert_array_equal(a.states[1].asnumpy(), b.states[1].asnumpy())
