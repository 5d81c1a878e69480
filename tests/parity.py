"""Launches of an operator, held against the float64 reference."""

import numpy as np
import reference
from harness import NUMPY, check_close
from hypothesis import strategies as st
from native import Launch
from tolerances import TOLERANCE

from ms_optim import _kernels

# The operator, its reference, the rule's constants and flags, and what the reference is told of them.
ADAMW = ("ms_optim_adamw", reference.AdamW, (0.9, 0.999, 1e-8), 4, {})
AMSGRAD = ("ms_optim_adamw_amsgrad", reference.AdamW, (0.9, 0.999, 1e-8), 7, {"amsgrad": True, "maximize": True})
LAMB = ("ms_optim_lamb", reference.Lamb, (0.9, 0.999, 1e-6, 0.0, np.inf, 0.0, np.inf), 3, {})
LANS = ("ms_optim_lans", reference.LANS, (0.9, 0.999, 1e-6, 0.1, 0.0, np.inf), 0, {"clip_gradient": 0.1})
OFFLOAD = ("ms_optim_adam_offload", reference.AdamOffload, (0.9, 0.999, 1e-8), 1, {"use_nesterov": True})
RULES = [ADAMW, AMSGRAD, LAMB, LANS, OFFLOAD]
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
    states = [[np.zeros(s, np.float32) for s in shapes] for _ in expected.states]
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
        shared=_kernels.MASTERS * low | _kernels.CLIPS * (clip > 0) | _kernels.CENTRALIZES * centralize,
    )
    for _ in range(3):
        for g in gradients:
            g[...] = np.asarray(rng.standard_normal(g.shape) * scale).astype(g.dtype)
        expected.step([g.astype(np.float64) for g in gradients])
        before = [g.copy() for g in gradients]
        assert launch.run(call) == 0
        for g, b in zip(gradients, before):
            assert g.tobytes() == b.tobytes()
    for i in range(n):
        held = masters[i] if low else weights[i]
        check_close(held.astype(np.float64), expected.masters[i], TOLERANCE["weight"], expected.peak["weight"][i], "w")
        for k, name in enumerate(expected.states):
            peak = expected.peak[name][i]
            check_close(states[k][i].astype(np.float64), expected.state[name][i], TOLERANCE["state"], peak, name)
    check_close(
        launch.statistics.astype(np.float64),
        expected.statistics,
        TOLERANCE["statistics"],
        expected.peak["statistics"],
        "statistics",
    )
