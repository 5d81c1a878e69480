"""Processes that hold slices of tensors follow the reference, which knows whole tensors only."""

import numpy as np
import pytest
from cases import constant
from harness import (
    check_close,
    check_stored_alike,
    check_units,
    in_reference,
    numbers,
    numbers_of,
    peak_of_weight,
    tensor,
)
from mindspore import Parameter, ParameterTuple, Tensor, nn
from sharding import (
    ANOTHER_NUMBER,
    AXES,
    CENTRALIZED,
    EXACT,
    RATE,
    REFERENCES,
    ROUNDED,
    SHAPES,
    SPLIT_DECAY,
    STEPS,
    WHOLE_DECAY,
    configurations,
    gradients,
    in_few_bits,
    is_poisoned,
    own_part,
    start,
)
from stated_formats import numbers_in
from tolerances import MOST_ON_OTHER_PATH, TOLERANCE, UNIT

import ms_optim
from ms_optim import DGCMomentum, Muon, merge_states, pattern_groups
from ms_optim.kernels import capabilities
from ms_optim.paths.fused.launches import Launch, phases_of_parts

# How far a whole tensor may stray from the reference, as a vector, relative to the largest that it has been.
RELATIVE = 1e-6
GRADIENT, MOMENTS, APPLY, COMMIT = 1, 2, 4, 8


def joined(name, parts, sharers):
    """Put a tensor together from what the first processes hold of it."""
    if name.startswith("whole"):
        return parts[0]
    return np.concatenate(parts[:sharers], AXES.get(name, 0))


def joined_rows(name, parts, sharers):
    """Put a state of one number for each row together; where rows are cut, each process has it for all."""
    shape = SHAPES[name]
    if name.startswith("whole") or (len(shape) == 2 and AXES.get(name) == 1):
        assert all(part.tobytes() == parts[0].tobytes() for part in parts)
        return parts[0]
    batch = shape[0] if AXES.get(name) == 1 else 1
    return np.concatenate([part.reshape(batch, -1) for part in parts[:sharers]], 1).reshape(-1)


def merged(c, held, sharers):
    """Return the states of each slice, from the shares of its replicas."""
    prefix, found = f"{c.name}/share/", []
    for place in range(sharers):
        of_replicas = [dict(of_prefix(prefix, record)) for record in held[place::sharers]]
        shares = [
            {name.removeprefix(prefix): Tensor(x) for name, x in of_replica.items()} for of_replica in of_replicas
        ]
        bytes_of = [sum(x.nbytes for name, x in one.items() if "." in name) for one in shares]
        assert max(bytes_of) < 0.9 * sum(bytes_of), "one replica holds nearly all states"
        whole = merge_states(shares)
        found.append({f"{c.name}/{name}": x.asnumpy() for name, x in whole.items()})
    return found


def whole_reference(c):
    n = len(c.tensors)
    decays = [SPLIT_DECAY if name.startswith("split") else WHOLE_DECAY for name in c.tensors]
    return REFERENCES[c.optimizer](
        list(start(c).values()),
        [constant(RATE)] * n,
        [constant(decay) for decay in decays],
        [name in CENTRALIZED for name in c.tensors],
        [c.dtype] * n,
        names=c.tensors,
        **in_reference(c.arguments),
    )


