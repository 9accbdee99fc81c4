"""The server's mean in whole numbers: what one client adds, what the noise is, and that nothing else is in the sum."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import failures, random_models, zeros
from test_clipping import cohort_of

from cloister import DiscreteGaussian
from cloister.privacy.mechanisms import grid as grids
from cloister.privacy.mechanisms import release as releases
from cloister.privacy.mechanisms.clipping import capped_weights, clip
from cloister.privacy.mechanisms.discrete.sampler import MAX_EXACT, REACH
from cloister.privacy.mechanisms.grid import Adder, Grid
from cloister.privacy.mechanisms.noise import GaussianNoise, Keystream
from cloister.privacy.mechanisms.release import bounded_sum, noisy_mean
from cloister.utils.cohort import Cohort, alignment_matters, row_squares
from cloister.utils.errors import PrivacyError
from cloister.utils.threads import BLOCK

MULTIPLIERS = [1e-6, 2.0**-18, 0.003, 0.1, 0.49999999, 0.5, 1.0, 1.1, 1.9999999, 7.3, 1e3, 2.0**25, 1e9]
TOTAL = 300_000
"""Numbers of a release whose noise is looked at: several blocks."""

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def sums(monkeypatch):
    """Return the sums, span by span, of the last written release; noise is added afterwards."""
    found, right = {}, Adder.add_up

    def add_up(self, cohort, span, weights, squares, sums, sign=1):
        right(self, cohort, span, weights, squares, sums, sign)
        sums.write(found.setdefault((span.layer, span.start), np.zeros(len(span))))

    monkeypatch.setattr(Adder, "add_up", add_up)
    return lambda: np.concatenate([found.pop(place) for place in sorted(found)])


def steps_of(number):
    """Return one client's addend, in steps: as Python's integers, which do not overflow."""
    assert (number == np.rint(number)).all()
    return [int(value) for value in number]


class TestTheGrid:
    def test_noise_covers_the_continuous_one(self):
        """s² ≥ (z·D)² + 25 is what the smoothing argument takes, and hardly more noise than that is made."""

        def check(multiplier, widest):
            found = Grid.of(0.7, multiplier, 1000, widest)
            distance, scale = Fraction(multiplier) * Fraction(found.steps), found.scale
            assert found.steps <= 2**26 and 2**8 <= scale < 2**25 and scale**2 >= distance**2 + 25
            assert found.step == 0.7 / found.steps
            if multiplier >= 2.0**-18:
                assert scale < distance + Fraction(1, 16) + (widest > multiplier)

        assert failures(product(MULTIPLIERS, [0.0, 100.0]), check) == []

    def test_few_tables_serve_all_releases(self):
        scales = {Grid.of(1.0, z, 10).scale for z in np.geomspace(1e-6, 1e6, 500)}
        assert scales == {2**power for power in range(8, 25)}

    def test_the_claim_is_below_what_the_noise_covers(self):
        def check(multiplier):
            found = Grid.of(1.0, multiplier, 1)
            assert DiscreteGaussian(found.scale).noise_multiplier(int(found.steps)) >= multiplier * (1 - 2.0**-40)

        assert failures([z for z in MULTIPLIERS if z < 2**24], check) == []

    def test_it_knows_what_it_covers(self):
        def check(multiplier):
            found = Grid.of(0.7, multiplier, 1000)
            assert found.covers(multiplier) and found.covers(0.9 * multiplier) and found.covers(0.0)
            assert not found.covers(max(1.001 * multiplier, 2.0**-17.9)) and not Grid.of(0.7, 0.0, 1000).covers(
                multiplier
            )

        assert failures(MULTIPLIERS, check) == []

    def test_the_step_is_far_below_the_noise(self):
        for multiplier in (0.01, 0.5, 1.0, 3.3, 1e4):
            assert Grid.of(1.0, multiplier, 1).scale >= 2**19

    def test_a_private_multiplier_does_not_move_it(self):
        found = [Grid.of(1.0, z, 10, widest=10.0) for z in (0.07, 0.1, 1.0, 7.0, 10.0)]
        assert len({each.step for each in found}) == 1
        assert [each.scale * each.step for each in found] == pytest.approx([0.07, 0.1, 1.0, 7.0, 10.0], rel=1e-5)
        assert len({Grid.of(1.0, z, 10).step for z in (0.07, 1.0, 10.0)}) == 3

    @pytest.mark.filterwarnings("error")
    def test_what_does_not_hold_is_shortened_and_nothing_else(self):
        """Without a word about those that are 0, NaN or infinite: the node's log is no place for them."""
        weights, squares = np.array([1.0, 2.0, 0.0, 3.0, 1.0, 1.0]), np.array([100.0, 15.9, 0.0, 0.0, np.nan, np.inf])
        assert Grid(1.0, 4.0, 0).shortened(weights, squares, 0.5).tolist() == [0.2, 2.0, 0.0, 3.0, 0.0, 0.0]

    def test_too_little_noise_for_the_widest_grid_has_one_of_its_own(self):
        assert Grid.of(1.0, 0.001, 10, widest=1e6) == Grid.of(1.0, 0.001, 10)
        assert Grid.of(1.0, 0.5, 10, widest=math.inf) == Grid.of(1.0, 0.5, 10)

    def test_a_sum_that_could_pass_what_a_double_holds_is_refused(self):
        most = (MAX_EXACT - REACH) // 2**26
        assert Grid.of(1.0, 2.0**-20, most - 1).steps == 2**26
        with pytest.raises(PrivacyError) as refused:
            Grid.of(1.0, 2.0**-20, most)
        assert str(refused.value) == f"{most} contributions are more than a sum of whole numbers has room for"

    def test_without_noise_it_is_as_fine_as_the_sum_has_room_for(self):
        def check(count):
            found = Grid.of(1.0, 0.0, count)
            assert found.scale == 0 and max(count, 1) * found.steps <= 2**52 < 4 * (count + 1) * found.steps

        assert failures([0, 1, 2, 3, 1000, 10**6], check) == []


