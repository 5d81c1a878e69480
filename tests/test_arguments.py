"""Wrong input is refused in words: which argument, what was expected, what came."""

import re

import mindspore as ms
import numpy as np
import pytest
from cases import CASES
from harness import Step, tensor
from mindspore import Parameter, nn
from refusals import refused

from ms_optim import LANS, AdamOffload, AdamW, DGCMomentum, Lamb

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def params(n=2, dtype="float32"):
    return [Parameter(tensor(np.ones((2, 3)), dtype), name=f"w{i}") for i in range(n)]


@every_case
@pytest.mark.parametrize(
    "error, match, value",
    [
        (TypeError, "'learning_rate' must be a float.*got '0.1' of type str", "0.1"),
        (TypeError, "'learning_rate' must be a float.*got '5' of type str", "5"),
        (TypeError, "'learning_rate'.*None", None),
        (TypeError, "'learning_rate'.*bool", True),
        (TypeError, "'learning_rate'.*list", ["a"]),
        (TypeError, "'learning_rate'.*list", []),
        (ValueError, "'learning_rate' must be equal to or greater than 0, but got -0.1", -0.1),
        (ValueError, "'learning_rate'", float("nan")),
        (ValueError, r"'learning_rate' must be a Tensor of 0 or 1 dim.*shape \(2, 2\)", ms.Tensor(np.ones((2, 2)))),
    ],
)
def test_learning_rate(case, error, match, value):
    text = refused(error, match, lambda: case.optimizer(params(), value))
    assert text.startswith(f"For '{case.name}'")
    group = [{"params": params(), "lr": value}]
    refused(error, match.replace("'learning_rate'", r"'params\[0\]\['lr'\]'"), lambda: case.optimizer(group, 0.1))


@every_case
@pytest.mark.parametrize(
    "error, match, value",
    [
        (TypeError, "'weight_decay' must be a float, an int or a Cell, but got '0' of type str", "0"),
        (TypeError, "'weight_decay'.*None", None),
        (TypeError, "'weight_decay'.*bool", True),
        (ValueError, "'weight_decay' must be equal to or greater than 0, but got -1", -1),
        (ValueError, "'weight_decay'.*inf", float("inf")),
    ],
)
def test_weight_decay(case, error, match, value):
    refused(error, match, lambda: case.optimizer(params(), 0.1, weight_decay=value))
    refused(error, match, lambda: case.optimizer([{"params": params(), "weight_decay": value}], 0.1))


HAS_BETAS = [case for case in CASES if case.name != "DGCMomentum"]


@pytest.mark.parametrize("case", HAS_BETAS, ids=lambda case: case.name)
@pytest.mark.parametrize("bad, error", [(1, TypeError), ("0.9", TypeError), (0.0, ValueError), (1.0, ValueError)])
def test_betas(case, bad, error):
    if case.name == "AdamW":
        names, make = (r"betas\[0\]", r"betas\[1\]"), lambda b1, b2: {"betas": (b1, b2)}
    else:
        names, make = ("beta1", "beta2"), lambda b1, b2: {"beta1": b1, "beta2": b2}
    refused(error, f"'{names[0]}' must be", lambda: case.optimizer(params(), 0.1, **make(bad, 0.9)))
    refused(error, f"'{names[1]}' must be", lambda: case.optimizer(params(), 0.1, **make(0.9, bad)))


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab", None])
def test_betas_of_adamw_are_two(betas):
    refused(TypeError, "'betas' must be a list or tuple of two floats", lambda: AdamW(params(), betas=betas))


@pytest.mark.parametrize("case", HAS_BETAS, ids=lambda case: case.name)
@pytest.mark.parametrize("bad, error", [(1, TypeError), ("1e-8", TypeError), (0.0, ValueError), (-1e-8, ValueError)])
def test_eps(case, bad, error):
    refused(error, "'eps' must be", lambda: case.optimizer(params(), 0.1, eps=bad))


@every_case
@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("loss_scale", 0.0, ValueError),
        ("loss_scale", -1.0, ValueError),
        ("loss_scale", "1", TypeError),
        ("grad_clip_norm", 0.0, ValueError),
        ("grad_clip_norm", "1", TypeError),
        ("state_dtype", "int4", ValueError),
        ("state_dtype", ms.float32, TypeError),
        ("master_weights", 1, TypeError),
        ("stochastic_rounding", "yes", TypeError),
        ("skip_nonfinite", None, TypeError),
        ("backend", "cuda", ValueError),
        ("backend", None, TypeError),
        ("bias_correction", 1, TypeError),
    ],
)
def test_keyword_arguments(case, name, bad, error):
    refused(error, f"'{name}'", lambda: case.optimizer(params(), 0.1, **{name: bad}))


@every_case
def test_an_unknown_keyword_argument_lists_the_known(case):
    refused(
        TypeError,
        "unknown keyword argument 'lose_scale'.*loss_scale",
        lambda: case.optimizer(params(), 0.1, lose_scale=2),
    )


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "use_fused"])
def test_flags_of_adamw(name):
    refused(TypeError, f"'{name}' must be of type bool, but got 1", lambda: AdamW(params(), **{name: 1}))


