"""The stream of exact noise: its law, its bits and its places; and broken twins, which the same checks must find."""

import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import product
from types import ModuleType

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from discrete_reference import Slow, fits, probabilities
from scipy import stats
from statistics_of_noise import FALSE_ALARM, std_is
from support import failures

from cloister import DiscreteGaussian
from cloister.privacy.mechanisms import discrete
from cloister.privacy.mechanisms.discrete import numpy_kernel, sampler
from cloister.privacy.mechanisms.discrete.numpy_kernel import OPEN, number_of
from cloister.privacy.mechanisms.discrete.sampler import PLACE, Maker, spares
from cloister.privacy.mechanisms.discrete.tables import tables_of
from cloister.utils import threads
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.threads import BLOCK, spans

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EDGES = Fraction(1024)
"""Blocks of four numbers: χ² sees every edge between them."""


def counts_of(sample, largest):
    return np.bincount(sample[np.abs(sample) <= largest].astype(np.int64) + largest, minlength=2 * largest + 1)


def follows(sample, scale):
    """Return whether a sample has the exact law's frequency of every single number, by χ², and its deviation."""
    largest = int(6 * scale)
    expected = len(sample) * probabilities(scale, largest)
    return fits(counts_of(sample, largest), expected) and std_is(sample / float(scale), 1.0)


class TestLaw:
    def test_every_number_has_its_probability(self, kernel):
        def check(scale):
            sample = DiscreteGaussian(scale, seed=1).integers(1_000_000)
            assert follows(sample, scale)
            assert not follows(sample + (sample % 4 == 0), scale), "nothing at the edges of blocks"
            assert not follows(np.rint(sample * 1.03), scale)

        assert failures([Fraction(256), Fraction(1000, 3), EDGES], check) == []

    def test_large_scales_by_blocks_and_by_low_bits(self, kernel):
        sample = DiscreteGaussian(seed=2).integers(1_000_000)
        blocks, edges = sample >> 16, np.arange(-1500, 1502) * 65536.0
        assert fits(counts_of(blocks, 1500), len(sample) * np.diff(stats.norm.cdf(edges / 2**24)))
        assert stats.chisquare(np.bincount((sample & 65535) >> 6)).pvalue > FALSE_ALARM
        assert stats.chisquare(np.bincount(sample & 1023)).pvalue > FALSE_ALARM
        assert std_is(sample / 2**24, 1.0)
        assert not std_is(sample / 2**24, 0.97) and not std_is(sample / 2**24, 1.03)

    def test_the_tail_is_not_cut(self, kernel):
        """P(|k| > 4.5 s) is 6.8e-6: 2e6 numbers hold about 13.6 such; Poisson bounds at a false alarm of 1e-9."""
        count = int((np.abs(DiscreteGaussian(seed=3).integers(2_000_000) / 2**24) > 4.5).sum())
        low, high = stats.poisson.ppf([FALSE_ALARM, 1 - FALSE_ALARM], 2e6 * 2 * stats.norm.sf(4.5))
        assert low <= count <= high

    @pytest.mark.parametrize("size", [3_000, pytest.param(30_000, marks=pytest.mark.slow)])
    def test_it_is_the_law_of_the_published_sampler(self, size):
        """A slow sampler in integers (Canonne, Kamath, Steinke, 2020), compared in forty cells of equal weight."""
        slow = Slow(random.Random(6).randrange)
        theirs = np.array([slow.gaussian(Fraction(300)) for _ in range(size)])
        ours = DiscreteGaussian(300, seed=6).integers(50 * size)
        edges = np.quantile(ours, np.linspace(0, 1, 41)[1:-1])
        tables = [np.bincount(np.searchsorted(edges, sample), minlength=40) for sample in (theirs, ours)]
        assert stats.chi2_contingency(tables).pvalue > FALSE_ALARM
        tables[0] = np.bincount(np.searchsorted(edges, theirs * 1.3), minlength=40)
        assert stats.chi2_contingency(tables).pvalue < FALSE_ALARM

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", [EDGES, Fraction(12345, 17)], ids=str)
    def test_every_number_has_its_probability_among_many(self, scale):
        """Of the installed kernel: another one makes the same numbers."""
        source, largest, many = DiscreteGaussian(scale), int(6 * scale), 5
        counts = sum(counts_of(source.integers(20_000_000), largest) for _ in range(many))
        assert fits(counts, 20_000_000 * many * probabilities(scale, largest))


