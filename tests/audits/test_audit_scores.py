"""Statistics of scores, against scores whose AUC and hits are known."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from cloister.audits import scores
from cloister.audits.client_inference import cross_fitted, log_density, ratios
from cloister.audits.scores import Evidence, auc, hits_at, interval
from cloister.utils.errors import ConfigError


def gaussians(shift, size, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(shift, 1, size), rng.normal(0, 1, size)


def evidence(present, absent):
    return Evidence("attack", "example", np.asarray(present, float), np.asarray(absent, float))


class TestAuc:
    def test_by_hand(self):
        assert auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 3.5 / 4

    def test_all_alike_is_chance(self):
        assert auc(np.zeros(5), np.zeros(7)) == 0.5

    def test_as_scikit_learn_with_ties(self):
        rng = np.random.default_rng(0)
        present, absent = rng.integers(0, 8, 50).astype(float), rng.integers(0, 6, 70).astype(float)
        expected = roc_auc_score([1] * 50 + [0] * 70, np.concatenate([present, absent]))
        assert auc(present, absent) == pytest.approx(expected)


class TestHits:
    def test_by_hand(self):
        absent = np.arange(1000.0)
        present = np.array([997.5, 998.5, 999.5, 3.0])
        assert hits_at(present, absent, 0.001) == 0.5  # one of the thousand may pass: what is above 998
        assert hits_at(present, absent, 0.0005) == 0.25  # none may: what is above 999
        assert hits_at(present, absent, 0.01) == 0.75
        assert hits_at(present, absent, 1.0) == 1.0

    def test_no_more_alarms_than_allowed_where_scores_are_equal(self):
        absent = np.array([0.0] * 50 + [1.0] * 50)
        assert hits_at(np.array([1.0, 2.0]), absent, 0.1) == 0.5

    def test_the_curve_rises_to_all(self):
        curve = evidence(*gaussians(1, 200, 0)).curve()
        alarms, hits = np.transpose(curve)
        assert alarms[0] == 1 / 200 and curve[-1] == (1.0, 1.0)
        assert (np.diff(np.log(alarms)) > 0).all() and (np.diff(hits) >= 0).all()


class TestInterval:
    def test_it_covers_the_true_auc_about_as_often_as_it_says(self, monkeypatch):
        monkeypatch.setattr(scores, "RESAMPLES", 100)
        true = stats.norm.cdf(1 / np.sqrt(2))
        covered = 0
        for seed in range(60):
            low, high = interval(auc, *gaussians(1, 40, seed), 0.95, seed)
            covered += low <= true <= high
        assert 52 <= covered <= 59

    def test_the_same_seed_gives_the_same_one(self):
        kinds = gaussians(1, 30, 0)
        assert interval(auc, *kinds, 0.95, 4) == interval(auc, *kinds, 0.95, 4) != interval(auc, *kinds, 0.95, 5)

    def test_more_confidence_is_wider(self):
        narrow, wide = (interval(auc, *gaussians(0.5, 30, 0), confidence, 0) for confidence in (0.8, 0.999))
        assert wide[0] < narrow[0] < narrow[1] < wide[1]

    def test_scores_of_one_run_are_no_runs_of_their_own(self):
        """Runs that differ for no reason, of 50 rounds each that agree: as single scores they would prove something."""
        rng = np.random.default_rng(3)
        present, absent = (rng.normal(0, 1, (3, 1)) + rng.normal(0, 0.1, (3, 50)) for _ in range(2))
        together, single = (
            Evidence("attack", "client", *kinds).auc()
            for kinds in ((present, absent), (present.ravel(), absent.ravel()))
        )
        assert together.value == single.value == pytest.approx(auc(present.ravel(), absent.ravel()))
        assert together.high - together.low > 3 * (single.high - single.low)
        assert together.low < 0.5 < together.high and not single.low < 0.5 < single.high

    def test_two_runs_of_each_kind_prove_nothing_however_far_apart(self):
        """0.025^(1/n): what a rate is not below that was 1 in n tries."""
        for size, low in ((2, 0.158), (48, 0.926)):
            found = evidence(np.full(size, 2.0), np.full(size, 1.0)).auc()
            assert (found.value, found.high) == (1, 1) and found.low == pytest.approx(low, abs=1e-3)
            assert found.beats_chance == (size > 2)


class TestControls:
    def test_a_working_attack(self):
        control = evidence(*gaussians(2, 50, 0)).has_to_succeed("open")
        assert control.met and control.expected == "succeeds" and control.measured.low > 0.5

    def test_one_that_guesses_does_not_succeed(self):
        assert not evidence(*gaussians(0, 50, 0)).has_to_succeed("open").met

    def test_shuffled_labels_fail_as_they_have_to(self):
        together = np.concatenate(gaussians(3, 50, 0))
        np.random.default_rng(1).shuffle(together)
        assert evidence(together[:50], together[50:]).has_to_fail("shuffled").met

    def test_one_that_sees_what_is_not_there_is_found_out(self):
        assert not any(evidence(*gaussians(shift, 50, 0)).has_to_fail("shuffled").met for shift in (2, -2))

    def test_four_runs_that_happen_to_be_in_order_raise_no_alarm(self):
        """Of six ways to order two runs and two others, two separate them."""
        rounds = np.linspace(0, 0.1, 20)
        high, low = (np.array(first)[:, None] + rounds for first in ([3.0, 4.0], [1.0, 2.0]))
        ordered = Evidence("attack", "client", high, low)
        assert ordered.auc().value == 1 and ordered.has_to_fail("shuffled").met
        assert not evidence(np.arange(50) + 50, np.arange(50)).has_to_fail("shuffled").met

    def test_scores_of_one_kind_are_none(self):
        with pytest.raises(ConfigError, match="scores of both kinds"):
            evidence([], [1.0])


class TestLikelihood:
    def test_by_hand(self):
        fitted = np.array([1.0, 3.0])
        assert log_density(np.array([2.0]), fitted) == pytest.approx(stats.norm.logpdf(2, 2, 1))
        expected = stats.norm.logpdf(2, 2, 1) - stats.norm.logpdf(2, 1, 1)
        assert ratios(np.array([2.0]), fitted, np.array([0.0, 2.0])) == pytest.approx(expected)

    def test_values_that_repeat_exactly_are_told_apart(self):
        present, absent = cross_fitted(np.full(6, 2.0), np.full(6, 1.0))
        assert np.isfinite([present, absent]).all() and auc(present, absent) == 1

    def test_a_difference_in_spread_alone_is_seen(self):
        rng = np.random.default_rng(0)
        wide, narrow = rng.normal(0, 5, 200), rng.normal(0, 1, 200)
        assert auc(*cross_fitted(wide, narrow)) > 0.75 > auc(wide, narrow)

    def test_nothing_is_fitted_to_itself(self):
        """With two values a kind, a fit to all of them would tell noise apart."""
        aucs = [auc(*cross_fitted(*gaussians(0, 4, seed))) for seed in range(150)]
        assert np.mean(aucs) == pytest.approx(0.5, abs=0.05)
