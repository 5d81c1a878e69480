"""MultiOptimizer: several optimizers over disjoint parameters, as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, nn

from ..arguments.docstrings import documented
from ..arguments.options import Options
from ..arguments.rates import collected
from ..base.optimizer import FusedOptimizer
from ..paths.choice import Choice, joint_choice, joint_path, joint_released_path
from ..rules.rule import Rule
from ..states.joint import JointHeld, joint_layouts
from .arguments import NAME, check_clip, check_optimizers
from .members import as_decay, as_schedule, joint_rule, rename_rates, take
from .summary import summary

if TYPE_CHECKING:
    from mindspore import Tensor

    from ..paths.parts import Parts


@documented
class MultiOptimizer(FusedOptimizer):
    """Several optimizers over disjoint parameters, as one: each updates its own parameters by its own rule.

    It is used like any optimizer of this package, with `Model`, training cells and loops of your own: it takes all
    gradients in one tuple, counts one step, and is saved in one checkpoint. All optimizers take a step together or not
    at all. Learning rates and weight decays are those of each optimizer, numbers or schedules.

    - **Order.** `parameters` has those of the first optimizer, in its order, then those of the second, and so on;
      gradients are given in this order, as ``value_and_grad(net, None, optimizer.parameters)`` returns them, and the
      rows of `statistics` have it.
    - **Clipping.** `grad_clip_norm` bounds the norm of all gradients together. An optimizer that is itself made with
      `grad_clip_norm` clips its own gradients, by the norm of these alone; the gradients of others are not clipped.
    - **Skipped steps.** If one of the optimizers is made with `skip_nonfinite`, as Muon is by default, a step is
      skipped for all if any gradient of any of them is not finite.
    - **Averages.** :meth:`averaged` requires that every optimizer keeps an average of its weights.
    - **Names.** States have the names that they have in each optimizer, learning rates those of groups:
      `learning_rate_group_0` and so on. So a checkpoint of a single optimizer with the same states goes on here, and
      the other way round, with ``learning_rate="keep"``: one of Muon, for example, whose AdamW is separate here.

    The optimizers become parts of it, in its attribute `optimizers`. To call one of them, or its methods other than
    `param_groups`, is an error.

    On a device on which one of the rules has a fused kernel and another has not, MindSpore's operators run all, with a
    warning.

    Args:
        optimizers (Union[list[FusedOptimizer], tuple[FusedOptimizer]]): The optimizers, each with its own parameters,
            before their first step, with the same `loss_scale`. :class:`ms_optim.AdamOffload`,
            :class:`ms_optim.DGCMomentum`, `shard_states`, `shard_group`, and on an accelerator `offload`, are not
            supported.
        grad_clip_norm (Union[float, None]): Largest global L2 norm of the gradients of all optimizers, after unscaling
            and centralization; larger gradients are scaled down to it. Default: ``None`` .

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        TypeError: If `optimizers` is not a list of optimizers of this package, or one of them is a LocalSteps or a
            MultiOptimizer, or `grad_clip_norm` is not a number.
        ValueError: If `optimizers` is empty, two have a parameter in common or different loss scales, or one of them is
            not supported; or `grad_clip_norm` is not greater than 0, or is given here and to one of the optimizers.
        RuntimeError: If one of the optimizers has taken steps, or is attached to backward passes.

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_optim import AdamW, Lion, MultiOptimizer
        >>> net = nn.SequentialCell(nn.Embedding(100, 16), nn.Dense(16, 10))
        >>> embedding = Lion(net[0].trainable_params(), learning_rate=1e-4)
        >>> others = AdamW(net[1].trainable_params(), learning_rate=1e-3, weight_decay=0.1)
        >>> optimizer = MultiOptimizer([embedding, others], grad_clip_norm=1.0)
        >>> print([p.name for p in optimizer.parameters])
        ['0.embedding_table', '1.weight', '1.bias']
        >>> model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
    """

    # MindSpore's parallel optimizer would have each process update parameters of some rules only.
    _support_parallel_optimizer = False
    optimizers: tuple[FusedOptimizer, ...]
    # What nn.Optimizer keeps of groups.
    group_params: list[Parameter]
    group_lr: list[Any]
    group_weight_decay: list[Any]
    group_grad_centralization: list[bool]
    is_group_lr: bool
    dynamic_lr: bool
    dynamic_weight_decay: bool
    rule: Rule
    options: Options
    loss_scale: float

    def __init__(self, optimizers: Sequence[FusedOptimizer], grad_clip_norm: float | None = None):
        members = check_optimizers(optimizers)
        clip = check_clip(members, grad_clip_norm)
        choice, self._choices = joint_choice(NAME, [(each._parts, each._choice) for each in members])
        # nn.Optimizer's constructor asks them for the rates.
        self.__dict__["optimizers"] = members
        nn.Optimizer.__init__(self, 0.0, [{"params": [p for each in members for p in each.parameters]}])
        skips = any(each.options.skip_nonfinite for each in members)
        self.loss_scale = members[0].loss_scale
        self.options = Options(loss_scale=self.loss_scale, grad_clip_norm=clip, skip_nonfinite=skips)
        self.rule = joint_rule(members)
        rates = collected(list(self.learning_rate), list(self.weight_decay), self.decay_flags)
        layout, layouts = joint_layouts(NAME, [each._layout for each in members], rates)
        held = JointHeld(NAME, [each._held for each in members], self.global_step)
        parts = tuple(
            dataclasses.replace(
                each._parts,
                layout=own,
                rates=rates.rates,
                options=dataclasses.replace(
                    each.options, skip_nonfinite=skips, grad_clip_norm=clip or each.options.grad_clip_norm
                ),
            )
            for each, own in zip(members, layouts)
        )
        shared = {"statement": self, "rule": self.rule, "options": self.options, "layout": layout, "held": held}
        joined = dataclasses.replace(parts[0], rates=rates.rates, members=parts, **shared)
        self._assemble(joined, choice, rates.fewest_steps)
        object.__setattr__(self, "_fixed", self._fixed | {"optimizers"})
        for each in members:
            take(each, held)

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the names of the arguments that it takes, except the optimizers."""
        return ["grad_clip_norm"]

    def _init_group_params(self, parameters, learning_rate, weight_decay, grad_centralization):
        """Have nn.Optimizer take the rates that the optimizers have: it would make others of the same value."""
        self.group_params = parameters[0]["params"]
        self.group_lr, self.group_weight_decay, self.is_group_lr = [], [], True
        self.group_grad_centralization = [False] * len(self.group_params)
        for each in self.optimizers:
            listed = [*each._rates.fixed, *each._rates.schedules]
            for rate, decay in zip(each._layout.rate_places, each._layout.decay_places):
                self.group_lr.append(listed[rate])
                self.group_weight_decay.append(0.0 if decay < 0 else as_decay(listed[decay]))
        rename_rates(self.group_lr)
        self.dynamic_lr = any(isinstance(rate, nn.Cell) for rate in self.group_lr)
        self.dynamic_weight_decay = any(isinstance(decay, nn.Cell) for decay in self.group_weight_decay)
        if self.dynamic_lr:
            of_rates = {id(rate): as_schedule(rate) for rate in self.group_lr}
            self.group_lr = [of_rates[id(rate)] for rate in self.group_lr]

    def _path_for(self, choice: Choice, parts: Parts) -> Any:
        return joint_path(self._choices, parts)

    def _released_path(self, looks_first: bool) -> Any:
        return joint_released_path(self._choices, self._parts, looks_first)

    def check_entries(self, entries: dict[str, Tensor]) -> None:
        """Raise an error if entries of a state dict do not fit one of the optimizers.

        Args:
            entries: The entries by their names from construction.
        """
        for each in self.optimizers:
            each.check_entries(entries)

    def __repr__(self) -> str:
        return summary(self._parts, self._no_kernel())
