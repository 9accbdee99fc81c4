"""The median and the trimmed mean with noise: they are what they are called, and one client moves them no further."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statistics_of_noise import is_normal, std_is
from support import failures, mostly_slow, random_models, zeros
from test_clipping import cohort_of
from test_exact_release import vectors
from test_private_distance import climb

from cloister.privacy.mechanisms import release as median
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import _Ranked, noisy_trimmed_mean
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, PrivacyError, UnboundedSensitivity
from cloister.utils.registry import MEDIAN

CLIP = 0.5
NOISE = GaussianNoise(1)


def noisy_median(cohort, z, asked, noise):
    """The trimmed mean that stands for a strategy which declares a median."""
    return noisy_trimmed_mean(cohort, z, asked, MEDIAN.cuts(asked), noise)


def released(cohort, asked, trimmed=None, z=0.0, seed=1):
    noise = GaussianNoise(seed)
    found = (
        noisy_median(cohort, z, asked, noise)
        if trimmed is None
        else noisy_trimmed_mean(cohort, z, asked, trimmed, noise)
    )
    return np.concatenate(found.model).astype(np.float64)


def matrix(cohort):
    """The bounded updates as NumPy computes them, and the model that was sent."""
    sent = np.concatenate(cohort.sent).astype(np.float64)
    rows = np.array([np.concatenate(row).astype(np.float64) for row in cohort.rows]).reshape(len(cohort), len(sent))
    return (rows - sent) * cohort.factors[:, None], sent


# --- what it computes ---


@settings(max_examples=40, deadline=None, derandomize=True)
@given(asked=st.integers(1, 12), replied=st.integers(0, 12), width=st.integers(1, 3000), seed=st.integers(0, 999))
def test_against_numpy_with_zeros_for_who_did_not_reply(asked, replied, width, seed):
    sent, *models = random_models(13, 0.01, seed, zeros(width))
    cohort = clip(cohort_of(models, sent).take(np.arange(min(asked, replied))), CLIP)
    updates, origin = matrix(cohort)
    filled = np.concatenate([updates, np.zeros((asked - len(updates), updates.shape[1]))])
    np.testing.assert_allclose(released(cohort, asked), origin + np.median(filled, axis=0), atol=1e-6)
    for trimmed in range((asked + 1) // 2):
        cut = np.sort(filled, axis=0)[trimmed : asked - trimmed].mean(axis=0)
        np.testing.assert_allclose(released(cohort, asked, trimmed), origin + cut, atol=1e-6)


def test_the_trimmed_mean_is_that_of_scipy():
    cohort = clip(cohort_of(random_models(10)), 1e6)
    expected = stats.trim_mean(matrix(cohort)[0], 0.2, axis=0)
    np.testing.assert_allclose(released(cohort, 10, trimmed=2), expected, atol=1e-6)


def test_the_order_of_replies_does_not_matter():
    cohort = clip(cohort_of(random_models(7)), CLIP)
    np.testing.assert_array_equal(released(cohort, 9), released(cohort.take(np.arange(7)[::-1]), 9))


def test_threads_and_blocks_change_nothing(monkeypatch):
    cohort = clip(cohort_of(random_models(5, like=zeros(50_000))), CLIP)
    assert cohort.layout.size > 4 * median.COLUMNS
    many = released(cohort, 5, z=1.0)
    monkeypatch.setattr("cloister.utils.threads.THREADS", 1)
    np.testing.assert_array_equal(many, released(cohort, 5, z=1.0))


# --- how far one client moves it ---


def bounded(points):
    layout = Layout.of({"kernel": np.zeros(points.shape[1] - 1), "bias": np.zeros(1)})
    rows = tuple((row[:-1], row[-1:]) for row in points)
    return clip(Cohort.of(layout, (np.zeros(points.shape[1] - 1), np.zeros(1)), rows), CLIP)


def moved(points, trimmed, move):
    """Return the last client's effect on the release: by joining, or by being the last but one instead."""
    asked = len(points) - (move == "replace-one")
    full, other = points[:asked], points[:-1] if move == "add-or-remove" else np.delete(points, -2, axis=0)
    return np.linalg.norm(released(bounded(full), asked, trimmed) - released(bounded(other), asked, trimmed))


