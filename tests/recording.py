"""Launches of every operator as data, to be run in this process or written down for tests/replay.cc."""

import dataclasses
import pathlib
import struct

import ml_dtypes
import numpy as np
import reference
from harness import NUMPY
from native import CompressedLaunch, Launch, call, forms_of
from tolerances import UNIT

from ms_optim import RadialBrake
from ms_optim.kernels import libraries
from ms_optim.kernels import table as kernels
from ms_optim.kernels.interface import CODE_BLOCK, MAX_STATES, AddressColumn, MuonFlag, SharedFlag
from ms_optim.kernels.local_interface import LocalMark, LocalReport

SHAPES = [(), (1,), (7,), (15,), (17,), (255,), (257,), (1025,), (4097,), (40_000,), (33, 31), (3, 8200), (6, 4, 3, 3)]
# Elements of a tensor that is one chunk. Larger ones, which threads share, are in every third launch of each rule: they
# show nothing else, and sanitizers, emulators and fibers take a hundred times as long for them.
FEW = 5000
STEPS = 3
# The rules that may hold norms of weights.
HOLDING = ("adamw", "adamw_amsgrad", "adam_offload", "lion", "ademamix", "muon", "sinkhorn", "adam_amsgrad", "momentum")
# The states' kinds, and the rule's own constants and flags.
RULES = {name: row[:3] for name, (_, *row) in reference.KERNELS.items()}
# NorMuon: of a matrix, the second state is a number a row.
NORMALIZED_ROWS = (*RULES["muon"][:2], MuonFlag.NESTEROV | MuonFlag.NORMALIZES_ROWS)
CODES = {
    "8bit": {"s": np.int8, "u": np.uint8, "e": np.float32},
    "4bit": {"s": np.int16, "u": np.uint16, "e": np.float32},  # four codes an element
}
# dtype, and that of masters or of their remainders; without masters float16 and bfloat16 are rounded in either way.
WEIGHTS = [
    ("float32", None, False),
    ("float16", "float32", False),
    ("bfloat16", "float32", False),
    ("float16", None, False),
    ("bfloat16", None, True),
    ("float16", None, True),
    ("bfloat16", "int16", False),
    ("bfloat16", "int8", False),
]
STATES = ("float32", "bfloat16", "8bit", "4bit")


