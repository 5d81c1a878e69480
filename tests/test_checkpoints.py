"""Checkpoints: everything comes back, nothing spoiled is taken, a process that is killed leaves a whole one."""

import fcntl
import itertools
import json
import os
import random
import re
import types
import zlib

import mindspore as ms
import numpy as np
import pytest
from campaign.checkpoints import cut, flip, kill
from campaign.saves import Folder
from cases import MIXED, every_case
from harness import Around, Pair, digest, numbers, tensor
from interrupting import interrupted_at
from mindspore import Parameter, Tensor, nn
from refusals import refused
from safetensors import safe_open

import ms_optim
from ms_optim import AdamW, CheckpointSaver, DGCMomentum, Lion, SimulatedWorkers, SpoiledError
from ms_optim.checkpoints import atomic_file, slices
from ms_optim.checkpoints.header import Entry
from ms_optim.checkpoints.parts import place_of
from ms_optim.kernels import table as kernels
from ms_optim.schedules import WarmUpHoldDecayLR
from ms_optim.states import shares
from ms_optim.states.layout import Slices

needs_kernel = pytest.mark.skipif(
    kernels.why_not("adamw", "CPU") is not None, reason=str(kernels.why_not("adamw", "CPU"))
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


@pytest.mark.parametrize(
    "saved, loading, match",
    [
        ({}, {"amsgrad": True}, "must have the entry 'adam_vhat.b' .2 such entries.. strict=False keeps"),
        ({"amsgrad": True}, {}, "has the entry 'adam_vhat.b', which is unknown .* strict=False ignores"),
        ({}, {"average_decay": 0.9}, "must have the entry 'average.b' .* averages start from the weights"),
        ({}, {"learning_rate": "schedule"}, "has the entry 'learning_rate', which .* learning_rate='keep' keeps"),
        ({"learning_rate": "schedule"}, {}, "must have the entry 'learning_rate' .* learning_rate='keep' keeps"),
        ({}, {"cls": Lion}, "states of AdamW, such as 'adam_m.b', and not of Lion, .* only the weights"),
        ({"cls": Lion}, {}, "states of Lion, such as 'lion_m.b', and not of AdamW"),
    ],
)
def test_errors_of_names_say_what_to_do(saved, loading, match, tmp_path):
    def made(cls=AdamW, learning_rate=0.01, **arguments):
        net, _ = fresh(8)
        rate = WarmUpHoldDecayLR(0.1, 2, 3, 9) if learning_rate == "schedule" else learning_rate
        return net, cls(list(net.params), rate, **arguments)

    ms_optim.save(file(tmp_path), *made(**saved))
    net, optimizer = made(**loading)
    for error in (KeyError, ValueError):
        text = refused(error, match, lambda: ms_optim.load(file(tmp_path), net, optimizer))
        assert str(file(tmp_path)) in text
        assert not text.startswith(("'", '"'))
    if "keep" in match:
        how = {"learning_rate": "keep"} if "learning_rate=" in match else {"strict": False}
        assert ms_optim.load(file(tmp_path), net, optimizer, **how).step == 0


@pytest.mark.parametrize("by", ["state_dict", "file"])
@pytest.mark.parametrize("kept", [0.5, [0.5] * 9, "group", "schedule"])
@pytest.mark.parametrize("saved", [0.1, [0.1] * 9, "group", "schedule"])
def test_learning_rates_are_kept_on_request(saved, kept, by, tmp_path):
    def made(rate):
        net, _ = fresh(8)
        w, b = net.params
        params, value = [w, b], 0.1 if saved is rate else 0.5
        if rate == "group":
            params, rate = [{"params": [w], "lr": value}, {"params": [b], "lr": [value] * 9}], 0.3
        elif rate == "schedule":
            rate = WarmUpHoldDecayLR(value, 1, 5, 9)
        return net, AdamW(params, rate)

    net, optimizer = made(saved)
    optimizer(tuple(tensor(np.ones(p.shape), "float32") for p in optimizer.parameters))
    other, keeping = made(kept)
    before = [p.asnumpy().copy() for name, p in keeping.parameters_dict().items() if name.startswith("learning_rate")]
    if by == "file":
        ms_optim.save(file(tmp_path), net, optimizer)
        ms_optim.load(file(tmp_path), other, keeping, learning_rate="keep")
    else:
        keeping.load_state_dict(optimizer.state_dict(), learning_rate="keep")
    after = [p.asnumpy() for name, p in keeping.parameters_dict().items() if name.startswith("learning_rate")]
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
    # All else is that of the checkpoint, the position in a schedule as well.
    assert int(keeping.global_step.asnumpy()[0]) == 1
    np.testing.assert_array_equal(keeping.states[0].asnumpy(), optimizer.states[0].asnumpy())
    _, alike = made(kept)
    alike.global_step.asnumpy()[...] = 1
    np.testing.assert_array_equal(keeping.current_step_lr(), alike.current_step_lr())


def test_arguments_are_checked(tmp_path):
    net, _ = some()
    folder = tmp_path / "folder"
    deep = []
    deep.append(deep)
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
        (ValueError, "'a' must be nested at most 100 levels deep", lambda: ms_optim.save(file(tmp_path), a=deep)),
        (IsADirectoryError, f"'{tmp_path}' is a folder", lambda: ms_optim.save(tmp_path, net)),
        (FileNotFoundError, f"the folder '{folder}' .* does not exist", lambda: ms_optim.save(folder / "a", net)),
        (OSError, "File name too long: '[^.]*'$", lambda: ms_optim.save(tmp_path / ("n" * 256), net)),
        (FileNotFoundError, "there is no checkpoint", lambda: ms_optim.load(file(tmp_path), net)),
        (FileNotFoundError, "no checkpoint of a CheckpointSaver in the folder", lambda: ms_optim.load(tmp_path, net)),
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


def moved(step):
    """Return what exchanges bytes that are so many apart, from the middle of the data."""

    def change(data):
        begin = data.size // 2 // 4096 * 4096
        first, second = (slice(begin + k, begin + k + abs(step)) for k in (0, 2 * step))
        data[first], data[second] = data[second].copy(), data[first].copy()

    return change


def page(data, number=1):
    begin = data.size // 2 // 4096 * 4096 + number * 4096
    return data[begin : begin + 4096]


ORDERS = {
    "floats": moved(4),
    "words": moved(8),
    "lines": moved(64),
    "sectors": moved(512),
    "pages": moved(4096),
    "chunks": moved(1 << 20),
    "words of two pages": moved(4104),
    "rotated": lambda data: np.copyto(page(data), np.roll(page(data).copy(), 8)),
    "reversed": lambda data: np.copyto(page(data), page(data).view("<u8")[::-1].copy().view(np.uint8)),
    "sorted": lambda data: page(data).view("<u8").sort(),
}


@pytest.mark.parametrize("values", ["drawn", "powers"])
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_in_another_order_are_refused(order, values, tmp_path):
    """Also of numbers that differ only in their highest bits."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(2**21) if values == "drawn" else 2.0 ** rng.integers(-9, 9, 2**21)
    net = Net([Parameter(tensor(w, "float32"), name="w")])
    ms_optim.save(file(tmp_path), net)
    data = np.memmap(file(tmp_path), np.uint8, "r+")
    before = data.copy()
    ORDERS[order](data)
    assert not np.array_equal(before, data)
    data.flush()
    refused(SpoiledError, "the bytes of 'w' are not", lambda: ms_optim.load(file(tmp_path), net))


def parsed(path):
    """Return the header of a file, its own metadata, and the data."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    return header, json.loads(header["__metadata__"]["ms_optim"]), raw[begin:]


def rewrite(path, header, content, data):
    """Write a file with a header whose checksum is right."""
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        metadata["header_crc32"] = "0" * 8
        if not isinstance(content, str):
            content = json.dumps(content)
        metadata["ms_optim"] = content
    text = json.dumps(header).encode()
    blank = len(text).to_bytes(8, "little") + text
    key = b'"header_crc32": "'
    path.write_bytes(blank.replace(key + b"0" * 8, key + f"{zlib.crc32(blank):08x}".encode(), 1) + data)


def as_version_1(path):
    """Rewrite a file as the first version of the format has it: each page has one sum."""
    header, content, data = parsed(path)
    content = {key: value for key, value in content.items() if key != "from"} | {"version": 1}
    sums = ""
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            pages, rest = np.frombuffer(data[low:high], np.uint8), (high - low) % 4096
            words = pages[: pages.size - rest].view("<u8").reshape(-1, 512).sum(axis=1, dtype="<u8")
            # In chunks of 256 pages; the rest comes last.
            crc = zlib.crc32(pages[pages.size - rest :].tobytes(), zlib.crc32(words.tobytes()))
            sums += f"{crc:08x}"
    header["__metadata__"]["checksums"] = sums
    rewrite(path, header, content, data)


def test_files_of_the_first_version_are_read_and_checked(tmp_path):
    net, optimizer = some(600_000)
    ms_optim.save(file(tmp_path), net, optimizer, epoch=3)
    expected = all_bytes(net, optimizer)
    as_version_1(file(tmp_path))
    other, resumed = fresh(600_000)
    assert ms_optim.load(file(tmp_path), other, resumed) == (1, {"epoch": 3})
    assert {k: v for k, v in all_bytes(other, resumed).items() if k != "statistics"} == {
        k: v for k, v in expected.items() if k != "statistics"
    }
    data = bytearray(file(tmp_path).read_bytes())
    data[-100_000] ^= 4
    file(tmp_path).write_bytes(data)
    refused(SpoiledError, "corrupted: the bytes of", lambda: ms_optim.load(file(tmp_path), other, resumed))


def places(value, path=()):
    """Return where a JSON value has values, itself included."""
    found = [path]
    for key, part in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else []):
        found += places(part, (*path, key))
    return found


