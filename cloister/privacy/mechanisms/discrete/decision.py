"""Reference decision of one number from its bits, in Python integers, and fallback of the fast kernels.

A candidate has 48 bits, and a slot of 192 more for the comparisons that need them. If these leave a comparison open,
further bits are drawn until it is decided. All comparisons are made in integers.

The pair of a block and low bits is taken with probability exp(-t), 0 ≤ t ≤ 1, without computing an exponential: events
of probability t/1, t/2, t/3, … are drawn until one fails, and the pair is taken if the failing event is number one,
three, five, … (von Neumann; Canonne, Kamath, Steinke, 2020, Algorithm 1). Each is one comparison with a fraction.
"""

from collections.abc import Callable, Sequence
from itertools import chain, count

from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, LOW_BITS, Tables

Draw = Callable[[], int]
"""Draws 64 further bits."""


class Uniform:
    """Uniform number in [0, 1) with known leading bits; further bits are drawn on demand.

    Args:
        drawn: the known bits, the most significant first.
        bits: their number.
        draw: draws 64 more.
    """

    def __init__(self, drawn: int, bits: int, draw: Draw) -> None:
        self._drawn, self._bits, self._draw = drawn, bits, draw

    def is_below(self, numerator: int, denominator: int) -> bool:
        """Return whether the number is below a fraction: true with exactly that probability.

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
        """Return the block whose two thresholds enclose the number."""
        while (position := tables.missing.position(self._drawn, self._bits)) is None:
            self._extend()
        return position // 2 if position % 2 == 0 else -(position // 2) - 1

    def _extend(self) -> None:
        self._drawn, self._bits = self._drawn << 64 | self._draw(), self._bits + 64


def number_of(index: int, word: int, slot: Sequence[int], tables: Tables, draw: Draw) -> int | None:
    """Return the number of a candidate's bits, as b·2^16 + low; None if it is refused.

    Args:
        index: 16 bits, into the first table.
        word: 32 bits: the upper half decides whether the pair is taken, the lower half gives the low bits.
        slot: three times 64 bits. The first: an index into the second table in its low 16 bits, and 48 bits that go on
            after the word's upper half. The second: for the thresholds. The third: for the event of probability t/2.
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
    m, width, bits = max(block, -block - 1), 1 << tables.low_bits, low >> (LOW_BITS - tables.low_bits)
    j = bits if block >= 0 else width - bits
    # 0 ≤ t = numerator/denominator ≤ 1; the pair is taken if the first failing event is number one, three, five, …
    numerator, denominator = (2 * m * width + j) * j * tables.unit.numerator, tables.unit.denominator << 64
    order = 1
    while next(uniforms).is_below(numerator, order * denominator):
        order += 1
    return block << LOW_BITS | low if order % 2 == 1 else None