@cache
def farthest(asked, trimmed, move):
    """The furthest that a search finds one client to move the release of this many clients."""
    rng, width = np.random.default_rng(asked), 2
    clients = asked + (move == "replace-one")
    halves = np.where(np.arange(clients) % 2, 1.0, -1.0)[:, None]
    starts = [
        rng.standard_normal((clients, width)),
        halves * rng.standard_normal(width) + 0.3 * rng.standard_normal((clients, width)),
    ]
    return climb(lambda points: moved(points, trimmed, move), starts, steps=80)


CASES = [(1, None), (2, None), (5, None), (4, None), (5, 1), (6, 0)]
"""Number of clients, and of values cut off at each end; None for the median."""
MOVES = {"add-or-remove": 1, "replace-one": 2}


def kept(asked, trimmed):
    return asked - 2 * ((asked - 1) // 2 if trimmed is None else trimmed)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(("asked", "trimmed"), mostly_slow(CASES, [(5, None), (4, None), (5, 1)]))
def test_no_client_moves_it_further_than_its_noise_is_for(asked, trimmed, move):
    """Replacing moves twice as far as joining, as accountants assume; and a search comes within 10 % of either."""
    claimed = noisy_trimmed_mean(bounded(np.zeros((1, 2))), 0.0, asked, (asked - kept(asked, trimmed)) // 2, NOISE)
    assert claimed.sensitivity == CLIP / kept(asked, trimmed)
    bound, found = MOVES[move] * claimed.sensitivity, farthest(asked, trimmed, move)
    print(f"{asked} clients, {kept(asked, trimmed)} values kept, {move}: {found / bound:.1%} of the bound")
    assert 0.9 * bound <= found <= bound * (1 + 1e-9)


@pytest.mark.parametrize("move", MOVES)
def test_the_search_finds_broken_bounds_out(move):
    """C/n, as for a mean; and C/2, as if an odd number of clients had two values in the middle."""
    found = farthest(5, None, move) / MOVES[move]
    assert found > 1.5 * CLIP / 2 > 1.5 * CLIP / 5
    assert farthest(5, 1, move) / MOVES[move] > 1.4 * CLIP / 5


def test_without_the_zeros_one_client_would_move_it_twice_as_far():
    """The control for n: where a client that leaves takes its place with it, other values come into the middle."""
    points = np.array([[1.0, 0], [1, 0], [1, 0], [-1, 0], [-1, 0]])
    everybody = released(bounded(points), 5, 1)
    assert np.linalg.norm(everybody - released(bounded(points[:-1]), 5, 1)) == pytest.approx(CLIP / 3, rel=1e-4)
    assert np.linalg.norm(everybody - released(bounded(points[:-1]), 4, 1)) == pytest.approx(2 * CLIP / 3, rel=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    asked=st.integers(1, 30),
    width=st.integers(1, 200),
    seed=st.integers(0, 9999),
    spread=st.floats(-3, 3),
    cut=st.floats(0, 1),
)
def test_random_cohorts_of_any_size_keep_the_bound(asked, width, seed, spread, cut):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((asked + 1, width + 1)) * 10.0**spread * rng.choice([-1, 0, 1], (asked + 1, 1))
    trimmed = int(cut * ((asked - 1) // 2))
    for move, times in MOVES.items():
        some = points[:asked] if move == "add-or-remove" else points
        assert moved(some, trimmed, move) <= times * CLIP / kept(asked, trimmed) * (1 + 1e-9)


# --- its noise ---


def test_the_noise():
    def check(asked, trimmed):
        cohort = clip(cohort_of(random_models(4, 0.1, like=zeros(100_000))), CLIP)
        noise = released(cohort, asked, trimmed, z=3.0) - released(cohort, asked, trimmed)
        std = 3.0 * CLIP / kept(asked, trimmed)
        assert std_is(noise, std) and is_normal(noise, std)
        assert not std_is(noise, std * 2 / 3) and not std_is(noise, std * 3 / 2)

    assert failures([(5, None), (4, None), (5, 1)], check) == []


def test_it_says_what_it_did():
    cohort = clip(cohort_of(random_models(3)), CLIP)
    release = noisy_median(cohort, 3.0, 5, GaussianNoise(1))
    assert (release.noise_std, release.sensitivity) == (3.0 * CLIP, CLIP)
    assert release.model[0].dtype == np.float32


def test_nobody_replied():
    cohort = clip(cohort_of(random_models(1, like=zeros(100_000))).take(np.arange(0)), CLIP)
    assert std_is(released(cohort, 3, z=2.0), 2.0 * CLIP)


# --- what is refused ---


def test_an_unbounded_cohort():
    with pytest.raises(UnboundedSensitivity, match="clip first"):
        noisy_median(cohort_of(random_models(3)), 1.0, 3, NOISE)


def test_more_replies_than_were_asked_for():
    with pytest.raises(PrivacyError, match="4 clients replied and 3 were asked"):
        noisy_median(clip(cohort_of(random_models(4)), CLIP), 1.0, 3, NOISE)


def test_cuts_that_leave_nothing_or_are_none():
    def check(asked, trimmed):
        with pytest.raises(ConfigError, match=r"values_kept must be > 0|trimmed must be >= 0"):
            noisy_trimmed_mean(clip(cohort_of(random_models(2)), CLIP), 1.0, asked, trimmed, NOISE)

    assert failures([(4, 2), (3, 2), (4, -1)], check) == []


def test_a_multiplier_out_of_range():
    def check(z):
        with pytest.raises(ConfigError, match="noise_multiplier"):
            noisy_median(clip(cohort_of(random_models(2)), CLIP), z, 3, NOISE)

    assert failures([-1.0, math.nan, math.inf], check) == []


def test_a_bound_that_is_not_kept_is_found_out(monkeypatch):
    """Updates that were never clipped, under a bound that says they were, are made shorter; the control does not."""

    def apart():
        points = np.array([[9.0, 0], [9, 0], [0, 0]])
        free = replace(bounded(points), factors=np.ones(3))
        fewer = replace(bounded(points[1:]), factors=np.ones(2))
        return np.linalg.norm(released(free, 3) - released(fewer, 3))

    assert 0.99 * CLIP < apart() <= CLIP
    monkeypatch.setattr(Grid, "holds", lambda grid, squares: np.ones(len(squares), bool))
    assert apart() > CLIP


# --- in whole numbers ---


@pytest.fixture
def ranked(monkeypatch):
    """The sums of the values kept, in steps, before noise, of the release that was written last."""
    found, right = {}, _Ranked._sum

    def watched(self, weights, keep, source):
        def kept(span, sums, maker):
            found[span.layer, span.start] = sums.copy()
            keep(span, sums, maker)

        found.clear()
        return right(self, weights, kept, source)

    monkeypatch.setattr(_Ranked, "_sum", watched)
    return lambda: [int(step) for place in sorted(found) for step in found[place]]


def whole_sums(ranked, rows, asked, trimmed, z=1.0):
    """By integers alone: rows that are not there reply nothing."""
    layout = Layout.of({"w": rows[0]})
    cohort = clip(Cohort.of(layout, (np.zeros_like(rows[0]),), tuple((row,) for row in rows)), 1.0)
    noisy_trimmed_mean(cohort, z, asked, trimmed, GaussianNoise(1))
    return np.array(ranked(), object)


def test_no_client_moves_it_by_more_steps_than_the_sensitivity(ranked):
    def check(z, dtype, asked, trimmed):
        most, rng, reached = int(Grid.of(1.0, z, asked).steps) ** 2, np.random.default_rng(asked), []
        for name, _, update in vectors(dtype, width=300):
            if name == "cancelled against the model":
                continue
            halves = [sign * (np.abs(update) > 0) for sign in (1.0, -1.0, 1.0, -1.0, 0.0)]
            crowds = [halves[: asked - 1], [row.astype(dtype) for row in rng.standard_normal((asked - 1, 300))]]
            for crowd in crowds:
                others = [row.astype(dtype) for row in crowd]
                beside, alone, against = (
                    whole_sums(ranked, [*others, own], asked, trimmed, z)
                    for own in (update, np.zeros_like(update), -update)
                )
                assert sum((beside - alone) ** 2) <= most and sum((beside - against) ** 2) <= 4 * most, name
                reached.append(sum((beside - alone) ** 2) / most)
        assert z > 1 or max(reached) > 0.99

    cases = [
        *((0.3, np.float16, 1, 0), (0.3, np.float32, 4, 1), (0.3, np.float64, 5, 1)),
        *((1.0, np.float16, 4, 1), (1.0, np.float32, 5, 1), (1.0, np.float64, 1, 0)),
        *((2.0**18, np.float16, 5, 1), (2.0**18, np.float32, 1, 0), (2.0**18, np.float64, 4, 1)),
    ]
    assert failures(cases, check) == []


def test_it_is_the_sum_of_the_whole_numbers_in_the_middle(ranked):
    """By hand, with Python's integers."""
    rng, step = np.random.default_rng(2), Grid.of(1.0, 1.0, 3).step
    rows = [row / np.linalg.norm(row) / 2 for row in rng.standard_normal((5, 40))]
    numbers = [[int(value * (1 / step)) for value in row] for row in [*rows, np.zeros(40)]]
    for trimmed in (0, 1, 2):
        expected = [sum(sorted(values)[trimmed : 6 - trimmed]) for values in zip(*numbers, strict=True)]
        assert whole_sums(ranked, rows, 6, trimmed).tolist() == expected


def test_values_that_are_rounded_to_the_nearest_step_are_found_out(ranked, monkeypatch):
    """The broken twin: an update of nearly C, all of it little more than half steps, counts twice."""
    steps = Grid.of(1.0, 2.0**18, 2).steps
    own = np.full(int((steps / 0.52) ** 2), 0.51 / steps)

    def moved():
        sums = [whole_sums(ranked, [row], 2, 0, 2.0**18) for row in (own, np.zeros_like(own))]
        return sum((sums[0] - sums[1]) ** 2)

    assert moved() == 0

    def nearest(self, columns, span, weights, squares, scratch):
        columns[:] = 0
        columns[:1] = np.rint(median.updates(self.cohort.rows, self.cohort.sent, span, scratch) * weights[:, None])

    monkeypatch.setattr(_Ranked, "_fill", nearest)
    assert moved() > 1.9**2 * steps**2


def test_what_cannot_be_measured_counts_as_zero(ranked):
    good = np.array([0.25, 0.25, 0.25], np.float32)
    for odd in (np.nan, np.inf, 3e38):
        layout = Layout.of({"w": good})
        bad = np.array([0.1, odd, 0.1], np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            cohort = Cohort.of(layout, (np.zeros(3, np.float32),), ((bad,), (good,)))
            noisy_trimmed_mean(replace(cohort, l2_bound=1.0), 1.0, 2, 0, GaussianNoise(1))
        assert ranked() == [2**22] * 3


def test_a_private_multiplier_does_not_move_the_grid():
    zero = {"w": np.zeros(1000)}
    cohort, step = clip(cohort_of([zero, zero], zero), CLIP), Grid.of(CLIP, 10.0, 1).step
    for z in (0.1, 1.0, 7.0):
        made = noisy_trimmed_mean(cohort, z, 3, 1, GaussianNoise(1), widest=10.0)
        assert made.noise_std == z * CLIP
        on_the_widest = made.model[0] / step
        assert np.abs(on_the_widest - np.rint(on_the_widest)).max() < 1e-6
        own = noisy_trimmed_mean(cohort, z, 3, 1, GaussianNoise(1)).model[0] / step
        assert np.abs(own - np.rint(own)).max() > 0.1
