"""What all optimizers share: groups, rates, states, the step and its two paths."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, RowTensor, Tensor, nn
from mindspore import dtype as mstype
from mindspore.ops import composite as C  # noqa: N812 - MindSpore's own name for it
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from mindspore.ops.primitive import constexpr

from . import _kernels
from ._arguments import (
    LEAST,
    MOST,
    NORMAL,
    Options,
    check_gradients,
    check_learning_rate,
    check_params,
    check_shapes,
    check_tensors,
    check_type,
    check_weight_decay,
    fail,
)
from ._arithmetic import dense, step_dtype
from ._docs import documented
from ._held import Held
from ._layout import Layout, Settings
from ._rates import Rates
from ._shares import split_states
from ._state import StateDict
from .paths import akg, ascend, native
from .paths.composite import CompositePath
from .paths.fused import FusedPath
from .paths.sharded_states import ShardedStatesPath
from .paths.slices import SumOverProcesses, WholeNorms, take_shard_groups
from .paths.tensor_by_tensor import TensorByTensorPath

if TYPE_CHECKING:
    from ._arguments import LearningRate, Params, Scalars, Tensors, WeightDecay
    from ._shares import Shares

_check_shapes = constexpr(check=False)(check_shapes)
# What each optimizer writes, by numbers: a graph knows no other objects.
_held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


@constexpr(check=False)
def _check_held(number: int) -> int:
    """Check what an optimizer writes: when a graph is compiled, and where ``construct`` is called from Python."""
    held = _held.get(number)
    if held is not None:
        held.check()
    return number


_warned: set[str] = set()


class Rule(NamedTuple):
    """What an optimizer says of itself; a rule without a kernel needs a name and its states.

    Attributes:
        name: The rule's name, by which its kernel is found: one of this package's own only for that very rule.
        states: Prefixes of the states' names, in the kernel's order.
        constants: For the kernel: the rule's numbers, in its order.
        flags: For the kernel: the rule's choices, as bits.
        shared_flags: For the kernel: what it asks of its launches besides, as bits.
        at_most: For the kernel: how many tensors one launch may take; 0: all.
        rescale: What gradients are multiplied by besides unscaling.
        is_layerwise: For the kernel: whether the weights move by norms of whole tensors.
        is_elementwise: Whether ``directions`` and ``entering`` treat each element by itself. Tensors of one shape are
            then updated together, which graphs compile faster: weight, gradient and states are several tensors stacked
            along a first dimension, the weight decay has a shape that broadcasts over them, and ``coefficients`` takes
            and returns vectors with a number for each tensor.
        takes_low_states: For the kernel: whether its states may be held in fewer bits, the first as a signed number,
            the others as unsigned ones.
    """

    name: str
    states: tuple[str, ...]
    constants: tuple[float, ...] = ()
    flags: int = 0
    shared_flags: int = 0
    at_most: int = 0
    rescale: float = 1.0
    is_layerwise: bool = False
    is_elementwise: bool = False
    takes_low_states: bool = True


@documented
class FusedOptimizer(StateDict, nn.Optimizer):
    """Base of the optimizers, and of those of your own: a subclass states its rule, this class does the rest.

    A subclass passes a :class:`Rule` to the constructor and states the rule once more in MindSpore operators, by
    :meth:`directions` and, where the whole tensor matters, :meth:`coefficients`. While it has no fused kernel of its
    own it passes ``backend="composite"``, too. Graph mode compiles these methods: they are of MindSpore's operators,
    and what else they read the constructor sets before it calls this one.

    Parameters that are not in groups are decayed unless their name contains ``beta`` or ``gamma``.

    Args:
        {params}
        {learning_rate}
        weight_decay (Union[float, int, Cell]): The weight decay, 0 or greater; a Cell is called with the step, counted
            from 0, and returns it.
        rule (Rule): What the subclass says of its rule.
        {shared}

    Attributes:
        normalizes_gradient: bool, for a subclass to set: whether each gradient is divided by its norm before the rule
            sees it. Default: ``False`` .
        decays_every_name: bool, for a subclass to set: whether parameters that are not in groups are decayed whatever
            their names. Default: ``False`` .
        parameters: The parameters, in the order in which gradients are given.
        states: Parameters: all parameters' first states, then all second ones, and so on.
        scales: Parameters, float32: the scales of states in codes of 8 bits.
        masters: Parameters, float32: the masters of float16 and bfloat16 parameters.
        global_step: Parameter, int32 of shape (1,): steps so far, but for those that were skipped. It stays at
            2**31 - 1: later steps are taken as if each were the last that can be counted.
        statistics: Parameter, float32 of shape (parameters, 5): gradient norm, weight norm, update norm, trust ratio
            and whether the gradient was finite, of the last step.
        skipped_steps: Parameter, int32 of shape (1,): steps skipped for a gradient that was not finite.

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
        ...         return (ops.sign(momentum) + weight_decay * weight,), (momentum,)
        >>> weight = Parameter(Tensor([1.0, -2.0], ms.float32), name="weight")
        >>> optimizer = Signum([weight], learning_rate=0.1)
        >>> done = optimizer((Tensor([3.0, 4.0], ms.float32),))
        >>> print(weight.asnumpy())
        [ 0.9 -2.1]
    """

    _support_parallel_optimizer = True
    # Whether the gradient is divided by its norm before the rule sees it.
    normalizes_gradient = False
    # Whether parameters that are not in groups are decayed whatever their names, as MindFormers does.
    decays_every_name = False
    # Whether tensors may be split over processes.
    takes_shard_groups = True
    # Whether the rule's arithmetic runs on the host whatever the device.
    runs_on_host = False
    # Whether the states may be split over workers.
    takes_shares = True
    # Parameters that the step keeps at beta1^t and beta2^t for checkpoints.
    beta_powers: tuple[Parameter, ...] = ()

    # What a class of this package states for the commands, MindFormers and the tests, which list all optimizers.
    # Its rules without the numbers that the arguments decide, one for each kernel; the first is the default.
    rules: tuple[Rule, ...] = ()
    # Arguments that have no default, besides the parameters and the learning rate, with values for an example.
    required: ClassVar[dict[str, Any]] = {}
    # Arguments of an example that shows whether a kernel is right, for each of the rules.
    trials: tuple[dict[str, Any], ...] = ({},)
    # Names of the parameters that it keeps besides its states and masters.
    counters: tuple[str, ...] = ("global_step", "learning_rate", "skipped_steps", "statistics")

    # What construction makes.
    loss_scale: float
    decay_flags: tuple[bool, ...]
    shares: Shares | None
    is_sliced: bool
    state_shares: Parameter
    states: ParameterTuple
    scales: ParameterTuple
    masters: ParameterTuple
    skipped_steps: Parameter
    statistics: Parameter
    fused: bool
    akg: bool
    backend_reason: str
    map_: Callable[..., Any]
    _path: Any

    def __init__(
        self, params: Params, learning_rate: LearningRate, weight_decay: WeightDecay, rule: Rule, **shared: Any
    ):
        name = type(self).__name__
        options = Options.of(name, shared, self.keywords())
        params, shard_groups = take_shard_groups(name, check_params(name, params), self.takes_shard_groups)
        params = [group for group in params if group != {"params": []}]
        if shard_groups and options.shard_states:
            raise ValueError(
                f"For '{name}', 'shard_states' must be False where a group of 'params' has a 'shard_group'."
            )
        learning_rate = check_learning_rate(name, "learning_rate", learning_rate)
        check_weight_decay(name, "weight_decay", weight_decay)
        check_type(name, "rule", rule, Rule)
        # The kernels unscale gradients themselves: told of the loss scale, the base class would scale the decay by it.
        nn.Optimizer.__init__(self, learning_rate, params, weight_decay)
        self.loss_scale = float(options.loss_scale)
        self.options = options
        self.rule = rule
        self._succeeded = (True,) * self.param_length
        self.map_ = C.HyperMap()
        self._reads_count = _kernels.device_target() == "CPU"
        self._layout = self._laid_out()
        # Graphs know tuples, and no other objects.
        self._names, self._shapes = self._layout.names, self._layout.shapes
        self.shares = split_states(self._layout, rule.states, options, self.use_parallel)
        kept = self.shares.kept if self.shares else tuple(enumerate(self._layout.shapes))
        if options.state_dtype != "float32" and not rule.takes_low_states:
            fail(ValueError, name, "state_dtype", "'float32'", options.state_dtype)
        skipped_steps = Parameter(Tensor([0], mstype.int32), name="skipped_steps", requires_grad=False)
        empty = Tensor(np.zeros((self.param_length, len(_kernels.STATISTICS)), np.float32))
        statistics = Parameter(empty, name="statistics", requires_grad=False)
        counters = (self.global_step, skipped_steps, statistics)
        self._held = held = Held(self._layout, self._parameters, rule.states, options, kept, counters)
        self.states, self.scales, self.masters = held.states, held.scales, held.masters
        if self.shares:
            self.state_shares = self.shares.entry(held.of_tensors)
        self.skipped_steps, self.statistics = skipped_steps, statistics
        self._hold_more()
        self._choose_path(shard_groups)
        self._note_names()
        held.note()
        self._held_number = id(held)
        _held[self._held_number] = held

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the names of the arguments that the optimizer takes besides its parameters."""
        signatures = (inspect.signature(base.__init__).parameters for base in cls.__mro__)
        own = next(names for names in signatures if "learning_rate" in names)
        kept = [name for name, p in own.items() if p.kind is not p.VAR_KEYWORD and name not in ("self", "params")]
        shared = [field.name for field in dataclasses.fields(Options)]
        return kept + [name for name in shared if name not in kept and (cls.takes_shares or name != "shard_states")]

    # ---- What a subclass states in MindSpore operators ------------------------------------------------------------

    def scalars(self, t: Tensor) -> Scalars:
        """Return a tuple of what depends on the step alone, computed once a step.

        Args:
            t: Step count from 1, a tensor of no dimensions: float64, float32 on Ascend.
        """
        return (t,)

    def entering(self, gradient: Tensor) -> Tensor:
        """Return what enters the rule, by default the gradient as it is.

        Args:
            gradient: A gradient, float32, unscaled, centralized, and clipped, or divided by its norm where
                `normalizes_gradient` is set.
        """
        return gradient

    def akg_constants(self) -> tuple[float, ...]:
        """Return the rule's numbers in the order of its AKG kernel, if it has one."""
        raise NotImplementedError

    def directions(
        self, scalars: Scalars, weight: Tensor, gradient: Tensor, weight_decay: Tensor, states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return the directions that a weight moves along, and the new states.

        Args:
            scalars: What :meth:`scalars` returned.
            weight: The weight, float32.
            gradient: What :meth:`entering` returned.
            weight_decay: This step's weight decay, a float32 tensor of no dimensions, unless the rule is elementwise.
            states: The states of this weight, in the order of the rule.

        Returns:
            A tuple of directions and a tuple of new states, each of the weight's shape.
        """
        raise NotImplementedError

    def coefficients(
        self, learning_rate: Tensor, weight_decay: Tensor, weight_norm: Tensor, direction_norms: Tensors
    ) -> tuple[Tensors, Tensor]:
        """Return how far the weight moves along each direction, and the trust ratio to report.

        Args:
            learning_rate: This step's learning rate, a float32 tensor of no dimensions, unless the rule is elementwise.
            weight_decay: This step's weight decay.
            weight_norm: L2 norm of the weight.
            direction_norms: L2 norms of the directions.

        Returns:
            A tuple of coefficients c, for the weight w - sum(c * directions), and a trust ratio.
        """
        return (learning_rate,), F.ones_like(learning_rate)

    # ---- Construction ---------------------------------------------------------------------------------------------

    def _preprocess_weight_decay(self, weight_decay):
        """Keep the decay as it is: the base class would multiply it by the loss scale."""
        if isinstance(weight_decay, nn.Cell):
            self.dynamic_weight_decay = True
            return weight_decay
        return float(weight_decay)

    def _collect_rates(self):
        """Find the distinct learning rates and weight decays, so that each is evaluated once a step.

        Returns:
            For each parameter the place of its learning rate among these, and that of its weight decay, -1 for none.
        """
        n = self.param_length
        if self.decays_every_name and not self.is_group:
            self.decay_flags = (True,) * n
        learning_rates = list(self.learning_rate) if self.is_group_lr else [self.learning_rate] * n
        weight_decays = list(self.weight_decay) if self.is_group else [self.weight_decay] * n
        rates, index = [], {}

        def place(rate):
            if type(rate).__name__ == "_ConvertToCell":
                # MindSpore's way to make a schedule of a fixed rate: rate + 1 - 1, which rounds it to 1e-7.
                rate = rate.learning_rate
            key = id(rate) if isinstance(rate, (nn.Cell, Parameter)) else float(rate.asnumpy())
            if key not in index:
                index[key] = len(rates)
                rates.append(rate)
            return index[key]

        rate_places = [place(rate) for rate in learning_rates]
        decayed = [
            flag and (isinstance(decay, nn.Cell) or float(decay.asnumpy()) > 0.0)
            for flag, decay in zip(self.decay_flags, weight_decays)
        ]
        decay_places = [place(decay) if used else -1 for used, decay in zip(decayed, weight_decays)]
        fixed_first = sorted(range(len(rates)), key=lambda k: isinstance(rates[k], nn.Cell))
        moved = {old: new for new, old in enumerate(fixed_first)} | {-1: -1}
        self._rates = Rates([rates[k] for k in fixed_first])
        # The fewest steps that an Iterable has learning rates for, where there is one.
        listed = (rate.learning_rate.size for rate in rates if type(rate).__name__ == "_IteratorLearningRate")
        self._rate_steps = min(listed, default=None)
        return tuple(moved[k] for k in rate_places), tuple(moved[k] for k in decay_places)

    def _laid_out(self):
        """Return what is known of the parameters, once their rates are collected."""
        places = self._collect_rates()
        shapes = tuple(p.shape for p in self._parameters)
        flags = self.grad_centralization_flags if self.is_group else (False,) * self.param_length
        return Layout(
            optimizer=type(self).__name__,
            names=tuple(p.name for p in self._parameters),
            shapes=shapes,
            dtypes=tuple(p.dtype for p in self._parameters),
            rate_places=places[0],
            decay_places=places[1],
            rate_count=self._rates.count,
            centralized=tuple(flag and len(shape) > 1 for flag, shape in zip(flags, shapes)),
            owned=tuple(bool(mine) for mine in self.optim_filter),
        )

    def _hold_more(self):
        """Make what a subclass holds besides."""

    def _settings(self):
        """Return what all paths are told."""
        options, device = self.options, _kernels.device_target()
        unscale = self.rule.rescale / options.loss_scale
        if not LEAST <= unscale <= MOST:
            expected = f"such that the factor of the gradients, {unscale}, is {NORMAL}"
            fail(ValueError, type(self).__name__, "loss_scale", expected, options.loss_scale)
        return Settings(
            device="CPU" if self.runs_on_host else device,
            step_dtype=step_dtype(device),
            unscale=unscale,
            clip_norm=options.grad_clip_norm,
            skips=options.skip_nonfinite,
            seed=float(ms.get_seed() or 0),
            is_parallel=self.use_parallel,
        )

    def _choose_path(self, shard_groups):
        """Choose how a step runs."""
        name, options, settings = type(self).__name__, self.options, self._settings()
        slice_sums, self.is_sliced = None, bool(shard_groups)
        if shard_groups:
            slice_sums = SumOverProcesses([shard_groups.get(p.name) for p in self._parameters])
        whole = WholeNorms(slice_sums, settings.step_dtype) if slice_sums is not None else None
        akg_kernels = self._choose_backend(settings, slice_sums is not None)
        needing = {
            "stochastic_rounding": options.stochastic_rounding,
            "state_dtype": options.state_dtype != "float32",
            "shard_states": self.shares is not None,
        }
        needing = [argument for argument, needs in needing.items() if needs]
        if needing and not self.fused:
            raise RuntimeError(f"For '{name}', '{needing[0]}' needs the fused kernel: {self.backend_reason}.")
        if self.shares is not None and _kernels.device_target() != "CPU":
            raise RuntimeError(
                f"For '{name}', 'shard_states' needs the device target 'CPU', but it is '{_kernels.device_target()}'."
            )
        if self.fused:
            self._path = self._fused_path(settings, slice_sums)
        if not self.fused or (self.runs_on_host and self.shares is None):
            composite = self._composite_path(settings, whole, akg_kernels)
            if self.fused:
                # For where the arithmetic is moved to the device. A Cell lists what it holds: this is no part yet.
                object.__setattr__(self, "_other_path", composite)
            else:
                self._path = composite

    def _swap_paths(self, fused):
        """Take the other path of an optimizer whose arithmetic runs on the host, the fused one or not."""
        self.fused = fused
        current, self._path = self._path, self._other_path
        object.__setattr__(self, "_other_path", current)

    def _composite_path(self, settings, whole, akg_kernels):
        """Return the path in MindSpore's operators."""
        rule = self.rule
        return CompositePath(self._layout, self._held, self, rule.is_elementwise, settings, whole, akg_kernels)

    def _fused_path(self, settings, slice_sums):
        """Return the path in fused kernels."""
        layout, held, rule, options = self._layout, self._held, self.rule, self.options
        if self.shares is not None:
            normalizes = self.normalizes_gradient
            return ShardedStatesPath(layout, held, rule, options, settings, normalizes, self.shares)
        if settings.device == "Ascend":
            if options.backend == "native":
                rates = [float(rate.asnumpy()) for rate in self._rates.fixed]
                operators = native.NativeAdamW(layout, held, rule, rates, settings.step_dtype)
            else:
                operators = ascend.AscendOperators(layout, held, self, rule)
            return TensorByTensorPath(layout, held, self, settings, ascend.sign(rule), operators)
        return FusedPath(layout, held, rule, options, settings, self._rates, self.normalizes_gradient, slice_sums)

    def _choose_backend(self, settings, is_sliced):
        """Choose between kernels and MindSpore's operators; say once what runs in place of the first.

        Returns:
            AKG's kernels, where these run.
        """
        name, wanted, rule, device = type(self).__name__, self.options.backend, self.rule, settings.device
        self.fused, self.akg, self.backend_reason = False, False, f"backend='{wanted}' was asked for"
        if wanted == "composite":
            return None
        if wanted != "akg":
            self.backend_reason = self._why_not_fused(device, is_sliced) or ""
            if not self.backend_reason:
                self.fused = True
                return None
        if wanted in ("aot", "native"):
            raise RuntimeError(f"For '{name}', backend='{wanted}' has no fused kernel: {self.backend_reason}.")
        reason, kernels = akg.why_not(rule, device), None
        if reason is None:
            kernels = akg.AkgKernels(rule.name, len(rule.states), self.akg_constants())
            reason = akg.tried(kernels, self, rule, device, settings.step_dtype, self._layout.sizes)
        self.akg = reason is None
        if wanted == "akg":
            if reason is not None:
                raise RuntimeError(f"For '{name}', backend='akg' has no kernel: {reason}.")
            return kernels
        path = "in AKG's kernels" if self.akg else "on the slower composite path"
        self.backend_reason += "" if self.akg else f"; {reason}"
        if self.backend_reason not in _warned:
            _warned.add(self.backend_reason)
            warnings.warn(f"ms_optim runs {path}: {self.backend_reason}.", stacklevel=6)
        return kernels if self.akg else None

    def _why_not_fused(self, device, is_sliced):
        """Say why no fused kernel runs, or return None."""
        rule, options = self.rule, self.options
        if options.backend == "native":
            changes = self.dynamic_lr or len(self._rates.schedules) > 0
            reason = native.why_not(rule, options, self._layout, self._held, device, changes)
        else:
            reason = _kernels.why_not(rule.name, device)
        if reason is None and device == "Ascend":
            reason = ascend.why_not(options, is_sliced, self.shares is not None)
        return reason

    # ---- The step -------------------------------------------------------------------------------------------------

    def __call__(self, gradients: Sequence[Tensor]) -> tuple[bool, ...] | Tensor:
        """Run one step, called from Python; inside a graph, ``construct`` is compiled instead."""
        self._check_count()
        if self._path.addresses is None:
            check_tensors(self.cls_name, gradients, (Tensor, RowTensor))
            self._held.check()
            return super().__call__(gradients)
        if not self._has_hooks():
            return self._run_by_address(gradients)
        # Cell calls the hooks, and what it takes for `construct` between them.
        object.__setattr__(self, "construct", self._run_by_address)
        try:
            return nn.Cell._run_construct(self, gradients)
        finally:
            object.__delattr__(self, "construct")

    def _has_hooks(self):
        """Tell whether Cell has hooks to call, which it does in PyNative mode alone."""
        hooks = self._forward_pre_hook or self._forward_hook
        return bool(hooks) and ms.get_context("mode") == ms.PYNATIVE_MODE

    def _run_by_address(self, gradients):
        """Run one step on the memory that parameters and gradients are in."""
        self._held.check()
        gradients = check_gradients(self.cls_name, self._layout.names, self._layout.shapes, gradients)
        done = self._path.run_by_address(self.global_step, self._path.addresses.fill(gradients))
        # The operator may run later, unless waited for, and the gradients may be gone by then.
        done.data_ptr()
        return self._succeeded

    def _check_count(self):
        """Check that there can be a step from the count as it is; on CPU alone, as elsewhere reading it would wait."""
        if not self._reads_count:
            return
        step = int(self.global_step.asnumpy()[0])
        if step < 0:
            raise RuntimeError(
                f"For '{self.cls_name}', 'global_step' must be 0 or greater, but is {step}. Set or load another one."
            )
        if self._rate_steps is not None and step >= self._rate_steps:
            raise RuntimeError(
                f"For '{self.cls_name}', the argument 'learning_rate' must have a learning rate for each step, but has "
                f"{self._rate_steps}, and this is step {step}, counted from 0."
            )

    def construct(self, gradients: Tensors) -> tuple[bool, ...] | Tensor:
        """Update the parameters."""
        _check_held(self._held_number)
        # A loop over all gradients would be unrolled by recursion when a graph is compiled, which MindSpore limits.
        gradients = self.map_(dense, gradients)
        shapes, dtypes = self.map_(F.shape, gradients), self.map_(F.dtype, gradients)
        _check_shapes(self.cls_name, self._names, self._shapes, shapes, dtypes, self.fused)
        rates = self._rates(self.global_step)
        done = self._path(rates, gradients)
        if self.use_parallel:
            done = F.depend(done, self.broadcast_params(done))
        return self._outcome(done)

    def _outcome(self, done):
        """Return what a step returns, once it is done; with each element waiting for it, graphs compile for long."""
        if isinstance(self._succeeded, tuple):
            return (F.depend(True, done), *self._succeeded[1:])
        return F.depend(self._succeeded, done)
