"""Text that several docstrings share, and the decorator that puts it into them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

from .options import STAGES

T = TypeVar("T", bound=Callable)
DEFAULT = r"\s+Default: ``[^`]*`` \.$"

SECTIONS = {
    "params": """\
params (Union[list[Parameter], list[dict]]): The parameters to update, of dtype float32, float16 or bfloat16
    and any shape, or groups of them. A group is a dict with these keys:

    - params: Required. The group's parameters, a list of Parameter.
    - lr: Optional. The group's learning rate, of any kind that `learning_rate` takes. Default: `learning_rate`.
    - weight_decay: Optional. The group's weight decay, of any kind that `weight_decay` takes.
      Default: `weight_decay`.
    - grad_centralization: Optional. Whether to subtract from each gradient of 2 or more dimensions its mean over
      all dimensions but the first. Default: ``False`` .
    - state_dtype, master_weights: Optional. The formats of the group's states and masters, as the arguments of these
      names. Default: those arguments.
    - shard_group: Optional. The name, a str, of a communication group whose processes each hold a slice of the
      group's tensors. Norms are then those of whole tensors. With `grad_centralization`, tensors must be sliced along
      their first dimension. Default: none, tensors are not sliced.
    - order_params: Optional, in a dict of its own. All the parameters of the groups, in the order in which the
      optimizer keeps them.
""",
    "learning_rate": """\
learning_rate (Union[float, int, Tensor, Iterable, LearningRateSchedule]): The learning rate, 0 or greater. A number or
    a 0-dimensional Tensor is a fixed rate. With an Iterable or a 1-dimensional Tensor, step i uses element i; a step
    after the last element is an error. A LearningRateSchedule is called with the step, counted from 0.
""",
    "weight_decay": """\
weight_decay (Union[float, int, Cell]): The weight decay, 0 or greater; a Cell is called with the step, counted from 0,
    and returns the weight decay. Default: ``0.0`` .
""",
    "loss_scale": """\
loss_scale (float): The factor that the loss was multiplied by; gradients are first divided by it. Set it to the scale
    of a FixedLossScaleManager with drop_overflow_update=False. It and its inverse must be normal numbers in float32:
    from 2⁻¹²⁶ to 2¹²⁶. Default: ``1.0`` .
""",
    "precision": """\
state_dtype (Union[str, mindspore.dtype]): The format of the states: "float32" or "bfloat16", also as the dtype; "8bit"
    or "4bit", which are codes of 8 or 4 bits with one float32 scale for each block of 256 elements, for parameters of
    at least 4,096 elements. Default: ``"float32"`` .
master_weights (Union[bool, str]): Whether float16 and bfloat16 parameters have float32 master weights. A step updates
    the master weights, and the parameters are rounded from them. The master weights of bfloat16 parameters can be
    split: the parameter holds the upper 16 bits, and only lower bits are stored in addition. "split" stores all lower
    16 bits, 2 bytes per element; "split8" stores the next 8 bits, 1 byte per element, rounded stochastically. float16
    parameters cannot be split. Default: ``True`` .
stochastic_rounding (bool): Whether float16 and bfloat16 parameters without master weights are rounded stochastically,
    so that the expected rounding error is zero. The random numbers depend on MindSpore's seed, the step and the
    element. Default: ``False`` .
""",
    "backend": """\
backend (str): "auto" runs the fused kernel if there is one, else kernels that AKG compiles if they are correct, else
    MindSpore's own operators. "aot" requires the fused kernel, "akg" the kernels of AKG, and "composite" MindSpore's
    operators. Default: ``"auto"`` .
""",
    "shard_states": """\
shard_states (bool): Whether the workers of data-parallel training shard the states. Each worker keeps the states of its
    share of the weights and updates that share; then all workers gather the weights. `gradients` must already be the
    mean over the workers, as in the parallel mode "data_parallel" with gradients_mean=True. With the group key
    `shard_group`, the workers are the processes that hold the same slices. With one worker it has no effect.
    Default: ``False`` .
""",
    "offload": """\
offload (bool): Whether states and masters are in host memory, and the step runs on the host's processor, while weights
    and gradients are on an accelerator: gradients are copied to the host, and new weights are copied back. The host
    also keeps a copy of the weights. Requires the fused kernel for CPU; on device target "CPU" it has no effect.
    Default: ``False`` .
""",
    "inputs": """\
