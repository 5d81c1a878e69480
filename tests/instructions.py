"""Counts the instructions that launches execute for an element, on AVX2 and on arm64, in emulators.

``python tests/instructions.py`` prints the table of docs/performance.md; the package's own library gives AVX2's.
"""

import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import recording
from builds import cross_emulator, replayer, run, wheel
from native import LIBRARY, CompressedLaunch
from recording import WEIGHTS, Recorded, launch
from sources import TESTS

from ms_optim.kernels.interface import MuonFlag, SharedFlag

COMPILER = "aarch64-linux-gnu-g++"
AVX2 = ("qemu-x86_64", "-cpu", "Haswell")
# AVX2's vectors hold twice as many numbers as arm64's.
WIDER = 2
ELEMENTS = 1 << 16
SIDE = 128  # of a square matrix
BFLOAT16, FLOAT16 = WEIGHTS[2], WEIGHTS[1]
ROUNDED, SPLIT, SPLIT8 = ("bfloat16", None, True), ("bfloat16", "int16", False), ("bfloat16", "int8", False)


class Count(NamedTuple):
    """Instructions for an element; of arm64 also those that work on a single number."""

    executed: float
    single: float

    @property
    def is_vectorized(self) -> bool:
        """A rule takes several operations for an element; sums at a tile's end and scales of blocks take a third."""
        return self.single < 0.5


def made(rule, states="float32", rule_flags=None, shapes=((ELEMENTS,),), **options) -> Recorded:
    """Return a rule's launch; its flags are those of recording.RULES if none are given."""
    of = launch(rule, np.random.default_rng(5), states=states, shapes=list(shapes), **options)
    if rule_flags is not None:
        of.arrays[0] = np.zeros((*of.arrays[0].shape[:2], 1 + rule_flags), np.int8)
    return Recorded(rule, of.function, of.arrays)


