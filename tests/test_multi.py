"""MultiOptimizer: several rules take a step as one."""

import types

import cases
import numpy as np
import pytest
from harness import Pair, Step, digest_of, numbers, tensor
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from tolerances import STEPS

import ms_optim
from ms_optim import AdamW, Lamb, Lion, MultiOptimizer, Muon, ScheduleFreeAdamW

CASE = {case.name: case for case in cases.CASES}
# Of odd shapes, for each rule its own: names and shapes are those of all conformance tests.
SHAPES = {
    "AdamW": ("seven", "matrix", "scalar"),
    "Lamb": ("lanes+1", "convolution"),
    "LANS": ("one", "zero again"),
    "Lion": ("tiles+1", "zero"),
    "ScheduleFreeAdamW": ("matrix again", "lanes-1"),
    "Muon": ("convolution again", "seven again"),
}


class JointPair:
    """A MultiOptimizer and the float64 references of its rules, which decide as one here."""

    def __init__(self, rules, clip=None, dtype="float32", groups=cases.grouped, own=None, **shared):
        self.clip, self.own, self.loss_scale = clip, own or {}, shared.get("loss_scale", 1.0)
        self.pairs = [
            Pair(
                CASE[name],
                cases.Scenario(dtype, shapes=SHAPES[name], groups=groups),
                seed=k,
                **{"skip_nonfinite": False, **shared, **self.own.get(name, {})},
            )
            for k, name in enumerate(rules)
        ]
        for pair in self.pairs:  # the references get gradients that are clipped already
            pair.reference.clip = None
        self.optimizer = MultiOptimizer([pair.optimizer for pair in self.pairs], clip)
        self.skips = any(pair.shared["skip_nonfinite"] for pair in self.pairs)
        self.cell = Step(self.optimizer)

    def factor(self, pairs, drawn, most):
        """The factor by which a norm of gradients is bounded, from the gradients as they came."""
        squares = 0.0
        for pair, gradients in zip(pairs, drawn):
            for g, centralized in zip(gradients, pair.reference.centralized):
                g = g / self.loss_scale
                g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True) if centralized and g.ndim > 1 else g
                squares += np.sum(g * g)
        return 1.0 if most is None else min(1.0, most / np.sqrt(squares))

    def run(self, mode, steps, spoiled=()):
        for k in range(steps):
            drawn = [pair.gradients()[0] for pair in self.pairs]
            if k in spoiled:
                drawn[k % len(drawn)][0].reshape(-1)[-1] = np.inf
            tensors = tuple(tensor(g, pair.scenario.dtype) for pair, gs in zip(self.pairs, drawn) for g in gs)
            self.optimizer(tensors) if mode == "pynative" else self.cell(*tensors)
            for pair, gradients in zip(self.pairs, drawn):
                if k in spoiled and self.skips:
                    pair.reference.skipped += 1
                    continue
                own = self.own.get(pair.case.name, {}).get("grad_clip_norm")
                bounded = self.factor([pair], [gradients], own) if own else self.factor(self.pairs, drawn, self.clip)
                before = [float(np.sqrt(np.sum(np.square(g)))) for g in gradients]
                pair.reference.step([g * bounded for g in gradients])
                after = [float(np.sqrt(np.sum(np.square(g * bounded)))) for g in gradients]
                ratios = [b / a if a > 0 else 1.0 for a, b in zip(after, before)]
                pair.reference.statistics[:, 0] *= ratios

    def check(self):
        """Compare weights, states, masters, averages, counts and statistics of each rule."""
        optimizer, first = self.optimizer, 0
        for pair in self.pairs:
            end = first + len(pair.params)
            rows = Tensor(optimizer.statistics.asnumpy()[first:end])
            rows.name = "statistics"
            held = pair.optimizer._held
            pair.optimizer = types.SimpleNamespace(
                states=held.states,
                masters=held.masters,
                averages=held.averages,
                statistics=rows,
                global_step=optimizer.global_step,
                skipped_steps=optimizer.skipped_steps,
            )
            pair.reference.peak["statistics"][:, 0] = np.maximum(
                pair.reference.peak["statistics"][:, 0], pair.reference.statistics[:, 0]
            )
            pair.check()
            first = end


