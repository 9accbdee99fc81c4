"""One number from its bits, in Python integers: the definition that fast kernels are held to, and their last resort.

A candidate has 48 bits, and 192 more where they are needed, its slot. Where those leave a comparison open, further bits
are drawn until it is decided. No comparison is made in floating point.

The pair of a block and low bits is taken with probability exp(-t), 0 ≤ t ≤ 1, without computing an exponential: events
of probability t/1, t/2, t/3, … are drawn until one does not happen, and the pair is taken if that is number one, three,
five, … (von Neumann; Canonne, Kamath, Steinke, 2020, Algorithm 1). Each is one comparison with a fraction.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, LOW_BITS, Tables

Draw = Callable[[], int]
"""Draws 64 further bits."""


class Uniform:
    """A uniform number in [0, 1) whose first bits are known, and further ones drawn when they are needed.

    Args:
        drawn: the bits that are known, the first one the highest.
        bits: how many they are.
        draw: draws 64 more.
    """

    def __init__(self, drawn: int, bits: int, draw: Draw) -> None:
        self._drawn, self._bits, self._draw = drawn, bits, draw

    def is_below(self, numerator: int, denominator: int) -> bool:
        """Whether the number is below a fraction: with exactly that probability.

        Args:
            numerator, denominator: of the fraction, ≥ 0 and > 0.
        """
        while True:
            limit = numerator << self._bits
            if (self._drawn + 1) * denominator <= limit:
                return True
            if self._drawn * denominator >= limit:
                return False
            self._extend()

    def block(self, tables: Tables) -> int:
        """The block whose two thresholds the number lies between."""
        while (position := tables.missing.position(self._drawn, self._bits)) is None:
            self._extend()
        return position // 2 if position % 2 == 0 else -(position // 2) - 1

    def _extend(self) -> None:
        self._drawn, self._bits = self._drawn << 64 | self._draw(), self._bits + 64


def number_of(index: int, word: int, slot: Sequence[int], tables: Tables, draw: Draw) -> int | None:
    """The number that a candidate's bits stand for, as b·2^16 + low; None where it is refused.

    Args:
        index: 16 bits, into the first table.
        word: 32 bits: the upper half decides whether the pair is taken, the lower half gives the low bits.
        slot: three times 64 bits. The first: an index into the second table in its low 16 bits, and 48 bits that go on
            where the word's upper half ends. The second: for the thresholds. The third: for the event of probability
            t/2.
        tables: of the scale.
        draw: draws 64 further bits.
    """
    more, threshold, second = map(int, slot)
    block = int(tables.first[index])
    if block == LEFT_OVER:
        block = int(tables.second[more % (1 << LOW_BITS)])
    if block == LEFT_OVER:
        block = Uniform(threshold, 64, draw).block(tables)
    low = word % (1 << LOW_BITS)
    uniforms = chain(
        (Uniform((word >> LOW_BITS) << 48 | more >> LOW_BITS, 64, draw), Uniform(second, 64, draw)),
        (Uniform(0, 0, draw) for _ in count()),
    )
    exponent = _steps(block, low, tables) * tables.unit.numerator, tables.unit.denominator << 64
    return block << LOW_BITS | low if _is_taken(*exponent, uniforms) else None


def _steps(block: int, low: int, tables: Tables) -> int:
    """The exponent t of a pair, in units of 1/2s²: (2m·2^L + j)·j."""
    m, width, low = max(block, -block - 1), 1 << tables.low_bits, low >> (LOW_BITS - tables.low_bits)
    j = low if block >= 0 else width - low
    return (2 * m * width + j) * j


def _is_taken(numerator: int, denominator: int, uniforms: Iterator[Uniform]) -> bool:
    """True with probability exp(-t), 0 ≤ t = numerator/denominator ≤ 1: see the module's docstring."""
    order = 1
    while next(uniforms).is_below(numerator, order * denominator):
        order += 1
    return order % 2 == 1
