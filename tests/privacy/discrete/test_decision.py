"""Single candidates, bit by bit: at which bit a decision turns, and that both kernels know when they cannot decide."""

from dataclasses import replace
from decimal import getcontext
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from discrete_reference import DIGITS, thresholds_of
from support import failures

from cloister.privacy.mechanisms.discrete.numpy_kernel import OPEN, REFUSED, TAKEN, Uniform, number_of
from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, tables_of

DYADIC, OTHER = tables_of(Fraction(1 << 24)), tables_of(Fraction(1000, 3))
FULL = (1 << 64) - 1


class Further:
    """Further bits that were chosen beforehand, then the same ones for ever."""

    def __init__(self, *words, then=0):
        self.words, self.then, self.drawn = list(words), then, 0

    def __call__(self):
        self.drawn += 1
        return self.words.pop(0) if self.words else self.then


def words_of(number, bits):
    """The 64-bit words of an integer, the highest first."""
    return [number >> at & FULL for at in range(bits - 64, -1, -64)]


PLACES = [*product([DYADIC, OTHER], [0, 1, 2, 500, 3000, -2, -1])]


class TestBlocks:
    """256 bits of a threshold leave it open; the next bit decides. The last thresholds lie in the tail, at 2^-64."""

    def of(self, tables, place, below):
        getcontext().prec = DIGITS
        exact = thresholds_of(tables)[range(len(tables.thresholds))[place]]
        words = words_of(int(exact * 2**256), 256)
        further = Further(*words[1:], then=0 if below else FULL)
        return Uniform(words[0], 64, further).block(tables), further

    def test_a_number_just_below_a_threshold_belongs_before_it(self):
        def check(tables, place):
            block, further = self.of(tables, place, below=True)
            assert block == tables.blocks[place] and further.drawn > 3

        assert failures(PLACES, check) == []

    def test_a_number_just_above_a_threshold_belongs_behind_it(self):
        def check(tables, place):
            block, further = self.of(tables, place, below=False)
            m, negative = divmod(range(len(tables.thresholds))[place] + 1, 2)
            assert block == (-m - 1 if negative else m) and further.drawn > 3

        assert failures(PLACES, check) == []


def test_the_furthest_tail_is_drawn_by_narrower_bounds():
    """Ones without end up to the bit 2^-700: a block at √(2·700·ln 2) = 31 deviations, past the bounds of 192 bits."""
    further = Further(*[FULL] * 10, then=0)
    block = Uniform(FULL, 64, further).block(DYADIC)
    assert 30 < abs(block) / 256 < 32 and further.drawn == 11


def test_a_uniform_number_beside_a_fraction():
    def check(numerator, denominator, drawn, further, answer, used):
        source = Further(*further)
        assert Uniform(drawn, 64, source).is_below(numerator, denominator) is answer
        assert source.drawn == used

    cases = [
        (1, 3, 0x5555555555555554, (), True, 0),
        (1, 3, 0x5555555555555555, (0x5555555555555554,), True, 1),
        (1, 3, 0x5555555555555555, (0x5555555555555555, 0x5555555555555556), False, 2),
        (1, 3, 0x5555555555555556, (), False, 0),
        (1, 1 << 64, 0, (), True, 0),
        (1, 1 << 64, 1, (), False, 0),
        (1, 1 << 65, 0, (1 << 63,), False, 1),
        (1, 1 << 65, 0, ((1 << 63) - 1,), True, 1),
        (0, 7, 0, (), False, 0),
        (7, 7, FULL, (), True, 0),
    ]
    assert failures(cases, check) == []


def slot_of(event, second=0, index=0, threshold=0):
    """A slot whose first event has these lowest 48 bits."""
    return np.array([(event % (1 << 48)) << 16 | index, threshold, second], np.uint64)


def pair_of(tables, block, low):
    """An index of this block in the first table, and t as a fraction of the definition."""
    index = int(np.flatnonzero(tables.first == block)[0])
    k = Fraction(block * 2**tables.low_bits + (low >> (16 - tables.low_bits)))
    m = max(block, -block - 1) * 2**tables.low_bits
    return index, (k**2 - m**2) / (2 * tables.scale**2)


PAIRS = [(DYADIC, 300, 40_000), (DYADIC, -300, 40_000), (DYADIC, -1, 0), (DYADIC, 700, 65_535), (OTHER, -301, 0)]


@pytest.mark.parametrize("tables, block, low", PAIRS)
class TestPairs:
    """A pair is refused when the event of probability t happens, and not that of t/2, and so on."""

    def made(self, tables, block, low, event, second, *further):
        index, _ = pair_of(tables, block, low)
        return number_of(index, event >> 48 << 16 | low, slot_of(event, second), tables, Further(*further, then=FULL))

    def test_the_first_event_ends_at_t(self, tables, block, low):
        exponent = pair_of(tables, block, low)[1]
        at, number = exponent * 2**64, block << 16 | low
        assert 0 < exponent < Fraction(1, 40)
        assert self.made(tables, block, low, int(at) + 1, FULL) == number
        assert self.made(tables, block, low, int(at) - 1, FULL) is None
        if at.denominator == 1:
            assert self.made(tables, block, low, int(at), FULL) == number, "t itself is not below t"
        else:
            rest = int((at - int(at)) * 2**64)
            assert self.made(tables, block, low, int(at), FULL, rest - 1) is None
            assert self.made(tables, block, low, int(at), FULL, rest + 1) == number

    def test_the_second_event_ends_at_half_of_t_and_the_third_at_a_third(self, tables, block, low):
        half, third = (int(pair_of(tables, block, low)[1] * 2**64 / order) for order in (2, 3))
        number = block << 16 | low
        assert self.made(tables, block, low, 0, half + 1) is None
        assert self.made(tables, block, low, 0, half - 1, third + 1) == number
        assert self.made(tables, block, low, 0, half - 1, third - 1, FULL) is None
        assert self.made(tables, block, low, 0, half - 1, third - 1, 0, FULL) == number

    def test_a_kernel_says_the_same_or_that_it_cannot_tell(self, tables, block, low, kernel):
        index, exponent = pair_of(tables, block, low)
        at, near = exponent * 2**64, []
        for event in (0, int(at / 2), *range(int(at) - 3, int(at) + 4), int(at) + 2**50):
            for second in (0, *range(int(at / 2) - 2, int(at / 2) + 3), FULL):
                near.append((event, second))
        assert agrees(kernel, tables, index, low, near)