@pytest.mark.parametrize("mode", ["pynative", "graph"], indirect=True)
def test_three_rules_follow_their_references(mode):
    """Over 50 steps with one norm, schedules and centralized gradients of their own, and a step that all skip."""
    shared = {"backend": "aot", "skip_nonfinite": True, "loss_scale": 8.0}
    pair = JointPair(["AdamW", "Lamb", "Lion"], clip=3.0, **shared)
    pair.run(mode, STEPS, spoiled=(7, 20, 33))
    pair.check()


@pytest.mark.parametrize("mode", ["pynative", "graph"], indirect=True)
def test_three_rules_follow_their_references_in_operators(mode):
    shared = {"backend": "composite", "skip_nonfinite": True, "loss_scale": 8.0}
    pair = JointPair(["AdamW", "Lamb", "ScheduleFreeAdamW"], clip=3.0, **shared)
    pair.run(mode, STEPS if mode == "graph" else 8, spoiled=(4,))
    pair.check()


@pytest.mark.parametrize(
    "backend, mode", [("aot", "pynative"), ("aot", "graph"), ("composite", "pynative")], indirect=["mode"]
)
def test_one_of_them_clips_its_own_gradients(backend, mode):
    """By the norm of these alone: the others are not clipped; one non-finite gradient still skips all."""
    own = {"AdamW": {"grad_clip_norm": 2.0}, "Lamb": {"skip_nonfinite": True}}
    pair = JointPair(["Lion", "AdamW", "Lamb"], own=own, backend=backend)
    pair.run(mode, 20 if backend == "aot" else 6, spoiled=(2, 4))
    pair.check()


def test_rules_that_weigh_steps_normalize_gradients_or_have_matrices():
    pair = JointPair(["LANS", "ScheduleFreeAdamW", "Muon"], clip=1.0, groups=cases.plain)
    pair.run("pynative", STEPS)
    pair.check()


@pytest.mark.parametrize("average", [None, 0.9])
def test_low_precision_has_masters_and_averages(average):
    pair = JointPair(["AdamW", "Lion"], dtype="bfloat16", clip=2.0, average_decay=average)
    pair.run("pynative", STEPS)
    pair.check()


def weights(count=5):
    rng = np.random.default_rng(0)
    shapes = [(13, 11), (9, 5), (4097,), (7,), ()][:count]
    drawn = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    return [Parameter(Tensor(w), name=f"{name}.w") for w, name in zip(drawn, "abcde")]


def gradients_of(optimizer, k, spoiled=()):
    rng = np.random.default_rng(k)
    drawn = [np.asarray(rng.standard_normal(p.shape), np.float32) for p in optimizer.parameters]
    if k in spoiled:
        drawn[2].reshape(-1)[-1] = np.inf
    return tuple(Tensor(g).astype(p.dtype) for g, p in zip(drawn, optimizer.parameters))


def take_steps(optimizer, steps, mode="pynative", spoiled=(), begin=0):
    cell = Step(optimizer)
    for k in range(begin, begin + steps):
        gradients = gradients_of(optimizer, k, spoiled)
        optimizer(gradients) if mode == "pynative" else cell(*gradients)


def assert_same(one, other):
    """Compare everything but learning rates, bit for bit."""
    held = [{**each._entries.named(), "statistics": each.statistics} for each in (one, other)]
    held = [{name: p for name, p in each.items() if not name.startswith("learning_rate")} for each in held]
    assert held[0].keys() == held[1].keys()
    for name, p in held[0].items():
        np.testing.assert_array_equal(numbers(p), numbers(held[1][name]), err_msg=name)


def muon_and_adamw(clip, **shared):
    params = weights()
    muon = Muon(params[:2], weight_decay=0.1, **shared)
    return MultiOptimizer([muon, AdamW(params[2:], 2e-2, (0.95, 0.95), weight_decay=0.1, **shared)], clip)


@pytest.mark.parametrize("mode", ["pynative", "graph"], indirect=True)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_muon_with_its_adamw_is_muon_and_adamw_to_the_bit(backend, clip, mode):
    """With one norm, in a step that is skipped for AdamW's gradient, in weights, states and statistics."""
    one, several = Muon(weights(), grad_clip_norm=clip, backend=backend), muon_and_adamw(clip, backend=backend)
    for optimizer in (one, several):
        take_steps(optimizer, 6, mode, spoiled=(3,))
    assert_same(one, several)
    assert several.skipped_steps.asnumpy() == [1]


