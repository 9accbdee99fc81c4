"""The noise source: normal, independent, never repeated, from entropy unless asked otherwise."""

import math
import multiprocessing

import numpy as np
import pytest
from scipy import stats
from statistics_of_noise import FALSE_ALARM, is_normal, std_is

from cloister.core.errors import ConfigError, PrivacyError
from cloister.core.threads import spans
from cloister.privacy.mechanisms import noise
from cloister.privacy.mechanisms.noise import BLOCK, BYTES_PER_PAIR, HALF, GaussianNoise, Maker

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [np.float32, np.float64]


def maker_of(source, workspace):
    """A maker of the source's noise in this memory."""
    return Maker(source._key, source._nonce, workspace)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [1e-6, 0.3, 7.0, 1e4])
def test_the_standard_deviation_is_right_and_no_other_would_do(dtype, std):
    sample = np.zeros(200_000, dtype)
    GaussianNoise(seed=1).add(sample, std)
    assert std_is(sample, std)
    assert not std_is(sample, std * 2 / 3)
    assert not std_is(sample, std * 3 / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_distribution_is_normal(dtype):
    sample = GaussianNoise(seed=2).standard_normal(500_000, dtype)
    assert is_normal(sample, 1.0)
    assert not is_normal(np.random.default_rng(0).laplace(scale=2**-0.5, size=500_000), 1.0)
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


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_deviation_that_is_none_is_refused(std):
    with pytest.raises(ConfigError, match="std must be >= 0"):
        GaussianNoise().add(np.zeros(3), std)


class TestRoomOfABlock:
    """A block must never be made of another block's bytes, or of memory that nothing was written to."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_maker_refuses_more_numbers_than_it_has_memory_for(self, dtype):
        maker = maker_of(GaussianNoise(1), np.empty(1024, dtype))
        assert len(maker.normals(0, 512, 1.0)) == 512
        with pytest.raises(PrivacyError, match=r"a block of 513 numbers was asked of a maker of 512$"):
            maker.normals(0, 513, 1.0)

    def test_a_maker_refuses_more_numbers_than_a_block_has_in_the_stream(self):
        with pytest.raises(PrivacyError, match=str(BLOCK + 1)):
            maker_of(GaussianNoise(1), np.empty(8 * BLOCK)).normals(0, BLOCK + 1, 1.0)

    @pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
    def test_a_span_has_a_place_for_each_of_its_blocks_and_nothing_less_will_do(self, width):
        source, target = GaussianNoise(1), np.zeros(10 * BLOCK + 1)
        places = source.places(spans([len(target)], width))
        numbers = [number for given in places.values() for number in given]
        assert len(numbers) == len(set(numbers)) == sum(math.ceil(len(span) / BLOCK) for span in places)
        span, given = next(iter(places.items()))
        for wrong in (given[1:], (*given, numbers[-1] + 1)):
            with pytest.raises(ValueError, match="zip"):
                source.maker().add(span.of([target]), 1.0, wrong)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("count", [1, 2, 511, BLOCK - 1, BLOCK])
    def test_numbers_do_not_depend_on_what_the_memory_held(self, dtype, count):
        made = [
            maker_of(GaussianNoise(1), np.full(2 * BLOCK, poison, dtype)).normals(3, count, 1.0).copy()
            for poison in (np.nan, 1e30)
        ]
        np.testing.assert_array_equal(*made)
        assert np.isfinite(made[0]).all()


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

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [BLOCK, BLOCK - 1, BLOCK // 2 + 2, 64])
    def test_blocks_have_no_byte_in_common(self, drawn, dtype, width):
        source, target = GaussianNoise(11), np.zeros(4 * width, dtype)
        for span, places in source.places(spans([len(target)], width)).items():
            source.maker(dtype).add(span.of([target]), 1.0, places)
        source.add(np.zeros(BLOCK), 1.0)
        chunks = [piece[at : at + 16] for piece in drawn for at in range(0, len(piece) - 15, 16)]
        assert len(drawn) == 5 and len(set(chunks)) == len(chunks)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_radii_of_a_block_do_not_follow_the_angles_of_the_one_before(self, dtype):
        """Under half the spacing the radius is made of the angle's bytes: the correlation would be about 0.9."""
        sample = GaussianNoise(12).standard_normal(8 * BLOCK, dtype).reshape(8, 2, HALF).astype(np.float64)
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
    @pytest.mark.parametrize("bits", [0, 1, -1, 3 << 8, 1 << 31, 1 << 32, -(1 << 33), 1 << 45, 1 << 52, 1 << 61])
    def test_the_map_from_bits_to_radius(self, monkeypatch, dtype, bits):
        expected = math.sqrt(-2 * math.log((abs(bits) + 0.5) * 2.0**-63))
        assert math.isclose(self.furthest(monkeypatch, dtype, bits), expected, rel_tol=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_tail_ends_at_nine_point_four_and_the_middle_at_zero(self, monkeypatch, dtype):
        assert 9.41 < self.furthest(monkeypatch, dtype, 0) < 9.42
        assert self.furthest(monkeypatch, dtype, -(2**63)) == 0
        assert self.furthest(monkeypatch, dtype, 2**63 - 1) < 1e-3
