"""Collectives in one process, as their documents say: the processes that exchange take turns."""

import contextlib

import mindspore as ms
import numpy as np
from harness import numbers
from mindspore import Tensor, communication, ops

from ms_optim.rules import owners


class Waits(Exception):  # noqa: N818 - it is no error
    """A process waits for what others give to a collective."""


class Collectives:
    """The collectives of processes that take turns: each runs from its beginning until it waits for others.

    Attributes:
        answers: Of each collective, in turn, what it has given to each process.
        formats: The dtypes in which numbers have travelled.
    """

    def __init__(self, monkeypatch, world):
        self.answers, self.given, self.taken, self.formats = [], {}, 0, set()
        monkeypatch.setattr(ops, "AllReduce", lambda op, group: lambda x: self.answer("sum", x))
        monkeypatch.setattr(ops, "AllGather", lambda group: lambda x: self.answer("gather", x))
        monkeypatch.setattr(owners, "AlltoAllV", lambda group: lambda x, *counts: self.answer("blocks", x, *counts))
        monkeypatch.setattr(communication.GlobalComm, "WORLD_COMM_GROUP", world)

    def answer(self, *given):
        self.taken += 1
        if self.taken > len(self.answers):
            self.given[self.process] = given
            raise Waits
        return self.answers[self.taken - 1][self.process]

    def run(self, functions):
        """Run a function for each process, and return their results."""
        while True:
            found, self.given = [], {}
            for self.process, function in enumerate(functions):
                self.taken = 0
                with contextlib.suppress(Waits):
                    found.append(function())
            if len(found) == len(functions):
                return found
            assert not found, "a process does not wait for the others"
            self.answers.append(self.exchanged([self.given[process] for process in range(len(functions))]))

    def exchanged(self, given):
        kinds = {kind for kind, *_ in given}
        formats = {x.dtype for _, x, *_ in given}
        assert formats == {ms.float32} if kinds != {"blocks"} else len(formats) == 1
        self.formats |= formats
        arrays = [numbers(x).astype(np.float32) for _, x, *_ in given]
        if kinds == {"blocks"}:
            counts = [[list(map(int, numbers)) for numbers in of_one] for _, _, *of_one in given]
            sent = [np.split(x, np.cumsum(sends))[:-1] for x, (sends, _) in zip(arrays, counts)]
            for process, (_, receives) in enumerate(counts):
                assert [len(blocks[process]) for blocks in sent] == receives
            received = [np.concatenate([blocks[process] for blocks in sent]) for process in range(len(given))]
            return [Tensor(x).astype(*formats) for x in received]
        assert len({x.shape for x in arrays}) == 1
        both = {"sum": np.sum(arrays, 0, dtype=np.float32), "gather": np.concatenate(arrays)}
        return [Tensor(both[kinds.pop()])] * len(given)
