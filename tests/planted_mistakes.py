"""Mistakes that are planted in the package one at a time, to show that tests notice them.

``python tests/planted_mistakes.py`` plants each in a copy of the tree and runs the tests that must fail there; numbers
of rows after it choose some. A mistake counts as caught only if a test fails that passes without it: one that stops the
tests at their import, or hangs, proves nothing. The whole list takes minutes, so it is no test of the suite;
test_planted_mistakes.py keeps it up to date.
"""

import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from builds import linked, setup_script
from sources import ROOT

LIBRARY = ROOT / "ms_optim" / "libms_optim_cpu.so"
LONGEST = 600  # seconds that tests get


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        file: The file in ms_optim/, or in ops/ if its name begins so.
        right: What stands there, exactly once.
        wrong: What is planted in its place.
        tests: The file of tests that must notice it, and options of pytest that choose some of them.
    """

    file: str
    right: str
    wrong: str
    tests: str

    @property
    def is_native(self) -> bool:
        """Whether the library must be built to plant it."""
        return self.file.startswith("ops/")

    @property
    def path(self) -> str:
        """The file, from the root of the tree."""
        return self.file if self.is_native else f"ms_optim/{self.file}"


MISTAKES = (
    # ---- Formats of groups
    Mistake(
        "states/inventory.py",
        "state_dtype(options_of[i].state_dtype, kind",
        "state_dtype(options_of[0].state_dtype, kind",
        "test_group_formats.py -k 'formats and graph and AdamW'",
    ),
    Mistake(
        "states/inventory.py",
        "master_dtype(options_of[i], dtypes[i])",
        "master_dtype(options_of[0], dtypes[i])",
        "test_group_formats.py -k 'formats and graph and AdamW'",
    ),
    Mistake(
        "states/formats.py",
        """self.is_last or dtype == self.signed or dtype == self.unsigned:
            return self.conversion.encode""",
        """self.is_last or dtype == self.signed:
            return self.conversion.encode""",
        "test_group_formats.py -k 'operators and Lamb'",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "layout.dtypes, layout.options, has_master",
        "layout.dtypes, has_master",
        "test_group_formats.py -k 'operators and Lamb'",
    ),
    Mistake(
        "arguments/options.py",
        "own = dataclasses.replace(options, **formats)",
        "own = dataclasses.replace(Options(), **formats)",
        "test_group_formats.py -k 'formats and graph and AdamW'",
    ),
    Mistake(
        "paths/choice.py",
        "for options in dict.fromkeys(parts.layout.options)]",
        "for options in [parts.options]]",
        "test_group_formats.py -k path",
    ),
    # ---- Gradient accumulation
    Mistake(
        "training/accumulation.py",
        "self._part = 1.0 / steps",
        "self._part = 1.0",
        "test_accumulation.py -k of_the_mean",
    ),
    Mistake(
        "training/accumulation.py",
        "ops.where(begins, ops.zeros_like(before), before)",
        "before * F.cast(ops.logical_not(begins), mstype.float32)",
        "test_accumulation.py -k not_finite",
    ),
    Mistake(
        "training/accumulation.py",
        "self._counted() != counted and steps_taken(self.optimizer) == taken",
        "self._counted() != counted",
        "test_accumulation.py -k interrupt",
    ),
    Mistake(
        "training/accumulation.py",
        "self._check_between, swap.check_between = swap.check_between, self._complete_for",
        "self._check_between = swap.check_between",
        "test_accumulation.py -k interrupt",
    ),
    Mistake(
        "training/accumulation.py",
        "if done == 0:",
        "if done == 1:",
        "test_accumulation.py -k of_the_mean",
    ),
    Mistake(
        "training/accumulation.py",
        "(*self.accumulated, self.accumulated_count)",
        "(self.accumulated_count,)",
        "test_accumulation.py -k goes_on",
    ),
    # ---- Adam and Momentum
    Mistake(
        "ops/include/adam.h",
        "constants[2] * ((flags & kCorrectsEps) != 0 ? root_correction2 : 1.0)",
        "constants[2]",
        'test_conformance.py -k "aot and Adam-algorithm_1"',
    ),
    Mistake(
        "ops/include/adam.h",
        "s[kStates - 1] > s[1] ? s[kStates - 1] : s[1]",
        "s[1]",
        'test_conformance.py -k "aot and Adam-amsgrad"',
    ),
    Mistake(
        "ops/include/adam.h",
        "moments.one_minus_beta1 : 0.0f",
        "1.0f : 0.0f",
        'test_conformance.py -k "aot and Adam-amsgrad"',
    ),
    Mistake(
        "ops/include/adam.h",
        "return g + lambda * w;",
        "return g;",
        'test_conformance.py -k "aot and Adam-amsgrad"',
    ),
    Mistake(
        "ops/include/adam.h",
        "rate_correction(root_correction2 /",
        "rate_correction(1.0 /",
        'test_conformance.py -k "aot and Adam-amsgrad"',
    ),
    Mistake(
        "ops/include/momentum.h",
        "t == 1 ?",
        "t == 0 ?",
        'test_conformance.py -k "aot and Momentum-dampening"',
    ),
    Mistake(
        "ops/include/momentum.h",
        "1.0 - constants[1]",
        "1.0",
        'test_conformance.py -k "aot and Momentum-dampening"',
    ),
    Mistake(
        "ops/include/momentum.h",
        "momentum : 1.0f",
        "1.0f : 1.0f",
        'test_conformance.py -k "aot and Momentum-nesterov"',
    ),
    Mistake(
        "ops/include/momentum.h",
        "return g + lambda * w;",
        "return g;",
        'test_conformance.py -k "aot and Momentum-nesterov"',
    ),
    Mistake(
        "ops/include/momentum.h",
        "momentum * s[0] + entering",
        "s[0] + entering",
        'test_conformance.py -k "aot and Momentum-nesterov"',
    ),
    Mistake(
        "optimizers/adam_family.py",
        "root2 if self.corrects_eps else F.ones_like(root2)",
        "F.ones_like(root2)",
        'test_conformance.py -k "composite and Adam-algorithm_1"',
    ),
    Mistake(
        "optimizers/adam_family.py",
        "v = ops.maximum(normal(states[2]), v)",
        "v = normal(states[2])",
        'test_conformance.py -k "composite and Adam-amsgrad"',
    ),
    Mistake(
        "optimizers/momentum.py",
        "self._one_minus_dampening + self.dampening * first",
        "self._one_minus_dampening * (1 + first)",
        'test_conformance.py -k "composite and Momentum-dampening"',
    ),
    Mistake(
        "optimizers/momentum.py",
        "summed(g, self.momentum * v) if",
        "summed(v, self.momentum * v) if",
        'test_conformance.py -k "composite and Momentum-nesterov"',
    ),
    Mistake(
        "optimizers/momentum.py",
        "momentum == 0 or dampening != 0",
        "momentum == 0",
        "test_arguments.py -k adam_and_momentum",
    ),
    # ---- Slices in checkpoints
    Mistake(
        "checkpoints/slices.py",
        "next((k for k, place in enumerate(told) if place == [i, count]), -1)",
        "i",
        "test_checkpoints.py -k slices_are_cut",
    ),
    Mistake(
        "checkpoints/slices.py", "2 if len(self.saved[0]) == 3 else 1", "1", "test_checkpoints.py -k slices_are_cut"
    ),
    Mistake("checkpoints/slices.py", "axes[0] if axes else 0", "0", "test_checkpoints.py -k slices_are_cut"),
    Mistake(
        "checkpoints/slices.py",
        "for shape in self.own.shapes[: self.own.own]",
        "for shape in self.saved[: self.own.own]",
        "test_checkpoints.py -k slices_are_cut",
    ),
    Mistake(
        "checkpoints/slices.py",
        "part.entries[n].checksum if n in part.entries",
        "part.entries[n].dtype if n in part.entries",
        "test_checkpoints.py -k frozen_weight",
    ),
    Mistake("checkpoints/slices.py", "scale in each\n", "False\n", "test_sharding.py -k codes_of_slices"),
    Mistake(
        "checkpoints/content.py",
        "if other.slices == part.slices]",
        "if other.origin]",
        "test_sharding.py -k another_number_of_processes",
    ),
    Mistake("paths/parts.py", "(rates.described(), layout.rate_places)", "layout.rate_places", "test_sharding.py -k 2"),
    # ---- Owners of matrices
    Mistake(
        "rules/owners.py",
        "vector = ops.concat((vector, ops.zeros((most - own,), F.dtype(vector))))",
        "vector = ops.concat((ops.zeros((most - own,), F.dtype(vector)), vector))",
        "test_owners.py -k whole_matrices",
    ),
    Mistake("rules/owners.py", "np.argsort(order)", "order", "test_owners.py -k whole_matrices"),
    Mistake("rules/owners.py", 'bfloat16, device == "Ascend"', "bfloat16, True", "test_owners.py -k whole_matrices"),
    Mistake(
        "rules/owners.py",
        "sent = self.sent(ops.concat(parts) if len(parts) > 0 else ops.zeros((1,), mstype.float32))",
        "sent = ops.concat(parts) if len(parts) > 0 else ops.zeros((1,), mstype.float32)",
        "test_owners.py -k whole_matrices",
    ),
    Mistake(
        "rules/owners.py",
        "begin = sum(counts[sender][:receiver])",
        "begin = sum(counts[receiver][:sender])",
        "test_owners.py -k whole_matrices",
    ),
    Mistake(
        "rules/owners.py",
        "ops.narrow(matrices, self.axis, begin, self.lengths[process])",
        "ops.narrow(matrices, self.axis, 0, self.lengths[process])",
        "test_owners.py -k whole_matrices",
    ),
    Mistake(
        "rules/owners.py",
        "slicing.axis if slicing.batch > 1 else slicing.axis + 1",
        "slicing.axis + 1",
        "test_owners.py -k whole_matrices",
    ),
    Mistake(
        "rules/owners.py",
        "loads[taken[firsts[kind]]] += work[kind]",
        "loads[taken[firsts[kind]]] -= work[kind]",
        "test_owners.py -k what_is_left",
    ),
    Mistake(
        "optimizers/muon.py",
        "orthogonalize = Orthogonalize(*self._multiplies, device, self._dtype)",
        "orthogonalize = Orthogonalize(*self._multiplies, device, self._dtype)\n"
        "        scales = [s / math.sqrt(1 + form.is_dealt) for s in scales]",
        "test_sharding.py -k 'trajectory and 2'",
    ),
    Mistake(
        "ops/cpu/stack_engine.h",
        "stack.averages + i * stack.rows",
        "stack.averages",
        "test_owners.py -k kernel",
    ),
    Mistake(
        "ops/cpu/stack_engine.h",
        "entry[kRun] * entry[kRuns], entry[kColumns])",
        "stack.rows, entry[kColumns])",
        "test_owners.py -k kernel",
    ),
    Mistake(
        "ops/cpu/stack_engine.h",
        "sums[static_cast<size_t>(i * step.matrix_count + k)]",
        "sums[static_cast<size_t>(k * stack.count + i)]",
        "test_owners.py -k kernel",
    ),
    # ---- Replicas of slices, and processes with other arguments
    Mistake(
        "states/shares.py",
        "places == places[own]",
        "(table == table[own]).all(1)",
        "test_sharding.py -k 'trajectory and 4'",
    ),
    Mistake(
        "paths/operators/gathered_weights.py",
        "tells & parts.slices.is_first",
        "tells",
        "test_sharding.py -k 'trajectory and 4'",
    ),
    Mistake(
        "states/shares.py",
        "cut_sizes = sizes if common is None else common",
        "cut_sizes = sizes",
        "test_shares.py -k dealt_alike",
    ),
    Mistake(
        "paths/operators/slices.py",
        "(table != table[0]).any(0)",
        "(table != table).any(0)",
        "test_sharding.py -k 'trajectory and 2'",
    ),
    Mistake(
        "dtensors/local_shards.py",
        "if is_shard(placement) and placement.dim > 0:",
        "if is_shard(placement) and placement.dim > 1:",
        "test_local_shards.py",
    ),
    # ---- Bounds of temporary memory
    Mistake(
        "ops/cpu/matrices.h",
        "if (static_cast<double>(bytes) > rule_.batch_bytes) break;",
        "if (static_cast<double>(bytes) > 16 * rule_.batch_bytes) break;",
        "test_matrices.py -k stays_within",
    ),
    # ---- Sinkhorn
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "    if (waiting > 0) divide();\n",
        "",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "        after[waiting] = &last[k].factors[row];\n",
        "        after[waiting] = &last[k].factors[0];\n",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "last.elements + offset, f.rounded + column,",
        "last.elements + offset, f.rounded,",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "rule.MomentumOf(elements[i], of_gradient * g[i])",
        "rule.MomentumOf(elements[i], g[i])",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "sums.lane[kDirectionSum][lane] += d[0] * d[0];",
        "sums.lane[kDirectionSum][lane] += update * update;",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "    lanes[k][lane] += g * g;\n",
        "    lanes[k][lane] += state * state;\n",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "from.template Put<kLast>(j, e3);",
        "from.template Put<kLast>(j, e2);",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "      from.template Put<0>(j, e0);\n",
        "      from.template Put<0>(j, e1);\n",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "if (kRestores) elements[i] = momentum;",
        "if (kRestores && !kIsZero) elements[i] = momentum;",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "      for (float &lane : lanes[k]) lane = 0.0f;\n",
        "",
        "gpu/test_sinkhorn_passes.py",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "    if (t.gradient_type == DType::kFloat32 && task.row == 0) {\n",
        "    if (t.gradient_type == DType::kFloat32) {\n",
        "test_conformance.py -k 'Sinkhorn and grouped'",
    ),
    Mistake(
        "ops/cuda/sinkhorn_engine.cuh",
        "first == 0 ? band.TilesUpTo(begin) :",
        "first == 0 ? band.TilesFrom(begin) :",
        "gpu/test_sinkhorn_passes.py",
    ),
    Mistake(
        "ops/cuda/sinkhorn_engine.cuh",
        "end = order.Begin(place + 1), last = band.TilesUpTo(end);",
        "end = order.Begin(place + 1), last = band.TilesFrom(end);",
        "gpu/test_sinkhorn_passes.py",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "    if (count_ > 0) Take();\n    AddDecided();\n",
        "    if (count_ > 0) Take();\n",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "  void Keep(float *memory) {\n    AddDecided();\n",
        "  void Keep(float *memory) {\n",
        "test_sinkhorn.py -k stored",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "      if (kAdds) own.AddTo(sums, begin + i);\n",
        "",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/include/sinkhorn.h",
        "return norm <= tau * mean ?",
        "return tau * norm <= mean ?",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "const double mean = total / static_cast<double>(f.rows);",
        "const double mean = total / static_cast<double>(f.rows - std::count(f.of_rows, f.of_rows + f.rows, 0.0));",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/include/sinkhorn.h",
        "scale * sqrt(static_cast<double>(columns)) * factor",
        "scale * factor",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "ops/include/sinkhorn.h",
        "pairs(static_cast<int>(flags)),",
        "pairs(static_cast<int>(flags) - 1),",
        "test_sinkhorn.py -k 'zipf and aot'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "self.of_whole(self.squares(x, 1)))",
        "self.of_whole(self.squares(x, 2)))",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "        return self.divided(x, self.squares(x, 2))\n",
        "        return self.divided(x, self.squares(x, 1))\n",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "for _ in range(self.pairs)",
        "for _ in range(self.pairs - 1)",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "expanded(norms <= self.tau * mean,",
        "expanded(self.tau * norms <= mean,",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "mean = self.of_whole(ops.sum(norms, 1, True))",
        "mean = self.of_whole(ops.sum(norms * (norms > 0.1), 1, True))",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "self.rows = sum(slicing.lengths)",
        "self.rows = slicing.lengths[slicing.own]",
        "test_sinkhorn.py -k slices_of_rows",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "ops.sqrt(squares) + self.eps",
        "ops.sqrt(squares + self.eps)",
        "test_conformance.py -k 'Sinkhorn and composite and numbers'",
    ),
    Mistake(
        "rules/row_column_balance.py",
        "/ (self.rows if self.is_sliced else F.shape(matrices)[1])",
        "/ F.shape(matrices)[2]",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "optimizers/sinkhorn.py",
        "math.sqrt(F.shape(u)[-1])",
        "math.sqrt(F.shape(u)[-2])",
        "test_sinkhorn.py -k 'zipf and composite'",
    ),
    Mistake(
        "optimizers/sinkhorn.py",
        "        if normalizations % 2 == 0:\n",
        "        if normalizations % 2 == 2:\n",
        "test_sinkhorn.py -k refuses",
    ),
    Mistake(
        "paths/operators/composite.py",
        "known = self.stacks.decoded(stored, weights, states)",
        "known = self.statement.matrix_states(gradients, known)",
        "test_sinkhorn.py -k stored",
    ),
    # ---- Stages of a step
    Mistake(
        "arguments/options.py",
        '        flag="SKIP_NONFINITE",\n        reads_all=True,\n',
        '        flag="SKIP_NONFINITE",\n',
        "test_launches.py -k skipped",
    ),
    Mistake(
        "arguments/options.py",
        '"AVERAGE_WARMUP": float(options.average_warmup)',
        '"AVERAGE_WARMUP": float(options.average_decay is not None)',
        "test_conformance.py -k 'average and aot and pynative'",
    ),
    Mistake(
        "arguments/options.py",
        "if self.stochastic_rounding and self.master_weights:",
        "if self.stochastic_rounding and self.master_weights is True:",
        "test_low_precision.py -k wants_no_masters",
    ),
    # ---- Checks of arguments
    Mistake(
        "arguments/checks.py",
        "if np.float32(value) == 1.0:",
        "if value == 1.0:",
        "test_arguments.py -k less_than_1",
    ),
    Mistake(
        "arguments/params.py",
        "if len(orders) > 1:",
        "if len(orders) > 2:",
        "test_arguments.py -k test_groups",
    ),
    Mistake(
        "arguments/rates.py",
        "step >= fewest_steps:",
        "step > fewest_steps:",
        "test_arguments.py -k past_the_last",
    ),
    # ---- The choice of a path
    Mistake(
        "kernels/capabilities.py",
        '"master_weights": options.master_weights in SPLIT_MASTERS',
        '"master_weights": options.master_weights is not True',
        "test_averaged.py -k 'without_masters and composite'",
    ),
    Mistake(
        "kernels/capabilities.py",
        'path = "host" if copies_weights(optimizer, features) else "offload"',
        'path = "offload"',
        "test_host.py -k copies",
    ),
    Mistake(
        "paths/choice.py",
        "        check_composite(parts, reason)\n    else:",
        '        check_composite(parts, reason) if wanted == "akg" else None\n    else:',
        "test_host.py -k cannot_be_offloaded",
    ),
    # ---- Formats of states
    Mistake(
        "states/formats.py",
        'kind in ("exact", ROWS) or size < row.least',
        'kind in ("exact", ROWS) or size <= row.least',
        "test_low_precision.py -k smallest_tensor",
    ),
    Mistake(
        "states/storage.py",
        "np.where(stored_as(master.asnumpy(), p.dtype) == weights, master.asnumpy().reshape(-1), weights)",
        "master.asnumpy().reshape(-1)",
        "test_averaged.py -k weight_that_is_set",
    ),
    Mistake(
        "states/shares.py",
        "grains = [math.lcm(GRAIN, row) for row in rows]",
        "grains = [max(GRAIN, row) for row in rows]",
        "test_shares.py -k between_rows",
    ),
    Mistake(
        "states/layout.py",
        "asked and len(p.shape) > 1",
        "asked and len(p.shape) > 0",
        "test_step.py -k 'not_centralized and composite'",
    ),
    # ---- Update rules
    Mistake(
        "optimizers/lamb.py",
        "ops.where(weight_decay == 0, ops.ones_like(ratio), ratio)",
        "ops.where(weight_decay > 0, ops.ones_like(ratio), ratio)",
        "test_conformance.py -k 'Lamb and composite and variant'",
    ),
    Mistake(
        "optimizers/schedule_free_adamw.py",
        "largest = ops.maximum(before[:, 0], rate)",
        "largest = rate",
        "test_conformance.py -k 'ScheduleFree and composite and pynative'",
    ),
    Mistake(
        "optimizers/muon.py",
        "u = summed(gradient, self.momentum * m) if self.nesterov else m",
        "u = summed(gradient, self.momentum * states[0]) if self.nesterov else m",
        "test_conformance.py -k 'Muon and composite and pynative'",
    ),
    Mistake(
        "rules/rule.py",
        "ops.logical_and(direction > 0, weight < 0), ops.logical_and(direction < 0, weight > 0)",
        "ops.logical_and(direction > 0, weight > 0), ops.logical_and(direction < 0, weight < 0)",
        "test_conformance.py -k 'cautious and composite'",
    ),
    # ---- Formats in MindSpore's operators
    Mistake(
        "states/formats.py",
        "scales > 1e-37, top / scales",
        "scales > 1e-30, top / scales",
        "test_formats_in_operators.py -k 'codes_are and pynative'",
    ),
    Mistake(
        "states/formats.py",
        "codes = ops.maximum(codes, F.cast(numbers > 0.0, mstype.int32))",
        "codes = ops.maximum(codes, F.cast(numbers > 1e-30, mstype.int32))",
        "test_formats_in_operators.py -k 'codes_are and pynative'",
    ),
    Mistake(
        "states/formats.py",
        "self.octaves[is_signed] - 1.0)",
        "self.octaves[is_signed])",
        "test_formats_in_operators.py -k 'codes_are and pynative'",
    ),
    Mistake(
        "states/formats.py",
        "return bits.signed_16(words) if is_signed else words",
        "return words",
        "test_formats_in_operators.py -k 'both_paths and 4bit and pynative'",
    ),
    Mistake(
        "states/formats.py",
        "units = (scales / self.largest[is_signed])",
        "units = (scales / self.largest[0])",
        "test_formats_in_operators.py -k 'codes_are and pynative'",
    ),
    Mistake(
        "states/formats.py",
        'scales = ops.where(has_nan, float("nan"), scales)',
        "scales = ops.where(has_nan, ops.zeros_like(scales), scales)",
        "test_formats_in_operators.py -k 'not_hidden'",
    ),
    Mistake(
        "states/formats.py",
        "return bits.noise_of_16_bits(noise, use)",
        "return bits.noise_of_16_bits(noise, 0)",
        "test_formats_in_operators.py -k 'both_paths and bfloat16'",
    ),
    Mistake(
        "states/bits.py",
        "F.cast(exponent + 1.0, mstype.int32), 23)",
        "F.cast(exponent, mstype.int32), 23)",
        "test_formats_in_operators.py -k 'bits_are and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "F.cast(is_large, mstype.float32) * 128.0",
        "F.cast(is_large, mstype.float32) * 127.0",
        "test_formats_in_operators.py -k 'bits_are and pynative'",
    ),
    Mistake(
        "states/formats.py",
        "codes - (1 << self.bits), codes)",
        "codes - (1 << self.bits - 1), codes)",
        "test_formats_in_operators.py -k 'codes_are and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "from_bits(truncated(added(bits_of(x), noise), 16)), x)",
        "from_bits(truncated(added(bits_of(x), noise), 15)), x)",
        "test_formats_in_operators.py -k 'rounding_to_bfloat16 and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "ops.where(ops.isfinite(x), from_bits(truncated(added(bits_of(x), noise), 16)), x)",
        "from_bits(truncated(bits_of(x) + noise + 1, 16))",
        "test_formats_in_operators.py -k 'rounding_to_bfloat16 and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "    return shifted(noise if use == SECOND_STATE else product(noise, _FACTORS[use]), 16)",
        "    return shifted(noise if use == SECOND_STATE else product(noise, _FACTORS[THIRD_STATE]), 16)",
        "test_formats_in_operators.py -k 'both_paths and rounded'",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "words = selected(applied, words.reshape(F.shape(before)), before)",
        "words = words.reshape(F.shape(before))",
        "test_formats_in_operators.py -k 'skipped_step'",
    ),
    Mistake(
        "states/bits.py",
        "noise, magnitude = ops.bitwise_right_shift(noise, 3), ops.abs(x)",
        "noise, magnitude = ops.bitwise_right_shift(noise, 2), ops.abs(x)",
        "test_formats_in_operators.py -k 'rounding_to_float16 and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "is_small = magnitude < 2.0**-14",
        "is_small = magnitude < 2.0**-15",
        "test_formats_in_operators.py -k 'rounding_to_float16 and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "key = _hash(_hash(step + self.key) + rows).reshape((-1, 1))",
        "key = _hash(_hash(step + self.key + 1) + rows).reshape((-1, 1))",
        "test_formats_in_operators.py -k 'noise_is and pynative'",
    ),
    Mistake(
        "states/bits.py",
        "self.groups[begin // GROUP : -(-end // GROUP)]",
        "self.groups[: -(-(end - begin) // GROUP)]",
        "test_formats_in_operators.py -k 'noise_is and pynative'",
    ),
    Mistake(
        "states/split_masters.py",
        "ops.bitwise_and(whole, 0x8000)), 16)",
        "ops.bitwise_and(whole, 0x7FFF)), 16)",
        "test_formats_in_operators.py -k 'masters_are and pynative'",
    ),
    Mistake(
        "states/split_masters.py",
        "ops.bitwise_and(noise, 0xFF)), 8)",
        "ops.bitwise_and(noise, 0x7F)), 8)",
        "test_formats_in_operators.py -k 'masters_are and pynative'",
    ),
    Mistake(
        "states/split_masters.py",
        "below = ops.bitwise_left_shift(remainders, 8) if is_8_bit else remainders",
        "below = ops.bitwise_left_shift(remainders, 7) if is_8_bit else remainders",
        "test_formats_in_operators.py -k 'masters_are and pynative'",
    ),
    Mistake(
        "states/split_masters.py",
        "is_lost = ops.where(below < 0, magnitude == 0, magnitude >= bits.INFINITY)",
        "is_lost = magnitude >= bits.INFINITY",
        "test_formats_in_operators.py -k 'left_out and pynative'",
    ),
    Mistake(
        "states/split_masters.py",
        "        kept = bits.from_bits(whole)\n",
        "",
        "test_formats_in_operators.py -k 'masters_are and pynative'",
    ),
    Mistake(
        "rules/arithmetic.py",
        "return _real_div(x, y)",
        "return x / y",
        "test_temporary_bytes.py -k average",
    ),
    Mistake(
        "rules/arithmetic.py",
        "ops.masked_fill(x, ops.abs(x) < SMALLEST, 0.0)",
        "ops.where(ops.abs(x) < SMALLEST, 0.0, x)",
        "test_temporary_bytes.py -k average",
    ),
    Mistake(
        "rules/arithmetic.py",
        "return ops.where(expanded(condition, y), x, y)",
        "return ops.where(condition, x, y)",
        "test_temporary_bytes.py -k average",
    ),
    Mistake(
        "paths/operators/stacks.py",
        "return expanded(numbers.reshape(F.shape(numbers) + (1,) * (len(F.shape(like)) - 1)), like)",
        "return numbers.reshape(F.shape(numbers) + (1,) * (len(F.shape(like)) - 1))",
        "test_temporary_bytes.py -k Sinkhorn",
    ),
    Mistake(
        "states/bits.py",
        "return ops.addn((x, y))",
        "return x + y",
        "test_temporary_bytes.py -k split8",
    ),
    Mistake(
        "states/bits.py",
        "return _mul_no_nan(x, F.cast(factor, mstype.int32))",
        "return x * factor",
        "test_temporary_bytes.py -k split8",
    ),
    Mistake(
        "paths/operators/composite.py",
        "self.reads_again = rule.is_layerwise and self.stacks.conversions is not None",
        "self.reads_again = False",
        "test_formats_in_operators.py -k 'both_paths and LANS'",
    ),
    Mistake(
        "paths/operators/released.py",
        "rate, _ = self.statement.weighed(step.t, rate, self._step_weights()[i : i + 1])",
        "rate, _ = self.statement.weighed(step.t, rate, self._step_weights()[:1])",
        "test_release.py -k on_operators",
    ),
    Mistake(
        "paths/operators/released.py",
        "clip, applied = (1.0, self._applies(finite)) if measured is None else measured",
        "clip, applied = path.survey.clip_factor(norms), self._applies(finite)",
        "test_release.py -k on_operators",
    ),
    Mistake(
        "paths/operators/gathered_weights.py",
        "        parts = (ops.zeros((begin,), dtype), *parts)\n",
        "        parts = (*parts, ops.zeros((begin,), dtype))\n",
        "test_shares.py -k processes",
    ),
    Mistake(
        "paths/operators/gathered_weights.py",
        "(shares.own[:, 0] == 0) & (shares.own[:, 1] > 0)",
        "shares.own[:, 1] > 0",
        "test_shares.py -k processes",
    ),
    # ---- The composite path
    Mistake(
        "paths/operators/survey.py",
        "gradients = normal(normal(gradients) * self.unscale)",
        "gradients = normal(gradients)",
        "test_conformance.py -k 'composite and pynative and AdamW'",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "            weights = rounded(weights, dtype)\n        return weights, weights, weights",
        "            return rounded(weights, dtype), weights, weights\n        return weights, weights, weights",
        "test_averaged.py -k 'without_masters and composite'",
    ),
    # ---- The launches of the fused path
    Mistake(
        "paths/fused/launches.py",
        "if not looks_at_all or count == len(own) <= at_most:",
        "if not looks_at_all or count <= at_most:",
        "test_launches.py",
    ),
    Mistake(
        "paths/fused/addresses.py",
        "if dtypes != self._gradient_dtypes:",
        "if not self._gradient_dtypes:",
        "test_step.py -k another_dtype",
    ),
    Mistake(
        "kernels/interface.py",
        "(*(False,) * ranges, *(not returned,) * counters)",
        "(*(not returned,) * counters, *(False,) * ranges)",
        "test_abi.py -k mask",
    ),
    # ---- Groups of parameters
    Mistake(
        "groups/members.py",
        "for kind in type(cell).__mro__):\n            names |=",
        "for kind in [type(cell)]):\n            names |=",
        "test_groups.py -k kind_of_normalization",
    ),
    Mistake(
        "groups/param_groups.py",
        "** (last - k) for k in range(last + 1)]",
        "** (last + 1 - k) for k in range(last + 1)]",
        "test_groups.py -k layers",
    ),
    Mistake(
        "groups/muon.py",
        "if p.ndim == 3}",
        "if p.ndim >= 3}",
        "test_groups.py -k weight_of_a_convolution",
    ),
    Mistake(
        "groups/muon.py",
        "heads if given is None else given",
        "heads",
        "test_groups.py -k of_heads",
    ),
    # ---- Muon by heads, and its coefficients
    Mistake(
        "rules/splits.py",
        "(part.rows * part.count if isinstance(part, Heads) else (part,))",
        "(part.rows[::-1] * part.count if isinstance(part, Heads) else (part,))",
        "test_matrices.py -k 'each_form and aot'",
    ),
    Mistake(
        "rules/splits.py",
        "return [Cut(sum(blocks[:k]), n, times, unit) for k, n in enumerate(blocks)]",
        "return [Cut(max(0, sum(blocks[:k]) - k % 2), n, times, unit) for k, n in enumerate(blocks)]",
        "test_matrices.py -k 'each_form and aot'",
    ),
    Mistake(
        "rules/splits.py",
        "split if split.rows else Heads(split.count, (rows // split.count,))",
        "Heads(1, split.rows * split.count or (rows,))",
        "test_matrices.py -k 'each_form and aot'",
    ),
    Mistake(
        "rules/matrices.py",
        "if name in chosen:",
        "if name in chosen and pattern is None:",
        "test_matrices.py -k group_may_state_them",
    ),
    Mistake(
        "rules/matrices.py",
        "if begin <= row < begin + length",
        "if begin < row <= begin + length",
        "test_matrices.py -k no_slice_cuts",
    ),
    Mistake(
        "optimizers/muon.py",
        "scales = [self._scale(size, rows.columns) for size in rows.sizes]",
        "scales = [self._scale(rows.total, rows.columns) for size in rows.sizes]",
        "test_matrices.py -k 'each_form and composite'",
    ),
    Mistake(
        "rules/coefficients.py",
        "return (*triples, *(triples[-1],) * steps)[:steps]",
        "return (triples * steps)[:steps]",
        "test_matrices.py -k coefficients_by_name",
    ),
    Mistake(
        "rules/coefficients.py",
        "1.0 + 2.0**-8 * bfloat16",
        "1.0",
        "test_matrices.py -k bfloat16_takes_no",
    ),
    Mistake(
        "rules/orthogonalization.py",
        "sum(c == 0.0 for _, _, c in run)",
        "0",
        "test_matrices.py -k products_are_of",
    ),
    Mistake(
        "states/shares.py",
        "operations = sum(work(rule.iterations, matrix.rows, matrix.columns) for matrix in own)",
        "operations = work(rule.iterations, shape[0], size // shape[0]) if own else 0.0",
        "test_shares.py -k dealt",
    ),
    Mistake(
        "recipes.py",
        "(bias|beta|scales?)$",
        "(bias|beta)$",
        "test_recipes.py -k scales_are_not_decayed",
    ),
    Mistake(
        "recipes.py",
        '_selected(groups, lambda name: name in tables, ("muon",))',
        '_selected(groups, lambda name: name in tables and "head" not in name, ("muon",))',
        "test_recipes.py -k three_rules",
    ),
    Mistake(
        "recipes.py",
        "of_tables |= {key: value for key, value in settings.items() if key in shared}",
        "of_tables |= {}",
        "test_recipes.py -k three_rules",
    ),
    Mistake(
        "recipes.py",
        """            "sinkhorn_scale": 0.18,\n""",
        """            "sinkhorn_scale": 0.2,\n""",
        "test_recipes.py -k three_rules",
    ),
    Mistake(
        "recipes.py",
        "Sinkhorn(tables, learning_rate, **of_tables)], clip)",
        "Sinkhorn(tables, learning_rate, **of_tables)])",
        "test_recipes.py -k three_rules",
    ),
    Mistake(
        "recipes.py",
        "settings = {**found.stated, **found.chosen, **arguments}",
        "settings = {**arguments, **found.stated, **found.chosen}",
        "test_recipes.py -k every_number",
    ),
    # ---- Norms of weights
    Mistake(
        "paths/operators/weight_norms.py",
        "(step * ops.square(direction) - 2.0 * product)",
        "(step * ops.square(direction) + 2.0 * product)",
        "test_weight_norms.py -k 'two_units and pynative and float32'",
    ),
    Mistake(
        "paths/operators/weight_norms.py",
        "return ops.where(radii > 0, radii, norms)",
        "return norms",
        "test_weight_norms.py -k first_step",
    ),
    Mistake(
        "paths/operators/weight_norms.py",
        "self.outward_lost * ops.ones_like(grown), self.inward_lost",
        "self.inward_lost * ops.ones_like(grown), self.outward_lost",
        "test_weight_norms.py -k 'other_stages and radial'",
    ),
    Mistake(
        "paths/operators/weight_norms.py",
        "ops.logical_or(weight == 0, direction == 0)",
        "weight == 0",
        "test_weight_norms.py -k leaves_the_tensor_alone",
    ),
    Mistake(
        "arguments/weight_norms.py",
        "return len(shape) > 1",
        "return len(shape) > 0",
        "test_weight_norms.py -k vectors",
    ),
    Mistake(
        "paths/operators/composite.py",
        "F.assign(self.held_radii, ops.where(applied, radii, before))",
        "F.assign(self.held_radii, radii)",
        "test_weight_norms.py -k first_step",
    ),
    Mistake(
        "paths/operators/composite.py",
        "before = F.depend(self.held_radii, applied)",
        "before = self.held_radii",
        "test_weight_norms.py -k 'as_each_alone and graph and composite'",
    ),
    Mistake(
        "paths/fused/launches.py",
        "rows=layout.rows, held=held)",
        "rows=layout.rows)",
        "test_weight_norms.py -k 'two_units and aot'",
    ),
    Mistake(
        "ops/include/weight_norms.h",
        "return radius > 0.0f ? radius : static_cast<float>(sqrt(sums[kWeightSum]));",
        "return static_cast<float>(sqrt(sums[kWeightSum]));",
        "test_weight_norms.py -k 'first_step and aot'",
    ),
    Mistake(
        "ops/include/weight_norms.h",
        "step.constants[grown > 0.0 ? kOutwardKept : kInwardKept]",
        "step.constants[grown < 0.0 ? kOutwardKept : kInwardKept]",
        "test_weight_norms.py -k 'other_stages and radial and aot'",
    ),
    Mistake(
        "ops/include/weight_norms.h",
        "- 2.0 * sums[kDirectionsDot])",
        "- sums[kDirectionsDot])",
        "test_weight_norms.py -k 'two_units and aot and pynative'",
    ),
    Mistake(
        "ops/include/decision.h",
        "if (applied && step.radii != nullptr)",
        "if (step.radii != nullptr)",
        "test_weight_norms.py -k 'first_step and aot'",
    ),
    Mistake(
        "ops/cpu/held_norms.h",
        "kNewStates | kDropStates | kSumUp",
        "kNewStates | kSumUp",
        "test_weight_norms.py -k 'kernels_follow and Lion'",
    ),
    Mistake(
        "ops/cpu/held_norms.h",
        "return !Rule::kDirectsFirst && !task.low_states;",
        "return !task.low_states;",
        "test_weight_norms.py -k 'kernels_follow and Lion'",
    ),
    Mistake(
        "ops/cpu/held_norms.h",
        "!Rule::kDirectsFirst && !task.low_states;",
        "!Rule::kDirectsFirst;",
        "test_weight_norms.py -k store_alike",
    ),
    Mistake(
        "ops/cpu/held_norms.h",
        "RuleTile<Rule, kMoveWeights | kAlongWeights>",
        "RuleTile<Rule, kMoveWeights>",
        "test_weight_norms.py -k 'kernels_follow and AdamW'",
    ),
    Mistake(
        "ops/cpu/held_norms.h",
        "    if (!stores_first) {\n",
        "    if (true) {\n",
        "test_weight_norms.py -k 'kernels_follow and AdamW'",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "sums.lane[kWeightSum][lane] += w * w;",
        "sums.lane[kWeightSum][lane] += w * g;",
        "test_conformance.py -k 'test_variant and Lamb'",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "sums.lane[kGradientSum][lane] += g * g;",
        "sums.lane[kGradientSum][lane] += g;",
        "test_callbacks.py",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "if (first < n) DirectAgain(",
        "if (first > n) DirectAgain(",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "if (first > 0 && t.scale[0] != nullptr) DirectAgain(",
        "if (first > 0 && t.scale[0] == nullptr) DirectAgain(",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "n - first, before + first, g + first, s, d);",
        "n - first, w + first, g + first, s, d);",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "return IsExact(total) ? total : ExactSumSquares(directions()[k], n);",
        "return total;",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "auto *d = reinterpret_cast<float (*)[kTile]>(b.direction[0] + first);",
        "auto *d = b.direction;",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "RuleTile<Rule, 0>(",
        "RuleTile<Rule, kNewStates>(",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "Moved<2>(p, direction[0], w[i])",
        "Moved<2>(p, w[i], direction[0])",
        "test_weight_norms.py -k 'kernels_follow and AdamW'",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "next.lane[k][lane] = FromBits(bits & ~mine[lane]);",
        "next.lane[k][lane] = FromBits(bits);",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "element(i, behind + i, sums);",
        "element(i, i, sums);",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "const int count = Min(tile + kTile - i, kLanes);",
        "const int count = kLanes;",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "memcpy(before - behind, before + kTile - behind, kBytes)",
        "memcpy(before - behind, before - behind, kBytes)",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/rule_tiles.h",
        "memcpy(d0 - behind, d0 + kTile - behind, kBytes)",
        "memcpy(d0 - behind, d0 - behind, kBytes)",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "AddTileSums(sums, c.Behind(), c.g + tile",
        "AddTileSums(sums, 0, c.g + tile",
        "test_kernels.py -k place_in_a",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "s[k] = c.s[k] + tile;",
        "s[k] = c.s[k];",
        "test_kernels.py -k vanish",
    ),
    Mistake(
        "ops/cpu/chunk_passes.h",
        "!task.low_states &&\n         task.row == 0;",
        "!task.low_states;",
        "test_kernels.py -k follows_the_reference",
    ),
    Mistake(
        "ops/cpu/sinkhorn_engine.h",
        "if (f.in_place && (parts & kMoveWeights) != 0)",
        "if (f.in_place)",
        "test_weight_norms.py -k 'kernels_follow and Sinkhorn'",
    ),
    Mistake(
        "ops/cpu/matrices.h",
        "tasks_[i].trust_ratio *= std::sqrt",
        "tasks_[i].trust_ratio = std::sqrt",
        "test_weight_norms.py -k 'kernels_follow and Muon'",
    ),
    # ---- What every step asks of many tensors
    Mistake(
        "states/storage.py",
        "        if all_require_gradients(self._trained):\n",
        "        if all_require_gradients(self._trained[1:]):\n",
        "test_set_later.py -k frozen_later",
    ),
    Mistake(
        "arguments/gradients.py",
        "    if not any_is_view(gradients):\n",
        "    if not any_is_view(gradients[:1]) or True:\n",
        "test_step.py -k lie_in_memory",
    ),
    # ---- Schedules
    Mistake(
        "schedules/weight_decays.py",
        "past = F.maximum(step - 1, 0) // self.decay_steps",
        "past = step // self.decay_steps",
        "test_schedules.py -k 'values and pynative'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "F.minimum(step, self.rising - self.ahead) + self.ahead",
        "F.minimum(step, self.rising) + self.ahead",
        "test_schedules.py -k 'values and pynative'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "ratio(self.falling - to_go, self.fall)",
        "ratio(to_go, self.fall)",
        "test_schedules.py -k 'values and pynative'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "F.maximum(self.total_steps - step, 0), self.power.dtype)",
        "F.maximum(self.total_steps - step, 1), self.power.dtype)",
        "test_schedules.py -k 'values and PowerCool'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "F.minimum(self.peak * self._risen(step), falling)",
        "F.minimum(self.peak, falling) * self._risen(step)",
        "test_schedules.py -k 'values and PowerCool'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "constant(start), constant(1 - start)",
        "constant(start), constant(1.0)",
        "test_schedules.py -k 'values and HoldDecay'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "learning_rate if is_constant else end_learning_rate",
        "end_learning_rate",
        "test_schedules.py -k 'values and HoldDecay'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "start_learning_rate > learning_rate:",
        "start_learning_rate >= learning_rate:",
        "test_schedules.py -k 'values and HoldDecay'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "risen * (self.end + self.change * fallen)",
        "self.end + risen * self.change * fallen",
        "test_schedules.py -k 'values and HoldDecay'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "1 if is_constant and total_steps is None else total_steps",
        "1 if is_constant else total_steps",
        "test_schedules.py -k 'wrong_arguments'",
    ),
    Mistake(
        "schedules/learning_rates.py",
        "if warmup_steps == 0 and start_learning_rate != 0:",
        "if warmup_steps < 0 and start_learning_rate != 0:",
        "test_schedules.py -k 'wrong_arguments'",
    ),
    # ---- What optimizers share
    Mistake(
        "base/averaged.py",
        "np.float32(1.0 - weight) * held.weights(i) + np.float32(weight) * averaged",
        "np.float32(1.0 - weight) * averaged + np.float32(weight) * held.weights(i)",
        "test_averaged.py -k part_of_the_average",
    ),
    Mistake(
        "base/averaged.py",
        "* held.weights(i) + np.float32(weight)",
        "* ops.cast(p, mstype.float32).asnumpy().reshape(-1)[begin:end] + np.float32(weight)",
        "test_averaged.py -k part_of_the_average",
    ),
    Mistake(
        "base/averaged.py",
        "if self.is_in and weight != self._weight:",
        "if self.is_in and weight < self._weight:",
        "test_averaged.py -k part_of_the_average",
    ),
    Mistake(
        "training/averaged_weights.py",
        "self._found.eval(self.weight)",
        "self._found.eval()",
        "test_averaged.py -k the_callback_evaluates",
    ),
    Mistake(
        "base/state_dict.py",
        '        if "global_step" not in given:\n            return []\n',
        "",
        "test_averaged.py -k state_dict",
    ),
    Mistake(
        "base/averaged.py",
        "write(held.global_step, -1 - step)",
        "write(held.global_step, -step)",
        "test_averaged.py -k first_step",
    ),
    Mistake(
        "base/learning_rates.py",
        "if place >= len(rates.fixed):",
        "if place > len(rates.fixed):",
        "test_for_scheduler.py -k cannot_be_set",
    ),
    Mistake(
        "base/gradient_release.py",
        "step, self._step, self._measured = self._step, None, None",
        "step, self._step = self._step, None",
        "test_release.py -k two_passes",
    ),
    # ---- Checkpoints
    Mistake(
        "checkpoints/merge.py",
        "        found.sort(key=lambda part: part[0])\n",
        "",
        "test_shares.py -k 'goes_on_on_others or merging'",
    ),
    Mistake(
        "checkpoints/fold.py",
        "for o in mine or old], 0",
        "for o in mine], 0",
        "test_residuals.py -k residuals_is_kept",
    ),
    Mistake(
        "checkpoints/parts.py",
        "if len({part.origin.save for part in parts}) > 1 or (not origin.save and len(steps) > 1):",
        "if len(steps) > 1:",
        "test_checkpoints.py -k 'newest_complete or run_that_wrote'",
    ),
    Mistake(
        "checkpoints/header.py",
        "origin if 0 <= origin.rank < origin.count and",
        "origin if 0 <= origin.rank <= origin.count and",
        "test_checkpoints.py -k cannot_be",
    ),
    # ---- Compressed gradients
    Mistake(
        "dgc/wire.py",
        "math.ceil(stage * length / len(sparsity))",
        "stage * length // len(sparsity)",
        "test_compression.py -k ramp",
    ),
    Mistake(
        "dgc/schedule.py",
        "return sum(at >= end for end in self.ends)",
        "return sum(at > end for end in self.ends)",
        "test_simulated_workers.py",
    ),
    Mistake(
        "dgc/composite.py",
        "ops.where(mask, self.behind(residual, value), residual)",
        "ops.where(mask, ops.zeros_like(residual), residual)",
        "test_compression.py -k both_paths",
    ),
    # ---- Local steps
    Mistake(
        "local_steps/optimizer.py",
        "weight = rows[:, 2] ** 2",
        "weight = rows[:, 2]",
        "test_local_steps.py -k reports",
    ),
    Mistake(
        "local_steps/progress.py",
        "            if self._counted() == step.counted:\n"
        "                write(self.kept.step, np.array([step.counted + 1], np.int32))\n",
        "            write(self.kept.step, np.array([self._counted() + 1], np.int32))\n",
        "test_local_steps.py -k interrupt_anywhere_in_a_step",
    ),
    # ---- Training
    Mistake(
        "training/attention.py",
        "of_key = np.sqrt(gamma.reshape(key_heads, -1).min(1))",
        "of_key = np.sqrt(gamma.reshape(key_heads, -1).max(1))",
        "test_qk_clip.py -k share_keys",
    ),
    Mistake(
        "training/readings.py",
        "max(done - bool(moved.any()), 0)",
        "done",
        "test_callbacks.py -k figures",
    ),
    Mistake(
        "training/monitor.py",
        "        self._read_at = reading.step\n        if self.verbose",
        "        if self.verbose",
        "test_callbacks.py -k 'did_not_call or skipped'",
    ),
    # ---- Steps called from Python
    Mistake(
        "kernels/libraries.py",
        "zip(map(_call, calls), runs)",
        "zip((call() for call in calls), runs)",
        "test_direct.py -k between",
    ),
    Mistake(
        "kernels/libraries.py",
        "next(filter(itemgetter(0), zip(map(_call, calls), runs)), None)",
        "next(filter(itemgetter(0), list(zip(map(_call, calls), runs))), None)",
        "test_direct.py -k fails",
    ),
    Mistake(
        "arguments/rates.py",
        "return self.from_python.run(step).asnumpy()",
        "return self.from_python.run(step + 1).asnumpy()",
        "test_direct.py -k rates",
    ),
    Mistake(
        "paths/fused/joint.py",
        'np.where(self.is_own.asnumpy(), sums, float("nan") if skipped else 0.0)',
        'np.where(True, sums, float("nan") if skipped else 0.0)',
        "test_multi.py -k 'clips_its_own and aot'",
    ),
    Mistake(
        "paths/fused/joint.py",
        'float("nan") if skipped else 0.0',
        "0.0",
        "test_multi.py -k 'clips_its_own and aot'",
    ),
    Mistake(
        "paths/fused/joint.py",
        "seen.now(sums), own) for",
        "sums, own) for",
        "test_multi.py -k 'clips_its_own and aot'",
    ),
    # ---- Several optimizers as one
    Mistake(
        "paths/fused/joint.py",
        "self.measures = stage_reading_all(parts.options) is not None",
        "self.measures = parts.options.skip_nonfinite",
        "test_multi.py -k read_twice",
    ),
    Mistake(
        "paths/fused/joint.py",
        "unscale, self.skips = parts.settings.unscale, parts.options.skip_nonfinite",
        "unscale, self.skips = parts.settings.unscale, False",
        "test_multi.py -k 'clips_its_own and aot'",
    ),
    Mistake(
        "paths/fused/joint.py",
        "DirectLaunches(own, own is last)",
        "DirectLaunches(own, True)",
        "test_multi.py -k 'three_adamws and pynative'",
    ),
    Mistake(
        "paths/fused/launches.py",
        "rows=layout.rows",
        "rows=range(layout.count)",
        "test_multi.py -k 'three_adamws and pynative'",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "of_stack = [tuple(layout.rows[i] for i in stack) for stack in self.places]",
        "of_stack = self.places",
        "test_multi.py -k 'noise'",
    ),
    Mistake(
        "paths/operators/joint.py",
        "self.counting.applies(ops.all(ops.stack(finite)))",
        "self.counting.applies(finite[0])",
        "test_multi.py -k 'clips_its_own and composite'",
    ),
    Mistake(
        "paths/joint_released.py",
        "(is_own | has_one_norm, np.ones_like(is_own))",
        "(is_own, np.ones_like(is_own))",
        "test_multi.py -k 'released_gradients and composite'",
    ),
    Mistake(
        "paths/parts.py",
        "i < parts.layout.rows.stop",
        "i <= parts.layout.rows.stop",
        "test_multi.py -k averages_are_those",
    ),
    Mistake(
        "multi/optimizer.py",
        "skips = any(",
        "skips = all(",
        "test_multi.py -k loss_scale_changes",
    ),
    Mistake(
        "multi/members.py",
        'number.name = f"learning_rate_group_{k}"',
        'number.name = "learning_rate_group_0"',
        "test_multi.py -k rates_are_those",
    ),
    Mistake(
        "states/joint.py",
        "k if k < 0 else k + first",
        "k",
        "test_multi.py -k masters_of_another_format",
    ),
    Mistake(
        "paths/operators/composite.py",
        "without_others(directions, parameters), new_states",
        "directions, new_states",
        "test_stacks.py -k share_a_stack",
    ),
    Mistake(
        "paths/operators/stacks.py",
        "np.arange(width) < np.array(sizes)",
        "np.arange(width) <= np.array(sizes)",
        "test_stacks.py -k share_a_stack",
    ),
    Mistake(
        "paths/operators/stacks.py",
        "return row[: F.shape(tensor.reshape((-1,)))[0]].reshape",
        "return row[-F.shape(tensor.reshape((-1,)))[0] :].reshape",
        "test_stacks.py -k share_a_stack",
    ),
    Mistake(
        "paths/operators/stacks.py",
        "(flat, ops.zeros((lacking,), F.dtype(flat)))",
        "(flat, ops.ones((lacking,), F.dtype(flat)))",
        "test_stacks.py -k share_a_stack",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        'ranges[i] = ("rows", width, holds)',
        "ranges[i] = layout.shapes[i][:1]",
        "test_stacks.py -k share",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        " and not held.has_scales(i)",
        "",
        "test_stacks.py -k that_matter",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        " and not layout.centralized[i]",
        "",
        "test_stacks.py -k that_matter",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "options.weight_norm is not None and is_held(layout.shapes[i])",
        "False",
        "test_stacks.py -k that_matter",
    ),
    Mistake(
        "paths/operators/held_stacks.py",
        "max(end for _, end in ranges)",
        "max(layout.sizes)",
        "test_stacks.py -k is_rounded",
    ),
    Mistake(
        "unregistered.py",
        "each.__dict__.setdefault(name, getattr(each, name))",
        "getattr(each, name)",
        "test_stacks.py -k look_up",
    ),
)


def copied(folder: pathlib.Path) -> None:
    """Copy the tree, as git knows it, and the libraries that were built."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in [*map(ROOT.joinpath, listed.splitlines()), *(ROOT / "ms_optim").glob("*.so")]:
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, place, follow_symlinks=False)


