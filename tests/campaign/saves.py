"""Saves by any number of workers under any file name, killed between the parts or interrupted at any line.

After each of them, all workers load the newest save of which all parts are there, as it was, or are told that there is
none; an interrupt leaves the old part or the new one, and an interrupted load all old values or all new ones.
"""

import pathlib
import tempfile
import warnings

import numpy as np
from harness import digest_of, tensor
from hypothesis import strategies as st
from interrupting import interrupted_at
from mindspore import Parameter

import ms_optim
from ms_optim import AdamW, DGCMomentum, LocalSteps, SimulatedWorkers

STEMS = ["run", "epoch.3-of-10", "run.0-of-2", "run.1-of-3", ".run", "run.", "fold.0-of-1", "a b", "*[r]un?", "läuft\n"]
LONG = 255 - len(".0-of-3.safetensors")  # letters of the longest stem that a part may have
NAMES = st.one_of(
    st.sampled_from(STEMS),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.integers(200, LONG).map(lambda letters: "n" * letters),
).map(lambda stem: f"{stem}.safetensors")
moment = st.one_of(st.none(), st.none(), st.integers(0, 400))
OPERATIONS = st.tuples(
    st.integers(1, 3),  # workers
    st.sampled_from(["dgc", "local"]),
    st.integers(0, 3),  # their step
    st.permutations([0, 1, 2]),  # in this order
    st.integers(0, 3),  # as many save before the kill
    moment,  # of an interrupt in the last one's save
    moment,  # of an interrupt in a load
)
PROGRAM = st.fixed_dictionaries(
    {"names": st.lists(NAMES, min_size=1, max_size=2, unique=True), "operations": st.lists(OPERATIONS, max_size=7)}
)


def made(count, kind):
    """Return the optimizers of workers that have weights and states of their own."""

    def make(params, group):
        if kind == "local":
            return LocalSteps(AdamW(params, 0.1), group=group)
        return DGCMomentum(params, 0.1, 0.9, 0, sparsity=[0.9], min_compress_numel=1, group=group)

    params = [Parameter(tensor(np.zeros(n), "float32"), name=name) for name, n in (("w", 40), ("b", 3))]
    return SimulatedWorkers(count, params, make).optimizers


class Folder:
    """What the files hold: by name, number of workers and rank, the number of the save and its step."""

    def __init__(self, folder):
        self.folder, self.parts, self.saves = folder, {}, 0

    def save(self, name, count, kind, step, order, saving, moment):
        self.saves += 1
        optimizers = made(count, kind)
        for optimizer in optimizers:
            for counted in (optimizer.global_step, getattr(optimizer, "local_step", optimizer.global_step)):
                counted.asnumpy()[...] = step
        ranks = [rank for rank in order if rank < count][:saving]
        for rank in ranks:
            optimizer, number = optimizers[rank], self.saves

            def call(optimizer=optimizer, number=number, rank=rank):
                ms_optim.save(self.folder / name, None, optimizer, save=number, rank=rank)

            finished = not interrupted_at(call, moment) if moment is not None and rank == ranks[-1] else call() is None
            held = self.parts.setdefault((name, count, kind), {})
            if finished or self.is_new(name, count, rank, number):
                for other in ("dgc", "local"):
                    self.parts.get((name, count, other), {}).pop(rank, None)
                held[rank] = number

    def is_new(self, name, count, rank, number):
        path = self.folder / name
        path = path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}{path.suffix}")
        return path.exists() and f'\\"save\\": {number},'.encode() in path.read_bytes()

    def newest(self, name):
        """Return the number of the newest complete save, and its workers; None if there is none."""
        complete = [
            (held[0], count, kind)
            for (of, count, kind), held in self.parts.items()
            if of == name and sorted(held) == list(range(count)) and len(set(held.values())) == 1
        ]
        return max(complete, default=None)

    def check(self, name, moment):
        expected = self.newest(name)
        number, count, kind = expected or (0, 1, "dgc")
        for rank, optimizer in enumerate(made(count, kind)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of later saves that are incomplete
                if expected is None:
                    self.refused(name, optimizer)
                    return
                if moment is not None:
                    self.interrupt(name, optimizer, moment)
                loaded = ms_optim.load(self.folder / name, None, optimizer)
            assert loaded.more == {"save": number, "rank": rank}, f"{loaded.more} was loaded, not save {number}."

    def interrupt(self, name, optimizer, moment):
        for value in (optimizer.parameters[0], *optimizer.states):
            value.asnumpy()[...] = 5
        old = digest_of(optimizer)
        interrupted_at(lambda: ms_optim.load(self.folder / name, None, optimizer), moment)
        left = digest_of(optimizer)
        ms_optim.load(self.folder / name, None, optimizer)
        assert left in (old, digest_of(optimizer)), "A load that was interrupted left a mixture."

    def refused(self, name, optimizer):
        try:
            loaded = ms_optim.load(self.folder / name, None, optimizer)
        except (FileNotFoundError, ms_optim.SpoiledError):
            return
        raise AssertionError(f"{loaded.more} was loaded, but no save is complete.")


def attack(program):
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(pathlib.Path(name))
        for k, (*save, in_load) in enumerate(program["operations"]):
            saved = program["names"][k % len(program["names"])]
            folder.save(saved, *save)
            for each in program["names"]:
                folder.check(each, in_load)
        unfinished = [path.name for path in folder.folder.iterdir() if path.name.endswith(".tmp")]
        assert not unfinished, f"{unfinished} are left over."
    return {"saves": folder.saves}