def put(value, path, new):
    """Return a value with another one at a place; without it, if the other one is `put`."""
    if not path:
        return new
    value = value.copy()
    if path[1:] or new is not put:
        value[path[0]] = put(value[path[0]], path[1:], new)
    else:
        del value[path[0]]
    return value


OTHERS = [put, None, True, -1, 0, 2**70, 1.5, "", "text", [], {}, [None], {"tensor": "w"}, {"list": 3}]


def test_every_field_of_a_header_is_checked(tmp_path):
    """What a header with a right checksum may say otherwise is refused, or means what it says."""
    params = [Parameter(tensor(np.ones(3), "float32"), name="w")]
    net, optimizer = Net(params), AdamW(params, 0.01)
    ms_optim.save(file(tmp_path), net, optimizer, a=[1, (Tensor([1.0]), {"b": None})])
    header, content, data = parsed(file(tmp_path))
    nested = "[" * 100_000 + "]" * 100_000
    changed = [(put(header, at, new), content) for at in places(header) if at for new in OTHERS]
    changed += [(header, put(content, at, new)) for at in places(content) if at for new in OTHERS]
    changed += [(header, new) for new in ("", "{", "[]", "3", nested, json.dumps(content)[:-1] + f', "x": {nested}}}')]
    taken = 0
    for each in changed:
        rewrite(file(tmp_path), *each, data)
        try:
            ms_optim.load(file(tmp_path), net, optimizer)
            text, taken = None, taken + 1
        except (KeyError, TypeError, ValueError) as error:
            # If it is not refused as spoiled, it has another name, dtype, shape or version, as a file may have.
            text = str(file(tmp_path)) if isinstance(error, SpoiledError) else "For '(load|AdamW)'|.* later version"
            text = None if re.search(text, str(error)) else repr(error)
        assert text is None
    assert taken < len(changed) / 4


