"""Integer bounds for the weights exp(-m²/2s₀²) of blocks and for their sums, to any number of bits.

All numbers are in units of 2^-bits. Operations for a lower bound round down, and the same operations for an upper
bound round up. All numbers are in [0, 1] and are only multiplied and added, so each bound holds after any rounding.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

DEPTH = (1 << 15) - 1
"""Blocks on each side of zero, m = 0 … DEPTH - 1. The numbers of all blocks fit 32 bits, and at least 63 deviations."""


def blocks_in_order(depth: int) -> list[int]:
    """Return the blocks of m = 0 … depth - 1 from the middle outward: 0, -1, 1, -2, 2, …"""
    return [block for m in range(depth) for block in (m, -m - 1)]


def cumulated(rate: Fraction, bits: int) -> tuple[list[int], list[int]]:
    """Return bounds for the probability of each block and all before it.

    Blocks are in the order of `blocks_in_order`.

    The lists end before the first block whose weight is 0 in this many bits.

    Args:
        rate: 1/2s₀², at most 1.
        bits: of precision, at least 64.

    Returns:
        Lower bounds and upper bounds, in units of 2^-bits.
    """
    # Bounds for exp(-rate·m²), m = 0, 1, …, with positive lower bounds.
    low, high = [], []
    below, above = exponential(rate, bits)
    for _, smaller, larger in zip(range(DEPTH), falling(below, bits, 1), falling(above, bits, -1)):
        if not smaller:
            break
        low.append(smaller)
        high.append(larger)
    # Each omitted weight is below the last upper bound, since weights fall with m.
    beyond = (DEPTH - len(high)) * high[-1]
    least, most = 2 * sum(low), 2 * (sum(high) + beyond)
    twice = [[weight for weight in side for _ in range(2)] for side in (low, high)]
    return (
        [(total << bits) // most for total in accumulate(twice[0])],
        [min(-(-(total << bits) // least), 1 << bits) for total in accumulate(twice[1])],
    )


def falling(first: int, bits: int, sign: int) -> Iterator[int]:
    """Yield 1, q, q⁴, q⁹, … for the bound q, in units of 2^-bits.

    Args:
        first: q.
        bits: of precision.
        sign: 1 rounds everything down; -1 rounds it up, as it mirrors ⌊x⌋ to ⌈x⌉.
    """
    weight, ratio, square = 1 << bits, first, sign * (sign * first * first >> bits)
    while True:
        yield weight
        weight = sign * (sign * weight * ratio >> bits)
        ratio = sign * (sign * ratio * square >> bits)


def exponential(rate: Fraction, bits: int) -> tuple[int, int]:
    """Return bounds for exp(-rate) in units of 2^-bits.

    The series alternates, so that two successive partial sums enclose it.

    Args:
        rate: above 0 and at most 1, so that the terms fall.
        bits: of precision.
    """
    total, term, order = Fraction(1), Fraction(1), 0
    before = total
    while abs(term) * (1 << bits) > 1:
        order += 1
        term *= -rate / order
        before, total = total, total + term
    lower, upper = sorted((before, total))
    return math.floor(lower * (1 << bits)), math.ceil(upper * (1 << bits))
