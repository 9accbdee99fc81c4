"""The noise source: normal, independent, never repeated, from entropy unless asked otherwise."""

import copy
import hashlib
import math
import multiprocessing
import os
import pickle
from itertools import product

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from statistics_of_noise import FALSE_ALARM, is_normal, std_is
from support import failures

from cloister import DiscreteGaussian
from cloister.privacy.mechanisms import noise
from cloister.privacy.mechanisms.noise import BLOCK, BYTES_PER_PAIR, HALF, GaussianNoise, Maker
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.threads import spans

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [np.float32, np.float64]


def maker_of(source, workspace):
    """A maker of the source's noise in this memory."""
    return Maker(source._key, source._nonce, workspace)


def test_the_standard_deviation_is_right_and_no_other_would_do():
    def check(dtype, std):
        sample = np.zeros(200_000, dtype)
        GaussianNoise(seed=1).add(sample, std)
        assert std_is(sample, std)
        assert not std_is(sample, std * 2 / 3)
        assert not std_is(sample, std * 3 / 2)

    assert failures(product(DTYPES, [1e-6, 0.3, 7.0, 1e4]), check) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_distribution_is_normal(dtype):
    sample = GaussianNoise(seed=2).standard_normal(200_000, dtype)
    assert is_normal(sample, 1.0)
    assert not is_normal(np.random.default_rng(0).laplace(scale=2**-0.5, size=200_000), 1.0)
    assert abs(stats.kurtosis(sample)) < 6 * np.sqrt(24 / sample.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tail_is_not_cut(dtype):
    """P(|z| > 4.5) is 6.8e-6: 2e6 numbers hold about 13.6 such; Poisson bounds at a false alarm of 1e-9."""
    count = int((np.abs(GaussianNoise(seed=3).standard_normal(2_000_000, dtype)) > 4.5).sum())
    low, high = stats.poisson.ppf([FALSE_ALARM, 1 - FALSE_ALARM], 2e6 * 2 * stats.norm.sf(4.5))
    assert low <= count <= high


def test_the_two_numbers_of_a_pair_and_neighbours_are_uncorrelated():
    sample = GaussianNoise(seed=4).standard_normal(10 * noise.BLOCK).reshape(10, noise.BLOCK)
    for lag in (1, noise.HALF, noise.HALF + 1):
        a, b = sample[:, :-lag].ravel(), sample[:, lag:].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(a.size)
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 6 / np.sqrt(a.size)


def test_points_lie_evenly_on_the_circle():
    sample = GaussianNoise(seed=5).standard_normal(noise.BLOCK * 8, np.float64).reshape(8, 2, noise.HALF)
    angles = np.arctan2(sample[:, 1], sample[:, 0]).ravel()
    assert stats.kstest(angles, stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > FALSE_ALARM


def test_blocks_never_repeat():
    source = GaussianNoise()
    first, second = source.standard_normal(noise.BLOCK), source.standard_normal(noise.BLOCK)
    assert not np.intersect1d(first[:100], second).size > 5
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(noise.BLOCK)


def test_two_sources_differ_and_seeded_ones_agree():
    assert not np.array_equal(GaussianNoise().standard_normal(64), GaussianNoise().standard_normal(64))
    assert np.array_equal(GaussianNoise(seed=9).standard_normal(64), GaussianNoise(seed=9).standard_normal(64))
    assert not np.array_equal(GaussianNoise(seed=9).standard_normal(64), GaussianNoise(seed=10).standard_normal(64))
    assert GaussianNoise(seed=9).seeded and not GaussianNoise().seeded


def test_global_seeds_do_not_reach_the_noise():
    np.random.seed(0)
    first = GaussianNoise().standard_normal(64)
    np.random.seed(0)
    assert not np.array_equal(first, GaussianNoise().standard_normal(64))


def test_a_forked_process_cannot_repeat_the_noise():
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(PrivacyError, match="forked process"):
        pool.apply(_drawn_from, ())


INHERITED = GaussianNoise()


def _drawn_from():
    return INHERITED.standard_normal(4)


def test_a_copy_cannot_repeat_the_noise():
    """As whoever copies a strategy for a second run would have it."""

    def check(source, how):
        with pytest.raises(PrivacyError) as refused:
            how(source())
        assert str(refused.value) == "noise cannot be copied or pickled: both copies would add the same; make another"

    cases = product([GaussianNoise, DiscreteGaussian], [copy.copy, copy.deepcopy, pickle.dumps])
    assert failures(cases, check) == []


def test_noise_is_added_to_what_is_there():
    target = np.full(100_000, 5.0)
    GaussianNoise(seed=1).add(target, 0.1)
    assert std_is(target - 5.0, 0.1)


def test_every_number_gets_noise_whatever_the_length():
    for length in (1, noise.HALF, noise.BLOCK - 1, noise.BLOCK + 1):
        target = np.zeros(length)
        GaussianNoise(seed=1).add(target, 1.0)
        assert (target != 0).all()


def test_no_noise_is_no_noise():
    target = np.ones(10)
    GaussianNoise().add(target, 0.0)
    assert (target == 1).all()


def test_a_deviation_that_is_none_is_refused():
    def check(std):
        with pytest.raises(ConfigError, match="std must be >= 0"):
            GaussianNoise().add(np.zeros(3), std)

    assert failures([-1.0, float("nan"), float("inf")], check) == []


class TestRoomOfABlock:
    """A block must never be made of another block's bytes, or of memory that nothing was written to."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_maker_refuses_more_numbers_than_it_has_memory_for(self, dtype):
        maker = maker_of(GaussianNoise(1), np.empty(1024, dtype))
        made = maker.normals(0, 512, 1.0)
        assert len(made) == 512 and np.shares_memory(made, maker.workspace)
        with pytest.raises(PrivacyError, match=r"^a block of 513 numbers was asked of a maker of 512$"):
            maker.normals(0, 513, 1.0)

    def test_a_maker_refuses_more_numbers_than_a_block_has_in_the_stream(self):
        with pytest.raises(PrivacyError, match=rf"^a block of {BLOCK + 1} numbers was asked of a maker of {BLOCK}$"):
            maker_of(GaussianNoise(1), np.empty(8 * BLOCK)).normals(0, BLOCK + 1, 1.0)

    def test_a_span_has_a_place_for_each_of_its_blocks_and_nothing_less_will_do(self):
        def check(width):
            source, target = GaussianNoise(1), np.zeros(10 * min(width, BLOCK) + 1)
            places = source.places(spans([len(target)], width))
            numbers = [number for given in places.values() for number in given]
            assert len(numbers) == len(set(numbers)) == sum(math.ceil(len(span) / BLOCK) for span in places)
            span, given = next(iter(places.items()))
            for wrong in (given[1:], (*given, numbers[-1] + 1)):
                with pytest.raises(ValueError, match="zip"):
                    source.maker().add(span.of([target]), 1.0, wrong)

        assert failures([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK], check) == []

    def test_numbers_do_not_depend_on_what_the_memory_held(self):
        def check(dtype, count):
            made = [
                maker_of(GaussianNoise(1), np.full(2 * BLOCK, poison, dtype)).normals(3, count, 1.0).copy()
                for poison in (np.nan, 1e30)
            ]
            np.testing.assert_array_equal(*made)
            assert np.isfinite(made[0]).all()

        assert failures(product([np.float32, np.float64], [1, 2, 511, BLOCK - 1, BLOCK]), check) == []


class TestPlacesInTheStream:
    """Neighbouring blocks must not share a byte of the keystream, whatever their widths and types."""

    @pytest.fixture
    def drawn(self, monkeypatch):
        """All bytes that noise is made from, in the generator's own blocks of 16."""
        pieces, draw = [], Maker._draw

        def overheard(self, number, out):
            draw(self, number, out)
            pieces.append(bytes(out.data))

        monkeypatch.setattr(Maker, "_draw", overheard)
        return pieces

    def test_blocks_have_no_byte_in_common(self, drawn):
        def check(dtype, width):
            drawn.clear()
            source, target = GaussianNoise(11), np.zeros(4 * width, dtype)
            for span, places in source.places(spans([len(target)], width)).items():
                source.maker(dtype).add(span.of([target]), 1.0, places)
            source.add(np.zeros(BLOCK), 1.0)
            chunks = [piece[at : at + 16] for piece in drawn for at in range(0, len(piece) - 15, 16)]
            assert len(drawn) == 5 and len(set(chunks)) == len(chunks)

        assert failures(product(DTYPES, [BLOCK, BLOCK - 1, BLOCK // 2 + 2, 64]), check) == []

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_radii_of_a_block_do_not_follow_the_angles_of_the_one_before(self, dtype):
        """Under half the spacing the radius is made of the angle's bytes: the correlation would be about 0.9."""
        sample = GaussianNoise(12).standard_normal(3 * BLOCK, dtype).reshape(3, 2, HALF).astype(np.float64)
        radii, angles = np.hypot(*sample.swapaxes(0, 1)), np.abs(np.arctan2(sample[:, 1], sample[:, 0]))
        for offset in (0, HALF // 4, HALF // 2):
            a, b = radii[1:, : HALF - offset].ravel(), angles[:-1, offset:].ravel()
            for x, y in ((a, b), (np.exp(-(a**2) / 2), np.pi - b)):
                assert abs(stats.spearmanr(x, y).statistic) < 6 / np.sqrt(a.size)


class TestBitsOfARadius:
    """A radius is made of 64 bits, each of which counts: 32 would cut the tail at 6.7 standard deviations."""

    def furthest(self, monkeypatch, dtype, bits):
        """The largest number of a block whose radii are all made of these bits, at angle 0 or beside it."""

        def fixed(self, number, out):
            out[:] = 0
            out[: len(out) * 8 // BYTES_PER_PAIR[np.dtype(dtype)]].view(np.int64)[:] = bits

        monkeypatch.setattr(Maker, "_draw", fixed)
        normals = GaussianNoise(1).maker(dtype).normals(0, 128, 1.0)
        return np.abs(normals.astype(np.float64)).max()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_map_from_bits_to_radius(self, monkeypatch, dtype):
        def check(bits):
            expected = math.sqrt(-2 * math.log((abs(bits) + 0.5) * 2.0**-63))
            assert math.isclose(self.furthest(monkeypatch, dtype, bits), expected, rel_tol=1e-6)

        assert failures([0, 1, -1, 3 << 8, 1 << 31, 1 << 32, -(1 << 33), 1 << 45, 1 << 52, 1 << 61], check) == []

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_tail_ends_at_nine_point_four_and_the_middle_at_zero(self, monkeypatch, dtype):
        assert 9.41 < self.furthest(monkeypatch, dtype, 0) < 9.42
        assert self.furthest(monkeypatch, dtype, -(2**63)) == 0
        assert self.furthest(monkeypatch, dtype, 2**63 - 1) < 1e-3


def by_hand(seed, number, count, std, dtype):
    """The numbers of a block of a seeded stream, one at a time: papers can be repeated only while these stay."""
    secret = hashlib.sha256(f"cloister noise {seed}".encode()).digest()
    place = (int.from_bytes(secret[16:]) + number * BLOCK // 2) % 2**128
    pairs, width = (count + 1) // 2, 4 if dtype is np.float32 else 8
    stream = Cipher(algorithms.AES(secret[:16]), modes.CTR(place.to_bytes(16))).encryptor().update(bytes(16 * pairs))
    x, y = [], []
    for pair in range(pairs):
        bits = int.from_bytes(stream[8 * pair : 8 * pair + 8], "little", signed=True)
        at = 8 * pairs + width * pair
        turn = int.from_bytes(stream[at : at + width], "little", signed=True) / 2 ** (8 * width)
        radius = std * math.sqrt(-2 * math.log((abs(bits) + 0.5) * 2.0**-63))
        x.append(radius * math.cos(2 * math.pi * turn))
        y.append(radius * math.sin(2 * math.pi * turn))
    return np.array([*x, *y])[:count]


class TestTheStreamByHand:
    def test_every_number_of_a_block(self):
        def check(dtype, error, count):
            for seed, number, std in ((1, 0, 1.0), (5, 3, 0.25)):
                made = maker_of(GaussianNoise(seed), np.empty(256, dtype)).normals(number, count, std)
                assert made.dtype == dtype and len(made) == count
                np.testing.assert_allclose(made, by_hand(seed, number, count, std, dtype), atol=error * std * 10)

        cases = [(*first, last) for first, last in product([(np.float32, 3e-6), (np.float64, 1e-13)], [1, 2, 7, 64])]
        assert failures(cases, check) == []

    def test_the_place_of_a_block_wraps_round(self):
        source = GaussianNoise(1)
        source._nonce = 2**128 - 1
        maker = maker_of(source, np.empty(256))
        assert np.isfinite(maker.normals(1, 8, 1.0)).all()
        source._nonce = BLOCK // 2 - 1
        np.testing.assert_array_equal(maker.normals(1, 8, 1.0), maker_of(source, np.empty(256)).normals(0, 8, 1.0))

    @pytest.mark.parametrize(("dtype", "error"), [(np.float32, 3e-5), (np.float64, 1e-12)])
    def test_an_array_takes_blocks_in_order(self, dtype, error):
        source = GaussianNoise(3)
        target = np.full(BLOCK + 5, 10.0, dtype)
        source.add(target[:3], 0.5)
        source.add(target, 2.0)
        first = by_hand(3, 0, 3, 0.5, dtype)
        np.testing.assert_allclose(target[:3], 10 + first + by_hand(3, 1, BLOCK, 2.0, dtype)[:3], atol=error)
        np.testing.assert_allclose(target[BLOCK:], 10 + by_hand(3, 2, 5, 2.0, dtype), atol=error)

    def test_standard_normals_are_single_unless_asked(self):
        assert GaussianNoise(3).standard_normal(5).dtype == np.float32
        expected = by_hand(3, 0, 5, 1.0, np.float64)
        np.testing.assert_allclose(GaussianNoise(3).standard_normal(5, np.float64), expected, atol=1e-12)

    def test_places_are_numbered_in_the_order_of_the_spans(self):
        source, short = GaussianNoise(1), spans([6, 4], 4)
        assert source.places(short) == dict(zip(short, [(0,), (1,), (2,)], strict=True))
        assert list(source.places(spans([BLOCK + 1])).values()) == [(3, 4)], "a place for each block of a span"
        assert list(source.places(spans([BLOCK])).values()) == [(5,)] and source.places(spans([0])) == {}

    def test_the_key_is_of_thirty_two_bytes_of_the_operating_system(self, monkeypatch):
        asked = []
        monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or bytes(range(size)))
        source = GaussianNoise()
        assert asked == [32] and source._key == bytes(range(16)) and not source.seeded
        assert source._nonce == int.from_bytes(bytes(range(16, 32)))
        assert GaussianNoise(0).seeded

    def test_what_is_said_of_a_copy_in_another_process(self, monkeypatch):
        source = GaussianNoise(1)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(PrivacyError) as refused:
            source.places(spans([1]))
        assert str(refused.value) == (
            "noise cannot be shared with a forked process: both would add the same; make another"
        )