def test_a_part_of_a_worker_that_cannot_be_is_refused(tmp_path):
    net, optimizer = some()
    ms_optim.save(file(tmp_path), net, optimizer)
    header, content, data = parsed(file(tmp_path))
    rewrite(file(tmp_path), header, put(content, ("from", "rank"), content["from"]["count"]), data)
    refused(SpoiledError, "not as ms_optim.save writes it", lambda: ms_optim.load(file(tmp_path), net, optimizer))


def test_files_of_others_are_refused_with_what_reads_them(tmp_path):
    net, _ = some()
    ms.save_checkpoint(net, str(tmp_path / "run.ckpt"))
    ms.save_checkpoint(net, str(tmp_path / "other"), format="safetensors")
    for name in ("run.ckpt", "other.safetensors"):
        match = "not a checkpoint of ms_optim.save.* mindspore.load_checkpoint"
        refused(SpoiledError, match, lambda name=name: ms_optim.load(tmp_path / name, net))


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
    assert re.fullmatch(r".*/\.run\.safetensors\.[0-9a-f]{16}\.tmp", calls[0][1])
    assert [calls[0][::2], calls[1]] == [("fsync", old), ("replace", str(file(tmp_path)), old)]
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


@pytest.mark.parametrize("what", ["save", "load"])
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new(what, tmp_path):
    net, optimizer = some(20)
    new, newer = some(20, average_decay=0.5)
    newer.states[0].asnumpy()[...] = 5
    paths = [tmp_path / name for name in ("old", "new", "run.safetensors")]
    for path, each, number in zip(paths, ((net, optimizer), (new, newer)), (0, 1)):
        ms_optim.save(path, *each, number=number)
    ms_optim.load(paths[0], new, newer, strict=False)
    loaded = all_bytes(new, newer)
    moment, ended, found = 0, False, []
    while not ended:
        if what == "save":
            ms_optim.save(paths[2], net, optimizer, number=0)
            ended = not interrupted_at(lambda: ms_optim.save(paths[2], net, optimizer, number=1), moment)
            found.append(ms_optim.load(paths[2]).more["number"])
            assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
        else:
            ms_optim.load(paths[1], new, newer)
            before = all_bytes(new, newer)
            ended = not interrupted_at(lambda: ms_optim.load(paths[0], new, newer, strict=False), moment)
            after = all_bytes(new, newer)
            assert after in (before, loaded), f"Interrupted before line {moment}, it left a mixture."
            found.append(int(after == loaded))
        moment += 1
    assert found == sorted(found)
    assert 0 < sum(found) < len(found)