BLOCKS = [20_000, -20_000, 1_000, -1]
"""Blocks in the tail, which numbers never reach in a test: 78 deviations, and the usual ones."""


def within(block, count=300_000, stream=Maker):
    """Low bits of numbers that all lie in one block of EDGES · 2^14, that is, with 16 low bits."""
    tables = replace(tables_of(EDGES * 2**14), first=np.full(1 << 16, block, np.int16))
    maker = stream(b"0" * 16, 9, tables)
    return np.concatenate([maker.integers(number, BLOCK) & 65535 for number in range(-(-count // BLOCK))])[:count]


def is_law_within(low, block):
    """Return whether low bits have the exact law's distribution inside of a block, in cells of 256."""
    m, j = max(block, -block - 1), np.arange(65536.0)
    j = 65536 - j if block < 0 else j
    density = np.exp(-(2 * m * 65536 + j) * j / (2 * float(EDGES * 2**14) ** 2))
    cells = density.reshape(256, 256).sum(axis=1)
    return fits(np.bincount(low >> 8, minlength=256), len(low) * cells / cells.sum())


class TestInsideOfBlocks:
    """The tail by importance: tables that always say one block leave its low bits with their exact law."""

    def test_low_bits_fall_as_the_law_does(self, kernel):
        def check(block):
            assert is_law_within(within(block), block)

        assert failures(BLOCKS, check) == []

    @pytest.mark.parametrize("block", BLOCKS[:2])
    def test_the_neighbouring_law_is_told_from_it(self, kernel, block):
        assert not is_law_within(within(block), -block)
        assert not is_law_within(within(block), block // 2)

    def test_a_word_with_one_bit_short_is_found(self, kernel):
        """The ends of the low bits, and the highest of those that are compared with exp(-t)."""

        def check(bit):
            class Short(Maker):
                def _draw(self, out):
                    super()._draw(out)
                    if len(out) % 6 == 0 and len(out) > 1 << 18:
                        out[: len(out) // 6 * 4].view(np.uint32)[:] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)

            low = within(20_000, stream=Short)
            assert not (is_law_within(low, 20_000) and fits(np.bincount(low & 1), np.full(2, len(low) / 2)))

        assert failures([0, 15, 31], check) == []


def secret_of(seed):
    """The key and the first place of a seeded stream."""
    secret = hashlib.sha256(f"cloister discrete noise {seed}".encode()).digest()
    return secret[:16], int.from_bytes(secret[16:])


def by_hand(key, nonce, tables, number, count):
    """The numbers of a block, one candidate after another."""
    place = (nonce + number * PLACE // 16) % 2**128
    stream = Cipher(algorithms.AES(key), modes.CTR(place.to_bytes(16))).encryptor()

    def read(many, size):
        drawn = stream.update(bytes(many * size))
        return [int.from_bytes(drawn[at : at + size], "little") for at in range(0, len(drawn), size)]

    def candidates(many):
        words, indices = read(many, 4), read(many, 2)
        blocks = [int(tables.first[index]) for index in indices]
        looked = [block == -32768 or word >> 16 <= max(block, ~block) for word, block in zip(words, blocks)]
        slots = iter(np.array(read(3 * sum(looked), 8), object).reshape(-1, 3))
        drawn = zip(indices, words, [next(slots) if second else (0, 0, 0) for second in looked])
        return [number_of(*bits, tables, lambda: read(1, 8)[0]) for bits in drawn]

    spares = 16 + count // 128
    made = candidates(count + spares)
    spare = [candidate for candidate in made[count:] if candidate is not None]
    while len(spare) < made[:count].count(None):
        spare += [candidate for candidate in candidates(spares) if candidate is not None]
    chosen = [spare.pop(0) if candidate is None else candidate for candidate in made[:count]]
    return [candidate >> (16 - tables.low_bits) for candidate in chosen]


class TestTheStreamByHand:
    def test_every_number_of_a_block(self, kernel):
        def check(scale, count):
            source = DiscreteGaussian(scale, seed=5)
            for number in (0, 3):
                expected = by_hand(*secret_of(5), tables_of(Fraction(scale)), number, count)
                assert source.maker().integers(number, count).tolist() == expected

        assert failures(product([1 << 24, Fraction(1000, 3), (1 << 25) - 1], [1, 7, 3000]), check) == []

    @pytest.mark.parametrize("block", BLOCKS[:2])
    def test_every_number_of_a_block_of_which_many_are_refused(self, kernel, block):
        """One in seven: the places of refused numbers are taken by spares in order, and spares are made again."""
        tables = replace(tables_of(EDGES * 2**14), first=np.full(1 << 16, block, np.int16))
        made = Maker(b"1" * 16, 7, tables).integers(2, 700)
        assert made.tolist() == by_hand(b"1" * 16, 7, tables, 2, 700)

    def test_numbers_stay_what_they_are(self, kernel):
        """Papers can be repeated only while these stay."""
        assert DiscreteGaussian(seed=1).integers(4).tolist() == [-4620852, -2563175, 12976337, -812191]
        assert DiscreteGaussian(Fraction(1000, 3), seed=1).integers(6).tolist() == [192, 25, -718, -51, -118, -524]

    def test_an_array_takes_blocks_in_order(self, kernel):
        source, other = DiscreteGaussian(seed=3), DiscreteGaussian(seed=3).maker()
        assert source.integers(3).tolist() == other.integers(0, 3).tolist()
        expected = [*other.integers(1, BLOCK).tolist(), *other.integers(2, 5).tolist()]
        assert source.integers(BLOCK + 5).tolist() == expected

    @pytest.mark.parametrize("scale", [1 << 24, Fraction(1000, 3), (1 << 25) - 1], ids=str)
    def test_kernels_make_the_same_numbers(self, scale):
        pytest.importorskip("numba", reason="the compiled kernel comes with cloister-fl[fast]")
        from cloister.privacy.mechanisms.discrete import numba_kernel

        made = []
        for each in (numpy_kernel, numba_kernel):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampler, "kernel", lambda each=each: each)
                made.append(DiscreteGaussian(scale, seed=8).integers(500_000))
        np.testing.assert_array_equal(*made)

    def test_numbers_do_not_depend_on_threads_or_on_their_order(self, kernel, monkeypatch):
        expected = DiscreteGaussian(seed=4).integers(3 * BLOCK + 7)
        monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
        monkeypatch.setattr(threads, "THREADS", 3)
        np.testing.assert_array_equal(DiscreteGaussian(seed=4).integers(3 * BLOCK + 7), expected)
        maker = DiscreteGaussian(seed=4).maker()
        for number in (2, 0, 1):
            part = expected[number * BLOCK : (number + 1) * BLOCK]
            np.testing.assert_array_equal(maker.integers(number, BLOCK), part)

    def test_numbers_do_not_depend_on_what_the_memory_held(self, kernel, monkeypatch):
        expected = DiscreteGaussian(seed=4).integers(5_000)
        empty = np.empty
        monkeypatch.setattr(np, "empty", lambda *shape, **kind: empty(*shape, **kind).view())
        maker = DiscreteGaussian(seed=4).maker()
        for poison in (0, 255):
            maker._memory[:] = poison
            np.testing.assert_array_equal(maker.integers(0, 5_000), expected)

    def test_spare_candidates_that_do_not_suffice_are_made_again(self, kernel, monkeypatch):
        monkeypatch.setattr(sampler, "spares", lambda count: 1)
        sample = DiscreteGaussian(EDGES, seed=1).integers(1_000_000)
        assert follows(sample, EDGES) and not np.array_equal(sample[:BLOCK], sample[BLOCK : 2 * BLOCK])


class TestPlacesInTheStream:
    @pytest.fixture
    def drawn(self, monkeypatch):
        """All bytes that noise is made from."""
        pieces, draw = [], Maker._draw

        def overheard(self, out):
            draw(self, out)
            pieces.append(bytes(out.data))

        monkeypatch.setattr(Maker, "_draw", overheard)
        return pieces

    def shares_nothing(self, drawn):
        chunks = [piece[at : at + 8] for piece in drawn for at in range(0, len(piece) - 7, 8)]
        return len(chunks) > 1000 and len(set(chunks)) == len(chunks)

    def test_blocks_have_no_byte_in_common(self, drawn):
        source = DiscreteGaussian(EDGES, seed=11)
        source.integers(2 * BLOCK + 5)
        source.integers(5_000)
        assert self.shares_nothing(drawn)

    def test_a_stream_that_uses_a_place_twice_is_found(self, drawn):
        source = DiscreteGaussian(EDGES, seed=11)
        source._numbers = iter([0, 1, 1])
        source.integers(2 * BLOCK + 5_000)
        assert not self.shares_nothing(drawn)

    def test_the_place_of_a_block_wraps_round(self):
        source = DiscreteGaussian(EDGES, seed=1)
        source._nonce = 2**128 - 1
        after = source.maker().integers(1, 50).tolist()
        source._nonce = PLACE // 16 - 1
        assert source.maker().integers(0, 50).tolist() == after

    def test_a_maker_refuses_more_numbers_than_it_has_memory_or_places_for(self):
        source = DiscreteGaussian(EDGES, seed=1)
        with pytest.raises(PrivacyError, match=rf"^a block of {BLOCK + 1} numbers was asked of a maker of {BLOCK}$"):
            source.maker().integers(0, BLOCK + 1)
        small = Maker(bytes(16), 0, tables_of(EDGES), numbers=100)
        assert len(small.integers(0, 100)) == 100
        with pytest.raises(PrivacyError, match=r"^a block of 101 numbers was asked of a maker of 100$"):
            small.integers(0, 101)

    def test_a_block_that_needs_more_bytes_than_its_place_has_is_refused(self, monkeypatch):
        needed = 6 * (1000 + spares(1000))
        monkeypatch.setattr(sampler, "PLACE", needed - 1)
        with pytest.raises(PrivacyError, match="used up its place in the keystream"):
            DiscreteGaussian(EDGES, seed=1).integers(1000)

    def test_a_span_has_a_place_for_each_of_its_blocks_and_nothing_less_will_do(self):
        def check(width):
            source, target = DiscreteGaussian(EDGES, seed=1), np.zeros(3 * BLOCK + 1)
            span, given = next(iter(source.places(spans([len(target)], width)).items()))
            for wrong in (given[1:], (*given, 99)):
                with pytest.raises(ValueError, match="zip"):
                    source.maker().add(span.of([target]), wrong)

        assert failures([BLOCK, BLOCK + 1, 3 * BLOCK], check) == []

    def test_the_key_is_of_thirty_two_bytes_of_the_operating_system(self, monkeypatch):
        asked = []
        monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or bytes(range(size)))
        source = DiscreteGaussian()
        assert asked == [32] and source._key == bytes(range(16)) and not source.seeded
        assert DiscreteGaussian(seed=0).seeded

    def test_a_forked_process_cannot_repeat_the_noise(self):
        with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(PrivacyError, match="forked process"):
            pool.apply(_drawn_from, ())


INHERITED = DiscreteGaussian(EDGES)


def _drawn_from():
    return INHERITED.integers(4)


class TestAddition:
    @pytest.mark.parametrize("dtype", [np.int64, np.float64])
    def test_sums_get_the_numbers_of_the_stream(self, dtype):
        start = np.arange(-5, BLOCK + 5).astype(dtype)
        sums = start.copy()
        DiscreteGaussian(EDGES, seed=2).add(sums)
        np.testing.assert_array_equal(sums - start, DiscreteGaussian(EDGES, seed=2).integers(len(start)))

    def test_what_cannot_carry_the_noise_exactly_is_refused_unchanged(self):
        source, edge = DiscreteGaussian(EDGES), 2.0**53 - 2**31
        for wrong in ([0.5], [np.nan], [np.inf], [edge], [-edge], np.int64([2**53]), np.float32([1]), [[1.0]]):
            target = np.array(wrong)
            before = target.copy()
            with pytest.raises(PrivacyError, match="exact noise is added"):
                source.add(target)
            np.testing.assert_array_equal(target, before)
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(PrivacyError, match="writable"):
            source.add(frozen)

    def test_sums_up_to_the_edge_and_none_are_accepted(self):
        source, edge = DiscreteGaussian(EDGES, seed=1), 2.0**53 - 2**31 - 1
        sums = np.array([edge, -edge])
        source.add(sums)
        assert (sums != [edge, -edge]).all() and (np.abs(sums) < 2**53).all()
        source.add(np.zeros(0))

    def test_a_scale_is_kept_as_a_fraction(self):
        assert DiscreteGaussian(Fraction(1000, 3)).scale == Fraction(1000, 3)
        with pytest.raises(ConfigError, match=r"2\^8"):
            DiscreteGaussian(scale=100)


class TestChoiceOfKernel:
    def test_numba_is_not_imported_before_a_number_is_made(self):
        script = (
            "import sys; from cloister import DiscreteGaussian; source = DiscreteGaussian();"
            "print('numba' in sys.modules); source.integers(1); print('numba' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["False", str(find_spec("numba") is not None)], done.stderr

    def test_without_numba_numpy_makes_the_numbers(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "cloister.privacy.mechanisms.discrete.numba_kernel", raising=False)
        monkeypatch.delattr(discrete, "numba_kernel", raising=False)
        monkeypatch.setitem(sys.modules, "numba", None)
        assert sampler.kernel.__wrapped__() is numpy_kernel

    def test_where_nothing_can_be_written_machine_code_is_made_anew(self, monkeypatch):
        numba_kernel = pytest.importorskip(
            "cloister.privacy.mechanisms.discrete.numba_kernel", reason="comes with cloister-fl[fast]"
        )

        def without_a_folder(**options):
            if options.get("cache"):
                raise RuntimeError("cannot cache function: no locator available")
            return lambda function: (function, options)

        monkeypatch.setattr(numba_kernel, "njit", without_a_folder)
        assert numba_kernel.compiled(len) == (len, {"nogil": True})

    def test_a_kernel_that_makes_other_numbers_is_refused(self, monkeypatch):
        numba_kernel = pytest.importorskip(
            "cloister.privacy.mechanisms.discrete.numba_kernel", reason="comes with cloister-fl[fast]"
        )
        assert sampler.agree(numpy_kernel, numba_kernel)
        right = numba_kernel.decide

        def wrong(*given):
            numbers, outcome = right(*given)
            outcome[np.flatnonzero(outcome == 1)[-1]] = 0
            return numbers, outcome

        monkeypatch.setattr(numba_kernel, "decide", wrong)
        with pytest.raises(PrivacyError, match="numba's kernel of exact noise is not NumPy's"):
            sampler.kernel.__wrapped__()

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_kernels_write_the_same_onto_a_grid(self, dtype):
        numba_kernel = pytest.importorskip(
            "cloister.privacy.mechanisms.discrete.numba_kernel", reason="comes with cloister-fl[fast]"
        )
        rng = np.random.default_rng(4)
        sums = np.concatenate([rng.standard_normal(999), np.arange(-40, 40) / 2, [-0.0, np.inf, -np.inf]]).astype(dtype)
        noise = rng.integers(-(2**30), 2**30, len(sums), np.int32)
        for scale, unit in ((1.0, 1.0), (2.0**21 / 3, 1e-9), (1e300, 1e-310), (7.0, 1e35)):
            found = []
            for kernel in (numpy_kernel, numba_kernel):
                out = np.empty(len(sums), dtype)
                with np.errstate(over="ignore"):
                    kernel.onto_grid(sums, noise, scale, unit, out)
                found.append(out.tobytes())
            assert found[0] == found[1]

    @pytest.mark.parametrize("length", [4, 6])
    def test_what_lies_behind_the_numbers_is_not_written(self, length):
        source = DiscreteGaussian(256, 1)
        (places,) = source.places(spans([5])).values()
        with pytest.raises(PrivacyError, match="5 sums"):
            source.maker().onto_grid(np.zeros(5), places, 1.0, 1.0, np.zeros(length))

    @pytest.mark.parametrize("wrong", [0.4, np.float32(1)])
    def test_a_kernel_that_writes_something_else_onto_a_grid_is_refused(self, wrong):
        """It rounds upwards a little more often, or adds in single precision."""

        def onto_grid(sums, numbers, scale, unit, out):
            if isinstance(wrong, np.float32):
                out[:] = (np.rint(sums * scale).astype(np.float32) + numbers.astype(np.float32)) * unit
            else:
                out[:] = (np.floor(sums * np.float64(scale) + wrong) + numbers) * unit

        other = ModuleType("other")
        other.look_up, other.decide, other.onto_grid = numpy_kernel.look_up, numpy_kernel.decide, onto_grid
        assert not sampler.agree(numpy_kernel, other)

    def test_of_candidates_that_need_a_second_look_a_kernel_may_say_what_it_likes(self):
        other = ModuleType("other")
        other.look_up, other.onto_grid = numpy_kernel.look_up, numpy_kernel.onto_grid

        def decide(*given):
            numbers, outcome = numpy_kernel.decide(*given)
            return np.where(outcome == OPEN, numbers + 1, numbers), outcome

        other.decide = decide
        assert sampler.agree(numpy_kernel, other)
        other.decide = lambda *given: (numpy_kernel.decide(*given)[0] + 1, numpy_kernel.decide(*given)[1])
        assert not sampler.agree(numpy_kernel, other)


class TestPrice:
    def test_the_multiplier_is_that_of_a_narrower_gaussian_rounded_down(self):
        def check(scale, distance):
            made, exact = DiscreteGaussian(scale).noise_multiplier(distance), (Fraction(scale) ** 2 - 25) / distance**2
            assert Fraction(made) ** 2 < exact < Fraction(made * (1 + 1e-12)) ** 2

        assert failures(product([256, Fraction(1000, 3), 1 << 24], [1, 1000, 1 << 20]), check) == []

    def test_a_distance_of_less_than_a_step_is_refused(self):
        with pytest.raises(PrivacyError, match="at least one step of the grid, got 0"):
            DiscreteGaussian(EDGES).noise_multiplier(0)

    def test_a_gaussian_rounded_at_random_is_the_discrete_one(self):
        """The smoothing argument by quadrature at s = 6; without the r² that is taken off, the laws differ."""

        def check(r):
            s, k = 6.0, np.arange(-60, 61)
            y = np.linspace(-50, 50, 10_001)
            exact = np.exp(-(k**2) / (2 * s**2)) / np.exp(-(k**2) / (2 * s**2)).sum()
            roundings = np.exp(-((np.arange(-80, 81)[:, None] - y) ** 2) / (2 * r**2))
            nu = 2.1 * np.exp(-2 * np.pi**2 * r**2)
            for variance, holds in ((s**2 - r**2, True), (s**2, False)):
                density = np.exp(-(y**2) / (2 * variance)) / np.sqrt(2 * np.pi * variance) * (y[1] - y[0])
                law = (roundings / roundings.sum(axis=0)) @ density
                variation = np.abs(law[20:-20] - exact).sum() / 2
                assert variation <= 3 * nu + 1e-10 if holds else variation > 1e-3

        assert failures([0.5, 0.75, 1.0], check) == []