# --- what one client adds ---

TINY, HUGE = 1e-42, 1e17
"""A subnormal number of float32, and one whose square it holds not much below its end."""


def vectors(dtype, width=5000):
    """Updates that an adversary would choose, and the model that was sent."""
    rng, sent = np.random.default_rng(3), np.zeros(width, dtype)
    ones = np.ones(width)
    half = np.where(rng.random(width) < 0.5, 1.0, -1.0)
    large = 60000.0 if dtype == np.float16 else HUGE
    updates = {
        "of norm C exactly": np.eye(1, width)[0],
        "of norm C, spread": ones / math.sqrt(width),
        "one ulp above C": np.eye(1, width)[0] * (1 + 2.0**-10),
        "half steps": 0.5 * half * 2.0**-24,
        "just below whole steps": half * (1 - 2.0**-12) / math.sqrt(width),
        "subnormal": TINY * half,
        "subnormal with one large": np.where(np.arange(width) == 7, large, TINY),
        "huge": large * half,
        "signed zeros": np.copysign(0.0, half),
        "normal": rng.standard_normal(width) / math.sqrt(width),
        "far": 1000 * rng.standard_normal(width),
    }
    for name, update in updates.items():
        yield name, sent, update.astype(dtype)
    offset = np.full(width, 1000 if dtype == np.float16 else 1e7, dtype)
    yield "cancelled against the model", offset, (offset + rng.standard_normal(width)).astype(dtype)


OTHERS = {"none": 0, "a few": 3}
DTYPES = [np.float16, np.float32, np.float64]


def bounded(sent, rows, bound=1.0):
    return clip(cohort_of([{"w": row} for row in rows], {"w": sent}), bound)


def added_by_one(sums, sent, update, others, multiplier, how=noisy_mean):
    """By how many steps the sum moves for one client, beside others."""
    crowd = [sent + (0.001 * (number + 1) * np.ones_like(sent)).astype(sent.dtype) for number in range(others)]
    found = []
    for rows in ([*crowd, update], crowd):
        how(bounded(sent, rows), multiplier, 1.0, GaussianNoise(1))
        found.append(sums())
    return steps_of(found[0] - found[1])


def test_no_client_moves_the_sum_by_more_than_the_sensitivity(sums):
    """In integers. With others there, one client's joining changes nothing but its own part."""

    def check(others, dtype, multiplier):
        most = int(Grid.of(1.0, multiplier, 4).steps) ** 2
        for name, sent, update in vectors(dtype):
            moved = added_by_one(sums, sent, update, others, multiplier)
            assert sum(step**2 for step in moved) <= most, name
            alone = added_by_one(sums, sent, update, 0, multiplier)
            assert moved == alone, name

    assert failures(product(OTHERS.values(), DTYPES, [0.3, 1.0, 2.0**18]), check) == []


