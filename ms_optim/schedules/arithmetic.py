"""What schedules compute with: whole steps, and constants of enough digits."""

import mindspore as ms
from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it


def constant(value):
    """Make a constant of the dtype that schedules compute in.

    A Python number does not work: MindSpore rounds it to float32, even in a sum with a float64 tensor. A Tensor takes
    no int of more than 64 bits.
    """
    return Tensor(float(value), mstype.float32 if ms.get_context("device_target") == "Ascend" else mstype.float64)


def whole(global_step):
    """Return the step as a 0-dimensional int32 tensor: differences and quotients of integers are exact."""
    return F.cast(global_step, mstype.int32).reshape(())


def ratio(count, total):
    """Return count / total: an int32 tensor divided by a constant or another int32 tensor."""
    return F.cast(count, total.dtype) / total
