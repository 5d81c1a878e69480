"""Random launches under AddressSanitizer and UndefinedBehaviorSanitizer: the bits of the package's library, no more."""

import functools
import os
import pathlib
import tempfile

import builds
import numpy as np
import recording
from hypothesis import strategies as st

from ms_optim.kernels.interface import SharedFlag

shapes = st.lists(
    st.one_of(st.lists(st.integers(1, 50), max_size=3), st.lists(st.integers(200, 5000), min_size=1, max_size=1)),
    min_size=1,
    max_size=6,
)
weights = st.integers(0, len(recording.WEIGHTS) - 1)
common = {
    "shapes": shapes,
    "weights": weights,
    "gradients": st.sampled_from(["float32", "float16", "bfloat16"]),
    "shared": st.sampled_from([0, SharedFlag.SKIP_NONFINITE]),
    "centralizes": st.booleans(),
    "clip": st.sampled_from([0.0, 0.5]),
    "loss_scale": st.sampled_from([1.0, 1024.0]),
    "size": st.sampled_from([0.0, 1e-30, 1.0, 1e4, 1e38]),
    "poison": st.sampled_from([0.0, np.inf, np.nan]),
    "seed": st.integers(0, 2**32 - 1),
}
launches = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(list(recording.RULES)),
        "states": st.sampled_from(list(recording.STATES)),
        "threads": st.integers(1, 3),
        **common,
    }
)
# What is finite in gradients.
LARGEST = {"float32": 3e38, "float16": 6e4, "bfloat16": 3e38}
# A replay takes many, for starting it takes longest.
PROGRAM = st.lists(launches, min_size=20, max_size=40)
# Where builds are kept, for whoever else needs them.
FOLDER = "MS_OPTIM_TEST_BUILDS"


@functools.cache
def program():
    return builds.sanitized(pathlib.Path(os.environ[FOLDER]), "address,undefined")[0]


def prepare():
    """Build the program in a folder that the processes of the campaign share."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp()
    program()


def recorded(i, rule, states, weights, gradients, shapes, shared, centralizes, size, poison, seed, threads, **options):
    rng = np.random.default_rng(seed)
    shapes = [tuple(shape) for shape in shapes]
    shared |= SharedFlag.CENTRALIZES * centralizes
    made = recording.launch(rule, rng, recording.WEIGHTS[weights], states, gradients, shapes, shared, **options)
    first, n = made.first, len(shapes)
    # The code of a NaN has its sign, which is the processor's own.
    bound = np.inf if states not in recording.CODES or shared & SharedFlag.SKIP_NONFINITE else LARGEST[gradients]
    for g in made.arrays[first + n : first + 2 * n]:
        with np.errstate(over="ignore"):
            g[...] = np.clip(g.astype(np.float64) * size, -bound, bound).astype(g.dtype)
    if poison and bound == np.inf:
        made.arrays[first + n].reshape(-1)[-1:] = poison
    remainders = recording.remainders_of(made, recording.WEIGHTS[weights][1], n)
    return recording.Recorded(f"{i}: {rule}", made.function, made.arrays, remainders=remainders)


def attack(program_):
    cases = [recorded(i, **drawn) for i, drawn in enumerate(program_)]
    expected = [case.run() for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        for threads in sorted({drawn["threads"] for drawn in program_}):
            builds.replay(pathlib.Path(folder), [program()], cases, expected, OMP_NUM_THREADS=str(threads))
    return {"launches": len(cases)}