def test_half_of_an_odd_bound_is_open(kernel):
    """A unit just below an odd integer: t/2 lies within the last bit, on which a kernel must not decide."""
    unit = Fraction(32_769) - Fraction(1, 10**15)
    tables = replace(DYADIC, unit=unit, unit_floor=np.uint64(32_768), unit_ceiling=np.uint64(32_769))
    index, low = int(np.flatnonzero(tables.first == 300)[0]), 40_001
    half = (2 * 300 * 65_536 + low) * low * 32_769 // 2
    assert agrees(kernel, tables, index, low, [(0, half + offset) for offset in (-1, 0, 1, 2**40)])


def test_a_kernel_that_compares_in_floating_point_is_found():
    """For any treatment of ties: doubles are further apart there than 2^-64."""

    def check(tie, tables, block, low):
        index, exponent = pair_of(tables, block, low)
        near = [(event, FULL) for event in range(int(exponent * 2**64) - 3, int(exponent * 2**64) + 4)]
        assert not agrees(SimpleNamespace(decide=floating(exponent, block, tie)), tables, index, low, near)

    cases = [(first, *rest) for first, rest in product([np.less, np.less_equal], [PAIRS[0], PAIRS[3], PAIRS[4]])]
    assert failures(cases, check) == []


def agrees(kernel, tables, index, low, cases):
    """Return whether a kernel's decisions are those of `number_of`, or `OPEN` where more than its 64 bits matter."""
    words = np.array([event >> 48 << 16 | low for event, _ in cases], np.uint32)
    slots = np.array([slot_of(*case) for case in cases])
    numbers, outcome = kernel.decide(np.full(len(cases), index, np.uint16), words, slots, tables)
    decided = 0
    for at, word in enumerate(words.tolist()):
        made = {number_of(index, word, slots[at], tables, Further(*bits, then=FULL)) for bits in ((), (0,), (0, 0))}
        claimed = {TAKEN: {int(numbers[at])}, REFUSED: {None}, OPEN: made}[int(outcome[at])]
        decided += outcome[at] != OPEN
        if made != claimed:
            return False
    return decided > 0


def floating(exponent, block, tie):
    """A kernel whose comparison with t is one of doubles."""

    def decide(indices, words, slots, tables):
        uniform = (words.astype(np.float64) // 65536 + (slots[:, 0] >> np.uint64(16)) * 2.0**-48) * 2.0**-16
        refused = tie(uniform, float(exponent))
        return block << 16 | (words % 65536).astype(np.int32), np.where(refused, REFUSED, TAKEN)

    return decide


class TestKernelsOfBlocks:
    @pytest.mark.parametrize("tables", [DYADIC, OTHER], ids=["s = 2^24", "s = 1000/3"])
    def test_a_threshold_itself_is_open_and_its_neighbours_are_not(self, tables, kernel):
        thresholds = [int(threshold) for threshold in tables.thresholds[[0, 1, 2, 777, -2, -1]]]
        drawn = [each + offset for each in thresholds for offset in (-1, 0, 1)] + [FULL]
        index, second = (int(np.flatnonzero(table == LEFT_OVER)[0]) for table in (tables.first, tables.second))
        slots = np.array([slot_of(0, FULL, second, each) for each in drawn])
        words = np.full(len(drawn), 0xFFFF8000, np.uint32)
        numbers, outcome = kernel.decide(np.full(len(drawn), index, np.uint16), words, slots, tables)
        expected = [tables.missing.position(each, 64) for each in drawn]
        blocks = [None if at is None else (at // 2 if at % 2 == 0 else -(at // 2) - 1) for at in expected]
        assert [None if state == OPEN else number >> 16 for number, state in zip(numbers, outcome)] == blocks
        assert blocks.count(None) >= len(thresholds) + 1

    @pytest.mark.parametrize("tables", [DYADIC, OTHER], ids=["s = 2^24", "s = 1000/3"])
    def test_candidates_at_random(self, tables, kernel):
        rng = np.random.default_rng(5)
        indices = rng.integers(0, 1 << 16, 4000, dtype=np.uint16)
        indices[::2] = rng.choice(np.flatnonzero(tables.first == LEFT_OVER), 2000)
        words = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
        words[::3] &= np.uint32(0x01FF_FFFF)
        slots = rng.integers(0, 1 << 64, (4000, 3), dtype=np.uint64)
        slots[::4, 0] |= np.uint64(0xFF00)
        taken = words.copy()
        positions = kernel.look_up(indices, taken, tables)
        numbers, outcome = kernel.decide(indices, words, slots, tables)
        assert set(np.bincount(outcome) > 0) == {True}
        for at in range(4000):
            made = number_of(int(indices[at]), int(words[at]), slots[at], tables, Further(then=FULL >> 1))
            if outcome[at] != OPEN:
                assert made == (int(numbers[at]) if outcome[at] == TAKEN else None)
            if at not in positions:
                assert made == int(taken.view(np.int32)[at])
        np.testing.assert_array_equal(taken[positions], words[positions])
