"""Whether a backward pass still reads a weight as it was when the pass began."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from mindspore import Parameter, Tensor


def _unknown() -> bool:
    return True


class Readers:
    """Watches who holds the memory of a Parameter on the host.

    MindSpore keeps a Tensor for the backward pass of each operator that read the parameter, and drops it with the
    operator. The parameter gets another Tensor over the same memory, so that the memory's address stays as compiled
    graphs know it. The Tensor before is then held by those readers alone, and it is gone when the last one is done.

    Args:
        parameter: The parameter.
    """

    def __init__(self, parameter: Parameter):
        self._parameter = parameter
        self._owner: Tensor | None = None
        self._address = 0
        self._seen: weakref.ref | None = None
        self.renew()

    def renew(self) -> Callable[[], bool]:
        """Return what tells whether anybody still reads the values from before, and watch for later readers.

        Readers cannot be seen, and count as there, if the parameter was given other memory since the last call, or if
        its memory is not on the host.
        """
        p, seen = self._parameter, self._seen
        if p.has_init:
            p.init_data()
        owner = self._owner
        if owner is None or p.data_ptr() != self._address:
            owner, self._address, seen = Tensor(p), p.data_ptr(), None
        self._owner, view = owner, owner.asnumpy()
        if view.ctypes.data != self._address:
            self._owner = self._seen = None
            return _unknown
        p.set_data(Tensor.from_numpy(view))
        self._seen = weakref.ref(view)
        return _unknown if seen is None else lambda: seen() is not None