@pytest.mark.parametrize("name", ["weight_norm_bounds", "trust_ratio_bounds"])
@pytest.mark.parametrize(
    "bad, error", [(1.0, TypeError), ((1.0,), TypeError), ((2.0, 1.0), ValueError), ((-1, 1), ValueError)]
)
def test_bounds_of_lamb(name, bad, error):
    refused(error, rf"'{name}(\[0\])?' must be", lambda: Lamb(params(), 0.1, **{name: bad}))


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("lower_bound", "0", TypeError),
        ("upper_bound", True, TypeError),
        ("lower_bound", -1.0, ValueError),
        ("upper_bound", float("nan"), ValueError),
        ("aggregate_num", 4.0, TypeError),
        ("aggregate_num", True, TypeError),
        ("aggregate_num", -1, ValueError),
        ("use_fused_step", 1, TypeError),
        ("clip_gradient", "1", TypeError),
        ("clip_gradient", 0.0, ValueError),
        ("clip_gradient", -1.0, ValueError),
        ("rescale_grad", None, TypeError),
        ("rescale_grad", 0, ValueError),
        ("bias_correction", False, TypeError),
    ],
)
def test_arguments_of_lans(name, bad, error):
    refused(
        error,
        f"'{name}'.*{re.escape(repr(bad)) if name != 'bias_correction' else ''}",
        lambda: LANS(params(), **{name: bad}),
    )


def test_bounds_of_lans_are_in_order():
    refused(
        ValueError,
        "'lower_bound' must be no greater than 'upper_bound'",
        lambda: LANS(params(), lower_bound=2, upper_bound=1),
    )


@pytest.mark.parametrize("optimizer, name", [(AdamW, "use_fused"), (LANS, "use_fused_step")])
def test_two_words_for_the_backend_must_not_contradict(optimizer, name):
    refused(
        ValueError,
        f"'backend' must be 'auto' or 'composite' where {name}=False",
        lambda: optimizer(params(), backend="aot", **{name: False}),
    )
    assert not optimizer(params(), backend="composite", **{name: False}).fused
    assert not optimizer(params(), **{name: False}).fused
    assert optimizer(params(), **{name: True}).fused


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("use_locking", 1, TypeError),
        ("use_nesterov", "yes", TypeError),
        ("loss_scale", 1, TypeError),
        ("loss_scale", float("inf"), ValueError),
        ("bias_correction", False, TypeError),
    ],
)
def test_arguments_of_adam_offload(name, bad, error):
    refused(error, f"'{name}'", lambda: AdamOffload(params(), **{name: bad}))


@every_case
def test_params(case):
    p, q = params()
    make = case.optimizer
    refused(ValueError, "'params' must be a list", lambda: make(None, 0.1))
    refused(ValueError, "'params' must be not empty", lambda: make([], 0.1))
    refused(TypeError, "'params' must be a list", lambda: make(p, 0.1))
    refused(TypeError, "'params' must be a list.*got 3", lambda: make(3, 0.1))
    refused(TypeError, r"'params\[1\]' must be a Parameter", lambda: make([p, 1.0], 0.1))
    refused(TypeError, r"'params\[1\]' must be a dict", lambda: make([{"params": [p]}, q], 0.1))
    refused(TypeError, r"'params\[0\]' must be a Parameter or a dict", lambda: make(["w"], 0.1))
    refused(ValueError, "'w0' stands twice", lambda: make([p, p], 0.1))
    refused(ValueError, "'w0' stands twice", lambda: make([{"params": [p]}, {"params": [q, p]}], 0.1))
    twin = params(1)[0]
    refused(ValueError, "'w0' shares its name", lambda: make([p, twin], 0.1))
    integers = Parameter(ms.Tensor([1, 2], ms.int32), name="i", requires_grad=False)
    refused(TypeError, "'i' must be float32, float16 or bfloat16, but is Int32", lambda: make([integers], 0.1))


@every_case
def test_groups(case):
    p, q = params()
    make = case.optimizer
    refused(
        KeyError,
        r"'params\[0\]' must be among.*got 'learning_rate'",
        lambda: make([{"params": [p], "learning_rate": 1}], 0.1),
    )
    refused(KeyError, r"'params\[0\]' must have the key 'params'", lambda: make([{"lr": 0.1}], 0.1))
    refused(TypeError, r"params\[0\]\['params'\]' must be a list of Parameters", lambda: make([{"params": p}], 0.1))
    refused(TypeError, r"\['params'\]\[1\]' must be a Parameter", lambda: make([{"params": [p, 2]}], 0.1))
    refused(TypeError, "grad_centralization.*bool", lambda: make([{"params": [p], "grad_centralization": 1}], 0.1))
    refused(ValueError, "at least one Parameter", lambda: make([{"params": []}], 0.1))
    group = {"params": [p, q]}
    refused(ValueError, r"lacks \['w1'\]", lambda: make([group, {"order_params": [p]}], 0.1))
    other = Parameter(tensor([1.0], "float32"), name="other")
    refused(ValueError, r"has \['other'\] besides", lambda: make([group, {"order_params": [p, q, other]}], 0.1))
    refused(ValueError, "'w0' stands twice", lambda: make([group, {"order_params": [p, p]}], 0.1))
    refused(ValueError, "no other key.*'lr'", lambda: make([group, {"order_params": [p, q], "lr": 0.1}], 0.1))
    refused(ValueError, "one group at most, but got 2", lambda: make([group, *[{"order_params": [p, q]}] * 2], 0.1))
    refused(TypeError, "order_params", lambda: make([group, {"order_params": 3}], 0.1))


