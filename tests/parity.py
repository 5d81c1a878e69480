"""Launches of an operator, held against the float64 reference."""

import numpy as np
import reference
from harness import NUMPY, check_close, peak_of_statistics, peak_of_weight
from hypothesis import strategies as st
from native import Launch, forms_of
from recording import NORMALIZED_ROWS
from tolerances import TOLERANCE

from ms_optim.kernels.interface import SharedFlag

# The operator, its reference, the rule's constants and flags, and what the reference is told of them.
RULES = [
    (f"ms_optim_{name}", formula, constants, flags, hyper)
    for name, (formula, _, constants, flags, hyper) in reference.KERNELS.items()
]
RULES += [("ms_optim_muon", reference.Muon, *NORMALIZED_ROWS[1:3], {"normalize_rows": True})]
shapes = st.lists(st.integers(1, 40), max_size=4).map(tuple)
EVERYTHING = {
    "rule": st.sampled_from(RULES),
    "shapes": st.lists(shapes, min_size=1, max_size=5),
    "weight_dtype": st.sampled_from(list(NUMPY)),
    "gradient_dtype": st.sampled_from(list(NUMPY)),
    "scale": st.sampled_from([1.0, 2.0**10]),
    "clip": st.sampled_from([0.0, 0.5]),
    "centralize": st.booleans(),
    "decay": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(0, 2**32 - 1),
}


def check_launches(call, rule, shapes, weight_dtype, gradient_dtype, scale, clip, centralize, decay, seed):
    """Run three steps of tensors of some shapes, and compare weights, states and statistics."""
    function, formula, constants, flags, hyper = rule
    # Where a decay enters the states it may cancel the gradient, and the sign of what is left is a whole step.
    decay = 0.0 if formula.decay_in_states else decay
    rng = np.random.default_rng(seed)
    n = len(shapes)
    weights = [np.asarray(rng.standard_normal(s)).astype(NUMPY[weight_dtype]) for s in shapes]
    low = weight_dtype != "float32"
    masters = [np.zeros(s, np.float32) for s in shapes] if low else []
    expected = formula(
        [w.astype(np.float64) for w in weights],
        [lambda k: 0.01] * n,
        [lambda k: decay] * n,
        [centralize] * n,
        [weight_dtype] * n,
        loss_scale=scale,
        grad_clip_norm=clip or None,
        **hyper,
    )
    names = [expected.states_of(i) for i in range(n)]
    of_states = [[(i, names[i][k]) for i in range(n) if k < len(names[i])] for k in range(max(map(len, names)))]
    states = [[np.zeros(expected.state[name][i].shape, np.float32) for i, name in tensors] for tensors in of_states]
    gradients = [np.zeros(s, NUMPY[gradient_dtype]) for s in shapes]
    launch = Launch(
        function,
        weights,
        gradients,
        states,
        constants,
        flags,
        rates=(0.01, decay),
        layout=[[0, 1 if decay else -1, int(centralize and len(s) > 1), i] for i, s in enumerate(shapes)],
        masters=masters,
        loss_scale=scale,
        clip=clip,
        weighs_steps=formula.weighs_steps,
        forms=forms_of(shapes) if formula.iterations else None,
        iterations=formula.iterations,
        shared=SharedFlag.MASTERS * low | SharedFlag.CLIPS * (clip > 0) | SharedFlag.CENTRALIZES * centralize,
    )
    for _ in range(3):
        for g in gradients:
            g[...] = np.asarray(rng.standard_normal(g.shape) * scale).astype(g.dtype)
        before = [g.copy() for g in gradients]
        assert launch.run(call) == 0
        if hasattr(expected, "seen"):
            expected.seen = [w.astype(np.float64) for w in (masters if low else weights)]
        expected.step([g.astype(np.float64) for g in before])
        for g, b in zip(gradients, before):
            assert g.tobytes() == b.tobytes()
    for i in range(n):
        held = masters[i] if low else weights[i]
        peak = peak_of_weight(expected, i)
        check_close(held.astype(np.float64), expected.masters[i], TOLERANCE["weight"], peak, "w")
    for k, tensors in enumerate(of_states):
        tolerance = TOLERANCE["weight" if k < expected.start_at_weights else "state"]
        for state, (i, name) in zip(states[k], tensors):
            check_close(state.astype(np.float64), expected.state[name][i], tolerance, expected.peak[name][i], name)
    check_close(
        launch.statistics.astype(np.float64),
        expected.statistics,
        TOLERANCE["statistics"],
        peak_of_statistics(expected),
        "statistics",
    )