- **gradients** (tuple[Tensor]) - One gradient for each parameter, in the optimizer's order, of the parameter's
  shape and of dtype float32, float16 or bfloat16. They are not modified. In Graph mode the fused kernel also
  accepts a RowTensor, the sparse gradient of an embedding, in place of a dense gradient.
""",
    "raises": """\
TypeError: If `learning_rate` is not an int, float, Tensor, Iterable or LearningRateSchedule.
TypeError: If an element of `params` is neither a Parameter nor a dict.
TypeError: If `weight_decay` is not a float, an int or a Cell.
TypeError: If a keyword argument is unknown, or has the wrong type.
KeyError: If a group has an unknown key.
ValueError: If `learning_rate` or `weight_decay` is less than 0, or not finite in float32.
ValueError: If a parameter is listed twice, or `order_params` does not hold exactly the parameters of the groups.
ValueError: If a keyword argument is out of its range or not one of its choices, or two of them cannot be combined.
ValueError: If `gradients` does not match the parameters in number and shape.
RuntimeError: If `global_step` is less than 0, or an Iterable has no learning rate for the step. In a graph, MindSpore
    raises its own error instead, or the step changes nothing and is counted in `skipped_steps`.
RuntimeError: If `backend` is "aot" or "akg" and there is no such kernel or its results are wrong, or if a
    keyword argument requires a kernel and there is none; the message states the reason.
""",
    "global_step": """\
- **global_step** (Union[Tensor, int]) - The step, counted from 0: int32 of shape () or (1,).
""",
    "scheduled_decay": """\
Tensor, float32 of shape (): the weight decay.
""",
    "scheduled_rate": """\
Tensor, float32 of shape (): the learning rate.
""",
    "rate_raises": """\
TypeError: If `learning_rate` or `power` is not a number, or `warmup_steps` or `total_steps` is not an int.
ValueError: If `learning_rate` or `power` is not greater than 0, `warmup_steps` is less than 0, or `total_steps` is less
    than 1.
""",
    "first_weight_decay": """\
weight_decay (Union[float, int]): The weight decay of step 0, 0 or greater.
""",
    "end_weight_decay": """\
end_weight_decay (Union[float, int]): The weight decay from step `decay_steps` on, 0 or greater.
""",
    "decay_steps": """\
decay_steps (int): The number of steps :math:`T` from the first value to the last, 1 or greater.
""",
    "decay_raises": """\
TypeError: If a weight decay is not a number, or a number of steps is not an int.
ValueError: If a weight decay is less than 0 or not finite, or a number of steps is less than 1.
""",
    "network": """\
network (Union[Cell, list[Parameter]]): The network whose trainable parameters are grouped, or a list of parameters.
""",
    "no_decay": """\
weight_decay (Union[float, int, Cell, None]): The weight decay of the parameters that are decayed; ``None`` means
    the optimizer's own. Default: ``None`` .
no_decay (Union[list[str], tuple[str]]): Name patterns of further parameters that are not decayed, as in
    :func:`pattern_groups`. Default: ``()`` .
""",
    "groups": """\
ParamGroups, a list that the optimizers take as `params`; each parameter is in one group, and the optimizer keeps
them in the order of the network. When printed, it shows a table.
""",
    "network_raises": """\
TypeError: If `network` is neither a Cell nor a list of Parameters, or a parameter is not of floating-point dtype.
ValueError: If `network` has no trainable parameters, or a parameter is empty, is listed twice, or has the name of
    another parameter.
""",
    "platforms": "``Ascend`` ``GPU`` ``CPU``",
}
SECTIONS |= {stage.keyword: stage.document for stage in STAGES}
SECTIONS["common"] = "".join(SECTIONS[name] for name in ("precision", "skip_nonfinite", "backend"))
SECTIONS["shared"] = "".join(SECTIONS[name] for name in ("loss_scale", "grad_clip_norm", "common", "shard_states"))


def documented(public: T) -> T:
    """Replace each line `{name}` of a docstring by the shared text of that name, with the line's indent.

    A line `{name|default}` is the text of one argument, with another default.
    """
    lines = []
    for line in (public.__doc__ or "").splitlines():
        name = line.strip().strip("{}").split("|")
        if line.strip() == "{" + "|".join(name) + "}" and name[0] in SECTIONS:
            text = SECTIONS[name[0]].rstrip("\n")
            if len(name) > 1:
                text = f"{re.sub(DEFAULT, '', text)} Default: ``{name[1]}`` ."
            lines += textwrap.indent(text, line[: len(line) - len(line.lstrip())]).splitlines()
        else:
            lines.append(line)
    public.__doc__ = "\n".join(lines)
    return public