def test_a_save_opens_no_file_or_link_that_is_there(tmp_path, monkeypatch):
    """In a folder that others can write to, they may foresee a name."""
    (tmp_path / "precious").write_text("precious")
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda n: "0" * 2 * n)
    for name in (".run.safetensors.tmp", f".run.safetensors.{'0' * 16}.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    refused(FileExistsError, "run.safetensors", lambda: ms_optim.save(file(tmp_path), *some()))
    monkeypatch.undo()
    ms_optim.save(file(tmp_path), *some())
    assert (tmp_path / "precious").read_text() == "precious"
    assert not file(tmp_path).is_symlink()


def test_what_killed_processes_left_is_removed_and_what_others_write_stays(tmp_path):
    left = [f".run.safetensors{middle}.tmp" for middle in ("", ".0123456789abcdef", ".fedcba9876543210")]
    others = [".run.safetensors.text.tmp", ".other.safetensors.0123456789abcdef.tmp", "run.safetensors.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"unfinished")
    with (tmp_path / left[-1]).open("rb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        ms_optim.save(file(tmp_path), *some())
    assert {path.name for path in tmp_path.iterdir()} == {"run.safetensors", left[-1], *others}


# ---- In Model.train ------------------------------------------------------------------------------------------------


def trained_net(rate=0.05):
    net = nn.Dense(6, 3, weight_init="ones", bias_init="zeros")
    return net, AdamW(net.trainable_params(), rate)


def trained(folder, epochs, rate=0.05, **arguments):
    """Train by Model.train; return the callback, the weights and the optimizer."""
    rng = np.random.default_rng(0)
    net, optimizer = trained_net(rate)
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


STRAYS = {
    "a part of no workers": ("step-0000000009.0-of-0.safetensors", "copy"),
    "a part of many": ("step-0000000009.0-of-2000000.safetensors", "copy"),
    "a part of many, of old": ("step-0000000009.1-of-2000000.safetensors", "old"),
    "a part beyond the last": ("step-0000000009.2-of-2.safetensors", "copy"),
    "another file": ("step-0000000009.safetensors", "text"),
    "an empty file": ("step-0000000009.safetensors", "empty"),
    "a folder": ("step-0000000009.safetensors", "folder"),
    "a pipe": ("step-0000000009.safetensors", "pipe"),
    "a link to nothing": ("step-0000000009.safetensors", "link"),
    "a name with more digits": ("step-00000000009.safetensors", "copy"),
    "a name of one's own": ("best.safetensors", "copy"),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_file_that_does_not_belong_there_is_passed_over(stray, tmp_path, recwarn):
    net, optimizer = some()
    good = tmp_path / "step-0000000001.safetensors"
    ms_optim.save(good, net, optimizer)
    name, kind = STRAYS[stray]
    path = tmp_path / name
    if kind in ("copy", "old"):
        ms_optim.save(tmp_path / "elsewhere", net, optimizer, elsewhere=True)
        (tmp_path / "elsewhere").rename(path)
        if kind == "old":
            as_version_1(path)
    elif kind in ("text", "empty"):
        path.write_text("text" if kind == "text" else "")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nothing")
    assert ms_optim.load(tmp_path, net, optimizer) == (1, {})
    assert all(len(str(warning.message)) < 500 for warning in recwarn)
    # It is still there after the callback has removed older checkpoints.
    saver = CheckpointSaver(tmp_path, every=1, keep=1)
    for step in (10, 11):
        optimizer.global_step.asnumpy()[...] = step
        saver.on_train_step_end(Arguments(cur_step_num=step, train_network=net, optimizer=optimizer))
    assert not good.exists()
    assert ms_optim.load(tmp_path, net, optimizer) == (11, {})


def test_the_run_that_wrote_last_goes_on(tmp_path, capsys):
    """Whatever steps an earlier run in the folder was at; and it says so."""
    first = tmp_path / "first"
    assert trained(first, 3, every=2)[0].loaded is None
    assert capsys.readouterr().out == ""
    match = "with resume=False the folder must have no checkpoint of another run, but has .*12.safetensors: choose"
    for _ in range(2):
        refused(ValueError, match, lambda: trained(first, 1, resume=False))
        assert sorted(p.name for p in first.iterdir()) == [f"step-{k:010d}.safetensors" for k in (10, 12)]
    # A run that returns to an earlier step.
    net, optimizer = trained_net()
    ms_optim.load(first / "step-0000000010.safetensors", net, optimizer)
    for step in (2, 4):
        optimizer.global_step.asnumpy()[...] = step
        saver = CheckpointSaver(first, every=1, resume=False)
        arguments = Arguments(cur_step_num=0, train_network=net, optimizer=optimizer)
        saver.on_train_begin(arguments)
        saver.on_train_step_end(Arguments(arguments, cur_step_num=1))
    assert sorted(p.name for p in first.iterdir()) == [f"step-{k:010d}.safetensors" for k in (2, 4)]
    saver, _, optimizer = trained(first, 1, rate=0.25, learning_rate="keep")
    assert saver.loaded.step == 4
    path = first / "step-0000000004.safetensors"
    assert capsys.readouterr().out == f"ms_optim: resumed from {path} at step 4.\n"
    assert optimizer.current_step_lr() == 0.25
    assert trained(first, 1, rate=0.25)[2].current_step_lr() == 0.25
    assert trained(first, 1)[2].current_step_lr() == 0.25


# ---- Several workers -----------------------------------------------------------------------------------------------


class OneOfMany(shares.Peers):
    """A worker whose peers are not there: it can hold a share, not step."""

    def all_gather(self):
        return None


def split(monkeypatch, count):
    """Return networks and optimizers of all workers."""
    made = []
    for rank in range(count):
        monkeypatch.setattr(shares, "peers", lambda rank=rank: OneOfMany(rank, count, None))
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


# How many workers save, in which order, and how many of them before they are killed.
SAVES = [(1, [0], 1), (2, [0, 1], 2), (2, [0, 1], 1), (2, [1, 0], 1), (3, [2, 0, 1], 3)]


@needs_kernel
@pytest.mark.parametrize("kind, steps", [("dgc", (5, 5, 5)), ("dgc", (5, 4)), ("local", (5, 4))])
def test_the_newest_complete_save_is_loaded_whatever_its_step(kind, steps, tmp_path):
    """Runs save under one name, each killed between its parts or not."""
    # Of three saves, the first is one that was not killed, or one that was.
    first = [SAVES[1:3]] * (len(steps) - 2)
    for k, runs in enumerate(itertools.product(*first, SAVES, SAVES)):
        folder = Folder(tmp_path / str(k))
        folder.folder.mkdir()
        for step, (count, order, saving) in zip(steps, runs):
            folder.save("run.safetensors", count, kind, step, order, saving, None)
            folder.check("run.safetensors", None)


@needs_kernel
def test_the_last_complete_checkpoint_stays_while_others_are_incomplete(tmp_path, monkeypatch):
    """A step that was killed between the parts is not one of those that are kept."""
    two = split(monkeypatch, 2)

    def save(step, ranks=(0, 1)):
        for rank in ranks:
            net, optimizer = two[rank]
            optimizer.global_step.asnumpy()[...] = step
            saver = CheckpointSaver(tmp_path, every=1, keep=2)
            saver.on_train_step_end(Arguments(cur_step_num=step, train_network=net, optimizer=optimizer))

    save(1)
    for step in (2, 3, 4):
        save(step, ranks=[step % 2])
        with pytest.warns(UserWarning, match="lacks the parts"):
            assert ms_optim.load(tmp_path, *two[0]).step == 1
    save(5)
    assert ms_optim.load(tmp_path, *two[0]).step == 5
    save(6)
    assert sorted({path.name[:15] for path in tmp_path.iterdir()}) == ["step-0000000005", "step-0000000006"]


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


# ---- Slices ----------------------------------------------------------------------------------------------------------


def part_with(checksum, places):
    """A part that holds slices at these places, and a weight with a checksum."""
    frozen = Entry("weight", "F32", (2,), 0, 8, checksum)
    return types.SimpleNamespace(path="run.safetensors", entries={"frozen": frozen}, slices=places)


def test_a_frozen_weight_that_may_be_sliced_is_refused():
    slices.check_others([part_with("1", {}), part_with("1", {})], {})
    with pytest.raises(ValueError, match=r"'frozen' differs between the processes .* load the checkpoint on 2 proc"):
        slices.check_others([part_with("1", {}), part_with("2", {})], {})
    slices.check_others([part_with("1", {}), part_with("2", {})], {"frozen": Slices(0, ((2,), (2,)))})


def test_parts_without_places_are_loaded_by_as_many_processes():
    """An earlier version of the package wrote them."""
    optimizer = types.SimpleNamespace(_layout=types.SimpleNamespace(slices={"w": Slices(1, ((2,), (3,)))}))
    parts, place = [part_with("1", None)] * 2, types.SimpleNamespace(rank=1, count=2)
    assert not slices.are_others(parts, place, optimizer)
    with pytest.raises(ValueError, match=r"over 3 processes, but the checkpoint run.safetensors has 2 parts\. An earl"):
        slices.are_others(parts, types.SimpleNamespace(rank=1, count=3), optimizer)
    own = [part_with("1", {"w": [k, 2]}) for k in range(2)]
    assert not slices.are_others(own, place, optimizer)
    assert slices.are_others(own[::-1], place, optimizer)
    with pytest.raises(SpoiledError, match=r"lacks slice 1 of 2 of the tensor 'w'"):
        slices.of_saved(own[:1] * 2, "w")


def test_each_process_saves_its_slices_of_a_worker():
    """Local steps may be taken by workers of several processes."""
    workers = types.SimpleNamespace(rank=1, count=2, local_rank=0)
    whole = types.SimpleNamespace(workers=workers, is_sliced=False, shares=None)
    assert place_of(whole)[:3] == (1, 2, True)
    sliced = types.SimpleNamespace(workers=workers, is_sliced=True, shares=None)
    assert place_of(sliced)[:3] == (0, 1, True)  # of all processes, of which there is one here
    own = types.SimpleNamespace(_layout=types.SimpleNamespace(slices={"w": Slices(0, ((2,), (3,)))}))
    parts = [part_with("", {"w": [k % 2, 2]}) for k in range(4)]
    parts[0].entries["local_worker"] = parts[0].entries["frozen"]
    assert not slices.are_others(parts, types.SimpleNamespace(rank=0, count=4), own)
    with pytest.raises(ValueError, match=r"local steps with sliced tensors must be loaded on as many processes .* 4, "):
        slices.are_others(parts, types.SimpleNamespace(rank=0, count=2), own)


LENGTHS = ((4, 1, 3), (2, 6), (8,))


@pytest.mark.parametrize("shape, axis", [((8,), 0), ((8, 5), 0), ((3, 8), 1), ((8, 3, 2, 2), 0), ((4, 8, 3), 1)])
@pytest.mark.parametrize("saved, own", itertools.permutations(LENGTHS, 2))
def test_slices_are_cut_anew(shape, axis, saved, own):
    """Weights, and states with one number for each element or for each row."""

    def cut_along(x, lengths):
        return np.split(x, np.cumsum(lengths)[:-1], axis)

    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rows = w[..., 0] if len(shape) == 3 else w.reshape(shape[0], -1)[:, 0]
    counts_rows = axis < rows.ndim and len(shape) > 1
    parts = [part_with("", {"w": [k, len(saved)]} if len(saved) > 1 else {}) for k in range(len(saved))]
    order = range(len(parts))[::-1]  # files may be listed in any order
    parts, values = [parts[k] for k in order], [cut_along(w, saved)[k] for k in order]
    of_rows = [cut_along(rows, saved)[k].reshape(-1) for k in order] if counts_rows else [rows] * len(parts)
    weights = [{"w": Tensor(x), "b": Tensor(np.float32([1, 2]))} for x in values]
    states = [{"m.w": Tensor(-x), "muon_v.w": Tensor(v)} for x, v in zip(values, of_rows)]
    for k, x in enumerate(cut_along(w, own)):
        wanted = {"w": Slices(k, tuple(x.shape for x in cut_along(w, own))), "b": Slices(0, ((2,),))}
        cuts = slices.cuts(parts, weights, wanted)
        assert slices.cut_weights(weights, 0, cuts)["w"].asnumpy().tobytes() == x.tobytes()
        found = slices.cut_states(states, 0, cuts)
        assert found["m.w"].asnumpy().tobytes() == (-x).tobytes()
        if len(shape) > 1:
            expected = cut_along(rows, own)[k].reshape(-1) if counts_rows else rows
            assert found["muon_v.w"].asnumpy().tobytes() == expected.tobytes()