def test_the_sensitivity_is_reached(sums):
    (update,) = (update for name, _, update in vectors(np.float32) if name == "huge")
    moved = added_by_one(sums, np.zeros_like(update), update, 0, 1.0)
    assert math.isqrt(sum(step**2 for step in moved)) > (1 - 1e-3) * 2**24


def test_numbers_are_truncated_toward_zero(sums):
    step = Grid.of(1.0, 1.0, 1).step
    update = np.array([2.75, -2.75, 0.999, -0.999, -0.0, 1.001, -1.001]) * step
    assert added_by_one(sums, np.zeros(7), update, 0, 1.0) == [2, -2, 0, 0, 0, 1, -1]


def whole(cohort, multiplier, sums):
    noisy_mean(cohort, multiplier, 1.0, GaussianNoise(1))
    return steps_of(sums())


def test_a_contribution_that_is_longer_than_the_cohort_says_is_shortened(sums):
    """A stage that bounds wrongly, as one of another package may; the others' parts stay as they are."""

    def check(dtype, longer):
        update = np.full(64, longer / 8, dtype)
        cohort = replace(cohort_of([{"w": update}, {"w": np.full(64, 0.01, dtype)}]), l2_bound=1.0)
        other = whole(cohort.take(np.array([1])), 1.0, sums)
        found = [both - one for both, one in zip(whole(cohort, 1.0, sums), other, strict=True)]
        assert sum(step**2 for step in found) <= 2**48
        if longer < 1e10:
            assert math.sqrt(sum(step**2 for step in found)) > 0.999 * 2**24

    assert failures(product([np.float32, np.float64], [1 + 2.0**-20, 1.5, 1e3, 1e30]), check) == []


def test_what_cannot_be_measured_counts_as_zero(sums):
    def check(odd):
        update = np.array([0.1, odd, 0.1], np.float32)
        cohort = replace(cohort_of([{"w": update}, {"w": np.full(3, 0.25, np.float32)}]), l2_bound=1.0)
        cohort = replace(cohort, factors=np.ones(2))
        with np.errstate(invalid="ignore"):
            assert whole(cohort, 1.0, sums) == [2**22] * 3

    assert failures([np.nan, np.inf, -np.inf, 3e38], check) == []


class TestWhatIsBroken:
    """The checks above notice what they are for."""

    def update(self):
        """Norm just below C, every number a little more than half a step: rounding doubles it."""
        steps = Grid.of(1.0, 2.0**18, 1).steps
        width = int((steps / 0.52) ** 2)
        return np.full(width, 0.51 / steps), int(steps) ** 2

    def test_rounding_to_nearest(self, sums, monkeypatch):
        update, most = self.update()
        right = added_by_one(sums, np.zeros_like(update), update, 0, 2.0**18)
        assert sum(step**2 for step in right) == 0

        def rounded(self, cohort, span, weights, squares):
            for which, block in grids.blocks(cohort, span, self._updates):
                block *= weights[which, None]
                squares[which] = grids.row_squares(block)
                yield from np.rint(block).astype(self._integers.dtype)

        monkeypatch.setattr(grids, "kernel", lambda *_: None)
        monkeypatch.setattr(Adder, "_rows", rounded)
        wrong = added_by_one(sums, np.zeros_like(update), update, 0, 2.0**18)
        assert sum(step**2 for step in wrong) > 1.9**2 * most

    def test_no_check_of_the_norm(self, sums, monkeypatch):
        monkeypatch.setattr(Grid, "holds", lambda self, squares: np.ones(len(squares), bool))
        cohort = replace(cohort_of([{"w": np.full(64, 1.5 / 8)}]), l2_bound=1.0)
        assert sum(step**2 for step in whole(cohort, 1.0, sums)) > 2.2 * 2**48

    def test_a_sum_of_many_that_is_not_emptied_in_time(self, sums, monkeypatch):
        """Sixty-odd clients with all of C in one place pass 2^31 steps."""
        update, count = np.array([1.0, 0.0]), 70
        cohort = bounded(np.zeros(2), [update] * count)
        (one, _) = whole(cohort.take(np.array([0])), 0.3, sums)
        assert whole(cohort, 0.3, sums) == [count * one, 0] and count * one > 2**31
        monkeypatch.setattr(grids.math, "floor", lambda steps: 1)
        assert whole(cohort, 0.3, sums) != [count * one, 0]


