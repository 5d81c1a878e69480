"""Stands in for the package hyper_parallel, which no index has, under MindFormers' PyNative trainer in one process.

Written from how MindFormers 2.1 calls it. What one process has no use for can be imported, but not called.
"""

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types

from mindspore import Tensor

NAME = "hyper_parallel"


class DTensor(Tensor):
    """A part of a whole, in memory of this process, with the interface that hyper_parallel documents.

    Its `shape` and `size` are those of the whole, and its data and `asnumpy` those of the part.
    """

    def __new__(cls, local_tensor, device_mesh=None, placements=None):
        if isinstance(local_tensor, DTensor):  # how MindSpore makes a Parameter of it
            given = local_tensor
            local_tensor, device_mesh, placements = given.to_local(), given.device_mesh, given.placements
        made = Tensor._make_subclass(cls, local_tensor)
        made._local_tensor, made.device_mesh, made.placements = local_tensor, device_mesh, tuple(placements)
        return made

    def __init__(self, *_, **__):
        """Everything is done."""

    @staticmethod
    def from_local(local_tensor, device_mesh, placements):
        return DTensor(local_tensor, device_mesh, placements)

    def to_local(self):
        return self._local_tensor

    @property
    def shape(self):
        whole = list(self._local_tensor.shape)
        for k, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                whole[placement.dim] *= self.device_mesh.sizes[k]
        return tuple(whole)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def asnumpy(self):
        return self._local_tensor.asnumpy()

    def set_data(self, data):
        self._local_tensor._update_data(data)
        self._update_data(data)


@dataclasses.dataclass
class DeviceMesh:
    """The processes, arranged in dimensions of some sizes, with the communication group along each."""

    sizes: tuple
    groups: tuple

    def get_group(self, dim=0):
        return self.groups[dim]


class HSDPModule:
    """What no network is in one process."""


@contextlib.contextmanager
def skip_dtensor_dispatch():
    yield


def enable_mindspore_backward_compat():
    """Give tensors `backward` and `grad`, which MindSpore 2.10 has under other names."""
    from mindspore._c_expression import TensorPy, run_backward  # MindSpore 2.9 has no run_backward
    from mindspore.graph.api import _pynative_executor

    def backward(self, gradient):
        # Neither is the graph kept, nor is one made of the backward pass; leaves that do not matter are left alone.
        run_backward((self,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    _pynative_executor.set_grad_flag(True)
    TensorPy.backward = backward
    TensorPy.grad = property(lambda self: self._grad, lambda self, value: setattr(self, "_grad", value))


def unavailable(name):
    """Make what can be imported, but not used."""

    def refuse(self, *_, **__):
        raise NotImplementedError(f"{NAME}'s {name} has no place in one process")

    return type(name, (), {"__init__": refuse})


class Platform:
    """What modules ask for at import, and use among several processes alone."""

    def __getattr__(self, name):
        return unavailable(name)


@dataclasses.dataclass(frozen=True)
class Replicate:
    """A tensor that each process of a dimension of the mesh holds whole."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A tensor of which each process of a dimension of the mesh holds a part along one of its own dimensions."""

    dim: int = 0


KNOWN = {
    "Replicate": Replicate,
    "Shard": Shard,
    "get_platform": Platform,
    "DTensor": DTensor,
    "HSDPModule": HSDPModule,
    "SkipDTensorDispatch": skip_dtensor_dispatch,
    "enable_mindspore_backward_compat": enable_mindspore_backward_compat,
}


class Module(types.ModuleType):
    """A module of which every name can be imported; what is not known here cannot be used."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name) or unavailable(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        """Nothing is to be run."""


sys.meta_path.append(Finder())
