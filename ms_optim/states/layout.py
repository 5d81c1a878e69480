"""Properties of the parameters and their groups at construction; they never change afterwards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms

from ..arguments.checks import LEAST, MOST, NORMAL, fail
from ..arguments.options import Options
from ..rules.arithmetic import step_dtype

if TYPE_CHECKING:
    from mindspore import Parameter

    from ..arguments.rates import Collected
    from ..rules.matrices import Form, Matrix
    from ..rules.rule import Rule


class Slices(NamedTuple):
    """The slices of a tensor that processes hold: the index of this process's slice, and the shape of each."""

    own: int
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters of an optimizer, in the order in which gradients are given.

    Attributes:
        optimizer: Name of the optimizer's class, for errors.
        names: The parameters' names.
        shapes: Their shapes.
        dtypes: Their dtypes.
        rate_places: For each, the index of its learning rate among the step's rates.
        decay_places: For each, the index of its weight decay; -1 if it is not decayed.
        rate_count: Number of rates of a step.
        centralized: Whether its gradient is centralized.
        owned: Whether this process updates it; with MindSpore's parallel optimizer, it updates only some parameters.
        options: For each, the shared arguments, with the formats of its group if it states some.
        forms: The distinct forms of tensors that hold matrices.
        form_places: For each parameter, the index of its form; -1 if it holds no matrices. Empty if no parameter does.
        most_stacked: The most elements of a stack of more than one tensor; 0 where nothing bounds them in particular.
        first_row: The row of its first parameter in the tables of a step, such as the statistics, which have a row for
            each parameter of all rules that take the step together.
        slices: The slices of each sliced tensor, by name.
    """

    optimizer: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    rate_places: tuple[int, ...]
    decay_places: tuple[int, ...]
    rate_count: int
    centralized: tuple[bool, ...]
    owned: tuple[bool, ...]
    options: tuple[Options, ...]
    forms: tuple[Form, ...] = ()
    form_places: tuple[int, ...] = ()
    most_stacked: int = 0
    first_row: int = 0
    slices: Mapping[str, Slices] = dataclasses.field(default_factory=dict)

    def with_matrices(self, forms: Sequence[Form | None], most_stacked: int = 0) -> Layout:
        """Return a copy with the matrices of each parameter, None if it holds none, and the bound of stacks."""
        distinct = tuple(dict.fromkeys(form for form in forms if form is not None))
        places = tuple(-1 if form is None else distinct.index(form) for form in forms)
        return dataclasses.replace(self, forms=distinct, form_places=places, most_stacked=most_stacked)

    def form_of(self, i: int) -> Form | None:
        """Return the form of a parameter; None if it holds no matrices."""
        return self.forms[self.form_places[i]] if self.holds_matrices(i) else None

    def matrices(self, i: int) -> tuple[Matrix, ...]:
        """Return the matrices of a parameter."""
        form = self.form_of(i)
        return () if form is None else form.matrices

    def holds_matrices(self, i: int) -> bool:
        """Return whether a parameter holds matrices."""
        return len(self.form_places) > 0 and self.form_places[i] >= 0

    @classmethod
    def of(
        cls,
        optimizer: str,
        parameters: Sequence[Parameter],
        rates: Collected,
        centralization: Sequence[bool],
        owned: Sequence[Any],
        options: Options,
        formats: Mapping[str, Options],
    ) -> Layout:
        """Return the properties of an optimizer's parameters.

        Args:
            optimizer: Name of the optimizer's class.
            parameters: The parameters.
            rates: Their rates.
            centralization: Whether their groups are centralized; this applies to gradients of two or more dimensions.
            owned: Whether this process updates each of them.
            options: The shared arguments.
            formats: The same for parameters whose group states formats, by name.
        """
        return cls(
            optimizer=optimizer,
            names=tuple(p.name for p in parameters),
            shapes=tuple(p.shape for p in parameters),
            dtypes=tuple(p.dtype for p in parameters),
            rate_places=rates.rate_places,
            decay_places=rates.decay_places,
            rate_count=rates.rates.count,
            centralized=tuple(asked and len(p.shape) > 1 for asked, p in zip(centralization, parameters)),
            owned=tuple(bool(mine) for mine in owned),
            options=tuple(formats.get(p.name, options) for p in parameters),
        )

    @property
    def count(self) -> int:
        """Number of parameters."""
        return len(self.names)

    @property
    def rows(self) -> range:
        """The row of each parameter in the tables of a step."""
        return range(self.first_row, self.first_row + self.count)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def exchanges_by_form(self) -> bool:
        """Whether processes hold slices of tensors with matrices; they then exchange once per form."""
        return any(form.slicing is not None for form in self.forms)

    def stacking(self, i: int) -> tuple[int, int]:
        """Return what a parameter takes of a stack's elements on each process, and how many of it make equal shares.

        All processes find the same, whatever the sizes of their slices: a slice of matrices counts as an equal share,
        because whole matrices are dealt among the processes.
        """
        form = self.form_of(i)
        slicing = None if form is None else form.slicing
        if slicing is None:
            return self.sizes[i], 1
        whole, processes = math.prod(slicing.whole(self.shapes[i])), len(slicing.lengths)
        if not slicing.cuts_matrices:
            return whole, 1
        return math.ceil(whole / processes), processes // math.gcd(processes, slicing.batch)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a step that all paths use.

    Attributes:
        device: The device that the rule's arithmetic runs on.
        weights_on: The device that the weights are on.
        step_dtype: The dtype of values that depend only on the step.
        unscale: The factor of the gradients.
        seed: The seed of the noise.
        is_parallel: Whether each process updates a part of the parameters.
    """

    device: str
    weights_on: str
    step_dtype: Any
    unscale: float
    seed: float
    is_parallel: bool

    @classmethod
    def of(
        cls, optimizer: str, rule: Rule, options: Options, device: str, runs_on_host: bool, is_parallel: bool
    ) -> Settings:
        """Return the settings for all paths of an optimizer.

        Args:
            optimizer: Name of the optimizer's class, for the error.
            rule: Its rule.
            options: Its shared arguments.
            device: The device that the weights are on.
            runs_on_host: Whether the optimizer's arithmetic always runs on the host.
            is_parallel: Whether each process updates a part of the parameters.

        Raises:
            ValueError: If the factor of the gradients that follows from the loss scale is not a normal number.
        """
        unscale = rule.rescale / options.loss_scale
        if not LEAST <= unscale <= MOST:
            expected = f"such that the factor of the gradients, {unscale}, is {NORMAL}"
            fail(ValueError, optimizer, "loss_scale", expected, options.loss_scale)
        return cls(
            device="CPU" if runs_on_host or options.offload else device,
            weights_on=device,
            step_dtype=step_dtype(device),
            unscale=unscale,
            seed=float(ms.get_seed() or 0),
            is_parallel=is_parallel,
        )