def check_trajectory(c, held, sharers):
    """Hold every step of every process to the reference."""
    expected = whole_reference(c)
    for step in range(STEPS):
        given = gradients(step, c)
        expected.step(list(given.values()))
        for i, name in enumerate(c.tensors):
            where = f"{c.name}, step {step}, {name}"
            parts = [record[f"{c.name}/{step}/{name}"] for record in held]
            for rank, part in enumerate(parts):
                same = rank % sharers if name.startswith("split") else 0
                assert part.tobytes() == parts[same].tobytes(), where
            actual, peak = joined(name, parts, sharers), peak_of_weight(expected, i)
            if c.dtype == "float32":
                check_tensor(actual, expected.weights[i], "weight", peak, expected, where)
            else:
                check_units(actual, expected.weights[i], c.dtype, 1, peak, where)
        where, statistics = f"{c.name}, step {step}", [record[f"{c.name}/{step}/statistics"] for record in held]
        assert all(s.tobytes() == statistics[0].tobytes() for s in statistics), where
        if is_poisoned(step, c):
            check_skipped(c, given, statistics[0])
        else:
            peak = expected.peak["statistics"]
            check_close(statistics[0], expected.statistics, TOLERANCE["statistics"], peak, where)
    states = merged(c, held, sharers) if c.arguments.get("shard_states") else held
    for i, name in enumerate(c.tensors):
        for prefix in expected.states_of(i):
            put_together = joined_rows if prefix == "muon_v" else joined
            actual = put_together(name, [record[f"{c.name}/{prefix}.{name}"] for record in states], sharers)
            peak, where = expected.peak[prefix][i], f"{c.name}, {prefix}.{name}"
            check_tensor(actual, expected.state[prefix][i], "state", peak, expected, where)
    assert all(r[f"{c.name}/counts"].tolist() == [expected.step_count, expected.skipped] for r in held), c.name
    assert expected.skipped == bool(c.arguments.get("skip_nonfinite"))


def norms_of_whole_tensors(c):
    """Return for each step the norms of the gradients and, of the first, of the weights, which it finds as drawn."""
    weights = [np.linalg.norm(w) for w in start(c).values()]
    prepared = ({name: centralized(name, g) for name, g in gradients(step, c).items()} for step in range(STEPS))
    return [([np.linalg.norm(g) for g in of_step.values()], weights) for of_step in prepared]


def centralized(name, g):
    """Return a gradient as a step takes it."""
    return g - g.mean(tuple(range(1, g.ndim)), keepdims=True) if name in CENTRALIZED else g


def of_prefix(prefix, record):
    return [(name, x) for name, x in record.items() if name.startswith(prefix)]


def check_tensor(actual, exact, kind, peak, expected, where):
    """Compare tensors as vectors, and element by element but where a decay may all but cancel a gradient."""
    assert np.linalg.norm(actual - exact) <= RELATIVE * np.linalg.norm(peak), where
    if not expected.decay_in_states:
        check_close(actual, exact, TOLERANCE[kind], peak, where)


