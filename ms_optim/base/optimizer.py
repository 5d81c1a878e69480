"""The base class of all optimizers: arguments, groups, rates, and the step, which a path runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore as ms
from mindspore import Parameter, ParameterTuple, RowTensor, Tensor, nn
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.primitive import constexpr

from ..arguments.checks import check_type
from ..arguments.docstrings import documented
from ..arguments.gradients import check_gradients, check_shapes_in_graph, check_tensors
from ..arguments.options import Options, keywords_of, take_formats
from ..arguments.params import check_learning_rate, check_params, check_weight_decay, warn_of_unused_decay
from ..arguments.rates import check_step, collected
from ..paths.choice import Choice, choose, path_for, released_path
from ..paths.operators.slices import take_shard_groups
from ..paths.parts import Parts
from ..rules.arithmetic import dense
from ..rules.rule import Rule, Statement
from ..states.formats import FORMATS
from ..states.layout import Layout
from ..states.storage import check_held
from . import attributes
from .averaged import Swap
from .entries import written_together
from .gradient_release import Attachment, suspect
from .learning_rates import RateGroup, groups_of
from .offload_report import OffloadReport, offload_report
from .state_dict import StateEntries
from .summary import summary

if TYPE_CHECKING:
    from ..arguments.checks import LearningRate, Params, Tensors, WeightDecay
    from ..states.shares import Shares

# MindSpore cannot compile in two threads at once.
_compiling = threading.RLock()
# Runs when a graph is compiled, and when ``construct`` is called from Python.
_check_held = constexpr(check=False)(check_held)


@documented
class FusedOptimizer(Statement, nn.Optimizer):
    """Base class of all optimizers, also of your own: a subclass states its update rule, this class does the rest.

    A subclass passes a :class:`Rule` to the constructor and implements the rule in MindSpore operators: in
    :meth:`directions` and, if the rule depends on whole tensors, in :meth:`coefficients`. Without a fused kernel of its
    own, it also passes ``backend="composite"``. Graph mode compiles these methods, so they use only MindSpore
    operators. The constructor sets any other attributes that they read before it calls the constructor of this class.

    Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate}
        weight_decay (Union[float, int, Cell]): The weight decay, 0 or greater; a Cell is called with the step, counted
            from 0, and returns the weight decay.
        rule (Rule): The properties of the subclass's rule.
        {shared}
        {offload}
        {decay}
        {average_decay}
        {weight_norm}

    Attributes:
        normalizes_gradient: bool, for a subclass to set: whether each gradient is divided by its norm before the rule
            sees it. Default: ``False`` .
        decays_every_name: bool, for a subclass to set: whether parameters that are not in groups are decayed regardless
            of their names. Default: ``False`` .
        parameters: The parameters, in the order in which gradients are given.
        states: Parameters: the first states of all parameters, then all second states, and so on.
        scales: Parameters, float32: the scales of states that are held as codes.
        masters: Parameters: float32 masters of float16 and bfloat16 parameters, or the remainders of split masters.
        averages: Parameters, float32: the averages of the weights, if `average_decay` is set.
        global_step: Parameter, int32 of shape (1,): the number of steps so far, without skipped steps. It does not
            exceed 2³¹ − 1: each later step runs as if it were the last step that can be counted.
        statistics: Parameter, float32 of shape (parameters, 5): gradient norm, weight norm, update norm, trust ratio
            and whether the gradient was finite, of the last step.
        skipped_steps: Parameter, int32 of shape (1,): steps skipped because a gradient was not finite.

    Inputs:
        {inputs}

    Outputs:
        tuple[bool], all elements are ``True`` .

    Raises:
        {raises}

    Supported Platforms:
        {platforms}

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import Parameter, Tensor, ops
        >>> from ms_optim import FusedOptimizer, Rule
        >>> class Signum(FusedOptimizer):
        ...     def __init__(self, params, learning_rate, weight_decay=0.0, **shared):
        ...         rule = Rule("signum", ("momentum",))
        ...         super().__init__(params, learning_rate, weight_decay, rule, **{"backend": "composite", **shared})
        ...
        ...     def directions(self, scalars, weight, gradient, weight_decay, states):
        ...         momentum = 0.9 * states[0] + gradient
        ...         return (self.with_decay(ops.sign(momentum), weight, weight_decay),), (momentum,)
        >>> weight = Parameter(Tensor([1.0, -2.0], ms.float32), name="weight")
        >>> optimizer = Signum([weight], learning_rate=0.1)
        >>> done = optimizer((Tensor([3.0, 4.0], ms.float32),))
        >>> print(weight.asnumpy())
        [ 0.9 -2.1]
    """

    _support_parallel_optimizer = True
    decays_every_name = False
    # Further group keys of this class, in addition to those of all optimizers; it removes them from the groups itself.
    group_keys: ClassVar[tuple[str, ...]] = ()

    # All optimizers of the package, for the words of errors: OPTIMIZERS, which stands above this module.
    all_optimizers: ClassVar[tuple[type[FusedOptimizer], ...]] = ()
    # What a class of this package states for the commands, MindFormers and the tests, which list all optimizers.
    # Arguments without a default, except the parameters and the learning rate, with values for an example.
    required: ClassVar[dict[str, Any]] = {}
    # For each of the rules, the arguments of an example that tests whether a kernel is correct.
    trials: tuple[dict[str, Any], ...] = ({},)
    # Names of the parameters that it keeps in addition to its states and masters.
    counters: tuple[str, ...] = ("global_step", "learning_rate", "skipped_steps", "statistics")

    # Set by the constructor.
    rule: Rule
    is_cautious: bool
    loss_scale: float
    options: Options
    decay_flags: tuple[bool, ...]
    shares: Shares | None
    is_sliced: bool
    state_shares: Parameter
    states: ParameterTuple
    scales: ParameterTuple
    masters: ParameterTuple
    averages: ParameterTuple
    step_weights: Parameter | None
    weight_radii: Parameter | None
    skipped_steps: Parameter
    statistics: Parameter
    fused: bool
    akg: bool
    backend_reason: str
    map_: Callable[..., Any]
    _choice: Choice
    _path: Any
    # Whether a step has compiled what a step from Python runs.
    _has_run: bool = False
    # Since the last save or load, the run that this optimizer's steps belong to: see checkpoints/header.py.
    _run: str | None = None
    # Attributes that cannot be set any more: none until the constructor ends.
    _fixed: frozenset[str] = frozenset()
    _param_groups: list[RateGroup] | None = None

    def __init__(
        self, params: Params, learning_rate: LearningRate, weight_decay: WeightDecay, rule: Rule, **shared: Any
    ):
        name = type(self).__name__
        options = Options.of(type(self), shared, FORMATS)
        params, formats = take_formats(name, check_params(name, params, own_keys=self.group_keys), options, FORMATS)
        params, shard_groups = take_shard_groups(name, params, self.refuses.get("shard_group"))
        learning_rate = check_learning_rate(name, "learning_rate", learning_rate)
        check_weight_decay(name, "weight_decay", weight_decay)
        warn_of_unused_decay(type(self), params, weight_decay)
        check_type(name, "rule", rule, Rule)
        # The kernels unscale gradients themselves: if the base class knew the loss scale, it would multiply the decay
        # by it.
        nn.Optimizer.__init__(self, learning_rate, params, weight_decay)
        self.loss_scale, self.options = float(options.loss_scale), options
        self.rule, self.is_cautious = rule, options.decay == "cautious"
        if self.decays_every_name and not self.is_group:
            self.decay_flags = (True,) * self.param_length
        count = self.param_length
        rates = collected(
            list(self.learning_rate) if self.is_group_lr else [self.learning_rate] * count,
            list(self.weight_decay) if self.is_group else [self.weight_decay] * count,
            self.decay_flags,
        )
        flags = self.grad_centralization_flags if self.is_group else (False,) * count
        layout = Layout.of(name, self._parameters, rates, flags, self.optim_filter, options, formats)
        if rule.has_matrices:
            layout = self.with_matrices(layout, shard_groups)
        parts = Parts.of(self, rule, options, layout, rates.rates, shard_groups, self._parameters, self.global_step)
        self._assemble(parts, choose(parts), rates.fewest_steps)

    def _assemble(self, parts: Parts, choice: Choice, fewest_steps: int | None) -> None:
        """Make what the public methods ask, at the end of the constructor.

        Args:
            parts: The parts that the optimizer's path is built from.
            choice: The path.
            fewest_steps: The number of steps that have learning rates; None if there is no limit.
        """
        layout, held = parts.layout, parts.held
        self._parts, self._layout, self._held, self._rates = parts, layout, held, parts.rates
        self._fewest_steps, self._succeeded, self.map_ = fewest_steps, (True,) * layout.count, C.HyperMap()
        # Graphs can read tuples, but no other objects.
        self._names, self._shapes, self.is_sliced = layout.names, layout.shapes, parts.slices is not None
        self.states, self.scales, self.masters, self.averages = held.states, held.scales, held.masters, held.averages
        self.skipped_steps, self.statistics, self.shares = held.skipped_steps, held.statistics, parts.shares
        if parts.shares:
            self.state_shares = parts.shares.entry(held.of_tensors)
        self.step_weights, self.weight_radii = (next(iter(kept), None) for kept in (held.step_weights, held.radii))
        self._hold_more(held)
        attributes.rename_like_no_weight(self, layout, self._parameters)
        self.fused, self.akg, self.backend_reason = choice.path != "composite", choice.akg is not None, choice.reason
        self._choice, self._path = choice, self._path_for(choice, parts)
        self._attachment = Attachment(parts, self._released_path, self._check_begin)
        self._swap = Swap(parts, getattr(self._path, "gathered", None), self._attachment.check_between)
        listed = functools.partial(nn.Cell.parameters_and_names, self)  # even if a subclass overrides it
        self._entries = StateEntries(parts, listed, getattr(self, "state_shares", None), self.check_entries, self._swap)
        suspect(self._parameters)
        self._reads_count, self._held_number = parts.settings.weights_on == "CPU", held.note()
        object.__setattr__(self, "_fixed", attributes.held(self))

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the names of the arguments that the optimizer takes, except its parameters."""
        return keywords_of(cls)

    # ---- What Python and MindSpore call while parameters and attributes are set ------------------------------------

    @property
    def _keys(self) -> attributes.Keys:
        """The keys of registered parameters; nn.Optimizer's constructor registers some before ours makes anything."""
        return self.__dict__.setdefault("_own_keys", attributes.Keys())

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless the step was built with its value; a parameter's name never takes its place."""
        if name in self._fixed:
            raise AttributeError(attributes.fixed(self.cls_name, name))
        gave_way = self._keys.give_way(self.__dict__.get("_params", {}), name, value)
        if gave_way and "_entries" in self.__dict__:
            self._entries.give_way(name)
        super().__setattr__(name, value)

    def insert_param_to_cell(
        self, param_name: str, param: Parameter | None, check_name_contain_dot: bool = True
    ) -> None:
        """Register a parameter; one of a tuple by its name, unless the optimizer has an attribute of that name."""
        if not check_name_contain_dot and "." not in param_name:
            param_name = self._keys.of(self, param_name)
        super().insert_param_to_cell(param_name, param, check_name_contain_dot)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Raise an error: the parameters of a copy would be no network's."""
        raise TypeError(
            f"For '{self.cls_name}', an optimizer cannot be copied: copy the network, make a new optimizer of its "
            "parameters, and load this one's state_dict()."
        )

    # ---- Construction ---------------------------------------------------------------------------------------------

    def _no_kernel(self) -> str | None:
        """Return why steps run no fused kernel; None if they do. AdamOffload's target changes it."""
        return None if self.fused else self.backend_reason

    def _preprocess_weight_decay(self, weight_decay):
        """Keep the decay unchanged; the base class would multiply it by the loss scale."""
        if isinstance(weight_decay, nn.Cell):
            self.dynamic_weight_decay = True
            return weight_decay
        return float(weight_decay)

    def _hold_more(self, held):
        """Create the additional parameters of a subclass."""

    def _path_for(self, choice: Choice, parts: Parts) -> Any:
        """Make the path that runs the step."""
        return path_for(choice, parts)

    def _released_path(self, looks_first: bool) -> Any:
        """Make the path of steps whose gradients arrive one after the other."""
        return released_path(self._parts, self._choice, looks_first)

    # ---- The step -------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...] | Tensor:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        self._attachment.check_detached()
        self._check_begin()
        if self._path.addresses is None:
            check_tensors(self.cls_name, gradients, (Tensor, RowTensor))
            self._held.check()
            with _compiling:
                return super().__call__(gradients)
        if not self._has_hooks():
            return self._run_by_address(gradients)
        # Cell calls the hooks, and between them the method that it finds as `construct`.
        object.__setattr__(self, "construct", self._run_by_address)
        try:
            return nn.Cell._run_construct(self, gradients)
        finally:
            object.__delattr__(self, "construct")

    def _has_hooks(self):
        """Return whether Cell has hooks to call, which it does only in PyNative mode."""
        hooks = self._forward_pre_hook or self._forward_hook
        return bool(hooks) and ms.get_context("mode") == ms.PYNATIVE_MODE

    def _run_by_address(self, gradients):
        """Run one step directly on the memory of parameters and gradients."""
        self._held.check()
        self._rates.check(self.cls_name)
        gradients = check_gradients(self.cls_name, self._layout.names, self._layout.shapes, gradients)
        with contextlib.nullcontext() if self._has_run else _compiling:
            self._path.run_by_address(self.global_step, gradients)
        object.__setattr__(self, "_has_run", True)
        return self._succeeded

    def _check_begin(self):
        """Check that a step may begin. On CPU also check the step count; on other devices, reading it would block."""
        self._swap.check_step()
        if self._reads_count:
            check_step(self.cls_name, int(self.global_step.asnumpy()[0]), self._fewest_steps)

    def construct(self, gradients: Tensors) -> tuple[bool, ...] | Tensor:
        """Update the parameters."""
        _check_held(self._held_number)
        # A loop over all gradients would be unrolled by recursion when a graph is compiled, which MindSpore limits.
        gradients = self.map_(dense, gradients)
        shapes, dtypes = self.map_(F.shape, gradients), self.map_(F.dtype, gradients)
        check_shapes_in_graph(self.cls_name, self._names, self._shapes, shapes, dtypes, self.fused)
        done = self._path(self._rates(self.global_step), gradients)
        if self.use_parallel:
            done = F.depend(done, self.broadcast_params(done))
        return self._outcome(done)

    def _outcome(self, done):
        """Return the result of a step. Only one element waits for the step: if all did, graphs would compile slowly."""
        if isinstance(self._succeeded, tuple):
            return (F.depend(True, done), *self._succeeded[1:])
        return F.depend(self._succeeded, done)

    # ---- What it keeps --------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return a copy of the weights and of all that the optimizer keeps from step to step, by name.

        An outer Cell renames the optimizer's parameters; here they have their names from construction. Sharded states
        are this worker's share: see :func:`ms_optim.merge_states`.

        MindSpore's ``save_checkpoint(optimizer, path)`` writes the same without a copy. So does :func:`ms_optim.save`,
        which adds checksums and keeps the old file if the process is killed during the write.

        Args:
            args: Arguments of ``nn.Cell.state_dict``, which an outer Cell passes; its result is then returned.
            kwargs: Likewise.
        """
        if args or kwargs:
            return nn.Cell.state_dict(self, *args, **kwargs)
        return self._entries.copied()

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, learning_rate: str = "load") -> None:
        """Load the states of another optimizer and continue from its step.

        The values are written in place, so that compiled graphs also use them.

        Args:
            state_dict: Tensors or Parameters by name, as :meth:`state_dict` returns them or ``load_checkpoint`` reads
                them, with or without the prefix of an outer Cell. Weights and statistics among them are ignored.
                States of another `state_dtype` are converted; conversion to fewer bits rounds to nearest. So are
                masters: a float32 master is restored from a split one and its weight in `state_dict` or the network.
            strict: Whether missing and unknown names are an error; if not, they are ignored. Codes and their
                scales are then taken together or not at all; missing averages, and other missing states that start as
                the weights, start from the current weights. Default: ``True`` .
            learning_rate: ``"load"`` takes the learning rates in `state_dict`; ``"keep"`` keeps those that this
                optimizer was made with, numbers or schedules. Default: ``"load"`` .

        Raises:
            TypeError: If `state_dict` is not a dict of Tensors, or an entry has another dtype.
            KeyError: If `strict` and an entry is missing or unknown. It is also a ValueError.
            ValueError: If an entry has another shape; if `learning_rate` is not one of these; if a count, a learning
                rate or a scale is less than 0 or not finite; or if the states are a share among other workers:
                :func:`ms_optim.merge_states` merges all shares into a full state dict; each worker takes its share.

        If an error is raised, nothing is changed.
        """
        written_together(self._entries.fitting(state_dict, strict, learning_rate=learning_rate))

    def check_entries(self, entries: dict[str, Tensor]) -> None:
        """Raise an error if entries of a state dict do not fit this optimizer; a subclass may override it.

        Args:
            entries: The entries by their names from construction.
        """

    # ---- Learning rates -------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[RateGroup]:
        """The parameters by learning rate: for each a dict with `params` and `lr`, which can be set.

        Setting `lr` changes the learning rate from the next step on. Groups that share a learning rate are one here.
        :func:`ms_optim.for_scheduler` hands them to MindSpore's experimental schedulers.

        Raises:
            TypeError: If a learning rate is a schedule or a list.
        """
        groups = self._param_groups
        if groups is None:
            groups = groups_of(self._parts)
            object.__setattr__(self, "_param_groups", groups)
        return groups

    def current_step_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the next step.

        Returns:
            A float; if groups have their own learning rates, a tuple with one for each parameter.
        """
        rates = self._rates.at(self.global_step)
        if self.is_group_lr:
            return tuple(rates[place] for place in self._layout.rate_places)
        return rates[self._layout.rate_places[0]]

    # ---- Averaged weights -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self, weight: float = 1.0) -> Iterator[None]:
        """Put the averaged weights into the parameters; the end of the block restores them bit for bit.

        The averaged weights are the average that `average_decay` keeps, or the average of the iterates of
        :class:`ms_optim.ScheduleFreeAdamW`. A step inside the block is an error. :meth:`state_dict` is the same inside
        and outside of it. Of nested blocks, and of blocks in several threads, the one that ends last restores the
        weights. An exception at any time, such as Ctrl-C, restores them too. Changes to the parameters inside the
        block, such as loading a checkpoint of the network, are lost when it ends, with a warning.

        Args:
            weight: The weight of the average, from 0 to 1; the rest is that of the training weights. With 0.6, the
                parameters hold 0.4 times the training weights plus 0.6 times the average, in float32 before they are
                rounded to the dtype of the parameter. Default: ``1.0`` .

        Raises:
            TypeError: If `weight` is not a number.
            ValueError: If `weight` is not in the range [0, 1].
            RuntimeError: If there is no average of the weights, or the parameters hold it with another `weight`.
        """
        with self._swap.block(weight):
            yield

    def eval(self, weight: float = 1.0) -> None:
        """Put the averaged weights into the parameters, until :meth:`train` is called; see :meth:`averaged`.

        Args:
            weight: The weight of the average, as in :meth:`averaged`. Default: ``1.0`` .

        Raises:
            TypeError: If `weight` is not a number.
            ValueError: If `weight` is not in the range [0, 1].
            RuntimeError: If there is no average of the weights, or the parameters hold it with another `weight`.
        """
        self._swap.put_in(weight, stays=True)

    def train(self) -> None:
        """Restore the training weights; before the first :meth:`eval` this has no effect."""
        self._swap.take_out()

    # ---- Gradient release -----------------------------------------------------------------------------------------

    def attach(self, passes: int = 1) -> None:
        """From now on, update each parameter inside the backward pass, as soon as its gradient is available.

        Each gradient is freed immediately, so the gradients are never all in memory together. ``value_and_grad``
        returns a tensor of one element instead of each gradient. After each backward pass, call :meth:`finish`. The
        weights and states are bitwise equal to those of ordinary steps. See the page on gradient release.

        Args:
            passes: Number of backward passes of a step. With 2, the first measures the gradients and changes nothing,
                which `grad_clip_norm` and `skip_nonfinite` require; both passes must compute the same gradients.
                Default: ``1`` .

        Raises:
            RuntimeError: In Graph mode; if the optimizer exchanges data with other processes, or keeps its states in
                host memory beside a device; or if :meth:`attach` was already called for it, or for another optimizer
                that has one of its parameters.
            ValueError: If `passes` is neither 1 nor 2; or 1 with `grad_clip_norm` or `skip_nonfinite`.
        """
        self._attachment.attach(passes)

    def finish(self) -> bool:
        """End a backward pass: count the step once all parameters are updated.

        Returns:
            bool, whether the step is done; False after the first of two passes.

        Raises:
            RuntimeError: If a parameter's gradient has not arrived. The step is abandoned then.
        """
        return self._attachment.attached("finish()").finish()

    def abandon(self) -> list[str]:
        """Discard the current step after a backward pass that failed; training can continue.

        Returns:
            list[str], names of the parameters that were already updated; the step is not counted.
        """
        return self._attachment.attached("abandon()").abandon()

    def detach(self) -> None:
        """Return to ordinary steps.

        Raises:
            RuntimeError: If a step is in progress.
        """
        self._attachment.detach()

    # ---- What it shows --------------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """The device on which steps run, which :class:`ms_optim.AdamOffload` alone can change."""
        return self._target

    @target.setter
    def target(self, value: str) -> None:
        raise NotImplementedError(
            f"For '{self.cls_name}', 'target' cannot be set to {value!r}: steps run where the weights are. With "
            "offload=True, or by AdamOffload, they run on the host."
        )

    def offload_report(self, device: str | None = None) -> OffloadReport:
        """Return the bytes on device and host, and the bytes transferred in a step; no training is needed.

        Gradients are assumed to have the dtype of their parameter.

        Args:
            device: "CPU", "GPU" or "Ascend". Default: ``None`` , the current device target.

        Returns:
            A report of bytes, `device_bytes`, `host_bytes`, `to_host_bytes` and `to_device_bytes`, that prints as a
            table.

        Raises:
            ValueError: If there is no such device.
            RuntimeError: If the optimizer is not offloaded.
        """
        return offload_report(self._parts, device)

    def __repr__(self) -> str:
        return summary(self._parts, self._no_kernel())
