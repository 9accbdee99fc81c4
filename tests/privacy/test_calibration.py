"""Noise calibrated to a budget: the least that stays within it, and what is said where none does."""

import dataclasses
import math

import pytest
from private_strategies import LAYOUT, NOMINAL, budget_in, globally, metrically, privately

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.vocabulary import UNSAMPLED
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.utils.errors import BudgetExhausted, ConfigError


def spend(budget, share):
    with budget.release(Gaussian(math.sqrt(1 / share / budget.limit)), 1):
        pass


@pytest.mark.parametrize("make", [globally, privately])
@pytest.mark.parametrize("before", [0, 3])
def test_it_fills_what_is_left_of_a_budget(tmp_path, make, before):
    budget = budget_in(tmp_path, max_epsilon=3.0)
    for number in range(before):
        with budget.release(Gaussian(8.0), number):
            pass
    strategy = make(z="auto", budget=budget, **({"distance_multiplier": 20.0} if make is privately else {}))
    found = strategy.calibrated(LAYOUT, 10)

    def after(multiplier):
        mechanism = dataclasses.replace(found.mechanism, noise_multiplier=multiplier)
        return budget.spent() + 10 * sum(map(budget.cost, mechanism.events(LAYOUT, UNSAMPLED)))

    z = found.mechanism.noise_multiplier
    assert after(z) <= budget.limit < after(z / 1.002)
    assert strategy.mechanism == dataclasses.replace(found.mechanism, noise_multiplier="auto")
    assert found.inner is strategy.inner and found.budget is budget and found.noise is strategy.noise


def test_a_mechanism_that_was_given_its_noise_is_left_as_it_is(tmp_path):
    strategy = globally(budget=budget_in(tmp_path, max_epsilon=3.0))
    assert strategy.calibrated(LAYOUT, 10) is strategy


def test_before_it_nothing_is_known_of_a_round(tmp_path):
    strategy = globally(z="auto", budget=budget_in(tmp_path, max_epsilon=3.0))
    with pytest.raises(ConfigError) as refused:
        strategy.events(LAYOUT)
    assert str(refused.value) == (
        "privacy.noise-multiplier = 'auto' has not been calibrated to privacy.max-epsilon yet"
    )


@pytest.mark.parametrize("limit", [None, 0.0])
def test_without_a_budget(tmp_path, limit):
    strategy = globally(z="auto", budget=None if limit is None else budget_in(tmp_path, max_epsilon=limit))
    with pytest.raises(ConfigError) as refused:
        strategy.calibrated(LAYOUT, 10)
    assert str(refused.value) == "a noise multiplier can only be calibrated to a budget; set privacy.max-epsilon"


def test_without_a_guarantee(tmp_path):
    with pytest.raises(ConfigError) as refused:
        metrically(z="auto", budget=budget_in(tmp_path, max_epsilon=3.0)).calibrated(LAYOUT, 10)
    assert str(refused.value) == f"nothing can be calibrated to a budget without a guarantee: {NOMINAL}"


def test_of_a_budget_that_is_nearly_spent(tmp_path):
    budget = budget_in(tmp_path, max_epsilon=2.0)
    spend(budget, 0.995)
    with pytest.raises(BudgetExhausted) as refused:
        globally(z="auto", budget=budget).calibrated(LAYOUT, 10)
    assert str(refused.value) == (
        f"{budget.ledger.path}: 99.5 % of privacy.max-epsilon = 2 is spent; what is left would take noise in which "
        "nothing can be learnt"
    )


def test_of_a_budget_of_which_little_is_left(tmp_path):
    budget = budget_in(tmp_path, max_epsilon=2.0)
    spend(budget, 0.98)
    z = globally(z="auto", budget=budget).calibrated(LAYOUT, 1).mechanism.noise_multiplier
    assert budget.cost(Gaussian(z)) == pytest.approx(0.02 * budget.limit, rel=3e-3)


@pytest.mark.parametrize("share", [0.99, 0.9900001])
def test_at_the_share_that_is_too_much(tmp_path, monkeypatch, share):
    budget = budget_in(tmp_path, max_epsilon=2.0)
    monkeypatch.setattr(budget, "spent", lambda: share * budget.limit)
    strategy = globally(z="auto", budget=budget)
    if share == 0.99:
        assert strategy.calibrated(LAYOUT, 1).mechanism.is_calibrated
    else:
        with pytest.raises(BudgetExhausted):
            strategy.calibrated(LAYOUT, 1)


def test_of_a_budget_that_was_passed(tmp_path):
    budget = budget_in(tmp_path)
    with budget.release(Gaussian(0.5), 1):
        pass
    passed = PrivacyBudget(budget.ledger, "run", max_epsilon=2.0)
    with pytest.raises(BudgetExhausted, match="past the budget of 2"):
        globally(z="auto", budget=passed).calibrated(LAYOUT, 10)


def test_where_no_noise_on_the_sum_is_enough(tmp_path):
    budget = budget_in(tmp_path, max_epsilon=2.0)
    strategy = globally(z="auto", bound=AdaptiveClip(1.0, bits_multiplier=4.0), budget=budget)
    with pytest.raises(ConfigError) as refused:
        strategy.calibrated(LAYOUT, 100)
    assert str(refused.value) == (
        "privacy.max-epsilon = 2 is passed for any privacy.noise-multiplier: what the ledger holds and what is "
        "released beside the sum in all rounds (a distance, with privacy.distance-noise-multiplier; the share of an "
        "adaptive clip, with privacy.clipping-count-noise-multiplier) already take "
        f"{100 * 100 / 16 / budget.limit:.4g} % of it"
    )


def test_what_is_beside_the_sum_may_take_all_of_it(tmp_path, monkeypatch):
    """To the last bit: then it is the sum that does not fit."""
    budget = budget_in(tmp_path, max_epsilon=2.0)
    monkeypatch.setattr(budget, "spent", lambda: budget.limit / 2)
    monkeypatch.setattr(budget, "cost", lambda event: budget.limit / 2)
    with pytest.raises(ConfigError, match=r"^no noise multiplier up to 1e\+06"):
        globally(z="auto", budget=budget).calibrated(LAYOUT, 1)


def test_where_no_noise_up_to_the_largest_is_enough(tmp_path, monkeypatch):
    budget = budget_in(tmp_path, max_epsilon=2.0)
    monkeypatch.setattr(budget, "cost", lambda event: budget.limit if event.noise_multiplier <= 1e6 else 0.0)
    strategy = globally(z="auto", budget=budget)
    with pytest.raises(ConfigError, match=r"^no noise multiplier up to 1e\+06 stays within privacy.max-epsilon = 2$"):
        strategy.calibrated(LAYOUT, 1)
    assert not strategy.mechanism.is_calibrated
