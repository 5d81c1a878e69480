"""The base class of all optimizers: arguments, groups, rates, and the step, which a path runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore as ms
from mindspore import Parameter, ParameterTuple, RowTensor, Tensor, nn
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.primitive import constexpr

from ..arguments.checks import Options, check_type, keywords_of
from ..arguments.docstrings import documented
from ..arguments.gradients import check_gradients, check_shapes, check_tensors
from ..arguments.params import check_learning_rate, check_params, check_weight_decay, warn_of_unused_decay
from ..arguments.rates import check_step, collected
from ..kernels import table as kernels
from ..paths.choice import choose, composite_path, fused_path
from ..paths.operators.slices import SumOverProcesses, take_shard_groups
from ..paths.parts import Parts
from ..rules.arithmetic import dense
from ..rules.rule import Rule, Statement
from ..states import formats
from ..states.layout import Layout, Settings
from ..states.shares import sharded
from ..states.storage import Held, check_held
from .attributes import Attributes
from .averaged import Averaged
from .gradient_release import Released, suspect
from .offload_report import Offloadable
from .state_dict import Stateful
from .summary import Summarized

if TYPE_CHECKING:
    from ..arguments.checks import LearningRate, Params, Tensors, WeightDecay
    from ..states.shares import Shares

# MindSpore cannot compile in two threads at once.
_compiling = threading.RLock()
# These checks run when a graph is compiled, and when ``construct`` is called from Python.
_check_shapes, _check_held = constexpr(check=False)(check_shapes), constexpr(check=False)(check_held)


@documented
class FusedOptimizer(Statement, Attributes, Summarized, Stateful, Averaged, Released, Offloadable):
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
        {average}

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
    skipped_steps: Parameter
    statistics: Parameter
    fused: bool
    akg: bool
    backend_reason: str
    map_: Callable[..., Any]
    _path: Any
    # Whether a step has compiled what a step from Python runs.
    _has_run: bool = False

    def __init__(
        self, params: Params, learning_rate: LearningRate, weight_decay: WeightDecay, rule: Rule, **shared: Any
    ):
        name = type(self).__name__
        options = Options.of(type(self), shared)
        params = check_params(name, params, own_keys=self.group_keys)
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
        self._succeeded, self.map_ = (True,) * self.param_length, C.HyperMap()
        if self.decays_every_name and not self.is_group:
            self.decay_flags = (True,) * self.param_length
        count = self.param_length
        rates = collected(
            list(self.learning_rate) if self.is_group_lr else [self.learning_rate] * count,
            list(self.weight_decay) if self.is_group else [self.weight_decay] * count,
            self.decay_flags,
        )
        self._rates, self._fewest_steps = rates.rates, rates.fewest_steps
        flags = self.grad_centralization_flags if self.is_group else (False,) * count
        self._layout = layout = Layout.of(name, self._parameters, rates, flags, self.optim_filter)
        if rule.others is not None:
            self._layout = layout = self.with_matrices(layout, shard_groups)
        # Graphs can read tuples, but no other objects.
        self._names, self._shapes, self.is_sliced = layout.names, layout.shapes, bool(shard_groups)
        self.shares = sharded(layout, rule, options, self.use_parallel, self.is_sliced)
        formats.check(name, rule, options, layout.names, layout.dtypes)
        kept = self.shares.kept if self.shares else tuple(enumerate(layout.shapes))
        own_ranges = self.shares.own if self.shares else None
        self._held = held = Held(layout, self._parameters, rule, options, kept, self.global_step, own_ranges)
        self.states, self.scales, self.masters, self.averages = held.states, held.scales, held.masters, held.averages
        self.skipped_steps, self.statistics = held.skipped_steps, held.statistics
        if self.shares:
            self.state_shares = self.shares.entry(held.of_tensors)
        self.step_weights = held.step_weights[0] if held.step_weights else None
        self._hold_more(held)
        settings = Settings.of(name, rule, options, kernels.device_target(), self.runs_on_host, self.use_parallel)
        self._reads_count = settings.weights_on == "CPU"
        slices = SumOverProcesses([shard_groups.get(p) for p in layout.names]) if shard_groups else None
        self._parts = parts = Parts(self, rule, options, layout, held, self._rates, settings, self.shares, slices)
        self._rename_like_no_weight()
        choice = choose(parts)
        self.fused, self.akg, self.backend_reason = choice.is_fused, choice.akg is not None, choice.reason
        self._path = self._fused_path(parts) if self.fused else self._composite_path(parts, choice.akg)
        swap = self._keep_swap(parts, getattr(self._path, "gathered", None), self._check_between)
        self._keep_entries(parts, self.state_shares if self.shares else None, swap)
        suspect(self._parameters)
        self._held_number = held.note()
        self._fix_attributes()

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the names of the arguments that the optimizer takes, except its parameters."""
        return keywords_of(cls)

    # ---- Construction ---------------------------------------------------------------------------------------------

    def _preprocess_weight_decay(self, weight_decay):
        """Keep the decay unchanged; the base class would multiply it by the loss scale."""
        if isinstance(weight_decay, nn.Cell):
            self.dynamic_weight_decay = True
            return weight_decay
        return float(weight_decay)

    def _hold_more(self, held):
        """Create the additional parameters of a subclass."""

    def _fused_path(self, parts):
        """Return the path that runs fused kernels."""
        return fused_path(parts)

    def _composite_path(self, parts, akg_kernels):
        """Return the path that runs MindSpore's operators."""
        return composite_path(parts, akg_kernels)

    # ---- The step -------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...] | Tensor:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        self._check_detached()
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
            done = self._path.run_by_address(self.global_step, self._path.addresses.fill(gradients))
        object.__setattr__(self, "_has_run", True)
        # Wait for the operator: it may run later, when the gradients may have been freed.
        done.data_ptr()
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
        _check_shapes(self.cls_name, self._names, self._shapes, shapes, dtypes, self.fused)
        done = self._path(self._rates(self.global_step), gradients)
        if self.use_parallel:
            done = F.depend(done, self.broadcast_params(done))
        return self._outcome(done)

    def _outcome(self, done):
        """Return the result of a step. Only one element waits for the step: if all did, graphs would compile slowly."""
        if isinstance(self._succeeded, tuple):
            return (F.depend(True, done), *self._succeeded[1:])
        return F.depend(self._succeeded, done)
