"""State dicts: saving and loading what an optimizer keeps from step to step."""

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


def write(parameter: Parameter, value: np.ndarray) -> None:
    """Write numbers of a Parameter's own dtype and shape into the memory that it has.

    ``Parameter.set_data`` would give it other memory, while a compiled graph goes on with the old one.
    """
    if parameter.has_init:
        parameter.init_data()
    held = parameter.asnumpy()
    if held.ctypes.data == parameter.data_ptr():
        np.copyto(held, value, casting="no")
    else:
        # What was read is a copy: the parameter is on a device, or its memory is not contiguous.
        ops.assign(parameter, Tensor(value, parameter.dtype))


def unwrapped(entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries without the prefix that an outer Cell gave to the optimizer's names, as in `opt.global_step`.

    Names without the prefix belong to other parts of a network and stay as they are.
    """
    steps = [name for name in entries if name.rpartition(".")[2] == "global_step"]
    if len(steps) != 1:
        return entries
    prefix = steps[0].removesuffix("global_step")
    return {name.removeprefix(prefix): value for name, value in entries.items()}


class StateDict:
    """Saving and loading of an optimizer's own parameters; a mixin that reads the optimizer's attributes."""

    def current_step_lr(self) -> float | tuple[float, ...]:
        """Return the learning rate of the next step.

        Returns:
            A float; where groups have learning rates of their own, a tuple with one for each parameter.
        """
        rates = self._rates_at(self.global_step)
        if self.is_group_lr:
            return tuple(rates[place] for place in self._layout.rate_places)
        return rates[self._layout.rate_places[0]]

    def _rates_at(self, step: Tensor) -> list[float]:
        """Return the distinct learning rates and weight decays of a step, counted from 0."""
        return self._rates.construct(step).asnumpy().tolist()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return a copy of the weights and of all that the optimizer keeps from step to step, by name.

        An outer Cell renames the optimizer's parameters; here they have their names from construction. Sharded states
        are this worker's share: see :func:`ms_optim.merge_states`.

        MindSpore's ``save_checkpoint(optimizer, path)`` writes the same without a copy. So does :func:`ms_optim.save`,
        which adds checksums and leaves the old file if the process is killed meanwhile.

        Args:
            args: Arguments of ``nn.Cell.state_dict``, which an outer Cell passes; its result is then returned.
            kwargs: Likewise.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return {name: Tensor(p.asnumpy(), p.dtype) for name, p in self._named_parameters().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Load the states of another optimizer and go on from its step.

        The numbers are written into the memory that the states have, so that compiled graphs see them, too.

        Args:
            state_dict: Tensors or Parameters by name, as :meth:`state_dict` returns them or ``load_checkpoint`` reads
                them, with or without the prefix of an outer Cell. Weights and statistics among them are ignored.
                States of another `state_dtype` are converted, to fewer bits by rounding to nearest.
            strict: Whether missing and unknown names are an error; if not, they are ignored. 8-bit codes and their
                scales are then taken together or not at all. Default: ``True`` .

        Raises:
            TypeError: If `state_dict` is not a dict of Tensors, or an entry has another dtype.
            KeyError: If `strict` and an entry is missing or unknown.
            ValueError: If an entry has another shape; if a count, a learning rate or a scale is less than 0 or not
                finite; or if the states are a share among other workers: :func:`ms_optim.merge_states` merges all
                shares into a full state dict, of which each worker takes its own share.

        Nothing is changed where an error is raised.
        """
        for parameter, value in self._fitting(state_dict, strict):
            write(parameter, value)

    def _fitting(self, state_dict: dict[str, Tensor], strict: bool) -> list[tuple[Parameter, np.ndarray]]:
        """Check a whole state dict, and return the parameters to write with their values."""
        name = type(self).__name__
        check_type(name, "strict", strict, bool)
        own = self._own_parameters()
        given = self._checked_entries(name, state_dict)
        if self.shares:
            given = self.shares.taken(name, self.state_shares, given)
        elif ENTRY in given:
            refuse_share(name, given, "an optimizer that keeps all states")
        given = self._converted(own, given)
        if strict:
            missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            if missing:
                raise KeyError(
                    f"For '{name}', 'state_dict' must have the entry {missing[0]!r}, one of {len(missing)} missing."
                )
            if unknown:
                raise KeyError(
                    f"For '{name}', 'state_dict' has the entry {unknown[0]!r}, which the optimizer does not have."
                )
        for key in own.keys() & given.keys():
            p, value = own[key], given[key]
            if tuple(value.shape) != tuple(p.shape):
                raise ValueError(
                    f"For '{name}', the entry {key!r} must have the shape {p.shape}, but got {value.shape}."
                )
            if value.dtype != p.dtype:
                raise TypeError(f"For '{name}', the entry {key!r} must be of dtype {p.dtype}, but got {value.dtype}.")
        return [(own[key], given[key].asnumpy()) for key in own.keys() & given.keys()]

    def _checked_entries(self, name: str, state_dict: Any) -> dict[str, Tensor]:
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"For '{name}', 'state_dict' must be a dict of Tensors, but got {type(state_dict).__name__}."
            )
        for key, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"For '{name}', the entry {key!r} must be a Tensor, but got {type(value).__name__}.")
        ignored = {*self._layout.names, "statistics"}
        # Names that an outer Cell gave to the parameters of schedules.
        first = {place: name for place, name in self._first_names.items() if place != name}
        entries = {first.get(key, key): value for key, value in unwrapped(state_dict).items()}
        for key in self._amounts() & entries.keys():
            check_amounts(name, key, entries[key])
        return {key: value for key, value in entries.items() if key not in ignored}

    def _amounts(self) -> set[str]:
        """Return the names of counts, learning rates and scales, the entries that must be 0 or greater."""
        scales = {f"{prefix}_scale.{name}" for prefix in self.rule.states for name in self._layout.names}
        rates = (getattr(rate, "learning_rate", rate) for rate in (*self._rates.fixed, *self._rates.schedules))
        numbers = {id(p) for p in (self.global_step, self.skipped_steps, *rates)}
        return scales | {name for name, p in self._own_parameters().items() if id(p) in numbers}

    def _converted(self, own: dict[str, Parameter], given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries with states in this optimizer's dtypes, and codes only with their scales."""
        given, held = dict(given), {id(state) for state in self.states}
        for name, state in own.items():
            if id(state) not in held:
                continue
            prefix, _, parameter = name.partition(".")
            scale = f"{prefix}_scale.{parameter}"
            value = given.get(name)
            if value is None or value.dtype == state.dtype or value.shape != state.shape:
                if state.dtype in CODES and (name in given) != (scale in given):
                    given.pop(name, None)
                    given.pop(scale, None)
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
                given[name], given[scale] = Tensor(codes), Tensor(scales)
            else:
                given[name] = Tensor(numbers, state.dtype)
        return given

    def _note_names(self) -> None:
        """Note the names from construction by their paths in the optimizer, as an outer Cell changes the names."""
        self._first_names = {place: p.name for place, p in self.parameters_and_names()}

    def _named_parameters(self) -> dict[str, Parameter]:
        """Return the weights and the optimizer's own parameters by their names from construction, without statistics.

        A parameter that a subclass makes later has its path in the optimizer as its name.
        """
        placed = self.parameters_and_names()
        return {self._first_names.get(place, place): p for place, p in placed if p is not self.statistics}

    def _own_parameters(self) -> dict[str, Parameter]:
        weights = {id(p) for p in self._parameters}
        return {name: p for name, p in self._named_parameters().items() if id(p) not in weights}