def straddling(arrays=20, width=50):
    """An update of many arrays most of whose numbers are, on the grid, a whole number to the last bit."""
    like = {f"{number}": np.zeros(width) for number in range(arrays)}
    for seed in range(40):
        rng, update = np.random.default_rng(seed), {name: np.ones(width) for name in like}
        for array in update.values():
            array[0] = rng.uniform(1, 9)
        rest = sum(float(array @ array) for array in update.values()) - update["0"][0] ** 2
        for _ in range(4):
            cohort = clip(cohort_of([update], like), 1.0)
            weight = cohort.factors[0] / Grid.of(1.0, 1.0, 1).step
            update["0"][0] = math.sqrt((rest + update["0"][0] ** 2) * (weight / round(weight)) ** 2 - rest)
        yield like, update


def test_a_client_adds_the_same_beside_another(sums):
    """Its norm must not depend on how many are measured together, not in its last bit: all numbers would move."""
    for like, update in straddling():
        alone, beside = (clip(cohort_of(models, like), 1.0) for models in ([update], [update, like]))
        assert alone.norms[0] == beside.norms[0]
        assert whole(alone, 1.0, sums) == whole(beside, 1.0, sums)


def peeling(one, other):
    """Dot products that begin with what lies before a multiple of 16 bytes, as those of older processors do."""
    before = -one.ctypes.data % 16 // one.itemsize
    total = np.multiply(one[..., before:], other[..., before:]).cumsum(axis=-1)[..., -1]
    return np.multiply(one[..., :before], other[..., :before]).sum(axis=-1) + total


@pytest.fixture(params=[False, True], ids=["as it is", "peeling"])
def linear_algebra(request, monkeypatch):
    """That which NumPy comes with, and one that adds up in an order that follows from where numbers lie."""
    if request.param:
        monkeypatch.setattr(np, "vecdot", peeling)
    alignment_matters.cache_clear()
    assert alignment_matters() >= request.param
    yield
    alignment_matters.cache_clear()


@pytest.mark.usefixtures("linear_algebra")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_are_the_same_wherever_a_row_lies(dtype):
    rng = np.random.default_rng(2)
    for width in (3, 1000, 1025, 5000):
        row, found = rng.standard_normal(width).astype(dtype), set()
        for offset in range(20):
            for count in (1, 2, 5):
                memory = np.full(offset + count * width, 0.5, dtype)
                block = memory[offset:].reshape(count, width)
                block[-1] = row
                found.add(float(row_squares(block)[-1]))
        assert len(found) == 1, width


# --- the sum ---


def test_no_order_of_replies_shows():
    def check(multiplier, dtype):
        like = {"w": np.zeros(5000, dtype), "b": np.zeros(3, dtype)}
        sent, *models = random_models(41, 0.01, like=like)
        cohort = clip(cohort_of(models, sent), 1.0)
        turned = cohort.take(np.random.default_rng(1).permutation(40))
        found = [np.concatenate(noisy_mean(each, multiplier, 40, GaussianNoise(1)).model) for each in (cohort, turned)]
        np.testing.assert_array_equal(*found)
        if dtype == np.float64:
            floating = [np.concatenate(bounded_sum(each)) for each in (cohort, turned)]
            assert (floating[0] != floating[1]).any(), "in floating point it does"

    assert failures(product([0.0, 0.05, 1.0], [np.float32, np.float64]), check) == []


def test_without_noise_the_mean_is_that_of_the_clipped_updates():
    def check(bound):
        sent, *models = random_models(9, min(bound, 1.0), like=zeros(500))
        cohort = clip(cohort_of(models, sent), bound)
        released = noisy_mean(cohort, 0.0, 8, GaussianNoise(1))
        assert released.noise_std == 0.0
        expected = [base + total / 8 for base, total in zip(cohort.sent, bounded_sum(cohort), strict=True)]
        for piece, numbers in zip(released.model, expected, strict=True):
            np.testing.assert_allclose(piece, numbers, rtol=3e-7, atol=3e-7 * min(bound, 1.0))

    assert failures([1e-9, 1.0, 1e6], check) == []


def test_weights_count_before_the_truncation(sums):
    cohort = bounded(np.zeros(4), [np.full(4, 0.25), np.full(4, 0.25)])
    assert whole(capped_weights(cohort, (10.0, 2.5), 10.0), 1.0, sums) == [2**22 + 2**20 - 2] * 4


# --- the noise ---


def noise_in(release, like):
    return np.concatenate(release.model).astype(np.float64) - np.concatenate([piece.ravel() for piece in like.values()])


