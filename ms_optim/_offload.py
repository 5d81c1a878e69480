"""The step with states in host memory and weights on an accelerator: what crosses between them, and when.

A float32 weight never crosses: its gradient goes to the host, decayed already, and the update comes back. A weight of
lower precision has its float32 master on the host: its gradient goes there in the dtype that it has, and the new
weight comes back in its own.
"""

# OffloadedStep reads attributes of the optimizer it is mixed into.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import dataclasses

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import functional as F  # noqa: N812 - MindSpore's own name for it
from rich.console import Console
from rich.table import Table

from . import _abi, _kernels, _memory
from ._ascend import OperatorCell, tile_sums, total_of_tiles
from ._composite import first_of, norm, rounded, summed, write
from ._fused import FusedStep, LaunchCell, picked, runs
from ._stacks import Stacks


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """Bytes that an offloaded optimizer needs and moves.

    Attributes:
        device: Device that holds the weights, "CPU", "GPU" or "Ascend".
        device_bytes: Weights and gradients on the device.
        host_bytes: States and masters in host memory; on "CPU" weights and gradients too.
        to_host_bytes: What goes from the device to the host in a step.
        to_device_bytes: What comes back in a step.
    """

    device: str
    device_bytes: int
    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int

    def __str__(self) -> str:
        table = Table("", "MB", title=f"Offloaded from {self.device}")
        for field in dataclasses.fields(self)[1:]:
            what = field.name.removesuffix("_bytes").replace("_", " ")
            table.add_row(
                what + (" a step" if what.startswith("to ") else ""), f"{getattr(self, field.name) / 1e6:,.1f}"
            )
        console = Console(width=60)
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip("\n")


def report(optimizer, device: str) -> OffloadReport:
    """Count an optimizer's bytes on a device.

    Gradients are taken to be of their parameter's dtype.
    """
    low = [p for p, master in zip(optimizer.parameters, optimizer._master_index) if master >= 0]
    full = [p for p, master in zip(optimizer.parameters, optimizer._master_index) if master < 0]
    held = sum(p.nbytes for p in (*optimizer.states, *optimizer.masters, *optimizer.scales))
    on_device, on_host = _memory.placed(device, True, 2 * sum(p.nbytes for p in (*low, *full)), held)
    if device == "CPU":
        return OffloadReport(device, on_device, on_host, 0, 0)
    # Besides, either way, some bytes that do not grow with the weights: rates and the step there, statistics back.
    crossing = sum(p.nbytes for p in low) + sum(4 * p.size for p in full)
    return OffloadReport(device, on_device, on_host, crossing, crossing)