@pytest.mark.parametrize("mode", ["pynative", "graph"], indirect=True)
def test_three_adamws_are_one_to_the_bit(mode):
    """With stochastic rounding, whose noise depends on a tensor's place among all."""
    shared = {"grad_clip_norm": 1.0, "state_dtype": "8bit", "loss_scale": 4.0}
    one = AdamW(weights(), 1e-2, weight_decay=0.1, **shared)
    params = weights()
    del shared["grad_clip_norm"]
    parts = [AdamW(part, 1e-2, weight_decay=0.1, **shared) for part in (params[:1], params[1:3], params[3:])]
    several = MultiOptimizer(parts, 1.0)
    for optimizer in (one, several):
        take_steps(optimizer, 5, mode)
    assert_same(one, several)


def bfloat16_weights():
    return [Parameter(p.astype(mstype.bfloat16), name=p.name) for p in weights()]


@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_noise_is_that_of_one_optimizer(backend):
    """It depends on a tensor's place among all."""
    shared = {"backend": backend, "stochastic_rounding": True, "master_weights": False}
    one, params = Lion(bfloat16_weights(), 1e-2, **shared), bfloat16_weights()
    several = MultiOptimizer([Lion(part, 1e-2, **shared) for part in (params[:2], params[2:])])
    for optimizer in (one, several):
        take_steps(optimizer, 3)
    assert_same(one, several)


def test_masters_of_another_format_are_loaded():
    params, found = bfloat16_weights(), []
    for masters in ("split", True):
        parts = [Lion(params[:2], 1e-2, master_weights=masters), AdamW(params[2:], 1e-2, master_weights=masters)]
        found.append(MultiOptimizer(parts))
        if len(found) == 1:
            take_steps(found[0], 3)
    found[1].load_state_dict(found[0].state_dict())
    seen = [[optimizer._held.weights(i) for i in range(5)] for optimizer in found]
    for split, whole, master in zip(*seen, found[1].masters):
        np.testing.assert_array_equal(split, whole)
        np.testing.assert_array_equal(split, master.asnumpy().reshape(-1))
        assert np.any(split.view(np.uint32) & 0xFFFF)


def three(params, **shared):
    rate = nn.ExponentialDecayLR(1e-2, 0.5, 2)
    return [
        AdamW(params[:2], rate, weight_decay=0.1, **shared),
        Lion([{"params": params[2:3], "lr": 1e-3}, {"params": params[3:4]}], 1e-2, **shared),
        ScheduleFreeAdamW(params[4:], 1e-2),
    ]


def test_a_checkpoint_goes_on(tmp_path):
    """The state dict, this package's file and MindSpore's each carry the whole of it."""
    import mindspore as ms

    whole = MultiOptimizer(three(weights()), 1.0)
    take_steps(whole, 6)
    first = MultiOptimizer(three(weights()), 1.0)
    take_steps(first, 3)
    ms_optim.save(tmp_path / "run.safetensors", optimizer=first)
    ms.save_checkpoint(first, str(tmp_path / "run.ckpt"))
    taken = {name: Tensor(value.asnumpy().copy(), value.dtype) for name, value in first.state_dict().items()}
    for how in ("dict", "file", "MindSpore"):
        again = MultiOptimizer(three(weights()), 1.0)
        if how == "file":
            assert ms_optim.load(tmp_path / "run.safetensors", optimizer=again).step == 3
        else:
            entries = taken if how == "dict" else ms.load_checkpoint(str(tmp_path / "run.ckpt"))
            again.load_state_dict(entries)
            for p in again.parameters:
                p.set_data(Tensor(taken[p.name].asnumpy().copy()))
        take_steps(again, 3, begin=3)
        assert digest_of(again) == digest_of(whole), how