@every_case
def test_gradients(case, backend, mode):
    pair = params()
    before = [p.asnumpy().copy() for p in pair]
    optimizer = case.optimizer(pair, 0.1, backend=backend)
    call = Step(optimizer) if mode == "graph" else lambda *gradients: optimizer(gradients)
    right = tensor(np.ones((2, 3)), "float32")
    refused(ValueError, "'gradients' must hold 2 tensors.*got 1", lambda: call(right))
    refused(ValueError, "'gradients' must hold 2 tensors.*got 3", lambda: call(right, right, right))
    turned = tensor(np.ones((3, 2)), "float32")
    refused(ValueError, r"'w1' must have the parameter's shape \(2, 3\), but got \(3, 2\)", lambda: call(right, turned))
    whole = ms.Tensor(np.ones((2, 3)), ms.int32)
    refused(TypeError, "'w0' must be float32, float16 or bfloat16, but got Int32", lambda: call(whole, right))
    assert int(optimizer.global_step.asnumpy()[0]) == 0
    for p, b in zip(pair, before):
        np.testing.assert_array_equal(p.asnumpy(), b)


def test_the_base_accepts_what_it_should():
    p, q = params()
    schedule = nn.ExponentialDecayLR(0.1, 0.9, 10)
    for rate in (
        0,
        0.0,
        1,
        np.float32(0.1),
        ms.Tensor(0.1),
        ms.Tensor([0.1, 0.2]),
        [0.1, 0.2],
        (x for x in (1, 2)),
        schedule,
    ):
        Lamb([p, q], rate)
    AdamW(iter([p, q]))
    AdamW([{"params": iter([p, q])}, {"params": []}, {"order_params": iter([q, p])}])


@pytest.mark.parametrize(
    "name, bad, error",
    [
        ("momentum", "0.9", TypeError),
        ("momentum", True, TypeError),
        ("momentum", 1.0, ValueError),
        ("momentum", -0.1, ValueError),
        ("rampup_begin_step", 1.0, TypeError),
        ("rampup_begin_step", -1, ValueError),
        ("rampup_step", 1.0, TypeError),
        ("rampup_step", 0, ValueError),
        ("sparsity", 0.999, TypeError),
        ("sparsity", ("0.9",), TypeError),
        ("sparsity", (), ValueError),
        ("sparsity", (0.9, 1.0), ValueError),
        ("sparsity", [-0.1], ValueError),
        ("use_nesterov", 1, TypeError),
        ("num_trainers", 1.0, TypeError),
        ("num_trainers", 0, ValueError),
        ("num_trainers", 4, ValueError),
        ("decay_type", 2, TypeError),
        ("decay_type", "L2", ValueError),
        ("min_compress_numel", 1e4, TypeError),
        ("min_compress_numel", 0, ValueError),
        ("group", 0, TypeError),
        ("group", "workers", ValueError),
        ("local_group", 0, TypeError),
        ("local_group", "this host", ValueError),
        ("wire_dtype", 16, TypeError),
        ("wire_dtype", "bfloat16", ValueError),
    ],
)
def test_arguments_of_dgc_momentum(name, bad, error):
    arguments = {"momentum": 0.9, "rampup_begin_step": 10, name: bad}
    text = refused(error, f"'{name}' must be", lambda: DGCMomentum(params(), 0.1, **arguments))
    assert text.startswith("For 'DGCMomentum'")


def test_arguments_of_dgc_momentum_in_order():
    """Those that the document of PaddlePaddle's names stand where it has them."""
    optimizer = DGCMomentum(params(), 0.1, 0.9, 0, 100, [0.75, 0.999], True, 1, 0.1, "l1", 2.0, 1, 8.0, None)
    assert (optimizer.momentum, optimizer.use_nesterov, optimizer.decay_type) == (0.9, True, "l1")
    assert optimizer.compression == (0, 100, (0.75, 0.999), 1, "float32")
    assert (optimizer.options.grad_clip_norm, optimizer.options.loss_scale) == (2.0, 8.0)


def test_a_tensor_too_large_for_places_of_four_bytes_is_refused():
    with nn.utils.no_init_parameters():
        dense = nn.Dense(2**16, 2**15 + 1, has_bias=False)
    refused(ValueError, "must have at most 2147483648 elements", lambda: DGCMomentum([dense.weight], 0.1, 0.9, 0))