def check_skipped(c, given, statistics):
    """Statistics of a skipped step know whole gradients, and that nothing moved."""
    finite = np.array([name != c.poisoned for name in c.tensors])
    np.testing.assert_array_equal(statistics[:, 4], finite)
    np.testing.assert_array_equal(statistics[:, 2:4], 0.0)
    norms = []
    for name, g in given.items():
        norms.append(np.linalg.norm(centralized(name, g / c.arguments.get("loss_scale", 1.0))))
    np.testing.assert_allclose(statistics[finite, 0], np.array(norms)[finite], rtol=RELATIVE)


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2, 4])
def test_slices_follow_the_whole_tensors_trajectory(processes, records_of):
    held, _ = records_of(processes)
    for c in configurations(processes):
        check_trajectory(c, held, c.sharers(processes))


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2, 4])
def test_owners_of_matrices_give_the_bits_of_one_process(processes, records_of, monkeypatch):
    """As if one process had everything; but a step that clips depends on how all processes' sums are added.

    Where owners run the kernel, so does the one process, between the same operators.
    """
    held, _ = records_of(processes)
    monkeypatch.setattr(capabilities, "path_of", lambda *asked: capabilities.Answer("composite", "it is compared"))
    of_muon = [c for c in configurations(processes) if c.optimizer is Muon and c.arguments.get("nesterov", True)]
    dealt = [c for c in of_muon if "grad_clip_norm" not in c.arguments]
    assert {c.backend for c in dealt} == {"composite", "auto"}
    for c in dealt:
        params = {name: Parameter(tensor(w, c.dtype), name=name) for name, w in start(c).items()}
        groups = [
            {
                "params": [p],
                "weight_decay": SPLIT_DECAY if name.startswith("split") else WHOLE_DECAY,
                "grad_centralization": name in CENTRALIZED,
            }
            for name, p in params.items()
        ]
        alone = Muon([*groups, {"order_params": list(params.values())}], RATE, backend=c.backend, **c.arguments)
        assert not alone.fused
        for step in range(STEPS):
            given = gradients(step, c)
            alone(tuple(tensor(given[name], c.dtype) for name in c.tensors))
            for name, p in params.items():
                parts = [record[f"{c.name}/{step}/{name}"] for record in held]
                ours = joined(name, parts, c.sharers(processes))
                assert ours.tobytes() == numbers(p).astype(np.float32).tobytes(), f"{c.name}, step {step}, {name}"


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2])
def test_matrices_may_be_rounded_on_their_way_to_owners(processes, records_of):
    """Weights move a little otherwise, with states that are rounded, too."""
    held, _ = records_of(processes)
    for name in ROUNDED.tensors:
        before, last = start(ROUNDED)[name], f"{STEPS - 1}/{name}"
        exact, rounded = (
            joined(name, [record[f"{c.name}/{last}"] for record in held], processes) - before for c in (EXACT, ROUNDED)
        )
        off = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 1e-4 < off < 3 * UNIT["bfloat16"], f"{name}: {off}"


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2])
def test_slices_in_few_bits_are_stored_alike_by_both_paths(processes, records_of):
    """Codes, scales, remainders and weights, after steps whose norms are those of whole tensors."""
    held, _ = records_of(processes)
    for fused, composite in zip(in_few_bits("aot"), in_few_bits("composite")):
        expected = norms_of_whole_tensors(fused)
        for record in held:
            stored = (of_prefix(f"{c.name}/held/", record) for c in (fused, composite))
            check_stored_alike(*stored, led_apart=MOST_ON_OTHER_PATH)
            for step in range(STEPS):
                rows = [record[f"{c.name}/{step}/statistics"] for c in (fused, composite)]
                np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, err_msg=f"{fused.name}, step {step}")
                np.testing.assert_allclose(rows[1][:, 0], expected[step][0], rtol=RELATIVE, err_msg=fused.name)
                assert rows[1].tobytes() == held[0][f"{composite.name}/{step}/statistics"].tobytes()
            first = record[f"{composite.name}/0/statistics"]
            np.testing.assert_allclose(first[:, 1], expected[0][1], rtol=RELATIVE, err_msg=composite.name)


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2, 4])
def test_a_checkpoint_is_loaded_on_another_number_of_processes(processes, records_of):
    """On one process, and that of four on two pairs: weights and states are cut anew, to the bit."""
    held, folder = records_of(processes)
    chosen = [c for c in configurations(processes) if c.name in ANOTHER_NUMBER]
    assert len(chosen) == processes // 2
    for c in chosen:
        states = merged(c, held, 2) if c.arguments.get("shard_states") else held
        arguments = {name: value for name, value in c.arguments.items() if name != "shard_states"}
        params = {name: Parameter(tensor(0 * w, c.dtype), name=name) for name, w in start(c).items()}
        alone = c.optimizer(list(params.values()), RATE, backend="composite", **arguments)
        assert ms_optim.load(folder / f"{c.name}.safetensors", optimizer=alone).step == STEPS - bool(
            c.arguments.get("skip_nonfinite")
        )
        for name, p in params.items():
            parts = [record[f"{c.name}/{STEPS - 1}/{name}"] for record in held]
            whole = joined(name, parts, c.sharers(processes))
            assert numbers(p).astype(np.float32).tobytes() == whole.tobytes(), f"{c.name}, {name}"
            check_cut_anew(c, name, parts, [record.get(f"{c.name}/loaded/{name}") for record in held], joined)
        for state in alone.states:
            prefix, _, name = state.name.partition(".")
            put_together = joined_rows if prefix == "muon_v" else joined
            parts = [record[f"{c.name}/{state.name}"] for record in states]
            whole = put_together(name, parts, c.sharers(processes))
            assert numbers(state).astype(np.float32).tobytes() == whole.tobytes(), f"{c.name}, {state.name}"
            loaded = [record.get(f"{c.name}/loaded/{state.name}") for record in held]
            check_cut_anew(c, name, parts, loaded, put_together)