def test_a_checkpoint_of_muon_goes_on_with_adamw_apart():
    one, several, kept = Muon(weights()), muon_and_adamw(None), {"learning_rate": "keep"}
    take_steps(one, 2)
    several.load_state_dict(one.state_dict(), **kept)
    back = Muon(weights())
    back.load_state_dict(several.state_dict(), **kept)
    for optimizer in (several, back):
        for p, w in zip(optimizer.parameters, one.parameters):
            p.set_data(Tensor(w.asnumpy().copy()))
        take_steps(optimizer, 1, begin=2)
    take_steps(one, 1, begin=2)
    assert_same(one, several)
    assert_same(one, back)


def test_rates_are_those_of_each():
    params = weights()
    parts = three(params)
    held = parts[1].param_groups
    optimizer = MultiOptimizer(parts)
    rates = optimizer.current_step_lr()
    np.testing.assert_allclose(rates, [1e-2, 1e-2, 1e-3, 1e-2, 1e-2], rtol=1e-6)
    held[0]["lr"] = 0.5  # also what was asked for before
    assert optimizer.current_step_lr()[2] == parts[1].current_step_lr()[0] == 0.5
    with pytest.raises(TypeError, match="a number where 'param_groups' is used"):
        optimizer.param_groups  # noqa: B018 - it raises
    with pytest.raises(AttributeError, match=r"optimizer.param_groups\[0\]"):
        optimizer.learning_rate = 0.1
    with pytest.raises(AttributeError, match="'optimizers' cannot be set"):
        optimizer.optimizers = ()
    plain = muon_and_adamw(None)
    scheduled = ms_optim.for_scheduler(plain)
    assert [len(group["params"]) for group in scheduled.param_groups] == [2, 3]
    plain.param_groups[1]["lr"] = 0.0
    before = [p.asnumpy().copy() for p in plain.parameters]
    take_steps(plain, 1)
    assert [np.array_equal(p.asnumpy(), b) for p, b in zip(plain.parameters, before)] == [False] * 2 + [True] * 3


def test_averages_are_those_of_each():
    params = weights()
    parts = [AdamW(params[:2], 0.1, average_decay=0.5), ScheduleFreeAdamW(params[2:], 0.1)]
    optimizer = MultiOptimizer(parts)
    take_steps(optimizer, 3)
    before = [p.asnumpy().copy() for p in params]
    with optimizer.averaged():
        for p, average in zip(params[:2], optimizer.averages):
            np.testing.assert_array_equal(p.asnumpy(), average.asnumpy())
        z = {state.name: state.asnumpy() for state in optimizer.states}
        for p, y in zip(params[2:], before[2:]):
            x = y + (1 - 1 / 0.9) * (z[f"schedule_free_z.{p.name}"] - y)
            np.testing.assert_allclose(p.asnumpy(), x, rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="averaged weights"):
            take_steps(optimizer, 1)
    for p, y in zip(params, before):
        np.testing.assert_array_equal(p.asnumpy(), y)
    lacking = MultiOptimizer([AdamW(weights(1), average_decay=0.5), Lion(weights()[1:2])])
    with pytest.raises(RuntimeError, match="no average of the weights of 'Lion'"):
        lacking.eval()


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Dense(*size, "ones", "zeros") for size in ((6, 8), (8, 3)))

    def construct(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("clip, own", [(None, None), (0.5, None), (None, 0.5)])
@pytest.mark.parametrize("backend", ["aot", "composite"])
def test_released_gradients_take_the_same_steps(backend, clip, own):
    import mindspore as ms

    ms.set_context(mode=ms.PYNATIVE_MODE)
    x, y = (Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32)) for shape in ((4, 6), (4, 3)))
    found = []
    for is_released in (False, True):
        net = Net()
        parts = [
            ScheduleFreeAdamW(net.first.trainable_params(), 0.1, backend=backend, grad_clip_norm=own),
            AdamW(net.second.trainable_params(), 0.1, backend=backend),
        ]
        optimizer = MultiOptimizer(parts, clip)
        loss = nn.MSELoss()
        grad = ms.value_and_grad(lambda x, y, net=net, loss=loss: loss(net(x), y), None, optimizer.parameters)
        if is_released:
            optimizer.attach(2 if clip or own else 1)
            with pytest.raises(RuntimeError, match="call finish"):
                optimizer(optimizer.parameters)
        for _ in range(3):
            gradients = grad(x, y)[1]
            if not is_released:
                optimizer(gradients)
            elif not optimizer.finish():
                grad(x, y)
                assert optimizer.finish()
        if is_released:
            optimizer.detach()
        found.append({**optimizer.state_dict(), "statistics": optimizer.statistics})
    for name, value in found[0].items():
        np.testing.assert_array_equal(value.asnumpy(), found[1][name].asnumpy(), err_msg=name)


