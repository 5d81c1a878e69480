"""What an optimizer keeps from step to step, in and out."""

# StateDict reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from . import _codes
from ._arguments import check_amounts, check_type
from ._kernels import CODE_BLOCK
from ._memory import CODES
from ._shares import ENTRY, refuse_share

FLOATS = (mstype.float32, mstype.bfloat16)


class StateDict:
    """Saving and loading of an optimizer's own parameters; a mixin that reads the optimizer's attributes."""

    def current_step_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the step to come.

        Returns:
            A float, or where groups have learning rates of their own, a tuple with one for each parameter.
        """
        rates = self._rates_at(self.global_step)
        if self.is_group_lr:
            return tuple(rates[place] for place in self._rate_index)
        return rates[self._rate_index[0]]

    def _rates_at(self, step: Tensor) -> list[float]:
        """Return the distinct learning rates and weight decays of a step, counted from 0."""
        return self._rates.construct(step).asnumpy().tolist()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return a copy of what the optimizer keeps from step to step, by name; the weights are not among it.

        Where states are split over workers it is this one's share: see :func:`ms_optim.merge_states`.

        MindSpore's ``save_checkpoint(optimizer, path)`` writes the same names without a copy, and the weights too.

        Args:
            args: With these, which a Cell passes when it collects its own, it is what ``nn.Cell.state_dict`` returns.
            kwargs: Likewise.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return {name: Tensor(p.asnumpy(), p.dtype) for name, p in self._own_parameters().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Go on from where another optimizer stood.

        Args:
            state_dict: Tensors or Parameters by name, as :meth:`state_dict` returns them or ``load_checkpoint`` reads
                them. Weights and statistics among them are passed over. States are converted where they are held in
                another `state_dtype` here: to fewer bits by rounding to nearest.
            strict: Whether names that are missing or not known are an error; if not, they are passed over.
                Default: ``True`` .

        Raises:
            TypeError: If `state_dict` is not a dict of Tensors, or an entry has another dtype.
            KeyError: If `strict` and an entry is missing or not known.
            ValueError: If an entry has another shape; if a count, a learning rate or a scale is less than 0 or not
                finite; or if it is a share of states that are split over other workers: :func:`ms_optim.merge_states`
                makes a full state dict of all, of which each worker takes its share.

        Nothing is changed where an error is raised.
        """
        name = type(self).__name__
        check_type(name, "strict", strict, bool)
        own = self._own_parameters()
        given = self._checked_entries(name, state_dict)
        if self.shares:
            given = self.shares.taken(name, self.state_shares, given)
        elif ENTRY in given:
            refuse_share(name, given, "an optimizer that keeps all states")
        given = self._converted(given)
        if strict:
            missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            if missing:
                raise KeyError(
                    f"For '{name}', 'state_dict' must have the entry {missing[0]!r}, one of {len(missing)} missing."
                )
            if unknown:
                raise KeyError(
                    f"For '{name}', 'state_dict' has the entry {unknown[0]!r}, which is none of the optimizer's."
                )
        for key in own.keys() & given.keys():
            p, value = own[key], given[key]
            if tuple(value.shape) != tuple(p.shape):
                raise ValueError(
                    f"For '{name}', the entry {key!r} must have the shape {p.shape}, but got {value.shape}."
                )
            if value.dtype != p.dtype:
                raise TypeError(f"For '{name}', the entry {key!r} must be of dtype {p.dtype}, but got {value.dtype}.")
        for key in own.keys() & given.keys():
            own[key].set_data(Tensor(given[key].asnumpy(), own[key].dtype))

    def _checked_entries(self, name: str, state_dict: Any) -> dict[str, Tensor]:
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"For '{name}', 'state_dict' must be a dict of Tensors, but got {type(state_dict).__name__}."
            )
        for key, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"For '{name}', the entry {key!r} must be a Tensor, but got {type(value).__name__}.")
        for key in self._amounts() & state_dict.keys():
            check_amounts(name, key, state_dict[key])
        passed_over = {p.name for p in (*self._parameters, self.statistics)}
        return {key: value for key, value in state_dict.items() if key not in passed_over}

    def _amounts(self) -> set[str]:
        """Return the names of counts, learning rates and scales: no other entries must be 0 or greater."""
        scales = {f"{prefix}_scale.{p.name}" for prefix in self.rule.states for p in self._parameters}
        rates = (getattr(rate, "learning_rate", rate) for rate in (*self._rates.fixed, *self._rates.schedules))
        numbers = (self.global_step, self.skipped_steps, *rates)
        return scales | {p.name for p in numbers if isinstance(p, Parameter)}

    def _converted(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries with states in the dtypes in which they are held here."""
        given = dict(given)
        for state in self.states:
            prefix, _, parameter = state.name.partition(".")
            scale = f"{prefix}_scale.{parameter}"
            value = given.get(state.name)
            if value is None or value.dtype == state.dtype or value.shape != state.shape:
                continue
            if value.dtype in CODES and scale in given:
                blocks = (-(-value.size // CODE_BLOCK),)
                if tuple(given[scale].shape) != blocks:
                    raise ValueError(
                        f"For '{self.cls_name}', the entry {scale!r} must have the shape {blocks}, but got "
                        f"{given[scale].shape}."
                    )
                numbers = _codes.decode(value.asnumpy(), given.pop(scale).asnumpy())
            elif value.dtype in FLOATS:
                numbers = ops.cast(value, mstype.float32).asnumpy()
            else:
                continue
            if state.dtype in CODES:
                kind = np.int8 if state.dtype == mstype.int8 else np.uint8
                codes, scales = _codes.encode(numbers, kind)
                given[state.name], given[scale] = Tensor(codes), Tensor(scales)
            else:
                given[state.name] = Tensor(numbers, state.dtype)
        return given

    def _own_parameters(self) -> dict[str, Parameter]:
        weights = {id(p) for p in self._parameters}
        return {p.name: p for _, p in self.parameters_and_names() if id(p) not in weights and p is not self.statistics}