class Network(nn.Cell):
    """The tensors of a configuration, some of which may be sliced."""

    def __init__(self, values, dtype):
        super().__init__()
        held = [Parameter(tensor(w, dtype), name=name) for name, w in values.items()]
        self.held = ParameterTuple(held)


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [4])
def test_weights_alone_are_whole(processes, records_of):
    """A process without an optimizer cannot know its slices."""
    held, folder = records_of(processes)
    c = next(c for c in configurations(processes) if c.name in ANOTHER_NUMBER)
    path, whole = folder / f"{c.name}.safetensors", {name: 0 * w for name, w in start(c).items()}
    net = Network(whole, c.dtype)
    ms_optim.load(path, net)
    for p in net.held:
        parts = [record[f"{c.name}/{STEPS - 1}/{p.name}"] for record in held]
        assert numbers(p).astype(np.float32).tobytes() == joined(p.name, parts, c.sharers(processes)).tobytes()
    sliced = Network({name: own_part(name, w, 1, 2) for name, w in whole.items()}, c.dtype)
    with pytest.raises(ValueError, match=r"slices of 'split.matrix' must make one tensor.*Without an optimizer, weigh"):
        ms_optim.load(path, sliced)
    assert not any(numbers(p).any() for p in sliced.held)


def check_cut_anew(c, name, saved, loaded, put_together):
    """Compare what two processes loaded with what four had saved."""
    if loaded[0] is not None:
        whole, again = put_together(name, saved, 4), put_together(name, loaded, 2)
        assert again.astype(np.float32).tobytes() == whole.tobytes(), f"{c.name}, {name}"
        assert loaded[2].tobytes() == loaded[0].tobytes()
        assert loaded[0].size < loaded[1].size or name.startswith("whole") or loaded[0].size == whole.size


@pytest.mark.program("sharding")
@pytest.mark.parametrize("processes", [2])
def test_codes_of_slices_are_decoded_for_another_number_of_processes(processes, records_of):
    held, folder = records_of(processes)
    (c,) = (c for c in in_few_bits("aot") if c.name in ANOTHER_NUMBER)
    params = {name: Parameter(tensor(0 * w, c.dtype), name=name) for name, w in start(c).items()}
    arguments = {name: value for name, value in c.arguments.items() if name != "state_dtype"}
    alone = c.optimizer(list(params.values()), RATE, **arguments)
    ms_optim.load(folder / f"{c.name}.safetensors", optimizer=alone)
    found = dict(numbers_of(alone))
    for name in params:
        for prefix in ("", "master."):
            parts = [record[f"{c.name}/held/{prefix}{name}"] for record in held]
            assert found[prefix + name].tobytes() == joined(name, parts, 2).tobytes()
        for k, state in enumerate(alone.rule.prefixes):
            decoded = [decoded_state(f"{c.name}/held/{state}", k, name, record) for record in held]
            expected = joined(name, decoded, 2)
            np.testing.assert_allclose(found[f"{state}.{name}"], expected, rtol=RELATIVE, err_msg=f"{state}.{name}")
    assert any("_scale." in name for name in held[1])


def decoded_state(prefix, k, name, record):
    """Return the numbers of a state: that of a small slice is in float32, and has no scales."""
    state, scales = record[f"{prefix}.{name}"], record.get(f"{prefix}_scale.{name}")
    if scales is None:
        return state
    return numbers_in(state.reshape(-1).astype(np.int64), scales, "8bit", k, state.size).reshape(state.shape)