@dataclasses.dataclass
class Recorded:
    """One launch, repeated; results are the status and all arrays.

    Attributes:
        name: Says in a failure what was run.
        function: Name of the operator.
        arrays: Its arguments, followed by what a table among them points to.
        passed: How many of the arrays are arguments.
        pointers: For each address in a table: the table, the place in it, the array, and an offset in bytes.
        steps: How often it is launched by each of `callers` threads.
        bytes: For single arrays how much memory there is, where it is not what the shape says.
        remainders: Which arrays are remainders of masters: whole numbers that follow the weights' last bits.
    """

    name: str
    function: str
    arrays: list
    passed: int = 0
    pointers: list = dataclasses.field(default_factory=list)
    steps: int = STEPS
    callers: int = 1
    bytes: dict = dataclasses.field(default_factory=dict)
    remainders: tuple = ()

    def __post_init__(self):
        self.passed = self.passed or len(self.arrays)

    def run(self, call=call):
        arrays = [a.copy() for a in self.arrays]
        for table, place, target, offset in self.pointers:
            arrays[table].reshape(-1)[place] = arrays[target].ctypes.data + offset
        status = [call(self.function, arrays[: self.passed]) for _ in range(self.steps * self.callers)]
        return max(status), arrays

    def write(self, file):
        numbers(file, len(self.function))
        file.write(self.function.encode())
        numbers(file, self.steps, self.callers, self.passed, len(self.arrays))
        for i, a in enumerate(self.arrays):
            dtype, data = str(a.dtype).encode(), a.tobytes()
            data = data[: self.bytes.get(i, len(data))]
            numbers(file, len(dtype))
            file.write(dtype)
            numbers(file, a.ndim, *a.shape, len(data))
            file.write(data)
        numbers(file, len(self.pointers), *[number for pointer in self.pointers for number in pointer])

    def read(self, file):
        (status,) = struct.unpack("=q", file.read(8))
        return status, [np.frombuffer(file.read(a.nbytes), a.dtype).reshape(a.shape) for a in self.arrays]

    def check(self, actual, expected, same_code=True):
        """Compare results bit for bit, but for which NaN it is: processors make NaNs of different signs.

        Products of matrices are contracted into fused multiply-adds where the processor has them, and as the compiler
        likes: unless it is the same code that ran, what comes of them is compared to rounding.
        """
        assert actual[0] == expected[0], self.name
        if self.function == "ms_optim_muon" and not same_code:
            # Numbers on either side of a tie round to two neighbours, which further iterations tell apart. Measured:
            # NorMuon's rows are apart by 2^-5 with products of bfloat16 numbers, by 2^-19 with those of float32.
            low = bool(self.arrays[0].shape[2] - 1 & MuonFlag.BFLOAT16_PRODUCTS)
            self.check_close(actual[1], expected[1], 2.0**-4 if low else 2.0**-16)
            return
        tables = {pointer[0] for pointer in self.pointers}
        for i, (a, b) in enumerate(zip(actual[1], expected[1])):
            if i in tables or a.tobytes() == b.tobytes():
                continue
            same = (a == b) | ((a != a) & (b != b))
            worst = np.flatnonzero(~same)
            where = f"{self.name}: array {i}, {a.dtype} {a.shape}: {worst.size} elements differ"
            assert worst.size == 0, f"{where}, the first {a.flat[worst[0]]!r}, not {b.flat[worst[0]]!r}"

    def check_close(self, actual, expected, of_float32):
        """Compare arrays relative to their largest element; integers, codes and momenta are the same all the same.

        Weights of split masters are compared, and not what lies below them.
        """
        for i, (a, b) in enumerate(zip(actual, expected)):
            if i in self.remainders:
                continue
            if a.dtype.kind in "iu" or a.tobytes() == b.tobytes():
                assert a.tobytes() == b.tobytes(), f"{self.name}: array {i}"
                continue
            unit = UNIT.get(str(a.dtype), of_float32)
            a, b = a.astype(np.float64), b.astype(np.float64)
            largest = np.max(np.abs(b[np.isfinite(b)]), initial=0.0)
            with np.errstate(invalid="ignore"):
                close = (a == b) | ((a != a) & (b != b)) | (np.abs(a - b) <= unit * largest)
            assert close.all(), f"{self.name}: array {i} {a.shape}: {np.flatnonzero(~close)[:5]}"


def numbers(file, *values):
    file.write(struct.pack(f"={len(values)}q", *values))


def write(path: pathlib.Path, cases):
    with path.open("wb") as file:
        numbers(file, len(cases))
        for case in cases:
            case.write(file)


def read(path: pathlib.Path, cases):
    with path.open("rb") as file:
        results = [case.read(file) for case in cases]
        assert not file.read(1)
    return results


def normal(rng, shape, dtype=np.float32):
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def zeros(shapes, dtype=np.float32):
    return [np.zeros(s, dtype) for s in shapes]


def kinds_of(rule, states):
    """Return the dtypes of a rule's states."""
    if states in CODES:
        return tuple(CODES[states][kind] for kind in RULES[rule][0])
    low = ml_dtypes.bfloat16 if states == "bfloat16" else np.float32
    return tuple(np.float32 if kind == "e" else low for kind in RULES[rule][0])