@pytest.mark.parametrize("mode", ["pynative", "graph"], indirect=True)
def test_a_model_trains_with_callbacks_and_resumes(mode, tmp_path, capsys):
    import mindspore as ms

    x, y = np.ones((32, 6), np.float32), np.zeros((32, 3), np.float32)
    for _ in range(2):
        data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
        net = Net()
        parts = [Lion(net.first.trainable_params(), 1e-3), Lamb(net.second.trainable_params(), 1e-2)]
        optimizer = MultiOptimizer(parts, 1.0)
        monitor = ms_optim.OptimizerMonitor(every=4, csv=tmp_path / "run.csv")
        model = ms.Model(net, nn.MSELoss(), optimizer)
        model.train(1, data, callbacks=[monitor, ms_optim.CheckpointSaver(tmp_path / "run", every=4)])
    assert optimizer.global_step.asnumpy() == [8]
    said = capsys.readouterr().out
    assert "MultiOptimizer(Lion, Lamb) step 8: learning rate 0.001 to 0.01" in said
    assert "resumed from" in said
    assert (tmp_path / "run.layers.csv").read_text().count("second.weight") == 2


def test_the_loss_scale_changes_by_a_step_that_all_skip():
    """MindSpore's train step divides by the scale itself, and here finds the overflow, too."""
    import mindspore as ms

    net = Net()
    parts = [Lion(net.first.trainable_params(), 1e-3), AdamW(net.second.trainable_params(), skip_nonfinite=True)]
    optimizer = MultiOptimizer(parts)
    manager = nn.DynamicLossScaleUpdateCell(2.0**12, 2, 2)
    scale = Parameter(Tensor([2.0**12], ms.float32), name="scale")
    for overflow in (False, True):
        gradients = [np.ones(p.shape, np.float32) for p in optimizer.parameters]
        gradients[0][0, 0] = np.inf if overflow else 1.0
        optimizer(tuple(map(Tensor, gradients)))
        manager(scale, Tensor(int(optimizer.skipped_steps.asnumpy()[0]) > 0))
    assert scale.asnumpy() == [2.0**11]
    assert (optimizer.global_step.asnumpy(), optimizer.skipped_steps.asnumpy()) == ([1], [1])


def test_it_shows_who_has_what():
    text = str(MultiOptimizer(three(weights()), 1.5))
    assert text.startswith("MultiOptimizer(\n  grad_clip_norm=1.5\n  step: 0, by the fused kernels 'adamw', 'lion', ")
    assert "AdamW(\n" in text
    assert "parameters: a.w … b.w" in text
    assert "learning_rate=0.001, weight_decay=0: 1 parameters, 4,097 elements" in text
    assert text.count("grad_clip_norm") == 1


def test_its_parts_cannot_be_called_any_more():
    params = weights()
    parts = [AdamW(params[:2]), Lion(params[2:])]
    optimizer = MultiOptimizer(parts)
    take_steps(optimizer, 1)
    assert parts[0].global_step.asnumpy() == [1]
    for use in (
        lambda: parts[0](gradients_of(parts[0], 0)),
        parts[1].state_dict,
        lambda: parts[1].load_state_dict({}),
        parts[0].attach,
        parts[0].eval,
        lambda: ms_optim.save("unused.safetensors", optimizer=parts[0]),
    ):
        with pytest.raises(RuntimeError, match="is part of a MultiOptimizer"):
            use()
    with pytest.raises(ValueError, match="is part of another MultiOptimizer already"):
        MultiOptimizer(parts)


def used():
    optimizer = AdamW(weights())
    take_steps(optimizer, 1)
    return optimizer


