"""What checkpoints survive: kills in the middle of a save, flipped bits, files cut off; and what a save costs.

saves.py searches for orders of saves, names of files and interrupts that they do not survive.

    python tests/campaign/checkpoints.py --seed 0 kills 200
    python tests/campaign/checkpoints.py --seed 0 flips 500
    python tests/campaign/checkpoints.py --seed 0 cuts 500
    python tests/campaign/checkpoints.py times 100 1000

Each prints what it found, and ends with an error where a checkpoint was neither the old nor the new one, or a spoiled
one was taken. The times are of models of so many MB, against mindspore.save_checkpoint.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import ms_optim

SHAPES = {"w": (300, 1000), "long": (70001,), "b": (7,), "none": ()}


def model(shapes, dtype=ms.float32):
    """Return a network of parameters of these shapes, and an optimizer of low precision states and masters."""
    net = nn.Cell()
    for name, shape in shapes.items():
        net.insert_param_to_cell(name, Parameter(Tensor(np.zeros(shape, np.float32), dtype), name=name))
    return net, ms_optim.AdamW(net.trainable_params(), state_dtype="8bit")


def held(net, optimizer):
    """Return the bytes of weights and states, which share their memory, but for the step count."""
    named = {p.name: p for p in (*net.get_parameters(), *optimizer.get_parameters())}
    kept = sorted(named.keys() - {"global_step", "statistics"})
    return {name: named[name].asnumpy().reshape(-1).view(np.uint8) for name in kept}


def fill(net, optimizer, step):
    """Set all bytes to what they are at a step."""
    for k, data in enumerate(held(net, optimizer).values()):
        data[:] = (7 * step + k) % 113
    optimizer.global_step.asnumpy()[...] = step


def digest(net, optimizer):
    """Return a copy of all bytes."""
    return {name: data.tobytes() for name, data in held(net, optimizer).items()}


# ---- Kills --------------------------------------------------------------------------------------------------------


def save_until_killed(path, first, pipe):
    """Save one step after another, and tell of each save that is done."""
    net, optimizer = model(SHAPES, ms.bfloat16)
    for step in range(first, first + 10**6):
        fill(net, optimizer, step)
        # The first byte says that saving begins.
        os.write(pipe, b"\n" if step == first else b"")
        ms_optim.save(path, net, optimizer, step_again=step)
        os.write(pipe, b"%d\n" % step)


def serve(path):
    """For each line, a first step and a delay, fork a process that saves, kill it, and say which saves it finished.

    A process of its own that has MindSpore imported, but has run nothing: what is forked later waits for threads that
    are not there.
    """
    for line in sys.stdin:
        first, delay = line.split()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(path, int(first), writing)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            pipe.readline()
            time.sleep(float(delay))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            print("told", int(os.WIFSIGNALED(status)), *pipe.read().decode().split(), flush=True)


def kill(path, count, rng, longest=0.1):
    """Kill processes that save.

    Returns:
        How often the checkpoint left is the last finished one, and the next, and how often a file was left unfinished.
    """
    net, optimizer = model(SHAPES, ms.bfloat16)
    fill(net, optimizer, 0)
    ms_optim.save(path, net, optimizer, step_again=0)
    last, old, unfinished = 0, 0, 0
    command = [sys.executable, __file__, "serve", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for _ in range(count):
            print(last + 1, rng.uniform(0, longest), file=server.stdin, flush=True)
            answer = next(line for line in server.stdout if line.startswith("told")).split()[1:]
            killed, *told = (int(word) for word in answer)
            assert killed, "the process that saves ended by itself"
            finished = told[-1] if told else last
            unfinished += len([*path.parent.glob(f".{path.name}.*.tmp")])
            loaded = ms_optim.load(path, net, optimizer)
            assert loaded.step in (finished, finished + 1), f"step {loaded.step} is left, {finished} was finished"
            assert loaded.more == {"step_again": loaded.step}
            found = digest(net, optimizer)
            fill(net, optimizer, loaded.step)
            assert found == digest(net, optimizer), f"what is left of step {loaded.step} is not what was saved"
            old += loaded.step == finished
            last = loaded.step
        server.stdin.close()
    return old, count - old, unfinished


# ---- Spoiled files ------------------------------------------------------------------------------------------------


def spoiled_file(folder):
    """Return a checkpoint, the bytes of it, and where the tensors begin."""
    path = folder / "run.safetensors"
    net, optimizer = model(SHAPES, ms.bfloat16)
    fill(net, optimizer, 3)
    ms_optim.save(path, net, optimizer, extra=Tensor([1.5, 2.5]))
    raw = path.read_bytes()
    return path, raw, 8 + int.from_bytes(raw[:8], "little"), net, optimizer


def spans(raw, begin):
    """Return where each tensor begins and ends in a file."""
    header = json.loads(raw[8:begin])
    found = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (begin + low, begin + high) for name, (low, high) in found.items()}


def refusal(path, net, optimizer):
    """Return the error with which a spoiled checkpoint is refused, once nothing is known to have changed."""
    before = digest(net, optimizer)
    with pytest.raises(ms_optim.SpoiledError) as caught:
        ms_optim.load(path, net, optimizer)
    assert digest(net, optimizer) == before, "a checkpoint that was refused changed something"
    assert str(path) in str(caught.value)
    return str(caught.value)


def flip(folder, count, rng):
    """Flip bits, one at a time, every fourth in the header; return how many were in tensors and in the header.

    The others are in each tensor as often: small ones are no page, of large ones the end is none.
    """
    path, raw, begin, net, optimizer = spoiled_file(folder)
    places = spans(raw, begin)
    named = 0
    for k in range(count):
        name = sorted(places)[k % len(places)]
        low, high = (0, begin) if k % 4 == 0 else places[name]
        place = rng.randrange(low, high)
        data = bytearray(raw)
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        text = refusal(path, net, optimizer)
        if place >= begin:
            assert f"the bytes of {name!r} are not" in text, f"{name} is spoiled: {text}"
            named += 1
        else:
            assert "header" in text or "longer" in text, text
    return named, count - named


def cut(folder, count, rng):
    """Cut the file off at lengths of every kind; return how many were tried."""
    path, raw, begin, net, optimizer = spoiled_file(folder)
    lengths = [0, 1, 7, 8, 9, begin - 1, begin, begin + 1, len(raw) - 1]
    lengths += [rng.randrange(len(raw)) for _ in range(count - len(lengths))]
    for length in lengths:
        path.write_bytes(raw[:length])
        refusal(path, net, optimizer)
    path.write_bytes(raw + b"\0")
    refusal(path, net, optimizer)
    path.write_bytes(raw)
    ms_optim.load(path, net, optimizer)
    return len(lengths)


# ---- Times --------------------------------------------------------------------------------------------------------


def times(folder, megabytes, turns=7):
    """Return the median times of a save by each, taken in turns, in s."""
    per = megabytes * 10**6 // 4 // 40
    net = nn.Cell()
    for k in range(40):
        drawn = np.random.default_rng(k).standard_normal(per, np.float32)
        net.insert_param_to_cell(f"w{k}", Parameter(Tensor(drawn), name=f"w{k}"))
    ways = {
        "mindspore.save_checkpoint, ckpt": lambda: ms.save_checkpoint(net, str(folder / "a.ckpt")),
        "mindspore.save_checkpoint, safetensors": lambda: ms.save_checkpoint(
            net, str(folder / "b.safetensors"), format="safetensors"
        ),
        "ms_optim.save": lambda: ms_optim.save(folder / "c.safetensors", net),
        "ms_optim.load": lambda: ms_optim.load(folder / "c.safetensors", net),
    }
    taken = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if turn:
                taken[name].append(time.perf_counter() - begin)
            # What MindSpore left to be written later is not to slow the next one down.
            os.sync()
    return {name: statistics.median(each) for name, each in taken.items()}


def main():
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("what", choices=["kills", "flips", "cuts", "times"])
    parser.add_argument("count", type=int, nargs="+")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, count = pathlib.Path(name), arguments.count[0]
        if arguments.what == "kills":
            old, new, unfinished = kill(folder / "run.safetensors", count, rng)
            print(
                f"{count} kills: left was the last finished {old} times, the next {new}; {unfinished} files unfinished"
            )
        elif arguments.what == "flips":
            named, header = flip(folder, count, rng)
            print(f"{count} flipped bits: {named} in tensors, all named; {header} in the header, all refused")
        elif arguments.what == "cuts":
            print(f"{cut(folder, count, rng)} lengths, all refused")
        else:
            for megabytes in arguments.count:
                found = times(folder, megabytes)
                theirs = found["mindspore.save_checkpoint, ckpt"]
                for name, seconds in found.items():
                    print(f"{megabytes} MB, {name}: {seconds:.3f} s, {seconds / theirs:.2f} of ckpt's")


if __name__ == "__main__":
    main()