def released_noise(multiplier=1.5, bound=0.8, size=1.0, noise=None, seed=1):
    sent = {"w": np.zeros(TOTAL - 5), "b": np.zeros(5)}
    cohort = clip(cohort_of([sent], sent), bound)
    return noise_in(noisy_mean(cohort, multiplier, size, noise or GaussianNoise(seed)), sent)


def test_the_noise_is_that_which_is_claimed():
    def check(multiplier, size):
        found = released_noise(multiplier, size=size)
        std = multiplier * 0.8 / size
        assert std_is(found, std) and is_normal(found, std)
        assert not std_is(found, std * 2 / 3) and not std_is(found, std * 3 / 2)

    assert failures([(1.5, 1.0), (0.01, 1.0), (40.0, 7.5), (2.0**27, 1.0)], check) == []


def test_the_noise_is_white():
    """No number says anything of another: at these distances, and between blocks and arrays."""
    found = released_noise() / (1.5 * 0.8)
    for lag in (1, 2, 3, 64, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, TOTAL - 5):
        pairs = found[lag:] * found[: len(found) - lag]
        assert abs(pairs.sum()) < 6 * math.sqrt(len(pairs)) + 6, lag
    assert len(np.unique(found)) > 0.98 * TOTAL


def test_a_scale_that_is_off_shows(monkeypatch):
    right = Grid.of
    for share in (2 / 3, 3 / 2):
        wrong = lambda *given, share=share: replace(right(*given), scale=round(right(*given).scale * share))  # noqa: E731
        monkeypatch.setattr(releases.Grid, "of", wrong)
        monkeypatch.setattr(releases.Grid, "covers", lambda self, multiplier: True)
        assert not std_is(released_noise(1.3), 1.3 * 0.8)


def test_every_release_has_noise_of_its_own(monkeypatch):
    def correlation(noise):
        one, other = released_noise(noise=noise), released_noise(noise=noise)
        return abs(one @ other) / (np.linalg.norm(one) * np.linalg.norm(other))

    for noise in (GaussianNoise(1), GaussianNoise()):
        assert correlation(noise) < 6 / math.sqrt(TOTAL)
    monkeypatch.setattr(Keystream, "secret", lambda self: bytes(32))
    assert correlation(GaussianNoise()) == pytest.approx(1)


def test_a_release_by_hand():
    """Python's integers, and the numbers of the source that the noise has its key from."""
    sent, *models = (
        {"a": array["kernel"].astype(float), "b": array["bias"].astype(float)} for array in random_models(4)
    )
    cohort = clip(cohort_of(models, sent), 0.75)
    release = noisy_mean(cohort, 2.0, 2.5, GaussianNoise(5))
    source, steps = DiscreteGaussian(2**24, GaussianNoise(5)), Grid.of(0.75, 2.0, 3).steps
    assert (release.noise_std, release.sensitivity) == (2.0 * 0.75 / 2.5, 0.75 / 2.5)
    for layer, (piece, base) in enumerate(zip(release.model, cohort.sent, strict=True)):
        expected = source.integers(piece.size).astype(int)
        for row, factor in zip(cohort.rows, cohort.factors, strict=True):
            expected = expected + np.trunc((row[layer] - base) * (factor / (0.75 / steps))).astype(int)
        np.testing.assert_array_equal(piece, base + expected * (0.75 / steps / 2.5))


def test_a_round_without_replies_is_noise():
    sent = {"w": np.zeros(TOTAL, np.float32)}
    empty = clip(Cohort.of(cohort_of([sent]).layout, (sent["w"],), ()), 1.0)
    assert std_is(noise_in(noisy_mean(empty, 2.0, 4, GaussianNoise(1)), sent), 0.5)


def test_a_source_from_another_source():
    """A key from each next place: seeded like it, and no stretch of it twice."""
    parent, twin = GaussianNoise(3), GaussianNoise(3)
    one, two = DiscreteGaussian(2**20, parent), DiscreteGaussian(2**20, parent)
    assert one.seeded and not DiscreteGaussian(2**20, GaussianNoise()).seeded
    numbers = one.integers(1000)
    assert (numbers != two.integers(1000)).mean() > 0.99
    np.testing.assert_array_equal(numbers, DiscreteGaussian(2**20, twin).integers(1000))
    assert {parent.secret() for _ in range(100)}.isdisjoint({GaussianNoise().secret()})
    assert len({parent.secret() for _ in range(100)}) == 100