WRONG = {
    "none": (list, ValueError, "at least one optimizer"),
    "no list": (lambda: 3, TypeError, "a list of optimizers of ms_optim"),
    "MindSpore's": (lambda: [nn.SGD(weights())], TypeError, r"optimizers\[0\]' must be an optimizer of ms_optim"),
    "local steps": (lambda: [ms_optim.LocalSteps(AdamW(weights()))], TypeError, "and pass it to LocalSteps"),
    "another": (lambda: [MultiOptimizer([AdamW(weights())])], TypeError, "List those that it was made of"),
    "shared": (lambda: [AdamW(p := weights()), Lion(p[1:])], ValueError, r"'b.w' is in both: optimizers\[0\], AdamW"),
    "namesakes": (lambda: [AdamW(weights()), Lion(weights())], ValueError, "'a.w' is the name of a parameter in both"),
    "scales": (
        lambda: [AdamW((p := weights())[:1], loss_scale=2.0), Lion(p[1:])],
        ValueError,
        "same loss_scale, because one backward pass gives all gradients, but AdamW has 2 and Lion has 1",
    ),
    "rescaled": (lambda: [ms_optim.LANS((p := weights())[:1], rescale_grad=2.0), Lion(p[1:])], ValueError, "rescale"),
    "compressed": (lambda: [ms_optim.DGCMomentum(weights(), 0.1, **cases.RAMP)], ValueError, "exchanges gradients"),
    "offloaded": (lambda: [ms_optim.AdamOffload(weights())], ValueError, "cannot be AdamOffload, which keeps a count"),
    "used": (lambda: [used()], RuntimeError, "has taken steps"),
}


@pytest.mark.parametrize("make, error, words", WRONG.values(), ids=WRONG)
def test_what_cannot_be_part_is_refused_in_words(make, error, words):
    with pytest.raises(error, match=words):
        MultiOptimizer(make())


def test_two_bounds_of_a_norm_are_refused():
    params = weights()
    parts = [AdamW(params[:2], grad_clip_norm=1.0), Lion(params[2:])]
    with pytest.raises(ValueError, match=r"optimizers\[0\], AdamW, clips its own by grad_clip_norm=1"):
        MultiOptimizer(parts, 2.0)
    with pytest.raises(ValueError, match="greater than 0"):
        MultiOptimizer(parts, 0.0)
    take_steps(parts[0], 1)  # nothing was taken


def test_a_rule_without_a_kernel_takes_all_to_operators():
    params = weights()
    parts = [AdamW(params[:2]), Lion(params[2:], backend="composite")]
    with pytest.warns(UserWarning, match="all optimizers run on the slower composite path, because Lion runs no fused"):
        optimizer = MultiOptimizer(parts, 1.0)
    take_steps(optimizer, 2)
    assert not optimizer.fused
    assert "MindSpore's operators, because" in str(optimizer)


def test_local_steps_go_around_it():
    params = weights()
    optimizer = MultiOptimizer([AdamW(params[:2]), Lion(params[2:])], 1.0)
    around = ms_optim.LocalSteps(optimizer, every=2)
    take_steps(around, 4)
    assert around.local_step.asnumpy() == [4]
    assert optimizer.global_step.asnumpy() == [4]
    assert set(around.state_dict()) > set(optimizer.state_dict())


def test_it_says_how_much_is_offloaded():
    params = weights()
    parts = [AdamW(params[:2], offload=True), Lion(params[2:], offload=True)]
    own = [part.offload_report("GPU") for part in parts]
    report = MultiOptimizer(parts).offload_report("GPU")
    assert report.host_bytes == sum(one.host_bytes for one in own)
    assert report.to_host_bytes == sum(one.to_host_bytes for one in own)


def test_no_gradient_is_read_twice_unless_something_depends_on_all():
    params = weights()
    path = MultiOptimizer([AdamW(params[:2]), Lion(params[2:])])._path
    assert [len(rule.launches) for rule in path.rules] == [1, 1]
    params = weights()
    path = MultiOptimizer([AdamW(params[:2], grad_clip_norm=1.0), Lion(params[2:])])._path
    assert [len(rule.launches) for rule in path.rules] == [2, 1]
    assert numbers(path.rules[1].measure(None, None)).sum() == 0
    assert mstype.float64 == path.rules[1].not_measured.dtype