def states_of(rule, rule_flags, kinds, shapes):
    """Return the arrays of each state, of dtypes by tensor; a matrix has none but the first, or one number a row."""
    states = [[state_of(shape, kind) for shape, kind in zip(shapes, of_tensors)] for of_tensors in zip(*kinds)]
    if rule == "muon":
        rows = [np.zeros(s[0] * (s[1] if len(s) == 3 else 1), np.float32) if len(s) > 1 else None for s in shapes]
        normalizes = bool(rule_flags & MuonFlag.NORMALIZES_ROWS)
        states[1] = [a if r is None else r for a, r in zip(states[1], rows) if r is None or normalizes]
    return states


def state_of(shape, kind):
    is_packed = np.dtype(kind) in (np.int16, np.uint16)
    return np.zeros(-(-int(np.prod(shape)) // 4) if is_packed else shape, kind)


def scales_of(state):
    """Return the scales of those of a state's arrays that hold codes, four in each element of 16 bits."""
    coded = [a for a in state if a.dtype.kind in "iu"]
    return zeros([-(-a.size * (4 if a.itemsize == 2 else 1) // CODE_BLOCK) for a in coded])


def launch(rule, rng, weights=WEIGHTS[0], states="float32", gradients="float32", shapes=SHAPES, shared=0, **options):
    """A launch with decay on every other tensor, and on request centralization of every tensor that has rows.

    `states` is a row of STATES for all tensors, or one for each.
    """
    _, constants, rule_flags = RULES[rule]
    rule_flags |= options.pop("more_flags", 0)
    dtype, masters, stochastic = weights
    shared |= SharedFlag.MASTERS * bool(masters) | SharedFlag.STOCHASTIC_ROUNDING * stochastic
    centralized = bool(shared & SharedFlag.CENTRALIZES)
    columns = [[i % 2, -1 if i % 2 else 2, int(centralized and len(s) > 1), i] for i, s in enumerate(shapes)]
    kinds = [kinds_of(rule, s) for s in ([states] * len(shapes) if isinstance(states, str) else states)]
    averages = zeros(shapes) if shared & SharedFlag.AVERAGES else []
    formula = reference.KERNELS[rule][0] if rule in reference.KERNELS else reference.Reference
    held = states_of(rule, rule_flags, kinds, shapes)
    if formula.iterations:
        options = {"forms": forms_of(shapes), "iterations": formula.iterations, **options}
    return Launch(
        f"ms_optim_{rule}",
        [normal(rng, s, NUMPY[dtype]) for s in shapes],
        [normal(rng, s, NUMPY[gradients]) for s in shapes],
        held,
        constants,
        rule_flags,
        rates=(0.01, 0.003, 0.1),
        layout=columns,
        masters=zeros(shapes, masters) if masters else [],
        scales=[scales_of(state) for state in held],
        seed=7,
        shared=shared,
        averages=averages,
        average=(0.9, True),
        weighs_steps=formula.weighs_steps,
        **options,
    )


def small_shapes():
    return [shape for shape in SHAPES if np.prod(shape) < FEW]


def remainders_of(made, masters, count):
    """Return which arrays of a launch are remainders of masters of a dtype, of so many weights."""
    first = made.first + 2 * count + sum(map(len, made.states))
    return tuple(range(first, first + count * (masters not in (None, "float32"))))


def ordinary(rng):
    """Every rule with every storage of weights, and with it in turn the rest."""
    cases = []
    for i, rule in enumerate(RULES):
        for j, weights in enumerate(WEIGHTS):
            k = i + j
            options = {
                "weights": weights,
                "states": STATES[(k + j // 4) % 4],
                # A multiple of 3 for other states with each rule.
                "shapes": SHAPES if (i + 2 * j) % 3 == 0 else small_shapes(),
                "gradients": ["float32", weights[0], "bfloat16", "float16"][k % 4],
                "shared": SharedFlag.SKIP_NONFINITE * (k % 5 == 0) | SharedFlag.CENTRALIZES * ((i + j // 2) % 2),
                "clip": [0.0, 0.5][(i + j // 3) % 2],
                "cautious": j % 3 == 1,
                "loss_scale": [1.0, 1024.0][k % 2],
            }
            # Averages, too, if the rule is not one itself.
            options["shared"] |= SharedFlag.AVERAGES * (k % 3 == 0 and not reference.KERNELS[rule][0].weighs_steps)
            made = launch(rule, rng, **options)
            name = f"{rule}, { ({key: value for key, value in options.items() if key != 'shapes'}) }"
            remainders = remainders_of(made, weights[1], len(options["shapes"]))
            cases.append(Recorded(name, made.function, made.arrays, remainders=remainders))
    return cases


def denormal(rng):
    """Every rule on numbers around the smallest that is not denormal."""

    def near(array, signed=True):
        x = 2.0 ** rng.uniform(-149, -110, array.shape) * (rng.choice([-1.0, 1.0], array.shape) if signed else 1.0)
        array[...] = x.astype(np.float32).astype(array.dtype)

    for rule, (kinds, *_) in RULES.items():
        # Not bfloat16: its few bits make products that lie within half a rounding of 2^-126, where processors differ.
        for weights, states in ((WEIGHTS[0], "float32"), (WEIGHTS[1], "bfloat16")):
            made = launch(rule, rng, weights, states, shapes=small_shapes())
            unsigned = {id(array) for kind, state in zip(kinds, made.states) for array in state if kind == "u"}
            for array in made.arrays[made.first : -1]:
                near(array, signed=id(array) not in unsigned)
            yield Recorded(f"{rule}, denormal numbers, {states}", made.function, made.arrays)
    shapes = small_shapes()
    tensors = zeros(shapes), zeros(shapes), zeros(shapes), zeros(shapes)
    for array in [array for arrays in tensors for array in arrays]:
        near(array)
    sizes = [int(np.prod(s)) for s in shapes]
    sent = [0 if size == 15 else max(1, size // 50) for size in sizes]
    made = CompressedLaunch(*tensors, sent, columns=[[0, 1, 0]] * len(shapes), rates=(0.5, 0.25))
    yield Recorded("dgc_momentum, denormal numbers", "ms_optim_dgc_momentum", made.arrays)


def skipped(rng):
    """Gradients that are not finite: the step is skipped whole, or goes on and spreads them."""
    for rule in RULES:
        for shared in (SharedFlag.SKIP_NONFINITE, 0):
            states = "8bit" if rule == "adamw_amsgrad" else "float32"
            made = launch(rule, rng, states=states, shapes=[(300,), (3000,)], shared=shared)
            gradient = made.arrays[made.first + 2]
            gradient[17], gradient[200] = np.inf, np.nan
            yield Recorded(f"{rule} with infinity and NaN, {shared}", made.function, made.arrays)


def mixed(rng):
    """Tensors with states of each format, as groups of parameters may have them."""
    shapes = [(5,), (300,), (4, 65), (4097,), (33, 31), (256,), (1025,), (7,)]
    for rule in ("adamw", "ademamix", "lion"):
        made = launch(rule, rng, states=[STATES[i % 4] for i in range(len(shapes))], shapes=shapes)
        yield Recorded(f"{rule}, states of all formats", made.function, made.arrays)


def held(rng):
    """Every rule that may hold norms of weights, with each storage of weights and states in turn."""
    for i, rule in enumerate(HOLDING):
        for j, kind in enumerate(("hyperball", "relative", RadialBrake(0.25, 0.5))):
            k = 3 * i + j
            weights, states = WEIGHTS[k % len(WEIGHTS)], STATES[(k + i) % 4]
            shapes = SHAPES if j == i % 3 else small_shapes()
            shared = SharedFlag.AVERAGES * (j == 0) | SharedFlag.CENTRALIZES * (j == 1)
            options = {"cautious": j == 2, "clip": 0.5 * (j == 1), "weight_norm": kind}
            made = launch(rule, rng, weights, states, shapes=shapes, shared=shared, **options)
            name = f"{rule}, norms held, {kind}, {weights}, {states}"
            yield Recorded(name, made.function, made.arrays, remainders=remainders_of(made, weights[1], len(shapes)))


def staged(rng):
    """Stages in launches of their own, as large models need: gradients, moments and weights one after the other."""
    for rule in ("adamw", "lamb", "lans"):
        made = launch(rule, rng, clip=0.5)
        n = len(SHAPES)
        gradients = made.arrays[8 + n : 8 + 2 * n]
        flags = np.zeros((1 + kernels.GRADIENT_STAGE, 1, 1 + RULES[rule][2]), np.int8)
        first = Recorded(
            f"{rule}: gradients", made.function, [flags, *made.arrays[1:8], *gradients, made.sums], steps=1
        )
        yield first
        sums = first.run()[1][-1]
        for stages in (kernels.MOMENTS_STAGE, kernels.APPLY_STAGE | kernels.COMMIT_STAGE):
            flags = np.zeros((1 + stages, 1, 1 + RULES[rule][2]), np.int8)
            arrays = [flags, *made.arrays[1:4], sums, *made.arrays[5:]]
            case = Recorded(f"{rule}: stages {stages}", made.function, arrays, steps=1)
            yield case
            made.arrays = case.run()[1]
            sums = made.arrays[-1]


def matrices(rng):
    """Muon's matrices as rows of a tensor that follow each other, or not, in products of either kind."""
    shapes = [(24, 10), (7,), (6, 100), (3, 8, 5), (1, 9), (9, 1), (130, 401)]
    forms = forms_of(shapes)
    # Two matrices of runs of rows: 3 and 1 of 4, 6 times.
    forms[0] = [(0, 3, 6, 4, 10), (3, 1, 6, 4, 10)]
    all_flags = (
        MuonFlag.NORMALIZES_ROWS,
        MuonFlag.ORIGINAL_SCALE,
        MuonFlag.BFLOAT16_PRODUCTS,
        MuonFlag.NORMALIZES_ROWS | MuonFlag.BFLOAT16_PRODUCTS,
    )
    for i, flags in enumerate(all_flags):
        for j, (states, weights) in enumerate(zip(STATES, (WEIGHTS[0], WEIGHTS[2], WEIGHTS[4], WEIGHTS[1]))):
            # The largest, of several tiles, with each flag and each of the states once.
            n = len(shapes) - (i != j)
            made = launch("muon", rng, weights, states, shapes=shapes[:n], more_flags=flags, forms=forms[:n])
            yield Recorded(f"muon, {flags!r}, {states}", made.function, made.arrays)
    for shared in (SharedFlag.SKIP_NONFINITE, 0):
        made = launch("muon", rng, shapes=shapes, shared=shared)
        made.arrays[made.first + len(shapes)][3, 4] = np.inf
        yield Recorded(f"muon with infinity in a matrix, {shared}", made.function, made.arrays)


def by_address(rng, weights=WEIGHTS[2], states="8bit", shared=0, **options):
    """A launch whose tensors come as a table of where they are; beta powers are kept, and weights are locked."""
    shared |= SharedFlag.BY_ADDRESS | SharedFlag.BETA_POWERS | SharedFlag.LOCKS
    made = launch("lamb", rng, weights, states, shared=shared)
    n, types = len(SHAPES), AddressColumn.WEIGHT_TYPE
    table = np.zeros((n + 1, AddressColumn.ADDRESS_COLUMNS), np.int64)
    passed = [*made.arrays[:5], table, made.sums]
    powers = [np.ones(1, np.float32), np.ones(1, np.float32)]
    rest = [*made.arrays[5:-1], *powers]
    at = {id(a): len(passed) + i for i, a in enumerate(rest)}
    pointers = []

    def point(row, column, array):
        pointers.append((5, row * table.shape[1] + column, at[id(array)], 0))

    dtypes = {np.dtype(NUMPY["float32"]): 0, np.dtype(np.float16): 1, np.dtype(NUMPY["bfloat16"]): 2}
    dtypes |= {np.dtype(kind): 3 + k for k, kind in enumerate((np.int8, np.uint8, np.int16, np.uint16))}
    # Weights, gradients, two states, masters, scales of either state.
    tensors = [made.arrays[8 + k * n : 8 + (k + 1) * n] for k in range(7)]
    columns = {0: tensors[0], 1: tensors[1], 4: tensors[2], 5: tensors[3]}
    if weights[1]:
        columns[2] = tensors[4]
    if states in CODES:
        columns[4 + MAX_STATES], columns[5 + MAX_STATES] = tensors[4 + bool(weights[1]) :][:2]
    for i, shape in enumerate(SHAPES):
        for column, arrays in columns.items():
            point(i, column, arrays[i])
        table[i, types - 2 : types] = int(np.prod(shape)), shape[0] if len(shape) > 1 else 0
        for place, column in enumerate((0, 1, 2, 4, 5)):
            table[i, types + place] = dtypes[columns[column][i].dtype] if column in columns else 0
    for column, array in (
        (0, made.arrays[5]),
        (1, made.arrays[6]),
        (2, made.arrays[7]),
        (4, powers[0]),
        (5, powers[1]),
    ):
        point(n, column, array)
    table[n, 3] = n
    name = f"lamb by address, {weights}, {states}"
    return Recorded(name, made.function, [*passed, *rest], len(passed), pointers, **options)


def returned(rng, weights):
    """AdamOffload's launch of a device whose memory the kernel cannot reach: weights are outputs."""
    made = launch("adam_offload", rng, weights, shared=SharedFlag.RETURNED)
    n, masters = len(SHAPES), len(SHAPES) if weights[1] else 0
    stages = kernels.ALL_STAGES - kernels.COMMIT_STAGE
    flags = np.zeros((1 + stages, *made.arrays[0].shape[1:]), np.int8)
    rest = made.arrays[8 + n : 8 + 4 * n + masters]
    arrays = [flags, *made.arrays[1:7], *rest, made.sums, made.statistics, *zeros(SHAPES, NUMPY[weights[0]])]
    return Recorded(f"adam_offload returned, {weights}", made.function, arrays)


def compressed(rng):
    """DGCMomentum in one launch, and what two workers send and receive."""
    for j, (dtype, masters, stochastic) in enumerate(WEIGHTS):
        shapes = SHAPES if j % 3 == 0 else small_shapes()
        sizes = [int(np.prod(s)) for s in shapes]
        sent = [0 if size == 15 or j == 5 else max(1, size // 50) for size in sizes]
        tensors = [[normal(rng, s, NUMPY[dtype]) for s in shapes], zeros(shapes), zeros(shapes), zeros(shapes), sent]
        options = {
            "rates": (0.01, 0.1),
            "columns": [[0, 1, int(len(s) > 1)] for s in shapes],
            "masters": zeros(shapes, masters) if masters else [],
            "clip": [0.0, 1.0][j % 2],
            "shared": SharedFlag.MASTERS * bool(masters)
            | SharedFlag.STOCHASTIC_ROUNDING * stochastic
            | SharedFlag.CENTRALIZES
            | SharedFlag.SKIP_NONFINITE,
            "rule_flags": [0, 5, 2, 7][j % 4],
        }
        wires = []
        for worker in range(2):
            tensors[1] = [normal(rng, s, NUMPY[["float32", dtype][worker]]) for s in shapes]
            name, function = f"dgc_momentum, {WEIGHTS[j]}", "ms_optim_dgc_momentum"
            yield Recorded(name, function, CompressedLaunch(*tensors, **options).arrays)
            made = CompressedLaunch(*tensors, workers=2, stages=kernels.MOMENTS_STAGE, **options)
            case = Recorded(f"{name}, sends", function, made.arrays, steps=1)
            yield case
            _, arrays = case.run()
            wires.append(arrays[-1])
        wires = np.stack(wires) if any(sent) else (wires[0] + wires[1]).reshape(1, -1)
        stages = kernels.APPLY_STAGE + kernels.COMMIT_STAGE
        made = CompressedLaunch(*tensors, workers=2, stages=stages, wires=wires, sums=arrays[-2], **options)
        yield Recorded(f"{name}, receives", function, made.arrays, steps=1)


# How local steps send, by the fields of ms_optim.kernels.local_interface.LocalNumber from OUTER_RATE on.
EXCHANGES = {
    "dense": (0.7, 0.9, 1, -1, 0, 4096, 1.0),
    "2 bits": (1.0, 0.0, 0, 0.95, 2, 4096, 0.0156),
    "8 bits of all": (0.7, 0.9, 0, -1, 8, 1000, 1.0),
    "16 bits": (0.9, 0.5, 1, 0.9, 16, 512, 0.3),
    "4 bits": (1.0, 0.0, 0, 1.0, 4, 4096, 0.05),
    "32 bits": (1.0, 0.0, 0, 0.0, 32, 300, 0.01),
}


def local_steps(rng, given=()):
    """Two workers that begin a round, send what they have of it, and apply what both sent."""
    weights = [row for row in WEIGHTS if not row[2]]
    for j, (kind, exchange) in enumerate(EXCHANGES.items()):
        dtype, masters, _ = weights[j]
        shapes = given or (SHAPES if j == 1 else small_shapes())
        bits, chunk, density = exchange[4:]
        starts, velocities, residuals = zeros(shapes), zeros(shapes), zeros(shapes)
        velocities = velocities if exchange[1] else []
        residuals = [normal(rng, s) for s in shapes] if exchange[3] >= 0 else []
        words = 1 + sum(map(np.size, starts))
        if bits:
            words = sum(libraries.wire_words(start.size, chunk, density, bits) for start in starts)
        places = np.arange(len(shapes), dtype=np.int32) if masters else np.full(len(shapes), -1, np.int32)
        wires = []
        for rank in range(2):
            numbers = np.array((2, rank, *exchange), np.float64)
            held = [normal(rng, s, NUMPY[dtype]) for s in shapes]
            held += [np.asarray(w, np.float32) for w in held] if masters == "float32" else []
            held += zeros(shapes, masters) if masters not in (None, "float32") else []
            arrays = [numbers, places, *held, *starts, np.zeros(1, np.int32)]
            yield Recorded(f"local steps begin, {kind}", "ms_optim_local_begin", arrays, steps=1)
            mark = np.arange(LocalMark.LOCAL_MARKS - 1, dtype=np.int32)
            wire = np.zeros(words, np.int32 if bits else np.float32)
            sent = [numbers, places, mark, *held, *starts, *residuals, wire, np.zeros(mark.size + 1, np.int32)]
            case = Recorded(f"local steps send, {kind}", "ms_optim_local_send", sent, steps=1)
            yield case
            wires.append(case.run()[1][-2])
        received = np.stack(wires) if bits else wires[0] + wires[1]
        report = np.zeros(LocalReport.LOCAL_REPORTS, np.float32)
        arrays = [numbers, places, received, *held, *starts, *velocities, *residuals, report]
        yield Recorded(f"local steps apply, {kind}", "ms_optim_local_apply", arrays, steps=1)


def cases():
    rng = np.random.default_rng(11)
    return [
        *ordinary(rng),
        *skipped(rng),
        *staged(rng),
        *matrices(rng),
        by_address(rng),
        by_address(rng, WEIGHTS[0], "bfloat16"),
        by_address(rng, WEIGHTS[7], "8bit"),
        by_address(rng, WEIGHTS[6], "4bit"),
        by_address(rng, callers=2),
        returned(rng, WEIGHTS[0]),
        returned(rng, WEIGHTS[2]),
        *compressed(rng),
        *denormal(rng),
        *local_steps(rng),
        *mixed(rng),
        *held(rng),
    ]