class OffloadedStep(FusedStep):
    """The step of an optimizer whose operator runs on the host; a mixin that reads the optimizer's attributes."""

    masters_taken: Parameter

    def _prepare_launches(self, rule, options, device):
        self._crosses = device != "CPU"
        if not self._crosses:
            super()._prepare_launches(rule, options, device)
            return
        if options.stochastic_rounding:
            raise RuntimeError(f"For '{self.cls_name}', 'stochastic_rounding' needs weights in host memory.")
        if self._sharded:
            raise RuntimeError(f"For '{self.cls_name}', the group key 'shard_group' needs weights in host memory.")
        self._take_master = ops.Assign()
        self._take_master.set_device("CPU")
        self.masters_taken = Parameter(Tensor([0], mstype.int32), name="masters_taken", requires_grad=False)
        with_master = [master >= 0 for master in self._master_index]
        groups = [[i for i in range(self.param_length) if with_master[i] == low] for low in (False, True)]
        self._groups = tuple(tuple(group) for group in groups if group)
        self._group_places = tuple(runs(group) for group in self._groups)
        # Cell would list the weights once more for each group.
        group_weights = tuple(ParameterTuple([self._parameters[i] for i in group]) for group in self._groups)
        object.__setattr__(self, "_group_weights", group_weights)
        self._is_decayed = tuple(tuple(self._decay_index[i] >= 0 for i in group) for group in self._groups)
        self._order = Tensor(np.argsort([i for group in self._groups for i in group]).astype(np.int32))
        self._launch_held = tuple(self._held_by(group) for group in self._groups)
        self._with_masters = tuple(with_master[group[0]] for group in self._groups)
        self._constants = Tensor(_abi.constants(0.0, None, self._seed, rule.constants)[_abi.Constant.CLIP_NORM :])
        self._no_sums = Tensor(np.zeros((1, len(_kernels.SUMS)), np.float64))
        cells = []
        for group, held, low in zip(self._groups, self._launch_held, self._with_masters):
            n = len(group)
            # What a float32 weight is decayed and centralized by, it is on the device.
            decays = [self._decay_index[i] if low else -1 for i in group]
            centralized = [low and self._centralized[i] for i in group]
            layout = _abi.layout([self._rate_index[i] for i in group], decays, centralized)
            shared = _kernels.RETURNED + rule.shared_flags + _kernels.SKIP_NONFINITE * options.skip_nonfinite
            shared += _kernels.MASTERS * low + _kernels.CENTRALIZES * any(centralized)
            outputs = [((n, len(_kernels.SUMS)), ms.float64), ((n, len(_kernels.STATISTICS)), ms.float32)]
            # To a graph, an output of no dimensions is a number and no tensor.
            outputs += [(self._shapes[i] or (1,), self._parameters[i].dtype if low else ms.float32) for i in group]
            written = _abi.written(counters=2, gradients=n, held=len(held), returned=True)
            kernel = _kernels.operator(rule.name, "CPU", written, outputs)
            flags = _kernels.flags(_kernels.ALL_STAGES - _kernels.COMMIT_STAGE, shared, rule.flags)
            counters, tensors = (self.global_step, self.skipped_steps), self.states + self.masters + self.scales
            held = [tensors[i] for i in held]
            cells.append(LaunchCell(kernel, flags, Tensor(layout), counters, held=held))
        self._launches = nn.CellList(cells)
        self._each_alone = Stacks([[i] for i in range(self.param_length)])
        self._adds_at_once = device == "Ascend" and _kernels.why_not("delta", device) is None
        if self._adds_at_once:
            kernel = _kernels.ascend_operator("MsOptimDelta", (True, False), tile_sums(1, place=0))
            self._add_delta = OperatorCell(kernel, total_of_tiles())

    def _fused_step(self, rates, gradients):
        if self._crosses:
            return self._crossing_step(rates, gradients)
        return self._launch_all(self._launches, self._phases, rates, gradients)

    def _crossing_step(self, rates, gradients):
        stacks, norms, finite, applied, clip = self._surveyed(self._each_alone, gradients, self._centralized)
        prepared = self.each(first_of, stacks)
        if self.masters_taken[0] == 0:
            self._take_masters()
        _, decay = self._rates_of_each(rates)
        weight_norms = ()
        update_norms = ()
        for k in range(len(self._groups)):
            places, weights, low = self._group_places[k], self._group_weights[k], self._with_masters[k]
            here = self._zero
            if low:
                sent = picked(gradients, places)
                scale = F.cast(clip * self._unscale, mstype.float64)
            else:
                if not self._adds_at_once:
                    here = ops.stack(self.each(self._norm_of_weight, weights))
                decays, own = picked(decay, places), picked(prepared, places)
                sent = self.each(F.partial(self._decayed, clip), self._is_decayed[k], decays, weights, own)
                scale = F.cast(1.0, mstype.float64)
            # What is not applied here is skipped there.
            scale = ops.where(applied, scale, F.cast(float("nan"), mstype.float64)).reshape((1,))
            returned = self._launches[k](ops.concat((scale, self._constants)), rates, self._no_sums, sent)
            update_norms += (returned[1][:, 2],)
            if self._adds_at_once and not low:
                here = ops.stack(self.each(self._add_delta_to, weights, returned[2:]))
            else:
                self.each(_receive_weight if low else _receive_update, weights, returned[2:])
            weight_norms += (returned[1][:, 1] if low else here,)
        weight_norms = ops.gather(ops.concat(weight_norms), self._order, 0)
        update_norms = ops.gather(ops.concat(update_norms), self._order, 0)
        ratios = F.cast(applied, mstype.float32) * ops.ones_like(update_norms)
        all_finite = F.cast(ops.concat(finite), mstype.float32)
        columns = (ops.concat(norms), weight_norms, update_norms, ratios, all_finite)
        self._count(applied, ops.stack(columns, 1))
        return applied

    def _take_masters(self):
        """Take the masters when weights that are loaded after construction are there, and once only.

        A master that was loaded with its weight is kept: it rounds to it.
        """
        self.each(self._take_master_of, self.parameters, *self._master_columns)
        F.assign(self.masters_taken, ops.ones_like(self.masters_taken))

    def _take_master_of(self, parameter, master, has_master):
        if has_master:
            weight = F.cast(parameter, mstype.float32)
            fits = rounded(master, parameter.dtype) == weight
            self._take_master(master, ops.where(fits, master, weight))
        return 0

    def _decayed(self, clip, is_decayed, decay, parameter, gradient):
        gradient = gradient * clip
        if not is_decayed:
            return gradient
        return self.decayed(gradient, F.cast(parameter, mstype.float32), decay)

    def _norm_of_weight(self, parameter):
        return norm(F.cast(parameter, mstype.float32), self._step_dtype)

    def _add_delta_to(self, parameter, update):
        return self._add_delta(parameter, update)[0]


def _shaped(parameter, update):
    """Return what comes from the host in the shape of its weight."""
    return F.cast(update, mstype.float32).reshape(()) if len(F.shape(parameter)) == 0 else update


def _receive_weight(parameter, weight):
    write(parameter, _shaped(parameter, weight))
    return 0


def _receive_update(parameter, update):
    write(parameter, summed(F.cast(parameter, mstype.float32), _shaped(parameter, update)))
    return 0