def compressed() -> Recorded:
    """Return DGCMomentum's launch of one process."""
    rng = np.random.default_rng(5)
    tensors = [[recording.normal(rng, (ELEMENTS,))] for _ in range(2)]
    of = CompressedLaunch(*tensors, *(recording.zeros([(ELEMENTS,)]) for _ in range(2)), [ELEMENTS // 1000])
    return Recorded("dgc_momentum", "ms_optim_dgc_momentum", of.arrays)


def exchange(name) -> Recorded:
    """Return a launch of local steps, that of the first worker."""
    cases = recording.local_steps(np.random.default_rng(5), [(ELEMENTS,)])
    return next(case for case in cases if case.name == name)


def of(rule, *args, **options) -> Callable[[], Recorded]:
    """Return what makes a rule's launch."""
    return functools.partial(made, rule, *args, **options)


LOW = {"bfloat16": '`state_dtype="bfloat16"`', "8bit": '`state_dtype="8bit"`', "4bit": '`state_dtype="4bit"`'}
RULES = {
    "AdamW": "adamw",
    "AdamW, `amsgrad=True`": "adamw_amsgrad",
    "AdamOffload, Nesterov": "adam_offload",
    "Lamb": "lamb",
    "LANS": "lans",
    "Lion": "lion",
    "AdEMAMix": "ademamix",
    "ScheduleFreeAdamW": "schedule_free_adamw",
    "Adam": "adam",
    "Adam, `use_amsgrad=True`": "adam_amsgrad",
    "Momentum": "momentum",
}
LAUNCHES = {
    **{name: of(rule) for name, rule in RULES.items()},
    **{f"{name}, {of_states}": of(rule, states) for name, rule in RULES.items() for states, of_states in LOW.items()},
    "AdamW, `grad_clip_norm`": of("adamw", clip=0.5),
    'AdamW, `decay="cautious"`': of("adamw", cautious=True),
    "AdamW, `average_decay=0.999`": of("adamw", shared=SharedFlag.AVERAGES),
    "AdamW, `grad_centralization`": of("adamw", shapes=((64, ELEMENTS // 64),), shared=SharedFlag.CENTRALIZES),
    "AdamW, bfloat16 weights, masters": of("adamw", weights=BFLOAT16, gradients="bfloat16"),
    "AdamW, bfloat16 weights, split masters": of("adamw", weights=SPLIT, gradients="bfloat16"),
    "AdamW, bfloat16 weights, split8 masters": of("adamw", weights=SPLIT8, gradients="bfloat16"),
    "AdamW, bfloat16 weights, stochastic rounding": of("adamw", weights=ROUNDED, gradients="bfloat16"),
    "AdamW, float16 weights, masters": of("adamw", weights=FLOAT16, gradients="float16"),
    "Sinkhorn, 64 × 1,024": of("sinkhorn", shapes=((64, ELEMENTS // 64),)),
    'Sinkhorn, 64 × 1,024, `state_dtype="8bit"`': of("sinkhorn", "8bit", shapes=((64, ELEMENTS // 64),)),
    "AdamOffload": of("adam_offload", rule_flags=0),
    "DGCMomentum, sparsity 0.999, one process": compressed,
    "Muon, 2 × 32,768": of("muon", shapes=((2, ELEMENTS // 2),)),
    'Muon, 2 × 32,768, `state_dtype="8bit"`': of("muon", "8bit", shapes=((2, ELEMENTS // 2),)),
    "Muon, 128 × 128": of("muon", shapes=((SIDE, SIDE),)),
    "Muon, 128 × 128, bfloat16 products": of("muon", shapes=((SIDE, SIDE),), more_flags=MuonFlag.BFLOAT16_PRODUCTS),
    **{
        f"LocalSteps, {stage}, {how}": functools.partial(exchange, f"local steps {stage}, {how}")
        for how in ("dense", "8 bits of all", "4 bits")
        for stage in ("begin", "send", "apply")
    },
}
# Where elements are chosen to be sent, and with products of matrices, some work is on single numbers.
SINGLE = [name for name in LAUNCHES if name.startswith("Muon") or name.endswith("4 bits")]


def plugin(folder: pathlib.Path) -> pathlib.Path:
    """Compile what counts, tests/count.cc."""
    run(
        ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", TESTS / "count.cc", "-o", folder / "count"]
    )
    return folder / "count"


def counted(emulator, plugin: pathlib.Path, *command) -> np.ndarray:
    """Run a program in one thread; return the instructions that it executes, and those that work on single numbers."""
    said = run([emulator[0], "-plugin", plugin, *emulator[1:], *command], OMP_NUM_THREADS="1")
    return np.array(re.findall(r"^executed (\d+) single (\d+)$", said, re.M)[-1], np.int64)


def count(emulator, plugin: pathlib.Path, replay: pathlib.Path, case: Recorded, folder: pathlib.Path) -> Count:
    """Count what a further launch executes for an element."""
    counts = []
    for steps in (1, 2):
        recording.write(folder / "recording", [dataclasses.replace(case, steps=steps)])
        counts.append(counted(emulator, plugin, replay, folder / "recording", folder / "results"))
    elements = max(array.size for array in case.arrays[1:])  # the first, of flags, has none
    return Count(*((counts[1] - counts[0]) / elements))


def main():
    with tempfile.TemporaryDirectory() as name:
        here = pathlib.Path(name)
        counts, arm, x86 = plugin(here), here / "arm64", here / "x86"
        arm.mkdir()
        x86.mkdir()
        replayer(arm, COMPILER, wheel(arm, COMPILER))
        replayer(x86, "g++", LIBRARY)
        print("| launch | AVX2 | arm64 | arm64 ÷ 2 ÷ AVX2 | of single numbers |\n|---|---|---|---|---|")
        for name, make in LAUNCHES.items():
            avx2 = count(AVX2, counts, x86 / "replay", make(), here)
            neon = count(cross_emulator(COMPILER), counts, arm / "replay", make(), here)
            ratio = neon.executed / WIDER / avx2.executed
            print(
                f"| {name} | {avx2.executed:.1f} | {neon.executed:.1f} | {ratio:.2f} | {neon.single:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
