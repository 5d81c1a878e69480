"""How far float32 may stray from float64, in one place, each number with its reason.

u = 2^-24 is the most that one rounding to float32 is off, relative to the result. Errors are judged relative to the
largest magnitude that the element itself has held so far: where terms of opposite sign cancel, what is left carries
the rounding of the terms.
"""

STEPS = 50
U = 2.0**-24

TOLERANCE = {
    # Each of the 50 steps rounds a moving average about 3 times and shrinks what earlier steps got wrong by beta.
    # Roundings of either sign mostly cancel: the square root of 150 is 12, and of 1e6 elements the worst is off twice
    # as far.
    "state": 24 * U,
    # A weight rounds once in each of the 50 steps, by at most u; the rest is for the directions, which carry the
    # errors of the moments, a square root and a division into each step.
    "weight": 64 * U,
    # Where the weight enters the states, by an L2 decay, it brings its error along: into a second moment twice.
    "state with decay": (24 + 2 * 64) * U,
    # A norm of directions that nearly cancel (moments against decay) carries the errors of either term.
    "statistics": 64 * U,
    # The norms of an exchange: a lane adds up to 2,048 squares in float32, of a chunk of 65,536 elements. Roundings of
    # either sign mostly cancel: the square root of 2,048 is 45, of which the root halves what the sum is off.
    "exchange": 24 * U,
    # Of two paths in float32, after four steps and relative to the largest element: a few roundings in each step, and
    # iterations on matrices, which multiply them; see ORTHOGONAL.
    "other path": 512 * U,
}
# The part of the elements of few bits that may differ then by one unit: rounding in float32, a few of 2^-24, leads a
# number across a border between two of at most 2^-11. In what is tested it is at most one element in 1,000.
MOST_ON_OTHER_PATH = 2e-3
# The same for the remainders of "split8" where a factor of a norm multiplies all weights: they are 2^-16 of a weight
# apart, so that two roundings of 2^-24 lead one in 128 across a border.
MOST_REMAINDERS_ON_OTHER_PATH = 2e-2

# Newton and Schulz's iteration multiplies a small singular value by 3.4445 each of 5 times, and what is no more than
# rounding along with it: all of that shows where a centralized gradient has lost a rank, and the momentum's errors are
# in its place. Products mix the elements of a matrix, so this is relative to the largest element that a move had.
# Measured in 50 steps: at most a third of it.
ORTHOGONAL = 3.4445**5 * TOLERANCE["state"]

# The norm of a matrix's update and its singular values follow these iterations, too, whose polynomials are steep: where
# there are few singular values, rounding in float32 does not average out. Measured for 4 by 882 elements, 300 times:
# 1.5 times the tolerance of other statistics.
OF_ORTHOGONAL = 4 * TOLERANCE["statistics"]

# Two implementations of these iterations, of one stack of small matrices, relative to the largest number: products are
# added up in other orders, and factors of bfloat16 have 8 bits. Measured for 20 draws: 2.4e-6, and 0.06.
ORTHOGONALIZED = {"float32": 1e-5, "bfloat16": 0.05}

# Without masters a weight is rounded to storage each step. Where float32 and float64 fall on either side of a tie the
# results differ by one unit in the last place, and stay that far apart; two such falls in 50 steps happen, three do not
# in what is tested. One unit is 2^-10 of a float16, 2^-7 of a bfloat16, relative to its power of two.
UNITS_WITHOUT_MASTERS = 2
UNIT = {"float16": 2**-10, "bfloat16": 2**-7}
# What that brings into a state that the weight enters; a second moment takes it twice.
STATE_WITHOUT_MASTERS = {dtype: 2 * UNITS_WITHOUT_MASTERS * unit for dtype, unit in UNIT.items()}
# Into a state that moves as the weights do it comes by the decay, in each step times the rate and the decay, which are
# 0.01 and 0.02 in what is tested.
ITERATE_WITHOUT_MASTERS = {dtype: STEPS * 0.01 * 0.02 * UNITS_WITHOUT_MASTERS * unit for dtype, unit in UNIT.items()}
