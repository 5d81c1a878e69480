"""How MindSpore runs what it is asked: in which mode, and in which of its own threads."""

import functools
import os

import mindspore as ms
from mindspore import communication

AS_IT_COMES = "MS_OPTIM_TEST_AS_IT_COMES"
# Whether operators of PyNative mode run one after the other in the thread that calls them.
SYNCHRONOUS = not os.environ.get(AS_IT_COMES)


def set_mode(mode):
    """Run what follows in Graph mode if it is "graph", and in PyNative mode otherwise."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)


def spare_operators():
    """Run each of MindSpore's operators in one thread, unless the environment says to leave MindSpore as it comes.

    Its threads wait for each other by yielding without rest, and take ten times as long as they work, more where
    several processes share the processors.
    """
    if SYNCHRONOUS:
        ms.device_context.cpu.op_tuning.threads_num(1)


def spare_threads():
    """Run MindSpore's operators in the thread that calls them, unless the environment says otherwise.

    In PyNative mode the first operator of a process settles whether one thread
    hands operators to the next: pynative_synchronize has its effect later only if that operator was called with it. The
    package's kernels have threads of their own, which this leaves alone. test_runtime.py leaves MindSpore as it comes.
    """
    spare_operators()
    if SYNCHRONOUS:
        ms.set_context(pynative_synchronize=True)
        ms.ops.cast(ms.Tensor([1.0], ms.float32), ms.float16).asnumpy()


def join():
    """Join the processes that test together; return this one's rank, and how many there are."""
    communication.init()
    spare_threads()
    return communication.get_rank(), communication.get_group_size()


@functools.cache
def group_of(first, count):
    """Return the name of a communication group of so many processes, one after the other."""
    name = f"{count} processes from {first}"
    communication.create_group(name, list(range(first, first + count)))
    return name


def wait():
    """Wait for all processes; where one ends before the last exchange of its peers, that fails."""
    ms.ops.AllReduce()(ms.Tensor([1.0], ms.float32)).asnumpy()