@pytest.mark.parametrize("sharers", [2, 4])
def test_tensors_are_split_unevenly(sharers):
    for name, shape in SHAPES.items():
        if name.startswith("split"):
            parts = [own_part(name, np.zeros(shape), place, sharers) for place in range(sharers)]
            lengths = [part.shape[AXES.get(name, 0)] for part in parts]
            assert sum(lengths) == shape[AXES.get(name, 0)]
            assert 0 < lengths[0] < lengths[-1]


# ---- Phases ------------------------------------------------------------------------------------------------------


def test_phases_of_layerwise_rules():
    everything = (0, 1, 2)
    lamb = [[Launch(GRADIENT + MOMENTS, everything)], [Launch(APPLY + COMMIT, everything)]]
    assert phases_of_parts(3, 3, True, False) == lamb
    stages = [[launch.stages for launch in phase] for phase in phases_of_parts(3, 2, True, True)]
    assert stages == [[GRADIENT] * 2, [MOMENTS] * 2, [APPLY, APPLY + COMMIT]]


def test_phases_of_rules_that_look_at_single_elements():
    def stages(looks_first):
        return [[launch.stages for launch in phase] for phase in phases_of_parts(3, 3, False, looks_first)]

    assert stages(False) == [[GRADIENT + MOMENTS + APPLY], [COMMIT]]
    assert stages(True) == [[GRADIENT], [MOMENTS + APPLY], [COMMIT]]


# ---- Arguments ---------------------------------------------------------------------------------------------------


@pytest.fixture
def parameter():
    return Parameter(tensor(np.ones((4, 3)), "float32"), name="w")


@pytest.mark.parametrize("optimizer", REFERENCES)
def test_a_group_needs_a_name_and_communication(optimizer, parameter):
    with pytest.raises(TypeError, match=r"params\[0\]\['shard_group'\]' must be of type str, but got 3"):
        optimizer([{"params": [parameter], "shard_group": 3}], 0.1)
    expected = r"params\[1\]\['shard_group'\]' must be omitted before mindspore.communication.init\(\) is called"
    other = Parameter(tensor([1.0], "float32"), name="v")
    with pytest.raises(ValueError, match=expected):
        optimizer([{"params": [other]}, {"params": [parameter], "shard_group": "mccl_world_group"}], 0.1)


def test_dgc_refuses_slices(parameter):
    with pytest.raises(ValueError, match=r"'DGCMomentum', 'params\[0\]\['shard_group'\]' must be omitted: it exch"):
        DGCMomentum([{"params": [parameter], "shard_group": "mccl_world_group"}], 0.1, 0.9, 0)


def test_only_sliced_tensors_have_an_axis(parameter):
    def refused(error, match, **settings):
        with pytest.raises(error, match=match):
            Muon([{"params": [parameter], **settings}], 0.1)

    refused(ValueError, r"params\[0\]\['shard_axis'\]' must be omitted without 'shard_group', but got 1", shard_axis=1)
    expected = r"params\[0\]\['shard_axis'\]' must be an int, 0 or greater"
    refused(TypeError, expected, shard_group="world", shard_axis="rows")
    refused(ValueError, expected, shard_group="world", shard_axis=-1)
    with pytest.raises(KeyError, match="shard_axis"):
        ms_optim.AdamW([{"params": [parameter], "shard_group": "world", "shard_axis": 1}], 0.1)


def test_patterns_may_name_a_group(parameter, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    other = Parameter(tensor([1.0], "float32"), name="v")
    groups = pattern_groups([parameter, other], {"w": {"shard_group": "tensor parallel"}})
    assert groups[0] == {"params": [parameter], "shard_group": "tensor parallel"}
    assert "shard_group" in str(groups)
    assert "tensor parallel" in str(groups)
    assert "shard_group" not in str(pattern_groups([parameter, other], {"w": {"lr": 0.1}}))
    with pytest.raises(TypeError, match=r"shard_group'\]' must be of type str"):
        pattern_groups([parameter], {"w": {"shard_group": None}})
