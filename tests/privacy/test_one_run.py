"""Lower bounds from coins and scores: against independent computations, and wrong as rarely as they say."""

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats
from support import failures

from cloister.audits.canaries import OneRun, chance_of_guesses, guessing_bound, least_noncentrality
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.utils.errors import ConfigError


def normal_run(rng, mu, count=1000, guesses=94):
    coins = rng.random(count) < 0.5
    return OneRun(coins, mu * coins + rng.standard_normal(count), guesses)


def by_summing(m, r, v, epsilon, delta):
    """Theorem 5.2, term by term, with exact binomial coefficients."""
    q = 1 / (1 + math.exp(-epsilon))
    chance = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    steepest = max((sum(chance[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, sum(chance[v:]) + 2 * m * delta * steepest)


class TestGuesses:
    def test_the_chance_is_that_of_the_theorem(self):
        counts = [(100, 30, 30), (100, 30, 22), (1000, 94, 88), (10, 10, 0), (10, 0, 0)]
        promises = [(0.0, 0.0), (0.5, 1e-5), (2.0, 1e-3), (3.0, 0.5)]

        def check(*given):
            assert chance_of_guesses(*given) == pytest.approx(by_summing(*given), rel=1e-9)

        assert failures([(*count, *promise) for count in counts for promise in promises], check) == []

    def test_it_agrees_with_another_package(self):
        """Figures of jax_privacy 2.0 on the same counts."""
        figures = {
            (1000, 94, 91, 1e-5): 2.426778,
            (1000, 100, 100, 1e-5): 3.465376,
            (1000, 600, 450, 1e-4): 0.935475,
            (200, 42, 41, 0.0): 2.110944,
        }
        found = {given: guessing_bound(*given) for given in figures}
        assert found == pytest.approx(figures, abs=1e-4)

    def test_all_right_shows_what_so_many_guesses_can(self):
        """q^r = 0.05."""
        found = guessing_bound(1000, 94, 94, 0.0)
        assert found == pytest.approx(-math.log(0.05 ** (-1 / 94) - 1), abs=1e-6)
        assert found == pytest.approx(math.log(94 / 3), abs=0.02)

    def test_guesses_no_better_than_coins_show_nothing(self):
        assert guessing_bound(1000, 100, 55, 1e-5) == 0.0 and guessing_bound(1000, 0, 0, 1e-5) == 0.0

    def test_delta_is_taken_off(self):
        bounds = [guessing_bound(1000, 94, 91, delta) for delta in (0.0, 1e-5, 1e-4, 1e-3)]
        assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1] + 0.1

    def test_it_is_wrong_as_rarely_as_it_says(self):
        """Randomised response with ε = 1, all coins guessed: of 300 bounds at 95 % few are above 1 (chance 1e-6)."""
        rng, truth = np.random.default_rng(0), math.e / (1 + math.e)
        bound_of = cache(lambda right: guessing_bound(400, 400, right, 0.0))
        bounds = [bound_of(int(right)) for right in rng.binomial(400, truth, 300)]
        assert sum(bound > 1 for bound in bounds) <= stats.binom.isf(1e-6, 300, 0.05)
        assert np.median(bounds) > 0.7

    def test_a_catastrophe_of_chance_delta_is_no_matter_of_epsilon(self):
        """With chance δ all coins are told, else none: (0, δ)-DP for each. Rarely more than the theorem allows."""
        rng, delta, m = np.random.default_rng(1), 0.01, 100
        rights = np.where(rng.random(2000) < delta, m, rng.binomial(m, 0.5, 2000))
        wrong = sum(guessing_bound(m, m, int(v), delta) > 0 for v in rights)
        assert wrong <= stats.binom.isf(1e-6, 2000, 0.05)

    def test_the_clearest_scores_are_guessed(self):
        scores = np.array([9.0, -9.0, 8.0, 7.5, 0.0, 1.0])

        def right(*coins):
            return OneRun(np.array(coins, bool), scores, 4).right

        assert right(1, 0, 1, 0, 0, 1) == 4, "9 and 8 are taken for present, -9 and 0 for absent"
        assert right(1, 0, 1, 1, 1, 0) == 3 and right(1, 0, 0, 1, 0, 1) == 3 and right(0, 1, 0, 0, 1, 1) == 0
        assert OneRun(np.zeros(6, bool), scores, 0).right == 0


class TestGaussianShape:
    def test_it_inverts_the_noncentral_t(self):
        for t, freedom in ((3.0, 18), (20.0, 998), (0.5, 198)):
            found = least_noncentrality(t, freedom, 0.95)
            assert stats.nct.sf(t, freedom, found) == pytest.approx(0.05, abs=1e-4)

    def test_it_is_wrong_as_rarely_as_it_says_and_sees_most(self):
        rng = np.random.default_rng(0)
        bounds = np.array([normal_run(rng, 1.4).shift() for _ in range(250)])
        wrong = int((bounds > 1.4).sum())
        assert stats.binom.ppf(1e-4, 250, 0.05) <= wrong <= stats.binom.isf(1e-6, 250, 0.05)
        assert np.median(bounds) > 0.9 * 1.4

    def test_no_scale_and_no_origin_matters(self):
        run = normal_run(np.random.default_rng(1), 1.0)
        moved = OneRun(run.coins, 1e6 * run.scores - 3e7, run.guesses)
        assert moved.shift() == pytest.approx(run.shift(), rel=1e-6)

    def test_epsilon_is_that_of_one_gaussian(self):
        run = normal_run(np.random.default_rng(2), 1.0)
        assert run.gaussian(1e-5) == pytest.approx(Account([Gaussian(1 / run.shift())]).epsilon(1e-5, "pld"))

    def test_more_confidence_shows_less(self):
        run = normal_run(np.random.default_rng(3), 1.0)
        assert run.shift(0.5) > run.shift(0.95) > run.shift(0.9999) > 0

    def test_scores_that_tell_nothing_or_the_wrong_way_show_nothing(self):
        run = normal_run(np.random.default_rng(4), 0.0)
        assert run.shift(0.9999) == 0 == run.gaussian(1e-5, 0.9999)
        assert normal_run(np.random.default_rng(5), -3.0).gaussian(1e-5) == 0

    def test_scores_without_spread_tell_everything(self):
        coins = np.arange(20) % 2 == 0
        assert OneRun(coins, coins * 1.0, 10).gaussian(1e-5) == math.inf
        assert OneRun(coins, -1.0 * coins, 10).gaussian(1e-5) == 0
        assert 1e3 < OneRun(coins, coins + 1e-4 * np.arange(20), 10).gaussian(1e-5) < math.inf

    def test_coins_that_fell_the_same_way_show_nothing(self):
        for coins in (np.ones(20, bool), np.zeros(20, bool), np.arange(20) == 0):
            assert OneRun(coins, np.arange(20.0), 10).shift() == 0


def test_what_is_no_run_is_refused():
    nan = np.array([1, 2, 3, np.nan])
    for scores, guesses in ((np.ones(4), 3), (np.ones(4), 6), (np.ones(4), -2), (np.ones(3), 2), (nan, 2)):
        with pytest.raises(ConfigError, match=r"guesses must be|must have a coin"):
            OneRun(np.ones(4, bool), scores, guesses)


def test_parameters_out_of_range():
    run = normal_run(np.random.default_rng(0), 1.0)
    for bound in (run.distribution_free, run.gaussian):
        for delta, confidence in ((-0.1, 0.9), (1.0, 0.9), (0.1, 0.0), (0.1, 1.0)):
            with pytest.raises(ConfigError, match="must be"):
                bound(delta, confidence)