def build(folder: pathlib.Path) -> None:
    """Build a copy's library for instructions that every processor has, not optimized: all takes many minutes.

    The tables of other instruction sets are copies of that one.
    """
    setup, place = setup_script(), folder / "build"
    place.mkdir(exist_ok=True)
    lines = ['#include "kernels.h"', '#include "products.h"']
    for _, sets, _, table in setup["CPU_UNITS"]:
        others = [name for name in sets.get(platform.machine(), ()) if name != "baseline"]
        kept = f"ms_optim::baseline::{table}"
        lines += [f"const decltype({kept}) ms_optim::{name}::{table} = {kept};" for name in others]
    (place / "tables.cc").write_text("\n".join(lines))
    link = ["-shared", f"-Wl,--version-script={ROOT / setup['EXPORTS']}"]
    others = [(place / "tables.cc", "tables", [])]
    flags = ["-O0", "-fPIC", "-Wno-error"]
    shutil.copy(linked(place / LIBRARY.name, "g++", "any", flags, link, others, folder / "ops"), folder / "ms_optim")


def tested(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the tree up to the first that fails."""
    # What is imported must be the copy, whatever is installed; what passed before must run again.
    more = {"PYTHONPATH": str(folder), "MS_OPTIM_SOURCE": str(folder), "MS_OPTIM_TEST_PROOFS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, **more, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LONGEST,
    )


def planted(folder: pathlib.Path, mistake: Mistake) -> tuple[str | None, str]:
    """Plant a mistake in a copy of the tree; return the test that fails, None if none does, and what to say of it."""
    file, library = folder / mistake.path, folder / "ms_optim" / LIBRARY.name
    text, built = file.read_text(), library.read_bytes() if mistake.is_native else b""
    assert text.count(mistake.right) == 1, f"{mistake.file} no longer says {mistake.right!r} once"
    name, *options = shlex.split(mistake.tests)
    file.write_text(text.replace(mistake.right, mistake.wrong))
    try:
        if mistake.is_native:
            build(folder)
        done = tested(folder, f"tests/{name}", *options)
    except subprocess.TimeoutExpired:
        return None, f"NO TEST FAILED within {LONGEST} s of {mistake.tests}"
    finally:
        file.write_text(text)
        if mistake.is_native:
            library.write_bytes(built)
    # An error at import or in a fixture is listed as ERROR.
    failed = re.search(r"^FAILED (tests/.*?)(?: - .*)?$", done.stdout, re.M)
    if failed:
        return failed[1], f"caught by {failed[1]}"
    if done.returncode == 0:
        return None, f"NOT CAUGHT by {mistake.tests}"
    return None, f"NO TEST FAILED, but pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


def main() -> int:
    """Plant the mistakes of the given numbers, or all; return 1 if one was not caught."""
    chosen = [int(number) for number in sys.argv[1:]] or range(1, 1 + len(MISTAKES))
    failed = []
    with tempfile.TemporaryDirectory() as name:
        copied(folder := pathlib.Path(name))
        for number in chosen:
            begun, mistake = time.monotonic(), MISTAKES[number - 1]
            test, said = planted(folder, mistake)
            failed += [test] if test else []
            print(f"{number:2} {mistake.file}, {time.monotonic() - begun:.0f} s: {said}", flush=True)
        # A test that fails anyway catches nothing.
        done = tested(folder, *dict.fromkeys(failed)) if failed else None
    print(f"{len(failed)} of {len(chosen)} mistakes were caught")
    if done is not None and done.returncode != 0:
        print(f"but not all of these tests pass without mistakes:\n{done.stdout[-2000:]}")
        return 1
    return int(len(failed) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
